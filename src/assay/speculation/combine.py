"""Choose the observations that count and difference the totals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from assay.speculation.observation import Kind, Observation
from assay.speculation.record import Record
from assay.speculation.summarise import summarise

# From observations to one record: sums of counts, never means or last values of printed
# percentages. Where one source holds several kinds, the finest one that counts speaks; the others
# would count twice.
_PRECEDENCE = ((Kind.WINDOW, Kind.REQUEST), (Kind.TOTAL,), (Kind.SUMMARY,))

_COUNTERS = ("drafted", "accepted", "drafts", "emitted", "generated", "steps", "accepted_first")


@dataclass(frozen=True)
class Evidence:
    """The record of a whole source, of each engine in it, and the windows in the order in which
    they came.

    `lifetime` is what counters since start say beside the requests or windows that the record adds
    up.
    """

    record: Record
    per_engine: Mapping[str, Record] = field(default_factory=dict)
    windows: Sequence[Observation] = ()
    lifetime: Record | None = None

    @property
    def steps(self) -> Record:
        """The record that knows how many of the decode steps drafted, where one does."""
        known = self.lifetime is not None and self.record.coverage is None
        return self.lifetime if known and self.lifetime is not None else self.record


def combine(observations: Sequence[Observation]) -> Evidence:
    """Add up the observations of one run. Several data-parallel engines are also given apart."""
    if not observations:
        return Evidence(Record())
    by_engine = _grouped(observations, lambda o: o.engine)
    main = max(
        by_engine, key=lambda e: (sum(o.drafted or 0 for o in by_engine[e]), len(by_engine[e]))
    )
    own = by_engine.pop(main)
    chosen = choose(own)
    replicas = _grouped(chosen, lambda o: o.replica or "other")
    per_engine = {r: summarise(o) for r, o in replicas.items()} if len(replicas) > 1 else {}
    # Lifetime counts of each drafting method that prints its own statistics.
    methods = {o.stream: o for o in own if o.definition == "llamacpp_total"}
    each = {
        k: {"accepted": o.accepted, "drafted": o.drafted, "drafts": o.drafts}
        for k, o in methods.items()
    }
    record = replace(summarise(chosen), per_implementation=each)
    if by_engine:
        per_engine = (per_engine or {main: record}) | {
            e: summarise(choose(o)) for e, o in by_engine.items()
        }
        note = f"lines of other engines are judged apart: {', '.join(sorted(by_engine))}"
        record = replace(record, notes=(*record.notes, note))
    totals = [o for o in own if o.kind is Kind.TOTAL and o.has_counts]
    apart = bool(totals and chosen and chosen[0].kind is not Kind.TOTAL)
    lifetime = summarise(differences(totals)) if apart else None
    return Evidence(record, per_engine, [o for o in chosen if not o.empty], lifetime)


def _grouped(
    observations: Iterable[Observation], key: Callable[[Observation], str]
) -> dict[str, list[Observation]]:
    grouped: dict[str, list[Observation]] = defaultdict(list)
    for o in observations:
        grouped[key(o)].append(o)
    return grouped


def choose(observations: Sequence[Observation]) -> list[Observation]:
    """The observations of the finest kind that counts, totals turned into differences; else the
    printed values.
    """
    for kinds in _PRECEDENCE:
        found = [o for o in observations if o.kind in kinds]
        if any(o.has_counts for o in found):
            if kinds == (Kind.SUMMARY,):
                return [o for o in found if o.has_counts]
            return differences(found) if kinds == (Kind.TOTAL,) else found
    return [o for o in observations if o.kind is Kind.VALUE] or [
        o for o in observations if not o.has_counts
    ]


def differences(totals: Iterable[Observation]) -> list[Observation]:
    """Windows between totals of the same counter; a counter that fell was reset, and starts again
    from 0.
    """
    before: dict[tuple[str | None, str], Observation] = {}
    windows = []
    for total in totals:
        key = (total.replica, total.stream)
        last = before.get(key)
        before[key] = total
        windows.append(total if last is None or fell(last, total) else subtract(total, last))
    return windows


def fell(before: Observation, after: Observation) -> bool:
    """Whether any counter of `after` is below that of `before`: the process restarted in between."""
    pairs = [(getattr(before, n), getattr(after, n)) for n in _COUNTERS]
    pairs += list(
        zip(before.accepted_per_position or (), after.accepted_per_position or (), strict=False)
    )
    return any(a is not None and b is not None and b < a for a, b in pairs)


def subtract(after: Observation, before: Observation) -> Observation:
    """The window between two totals of one counter."""
    changes: dict[str, Any] = {}
    for name in _COUNTERS:
        a, b = getattr(after, name), getattr(before, name)
        changes[name] = None if a is None else a - (b or 0)
    for name in ("accepted_per_position", "drafts_per_position"):
        a, b = getattr(after, name), getattr(before, name)
        changes[name] = (
            a
            if not a or not b
            else tuple(x - y for x, y in zip_longest(a, b[: len(a)], fillvalue=0))
        )
    return replace(after, **changes)
