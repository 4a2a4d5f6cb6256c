"""What vLLM 0.32 really wrote: logs, pages and responses of SmolLM2 with drafts in known states.

Recorded by benchmarks/spec_head_states.py; paths and process ids are replaced.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from assay.speculation.combine import combine
from assay.speculation.examine import examine
from assay.speculation.live import between
from assay.speculation.reading import Reading
from assay.speculation.record import Record
from assay.speculation.sources import open_source

DATA = Path(__file__).parent / "data"
RUNS = ["self", "self1", "layers26", "random", "zeroed", "ngram"]


def record(name: str) -> Record:
    reading = Reading()
    reading.add(open_source(str(DATA / f"vllm_0_32_{name}")))
    return combine(reading.settled()).record


@pytest.mark.parametrize("run", RUNS)
def test_log_and_page_agree_to_the_token(run: str) -> None:
    log, page = record(f"{run}.log"), record(f"{run}.prom")
    assert (log.drafts, log.drafted, log.accepted) == (page.drafts, page.drafted, page.accepted)
    assert log.positions == page.positions
    assert log.windows >= 10


@pytest.mark.parametrize("run", ["self", "ngram"])
def test_responses_agree_with_the_window_between_the_pages(run: str) -> None:
    before, after = ((DATA / f"vllm_0_32_{run}.{kind}").read_text() for kind in ("before.prom", "prom"))
    window, responses = between(before, after, 1.0).window.record, record(f"{run}.json")
    assert (window.drafts, window.drafted, window.accepted) == (
        responses.drafts, responses.drafted, responses.accepted,
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
def test_a_live_server_agrees_with_its_log(tmp_path: Path) -> None:
    """One vLLM with itself as its draft: scrapes, log and command say the same."""
    pytest.importorskip("torch")
    from assay.demo.models import build_smollm2
    from assay.demo.servers import vllm_server
    from assay.speculation.examine import Options

    model = build_smollm2()
    speculative = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    arguments = ["--speculative-config", json.dumps(speculative), "--max-num-seqs", "4"]
    with vllm_server(
        model, max_model_len=1024, extra_args=arguments, env={"VLLM_LOG_STATS_INTERVAL": "1"}
    ) as server:
        report = examine([server.url], Options(interval=3.0, requests=4))
        assert report.results["health"] == "healthy"
        live = report.results["live"]
        assert (live["judged"], live["other_tokens"]) == ("window", 0)
        own = report.results["record"]
        assert own["accepted"] >= 0.9 * own["drafted"]
        time.sleep(2.5)
        log = examine([str(server.log)]).results["record"]
        # The log also holds what the client's probes made the server draft.
        assert live["lifetime"]["drafted"] == log["drafted"]
