"""What is paid for: all steps, drafted or not; and the depth that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import spec_lines as lines

from assay.speculation.benefit import Cost, benefit
from assay.speculation.health import Health, assess
from assay.speculation.measured import Measured
from assay.speculation.options import SpecOptions
from assay.speculation.spec import examine
from assay.verdict import Report

NGRAM = (
    "INFO 10-11 08:29:00 [core.py:1] Initializing a V1 LLM engine (v0.11.0) with config:"
    " speculative_config=SpeculativeConfig(method='ngram', model=None, num_spec_tokens=4),"
)
SELDOM = [30, 24, 14, 8]
"""Accepted at each position, of 36 drafts; 76 in all."""


def seldom_log(*start: str) -> str:
    """927 tokens in ten intervals, three of which drafted: 36 drafts, 76 accepted."""
    windows = {2: ([12, 10, 6, 4], 14), 5: ([10, 8, 5, 2], 12), 8: ([8, 6, 3, 2], 10)}
    rows = list(start)
    for i, speed in enumerate([9.3, 9.2, 9.3, 9.2, 9.3, 9.3, 9.2, 9.3, 9.3, 9.3]):
        rows.append(lines.vllm_engine(0, speed))
        if i in windows:
            rows.append(lines.vllm_v1(*windows[i]))
    return "\n".join(rows) + "\n"


def seldom_reply() -> str:
    own = {
        "num_spec_steps": 36, "num_draft_tokens": 144, "num_accepted_draft_tokens": 76,
        "acceptance_histogram": [6, 6, 10, 6, 8], "num_spec_tokens": 4,
    }  # fmt: skip
    return json.dumps(
        {"usage": {"completion_tokens": 927}, "metrics": {"speculative_decoding": own}}
    )


STATISTICS = (
    "statistics ngram-simple: #calls(b,g,a) = 20 851 36, #gen drafts = 36, #acc drafts = 30, #gen"
    " tokens = 144, #acc tokens = 76, dur(b,g,a) = 0.1, 0.2, 0.3 ms\n"
)
SOURCES = {
    "page": lines.vllm_page({"0": (36, SELDOM)}, {"0": 927}),
    "reply": seldom_reply(),
    "log": seldom_log(NGRAM),
    "statistics": STATISTICS,
}


def report_of(tmp_path: Path, text: str, **options: object) -> Report:
    path = tmp_path / "source"
    path.write_text(text)
    return examine([str(path)], SpecOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SOURCES)
def test_drafts_at_few_steps_are_not_praised(name: str, tmp_path: Path) -> None:
    report = report_of(tmp_path, SOURCES[name])
    record = report.results["record"]
    assert record["coverage"] == pytest.approx(36 / 851, rel=0.02)
    assert record["overall_tokens_per_step"] == pytest.approx(927 / 851, rel=0.01)
    # Few tokens a step, and still more than it costs: kept, with a warning.
    assert report.results["health"] == "degraded" and report.exit_code == 0
    assert report.results["benefit"]["multiplier"] == pytest.approx(1.07, abs=0.01)
    shown = {m.name: f"{m.text} {m.note}" for m in report.headline}
    assert "1.09 over all steps" in shown["tokens per step"]
    assert "keep it" not in report.results["advice"] and "4.2" in report.results["advice"]
    assert [(f.id, f.severity.value) for f in report.findings] == [
        ("speculation.low_coverage", "warning"),
        ("speculation.pays_little", "warning"),
    ]


def test_a_log_that_does_not_name_its_method_is_warned_about(tmp_path: Path) -> None:
    """Its coverage is an estimate from printed speeds, on which no head is condemned."""
    report = report_of(tmp_path, seldom_log())
    assert report.results["health"] == "healthy"
    assert [f.id for f in report.findings] == [
        "speculation.low_coverage",
        "speculation.pays_little",
    ]
    assert "keep it" not in report.results["advice"]


@pytest.mark.parametrize(
    ("drafts", "accepted", "generated", "health"),
    [
        (
            400,
            [380, 360, 340, 300],
            2600,
            Health.HEALTHY,
        ),  # 1.2 of the steps' tokens come free: 2.1 a step
        (400, [100, 50, 20, 10], 2000, Health.DEGRADED),  # 1.1 a step
        (25, [23, 22, 21, 20], 500, Health.INSUFFICIENT),  # 1.21 a step, over 25 drafts
        (300, [0, 0, 0, 0], 2000, Health.BROKEN),
    ],
)
def test_sparse_drafters_are_judged_by_all_steps(
    drafts: int, accepted: list[int], generated: int, health: Health
) -> None:
    evidence = lines.read_metrics(lines.vllm_page({"0": (drafts, accepted)}, {"0": generated}))
    found = assess(evidence)
    assert found.health is health
    assert found.seldom or health is Health.BROKEN


def test_a_head_that_drafts_at_every_step_is_judged_as_before() -> None:
    page = lines.vllm_page({"0": (500, [400, 300])}, {"0": 1210})
    evidence = lines.read_metrics(page)
    assert evidence.record.coverage == pytest.approx(500 / 510)
    assert assess(evidence).basis == "position 0"


def test_replies_without_drafts_count_too() -> None:
    """llama.cpp leaves the draft keys out of a reply that drafted nothing."""
    timings = [
        {"predicted_n": 100, "predicted_per_second": 9.0, "draft_n": 60, "draft_n_accepted": 50},
        {"predicted_n": 400, "predicted_per_second": 9.0},
    ]
    record = lines.read_document([{"timings": t} for t in timings]).record
    assert record.overall == pytest.approx(500 / 450)


def test_an_uncertain_gain_asks_for_a_real_run() -> None:
    for per_position, drafts, certain in (([30, 10], 100, False), ([950, 900], 1000, True)):
        evidence = lines.read(lines.vllm_v1(per_position, drafts))
        found = benefit(evidence.record, Cost(0.1, "assumed"), rate=assess(evidence).pooled)
        assert found is not None and found.undecided != certain
        assert ("--baseline URL" in found.advice) != certain


def test_a_measured_gain_within_its_error() -> None:
    record = lines.read(lines.vllm_v1([60, 20], 100)).record
    found = benefit(record, Cost(0.1, "assumed"), Measured(1.02, 0.95, 1.09))
    assert found is not None and "--requests" in found.advice
    slow = benefit(record, Cost(0.6, "measured"), Measured(0.8, 0.75, 0.85))
    assert slow is not None and "disable" in slow.advice


def test_position_0_from_lifetime_statistics() -> None:
    """A request that is too thin, and statistics that count the drafts whose first token was
    accepted.
    """
    rows = [
        lines.llama_request(70, 900),
        (
            "statistics dflash: #calls(b,g,a) = 4 600 380, #gen drafts = 600, #acc drafts = 380,"
            " #gen tokens = 9000, #acc tokens = 700, dur(b,g,a) = 0.1, 0.2, 0.3 ms"
        ),
    ]
    evidence = lines.read(
        "eval time = 900.0 ms /   130 tokens (  9.0 ms per token,  111.1 tokens per second)", *rows
    )
    found = assess(evidence)
    assert (found.health, found.basis) == (Health.HEALTHY, "position 0, since start")
    assert found.rate is not None and found.rate.value == pytest.approx(380 / 600)
    assert (evidence.record.counts.accepted, evidence.record.counts.drafted) == (70, 900)
    worth = benefit(evidence.record, Cost(0.1, "assumed"), lifetime=evidence.lifetime)
    assert worth is not None and worth.too_deep and worth.depth == 15 and worth.best <= 3


def test_a_dead_request_is_not_excused_by_its_past() -> None:
    rows = [lines.llama_request(3, 900), lines.llama_statistics("draft", 2000, 6000, 4000)]
    assert assess(lines.read(*rows)).health is Health.BROKEN


def test_dead_deep_positions_are_named_while_position_0_is_undecided(tmp_path: Path) -> None:
    report = report_of(tmp_path, lines.vllm_v1([36, 20, 0, 0, 0], 70))
    assert report.results["health"] == "insufficient"
    found = next(f for f in report.findings if f.id == "speculation.k_too_deep")
    assert found.evidence["dead_positions"] == [2, 3, 4] and found.evidence["best"] <= 2


def test_a_good_tail_is_not_called_dead(tmp_path: Path) -> None:
    report = report_of(tmp_path, lines.vllm_v1([36, 20, 15, 12, 11], 70))
    assert "speculation.k_too_deep" not in [f.id for f in report.findings]


CONFIG = "speculative_config=SpeculativeConfig(method='mtp', model='x', num_spec_tokens={}),"


@pytest.mark.parametrize(
    ("rows", "asked", "wrong"),
    [
        ([CONFIG.format(3), lines.vllm_v1([80, 60, 40], 100)], None, False),
        ([CONFIG.format(5), lines.vllm_v1([80, 60, 40], 100)], None, True),
        ([lines.vllm_v1([80, 60, 40], 100)], 3, False),
        ([lines.vllm_v1([80, 60, 40], 100)], 2, True),
        ([lines.vllm_v1([80, 60, 40], 100), lines.vllm_v1([80, 60], 100)], None, True),
        (
            ["--spec-draft-n-max 8", lines.llama_statistics("draft-mtp", 100, 290, 200)],
            None,
            False,
        ),  # drafts may end early
        (["--spec-draft-n-max 2", lines.llama_statistics("draft-mtp", 100, 290, 200)], None, True),
        ([lines.sglang(3.6)], 2, True),  # no step accepts more than was drafted
        ([lines.sglang(2.6)], 2, False),
        ([CONFIG.format(3), CONFIG.format(5), lines.vllm_v1([80, 60, 40], 100)], None, False),
    ],
)
def test_depth_against_what_was_asked(
    rows: list[str], asked: int | None, wrong: bool, tmp_path: Path
) -> None:
    report = report_of(tmp_path, "\n".join(rows) + "\n", num_speculative_tokens=asked)
    assert ("speculation.k_mismatch" in [f.id for f in report.findings]) == wrong
