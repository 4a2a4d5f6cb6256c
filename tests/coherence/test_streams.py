"""Streams against whole answers: each fault is told with its chunk, and what is healthy passes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import assay
from assay.coherence.stream_faults import StreamFault, stream_fault
from assay.coherence.streams import check_case, stream_cases
from assay.engines import Reply, ToolCall
from assay.engines.server.engine import ServerEngine
from assay.engines.server.trace import StreamTrace
from cli.check_servers import Sane, serving, words
from stub_server import Behaviour, Exchange, StubServer, sse

TEXT = "Water is 水 in Chinese, вода in Russian, and the sky is blue since air scatters light."


def chunk(content: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": delta | more, "finish_reason": finish}]}


def traced(chunks: Sequence[Any], done: bool = True) -> StreamTrace:
    trace = StreamTrace()
    for one in chunks:
        trace.take(one if isinstance(one, str) else json.dumps(one))
    if done:
        trace.take("[DONE]")
    return trace


def streamed(pieces: Sequence[str]) -> StreamTrace:
    return traced([*map(chunk, pieces), chunk(finish="stop")])


def fault(pieces: Sequence[str], whole: str = TEXT) -> StreamFault | None:
    return stream_fault(Reply(content=whole, finish_reason="stop"), streamed(pieces))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=60))
def test_any_cut_of_a_text_into_chunks_is_healthy(sizes: list[int]) -> None:
    pieces, rest = [], TEXT
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert fault([*pieces, rest]) is None


def test_blanks_around_a_text_are_no_text() -> None:
    assert fault(["\n\n", *words(TEXT), "\n"]) is None
    assert fault([*words(TEXT)], f"\n{TEXT} ") is None


@pytest.mark.parametrize("place", range(16))
def test_a_repeated_and_a_lost_piece_are_told_with_their_chunk(place: int) -> None:
    pieces = list(words(TEXT))
    assert len(pieces) == 17
    again = fault([*pieces[: place + 1], pieces[place], *pieces[place + 1 :]])
    assert again is not None and again.kind == "repeated"
    assert again.event is not None and again.event in (place + 1, place + 2)
    lost = fault([*pieces[:place], *pieces[place + 1 :]])
    assert lost is not None and lost.kind == "lost" and lost.event in (place, place + 1)


def test_the_end_that_is_lost_and_text_after_the_end_are_told() -> None:
    pieces = list(words(TEXT))
    end, more = fault(pieces[:-1]), fault([*pieces, " light."])
    assert end is not None and end.kind == "lost"
    assert more is not None and more.kind == "repeated"


def test_all_text_so_far_in_every_chunk_is_told() -> None:
    pieces = words(TEXT)
    found = fault(["".join(pieces[: n + 1]) for n in range(len(pieces))])
    assert found is not None and (found.kind, found.event) == ("repeated", 1)


def test_a_letter_that_is_cut_at_the_edge_of_a_chunk_is_told() -> None:
    raw = TEXT.encode()
    pieces = [raw[i : i + 5].decode("utf-8", "replace") for i in range(0, len(raw), 5)]
    found = fault(pieces)
    assert found is not None and found.kind == "utf8" and "\ufffd" in pieces[found.event or 0]


def test_another_text_is_only_different() -> None:
    found = fault(words("Nothing here has anything to do with what was asked, not one word of it."))
    assert found is not None and found.kind == "differs"


def test_text_after_the_end_mark_is_not_seen_by_clients() -> None:
    pieces = words(TEXT)
    trace = traced([chunk("".join(pieces[:8]), "stop")])
    trace.take(json.dumps(chunk("".join(pieces[8:]))))
    found = stream_fault(Reply(content=TEXT, finish_reason=None), trace)
    assert found is not None and found.kind == "lost"


def call(index: int | None, name: str = "", arguments: str = "", id_: str | None = None) -> Any:
    delta: dict[str, Any] = {
        "function": {"arguments": arguments} | ({"name": name} if name else {})
    }
    if index is not None:
        delta["index"] = index
    if id_:
        delta["id"] = id_
    return chunk(tool_calls=[delta])


OSLO, ROME = '{"city": "Oslo"}', '{"city": "Rome"}'
CALLS = (ToolCall("weather", OSLO, "a"), ToolCall("weather", ROME, "b"))
HEALTHY = [
    call(0, "weather", "", "a"),
    call(0, "", OSLO[:7]),
    call(0, "", OSLO[7:]),
    call(1, "weather", "", "b"),
    call(1, "", ROME),
]


@pytest.mark.parametrize(
    ("chunks", "kind"),
    [
        (HEALTHY, None),
        ([*HEALTHY[:3], call(1, "weather", ROME.replace(" ", ""), "b")], None),
        ([HEALTHY[0], HEALTHY[3], HEALTHY[1], HEALTHY[4], HEALTHY[2]], None),
        ([call(None, "weather", OSLO, "a")], "tool_index"),
        ([*HEALTHY[:3], call(0, "weather", "", "b"), call(0, "", ROME)], "tool_index"),
        ([HEALTHY[1], HEALTHY[0], *HEALTHY[2:]], "tool_order"),
        ([HEALTHY[0], HEALTHY[2], HEALTHY[1], *HEALTHY[3:]], "tool_arguments"),
        ([HEALTHY[0], HEALTHY[1], *HEALTHY[3:]], "tool_arguments"),
        ([*HEALTHY[:2], HEALTHY[1], *HEALTHY[2:]], "tool_arguments"),
        ([*HEALTHY[:3]], "tool_lost"),
        ([chunk('{"name": "weather"}')], "tool_lost"),
        ([call(0, "other", OSLO, "a"), *HEALTHY[3:]], "tool_lost"),
        ([call(0, "weather", ROME, "a"), *HEALTHY[3:]], "differs"),
    ],
)
def test_tool_calls_are_joined_as_clients_join_them(chunks: list[Any], kind: str | None) -> None:
    trace = traced([*chunks, chunk(finish="tool_calls")])
    found = stream_fault(Reply(content="", finish_reason=None, tool_calls=CALLS), trace)
    assert (found and found.kind) == kind
    assert found is None or found.event is not None


def test_an_end_without_a_reason_or_mark_is_a_cut_and_an_error_is_an_error() -> None:
    reply = Reply(content=TEXT, finish_reason=None)
    broken = traced([chunk("Water"), {"error": {"message": "CUDA error"}}], done=False)
    found = stream_fault(reply, broken)
    assert found is not None and (found.kind, found.event) == ("error", 1)
    garbage = stream_fault(reply, traced([chunk("Water"), "<html>"]))
    assert garbage is not None and garbage.kind == "invalid"


# Whole servers.


def in_streams(behave: Behaviour) -> StubServer:
    """A server that is sane but for its streams."""
    return serving(lambda e: behave(e) if e.body.get("stream") else Sane()(e))


def sending(*pieces: bytes) -> Behaviour:
    def behave(e: Exchange) -> None:
        e.begin(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
        for piece in pieces:
            e.chunk(piece)
        e.chunk(b"")

    return behave


def cut(e: Exchange) -> None:
    e.begin(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
    e.chunk(sse(chunk("Hello")))
    e.abort()


def edited(edit: Callable[[list[bytes]], list[bytes]]) -> Behaviour:
    """The sane stream with its events edited."""

    def behave(e: Exchange) -> None:
        events: list[bytes] = []
        kept = e.chunk

        def collect(data: bytes) -> None:
            if data:
                events.append(data)
                return
            for event in edit(events):
                kept(event)
            kept(b"")

        e.chunk = collect  # type: ignore[method-assign]
        Sane()(e)

    return behave


EMPTY = sending(*[sse(chunk())] * 5, sse(chunk(finish="stop")), b"data: [DONE]\n\n")


@pytest.mark.parametrize("speed", [True, False], ids=["timed", "no-throughput"])
@pytest.mark.parametrize(
    ("behave", "kind"),
    [
        (EMPTY, "empty"),
        (sending(sse(chunk("Hello")), sse({"error": {"message": "CUDA error"}})), "error"),
        (cut, "cut"),
        (lambda e: e.send(b"<html><title>Welcome</title></html>", kind="text/html"), "web_page"),
        (lambda e: e.json({"error": {"message": "engine died"}}, status=500), "error"),
        (edited(lambda events: [*events[:4], *events[3:]]), "repeated"),
        (edited(lambda events: [*events[:4], *events[5:]]), "lost"),
    ],
    ids=["empty", "error", "cut", "web page", "500", "repeated", "lost"],
)
def test_a_server_whose_streams_are_broken_fails(behave: Behaviour, kind: str, speed: bool) -> None:
    with in_streams(behave) as stub:
        report = assay.check(stub.url, quick=True, throughput=speed, timeout=5.0)
    assert report.exit_code == 1
    found = [f for f in report.findings if f.id == "coherence.streaming"]
    assert found and {f.severity.value for f in found} <= {"error", "warning"}
    assert kind in {f.evidence["kind"] for f in found}
    assert any(
        rule["rule"] == "streaming" and rule["state"] == "bad" for rule in report.results["rules"]
    )


def pinged(events: list[bytes]) -> list[bytes]:
    return [piece for event in events for piece in (b": ping\n\n", event)]


def by_bytes(events: list[bytes]) -> list[bytes]:
    """The same bytes in pieces of any size: letters are cut between packets, as TCP does."""
    data, rng, pieces = b"".join(events), random.Random(0), []
    while data:
        size = rng.randint(1, 40)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


@pytest.mark.parametrize("edit", [list, pinged, by_bytes], ids=["plain", "keep-alive", "packets"])
def test_a_server_whose_streams_are_whole_passes(edit: Any) -> None:
    with in_streams(edited(edit)) as stub:
        report = assay.check(stub.url, quick=True, throughput=False, timeout=20.0)
    checks = report.results["streaming"]["checks"]
    assert len(checks) == 5 and {c["state"] for c in checks} == {"good"}
    assert report.exit_code == 0 and not any("stream" in f.id for f in report.findings)


def test_a_server_with_two_answers_to_one_request_is_not_blamed() -> None:
    rng = random.Random(1)

    def moody(e: Exchange) -> None:
        texts = ("It is blue since air scatters light.", "Blue light is scattered by the air.")
        healthy = Sane()
        healthy.fields["chunks"] = words(rng.choice(texts))
        from stub_server import healthy as behave

        behave(**healthy.fields)(e)

    with serving(moody) as stub, ServerEngine.connect(stub.url) as engine:
        case = stream_cases(engine)[1]
        states = {check_case(engine, case).state for _ in range(12)}
    assert "fault" not in states and "good" in states


def test_a_server_that_declines_to_stream_is_told_so_and_not_failed() -> None:
    def refuse(e: Exchange) -> None:
        e.json({"error": {"message": "streaming is not supported"}}, status=400)

    with in_streams(refuse) as stub:
        report = assay.check(stub.url, quick=True, throughput=False, timeout=5.0)
    rule = next(r for r in report.results["rules"] if r["rule"] == "streaming")
    assert rule["state"] == "not_examined" and "not supported" in rule["says"]


def test_what_a_client_may_stumble_over_is_a_warning() -> None:
    def without_end(events: list[bytes]) -> list[bytes]:
        return [event for event in events if b"[DONE]" not in event]

    with in_streams(edited(without_end)) as stub:
        report = assay.check(stub.url, quick=True, throughput=False, timeout=20.0)
    (found,) = (f for f in report.findings if f.id == "coherence.stream_form")
    assert "no [DONE] ends it" in found.title and report.exit_code == 0
