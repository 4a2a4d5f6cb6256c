"""What `assay check` answers where the server misbehaves: the exit codes that others rely on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from check_servers import ROUTES, Sane, answering, check, ids, serving, words

from stub_server import (
    Behaviour,
    Exchange,
    StubServer,
    close_at_once,
    cut_after,
    drip,
    events,
    hang,
    healthy,
    huge,
    not_found,
    page,
    rate_limited,
    redirect,
    sse,
    status,
    text,
    times,
)

FRANCE = ("--probe", "france", "--timeout", "1")
PARIS = sse({"choices": [{"index": 0, "delta": {"content": "Paris"}, "finish_reason": None}]})


def well_begun(then: Behaviour) -> Behaviour:
    """Sane answers while the capabilities are probed, with a few tokens each; `then` to the
    questions that follow.
    """
    return lambda e: (then if e.body["max_tokens"] >= 60 else Sane())(e)


def streams_are(behaviour: Behaviour) -> Behaviour:
    """Sane whole answers; `behaviour` where a stream is asked for."""
    return lambda e: (behaviour if e.body.get("stream") else Sane())(e)


@pytest.mark.parametrize(
    ("url", "finding"),
    [
        ("http://127.0.0.1:9", "server.unreachable"),
        ("http://no-such-host.invalid", "server.unreachable"),
        ("https://127.0.0.1:9", "server.unreachable"),
        ("ftp://127.0.0.1", "server.usage"),
        ("not a url", "server.usage"),
    ],
)
def test_no_server(capsys: pytest.CaptureFixture[str], url: str, finding: str) -> None:
    code, report = check(capsys, url)
    assert (code, report["verdict"], ids(report)) == (2, "error", {finding})
    assert report["findings"][0]["remedies"]


@pytest.mark.parametrize(
    ("behaviour", "code", "finding"),
    [
        (status(401), 2, "server.unauthorized"),
        (status(403), 2, "server.unauthorized"),
        (not_found(), 2, "server.model_unknown"),
        (page(), 2, "server.not_json"),
        (text("hello"), 2, "server.not_json"),
        (text('{"data": 3}'), 2, "server.not_json"),
        (status(500), 2, "server.failing"),
        (redirect("http://example.invalid/v1/models"), 2, "server.redirected"),
        (rate_limited("0"), 3, "server.rate_limited"),
        (hang(), 3, "server.timeout"),
    ],
)
def test_the_list_of_models(
    capsys: pytest.CaptureFixture[str], behaviour: Behaviour, code: int, finding: str
) -> None:
    with StubServer() as stub:
        stub.on("GET /v1/models", behaviour)
        got, report = check(capsys, stub.url, *FRANCE)
    assert (got, ids(report)) == (code, {finding})


NO_ANSWER = [
    (status(401), 2, "server.unauthorized", "answered 401"),
    (not_found(), 2, "server.not_found", "answered 404"),
    (status(404, "The model `gpt-9` does not exist."), 2, "server.model_unknown", "gpt-9"),
    (status(500, "CUDA error"), 2, "server.failing", "answered 500: CUDA error"),
    (page(), 2, "server.not_json", "a web page titled 'Sign in & go'"),
    (text('{"choices": ['), 2, "server.not_json", "not JSON"),
    (huge(), 2, "server.too_large", "1,073,741,824 bytes"),
    (huge(announce=False), 2, "server.too_large", "more than 33,554,432 bytes"),
    (redirect("http://example.invalid/v1?key=abc"), 2, "server.redirected", "example.invalid"),
    (rate_limited("0"), 3, "server.rate_limited", "answered 429"),
    (rate_limited("3600"), 3, "server.rate_limited", "asks to wait 3,600 s"),
    (hang(), 3, "server.timeout", " after 1"),  # the clock of the attempt, or of a silence
    (drip(b" ", 0.1), 3, "server.timeout", "had not finished its answer after 1 s"),
    (close_at_once(), 3, "server.stream_cut", "closed the connection"),
]


@pytest.mark.parametrize(("behaviour", "code", "finding", "says"), NO_ANSWER)
def test_no_answer_at_all(
    capsys: pytest.CaptureFixture[str], behaviour: Behaviour, code: int, finding: str, says: str
) -> None:
    with serving(behaviour) as stub:
        began = time.monotonic()
        got, report = check(capsys, stub.url, *FRANCE)
    assert (got, ids(report)) == (code, {finding})
    assert says in report["findings"][0]["title"]
    assert report["findings"][0]["remedies"]
    assert "abc" not in report["findings"][0]["title"]
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(("behaviour", "code", "finding", "says"), NO_ANSWER)
def test_no_answer_after_a_good_beginning(
    capsys: pytest.CaptureFixture[str], behaviour: Behaviour, code: int, finding: str, says: str
) -> None:
    with serving(well_begun(behaviour)) as stub:
        got, report = check(capsys, stub.url, *FRANCE)
    assert got == code
    assert says in report["findings"][0]["title"]
    assert ids(report) == (
        {finding} if code == 2 else {"coherence.probe_unfinished", "throughput.unfinished"}
    )


@pytest.mark.parametrize(
    ("stream", "later", "says"),
    [
        (events(b"data: {not json}\n\n"), False, "an event that is not a JSON object: {not json}"),
        (events(b"data: {not json}\n\n"), True, "an event that is not a JSON object: {not json}"),
        (events(b"no events at all"), False, "no server-sent events"),
        (events(PARIS, sse({"error": {"message": "CUDA error"}})), False, "CUDA error"),
        (cut_after(PARIS), False, "closed the connection in the middle"),
        (cut_after(PARIS), True, "closed the connection in the middle"),
        (page(), False, "a web page"),
        (status(500, "no streams today"), False, "no streams today"),
        (huge(), False, "1,073,741,824 bytes"),
    ],
)
def test_streams_that_are_broken_fail(
    capsys: pytest.CaptureFixture[str], stream: Behaviour, later: bool, says: str
) -> None:
    broken = streams_are(stream)
    with serving(well_begun(broken) if later else broken) as stub:
        code, report = check(
            capsys, stub.url, "--samples", "5", "--probe", "story", "--timeout", "1"
        )
    found = [f for f in report["findings"] if f["id"] == "coherence.streaming"]
    assert code == 1
    assert any(says in f["detail"] and f["severity"] == "error" for f in found)
    assert report["results"]["throughput"]["valid"] is False


def test_streams_that_do_not_end_in_time_leave_the_verdict_open(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(streams_are(drip(PARIS, 0.1))) as stub:
        code, report = check(
            capsys, stub.url, "--samples", "5", "--probe", "story", "--timeout", "1"
        )
    finding = next(f for f in report["findings"] if f["id"] == "throughput.unfinished")
    assert code == 3 and "had not finished its answer after 1 s" in finding["title"]


def test_a_key_that_is_not_set_is_named_before_anything_is_sent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with StubServer() as stub:
        code, report = check(capsys, stub.url, "--api-key-env", "NO_SUCH_KEY")
        assert stub.exchanges == []
    assert code == 2
    assert "NO_SUCH_KEY" in report["findings"][0]["title"]


def test_markup_in_a_text_is_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = (
        "<script>alert(1)</script> The capital of France is <b>Paris</b>, a large city on the"
        " Seine. <img src=x>"
    )
    html, junit, markdown = (tmp_path / name for name in ("r.html", "r.xml", "r.md"))
    outputs = ("--html", str(html), "--junit", str(junit), "--markdown", str(markdown))
    with answering(words(said), scores=False, echo=False) as stub:
        code, report = check(capsys, stub.url, "--samples", "3", *outputs)
    page_text = html.read_text(encoding="utf-8")
    france = next(p for p in report["results"]["probes"] if p["name"] == "france")
    assert code == 0
    assert france["samples"][0]["text_head"] == said
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page_text
    assert "<script>alert" not in page_text and "<img src=x>" not in page_text
    ElementTree.parse(junit)


def test_one_answer_to_every_question_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = (
        "<!DOCTYPE html><html><head><title>502 Bad Gateway</title></head><body>502 Bad"
        " Gateway</body></html>"
    )
    with answering(words(gateway), scores=False, echo=False) as stub:
        _, report = check(capsys, stub.url, "--samples", "3")
    finding = next(f for f in report["findings"] if f["id"] == "coherence.same_answer")
    assert finding["severity"] == "warning"
    assert "502 Bad Gateway" in finding["detail"]


def test_a_rate_limit_that_passes_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(times(3, rate_limited("0"), Sane())) as stub:
        code, _ = check(capsys, stub.url, "--samples", "3")
    assert code == 0


def test_a_server_that_cannot_stream_is_not_timed_and_passes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def whole_only(e: Exchange) -> None:
        (status(400, "streaming is not supported") if e.body.get("stream") else Sane())(e)

    with serving(whole_only) as stub:
        code, report = check(capsys, stub.url, "--samples", "3")
    throughput = report["results"]["throughput"]
    assert (code, throughput["valid"], throughput["samples"]) == (0, False, 0)
    assert "streaming is not supported" in throughput["skipped"]
    assert throughput["decode_tokens_per_s"] == {"median": None, "min": None, "max": None}


def test_scores_that_fail_after_the_server_could_score_leave_the_verdict_open(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails_on_long(e: Exchange) -> None:
        long = e.body.get("prompt_logprobs") is not None and len(str(e.body["prompt"])) > 100
        (status(500) if long else Sane(scores=True))(e)

    with serving(fails_on_long) as stub:
        code, report = check(capsys, stub.url, "--samples", "3")
    assert (code, ids(report)) == (3, {"coherence.scores_unfinished"})


def test_a_server_that_turns_the_key_away_in_the_middle_keeps_what_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(well_begun(times(15, Sane(), status(401)))) as stub:
        code, report = check(capsys, stub.url, "--samples", "3", "--parallel", "1")
    assert code == 2
    assert "server.unauthorized" in ids(report)
    assert sum(len(p["samples"]) for p in report["results"]["probes"]) > 3


def test_a_server_without_a_chat_template_is_asked_to_continue_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(Sane()) as stub:
        stub.on("POST /v1/chat/completions", status(400, "this model has no chat template"))
        code, report = check(capsys, stub.url, "--samples", "4")
        prompts = [b["prompt"] for b in stub.bodies("POST /v1/completions")]
    probes = {p["name"]: p for p in report["results"]["probes"]}
    assert code in (0, 3)
    assert {name for name, p in probes.items() if p["status"] == "skipped"} == {
        "second_turn",
        "tool_call",
    }
    assert "no chat template" in probes["second_turn"]["reason"]
    assert any("The capital of France is" in str(p) for p in prompts)


def test_a_model_without_tools_skips_that_probe_and_passes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_tools(e: Exchange) -> None:
        (status(400, "tools need --enable-auto-tool-choice") if e.body.get("tools") else Sane())(e)

    with serving(no_tools) as stub:
        code, report = check(capsys, stub.url, "--samples", "3")
    probe = next(p for p in report["results"]["probes"] if p["name"] == "tool_call")
    assert (code, probe["status"], probe["samples"]) == (0, "skipped", [])
    assert "--enable-auto-tool-choice" in probe["reason"]


@pytest.mark.parametrize(
    "text",
    [
        'One moment < "arguments": {"city": "Lima"}}]',
        '<tool_call>\n{"name": "get_weather", "arguments": {"ci',
    ],
)
def test_broken_tool_calls_fail_and_are_shown(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    def broken(e: Exchange) -> None:
        offered = bool(e.body.get("tools")) and e.body["max_tokens"] > 1
        (healthy(chunks=words(text), scores=False, echo=False) if offered else Sane())(e)

    with serving(broken) as stub:
        code, report = check(capsys, stub.url, "--samples", "3", "--no-throughput")
    finding = next(f for f in report["findings"] if f["id"] == "coherence.tool_form")
    assert (code, finding["severity"]) == (1, "error")
    assert finding["detail"] in text and len(finding["detail"]) > 15
    assert {"rule": "tool_form", "state": "bad"}.items() <= next(
        r for r in report["results"]["rules"] if r["rule"] == "tool_form"
    ).items()


@pytest.mark.parametrize("route", ROUTES)
def test_every_request_names_the_model_and_neutral_penalties(
    capsys: pytest.CaptureFixture[str], route: str
) -> None:
    with serving(Sane()) as stub:
        if route == ROUTES[1]:
            stub.off(ROUTES[0])
        check(capsys, stub.url, "--probe", "france")
        bodies: list[Any] = [b for b in stub.bodies(route) if b["max_tokens"] == 200]
    assert len(bodies) == 2
    assert {b["temperature"] for b in bodies} == {0.7, 0.0}
    for body in bodies:
        assert body["model"] == "stub-model"
        for name, neutral in (
            ("frequency_penalty", 0),
            ("presence_penalty", 0),
            ("repetition_penalty", 1),
        ):
            assert body.get(name, neutral) == neutral
