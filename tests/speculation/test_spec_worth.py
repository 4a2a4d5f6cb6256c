"""The verdict is what the user should do: keep a speculation that pays, switch off one
that costs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import spec_lines as lines

from assay.speculation.benefit import Cost, benefit
from assay.speculation.combine import Evidence
from assay.speculation.health import assess
from assay.speculation.judged import Judged
from assay.speculation.measured import Measured
from assay.speculation.options import SpecOptions
from assay.speculation.spec import examine
from assay.verdict import Verdict


def judged(
    evidence: Evidence, measured: Measured | None = None, cost: Cost | None = None
) -> Judged:
    found = assess(evidence)
    worth = benefit(
        evidence.record, cost or Cost(0.1, "assumed"), measured, found.pooled or found.rate
    )
    return Judged(evidence, found, benefit=worth)


def ngrams(accepted: int, drafts: int = 400, generated: int = 6000) -> Evidence:
    page = lines.vllm_page({"0": (drafts, [accepted, accepted // 2])}, {"0": generated})
    return lines.read_metrics(page)


def test_ngrams_that_pay_a_little_pass_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.prom"
    path.write_text(lines.vllm_page({"0": (400, [300, 150])}, {"0": 6000}))
    report = examine([str(path)])
    lo, _ = report.results["benefit"]["multiplier_interval"]
    assert 1 < lo < report.results["benefit"]["multiplier"] < 1.2
    assert (report.exit_code, report.verdict) == (0, Verdict.PASS)
    little = next(f for f in report.findings if f.id == "speculation.pays_little")
    assert little.severity == "warning" and "hardly worth" in little.title
    assert all(f.severity != "error" for f in report.findings)


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (Measured(1.06, 1.04, 1.08), Verdict.PASS),
        (Measured(0.93, 0.90, 0.96), Verdict.FAIL),
        (Measured(1.02, 0.95, 1.09), Verdict.FAIL),  # undecided, and the head is degraded
        (Measured(1.06), Verdict.FAIL),  # no interval, so the head speaks
    ],
)
def test_a_weak_head_by_its_measured_multiplier(measured: Measured, verdict: Verdict) -> None:
    evidence = lines.read(lines.vllm_v1([30, 10], 100), lines.vllm_v1([28, 9], 100))
    assert judged(evidence, measured).verdict is verdict


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (Measured(1.4, 1.3, 1.5), Verdict.PASS),
        (Measured(0.9, 0.8, 0.95), Verdict.FAIL),
        (Measured(0.99, 0.9, 1.1), Verdict.PASS),
    ],
)
def test_a_good_head_that_costs_more_than_it_earns_fails(
    measured: Measured, verdict: Verdict
) -> None:
    evidence = lines.read(lines.vllm_v1([800, 600], 1000))
    assert judged(evidence, measured).verdict is verdict


def test_an_assumed_cost_alone_fails_no_good_head() -> None:
    evidence = lines.read(lines.vllm_v1([700, 300, 100, 50, 20, 10, 5, 1, 1, 1, 1, 1], 1000))
    assumed = judged(evidence)
    assert assumed.benefit is not None and (assumed.benefit.multiplier or 1) < 1
    assert assumed.verdict is Verdict.PASS
    assert judged(evidence, cost=Cost(0.4, "given")).verdict is Verdict.FAIL


def test_a_dead_head_fails_at_any_multiplier() -> None:
    evidence = lines.read(lines.vllm_v1([0, 0], 200))
    assert judged(evidence, Measured(1.2, 1.1, 1.3)).verdict is Verdict.FAIL


def test_a_dead_engine_among_others_fails_although_the_pool_pays() -> None:
    page = lines.vllm_page({"0": (500, [450, 400]), "1": (500, [0, 0])})
    assert judged(lines.read_metrics(page)).verdict is Verdict.FAIL


def test_too_few_drafts_pass_only_where_the_speed_was_measured(tmp_path: Path) -> None:
    evidence = lines.read(lines.vllm_v1([18, 10], 40))
    assert judged(evidence).verdict is Verdict.INCONCLUSIVE
    assert judged(evidence, Measured(1.3, 1.2, 1.4)).verdict is Verdict.PASS
    log = tmp_path / "server.log"
    log.write_text(lines.vllm_v1([18, 10], 40) + "\n")
    assert examine([str(log)], SpecOptions()).exit_code == 3
