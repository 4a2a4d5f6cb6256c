"""Index, expected tensors and documents: what must be said of them, and what must not."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from assay.checkpoint import lists as tensors
from assay.checkpoint.expectation import expectation
from assay.checkpoint.families import FAMILIES
from assay.checkpoint.subject import Checkpoint
from checkpoint.asking import Ask, finding
from checkpoint_samples import (
    edit_json,
    llama,
    read_safetensors,
    rewrite,
    write_json,
    write_safetensors,
)

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def without_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the hf extra, except for the tests that are about it."""
    if request.node.get_closest_marker("engine") is None:
        monkeypatch.setattr(tensors, "find_spec", lambda name: None)


def kept(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(id, severity) of all findings but the one that nobody vouches for the files."""
    return [
        (f["id"].removeprefix("checkpoint."), f["severity"])
        for f in report["findings"]
        if f["id"] != "checkpoint.unverified"
    ]


# The index.


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ("[1]", "cannot be read"),
        ("{" * 100_000, "cannot be read"),
    ],
)
def test_an_index_of_another_form(ask: Ask, model: Path, document: str, words: str) -> None:
    (model / INDEX).write_text(document)
    code, report = ask(model, "--allow-unverified")
    assert code == 1
    assert words in finding(report, "index_mismatch")["title"]


def test_an_index_cannot_lead_out_of_the_folder(ask: Ask, model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    index["weight_map"] |= {"x": "../../etc/passwd.safetensors", "y": "/etc/hosts.safetensors"}
    write_json(model / INDEX, index)
    code, report = ask(model, "--allow-unverified")
    assert code == 1
    assert any("outside the folder" in f["title"] for f in report["findings"])


def test_a_tensor_in_another_shard_than_the_index_says(ask: Ask, model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    index["weight_map"]["model.embed_tokens.weight"] = TWO
    write_json(model / INDEX, index)
    code, report = ask(model, "--allow-unverified")
    assert code == 1
    assert "not in the shard that the index names" in finding(report, "index_mismatch")["title"]


def test_a_tensor_that_the_index_does_not_name(ask: Ask, model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    write_json(model / INDEX, index)
    code, report = ask(model, "--allow-unverified")
    assert code == 1
    assert "does not name: model.norm.weight" in finding(report, "index_mismatch")["title"]


def test_a_stale_shard_beside_the_indexed_ones_is_a_warning(ask: Ask, model: Path) -> None:
    write_safetensors(model / "old.safetensors", read_safetensors(model / TWO))
    code, report = ask(model, "--allow-unverified")
    assert (code, kept(report)) == (0, [("index_mismatch", "warning")])


def test_a_total_size_that_counts_otherwise_is_a_note(ask: Ask, model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    index["metadata"]["total_size"] += 2
    write_json(model / INDEX, index)
    code, report = ask(model, "--allow-unverified")
    assert (code, kept(report)) == (0, [("index_mismatch", "info")])


def test_mistrals_second_copy_and_an_adapter_are_left_alone(ask: Ask, model: Path) -> None:
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        write_safetensors(model / name, read_safetensors(model / ONE))
    code, report = ask(model, "--allow-unverified")
    assert (code, kept(report)) == (0, [])


# Expected tensors.


def test_tied_embeddings(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    llama(folder, tie_word_embeddings=True)
    assert ask(folder, "--allow-unverified")[0] == 0
    edit_json(folder / "config.json", tie_word_embeddings=False)
    code, report = ask(folder, "--allow-unverified")
    assert code == 1
    assert "tie_word_embeddings is not true" in finding(report, "tensor_missing")["title"]
    # Llama without the key is not tied; Gemma without it is.
    edit_json(folder / "config.json", tie_word_embeddings=...)
    assert ask(folder, "--allow-unverified")[0] == 1


def test_an_unknown_architecture_is_held_to_its_own_layers(ask: Ask, model: Path) -> None:
    edit_json(model / "config.json", model_type="brand_new", architectures=["BrandNewForCausalLM"])
    code, report = ask(model, "--allow-unverified")
    assert (code, kept(report)) == (3, [("not_examined", "warning")])  # nothing to compare with
    assert report["results"]["expected_from"] is None
    rewrite(model, lambda t: {n: v for n, v in t.items() if "layers.2.mlp.up" not in n})
    code, report = ask(model, "--allow-unverified")
    assert code == 1
    assert finding(report, "tensor_missing")["evidence"]["modules"] == [
        "model.layers.2.mlp.up_proj"
    ]
    rewrite(model, lambda t: {n: v for n, v in t.items() if "layers.1." not in n})
    assert finding(ask(model, "--allow-unverified")[1], "tensor_missing")["evidence"]["layers"] == [
        1
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -3},
        {"num_hidden_layers": "four"},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"vocab_size": 1 << 70},
        {"model_type": ["llama"]},
        {"architectures": "LlamaForCausalLM"},
        {"rope_scaling": [1, 2]},
        {"eos_token_id": {"a": 1}},
        {"quantization_config": "awq"},
        {"text_config": {"num_hidden_layers": None}},
    ],
    ids=str,
)
def test_a_config_of_any_content_gets_a_verdict(
    ask: Ask, model: Path, changes: dict[str, Any]
) -> None:
    edit_json(model / "config.json", **changes)
    code, report = ask(model, "--allow-unverified", "--values")
    assert code in {0, 1, 2, 3}
    assert "bug" not in json.dumps(report["findings"])


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 50_000, b'{"a": NaN}']
)
def test_documents_of_any_content_get_a_verdict(
    ask: Ask, model: Path, name: str, content: bytes
) -> None:
    (model / name).write_bytes(content)
    code, _ = ask(model, "--allow-unverified")
    assert code in {0, 1, 2, 3}


# The layouts that assay knows by heart, against transformers' own models on the meta device.

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "attention_bias": False, "pad_token_id": None,
}  # fmt: skip
MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
DENSE = {
    "llama": ("LlamaForCausalLM", {"mlp_bias": False}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
}
EXPERTS = {
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        MLA
        | {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 4,
        },
    ),
}


def promised(kind: str, architecture: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    settings = config | {"model_type": kind, "architectures": [architecture]}
    bare = Checkpoint("folder", {"config.json": 1}, lambda name: json.dumps(settings).encode())
    found = expectation(bare)
    assert found is not None
    return found.shapes


def allocated(kind: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def attention_and_norms(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Experts are stored one by one and held fused in memory: names of the rest must agree."""
    return {
        n: s
        for n, s in shapes.items()
        if ".experts." not in n and ".mlp.gate" not in n and "block_sparse" not in n
    }


@pytest.mark.engine
@pytest.mark.skipif(not find_spec("transformers"), reason="needs the hf extra")
@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_layout_is_what_transformers_allocates(kind: str, tied: bool) -> None:
    architecture, extra = DENSE[kind]
    config = SMALL | extra | {"tie_word_embeddings": tied}
    theirs = allocated(kind, config)
    if tied:
        theirs.pop("lm_head.weight")
    assert promised(kind, architecture, config) == theirs


@pytest.mark.engine
@pytest.mark.skipif(not find_spec("transformers"), reason="needs the hf extra")
@pytest.mark.parametrize("kind", EXPERTS)
def test_a_mixture_of_experts_has_what_transformers_allocates(kind: str) -> None:
    architecture, extra = EXPERTS[kind]
    config = SMALL | extra
    theirs, mine = allocated(kind, config), promised(kind, architecture, config)
    assert attention_and_norms(mine) == attention_and_norms(theirs)
    # Fused or not, the experts hold the same number of weights.
    import math

    def elements(shapes: dict[str, tuple[int, ...]]) -> int:
        return sum(math.prod(s) for n, s in shapes.items() if ".experts." in n)

    assert elements(mine) == elements(theirs)


def test_every_family_is_held_against_transformers_or_written_out_in_the_samples() -> None:
    elsewhere = {"mimo", "gemma3", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
    assert set(FAMILIES) == set(DENSE) | set(EXPERTS) | elsewhere


@pytest.mark.engine
@pytest.mark.skipif(not find_spec("transformers"), reason="needs the hf extra")
def test_a_family_that_only_transformers_knows(ask: Ask, model: Path) -> None:
    edit_json(model / "config.json", model_type="granite", architectures=["GraniteForCausalLM"])
    code, report = ask(model, "--allow-unverified")
    assert (code, kept(report)) == (0, [])
    assert report["results"]["expected_from"].startswith("transformers")
    rewrite(model, lambda t: {n: v for n, v in t.items() if "layers.2.mlp.up" not in n})
    code, report = ask(model, "--allow-unverified")
    assert (code, finding(report, "tensor_missing")["evidence"]["tensors"]) == (
        1,
        ["model.layers.2.mlp.up_proj.weight"],
    )


# Names that no engine maps into a text-only architecture.


def renamed(folder: Path, prefix: str) -> None:
    rewrite(
        folder,
        lambda t: {n.replace("model.", prefix, 1) if "model." in n else n: v for n, v in t.items()},
    )


@pytest.mark.parametrize(
    ("prefix", "changes", "code"),
    [
        ("language_model.model.", {}, 1), ("model.language_model.", {}, 1), ("base_model.model.model.", {}, 1),  # noqa: E501
        ("module.model.", {}, 1), ("_orig_mod.model.", {}, 1),
        ("language_model.model.", {"model_type": "brand_new", "architectures": ["BrandNewForCausalLM"]}, 1),  # noqa: E501
        ("model.language_model.", {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}, None),  # noqa: E501
        ("language_model.model.", {"architectures": ["LlavaForConditionalGeneration"]}, 0),
        ("language_model.model.", {"vision_config": {"hidden_size": 8}}, 0),
        ("language_model.model.", {"auto_map": {"AutoModelForCausalLM": "m.M"}}, 0),
        ("transformer.", {"model_type": "brand_new", "architectures": ["BrandNewForCausalLM"]}, 3),
    ],
)  # fmt: skip
def test_names_of_another_architecture(
    ask: Ask, model: Path, prefix: str, changes: dict[str, Any], code: int | None
) -> None:
    edit_json(model / "config.json", **changes)
    renamed(model, prefix)
    done, report = ask(model, "--allow-unverified")
    said = [f for f in report["findings"] if "no engine maps" in f["detail"].lower()]
    assert len(said) == (code == 1)
    if code is not None:
        assert done == code, [f["title"] for f in report["findings"]]


# No local path outside `subject`.


def test_no_local_path_in_the_results(ask: Ask, model: Path, tmp_path: Path) -> None:
    (model / "more.bin").write_bytes(b"x")
    _, report = ask(model, "--write-manifest", tmp_path / "list.json")
    rest = json.dumps({k: v for k, v in report.items() if k != "subject"})
    assert str(tmp_path) not in rest
    assert report["results"]["advice"]["command"] == "vllm serve MODEL"
