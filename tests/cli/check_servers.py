"""Servers to check and the way to check them, shared by the tests of the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import invoke
from assay.coherence.probes import FACTS
from stub_server import MODEL, Behaviour, Exchange, StubServer, healthy, sse

ROUTES = ("POST /v1/chat/completions", "POST /v1/completions")
QUICK = ("--repeats", "3", "--samples", "1", "--timeout", "20")

PROSE = (
    "Whiskers was a small grey cat who lived on the top floor of a narrow house near the harbour."
    " One warm morning she noticed that the door to the roof stood open, and she slipped through it"
    " before anybody could call her back. Between two chimneys somebody had planted tomatoes, mint"
    " and a crooked little pear tree. Bees went from flower to flower, and an old woman in a straw"
    " hat was filling a can at the tap. She did not chase the visitor away; she put down a saucer"
    " of water instead and went on with her work. From then on the cat came every day, slept in the"
    " shade of the beans and kept the pigeons off the seedlings. In autumn the neighbours carried"
    " baskets of fruit down the stairs, and Whiskers walked ahead of them with her tail held high."
)
FIBONACCI = (
    "```python\ndef fibonacci(n):\n"
    '    """Return the n-th Fibonacci number."""\n'
    "    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n```"
)
ANSWERS = (
    ("capital of France", "The capital of France is Paris, a large city on the river Seine."),
    ("named Whiskers", PROSE),
    ("function fibonacci", FIBONACCI),
    ("European rivers", '["Rhine", "Danube", "Elbe", "Loire", "Ebro"]'),
    (
        "en español",
        "El agua de los ríos y del mar se evapora por el sol y forma las nubes de la lluvia.",
    ),
    (
        "my dog's name",
        "Bruno is afraid of thunder. Please keep your music low while the storm lasts.",
    ),
    ("called Bruno", "Close the curtains, play soft music and stay with him in a quiet room."),
    ("weather in Oslo", "It is cloudy in Oslo, with a temperature of 18 degrees."),
    *(
        (question, f"It is {answer}, as most people learn at school.")
        for question, _, answer in FACTS
    ),
)


def words(text: str) -> tuple[str, ...]:
    """`text` as the chunks of a stream."""
    first, *rest = text.split(" ")
    return (first, *(f" {w}" for w in rest))


def answer_to(e: Exchange) -> str:
    """What a sane model says: the right answer to each probe, plain prose to everything else."""
    asked = str(e.body["messages"][-1]["content"] if "messages" in e.body else e.body["prompt"])
    if "messages" in e.body and e.body["messages"][-1]["role"] == "tool":
        return dict(ANSWERS)["weather in Oslo"]
    hidden = re.search(r"store room of the [a-z ]+ is ([a-z]+)\.", asked)
    if hidden:
        return f"The word that opens it is {hidden[1]}."
    return next((answer for key, answer in ANSWERS if key in asked), PROSE)


def streamed_call(e: Exchange, call: dict[str, str]) -> None:
    """One tool call as the deltas of a stream: its name, then its arguments in two pieces."""
    head = {"index": 0, "id": "c1", "type": "function", "function": {**call, "arguments": ""}}
    half = len(call["arguments"]) // 2
    pieces = (call["arguments"][:half], call["arguments"][half:])
    deltas = [head, *({"index": 0, "function": {"arguments": piece}} for piece in pieces)]
    usage = {"prompt_tokens": 60, "completion_tokens": 9, "total_tokens": 69}
    e.begin(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
    for delta in deltas:
        choice = {"index": 0, "delta": {"tool_calls": [delta]}, "finish_reason": None}
        e.chunk(sse({"choices": [choice]}))
    last = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    e.chunk(sse({"choices": [last], "usage": usage}))
    e.chunk(b"data: [DONE]\n\n")
    e.chunk(b"")


class Sane:
    """Answers every probe rightly and calls the tool that it is offered; its prompts cannot be
    scored.
    """

    def __init__(self, **fields: Any) -> None:
        self.fields = {"scores": False, "echo": False, **fields}

    def __call__(self, e: Exchange) -> None:
        last = e.body["messages"][-1] if "messages" in e.body else {}
        if e.body.get("tools") and last.get("role") == "user":
            call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
            if e.body.get("stream"):
                streamed_call(e, call)
                return
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": call}],
            }
            usage = {"prompt_tokens": 60, "completion_tokens": 9, "total_tokens": 69}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            e.json({"id": "x", "model": MODEL, "choices": [choice], "usage": usage})
        else:
            healthy(chunks=words(answer_to(e)), **self.fields)(e)


def serving(behaviour: Behaviour) -> StubServer:
    """A server that answers both routes in this way."""
    stub = StubServer()
    for route in ROUTES:
        stub.on(route, behaviour)
    return stub


def answering(chunks: tuple[str, ...], **fields: Any) -> StubServer:
    """A server that answers everything with the same text, and the score of a prompt with figures
    of its own.
    """
    return serving(healthy(chunks=chunks, **fields))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the one JSON object on stdout."""
    capsys.readouterr()
    code = invoke([*arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == code
    assert report["schema"] == "assay/1"
    return code, report


def check(capsys: pytest.CaptureFixture[str], url: str, *more: str) -> tuple[int, dict[str, Any]]:
    """`assay check` with few samples; later options win."""
    return run(capsys, "check", url, *QUICK, *more)


def ids(report: dict[str, Any], severity: str | None = None) -> set[str]:
    """The ids of the findings."""
    return {f["id"] for f in report["findings"] if severity in (None, f["severity"])}


def save(path: Path, report: dict[str, Any]) -> Path:
    """A report as a reference file."""
    path.write_text(json.dumps(report), encoding="utf-8")
    return path
