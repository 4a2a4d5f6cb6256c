"""`assay check --ready`: does a server write sane text now? Answered within ten seconds."""

from __future__ import annotations

import time
from typing import Any

from assay.coherence.grading import Label, grade
from assay.coherence.options import CheckOptions
from assay.engines.server.endpoint import parse_url
from assay.engines.server.engine import default_limits, read_key
from assay.engines.server.errors import NotFound
from assay.engines.server.http import Transport
from assay.engines.server.models import list_models
from assay.engines.server.trace import StreamTrace, trace_stream
from assay.errors import AssayError
from assay.verdict import Finding, Metric, Report, Severity, Verdict

SECONDS = 9.0
"""Of the whole answer; a probe of Kubernetes is often given ten."""
TOKENS = 16
_QUESTION = "Name three kinds of fruit and say in one sentence why people like each of them."
_PROMPT = "Three kinds of fruit that many people like are"


def run_ready(url: str, options: CheckOptions) -> Report:
    """Ask for one short stream and grade it.

    Raises:
        AssayError: The server does not answer, or nothing in time.
    """
    began = time.monotonic()
    endpoint = parse_url(url)
    limit = min(SECONDS, options.timeout)
    key = read_key(options.api_key_env)
    transport = Transport(endpoint, key=key, limits=default_limits(limit / 2))
    try:
        cards = list_models(transport) or ()
        model = options.model or (cards[0].id if cards else "")
        trace = _first_stream(transport, endpoint.api, model, began + limit)
    finally:
        transport.close()
    seconds = time.monotonic() - began
    choice = trace.choice()
    text = grade(choice.text, reasoning=choice.thought or None, finish_reason="stop")
    if trace.kind == "unfinished":
        raise AssayError(
            f"no {TOKENS} tokens came within {limit:g} s",
            finding_id="server.timeout",
            remedy="the server is overloaded, or not ready yet",
        )
    why = trace.error
    if not why and not (choice.text.strip() or choice.thought.strip()):
        why = "its stream holds no text"
    if not why and text.label in (Label.DEGENERATE, Label.EMPTY):
        why = f"its text is {text.label.value}: {(choice.text or choice.thought)[:80]!r}"
    finding = Finding("server.not_ready", Severity.ERROR, f"it is not ready: {why}")
    return Report(
        command="check",
        verdict=Verdict.FAIL if why else Verdict.PASS,
        subject={"engine": "server", "url": endpoint.api, "model": model},
        findings=(finding,) if why else (),
        results={
            "ready": {"seconds": seconds, "label": text.label.value, "chunks": len(trace.events)}
        },
        headline=(Metric("answered in", f"{seconds:.1f} s"),),
        summary="" if why else "it streams sane text.",
    )


def _first_stream(transport: Transport, api: str, model: str, deadline: float) -> StreamTrace:
    """A greedy stream of the chat route, or of the other where there is none."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "stream": True,
    }
    try:
        chat = body | {"messages": [{"role": "user", "content": _QUESTION}]}
        return trace_stream(transport, f"{api}/chat/completions", chat, deadline)
    except NotFound:
        return trace_stream(transport, f"{api}/completions", body | {"prompt": _PROMPT}, deadline)
