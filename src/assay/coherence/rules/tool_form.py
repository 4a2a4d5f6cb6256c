"""The rule on tool calls that come as text."""

from __future__ import annotations

from typing import Any

from assay.coherence.record import CheckRecord
from assay.coherence.rules.degenerate import HARD_RATE
from assay.coherence.rules.rule import Rule, Ruling, Rulings, State, coherence_finding
from assay.stats import newcombe, wilson
from assay.verdict import Severity


def tool_form(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """Tools were offered, nothing was parsed, and parts of a call stand in the text: a client gets
    them as an answer.
    """
    offered, theirs = _offered(record), _offered(reference) if reference else []
    if not offered:
        probe = record.probe("tool_call")
        return Ruling(
            Rule.TOOL_FORM, "not_examined", (probe and probe.skipped) or "no tool was offered"
        )
    broken = [text for form, text in offered if form == "remains"]
    unread = [text for form, text in offered if form == "unread"]
    parsed = sum(form == "parsed" for form, _ in offered)
    says = f"{parsed} of {len(offered)} calls were parsed, {len(broken)} came as broken text"
    says += f", {len(unread)} as whole ones in the text" if unread else ""
    if not broken and not unread:
        return Ruling(Rule.TOOL_FORM, "good", says)
    their_broken = sum(form == "remains" for form, _ in theirs)
    evidence: dict[str, Any] = {
        "answers": len(offered),
        "parsed": parsed,
        "broken": len(broken),
        "unread": len(unread),
        "texts": (broken or unread)[:3],
        "reference_answers": len(theirs),
        "reference_broken": their_broken,
    }
    if not broken:
        finding = coherence_finding(
            "tool_form",
            Severity.WARNING,
            f"the server's tool parser does not read the model's calls: {len(unread)} of"
            f" {len(offered)} came as text",
            evidence,
            detail=unread[0],
            causes=("the model writes its calls without the marks that the parser looks for",),
            remedies=(
                (
                    "choose the --tool-call-parser that reads this form, or the model's own"
                    " --chat-template"
                ),
            ),
        )
        return Ruling(Rule.TOOL_FORM, "good", says, (finding,))
    # The model itself may be too weak to write a call: then the reference leaves parts of them as
    # often.
    alike = (
        bool(theirs)
        and newcombe(len(broken), len(offered), their_broken, len(theirs), confidence).lo <= 0
    )
    often = len(broken) > 1 and wilson(len(broken), len(offered), confidence).lo > HARD_RATE
    state: State = "bad" if often else "unclear" if 2 * len(broken) >= len(offered) else "good"
    state = "good" if alike and their_broken > 0 else state
    finding = coherence_finding(
        "tool_form",
        Severity.ERROR if state == "bad" else Severity.WARNING,
        f"tool calls come as broken text: {len(broken)} of {len(offered)} answers hold parts of"
        " one, and nothing was parsed",
        evidence,
        detail=broken[0],
        causes=(
            "the model writes broken calls: a KV cache with too few bits, wrong weights or scales",
            (
                "the tool parser does not belong to the model, or the chat template asks for"
                " another form"
            ),
        ),
        remedies=(
            (
                "ask the same with --kv-cache-dtype auto, and with the model's own tool parser and"
                " template"
            ),
        ),
    )
    return Ruling(Rule.TOOL_FORM, state, says, (finding,))


def _offered(record: CheckRecord) -> list[tuple[str, str]]:
    """Form and text of every answer for which a tool was offered."""
    probes = [
        (s.tool_form, s.tool_text)
        for p in record.probes
        if p.name == "tool_call"
        for s in p.samples
    ]
    suite = [a for level in record.tools for a in level.answers if a.case.startswith("call")]
    return probes + [(answer.form, answer.text_head) for answer in suite]
