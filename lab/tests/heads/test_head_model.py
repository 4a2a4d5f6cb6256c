"""The head against an engine written out: one token at a time, with a cache, as vLLM's proposer
runs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from assay_lab.heads.drafting import draft, losses, padded, walk
from assay_lab.heads.export import read_head
from assay_lab.heads.observed import observe

pytestmark = pytest.mark.engine


def norm(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x: Any, position: int, theta: float) -> Any:
    """x [heads, D] at a position: pairs (i, i + D/2) turn by position · θ^(−2i/D)."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], 1
    )


class Engine:
    """The drafter of an engine in numpy, from the tensors of the file, by vLLM's names of
    things.
    """

    def __init__(self, folder: Path, embedding: Any) -> None:
        from safetensors.torch import load_file

        self.t = {n: x.double().numpy() if x.is_floating_point() else x.numpy()
                  for n, x in load_file(folder / "model.safetensors").items()}  # fmt: skip
        self.c, self.embedding, self.cache = (
            json.loads((folder / "config.json").read_text()),
            embedding,
            {},
        )

    def one(self, token: int, hidden: Any, position: int) -> tuple[int, Any]:
        """Forward of one token: its keys and values go to the cache at `position`; (drafted token,
        state before the norm).
        """
        t, c = self.t, self.c
        eps, d = c["rms_norm_eps"], c["head_dim"]
        x = np.concatenate([
            norm(self.embedding[token], t["midlayer.input_layernorm.weight"], eps),
            norm(hidden, t["midlayer.hidden_norm.weight"], eps),
        ])  # fmt: skip
        q, k, v = ((t[f"midlayer.self_attn.{n}_proj.weight"] @ x).reshape(-1, d) for n in "qkv")
        self.cache[position] = (rotate(k, position, c["rope_theta"]), v)
        q, heads = rotate(q, position, c["rope_theta"]), []
        for h in range(len(q)):
            g = h // (len(q) // len(k))
            scores = np.array([self.cache[i][0][g] @ q[h] for i in range(position + 1)]) / np.sqrt(
                d
            )
            weights = np.exp(scores - scores.max())
            values = np.array([self.cache[i][1][g] for i in range(position + 1)])
            heads.append(weights @ values / weights.sum())
        residual = hidden + t["midlayer.self_attn.o_proj.weight"] @ np.concatenate(heads)
        y = norm(residual, t["midlayer.post_attention_layernorm.weight"], eps)
        gate = t["midlayer.mlp.gate_proj.weight"] @ y
        up = gate / (1 + np.exp(-gate)) * (t["midlayer.mlp.up_proj.weight"] @ y)
        residual = residual + t["midlayer.mlp.down_proj.weight"] @ up
        logits = t["lm_head.weight"] @ norm(residual, t["norm.weight"], eps)
        best = int(logits.argmax())
        return best + int(t["d2t"][best]), residual


@pytest.fixture(scope="module")
def parts(trained: Any, target: Path) -> Any:
    import transformers

    folder, _ = trained
    model = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    return folder, read_head(folder, target), model


def test_drafts_are_those_of_an_engine_with_a_cache(parts: Any) -> None:
    folder, head, model = parts
    depth = 3
    ids = [int(i) for i in np.random.default_rng(5).integers(0, 250, 24)]
    seen = observe(model, *padded([ids], "cpu"), head.config.aux_layers)
    ours = draft(head, model, seen, depth)[0].tolist()
    embedding = model.get_input_embeddings().weight.detach().double().numpy()
    # The aux states by ids of hidden states: i is the output of layer i − 1, before any norm.
    outputs: list[Any] = []
    hooks = [
        layer.register_forward_hook(lambda m, a, out: outputs.append(out))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    states = [out[0] if isinstance(out, tuple) else out for out in outputs]
    aux = torch.cat([states[i - 1][0] for i in (2, 4, 5)], -1).double().numpy()
    fc = Engine(folder, embedding).t["fc.weight"]
    for p in (5, 11, 20):
        engine = Engine(folder, embedding)
        for i in range(p + 1):  # the target's states of all accepted positions first
            token, hidden = engine.one(ids[i + 1], fc @ aux[i], i)
        theirs = [token]
        for j in range(1, depth):
            token, hidden = engine.one(token, hidden, p + j)
            theirs.append(token)
        assert ours[p] == theirs


def test_the_loss_of_later_steps_reads_the_heads_own_states(parts: Any) -> None:
    _, head, model = parts
    ids, mask = padded([list(range(10, 40)), list(range(40, 60))], "cpu")
    seen = observe(model, ids, mask, head.config.aux_layers)
    both = losses(head, model, seen, 3)
    first = losses(head, model, seen, 1)
    assert both.by_step[0] == pytest.approx(float(first.by_step[0]), rel=1e-5)
    # Where the head drafts what the text says, each step of teacher forcing agrees with the drafts
    # that it feeds itself.
    drafts = draft(head, model, seen, 3)
    right = (drafts[:, :-2, 0] == ids[:, 2:])[mask[:, 2:]]
    assert right.float().mean() > 0.3


def test_a_walk_counts_what_an_engine_would() -> None:
    text = list(range(100, 112))
    #        row n − 1 drafts the tokens after n
    drafts = [[0, 0, 0] for _ in text]
    drafts[2] = [104, 105, 0]  # after token 3: two right
    drafts[5] = [107, 108, 109]  # after 3 + 2 + 1 = 6: all right
    found = walk(text, drafts, 3)
    assert (found.steps, found.accepted) == (2, (2, 2, 1))
    assert walk(text, drafts, 0).steps == 0
    assert walk(text[:5], drafts, 3).steps == 0
