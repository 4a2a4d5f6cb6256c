"""Kinds of faults of public checkpoints: lost orders, pointers, adapters, descriptions,
GGUF parts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from assay.checkpoint.quantization import check_quantization
from assay.checkpoint.rules.rope import check_rope
from assay.checkpoint.safetensors import Header
from assay.checkpoint.schemes.registry import parse
from assay.checkpoint.subject import Checkpoint
from assay.checkpoint.tensors import DTYPE_BITS, Tensor
from checkpoint.asking import Ask, finding
from checkpoint.gguf_samples import llama_rows, write
from checkpoint_samples import edit_json, write_json

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 17078110\n"


def stored(documents: dict[str, Any], rows: dict[str, tuple[str, tuple[int, ...]]]) -> Checkpoint:
    tensors, at = [], 0
    for name, (dtype, shape) in rows.items():
        size = DTYPE_BITS[dtype]
        for dimension in shape:
            size *= dimension
        tensors.append(Tensor(name, dtype, shape, "model.safetensors", at, at + size // 8))
        at += size // 8
    texts = {name: json.dumps(document).encode() for name, document in documents.items()}
    files = {name: len(text) for name, text in texts.items()} | {"model.safetensors": at}
    headers = {"model.safetensors": Header("model.safetensors", at, 0, tuple(tensors))}
    return Checkpoint("folder", files, texts.__getitem__, headers)


def gptq(index: bool, **settings: Any) -> list[str]:
    at = "model.layers.0.self_attn.q_proj."
    rows: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{at}qweight": ("I32", (8, 64)), f"{at}scales": ("F16", (2, 64)),
        f"{at}qzeros": ("I32", (2, 8)),
    }  # fmt: skip
    if index:
        rows[f"{at}g_idx"] = ("I32", (64,))
    raw = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, **settings}
    subject = stored({"config.json": {"model_type": "new", "quantization_config": raw}}, rows)
    return [f.title for f in check_quantization(subject, parse(subject))]


def test_an_order_that_is_declared_and_not_stored() -> None:
    assert gptq(True, desc_act=True) == gptq(False, desc_act=False) == []
    (lost,) = gptq(False, desc_act=True)
    assert "without its g_idx" in lost
    exempt = {"+:.*q_proj.*": {"desc_act": False}}
    assert gptq(False, desc_act=True, dynamic=exempt) == []


def modelslim(kind: str, dtype: str) -> list[str]:
    at = "model.layers.0.self_attn.q_proj."
    described = {"model_quant_type": kind, f"{at}weight": kind}
    rows = {
        f"{at}weight": (dtype, (64, 64)), f"{at}weight_scale": ("F32", (64, 1)),
        f"{at}weight_offset": ("F32", (64, 1)),
    }  # fmt: skip
    if dtype == "BF16":
        rows = {f"{at}weight": (dtype, (64, 64))}
    documents = {"config.json": {"model_type": "new"}, "quant_model_description.json": described}
    subject = stored(documents, rows)
    return [f.title for f in check_quantization(subject, parse(subject))]


def test_a_description_by_modelslim_is_read() -> None:
    assert modelslim("W8A8_DYNAMIC", "I8") == modelslim("FLOAT", "BF16") == []
    assert any("stored plain" in t or "no tensor is" in t for t in modelslim("W8A8", "BF16"))
    assert any("are not known" in title for title in modelslim("W4A4_FLATQUANT", "I8"))


@pytest.mark.parametrize(
    ("name", "code"), [("tekken.json", 1), ("vocab.bin.extra", 1), ("README.md", 0)]
)
def test_a_pointer_in_place_of_any_file(ask: Ask, model: Path, name: str, code: int) -> None:
    (model / name).write_text(POINTER)
    done, report = ask(model, "--allow-unverified")
    assert done == code
    assert finding(report, "truncated")["evidence"]["paths"] == [name]


def test_an_adapter_is_no_model(ask: Ask, model: Path) -> None:
    (model / "config.json").unlink()
    write_json(model / "adapter_config.json", {"peft_type": "LORA"})
    code, report = ask(model, "--allow-unverified")
    assert code == 2
    assert "LoRA adapter" in finding(report, "not_examined")["title"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"factor": 4.0}, "give factor and no rope_type"),
        ({"long_factor": [1.0], "short_factor": [1.0]}, "give long_factor, short_factor"),
        ({"mrope_section": [1, 1, 2]}, None),
        ({"rope_theta": 1e4}, None),
        ({"factor": None, "rope_theta": 1e4}, None),
    ],
)
def test_scaling_without_a_type(settings: dict[str, Any], said: str | None) -> None:
    subject = stored({"config.json": {"model_type": "llama", "rope_scaling": settings}}, {})
    titles = [f.title for f in check_rope(subject)]
    assert (len(titles) == 1 and said in titles[0]) if said else titles == []


def test_parts_that_a_gguf_architecture_needs(ask: Ask, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    code, _ = ask(write(tmp_path / "whole.gguf"), "--allow-unverified")
    assert code == 0
    for lost in ("ffn_gate", "attn_output", "output_norm", "token_embd"):
        rows = [row for row in llama_rows() if lost not in row[0]]
        code, report = ask(write(tmp_path / f"{lost}.gguf", rows), "--allow-unverified")
        named = finding(report, "tensor_missing")["evidence"]["tensors"]
        assert (code, all(lost in name for name in named)) == (1, True)
    biased = write(
        tmp_path / "b.gguf", general__architecture="qwen2", qwen2__block_count=3,
        qwen2__embedding_length=32,
    )  # fmt: skip
    code, report = ask(biased, "--allow-unverified")
    assert code == 1
    assert "blk.0.attn_q.bias" in finding(report, "tensor_missing")["evidence"]["tensors"]


def test_a_gguf_of_an_unknown_architecture_does_not_pass(ask: Ask, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = write(tmp_path / "n.gguf", general__architecture="brand-new", llama__block_count=...)
    code, report = ask(path, "--allow-unverified")
    assert code == 3
    assert "knows no such architecture" in finding(report, "not_examined")["title"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"]
)
def test_a_pipe_or_a_device_in_place_of_a_file(ask: Ask, model: Path, name: str) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (model / name).unlink()
        make(model / name)
        code, report = ask(model, "--allow-unverified")
        assert code in {1, 2}
        assert any("not a regular file" in f["title"] for f in report["findings"])


def test_the_template_of_a_command_may_be_no_pipe(ask: Ask, model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    command = f"vllm serve m --chat-template {tmp_path / 'pipe'}"
    code, report = ask(model, "--allow-unverified", "--serve-args", command)
    assert code == 1
    assert "named pipe" in finding(report, "flag_rejected")["title"]


@pytest.mark.parametrize("count", [100_000, 4096])
def test_many_layers_cost_little(ask: Ask, model: Path, count: int) -> None:
    edit_json(model / "config.json", num_hidden_layers=count)
    code, report = ask(model, "--allow-unverified")
    assert code == 1
    assert len(json.dumps(report)) < 100_000


@pytest.mark.parametrize("folder", ["/proc", "/sys", "/dev"])
def test_a_view_of_the_system_is_refused(ask: Ask, folder: str) -> None:
    code, report = ask(folder, "--allow-unverified")
    assert code == 2
    assert "no folder of files" in report["findings"][0]["title"]


def test_a_deep_manifest_is_one_line(ask: Ask, model: Path, tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("[" * 100_000)
    code, report = ask(model, "--manifest", tmp_path / "m.json")
    assert code == 2
    assert len(report["findings"][0]["title"]) < 300
