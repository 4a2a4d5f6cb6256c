"""Tensor lists of transformers' own models, for the families that assay has no list of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.checkpoint.comparison import Comparison
from assay.checkpoint.lists import check_unlisted, choose_list
from assay.checkpoint.meta_model import compare_with_transformers, stored_names
from assay.checkpoint.patterns import check_patterns, check_towers
from assay.checkpoint.safetensors import Header
from assay.checkpoint.subject import Checkpoint
from assay.checkpoint.tensors import DTYPE_BITS, Tensor

Shapes = dict[str, tuple[int, ...]]


def made(
    config: dict[str, Any], shapes: Shapes, dtypes: dict[str, str] | None = None
) -> Checkpoint:
    """A checkpoint of nothing but a config and a header."""
    tensors, at = [], 0
    for name, shape in shapes.items():
        dtype, size = (dtypes or {}).get(name, "BF16"), 1
        for dimension in shape:
            size *= dimension
        end = at + size * DTYPE_BITS[dtype] // 8
        tensors.append(Tensor(name, dtype, shape, "model.safetensors", at, end))
        at = end
    text = json.dumps(config).encode()
    files = {"config.json": len(text), "model.safetensors": at}
    headers = {"model.safetensors": Header("model.safetensors", at, 0, tuple(tensors))}
    return Checkpoint("folder", files, lambda name: text, headers)


GRANITE = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": False,
}  # fmt: skip


def granite() -> Shapes:
    """Names and shapes of the layout that `GRANITE` describes."""
    shapes: Shapes = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,)}
    for i in range(2):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{n}_layernorm.weight": (32,) for n in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{n}_proj.weight": (32, 32) for n in ("q", "o")}
        shapes |= {f"{at}self_attn.{n}_proj.weight": (16, 32) for n in ("k", "v")}
        shapes |= {f"{at}mlp.{n}_proj.weight": (48, 32) for n in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (32, 48)
    return shapes | {"lm_head.weight": (64, 32)}


def without(shapes: Shapes, *parts: str) -> Shapes:
    return {n: s for n, s in shapes.items() if not any(p in n for p in parts)}


@pytest.mark.engine
def test_what_transformers_owes_is_missed() -> None:
    whole = compare_with_transformers(made(GRANITE, granite()))
    assert (whole.problem, whole.missing, dict(whole.wrong)) == ("", (), {})
    assert whole.origin.startswith("transformers ")
    lost = compare_with_transformers(made(GRANITE, without(granite(), "lm_head", "1.mlp.up")))
    assert sorted(lost.missing) == ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"]
    wider = {**granite(), "model.layers.0.mlp.up_proj.weight": (50, 32)}
    assert dict(compare_with_transformers(made(GRANITE, wider)).wrong) == {
        "model.layers.0.mlp.up_proj.weight": ((50, 32), (48, 32))
    }


@pytest.mark.engine
def test_names_of_another_layout_are_not_taken_for_losses() -> None:
    other = {name.replace("self_attn", "attention"): s for name, s in granite().items()}
    assert "names are not those of" in compare_with_transformers(made(GRANITE, other)).problem


@pytest.mark.engine
def test_code_of_a_checkpoint_is_never_asked_for(tmp_path: Path) -> None:
    config = {**GRANITE, "model_type": "evil", "auto_map": {"AutoModelForCausalLM": "evil.M"}}
    compared = compare_with_transformers(made(config, granite()))
    assert "knows no model type 'evil'" in compared.problem


def test_packed_weights_count_as_weights() -> None:
    at = "model.layers.0.mlp.up_proj."
    shapes = {f"{at}qweight": (4, 48), f"{at}scales": (1, 48), f"{at}qzeros": (1, 6)}
    dtypes = {f"{at}qweight": "I32", f"{at}scales": "F16", f"{at}qzeros": "I32"}
    experts = "model.layers.0.mlp.experts."
    fused = {f"{experts}gate_up_proj_{end}": (2, 4) for end in ("blocks", "scales", "bias")}
    names = stored_names(made(GRANITE, shapes | fused, dtypes), ())
    assert names == {
        f"{at}weight": None,
        f"{experts}gate_up_proj": None,
        f"{experts}gate_up_proj_bias": [2, 4],
    }


def test_without_a_list_nothing_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.checkpoint.lists.find_spec", lambda name: None)
    subject = made(GRANITE, granite())
    compared = choose_list(subject, ())
    (said,) = check_unlisted(subject, compared)
    assert said.id == "checkpoint.not_examined"
    assert said.evidence["decisive"]
    assert "transformers is not installed" in said.title


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c, s: s.pop("lm_head.weight"), "no output head is stored"),
        (lambda c, s: c.update(num_experts=4), "holds 3 experts"),
        (lambda c, s: s.pop("model.layers.1.mlp.down_proj.weight"), None),
    ],
)
def test_patterns(change: Callable[[dict[str, Any], Shapes], Any], words: str | None) -> None:
    config, shapes = dict(GRANITE), granite()
    for i in range(2):
        stacked = {"gate_up_proj": (3, 8, 8), "down_proj": (3, 8, 8)}
        shapes |= {f"model.layers.{i}.moe.experts.{n}": s for n, s in stacked.items()}
    assert list(check_patterns(made(config, shapes))) == []
    change(config, shapes)
    said = [f.title for f in check_patterns(made(config, shapes))]
    assert (len(said) == 1 and words in said[0]) if words else said == []  # two layers: no peers


def test_towers_by_patterns() -> None:
    config = {
        "architectures": ["NewForConditionalGeneration"], "model_type": "new",
        "vision_config": {"depth": 6, "hidden_size": 8}, "text_config": dict(GRANITE),
    }  # fmt: skip
    text = {name.replace("model.", "language_model.model.", 1): s for name, s in granite().items()}
    tower = {
        f"visual.blocks.{i}.{n}.weight": (8, 8) for i in range(6) for n in ("attn", "mlp", "norm")
    }
    assert list(check_towers(made(config, text | tower))) == []
    (absent,) = check_towers(made(config, text))
    assert "no tensor of it is stored" in absent.title
    (cut,) = check_towers(made(config, text | without(tower, "blocks.5.")))
    assert "visual.blocks.5" in cut.title
    (hole,) = check_towers(made(config, text | without(tower, "blocks.2.attn")))
    assert "visual.blocks.2.attn" in hole.title


def test_a_comparison_with_a_problem_says_why() -> None:
    subject = made(GRANITE, granite())
    (said,) = check_unlisted(subject, Comparison("transformers", problem="it is not known"))
    assert "by patterns alone: it is not known" in said.title
