"""What llama.cpp's own server really wrote: log, `/metrics` and responses of SmolLM2 with drafts in
known states.

Recorded by benchmarks/spec/spec_llama_cpp.py; paths are replaced, and of each response only
`timings` is kept.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.runs import cache_dir
from assay.speculation.combine import combine
from assay.speculation.live import between
from assay.speculation.read import Reading
from assay.speculation.record import Record
from assay.speculation.sources import open_source
from assay.speculation.spec import examine

DATA = Path(__file__).parent / "data"
RUNS = ["self", "q2k", "pruned", "ngram"]


def record(name: str) -> Record:
    reading = Reading()
    reading.add(open_source(str(DATA / f"llama_cpp_{name}")))
    return combine(reading.settled()).record


@pytest.mark.parametrize("run", RUNS)
def test_log_page_and_responses_agree_to_the_token(run: str) -> None:
    before, after = (
        (DATA / f"llama_cpp_{run}.{kind}").read_text() for kind in ("before.prom", "prom")
    )
    window = between(before, after, 1.0).window.record
    log, responses = record(f"{run}.log"), record(f"{run}.json")
    assert (
        (log.counts.drafted, log.counts.accepted)
        == (responses.counts.drafted, responses.counts.accepted)
        == (window.counts.drafted, window.counts.accepted)
    )
    assert (
        window.positions is not None
        and sum(a for a, _ in window.positions) == window.counts.accepted
    )
    # The log prints lengths with two decimals, the page counts drafts.
    assert log.tokens_per_step == pytest.approx(window.tokens_per_step, abs=0.01)


@pytest.mark.parametrize(
    ("run", "health", "finding"),
    [
        ("self", "healthy", "speculation.perfect_acceptance"),
        ("q2k", "healthy", None),
        ("pruned", "broken", "speculation.low_acceptance"),
        ("ngram", "insufficient", "speculation.insufficient"),
    ],
)
@pytest.mark.parametrize("kind", ["log", "json"])
def test_head_states(run: str, health: str, finding: str | None, kind: str) -> None:
    report = examine([str(DATA / f"llama_cpp_{run}.{kind}")])
    assert report.results["health"] == health
    assert [f.id for f in report.findings][:1] == ([] if finding is None else [finding])


@pytest.mark.engine
@pytest.mark.llama
def test_a_live_llama_cpp_agrees_with_its_log_and_its_responses(tmp_path: Path) -> None:
    import httpx

    from assay.demo import llama_server
    from assay.demo.models import SMOLLM2, gguf_of
    from assay.speculation.traffic import PROMPTS

    binary = cache_dir("llama.cpp") / "bin" / "llama-server"
    if not binary.exists():
        pytest.skip("llama.cpp is not built (benchmarks/build/build_llama_cpp.sh)")
    target = tmp_path / "drafting.gguf"
    target.symlink_to(gguf_of(SMOLLM2))
    # Threads that spin stall on shared cores; repacked weights need instructions that some virtual
    # machines forbid.
    arguments = [
        "--threads",
        "1",
        "-md",
        str(target),
        "--spec-type",
        "draft-simple",
        "--spec-draft-n-max",
        "3",
        "--no-repack",
    ]
    with llama_server(target, binary, max_model_len=512, streams=1, extra_args=arguments) as server:
        with httpx.Client(base_url=server.url, timeout=300) as client:
            before = client.get("/metrics").text
            responses = Reading()
            for prompt in PROMPTS[:2]:
                body = {"prompt": prompt, "n_predict": 24, "temperature": 0, "ignore_eos": True}
                responses.document(client.post("/completion", json=body).raise_for_status().json())
            window = between(before, client.get("/metrics").text, 1.0).window.record
        report = examine([str(server.log)])
    own, log = combine(responses.settled()).record, report.results["record"]
    assert (
        (own.counts.drafted, own.counts.accepted)
        == (window.counts.drafted, window.counts.accepted)
        == (log["drafted"], log["accepted"])
    )
    assert (
        own.counts.drafted
        and own.counts.accepted
        and own.counts.accepted >= 0.8 * own.counts.drafted
    )
