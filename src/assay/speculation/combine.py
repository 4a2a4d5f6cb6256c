"""Choose the observations that count and difference the totals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from assay.speculation.observation import Counts, Kind, Observation
from assay.speculation.record import Record
from assay.speculation.summarise import summarise

# From observations to one record: sums of counts, never means or last values of printed
# percentages. Where one source holds several kinds, the finest one that counts speaks; the others
# would count twice.
_PRECEDENCE = ((Kind.WINDOW, Kind.REQUEST), (Kind.TOTAL,), (Kind.SUMMARY,))


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
        by_engine,
        key=lambda e: (sum(o.counts.drafted or 0 for o in by_engine[e]), len(by_engine[e])),
    )
    own = by_engine.pop(main)
    chosen = choose(own)
    replicas = _grouped(chosen, lambda o: o.replica or "other")
    per_engine = {r: summarise(o) for r, o in replicas.items()} if len(replicas) > 1 else {}
    methods = {o.stream: o.counts for o in own if o.definition.by_method}
    record = replace(summarise(chosen), methods=methods)
    if by_engine:
        per_engine = (per_engine or {main: record}) | {
            e: summarise(choose(o)) for e, o in by_engine.items()
        }
        note = f"lines of other engines are judged apart: {', '.join(sorted(by_engine))}"
        record = replace(record, notes=(*record.notes, note))
    totals = [o for o in own if o.kind is Kind.TOTAL and o.counts.known]
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
        if any(o.counts.known for o in found):
            if kinds == (Kind.SUMMARY,):
                return [o for o in found if o.counts.known]
            return differences(found) if kinds == (Kind.TOTAL,) else found
    return [o for o in observations if o.kind is Kind.VALUE] or [
        o for o in observations if not o.counts.known
    ]


def differences(totals: Iterable[Observation]) -> list[Observation]:
    """Windows between totals of the same counter; a counter that fell was reset, and starts again
    from 0.
    """
    before: dict[tuple[str | None, str], Counts] = {}
    windows = []
    for total in totals:
        key = (total.replica, total.stream)
        last = before.get(key)
        before[key] = total.counts
        if last is not None and not total.counts.fell_below(last):
            total = replace(total, counts=total.counts.since(last))
        windows.append(total)
    return windows
