"""From observations to one record: sums of counts, never means or last values of printed percentages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from assay.speculation.record import Kind, Observation, Record

# Where one source holds several kinds, the finest one that counts speaks; the others would count twice.
_PRECEDENCE = ((Kind.WINDOW, Kind.REQUEST), (Kind.TOTAL,), (Kind.SUMMARY,), (Kind.VALUE,))
_COUNTERS = ("drafted", "accepted", "drafts", "emitted", "generated")


@dataclass(frozen=True)
class Evidence:
    """The record of a whole source, of each engine in it, and the windows in the order in which they came."""

    record: Record
    per_engine: Mapping[str, Record] = field(default_factory=dict)
    windows: Sequence[Observation] = ()


def combine(observations: Sequence[Observation]) -> Evidence:
    """Add up the observations of one run. Several data-parallel engines are also given apart."""
    if not observations:
        return Evidence(Record())
    by_engine: dict[str, list[Observation]] = defaultdict(list)
    for o in observations:
        by_engine[o.engine].append(o)
    main = max(by_engine, key=lambda e: (sum(o.drafted or 0 for o in by_engine[e]), len(by_engine[e])))
    own = by_engine[main]
    chosen = choose(own)
    per_engine = (
        {r: summarise(o) for r, o in _by_replica(chosen).items()} if len(_replicas(chosen)) > 1 else {}
    )
    record = summarise(chosen)
    record = replace(record, per_implementation=_implementations(own))
    if len(by_engine) > 1:
        others = ", ".join(sorted(e for e in by_engine if e != main))
        per_engine |= {e: summarise(choose(o)) for e, o in by_engine.items() if e != main}
        record = replace(record, notes=(*record.notes, f"lines of other engines are judged apart: {others}"))
    return Evidence(record, per_engine, [o for o in chosen if not o.empty])


def choose(observations: Sequence[Observation]) -> list[Observation]:
    """The observations of the finest kind that counts, totals turned into differences."""
    for kinds in _PRECEDENCE:
        found = [o for o in observations if o.kind in kinds]
        if not found or (Kind.VALUE not in kinds and not any(o.has_counts for o in found)):
            continue
        if kinds == (Kind.SUMMARY,):
            return list({(o.replica, o.stream): o for o in found}.values())
        return differences(found) if kinds == (Kind.TOTAL,) else found
    return []


def differences(totals: Iterable[Observation]) -> list[Observation]:
    """Windows between totals of the same counter; a counter that fell was reset, and starts again from 0."""
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
    pairs += list(zip(before.accepted_per_position or (), after.accepted_per_position or (), strict=False))
    return any(a is not None and b is not None and b < a for a, b in pairs)


def subtract(after: Observation, before: Observation) -> Observation:
    """The window between two totals of one counter."""
    changes: dict[str, int | None] = {}
    for name in _COUNTERS:
        a, b = getattr(after, name), getattr(before, name)
        changes[name] = None if a is None else a - (b or 0)
    return replace(
        after,
        accepted_per_position=_minus(after.accepted_per_position, before.accepted_per_position),
        drafts_per_position=_minus(after.drafts_per_position, before.drafts_per_position),
        **changes,  # type: ignore[arg-type]
    )


def summarise(observations: Sequence[Observation]) -> Record:
    """One record of observations that may be added up. Unknown stays None: nothing is guessed."""
    used = [o for o in observations if not o.empty]
    counted = any(o.has_counts for o in observations)
    first = observations[0] if observations else None
    positions = _positions(used)
    drafted, accepted = _sum(observations, "drafted"), _sum(observations, "accepted")
    drafts, emitted = _sum(observations, "drafts"), _sum(observations, "emitted")
    partial = any(o.partial for o in observations)
    if partial:
        drafted = accepted = None
        positions = None
    depth = _depth(used, drafted, drafts, positions)
    rate = accepted / drafted if drafted and accepted is not None else None
    mean = _mean_length(used, accepted, drafts, emitted)
    if not counted and rate is None:
        rate = _weighted(used, "acceptance_rate")
    leading = emitted - drafts if emitted is not None and drafts else None
    return Record(
        engine=first.engine if first else None,
        drafted=drafted,
        accepted=accepted,
        drafts=drafts,
        acceptance_rate=rate,
        mean_acceptance_length=mean,
        per_position=tuple(a / n if n else 0.0 for a, n in positions)
        if positions
        else _printed_positions(used),
        num_speculative_tokens=depth,
        windows=len(used),
        counts=counted,
        positions=positions,
        tokens_per_step=mean if mean is not None else _derived_length(used, positions, accepted, drafted),
        leading_accepted=leading,
        emitted=emitted,
        generated=_sum(used, "generated"),
        multiplier=_weighted(used, "multiplier"),
        reported_accept_rate=_weighted(used, "reported_rate"),
        generation_throughput=_throughput(used),
        partial=partial,
        estimated=any(o.estimated for o in used),
        definitions=tuple(dict.fromkeys(o.definition for o in observations)),
        notes=tuple(dict.fromkeys(o.note for o in observations if o.note)),
    )


def _sum(observations: Sequence[Observation], name: str) -> int | None:
    """Sum of a count; None if any observation with drafts does not know it."""
    values = [getattr(o, name) for o in observations if not (o.empty and getattr(o, name) is None)]
    if not values or any(v is None for v in values):
        return None
    return int(sum(values))


def _positions(used: Sequence[Observation]) -> tuple[tuple[int, int], ...] | None:
    """(accepted, drafts) of each position, from the observations that print positions; None if some do not."""
    if not used or any(o.accepted_per_position is None for o in used):
        return None
    accepted: list[int] = []
    tried: list[int] = []
    for o in used:
        own = o.accepted_per_position or ()
        of = o.drafts_per_position or (o.drafts or 0,) * len(own)
        missing = len(own) - len(accepted)
        accepted += [0] * missing
        tried += [0] * missing
        for i, (a, n) in enumerate(zip(own, of, strict=False)):
            accepted[i] += a
            tried[i] += n
    # A page may be scraped between two counters, so that hits run a little ahead of drafts.
    return tuple((min(a, n), n) for a, n in zip(accepted, tried, strict=True)) or None


def _printed_positions(used: Sequence[Observation]) -> tuple[float, ...] | None:
    """Printed per-position rates, where there is exactly one observation that has them."""
    return used[0].rates_per_position if len(used) == 1 else None


def _depth(
    used: Sequence[Observation],
    drafted: int | None,
    drafts: int | None,
    positions: tuple[tuple[int, int], ...] | None,
) -> int | None:
    """Speculative tokens a step: what is stated, or what divides evenly, or the number of positions."""
    if not used:
        return None
    stated = max((o.num_speculative_tokens or 0 for o in used), default=0)
    exact = drafted // drafts if drafted and drafts and drafted % drafts == 0 else 0
    if used[0].definition == "mlc_counts":
        return None
    return max(stated, exact, len(positions or ())) or None


def _mean_length(
    used: Sequence[Observation], accepted: int | None, drafts: int | None, emitted: int | None
) -> float | None:
    """Tokens per verify step, bonus token included."""
    if emitted is not None and drafts:
        return emitted / drafts
    if any(o.definition == "vllm_v0_total" for o in used):
        return None
    if drafts and accepted is not None:
        return 1 + accepted / drafts
    if drafts == 0:
        return None
    printed = [(o.mean_acceptance_length, o.accepted) for o in used]
    if printed and all(m is not None and m > 1 and a for m, a in printed):
        # accepted / (length − 1) drafts each, so the lengths are pooled by their drafts.
        return 1 + sum(a or 0 for _, a in printed) / sum((a or 0) / ((m or 0) - 1) for m, a in printed)
    return _weighted(used, "mean_acceptance_length") if all(o.accepted is None for o in used) else None


def _derived_length(
    used: Sequence[Observation],
    positions: tuple[tuple[int, int], ...] | None,
    accepted: int | None,
    drafted: int | None,
) -> float | None:
    """Tokens per step where no length is known: from the positions, the implied depth, or the generated tokens."""
    if positions and all(n for _, n in positions):
        return 1 + sum(a / n for a, n in positions)
    last = used[-1] if used else None
    if last is not None and last.implied_depth and drafted:
        emitted = sum(o.emitted or 0 for o in used)
        return emitted / (drafted / last.implied_depth)
    generated = _sum(used, "generated") if used else None
    if generated and accepted is not None and generated > accepted:
        # Every step adds one token of its own: steps = generated − accepted.
        return generated / (generated - accepted)
    lengths = [o.mean_acceptance_length for o in used if o.mean_acceptance_length]
    # Weights are not known: the plain mean serves for judging, but is not reported as the length.
    return sum(lengths) / len(lengths) if lengths and accepted is None else None


def _weighted(used: Sequence[Observation], name: str) -> float | None:
    """Weighted mean of a printed value; None where weights are unknown and the values differ."""
    pairs = [(getattr(o, name), o.weight) for o in used if getattr(o, name) is not None]
    if not pairs:
        return None
    values = {v for v, _ in pairs}
    if len(values) == 1:
        return float(values.pop())
    if any(w is None for _, w in pairs):
        return None
    return float(sum(v * (w or 0.0) for v, w in pairs) / sum(w or 0.0 for _, w in pairs))


def _throughput(used: Sequence[Observation]) -> float | None:
    """Median generation throughput of the windows that print one."""
    values = sorted(o.generation_throughput for o in used if o.generation_throughput)
    if not values:
        return None
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def _minus(after: tuple[int, ...] | None, before: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if after is None or before is None:
        return after
    padded = before + (0,) * (len(after) - len(before))
    return tuple(a - b for a, b in zip(after, padded, strict=False))


def _replicas(observations: Sequence[Observation]) -> set[str | None]:
    return {o.replica for o in observations}


def _by_replica(observations: Sequence[Observation]) -> dict[str, list[Observation]]:
    grouped: dict[str, list[Observation]] = defaultdict(list)
    for o in observations:
        grouped[o.replica or "other"].append(o)
    return grouped


def _implementations(observations: Sequence[Observation]) -> dict[str, dict[str, int | None]]:
    """Lifetime counts of each drafting method that prints its own statistics."""
    last = {o.stream: o for o in observations if o.definition == "llamacpp_total"}
    return {k: {"accepted": o.accepted, "drafted": o.drafted, "drafts": o.drafts} for k, o in last.items()}
