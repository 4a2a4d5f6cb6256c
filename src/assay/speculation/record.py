"""The normalised evidence: what one line, sample or response says, and what a whole source adds up
to.

Field names follow NVIDIA AIPerf's engine-neutral acceptance record where they fit. Rates are
fractions. Lengths count the bonus token, so that a step which accepted nothing has length 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import zip_longest
from statistics import median
from typing import Any

MOST_POSITIONS = 1000
"""No draft is longer; a larger figure is not one of positions."""


class Kind(StrEnum):
    """How an observation relates to the run it comes from."""

    WINDOW = "window"
    """Counts of one logging interval: add them up."""
    REQUEST = "request"
    """Counts of one request: add them up."""
    TOTAL = "total"
    """Counts since the process started: take differences."""
    SUMMARY = "summary"
    """Counts of a finished benchmark: use them where there is nothing finer."""
    VALUE = "value"
    """Printed rates without counts."""


DEFINITIONS: Mapping[str, str] = {
    "vllm_v1_window": "vLLM V1 log: counts of one interval; length = 1 + accepted / drafts",
    "vllm_v0_total": (
        "vLLM V0: counts since start; 'accepted' also counts hits after the first rejection, so"
        " tokens per step are emitted / drafts"
    ),
    "vllm_counters": "vLLM counters since start; length = 1 + accepted / drafts",
    "vllm_request": "vLLM counts of one request; histogram[i] = steps that accepted i drafts",
    "vllm_summary": "vLLM benchmark summary of one run",
    "sglang_summary": "SGLang benchmark summary of one run",
    "sglang_accept_len": "SGLang: accept len = tokens per verify step, bonus token included",
    "sglang_gauges": "SGLang gauges: the last interval only",
    "sglang_request": "SGLang counts of one request",
    "sglang_average": "SGLang average length since start, printed without a weight",
    "llamacpp_request": (
        "llama.cpp counts of one request (the denominator is the number of drafted tokens)"
    ),
    "llamacpp_total": "llama.cpp statistics of one drafting method since start",
    "llamacpp_counters": "llama.cpp counters since start",
    "trtllm_iteration": "TensorRT-LLM counts of one iteration; one draft a request",
    "trtllm_counters": "TensorRT-LLM counters since start; verify steps are not counted",
    "trtllm_request": "TensorRT-LLM counts of one request",
    "trtllm_average": "TensorRT-LLM average acceptance length, printed without a weight",
    "mlx_request": "mlx-vlm counts of one request; a round is one verify step",
    "mlc_counts": (
        "MLC: accept_count[i] / draft_count[i]; entry 0 is the slot that is always accepted"
    ),
    "guard_request": (
        "engine that stops drafting by itself: drafts, accepted and drafted of one request"
    ),
    "fastdeploy_request": (
        "FastDeploy counts of one request; its accepted tokens include bonus tokens, which are"
        " left out"
    ),
    "named": "figures read by their names: draft tokens accepted of drafted, steps, tokens a step",
    "openai_usage": "OpenAI usage: accepted and rejected prediction tokens of one request",
}


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one line, metrics sample or response says. Unknown values are None.

    `replica` names the engine of several, `stream` the counter inside it.
    `accepted_per_position[i]` counts the steps whose draft position i was accepted, out of
    `drafts_per_position[i]` (out of `drafts` where None). `rates_per_position`, `acceptance_rate`
    and `mean_acceptance_length` are as printed; `reported_rate` keeps a printed rate whose meaning
    turned out to be another. `emitted` counts all tokens of the steps that drafted, bonus tokens
    included; `generated` the tokens of the whole reply and `steps` its decode steps, which need not
    all have drafted. `accepted_first` counts the drafts of which at least the first token was
    accepted. `implied_depth` is the number of speculative tokens that other figures imply. `weight`
    is the share of a printed value in an average, None where that is not known.
    """

    engine: str
    kind: Kind
    definition: str
    replica: str | None = None
    stream: str = ""
    drafted: int | None = None
    accepted: int | None = None
    drafts: int | None = None
    accepted_per_position: tuple[int, ...] | None = None
    drafts_per_position: tuple[int, ...] | None = None
    rates_per_position: tuple[float, ...] | None = None
    acceptance_rate: float | None = None
    reported_rate: float | None = None
    mean_acceptance_length: float | None = None
    num_speculative_tokens: int | None = None
    emitted: int | None = None
    generated: int | None = None
    steps: int | None = None
    accepted_first: int | None = None
    implied_depth: int | None = None
    multiplier: float | None = None
    weight: float | None = 1.0
    time: str | None = None
    generation_throughput: float | None = None
    running: int | None = None
    context_tokens: int | None = None
    partial: bool = False
    estimated: bool = False
    idle: bool = False
    note: str = ""

    @classmethod
    def of(cls, **known: Any) -> Observation:
        """The same as the constructor, at a tenth of its cost: what is not known stays the default
        of the class.

        For the lines of which a log may hold millions; the constructor of a frozen class sets every
        field one by one.
        """
        own = object.__new__(cls)
        own.__dict__.update(known)
        return own

    @property
    def has_counts(self) -> bool:
        """Whether anything here can be added up."""
        return (
            self.drafted is not None
            or self.drafts is not None
            or self.accepted_per_position is not None
        )

    @property
    def empty(self) -> bool:
        """Whether nothing was drafted in it."""
        if self.drafted is not None:
            return self.drafted == 0
        if self.drafts is not None:
            return self.drafts == 0
        return self.idle


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a source adds up to. Unknown values are None.

    `positions[i]` is (accepted, drafts) of draft position i. `tokens_per_step` is the mean
    acceptance length, or what can be derived in its place (from the generated tokens of the
    replies). `leading_accepted` are the drafts that entered the text where that differs from
    `accepted` (vLLM V0). `first` is position 0 where only that is known. `steps` are all decode
    steps, also those without a draft (estimated from the throughput that a log prints). `windows`
    counts observations with drafts.
    """

    engine: str | None = None
    drafted: int | None = None
    accepted: int | None = None
    drafts: int | None = None
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    per_position: tuple[float, ...] | None = None
    num_speculative_tokens: int | None = None
    windows: int = 0
    counts: bool = False
    positions: tuple[tuple[int, int], ...] | None = None
    first: tuple[int, int] | None = None
    steps: int | None = None
    steps_estimated: bool = False
    tokens_per_step: float | None = None
    leading_accepted: int | None = None
    emitted: int | None = None
    generated: int | None = None
    multiplier: float | None = None
    reported_accept_rate: float | None = None
    generation_throughput: float | None = None
    partial: bool = False
    estimated: bool = False
    definitions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    per_implementation: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)

    @property
    def nothing_drafted(self) -> bool:
        """Whether the source shows that no token was drafted."""
        if self.counts:
            return not self.drafted and not self.drafts and self.positions is None
        return self.acceptance_rate is None and self.tokens_per_step is None and self.windows == 0

    @property
    def impossible(self) -> bool:
        """Whether more was accepted than drafted, beyond what counters of one page run ahead of
        each other.
        """
        return (
            self.drafted is not None
            and self.accepted is not None
            and self.accepted > self.drafted + max(8, self.drafted // 50)
        )

    @property
    def coverage(self) -> float | None:
        """Share of all decode steps that drafted at all; None where it is not known."""
        return min(1.0, self.drafts / self.steps) if self.drafts and self.steps else None

    @property
    def overall(self) -> float | None:
        """Tokens per decode step, steps without a draft included; None where they are not counted."""
        if self.leading is None or not self.steps:
            return None
        return (max(self.steps, self.drafts or 0) + self.leading) / max(
            self.steps, self.drafts or 0
        )

    @property
    def leading(self) -> int | None:
        """Accepted drafts that entered the text."""
        return self.accepted if self.leading_accepted is None else self.leading_accepted

    def to_json(self) -> dict[str, Any]:
        """The object `results.record`."""
        own = {name: getattr(self, name) for name in _IN_JSON}
        own |= {
            "overall_tokens_per_step": self.overall,
            "coverage_estimated": self.coverage is not None and self.steps_estimated,
            "reported_multiplier": self.multiplier,
            "definitions": {name: DEFINITIONS.get(name, name) for name in self.definitions},
        }
        return own | (
            {"per_implementation": self.per_implementation} if self.per_implementation else {}
        )


_IN_JSON = (
    "engine",
    "drafted",
    "accepted",
    "drafts",
    "acceptance_rate",
    "mean_acceptance_length",
    "per_position",
    "num_speculative_tokens",
    "windows",
    "counts",
    "tokens_per_step",
    "coverage",
    "emitted",
    "reported_accept_rate",
    "generation_throughput",
    "partial",
    "estimated",
    "notes",
)

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


def summarise(observations: Sequence[Observation]) -> Record:
    """One record of observations that may be added up. Unknown stays None: nothing is guessed."""
    used = [o for o in observations if not o.empty]
    counted = any(o.has_counts for o in observations)
    partial = any(o.partial for o in observations)
    drafted, accepted, drafts, emitted, generated, steps = (
        _sum(observations, name)
        for name in ("drafted", "accepted", "drafts", "emitted", "generated", "steps")
    )
    positions = None if partial else _positions(used)
    if partial:
        drafted = accepted = None
    rate = min(1.0, accepted / drafted) if drafted and accepted is not None else None
    if not counted and rate is None:
        rate = _weighted(used, "acceptance_rate")
    mean = _mean_length(used, accepted, drafts, emitted)
    leading = emitted - drafts if emitted is not None and drafts else None
    kept = accepted if leading is None else leading
    if steps is None and generated is not None and kept is not None and generated > kept:
        steps = generated - kept  # every step adds one token of its own
    first = _sum(used, "accepted_first")
    # Printed rates of positions are kept where exactly one observation has them.
    rates = used[0].rates_per_position if len(used) == 1 else None
    speeds = [o.generation_throughput for o in used if o.generation_throughput]
    return Record(
        engine=observations[0].engine if observations else None,
        drafted=drafted,
        accepted=accepted,
        drafts=drafts,
        acceptance_rate=rate,
        mean_acceptance_length=mean,
        per_position=tuple(a / n if n else 0.0 for a, n in positions) if positions else rates,
        num_speculative_tokens=_depth(used, drafted, drafts, positions),
        windows=len(used),
        counts=counted,
        positions=positions,
        first=(
            positions[0] if positions else (first, drafts) if first is not None and drafts else None
        ),
        steps=steps,
        steps_estimated=any(o.definition == "vllm_v1_window" for o in used),
        tokens_per_step=(
            mean if mean is not None else _derived_length(used, positions, accepted, drafted)
        ),
        leading_accepted=leading,
        emitted=emitted,
        generated=generated,
        multiplier=_weighted(used, "multiplier"),
        reported_accept_rate=_weighted(used, "reported_rate"),
        generation_throughput=median(speeds) if speeds else None,
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
    """(accepted, drafts) of each position, from the observations that print positions; None if some
    do not.
    """
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


def _depth(
    used: Sequence[Observation],
    drafted: int | None,
    drafts: int | None,
    positions: Sequence[Any] | None,
) -> int | None:
    """Speculative tokens a step: what is stated, or what divides evenly, or the number of
    positions.
    """
    if not used or used[0].definition == "mlc_counts":
        return None
    stated = max(o.num_speculative_tokens or 0 for o in used)
    exact = drafted // drafts if drafted and drafts and drafted % drafts == 0 else 0
    deepest = max(stated, exact, len(positions or ()))
    return deepest if 0 < deepest <= MOST_POSITIONS else None


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
        return 1 + sum(a or 0 for _, a in printed) / sum(
            (a or 0) / ((m or 0) - 1) for m, a in printed
        )
    return (
        _weighted(used, "mean_acceptance_length") if all(o.accepted is None for o in used) else None
    )


def _derived_length(
    used: Sequence[Observation],
    positions: Sequence[tuple[int, int]] | None,
    accepted: int | None,
    drafted: int | None,
) -> float | None:
    """Tokens per step where no length is known: from the positions, the implied depth, or the
    generated tokens.
    """
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


# Counts behind printed figures: how many drafts a log line with rounded rates stands for.


def infer_drafts(
    drafted: int,
    accepted: int,
    positions: int | None,
    mean_length: float | None,
    rates: Sequence[float] | None = None,
) -> int | None:
    """Number of drafts behind a line that prints drafted and accepted tokens and a rounded mean
    length.

    A draft has at most `positions` tokens, so there are at least `drafted / positions` drafts, and
    exactly that many where none was cut short. That number is taken if it agrees with the printed
    figures; else the one that agrees best among those whose mean length rounds to the printed one;
    None if the line does not say enough.
    """
    if drafted == 0:
        return 0
    full = math.ceil(drafted / positions) if positions else None
    if mean_length is None or not math.isfinite(mean_length):
        return full
    half = 0.005 + 1e-9  # two decimals are printed

    def agrees(drafts: int) -> bool:
        return bool(abs(1 + accepted / drafts - mean_length) <= half)

    if full is not None and agrees(full) and (accepted == 0 or _rates_agree(full, accepted, rates)):
        return full
    low, high = mean_length - 1 - half, mean_length - 1 + half
    if accepted == 0 or low <= 0:
        return full
    first, last = math.ceil(accepted / high), math.floor(accepted / low)
    candidates = range(max(first, full or 1), min(last, drafted) + 1)
    if not candidates or len(candidates) > 2000:
        return full if full is not None else round(accepted / (mean_length - 1))
    fitting = (
        [d for d in candidates if _rates_agree(d, accepted, rates)] if rates else list(candidates)
    )
    middle = accepted / (mean_length - 1)
    return min(fitting or candidates, key=lambda d: abs(d - middle))


def exact_counts(
    drafted: int, accepted: int, mean_length: float, rates: Sequence[float]
) -> tuple[int, tuple[int, ...]] | None:
    """Drafts and accepted drafts per position where full-length drafts explain every printed
    figure; None otherwise.

    What `infer_drafts` and `position_counts` would say, for the usual line at a third of the cost.
    """
    drafts = -(-drafted // len(rates))
    if not drafts or abs(1 + accepted / drafts - mean_length) > 0.005 + 1e-9:
        return None
    counts = tuple([round(rate * drafts) for rate in rates])
    if sum(counts) != accepted:
        return None
    half = (0.0005 + 1e-9) * drafts
    for count, rate in zip(counts, rates, strict=True):
        if abs(count - rate * drafts) > half:
            return None
    return drafts, counts


def position_counts(
    drafts: int, rates: Sequence[float], accepted: int | None, complete: bool = True
) -> tuple[int, ...]:
    """Accepted drafts per position from rounded rates: the nearest counts, corrected so that they
    add up.

    `accepted` is the known sum (None or `complete=False` where some positions are not printed).
    """
    exact = [rate * drafts for rate in rates]
    counts = [min(drafts, max(0, round(value))) for value in exact]
    if accepted is None or not complete:
        return tuple(counts)
    missing = accepted - sum(counts)
    # The true counts lie within a rounding step of `exact`; a larger gap means that the rates are
    # something else.
    if missing and abs(missing) <= min(10_000, max(2, len(counts) * (1 + drafts // 1000))):
        step = 1 if missing > 0 else -1
        for _ in range(abs(missing)):
            movable = [i for i in range(len(counts)) if 0 <= counts[i] + step <= drafts]
            nearest = max(movable, key=lambda i: step * (exact[i] - counts[i]), default=None)
            if nearest is None:
                break
            counts[nearest] += step
    return tuple(counts)


def _rates_agree(drafts: int, accepted: int, rates: Sequence[float] | None) -> bool:
    """Whether counts over `drafts` can print as `rates` (three decimals) and add up to `accepted`."""
    if not rates:
        return True
    half = 0.0005 + 1e-9
    low = sum(max(0, math.ceil((rate - half) * drafts)) for rate in rates)
    high = sum(math.floor((rate + half) * drafts) for rate in rates)
    return low <= accepted <= high
