"""What is refused, chosen and set before a decomposition scores anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.engines.scoring import ScoreJob
from assay.errors import AssayError
from assay.fidelity.budget import OutOfTime
from assay.fidelity.pace import Pace
from assay.progress import NO_PROGRESS
from assay_lab.gap import run_cache as cache_module
from assay_lab.gap.configuration import Configuration, Corners
from assay_lab.gap.gap import Runs, measure_all
from assay_lab.gap.plan import GapPlan
from assay_lab.gap.preflight import must_be_tried, preflight
from assay_lab.gap.run_cache import RunCache
from assay_lab.options import QUICK


@pytest.mark.parametrize(
    ("batch", "windows", "other"),
    [(8, 128, 5), (32, 128, 20), (8, 8, 5), (8, 2, 1), (4, 4, 2), (3, 8, 1), (1, 8, 2)],
)
def test_the_other_batch_is_another_one_for_the_windows_there_are(
    batch: int, windows: int, other: int
) -> None:
    plan = GapPlan("hf:m", "hf:m", codec="fp8", batch=batch, windows=windows)
    assert plan.other_batch == other


@given(st.integers(1, 300), st.integers(2, 300))
def test_windows_are_cut_otherwise_by_the_other_batch(batch: int, windows: int) -> None:
    other = GapPlan("hf:m", "hf:m", codec="fp8", batch=batch, windows=windows).other_batch
    assert other >= 1
    assert min(other, windows) != min(batch, windows)
    # At most two rounds for one, but for the smallest batches.
    together = min(batch, windows)
    assert together < 4 or -(-windows // other) <= 2 * -(-windows // together)


def test_streams_of_few_windows_are_encoded_all_and_of_many_a_fixed_number() -> None:
    for windows, measured in ((2, 2), (31, 31), (32, 32), (33, 32), (1000, 32)):
        assert GapPlan("hf:m", "hf:m", codec="fp8", windows=windows).measured == measured


def checkpoint(folder: Path, architecture: str, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    return str(folder)


@pytest.mark.parametrize(
    ("options", "codec", "said"),
    [
        ("?max_model_len=64", "", "windows of 1024 tokens do not fit"),
        ("?tensor_parallel=2", "pca", "all KV heads of a layer together, and each of 2 ranks"),
        ("?nonsense=2", "fp8", "nonsense"),
        ("?enforce_eager=false", "fp8", "CUDA graphs run no codec"),
        ('?args={"enable_prefix_caching":true}', "fp8", "enable_prefix_caching"),
        ("?max_model_len=64", "fp8", "windows of 1024 tokens do not fit"),
        ("?max_num_batched_tokens=512", "fp8", "would cut a window of 1024 tokens"),
        ("", "mean+hadamard(bits=4)", "needs a calibration"),
    ],
)
def test_what_the_candidate_cannot_do_is_refused_before_the_reference_is_opened(
    options: str, codec: str, said: str, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path, "LlamaForCausalLM")
    with pytest.raises(AssayError, match=said):
        Corners(GapPlan(f"hf:{model}", f"vllm:{model}{options}", codec=codec)).preflight()


def test_without_a_codec_compiled_engines_are_compared_too(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "LlamaForCausalLM")
    Corners(GapPlan(f"hf:{model}", f"vllm:{model}?enforce_eager=false")).preflight()
    with pytest.raises(AssayError, match="prefill path reads none"):
        Corners(
            GapPlan(f"hf:{model}", f"hf:{model}?kv_cache_dtype=fp8_e4m3", mode="inforward")
        ).preflight()


def test_an_option_of_the_cache_needs_modes_that_read_it(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "LlamaForCausalLM")
    pair = (f"hf:{model}", f"hf:{model}?kv_cache_dtype=fp8_e4m3")
    Corners(GapPlan(*pair, codec="fp8", mode="decode", base_mode="decode")).preflight()
    for modes in ({}, {"mode": "snapshot", "base_mode": "decode"}):
        with pytest.raises(AssayError, match="prefill path reads none") as caught:
            Corners(GapPlan(*pair, codec="fp8", **modes)).preflight()
        assert "--base-mode decode" in caught.value.remedy


def test_models_are_told_by_their_configuration(tmp_path: Path) -> None:
    sliding = checkpoint(
        tmp_path, "Qwen3ForCausalLM", layer_types=["sliding_attention", "full_attention"]
    )
    preflight(f"hf:{sliding}", 1024, ["inforward"], codec=True)  # transformers takes it
    with pytest.raises(AssayError, match="sliding-window") as caught:
        preflight(f"vllm:{sliding}", 1024, ["inforward"], codec=True)
    assert "hf:" in caught.value.remedy
    with pytest.raises(AssayError, match="nowhere"):
        preflight(f"vllm:{tmp_path}/nowhere", 1024, ["inforward"], codec=True)
    for architecture, known in (("LlamaForCausalLM", True), ("GPTNeoXForCausalLM", False)):
        model = checkpoint(tmp_path, architecture)
        preflight(
            f"vllm:{model}?max_model_len=1024&max_num_batched_tokens=1023",
            1024,
            ["inforward"],
            codec=True,
        )
        assert must_be_tried(f"vllm:{model}") is not known
        assert not must_be_tried(f"hf:{model}")


class Refusing:
    """An engine whose attention takes no codec, as only its loaded model shows."""

    def score_windows(self, windows: list[object], job: ScoreJob) -> Iterator[object]:
        assert len(windows) == 1
        raise AssayError(
            "GPTNeoXAttention is no attention that assay hooks", finding_id="fidelity.hook_missing"
        )
        yield


def test_an_unread_architecture_is_tried_before_anything_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    run_cache = RunCache(
        GapPlan("hf:m", f"vllm:{checkpoint(tmp_path, 'GPTNeoXForCausalLM')}", codec="fp8"),
        NO_PROGRESS,
    )
    run_cache.windows = {"main": [object(), object()], "fresh": []}
    monkeypatch.setattr(
        run_cache, "engine", lambda spec, again=False: opened.append(spec) or Refusing()
    )
    with pytest.raises(AssayError, match="GPTNeoXAttention"):
        measure_all(run_cache, Runs())
    assert opened == [run_cache.plan.candidate]


@pytest.mark.parametrize(("cuda", "device"), [(True, "cuda"), (False, "cpu")])
def test_stored_runs_are_compared_on_the_gpu_where_there_is_one(
    cuda: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    moved: list[str] = []

    class Rows(SimpleNamespace):
        def to(self, where: object) -> Rows:
            moved.append(f"{self.name} to {where}")
            return self

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(cache_module, "window_statistics", lambda a, b: (a.name, b.name))
    monkeypatch.setattr(
        cache_module, "observation", lambda window, first, found: (window, first, found)
    )
    monkeypatch.setattr(cache_module, "key_of", list)
    monkeypatch.setattr(cache_module, "to_arrays", lambda seen: [])
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    run_cache = RunCache(GapPlan("hf:a", "hf:b", codec="fp8"), NO_PROGRESS)
    run_cache.windows = {"main": [0, 1]}

    def store(name: str) -> SimpleNamespace:
        return SimpleNamespace(rows=lambda ws: [Rows(window=w, first=9, name=name) for w in ws])

    monkeypatch.setattr(run_cache, "anchor", lambda config: store(config.engine))
    found = run_cache.between(
        Configuration("hf:a", "inforward"), Configuration("hf:b", "inforward")
    )
    assert found.seen == [(0, 9, ("hf:a", "hf:b")), (1, 9, ("hf:a", "hf:b"))]
    assert moved == [f"hf:b to {device}"] * 2


@pytest.mark.parametrize(
    ("decode", "mode"), [(0.01, "decode"), (0.06, "inforward"), (0.07, "inforward"), (0.01, "")]
)
def test_where_token_by_token_does_not_fit_the_total_is_that_of_the_base_mode(
    decode: float, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ten minutes, and the speed of Qwen2.5 0.5B on two cores: idle ones, busy ones, and ones with
    no time left at all.
    """
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    paces = {"prefill": Pace(0.004 if mode else 0.04, 0.001), "decode": Pace(decode, 0.001)}
    monkeypatch.setattr(cache_module, "measure_pace", lambda engine, plan, text: paces[plan.path])
    monkeypatch.setattr(cache_module, "read_text", lambda text: SimpleNamespace(text="x"))
    monkeypatch.setattr(RunCache, "engine", lambda self, spec, again=False: None)
    run_cache = RunCache(GapPlan("hf:a", "hf:b", codec="fp8", quick=True, **QUICK), NO_PROGRESS)
    run_cache.budget.took["opening the reference"] = 5.0
    if (
        decode == 0.07
    ):  # also where all of the time goes into the path, and none is left for the phases
        paces["prefill"] = Pace(0.012, 0.001)
    if not mode:
        with pytest.raises(OutOfTime, match="too small for any answer"):
            run_cache._fit()
        return
    run_cache._fit()
    assert (run_cache.plan.mode, run_cache.plan.windows, run_cache.plan.length) == (mode, 8, 256)
    left_out = [item["what"] for item in run_cache.budget.left_out]
    assert left_out == (
        [] if mode == "decode" else ["the path decode: the total is that of inforward"]
    )
