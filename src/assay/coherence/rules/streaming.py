"""The rule that a stream holds the whole answer."""

from __future__ import annotations

from collections.abc import Sequence

from assay.coherence.record import CheckRecord, StreamCheck
from assay.coherence.rules.rule import Rule, Ruling, Rulings, State, coherence_finding
from assay.verdict import Finding, Severity

_CAUSES = {
    "empty": (
        "a reasoning or tool parser swallows the text of streams",
        "a proxy rewrites the stream",
    ),
    "cut": ("a proxy with a time limit or a small buffer", "the engine's process died"),
    "error": ("the engine fails in the middle of an answer: see its log",),
    "web_page": ("a proxy or a gateway answers for the server",),
    "utf8": ("tokens are decoded one by one, so that the bytes of a letter come apart",),
    "repeated": ("pieces are joined wrongly, or all text so far is sent with each piece",),
    "lost": ("pieces are joined wrongly, or a buffer drops them",),
    "differs": ("streams take another path through the parser, or other sampling fields",),
    "other_field": ("the streaming form of the reasoning parser is another than the whole one",),
    "mixed_choices": ("the index of choices is lost on the way",),
}
_TOOL_CAUSES = ("the streaming form of the tool parser does not fit the model, or has a fault",)


def streaming(record: CheckRecord) -> Rulings:
    """A healthy whole answer and its stream are the same text: clients read streams."""
    examined = [check for check in record.streams if check.state in ("good", "fault", "unclear")]
    if not examined:
        why = next((c.says for c in record.streams), record.streams_skipped or "no stream was read")
        return Ruling(Rule.STREAMING, "not_examined", why)
    faults = [check for check in examined if check.state == "fault"]
    unclear = [check for check in examined if check.state == "unclear"]
    says = f"{len(examined) - len(faults) - len(unclear)} of {len(examined)} streams are whole"
    findings = [
        _finding([check for check in examined if (check.kind, check.state) == key])
        for key in dict.fromkeys((check.kind, check.state) for check in (*faults, *unclear))
    ]
    noted = [check for check in examined if check.notes]
    if noted:
        notes = "; ".join(dict.fromkeys(check.notes for check in noted))
        findings.append(
            coherence_finding(
                "stream_form",
                Severity.WARNING,
                f"streams hold the right text, and {notes}",
                {"cases": [check.case for check in noted]},
            )
        )
    state: State = "bad" if faults else "unclear" if unclear else "good"
    if faults:
        says += f"; {faults[0].case}: {faults[0].kind.replace('_', ' ')}"
    return Ruling(Rule.STREAMING, state, says, tuple(findings))


_WORDS = {
    "empty": "empty",
    "error": "an error",
    "cut": "cut",
    "web_page": "a web page",
    "invalid": "not made of JSON events",
    "no_events": "not made of events",
    "utf8": "damaged: a letter is cut at the edge of a chunk",
    "repeated": "damaged: text comes twice",
    "lost": "damaged: text is lost",
    "differs": "another text than the whole answer",
    "other_field": "divided between reasoning and content otherwise than the whole answer",
    "tool_index": "damaged: tool calls cannot be told apart",
    "tool_order": "damaged: the deltas of a tool call are out of order",
    "tool_arguments": "damaged: the arguments of a tool call are not whole",
    "tool_lost": "without the tool call of the whole answer",
    "mixed_choices": "damaged: two choices mix",
}


def _finding(checks: Sequence[StreamCheck]) -> Finding:
    """One finding for streams with the same fault; the first shows the chunk."""
    check = checks[0]
    certain = check.state == "fault"
    causes = _TOOL_CAUSES if check.kind.startswith("tool") else _CAUSES.get(check.kind, ())
    cases = ", ".join(sorted(c.case for c in checks))
    title = f"a stream is {_WORDS.get(check.kind, check.kind)} ({cases})"
    where = "" if check.event is None else f"; chunk {check.event}: {check.event_text}"
    return coherence_finding(
        "streaming",
        Severity.ERROR if certain else Severity.WARNING,
        title + ("" if certain else ", and was right when it was asked again"),
        {
            "cases": sorted(c.case for c in checks),
            "kind": check.kind,
            "event": check.event,
            "events": check.events,
            "whole": check.whole_head,
            "stream": check.stream_head,
        },
        detail=f"{check.says}{where}",
        causes=causes,
        remedies=('ask by hand with curl -N, with "stream": true and without it',),
    )
