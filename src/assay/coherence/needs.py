"""Ask a server for what a deployment must be able to do (`--need`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from assay.coherence.conversation import user
from assay.coherence.probes import WEATHER
from assay.coherence.record import NeedCheck
from assay.coherence.streams import StreamingEngine, check_case, stream_cases
from assay.engines import Reply, Request
from assay.errors import AssayError
from assay.verdict import Verdict

TRIES = 3
ENOUGH = 2
"""Answers of `TRIES` that must be right: one by luck is no ability, one by accident no lack."""
_TOKENS = 160
_THINKING_TOKENS = 400
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}


def _calls_tool(reply: Reply) -> str:
    """Why the answer is no parsed call of the tool; empty where it is one."""
    if not reply.tool_calls:
        return f"no call was parsed: {(reply.content or reply.reasoning)[:80]!r}"
    call = reply.tool_calls[0]
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if call.name != "get_weather" or not isinstance(arguments, dict):
        return f"the call is {call.name}({call.arguments[:60]})"
    return ""


def _reasons(reply: Reply) -> str:
    """Why the answer holds no reasoning of its own; empty where it does."""
    return "" if reply.reasoning.strip() else "no reasoning came apart from the answer"


def _follows_schema(reply: Reply) -> str:
    """Why the answer does not follow the schema; empty where it does."""
    try:
        value = json.loads(reply.content)
    except (ValueError, RecursionError):
        return f"the answer is not JSON: {reply.content[:80]!r}"
    whole = isinstance(value, dict) and set(value) == {"city", "population"}
    if not whole or not isinstance(value["city"], str) or not isinstance(value["population"], int):
        return f"the answer does not follow its schema: {reply.content[:80]!r}"
    return ""


def _asked(question: str, tokens: int, **extra: object) -> Request:
    return Request(messages=(user(question),), max_tokens=tokens, seed=0, extra=extra)


_QUESTIONS: dict[str, tuple[Request, Callable[[Reply], str]]] = {
    "tools": (
        replace(
            _asked("What is the weather in Oslo right now? Use the tool.", _TOKENS),
            tools=(WEATHER,),
        ),
        _calls_tool,
    ),
    "reasoning": (
        _asked(
            "What is 17 times 23? Think step by step.",
            _THINKING_TOKENS,
            chat_template_kwargs={"enable_thinking": True},
        ),
        _reasons,
    ),
    "json": (
        _asked(
            "Name a large city and its population as a JSON object.",
            _TOKENS,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": _SCHEMA, "strict": True},
            },
        ),
        _follows_schema,
    ),
}


def check_need(engine: StreamingEngine, name: str) -> NeedCheck:
    """Whether the server can do one thing that `--need` names, asked up to `TRIES` times."""
    if name == "streaming":
        found = check_case(engine, stream_cases(engine)[0])
        state = {"good": "good", "fault": "bad", "skipped": "bad"}.get(found.state, "unclear")
        return NeedCheck(name, state, found.says or "a stream holds the whole answer", 1)
    request, judge = _QUESTIONS[name]
    right = asked = 0
    why = ""
    for seed in range(TRIES):
        try:
            reply = engine.generate(replace(request, seed=seed, temperature=0.7 if seed else 0.0))
        except AssayError as error:
            refused = error.verdict is Verdict.ERROR
            return NeedCheck(name, "bad" if refused else "unclear", error.message, asked)
        asked += 1
        found_wrong = judge(reply)
        right += not found_wrong
        why = found_wrong or why
        if right >= ENOUGH or asked - right > TRIES - ENOUGH:
            break
    says = f"{right} of {asked} answers are right" + (f"; {why}" if why else "")
    return NeedCheck(name, "good" if right >= ENOUGH else "bad", says, asked)
