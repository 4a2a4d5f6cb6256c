"""Two reports of one verb side by side: what became worse, better or only other.

A figure with an interval counts as changed only where the two intervals do not meet; which
direction is worse follows from its name. Figures without an interval are shown and not judged.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.files import read_json
from assay.verdict import Finding, Report, Severity, Table, Verdict

MOST_FIGURES = 5_000
"""Figures of one report that are compared."""
MOST_ROWS = 200
"""Figures that the table shows."""
_DEPTH = 12
_RANK = {Verdict.PASS: 0, Verdict.INCONCLUSIVE: 1, Verdict.FAIL: 2, Verdict.ERROR: 3}
_GRAVITY = {Severity.INFO: 0, Severity.WARNING: 1, Severity.ERROR: 2}
_LESS_IS_BETTER = re.compile(
    r"(?:^|[._])(?:kld?|tv|dnll|nll|d?ppl\w*|\w*latency\w*|\w*ttft\w*|\w*tpot\w*|\w*itl\w*|degenerate"
    r"|errors?|broken|lost|failed|max_gap|total)(?:[._]|$)"
)
_MORE_IS_BETTER = re.compile(
    r"(?:^|[._])(?:\w*tokens_per_s\w*|tokens_per_step|\w*throughput\w*|top1\w*|acceptance\w*|accepted"
    r"|mean_acceptance_length|per_position|position_0|\w*multiplier\w*|parsed|schema_valid|right"
    r"|goodput|won|ratio)(?:[._]|$)"
)


class Change(StrEnum):
    """How B differs from A."""

    WORSE = "worse"
    BETTER = "better"
    OTHER = "changed"
    SAME = "same"


@dataclass(frozen=True)
class Stored:
    """A report as its JSON holds it."""

    name: str
    command: str
    verdict: Verdict
    subject: Mapping[str, Any]
    findings: Mapping[str, tuple[Severity, str]]
    results: Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A figure of both reports; the bounds are those of its 95 % interval, where it has one."""

    name: str
    before: float | None
    after: float | None
    change: Change


def diff(before: str | os.PathLike[str], after: str | os.PathLike[str]) -> Report:
    """Compare two reports of one verb.

    Args:
        before: JSON that a verb wrote with `--json`.
        after: JSON that the same verb wrote later, or of another deployment.

    Returns:
        A report that passes where nothing became worse: no verdict, no error or warning, no figure
        whose interval lies apart on the wrong side.

    Raises:
        AssayError: A file is no report of assay, or the verbs differ.
    """
    a, b = _stored(before), _stored(after)
    if a.command != b.command:
        raise AssayError(
            f"{a.name} is a report of `assay {a.command}`, {b.name} one of `assay {b.command}`",
            finding_id="diff.other_verb",
            remedy="give two reports of one verb",
        )
    verdict = _by_rank(_RANK[a.verdict], _RANK[b.verdict])
    raised, gone = _findings(a, b), _findings(b, a)
    figures = list(_figures(a.results, b.results))
    worse = [*_worse_verdict(a, b, verdict), *raised, *_worse_figures(figures)]
    better = [
        *([_info("verdict_better", _verdicts(a, b))] if verdict is Change.BETTER else []),
        *(_info("finding_gone", f"gone: {f.evidence['title']}") for f in gone),
        *_better_figures(figures),
    ]
    moved = [f for f in figures if f.change is not Change.SAME]
    return Report(
        command="diff",
        verdict=Verdict.FAIL if worse else Verdict.PASS,
        subject={"before": a.name, "after": b.name, "verb": a.command},
        findings=[*worse, *better],
        results={
            "verb": a.command,
            "subjects": {"before": a.subject, "after": b.subject},
            "verdict": {"before": a.verdict, "after": b.verdict, "change": verdict},
            "findings": {
                "new": [f.evidence for f in raised],
                "gone": [f.evidence for f in gone],
                "same": len(a.findings.keys() & b.findings.keys()),
            },
            "figures": moved,
            "figures_same": len(figures) - len(moved),
        },
        summary=_summary(worse, better, moved),
        blocks=[_table(a, b, verdict, moved)],
    )


