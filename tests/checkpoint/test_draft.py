"""A separate draft against its target, from headers alone."""

from __future__ import annotations

from typing import Any

import pytest

from assay.checkpoint.structure import aux_layers, check_draft, is_draft, is_eagle3
from assay.checkpoint.subject import Checkpoint
from checkpoint.head_samples import Shapes, checkpoint, family, rows

LAYER = """
{at}.self_attn.q_proj.weight A {reads}*H
{at}.self_attn.k_proj.weight K {reads}*H
{at}.self_attn.v_proj.weight K {reads}*H
{at}.self_attn.o_proj.weight H A
{at}.mlp.gate_proj.weight I H
{at}.mlp.up_proj.weight I H
{at}.mlp.down_proj.weight H I
"""
DIMENSIONS = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320, "num_hidden_layers": 1}


def table(text: str, **words: Any) -> Shapes:
    return {name: ("BF16", shape) for name, shape in rows(text.format(**words))}


def eagle3(config: dict[str, Any] | None = None, **tensors: tuple[str, tuple[int, ...]]) -> Checkpoint:
    """EAGLE-3 for a target of hidden size 64 and 320 tokens."""
    settings = (
        DIMENSIONS | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 96} | (config or {})
    )
    shapes = table("fc.weight H 3*H\nnorm.weight H\nlm_head.weight 96 H\n" + LAYER, at="midlayer", reads=2)
    shapes |= {"d2t": ("I64", (96,)), "t2d": ("BOOL", (320,))}
    changed = {name.replace("__", "."): value for name, value in tensors.items()}
    return checkpoint(settings, {n: t for n, t in (shapes | changed).items() if t[1] != ()})


def eagle(config: dict[str, Any] | None = None, fc: tuple[int, int] = (64, 128)) -> Checkpoint:
    settings = DIMENSIONS | {"architectures": ["EagleLlamaForCausalLM"]} | (config or {})
    return checkpoint(settings, table(LAYER, at="layers.0", reads=1) | {"fc.weight": ("BF16", fc)})


def target(**config: Any) -> Checkpoint:
    return checkpoint(DIMENSIONS | {"num_hidden_layers": 4} | config, {"model.norm.weight": ("BF16", (64,))})


GONE: tuple[str, tuple[int, ...]] = ("BF16", ())


@pytest.mark.parametrize("draft", [eagle3(), eagle()], ids=["eagle-3", "eagle"])
def test_a_fitting_pair_raises_nothing(draft: Checkpoint) -> None:
    assert is_draft(draft)
    assert list(check_draft(draft, target())) == []
    assert list(check_draft(draft, None)) == []


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (eagle3(fc__weight=("BF16", (64, 128))), "fc.weight"),
        (eagle3({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}}), "4 hidden states"),
        (eagle3(d2t=("I64", (95,))), "d2t"),
        (eagle3(t2d=("BOOL", (300,))), "t2d"),
        (eagle3(d2t=GONE), "no d2t map"),
        (eagle3(lm_head__weight=("BF16", (320, 64))), "lm_head.weight"),
        (eagle3(midlayer__self_attn__q_proj__weight=("BF16", (64, 64))), "reads 64"),
        (eagle3({"vocab_size": 400}, t2d=("BOOL", (320,))), "vocab_size 400"),
        (eagle3({"target_hidden_size": 128}), "hidden_size 128"),
        (eagle(fc=(64, 64)), "embedding and hidden state"),
        (eagle({"hidden_size": 32}), "hidden states of 32"),
    ],
)
def test_what_does_not_fit_is_named(draft: Checkpoint, says: str) -> None:
    found = list(check_draft(draft, target()))
    assert found
    assert {f.id for f in found} == {"checkpoint.draft_mismatch"}
    assert any(says in f.title for f in found), [f.title for f in found]


def test_a_draft_of_another_width_may_read_a_wider_target() -> None:
    settings = {"target_hidden_size": 128}
    assert list(check_draft(eagle3(settings, fc__weight=("BF16", (64, 384))), target(hidden_size=128))) == []
    assert list(check_draft(eagle3(settings, fc__weight=("BF16", (64, 384))), target(hidden_size=256))) != []


def test_how_many_hidden_states_are_read() -> None:
    assert aux_layers({}) == 3
    assert aux_layers({"num_aux_hidden_states": 5}) == 5
    assert aux_layers({"eagle_aux_hidden_state_layer_ids": [2, 9]}) == 2
    assert aux_layers({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}) == 1


def test_a_model_is_no_draft() -> None:
    config, backbone, head = family("qwen3_5")
    assert not is_draft(checkpoint(config, backbone, head))
    assert is_eagle3(eagle3())
    assert not is_eagle3(eagle())
