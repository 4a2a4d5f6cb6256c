"""Memory of a comparison: the arithmetic against tensors, the prediction against the measured peak,
and what does not fit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from assay.cli.main import invoke
from assay.engines.hf import cache, scorer
from assay.engines.scoring import ScoreJob, ScoringPath
from assay.fidelity import memory
from assay.fidelity.memory import Memory, Side, predict_memory
from assay.fidelity.model_size import read_checkpoint
from assay.fidelity.plan import Plan
from tiny_target import make_experts, make_target

SHAPE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
"""That of Llama 3 70B."""


def dummy(folder: Path, layers: int, dtype: str = "BF16") -> Path:
    """A checkpoint of that shape whose headers are real and whose numbers are a hole in a sparse
    file.
    """
    folder.mkdir()
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=layers, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    named = list(model.state_dict().items())
    size = {"BF16": 2, "F32": 4}[dtype]
    for shard in range(2):
        header, at = {}, 0
        for name, tensor in named[shard::2]:
            end = at + prod(tensor.shape) * size
            header[name], at = (
                {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, end]},
                end,
            )
        raw = json.dumps(header).encode()
        with (folder / f"model-{shard}.safetensors").open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + at)
    return folder


def meta(layers: int) -> Any:
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=layers, dtype="bfloat16")
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_sizes_of_a_70b_shape_are_sums_over_its_tensors(tmp_path: Path, dtype: str) -> None:
    folder, model = dummy(tmp_path / "70b", 3, dtype), meta(3)
    found = read_checkpoint(str(folder))
    count = sum(p.numel() for p in model.parameters())
    assert found is not None and found.weights == 2 * count
    assert found.stored == (2 if dtype == "BF16" else 4) * count and found.converted == (
        dtype == "F32"
    )
    assert found.head == 2 * 8192 * 128256
    assert found.token_bytes("auto") == cache.token_bytes(model) == 2 * 3 * 8 * 128 * 2
    assert found.token_bytes("fp8") * 2 == found.token_bytes("auto")
    wide = read_checkpoint(str(folder), "float32")
    assert wide is not None and wide.weights == 4 * count and wide.converted == (dtype == "BF16")


@pytest.mark.parametrize("path", [*ScoringPath])
def test_windows_are_those_that_the_engine_will_run_together(
    tmp_path: Path, path: ScoringPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model, free = dummy(tmp_path / "70b", 2), meta(2), 40 << 30
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    plan = Plan(f"hf:{folder}", (f"hf:{folder}?dtype=float16",), path=path, length=2048)
    side = predict_memory(plan).sides[0]
    monkeypatch.setattr(scorer, "free_memory", lambda device: free - side.weights)
    assert side.windows == scorer.choose_batch(model, 2048, ScoreJob(path))
    states = 2 * 2048 * 8192 * 2
    assert side.window > states + (
        0 if path is ScoringPath.PREFILL else 2048 * cache.token_bytes(model)
    )


def test_ranks_share_weights_cache_and_head_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = dummy(tmp_path / "70b", 4)
    monkeypatch.setattr(memory, "free_memory", lambda device: 80 << 30)
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(memory, "choose_device", lambda wanted, device=device: device)
        specs = [
            f"vllm:{folder}?kv_cache_gib=8&{p}"
            for p in ("tensor_parallel=1", "tensor_parallel=2", "pipeline_parallel=2")
        ]
        whole, tensor, stages = predict_memory(Plan(specs[0], tuple(specs[1:]))).sides
        share = 2 if device == "cuda" else 1  # on a CPU all ranks are in one memory
        assert whole.head == 2 * 8192 * 128256 and whole.cache == 8 << 30
        assert [s.weights for s in (tensor, stages)] == [whole.weights // share] * 2
        assert [s.cache for s in (tensor, stages)] == [whole.cache // share] * 2
        assert (tensor.head, stages.head) == (whole.head // share, whole.head)


def test_mixtures_and_tied_heads_count_once(tmp_path: Path) -> None:
    for folder in (
        make_experts(tmp_path / "moe", "mixtral"),
        make_target(tmp_path / "dense", hidden=32, layers=1),
    ):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        found = read_checkpoint(str(folder))
        assert found is not None and found.weights == 4 * sum(p.numel() for p in model.parameters())
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    tied = read_checkpoint(str(folder))
    assert tied is not None and found.weights - tied.weights == tied.head == 4 * 320 * 32


def test_a_copy_in_another_layout_counts_once(tmp_path: Path) -> None:
    one = make_target(tmp_path / "one", hidden=32, layers=1)
    found = read_checkpoint(str(one))
    (one / "consolidated.safetensors").write_bytes((one / "model.safetensors").read_bytes())
    assert read_checkpoint(str(one)) == found and found is not None
    (one / "model.safetensors").rename(one / "model-00001-of-00001.safetensors")
    index = one / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}})
    )
    assert read_checkpoint(str(one)) == found
    for wrong in (
        {},
        {"weight_map": []},
        {"weight_map": {"lm_head.weight": "gone.safetensors"}},
        [],
    ):
        index.write_text(json.dumps(wrong))
        assert read_checkpoint(str(one)) is None


def test_sides_are_in_memory_one_after_the_other_and_gguf_beside() -> None:
    sides = [
        Side("a", "cpu", 100, stored=50, head=10, window=3, windows=4, logits=5),
        Side("b", "cpu", 60),
        Side("c", "cuda", 7),
    ]
    one = Memory(sides, base=20, free={"cpu": 140, "cuda": 100})
    assert sides[0].total == 100 + max(50, 20 + 12 + 5) and sides[0].least == 100 + 10 + 3
    assert (one.peak("cpu"), one.peak("cuda"), one.available("cpu")) == (170, 7, 160)
    assert one.peak("cpu", least=True) == 133 and one.tightest == "cpu"
    one.require()
    both = Memory(sides, base=20, free={"cpu": 140, "cuda": 100}, together=True)
    assert both.peak("cpu", least=True) == 20 + 113 + 60
    with pytest.raises(Exception, match="a beside the reference needs 0 MiB on cpu"):
        both.require()


def test_what_does_not_fit_is_refused_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(memory, "free_memory", lambda device: 64 << 30)
    monkeypatch.setattr(
        "assay.fidelity.compare.open_reference", lambda *a: pytest.fail("it was opened")
    )
    folder = dummy(tmp_path / "70b", 80)
    assert invoke(["compare", f"hf:{folder}?device=cpu", f"vllm:{folder}", "--json"]) == 2
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["id"] == "fidelity.memory" and "\n" not in finding["title"]
    assert "weights 131.4 GiB" in finding["title"] and re.search(
        r"6\d\.\d GiB can be taken", finding["title"]
    )
    assert "tensor_parallel=N" in finding["remedies"][0]


@pytest.mark.parametrize(
    "fault", ["no config", "config is a list", "no weights", "damaged", "hub", "other names"]
)
def test_what_cannot_be_read_is_not_known_and_left_to_the_engine(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = make_target(tmp_path / "tiny", hidden=32, layers=1)
    if fault == "no config":
        (folder / "config.json").unlink()
    elif fault == "config is a list":
        (folder / "config.json").write_text("[1]")
    elif fault == "no weights":
        (folder / "model.safetensors").unlink()
    elif fault == "damaged":
        (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    elif fault == "other names":
        config = json.loads((folder / "config.json").read_text())
        config["n_embd"] = config.pop("hidden_size")
        (folder / "config.json").write_text(json.dumps(config))
    name = "nobody/such-a-model" if fault == "hub" else str(folder)
    found = predict_memory(Plan(f"hf:{name}", ("http://localhost:1",)))
    assert not found.sides and found.line() == "" and len(found.unknown) == 1
    found.require()
    assert found.to_json()["predicted"] is None


@pytest.mark.engine
@pytest.mark.parametrize(
    ("reference", "candidate"),
    [("float32", "bfloat16"), pytest.param("bfloat16", "float32", marks=pytest.mark.slow)],
)
def test_the_prediction_is_near_the_measured_peak(
    smollm2: Path, tmp_path: Path, reference: str, candidate: str
) -> None:
    """In a process of its own, whose peak is that of the comparison."""
    specs = [f"hf:{smollm2}?dtype={dtype}" for dtype in (reference, candidate)]
    out = tmp_path / "out.json"
    shape = ["--windows", "8", "--length", "64", "--batch", "8", "--no-floors", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "assay", "compare", *specs, *shape],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        | {"ASSAY_CACHE": str(tmp_path / "cache")},
    )
    found = json.loads(out.read_text())["results"]["memory"]
    assert "memory: about" in done.stderr
    assert found["predicted"] == pytest.approx(found["measured_peak"], rel=0.25)
    assert found["available"] > found["predicted"]
    assert [side["weights"] for side in found["sides"]] == [
        134515008 * (4 if d == "float32" else 2) for d in (reference, candidate)
    ]