def _stored(path: str | os.PathLike[str]) -> Stored:
    name = Path(os.fsdecode(path)).name
    value = read_json(
        path,
        what="the report",
        finding_id="diff.unreadable",
        remedy="give JSON that a verb wrote with --json",
    )

    def refuse(why: str) -> AssayError:
        return AssayError(
            f"{name} is no report of assay: {why}",
            finding_id="diff.unreadable",
            remedy="give JSON that a verb wrote with --json",
        )

    if not isinstance(value, Mapping) or not str(value.get("schema", "")).startswith("assay/"):
        raise refuse("its schema is not assay/1")
    command, results = value.get("command"), value.get("results")
    if not isinstance(command, str) or not command or not isinstance(results, Mapping):
        raise refuse("it names no verb, or has no results")
    if value.get("verdict") not in list(Verdict):
        raise refuse("its verdict is none of pass, fail, inconclusive, error")
    subject, found = value.get("subject"), value.get("findings")
    return Stored(
        name,
        command[:40],
        Verdict(value["verdict"]),
        subject if isinstance(subject, Mapping) else {},
        _by_id(found if isinstance(found, list) else []),
        results,
    )


def _by_id(found: Sequence[Any]) -> dict[str, tuple[Severity, str]]:
    """The gravest severity and the first title of each finding; findings without an id are left
    out.
    """
    own: dict[str, tuple[Severity, str]] = {}
    for each in found:
        if not isinstance(each, Mapping) or not isinstance(each.get("id"), str):
            continue
        severity = each.get("severity")
        grade = Severity(severity) if severity in list(Severity) else Severity.INFO
        title = str(each.get("title", each["id"]))[:300]
        if each["id"] not in own or _GRAVITY[grade] > _GRAVITY[own[each["id"]][0]]:
            own[each["id"]] = (grade, title)
    return own


def _by_rank(before: int, after: int) -> Change:
    return Change.SAME if before == after else Change.WORSE if after > before else Change.BETTER


def _verdicts(a: Stored, b: Stored) -> str:
    return f"the verdict was {a.verdict.value} and is {b.verdict.value}"


def _worse_verdict(a: Stored, b: Stored, change: Change) -> list[Finding]:
    if change is not Change.WORSE:
        return []
    evidence = {"before": a.verdict.value, "after": b.verdict.value}
    return [Finding("diff.verdict_worse", Severity.ERROR, _verdicts(a, b), evidence=evidence)]


def _findings(a: Stored, b: Stored) -> list[Finding]:
    """Errors and warnings of `b` that `a` has not, or has as something lighter."""
    found = []
    for name, (severity, title) in b.findings.items():
        old = a.findings.get(name)
        if _GRAVITY[severity] > (_GRAVITY[old[0]] if old else 0):
            found.append(
                Finding(
                    "diff.finding_new",
                    Severity.ERROR,
                    f"new {severity.value}: {title}",
                    evidence={
                        "id": name,
                        "before": old[0].value if old else None,
                        "after": severity.value,
                        "title": title,
                    },
                )
            )
    return found


def _info(name: str, title: str) -> Finding:
    return Finding(f"diff.{name}", Severity.INFO, title)


def _worse_figures(figures: Sequence[Figure]) -> list[Finding]:
    return [
        Finding(
            "diff.figure_worse",
            Severity.ERROR,
            f"{f.name} is worse beyond its interval: {_shown(f.before)} before, {_shown(f.after)} after",  # noqa: E501
            evidence={"figure": f.name, "before": f.before, "after": f.after},
        )
        for f in figures
        if f.change is Change.WORSE
    ]


def _better_figures(figures: Sequence[Figure]) -> Iterator[Finding]:
    for f in figures:
        if f.change is Change.BETTER:
            yield _info(
                "figure_better", f"{f.name} is better: {_shown(f.before)} → {_shown(f.after)}"
            )


