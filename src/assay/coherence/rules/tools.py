"""The rule on the answers of the tools suite."""

from __future__ import annotations

from collections.abc import Sequence

from assay.coherence.record import CheckRecord, ToolLevel
from assay.coherence.rules.rule import Rule, Ruling, Rulings, coherence_finding
from assay.coherence.tools import paired
from assay.verdict import Finding, Severity

TOOLS_LEVEL = 0.01
"""Level of each test of the tools suite: three concurrencies, against the reference and against one
request at a time.
"""


def tools(record: CheckRecord, reference: CheckRecord | None) -> Rulings:
    """The tools suite: as many right answers as the reference, and as many under load as one at a
    time.
    """
    levels = [level for level in record.tools if level.answers]
    if not levels:
        return (
            Ruling(Rule.TOOLS, "not_examined", record.tools_skipped)
            if record.tools_skipped
            else None
        )
    says = ", ".join(
        f"{v.count('right')} of {len(v.answers)} right at {v.concurrency}" for v in levels
    )
    findings = []
    if reference is not None and reference.tools:
        theirs = reference.tools[0]
        says += f"; of the reference {theirs.count('right')} of {len(theirs.answers)}"
        findings += _worse(levels, theirs, under_load=False)
    alone = next((level for level in levels if level.concurrency == 1), None)
    if alone is not None:
        findings += _worse(
            [level for level in levels if level.concurrency > 1], alone, under_load=True
        )
    if findings:
        return Ruling(Rule.TOOLS, "bad", says, tuple(findings))
    if reference is None and not any(level.count("right") for level in levels):
        title = (
            "no answer of the tools suite is right: the model is too weak for it, or the server is"
            f" broken ({says})"
        )
        compare = ("compare with the model itself: --reference-engine hf:PATH",)
        return Ruling(
            Rule.TOOLS,
            "unclear",
            says,
            (coherence_finding("unclear", Severity.WARNING, title, {}, remedies=compare),),
        )
    return Ruling(Rule.TOOLS, "good", says)


def _worse(levels: Sequence[ToolLevel], other: ToolLevel, *, under_load: bool) -> list[Finding]:
    """A finding where cases are wrong at some level that `other` answered right, more than chance
    makes them.
    """
    compared = [(level, *paired(level, other)) for level in levels]
    worse = [row for row in compared if row[2] > row[1] and row[3] < TOOLS_LEVEL]
    if not worse:
        return []
    level, gained, lost, p = worse[0]
    right = {answer.case for answer in other.answers if answer.right}
    cases = [answer for answer in level.answers if answer.case in right and not answer.right]
    evidence = {
        "levels": [
            {"concurrency": v.concurrency, "gained": a, "lost": b, "p_value": q}
            for v, a, b, q in compared
        ],
        "cases": [answer.case for answer in cases],
    }
    counts = (
        f"with {level.concurrency} at a time {lost} cases are lost and {gained} gained (p ="
        f" {p:.2g})"
    )
    shown = "; ".join(f"{answer.case}: {answer.text_head[:80]}" for answer in cases[:3])
    if under_load:
        title = (
            f"the server breaks calls and objects under load that are right one at a time: {counts}"
        )
        causes = (
            "batching: attention kernel, CUDA graphs or scheduler mix up requests",
            "the KV cache is evicted or overwritten when it is full",
        )
        remedy = (
            "run the suite with --enforce-eager, without prefix caching, and with --max-num-seqs 1"
        )
        id_ = "tools_under_load"
    else:
        title = f"the server gives fewer right calls and objects than the model itself: {counts}"
        causes = (
            "a KV cache with too few bits, wrong weights or scales",
            "the tool parser or the chat template is not the model's own",
        )
        remedy, id_ = "run the suite with --kv-cache-dtype auto", "tools_wrong"
    return [
        coherence_finding(
            id_, Severity.ERROR, title, evidence, detail=shown, causes=causes, remedies=(remedy,)
        )
    ]
