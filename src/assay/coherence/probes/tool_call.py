"""A tool call and the answer after its result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from assay.coherence.probes.base import Context, Step, Talk, answer_text, user
from assay.coherence.record import AnswerCheck
from assay.engines.base import Capability, Message, Reply

_QUESTION = "What is the weather in Oslo right now? Use the tool."
_RESULT = '{"city": "Oslo", "temperature_c": 18, "sky": "cloudy"}'
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class ToolUse:
    """Offer one tool; where it is called, hand its result back and let the model answer."""

    name: str = "tool_call"
    title: str = "a tool call"
    needs: frozenset[Capability] = frozenset({Capability.CHAT, Capability.TOOLS})
    variants: Sequence[str] = ()
    max_tokens: int = 200

    def talk(self, context: Context, variant: str) -> Talk:
        """Ask; if the model calls the tool, answer the call and read the final reply."""
        question = user(_QUESTION)
        first = yield Step(
            messages=(question,), prompt=_QUESTION, max_tokens=self.max_tokens, tools=(WEATHER,)
        )
        if not first.tool_calls:
            return
        call = first.tool_calls[0]
        turns = (
            question,
            Message(role="assistant", content=first.content or None, tool_calls=(call,)),
            Message(role="tool", content=_RESULT, tool_call_id=call.id or "call_0", name=call.name),
        )
        yield Step(messages=turns, prompt=_QUESTION, max_tokens=self.max_tokens, tools=(WEATHER,))

    def check(self, replies: Sequence[Reply], variant: str) -> tuple[AnswerCheck, ...]:
        """The right tool, arguments that parse, the city in them, and the result used in the answer."""
        calls = replies[0].tool_calls
        if not calls:
            return (AnswerCheck("calls_tool", False, "the answer holds no tool call"),)
        checks = [AnswerCheck("calls_tool", calls[0].name == "get_weather", f"called {calls[0].name!r}")]
        try:
            arguments = json.loads(calls[0].arguments)
            city = str(arguments.get("city", "")) if isinstance(arguments, dict) else ""
            checks.append(AnswerCheck("tool_arguments", "oslo" in city.casefold(), f"city {city!r}"))
        except ValueError:
            checks.append(AnswerCheck("tool_arguments", False, "the arguments are not JSON"))
        if len(replies) > 1:
            checks.append(
                AnswerCheck("uses_tool_result", "18" in answer_text(replies[-1]), "expected 18 degrees")
            )
        return tuple(checks)
