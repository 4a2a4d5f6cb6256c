from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import spec_lines as lines

from assay.errors import AssayError
from assay.speculation import traffic as live_module
from assay.speculation.live import between, watch
from assay.speculation.options import SpecOptions
from assay.speculation.spec import examine
from assay.speculation.traffic import Sent
from stub_server import StubServer

FAST = SpecOptions(interval=0.0)


def serving(stub: StubServer, *pages: str) -> StubServer:
    """Answer /metrics with the pages one after the other; the last stays."""
    left = list(pages)
    return stub.on(
        "GET /metrics", lambda e: e.send((left.pop(0) if len(left) > 1 else left[0]).encode())
    )


def test_the_window_between_two_scrapes_is_judged() -> None:
    before = lines.vllm_page({"0": (5000, [4500, 4000])})
    after = lines.vllm_page({"0": (5400, [4504, 4000])})
    with StubServer() as stub:
        report = examine([serving(stub, before, after).url], FAST)
    # Since start 83 % look fine; in the window 4 of 400 were accepted.
    assert report.results["health"] == "broken"
    assert report.results["record"]["drafts"] == 400
    assert report.results["live"]["lifetime"]["drafts"] == 5400
    assert report.exit_code == 1


def test_a_thin_window_is_judged_with_everything_since_start() -> None:
    before, after = (
        lines.vllm_page({"0": (500, [400, 300])}),
        lines.vllm_page({"0": (503, [402, 301])}),
    )
    with StubServer() as stub:
        report = examine([serving(stub, before, after).url], FAST)
    assert (report.results["live"]["judged"], report.results["health"]) == (
        "since start",
        "healthy",
    )
    assert any("too few" in f.title for f in report.findings)


def test_a_restart_in_between_is_inconclusive() -> None:
    before, after = (
        lines.vllm_page({"0": (5000, [4500, 4000])}),
        lines.vllm_page({"0": (80, [70, 60])}),
    )
    with StubServer() as stub:
        report = examine([serving(stub, before, after).url], FAST)
    assert report.exit_code == 3
    assert "speculation.counter_reset" in [f.id for f in report.findings]
    assert report.results["record"]["drafts"] == 80


def test_one_engine_that_restarts_among_several() -> None:
    live = between(
        lines.vllm_page({"0": (500, [400]), "1": (900, [800])}),
        lines.vllm_page({"0": (600, [480]), "1": (90, [80])}),
        1.0,
    )
    assert live.reset
    assert {k: r.counts.drafts for k, r in live.window.per_engine.items()} == {"0": 100, "1": 90}


