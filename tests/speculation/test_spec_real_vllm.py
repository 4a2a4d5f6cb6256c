"""What vLLM 0.32 really wrote: logs, pages and responses of SmolLM2 with drafts in known states.

Recorded by benchmarks/spec/spec_head_states.py; paths and process ids are replaced.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from assay.speculation.combine import combine
from assay.speculation.live import between
from assay.speculation.read import Reading
from assay.speculation.record import Record
from assay.speculation.sources import open_source
from assay.speculation.spec import examine
from vllm_cpu import ONE_PROCESS

DATA = Path(__file__).parent / "data"
RUNS = ["self", "self1", "layers26", "random", "zeroed", "ngram"]


def record(name: str) -> Record:
    reading = Reading()
    reading.add(open_source(str(DATA / f"vllm_0_32_{name}")))
    return combine(reading.settled()).record


@pytest.mark.parametrize("run", RUNS)
def test_log_and_page_agree_to_the_token(run: str) -> None:
    log, page = record(f"{run}.log"), record(f"{run}.prom")
    assert (log.counts.drafts, log.counts.drafted, log.counts.accepted) == (
        page.counts.drafts,
        page.counts.drafted,
        page.counts.accepted,
    )
    assert log.positions == page.positions
    assert log.windows >= 10


@pytest.mark.parametrize("run", ["self", "ngram"])
def test_responses_agree_with_the_window_between_the_pages(run: str) -> None:
    before, after = (
        (DATA / f"vllm_0_32_{run}.{kind}").read_text() for kind in ("before.prom", "prom")
    )
    window, responses = between(before, after, 1.0).window.record, record(f"{run}.json")
    assert (window.counts.drafts, window.counts.drafted, window.counts.accepted) == (
        responses.counts.drafts, responses.counts.drafted, responses.counts.accepted,
    )  # fmt: skip
    assert window.positions == responses.positions


@pytest.mark.parametrize(
    ("run", "health", "finding"),
    [
        ("self", "healthy", None),
        ("layers26", "degraded", "speculation.head_diverged"),
        ("random", "broken", "speculation.head_dead"),
        ("zeroed", "broken", "speculation.head_dead"),
        ("off", "off", "speculation.off"),
    ],
)
def test_head_states(run: str, health: str, finding: str | None) -> None:
    report = examine([str(DATA / f"vllm_0_32_{run}.log")])
    assert report.results["health"] == health
    if finding:
        assert report.findings[0].id == finding


def test_start_up_lines_are_quoted() -> None:
    found = examine([str(DATA / "vllm_0_32_random.log")]).results["start_up"]
    assert "method='draft_model'" in found["speculation_on"]
    assert "from 8192 to 1024" in found["draft_context"]
    assert "0.32.0" in found["version"]
    assert "speculation is off" in examine([str(DATA / "vllm_0_32_off.log")]).findings[0].title


@pytest.mark.engine
def test_a_live_server_its_log_and_its_responses_agree() -> None:
    """One vLLM with itself as its draft: page, log, responses and command count the same tokens."""
    pytest.importorskip("torch")
    import httpx

    from assay.demo import vllm_server
    from assay.demo.models import build_smollm2
    from assay.speculation.options import SpecOptions
    from assay.speculation.traffic import PROMPTS

    model = build_smollm2()
    speculative = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    arguments = [
        "--speculative-config", json.dumps(speculative), "--max-num-seqs", "4",
        "--per-request-spec-decode-metrics", "summary", *ONE_PROCESS["extra_args"],
    ]  # fmt: skip

    def counts(own: Record) -> tuple[object, ...]:
        return own.counts.drafts, own.counts.drafted, own.counts.accepted, own.positions

    with vllm_server(
        model,
        name="speculating",
        max_model_len=1024,
        extra_args=arguments,
        env={"VLLM_LOG_STATS_INTERVAL": "1", **ONE_PROCESS["env"]},
    ) as server:
        with httpx.Client(base_url=server.url, timeout=300) as client:

            def page() -> str:
                return client.get("/metrics").raise_for_status().text

            before = page()
            responses = Reading()
            for prompt in PROMPTS[:3]:
                body = {
                    "model": "speculating",
                    "prompt": prompt,
                    "max_tokens": 48,
                    "temperature": 0,
                }
                responses.document(
                    client.post("/v1/completions", json=body).raise_for_status().json()
                )
            window = between(before, page(), 1.0).window.record
            assert counts(window) == counts(combine(responses.settled()).record)
            assert window.counts.drafts and window.counts.drafts > 30

            report = examine([server.url], SpecOptions(interval=2.0, requests=2))
            assert report.results["health"] == "healthy" and report.exit_code == 0
            live = report.results["live"]
            assert (live["own_requests"], live["other_tokens"]) == (2, 0)
            own = report.results["record"]
            assert own["accepted"] >= 0.9 * own["drafted"]

            time.sleep(2.5)  # the last window is logged after the last token
            whole = Reading()
            whole.metrics(page())
        log = Reading()
        log.add(open_source(str(server.log)))
        # Both also hold what the client's probes made the server draft.
        assert counts(combine(log.settled()).record) == counts(combine(whole.settled()).record)
