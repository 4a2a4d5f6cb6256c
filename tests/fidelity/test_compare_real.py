"""`assay compare` from the command line on real weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.cli.main import invoke
from assay.engines.hf import scorer as window_scoring
from assay.engines.scoring import ScoreJob, ScoringPath
from assay.fidelity.windows import Cut, places_of
from tiny_target import make_target

pytestmark = pytest.mark.engine

Compare = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def compare(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Compare:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))

    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = invoke(["compare", *map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


SMALL = ("--windows", 8, "--length", 64, "--batch", 8, "--no-floors")


def test_a_model_against_itself_differs_by_exactly_nothing(compare: Compare, smollm2: Path) -> None:
    code, body = compare(f"hf:{smollm2}", f"hf:{smollm2}", *SMALL[:-1])
    assert code == 0
    results = body["results"]
    assert results["self_test"] is True
    assert results["dppl_pct"] == {"value": 0, "lo": 0, "hi": 0}
    assert results["kld"]["max"] == 0
    assert results["engaged"]["zero_share"] == 1
    assert results["self_kld"] < 0.02
    assert str(smollm2) not in json.dumps(results)


def test_the_figures_are_those_of_the_models_own_logits(compare: Compare, smollm2: Path) -> None:
    """Against float64 by brute force, from logits that transformers itself computes."""
    import torch
    import transformers

    code, body = compare(
        f"hf:{smollm2}?dtype=float32",
        f"hf:{smollm2}?weights=int(bits=4,group=128)&dtype=float32",
        *SMALL,
    )
    results = body["results"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    from pydoc_data.topics import topics

    ids = tokenizer("\n\n".join(topics.values()), add_special_tokens=False)["input_ids"]
    # This tokenizer puts no start token before a text, so a window is 64 tokens of it.
    places = places_of(len(ids), Cut(length=64), None, 8)
    windows = [ids[i * 64 : (i + 1) * 64] for i in places]
    from assay_lab.quantisation.integers import quantise_model

    logits = []
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    for quantised in (False, True):
        if quantised:
            quantise_model(model, bits=4, group=128)
        with torch.inference_mode():
            logits.append(model(torch.tensor(windows)).logits[:, :-1].double().numpy())
    logs = [
        x
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - x.max(-1, keepdims=True)
        for x in logits
    ]
    kl = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
    gold = np.array(windows)[:, 1:, None]
    nll = [-np.take_along_axis(x, gold, -1)[..., 0] for x in logs]
    assert results["kld"]["mean"] == pytest.approx(kl.mean(), abs=1e-5)
    assert results["kld"]["max"] == pytest.approx(kl.max(), rel=1e-4)
    assert results["dppl_pct"]["value"] == pytest.approx(
        100 * np.expm1((nll[1] - nll[0]).mean()), abs=1e-3
    )
    assert results["ppl_reference"] == pytest.approx(np.exp(nll[0].mean()), rel=1e-5)
    top1 = 100 * (logits[0].argmax(-1) == logits[1].argmax(-1)).mean()
    assert results["top1_pct"]["value"] == pytest.approx(top1, abs=1e-9)
    assert [w["kld"] for w in results["per_window"]] == pytest.approx(kl.mean(1).tolist(), abs=1e-5)
    assert code in (1, 3)


def test_decode_reads_the_cache_and_says_so(compare: Compare, tiny_llama: Path) -> None:
    code, body = compare(
        f"hf:{tiny_llama}?dtype=float32",
        f"hf:{tiny_llama}?dtype=bfloat16",
        "--path",
        "decode",
        "--windows",
        8,
        "--length",
        24,
        "--batch",
        8,
        "--no-floors",
    )
    assert code in (0, 1, 3)
    assert body["results"]["engaged"]["bytes_read"] > 0
    assert body["results"]["kld"]["mean"] > 0


def test_a_cache_of_8_bits_shows_in_decode_and_is_refused_in_prefill(
    compare: Compare, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [f"hf:{smollm2}?kv_cache_dtype=fp8_{form}" for form in ("e4m3", "e5m2")]
    shape = (
        "--path",
        "decode",
        "--windows",
        8,
        "--length",
        24,
        "--batch",
        8,
        "--no-floors",
        "--greedy",
        2,
    )
    code, body = compare(f"hf:{smollm2}", *specs, *shape)
    assert code in (1, 3)
    first, second = body["results"]["candidates"]
    # One bit of mantissa less is twice the rounding error, four times its square.
    assert 0.001 < first["kld"]["mean"] < second["kld"]["mean"] / 2 < 0.1
    assert [c["engine"]["kv_cache_dtype"] for c in (first, second)] == ["fp8_e4m3", "fp8_e5m2"]
    whole = body["results"]["reference"]["kv_bytes_per_token"]
    assert {c["engine"]["kv_bytes_per_token"] * 2 for c in (first, second)} == {whole}
    assert first["engaged"]["bytes_read"] == 8 * sum(range(23)) * whole / 2
    assert first["greedy"]["available"]

    def opened(spec: str) -> None:
        raise AssertionError(f"{spec} was opened")

    monkeypatch.setattr("assay.engines.specs.open_scorer", opened)
    code, body = compare(f"hf:{smollm2}", specs[0], *SMALL)
    assert code == 2
    assert body["findings"][0]["id"] == "fidelity.missing_capability"
    assert "the prefill path reads none" in body["findings"][0]["title"]


def test_several_candidates_share_one_reference(compare: Compare, smollm2: Path) -> None:
    specs = [f"hf:{smollm2}?weights=int(bits={b},group=64)" for b in (8, 3)]
    code, body = compare(f"hf:{smollm2}", *specs, *SMALL)
    first, second = body["results"]["candidates"]
    assert code == 1
    assert first["kld"]["mean"] < second["kld"]["mean"]
    assert first["engine"]["weight_bytes"] > second["engine"]["weight_bytes"]
    (pair,) = body["results"]["pairs"]
    assert pair["kld"]["value"] == pytest.approx(first["kld"]["mean"] - second["kld"]["mean"])
    assert pair["kld"]["hi"] < 0
    assert [m["metric"] for m in second["margins"]] == ["dppl_pct", "top1_pct", "kld"] * 2
    assert all(m["p_holm"] == 1 for m in second["margins"] if m["metric"] == "top1_pct")
    assert second["power"]["windows"] == 8


def test_one_candidate_that_fails_leaves_the_others(
    compare: Compare, smollm2: Path, tmp_path: Path
) -> None:
    other = make_target(tmp_path / "other", hidden=32, layers=1)
    code, body = compare(
        f"hf:{smollm2}", f"hf:{other}", f"hf:{smollm2}?weights=int(bits=2,group=64)", *SMALL
    )
    assert code == 1  # the other is rejected, which is graver than an error
    assert [c["grade"] for c in body["results"]["candidates"]] == ["REJECT"]
    assert [f["id"] for f in body["findings"]] == ["fidelity.tokenizer_mismatch", "fidelity.reject"]
    assert body["findings"][0]["evidence"]["candidate"] == "hf:other"


@pytest.mark.slow
def test_the_reference_writes_the_text_and_both_go_on_from_it(
    compare: Compare, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = (
        "--text",
        "self",
        "--windows",
        8,
        "--length",
        32,
        "--batch",
        8,
        "--no-floors",
        "--greedy",
        6,
    )
    code, body = compare(f"hf:{smollm2}", f"hf:{smollm2}?weights=int(bits=2,group=128)", *shape)
    results = body["results"]
    assert code == 1
    assert results["text"]["sources"] == ["self"]
    assert results["text"]["start_ids"] == [0]
    assert results["text"]["sampled_from"] == f"hf:{smollm2.name}"
    # Sampled at temperature 1 and read without what came before: far from English, further from
    # noise.
    assert 2 < results["ppl_reference"] < 500
    greedy = results["greedy"]
    assert greedy["diverged"] == 8
    assert greedy["median_first"] < 3
    assert {"token", "runner_up", "gap", "text"} <= set(greedy["per_prefix"][0]["reference"])
    result = tmp_path / "result.json"
    result.write_text(json.dumps(body))
    capsys.readouterr()
    assert invoke(["rerun", str(result), "--json"]) == code
    again = json.loads(capsys.readouterr().out)["results"]
    for part in ("text", "kld", "greedy", "per_window"):
        assert again[part] == results[part]


def test_the_same_thing_under_another_name_is_no_evidence(
    compare: Compare, tiny_llama: Path
) -> None:
    code, body = compare(f"hf:{tiny_llama}?dtype=auto", f"hf:{tiny_llama}", *SMALL)
    assert code == 2
    assert body["findings"][0]["id"] == "fidelity.not_engaged"


def test_other_tokenizers_are_refused(compare: Compare, tiny_llama: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", hidden=32, layers=1)
    code, body = compare(f"hf:{tiny_llama}", f"hf:{other}", *SMALL)
    assert code == 2
    assert body["findings"][0]["id"] == "fidelity.tokenizer_mismatch"


def test_a_short_text_is_refused(compare: Compare, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Only a few words.")
    code, body = compare(f"hf:{tiny_llama}", f"hf:{tiny_llama}", "--text", tmp_path / "short.txt")
    assert code == 2
    assert "tokens" in body["findings"][0]["title"]


def test_an_interrupted_run_goes_on_where_it_stopped(
    compare: Compare, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import assay.fidelity.score as measure_module

    real, calls = measure_module.window_statistics, []

    def cut_after_four(reference: Any, candidate: Any) -> Any:
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(reference.window.index)
        return real(reference, candidate)

    arguments = (
        f"hf:{tiny_llama}",
        f"hf:{tiny_llama}?weights=int(bits=4,group=64)",
        *SMALL,
        "--batch",
        "4",
    )
    monkeypatch.setattr(measure_module, "window_statistics", cut_after_four)
    code, body = compare(*arguments)
    assert code == 130
    assert body["results"]["windows"] == 4
    calls.clear()
    monkeypatch.setattr(
        measure_module, "window_statistics", lambda a, b: calls.append(a.window.index) or real(a, b)
    )
    code, body = compare(*arguments)
    assert calls == [4, 5, 6, 7]
    assert body["results"]["windows"] == 8
    assert code in (0, 1, 3)


def test_a_batch_that_does_not_fit_is_halved(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from assay.engines.hf.scorer import HfScorer
    from assay.engines.scoring import Window

    scorer = HfScorer.load(f"hf:{tiny_llama}?dtype=float32")
    windows = [Window(i, tuple(range(i, i + 12))) for i in range(5)]
    whole = [r.states.clone() for r in scorer.score_windows(windows, ScoreJob(batch=5))]  # type: ignore[attr-defined]
    real, sizes = window_scoring._forward, []

    def small_memory(model: Any, ids: Any, cache: Any) -> Any:
        if ids.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(ids.shape[0])
        return real(model, ids, cache)

    monkeypatch.setattr(window_scoring, "_forward", small_memory)
    halved = [r.states for r in scorer.score_windows(windows, ScoreJob(batch=5))]  # type: ignore[attr-defined]
    assert sizes == [2, 2, 1]
    for a, b in zip(whole, halved, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    for path in (ScoringPath.CHUNKED, ScoringPath.DECODE):
        job = ScoreJob(path, scored_from=4, chunk=3, batch=2)
        for a, r in zip(whole, scorer.score_windows(windows, job), strict=True):
            torch.testing.assert_close(a[3:], r.states, atol=0.03, rtol=0.03)  # type: ignore[attr-defined]


class TestStored:
    """`assay reference`, then `run:`: as good as the reference itself, and never trusted unseen."""

    @pytest.fixture
    def store(self, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
        out = tmp_path / "store"
        assert (
            invoke(
                [
                    "reference",
                    f"hf:{tiny_llama}",
                    "--out",
                    str(out),
                    "--windows",
                    "8",
                    "--length",
                    "64",
                    "--batch",
                    "8",
                    "--no-floors",
                ]
            )
            == 0
        )
        return out

    def test_a_store_stands_for_its_reference(
        self, compare: Compare, tiny_llama: Path, store: Path
    ) -> None:
        candidate = f"hf:{tiny_llama}?weights=int(bits=4,group=64)"
        _, live = compare(f"hf:{tiny_llama}", candidate, *SMALL)
        _, stored = compare(f"run:{store}", candidate, *SMALL)
        assert stored["results"]["kld"] == live["results"]["kld"]
        assert stored["results"]["per_window"] == live["results"]["per_window"]
        result = store.parent / "result.json"
        result.write_text(json.dumps(stored))
        assert invoke(["rerun", str(result)]) == stored["exit_code"]

    def test_a_store_says_how_it_was_scored_and_knows_its_model(
        self, compare: Compare, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tiny_llama.parent)
        out = tmp_path / "store"
        shape = ["--windows", "2", "--length", "24", "--scored", "second-half"]
        assert invoke(["reference", f"hf:{tiny_llama}", "--out", str(out), *shape]) == 0
        code, body = compare(f"run:{out}", f"hf:./{tiny_llama.name}/")
        assert code == 0
        assert body["results"]["self_test"] is True
        assert body["results"]["tokens"] == 2 * 11
        assert body["subject"]["plan"]["scored"] == "second-half"
        assert body["subject"]["text"] == ["pydoc"]
        assert 0 <= body["results"]["self_kld"] < 0.02
        assert body["results"]["floors"]["rounding_bf16"] > 0
        assert "fidelity.self_test" in [f["id"] for f in body["findings"]]

    def test_one_flipped_bit_is_noticed(
        self, compare: Compare, tiny_llama: Path, store: Path
    ) -> None:
        shard = next((store / "states").iterdir())
        raw = bytearray(shard.read_bytes())
        raw[-3] ^= 1
        shard.write_bytes(raw)
        code, body = compare(f"run:{store}", f"hf:{tiny_llama}?dtype=float32", *SMALL)
        assert code == 2
        assert shard.name in body["findings"][0]["title"]

    def test_other_settings_than_the_stored_are_refused(
        self, compare: Compare, tiny_llama: Path, store: Path
    ) -> None:
        code, body = compare(f"run:{store}", f"hf:{tiny_llama}", "--length", 32)
        assert code == 2
        assert "--length 64" in body["findings"][0]["title"]

    def test_the_file_of_llama_cpp_is_read_too(
        self, compare: Compare, tiny_llama: Path, tmp_path: Path
    ) -> None:
        base = tmp_path / "base.kld"
        shape = ["--windows", "8", "--length", "64", "--scored", "second-half"]
        arguments = [
            "reference",
            f"hf:{tiny_llama}",
            "--out",
            str(base),
            "--format",
            "llama.cpp",
            *shape,
        ]
        assert invoke(arguments) == 0
        code, body = compare(f"run:{base}", f"hf:{tiny_llama}?dtype=float32", *shape)
        assert code in (0, 1, 3)
        assert body["results"]["kld"]["mean"] < 0.01
        assert body["results"]["tokens"] == 8 * 31