def _figures(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Figure]:
    """All figures of both reports in the order of the first."""
    before, after = dict(_leaves(a)), dict(_leaves(b))
    for name in [*before, *(n for n in after if n not in before)]:
        old, new = before.get(name), after.get(name)
        yield Figure(name, old and old[0], new and new[0], _change(name, old, new))


_Leaf = tuple[float, float | None, float | None]


def _change(name: str, old: _Leaf | None, new: _Leaf | None) -> Change:
    if old is None or new is None:
        return Change.OTHER
    if math.isclose(old[0], new[0], rel_tol=1e-9, abs_tol=1e-12):
        return Change.SAME
    bounds = (old[1], old[2], new[1], new[2])
    if None in bounds:
        return Change.OTHER
    rises = (new[1] or 0.0) > (old[2] or 0.0)
    if not rises and not (new[2] or 0.0) < (old[1] or 0.0):
        return Change.SAME  # the intervals meet
    less, more = _LESS_IS_BETTER.search(name), _MORE_IS_BETTER.search(name)
    if bool(less) == bool(more):
        return Change.OTHER
    return Change.BETTER if rises == bool(more) else Change.WORSE


def _leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, _Leaf]]:
    """(name, (value, lo, hi)) of every figure; items of lists are named by their own names."""
    found = _walk(value, path, depth)
    for number, leaf in enumerate(found):
        if number >= MOST_FIGURES:
            return
        yield leaf


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, _Leaf]]:
    if depth > _DEPTH:
        return
    if isinstance(value, Mapping):
        middle = next(
            (k for k in ("value", "mean", "median") if _number(value.get(k)) is not None), None
        )
        lo, hi = (value.get("lo", value.get("min")), value.get("hi", value.get("max")))
        if middle is not None and _number(lo) is not None and _number(hi) is not None:
            yield path, (float(value[middle]), _number(lo), _number(hi))
            return
        for key, item in value.items():
            yield from _walk(item, f"{path}.{key}" if path else str(key)[:80], depth + 1)
    elif isinstance(value, list):
        for item in value:
            name = (
                next(
                    (
                        item[k]
                        for k in ("name", "id", "path", "setting")
                        if isinstance(item.get(k), str)
                    ),
                    None,
                )
                if isinstance(item, Mapping)
                else None
            )
            if name is not None:
                yield from _walk(item, f"{path}[{name[:60]}]", depth + 1)
    elif (number := _number(value)) is not None:
        yield path, (number, None, None)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:,.6g}"


def _summary(worse: Sequence[Finding], better: Sequence[Finding], moved: Sequence[Figure]) -> str:
    if worse:
        return f"{len(worse)} worse, {len(better)} better: {worse[0].title}"
    if better:
        return f"nothing is worse, {len(better)} better"
    return "nothing is worse" + (f"; {len(moved)} figures differ" if moved else ", all is the same")


def _table(a: Stored, b: Stored, verdict: Change, moved: Sequence[Figure]) -> Table:
    order = [Change.WORSE, Change.BETTER, Change.OTHER]
    shown = sorted(moved, key=lambda f: order.index(f.change))[:MOST_ROWS]
    counts = [
        sum(severity is grade for severity, _ in side.findings.values())
        for grade in (Severity.ERROR, Severity.WARNING)
        for side in (a, b)
    ]
    rows = [
        ("verdict", a.verdict.value, b.verdict.value, verdict.value),
        ("kinds of errors", f"{counts[0]}", f"{counts[1]}", _by_rank(*counts[:2]).value),
        ("kinds of warnings", f"{counts[2]}", f"{counts[3]}", _by_rank(*counts[2:]).value),
        *((f.name, _shown(f.before), _shown(f.after), f.change.value) for f in shown),
    ]
    left = len(moved) - len(shown)
    return Table(
        "Side by side",
        ("", "before", "after", "change"),
        rows,
        frozenset({1, 2}),
        note=f"{left} further figures differ; --json has all of them" if left else "",
    )