def test_a_server_that_goes_away_between_scrapes() -> None:
    page = lines.vllm_page({"0": (500, [400, 300])})
    calls: list[int] = []

    def metrics(e: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            e.abort()
        else:
            e.send(page.encode())

    with StubServer() as stub, pytest.raises(AssayError) as caught:
        examine([stub.on("GET /metrics", metrics).url], SpecOptions(interval=0.0, timeout=5))
    assert caught.value.finding_id.startswith("server.")
    assert caught.value.verdict.exit_code in (2, 3)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_unreachable(url: str) -> None:
    with pytest.raises(AssayError) as caught:
        examine([url], FAST)
    assert caught.value.verdict.exit_code == 2


def test_a_page_without_speculative_counters_is_off() -> None:
    with StubServer() as stub:
        report = examine([stub.url], FAST)
    assert (report.results["health"], report.exit_code) == ("off", 3)


def test_other_traffic_shows() -> None:
    before = lines.vllm_page({"0": (100, [80])}, {"0": 1000})
    after = lines.vllm_page({"0": (300, [240])}, {"0": 1900})
    alone, busy = (between(before, after, 1.0, Sent(4, tokens)) for tokens in (900, 500))
    assert (alone.other_tokens, busy.other_tokens) == (0, 400)
    assert [f.id for f in alone.findings] == []
    assert [f.id for f in busy.findings] == ["speculation.other_traffic"]


def test_requests_of_our_own_fall_between_the_scrapes() -> None:
    before = lines.vllm_page({"0": (100, [80])}, {"0": 0})
    after = lines.vllm_page({"0": (300, [240])}, {"0": 21})
    with StubServer() as stub:

        def ours() -> int:
            return sum(b.get("max_tokens") == 128 for b in stub.bodies("POST /v1/completions"))

        # Whatever the client asks while it looks around, the counters only move with our requests.
        stub.on("GET /metrics", lambda e: e.send((after if ours() else before).encode()))
        live = watch(stub.url, interval=0.0, requests=3, sleep=lambda _: None)
        sent = ours()
    assert live.sent is not None and live.sent.requests == 3
    assert sent == 3
    assert (live.window.record.counts.drafts, live.other_tokens) == (
        200,
        max(0, 21 - live.sent.tokens),
    )


def test_files_and_urls_do_not_mix(tmp_path: Any) -> None:
    file = tmp_path / "log"
    file.write_text("x\n")
    sources: Sequence[str] = ["http://127.0.0.1:9", str(file)]
    with pytest.raises(AssayError, match="by itself"):
        examine(sources, FAST)


def test_sglang_gauges_are_not_differenced() -> None:
    page = 'sglang:spec_accept_length{tp_rank="0"} {}'.replace("{}", "2.6")
    with StubServer() as stub:
        report = examine([serving(stub, page).url], FAST)
    assert report.results["record"]["mean_acceptance_length"] == 2.6
    assert report.results["health"] == "healthy"


def iterations(*accepted: int) -> str:
    stats = [
        {"iter": i, "specDecodingStats": {
            "numDraftTokens": 30, "numAcceptedTokens": a, "numRequestsWithDraftTokens": 10,
        }}
        for i, a in enumerate(accepted)
    ]  # fmt: skip
    return json.dumps(stats)


def test_tensorrt_iterations_of_the_second_look_are_the_window() -> None:
    with StubServer() as stub:
        stub.on("GET /prometheus/metrics", lambda e: e.send(b"", status=404))
        report = examine(
            [serving(stub, iterations(0, 0), iterations(21, 24, 22, 20, 25, 23)).url], FAST
        )
    assert (report.results["record"]["drafted"], report.results["record"]["accepted"]) == (180, 135)
    assert report.results["health"] == "healthy"


def test_tensorrt_counters_are_preferred_to_iterations() -> None:
    def page(drafted: int, accepted: int) -> str:
        return (
            f"trtllm_spec_decode_num_draft_tokens_total {drafted}\n"
            f"trtllm_spec_decode_num_accepted_tokens_total {accepted}\n"
        )

    left = [page(500, 400), page(900, 420)]
    with StubServer() as stub:
        stub.on("GET /prometheus/metrics", lambda e: e.send(left.pop(0).encode()))
        report = examine([serving(stub, iterations(0), iterations(0)).url], FAST)
    assert (report.results["record"]["drafted"], report.results["record"]["accepted"]) == (400, 20)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/metrics", "/metrics/", "/prometheus/metrics"])
def test_the_address_of_a_page_is_the_server_s(ending: str) -> None:
    with StubServer() as stub:
        report = examine(
            [serving(stub, lines.vllm_page({"0": (500, [400, 300])})).url + ending], FAST
        )
    assert report.results["health"] == "healthy"


@pytest.mark.parametrize("page", ["", "<html><body>Welcome</body></html>", "[1, 2"])
def test_what_is_no_metrics_page_is_not_called_off(page: str) -> None:
    with StubServer() as stub, pytest.raises(AssayError, match="is not a metrics page"):
        examine([serving(stub, page).url], FAST)


def test_a_missing_page_comes_with_the_switch_that_shows_it() -> None:
    with StubServer() as stub, pytest.raises(AssayError) as caught:
        examine([stub.on("GET /metrics", lambda e: e.send(b"", status=404)).url], FAST)
    assert "--enable-metrics" in caught.value.remedy


def test_a_race_takes_each_round_under_one_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both servers slow down fourfold half-way: the quotient of their speeds stays what it is."""
    now = [0.0]
    asked: list[str] = []

    def send(engine: Any, requests: int, concurrency: int = 2, first: int = 0) -> Sent:
        asked.append(engine)
        pace = (150.0 if engine == "on" else 100.0) * (1.02 if first % 4 else 0.98)
        now[0] += requests * 64 / pace * (4 if len(asked) > 12 else 1)
        return Sent(requests, requests * 64)

    monkeypatch.setattr(live_module, "send", send)
    monkeypatch.setattr(live_module.time, "perf_counter", lambda: now[0])
    sent, measured = live_module.race("on", "off", 16)  # type: ignore[arg-type]
    assert measured.value == pytest.approx(1.5) and measured.lo is not None and measured.lo > 1.4
    assert (sent.requests, sent.tokens) == (18, 18 * 64)
    order = asked[2:]
    assert order[:4] == ["off", "on", "on", "off"], "neither is always the first"


def test_a_baseline_server_is_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    page = lines.vllm_page({"0": (500, [400, 300])})
    with StubServer() as on, StubServer() as off:
        report = examine(
            [serving(on, page).url], SpecOptions(interval=0.0, baseline=(off.url,), requests=6)
        )
        bodies = [
            [b.get("seed") for b in s.bodies("POST /v1/completions") if b.get("max_tokens") == 128]
            for s in (on, off)
        ]
    assert sorted(bodies[0]) == sorted(bodies[1]) and len(bodies[0]) == 8
    found = report.results["benefit"]["measured_multiplier_interval"]
    assert found["lo"] < found["value"] < found["hi"]
    assert report.results["live"]["race"] == found
    assert "measured" in next(m.note for m in report.headline if m.name == "net multiplier")
