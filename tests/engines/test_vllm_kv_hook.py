"""Hooks on K and V against attention written as vLLM writes it: shared RoPE in place,
packed heads.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from assay.engines.scoring import HookSpec
from assay.engines.vllm.kv_hooks import KvHooks
from assay.errors import AssayError

TOKENS, HEADS, KV_HEADS, WIDTH, LAYERS = 6, 4, 2, 8, 3
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 5])


class Rope(torch.nn.Module):
    """Rotates in place, as vLLM's kernel does."""

    def forward(self, positions: Any, query: Any, key: Any) -> tuple[Any, Any]:
        for x in (query, key):
            heads = x.view(TOKENS, -1, WIDTH)
            first, second = heads[..., : WIDTH // 2].clone(), heads[..., WIDTH // 2 :].clone()
            angle = positions[:, None, None] * torch.arange(1, WIDTH // 2 + 1) / 10
            heads[..., : WIDTH // 2] = first * angle.cos() - second * angle.sin()
            heads[..., WIDTH // 2 :] = second * angle.cos() + first * angle.sin()
        return query, key


class Seen(torch.nn.Module):
    """Stands for attention: keeps what it was called with."""

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        self.seen = (query.clone(), key.clone(), value.clone())
        return query


class LlamaAttention(torch.nn.Module):
    num_kv_heads = KV_HEADS

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HEADS * WIDTH, (HEADS + 2 * KV_HEADS) * WIDTH, bias=False)
        self.rotary_emb = rope
        self.attn = Seen()

    def forward(self, positions: Any, hidden: Any) -> Any:
        q, k, v = self.qkv(hidden).split(
            [HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], dim=-1
        )
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        rope = Rope()
        self.layers = torch.nn.ModuleList(LlamaAttention(rope) for _ in range(LAYERS))

    def run(self) -> list[tuple[Any, Any, Any]]:
        hidden = torch.randn(TOKENS, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            for layer in self.layers:
                layer(POSITIONS, hidden)
        return [layer.attn.seen for layer in self.layers]


class Recording:
    """The hook: multiplies K by `k_factor` and adds `v_shift` to V, keeps what it saw."""

    seen: ClassVar[list[tuple[int, Any, Any, Any]]] = []

    def __init__(
        self, placement: str, k_factor: float = 1.0, v_shift: float = 0.0, cut: bool = False
    ) -> None:
        self.placement, self.k_factor, self.v_shift, self.cut = placement, k_factor, v_shift, cut
        Recording.seen = []

    def on_kv(self, layer: int, k: Any, v: Any, positions: Any) -> tuple[Any, Any]:
        Recording.seen.append((layer, k.clone(), v.clone(), positions.clone()))
        return (k[1:] if self.cut else k * self.k_factor), v + self.v_shift


def hook(model: Any, eager: bool = True, target: str = "Recording", **config: Any) -> KvHooks:
    return KvHooks(HookSpec(f"{__name__}:{target}", config), model, eager=eager)


@pytest.mark.parametrize("placement", ["pre_rope", "post_rope"])
def test_identity_changes_nothing_and_fires_once_a_layer(placement: str) -> None:
    model = Model()
    plain = model.run()
    hooks = hook(model, placement=placement)
    for before, after in zip(plain, model.run(), strict=True):
        for x, y in zip(before, after, strict=True):
            assert torch.equal(x, y)
    hooks.commit()
    assert hooks.engagement().per_layer == {0: 1, 1: 1, 2: 1}
    hooks.remove()
    model.run()
    assert hooks.engagement().fires == 3
    assert [n for n, _ in model.layers[0].named_children()] == ["qkv", "attn", "rotary_emb"]


@pytest.mark.parametrize("placement", ["pre_rope", "post_rope"])
def test_it_sees_k_at_its_place_by_head_and_changes_what_attention_gets(placement: str) -> None:
    model = Model()
    plain = model.run()
    hooks = hook(model, placement=placement, k_factor=2.0, v_shift=1.0)
    changed = model.run()
    for layer, k, v, positions in Recording.seen:
        assert k.shape == v.shape == (TOKENS, KV_HEADS, WIDTH)
        assert torch.equal(positions, POSITIONS)
        rotated = plain[layer][1].view(k.shape)
        # Position 0 is not rotated, others are.
        same = (k == rotated).all(-1).all(-1)
        assert same.tolist() == (
            [True] * TOKENS if placement == "post_rope" else [True, False, False] * 2
        )
    for (q0, k0, v0), (q1, k1, v1) in zip(plain, changed, strict=True):
        assert torch.equal(q0, q1)
        torch.testing.assert_close(k1, 2 * k0)
        torch.testing.assert_close(v1, v0 + 1)
    hooks.remove()


def test_a_skipped_layer_is_an_error() -> None:
    model = Model()
    hooks = hook(model, placement="pre_rope")
    model.layers = model.layers[:2]
    model.run()
    with pytest.raises(AssayError, match=r"skipped in layers \[2\]"):
        hooks.commit()
    hooks.discard()
    with pytest.raises(AssayError, match=r"skipped in layers \[0, 1, 2\]"):
        hooks.commit()


def test_another_shape_is_refused() -> None:
    model = Model()
    hook(model, placement="pre_rope", cut=True)
    with pytest.raises(AssayError, match="changed k of layer 0"):
        model.run()


class ForTransformers:
    """Has no on_kv."""


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"eager": False, "placement": "pre_rope"}, "CUDA graphs"),
        ({"target": "ForTransformers"}, "no on_kv"),
        ({"target": "Nothing"}, "cannot be loaded"),
    ],
)
def test_what_cannot_work_is_refused(case: dict[str, Any], said: str) -> None:
    with pytest.raises(AssayError, match=said):
        hook(Model(), **case)


def test_unknown_attention_is_refused() -> None:
    model = Model()
    model.layers[1].__class__ = type(
        "MixedAttention", (torch.nn.Module,), {"forward": LlamaAttention.forward}
    )
    with pytest.raises(AssayError, match="MixedAttention"):
        hook(model, placement="pre_rope")
    with pytest.raises(AssayError, match="0 attention layers"):
        hook(torch.nn.Linear(2, 2), placement="pre_rope")
