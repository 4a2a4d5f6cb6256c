"""Faults of one stream, told by the whole answer to the same request.

A client joins the pieces of a stream by their index and field. What it gets should be the whole
answer: no piece lost, repeated or damaged, no tool call torn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from assay.engines import Reply, ToolCall
from assay.engines.server.trace import CallDelta, StreamedChoice, StreamedPiece, StreamTrace

CERTAIN = frozenset(
    {
        "error",
        "cut",
        "web_page",
        "invalid",
        "no_events",
        "empty",
        "utf8",
        "repeated",
        "lost",
        "tool_index",
        "tool_order",
        "tool_arguments",
        "mixed_choices",
    }
)
"""Kinds that no sampling and no rounding explain; of the others (`differs`, `tool_lost`,
`other_field`) only a server with one answer to one request is guilty.
"""
_NEAR = 400
"""Characters within which a piece is looked for again."""
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class StreamFault:
    """What is wrong with a stream, and the event that shows it (counted from 0)."""

    kind: str
    says: str
    event: int | None = None


def stream_fault(whole: Reply, trace: StreamTrace) -> StreamFault | None:
    """The first fault of a stream.

    Args:
        whole: The answer to the same request in one piece.
        trace: The stream.

    Returns:
        None where a client gets from the stream what the whole answer holds.
    """
    if trace.kind:
        last = len(trace.events) - 1
        return StreamFault(trace.kind, trace.error, last if last >= 0 else None)
    choice = _seen_by_clients(trace)
    if not (choice.text.strip() or choice.thought.strip() or choice.calls):
        written = len(whole.content) + len(whole.reasoning) + len(whole.tool_calls)
        if not written:
            return None
        count = trace.completion_tokens
        billed = "" if count is None else f", {count} tokens are billed"
        says = f"{len(trace.events)} events hold no text{billed}; the whole answer has text"
        return StreamFault("empty", says, 0 if trace.events else None)
    if whole.tool_calls or choice.calls:
        return call_fault(whole.tool_calls, choice)
    return text_fault(whole, choice)


def notes_on(whole: Reply, trace: StreamTrace) -> tuple[str, ...]:
    """What a client may stumble over in a stream whose text is right."""
    choice = trace.choice()
    notes = []
    if not choice.finish_reasons:
        notes.append("no finish_reason comes")
    elif whole.finish_reason and choice.finish_reasons[0] != whole.finish_reason:
        notes.append(
            f"finish_reason is {choice.finish_reasons[0]}, {whole.finish_reason} in one piece"
        )
    if not trace.done:
        notes.append("no [DONE] ends it")
    ours, theirs = trace.completion_tokens, whole.completion_tokens
    if ours is not None and theirs is not None and abs(ours - theirs) > 1:
        notes.append(f"usage counts {ours} tokens, {theirs} in one piece")
    if whole.token_logprobs and not choice.logprobs:
        notes.append("no logprobs come, and they do in one piece")
    return tuple(notes)


def text_fault(whole: Reply, choice: StreamedChoice) -> StreamFault | None:
    """The fault of the content, or of the reasoning."""
    content = _piece_fault(whole.content, choice.content)
    thought = _piece_fault(whole.reasoning, choice.reasoning)
    if content is None and thought is None:
        return None
    together = f"{choice.thought.strip()}{choice.text.strip()}"
    if together and together == f"{whole.reasoning.strip()}{whole.content.strip()}":
        says = "reasoning and content are divided at another place than in the whole answer"
        return StreamFault("other_field", says, (choice.content or choice.reasoning)[0].event)
    return content or thought


def _piece_fault(whole: str, pieces: Sequence[StreamedPiece]) -> StreamFault | None:
    """The fault of one field; blanks around it are no text."""
    text = "".join(piece.text for piece in pieces)
    if text.strip() == whole.strip():
        return None
    if _REPLACEMENT in text and _REPLACEMENT not in whole:
        piece = next(piece for piece in pieces if _REPLACEMENT in piece.text)
        says = f"a letter was cut at the edge of a chunk: {piece.text!r}"
        return StreamFault("utf8", says, piece.event)
    want, at = whole.strip(), 0
    rest = [StreamedPiece(p.event, p.text) for p in pieces]
    if rest:
        rest[0].text = text[: len(rest[0].text)].lstrip()
    for number, piece in enumerate(rest):
        here = piece.text
        if want.startswith(here, at) or (want[at:] and here.rstrip() == want[at:]):
            at += len(here)
            continue
        if not here.strip() and at >= len(want):
            continue
        return _parted(want, at, piece, rest[number + 1 :])
    lost = want[at : at + 60]
    return StreamFault("lost", f"the end is missing: {lost!r}", pieces[-1].event if pieces else 0)


def _parted(
    want: str, at: int, piece: StreamedPiece, later: Sequence[StreamedPiece]
) -> StreamFault:
    """What became of the whole text at the piece where a stream leaves it."""
    got = (piece.text + "".join(p.text for p in later))[:_NEAR]
    shown = f"{piece.text[:60]!r} where {want[at : at + 60]!r} belongs"
    before = want[:at]
    common = next(
        (i for i, (a, b) in enumerate(zip(got, want[at:], strict=False)) if a != b),
        min(len(got), len(want) - at),
    )
    if before and piece.text.startswith(before):
        return StreamFault("repeated", f"it sends all text so far again: {shown}", piece.event)
    # Text that is repeated goes on as the whole does once the repetition is taken away.
    tail = got[common:]
    for length in range(1, min(len(tail), at + common, 200) + 1):
        again, after = tail[:length], tail[length:]
        if (before + got[:common]).endswith(again) and _goes_on(want[at + common :], after):
            return StreamFault("repeated", f"text is repeated: {shown}", piece.event)
    # Text that is lost: the rest of the stream is found a little further on.
    if tail and (found := want.find(tail[:24], at + common, at + common + _NEAR)) > 0:
        missing = want[at + common : found]
        if missing and len(tail) >= 4:
            return StreamFault("lost", f"text is lost: {missing[:60]!r}", piece.event)
    if not tail and at + common >= len(want):
        return StreamFault("repeated", f"text goes on after the end: {shown}", piece.event)
    return StreamFault("differs", shown, piece.event)


def _goes_on(want: str, got: str) -> bool:
    """Whether `got` begins as `want` does, for long enough not to be chance."""
    length = min(len(want), len(got), 16)
    return length >= min(8, len(want)) and want[:length] == got[:length]


def call_fault(calls: Sequence[ToolCall], choice: StreamedChoice) -> StreamFault | None:
    """The fault of the tool calls, joined by their index as clients join them."""
    if not choice.calls:
        event = choice.content[0].event if choice.content else None
        says = f"the whole answer calls {calls[0].name}, and the stream calls nothing"
        return StreamFault("tool_lost", says, event)
    by_index: dict[int, list[CallDelta]] = {}
    for delta in choice.calls:
        if delta.index is None:
            says = "the delta of a tool call has no index, by which clients join them"
            return StreamFault("tool_index", says, delta.event)
        known = by_index.setdefault(delta.index, [])
        if not known and not delta.name:
            says = f"the first delta of call {delta.index} has no name: its order is wrong"
            return StreamFault("tool_order", says, delta.event)
        if known and delta.id and known[0].id and delta.id != known[0].id:
            says = f"two calls share the index {delta.index}"
            return StreamFault("tool_index", says, delta.event)
        known.append(delta)
    joined = [by_index[index] for index in sorted(by_index)]
    if not calls:
        return StreamFault("tool_lost", "the whole answer calls nothing", joined[0][0].event)
    for position, (call, deltas) in enumerate(zip(calls, joined, strict=False)):
        if fault := _arguments_fault(position, call, deltas):
            return fault
    if len(joined) != len(calls):
        says = f"{len(joined)} calls come, {len(calls)} in the whole answer"
        return StreamFault("tool_lost", says, joined[-1][0].event)
    return None


def _arguments_fault(
    position: int, call: ToolCall, deltas: Sequence[CallDelta]
) -> StreamFault | None:
    name = deltas[0].name
    if name != call.name:
        says = f"call {position} is of {name!r}, {call.name!r} in the whole answer"
        return StreamFault("tool_lost", says, deltas[0].event)
    arguments = "".join(delta.arguments for delta in deltas)
    want, got = _object(call.arguments), _object(arguments)
    if arguments == call.arguments or (got is not None and got == want):
        return None
    if want is None or got is not None:
        says = f"call {position} has the arguments {arguments[:80]}, {call.arguments[:80]} whole"
        return StreamFault("differs", says, deltas[-1].event)
    joined = ""
    event = deltas[-1].event
    for delta in deltas:
        joined += delta.arguments
        if not call.arguments.startswith(joined):
            event = delta.event
            break
    says = f"the arguments of call {position} are not JSON once joined: {arguments[:100]}"
    return StreamFault("tool_arguments", says, event)


def choices_fault(whole: Reply, trace: StreamTrace) -> StreamFault | None:
    """The fault of a stream of two choices: their pieces mix, or one of them is empty."""
    if trace.kind:
        return stream_fault(whole, trace)
    texts = {index: c.text + c.thought for index, c in trace.choices.items()}
    if len(texts) > 1:
        for index, text in sorted(texts.items()):
            if not text.strip():
                return StreamFault("mixed_choices", f"choice {index} of n=2 is empty", None)
        return None
    fault = text_fault(whole, trace.choice()) if not whole.tool_calls else None
    if fault is not None and fault.kind == "repeated":
        says = f"the pieces of two choices (n=2) come under one index: {fault.says}"
        return StreamFault("mixed_choices", says, fault.event)
    return None


def _seen_by_clients(trace: StreamTrace) -> StreamedChoice:
    """The first choice, without what came after the end mark, where clients stop to read."""
    choice = trace.choice()
    if trace.after_done is None:
        return choice
    end = trace.after_done
    return StreamedChoice(
        content=[p for p in choice.content if p.event < end],
        reasoning=[p for p in choice.reasoning if p.event < end],
        calls=[c for c in choice.calls if c.event < end],
        finish_reasons=choice.finish_reasons,
        logprobs=choice.logprobs,
    )


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
