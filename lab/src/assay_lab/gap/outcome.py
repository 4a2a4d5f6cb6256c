"""Everything that one decomposition found, and its machine-readable form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from assay.errors import AssayError
from assay.fidelity.observation import WindowObservation
from assay.stats import Interval, percent_change
from assay.stats.resolution import MIN_WINDOWS
from assay_lab.gap.buckets import Amount, Decomposition, Effect, aligned, effect, own_effect
from assay_lab.gap.phases import Attribution, Bench, NoiseCurve, StreamResidual, attribute
from assay_lab.gap.plan import Configuration, Corners, GapPlan, span
from assay_lab.kv.measured import Measured
from assay_lab.kv.spec import KvSpec, Recipe, parse_spec, with_parameters

REPEAT_SHARE = 0.1
"""What may not repeat, as a share of the total."""
FORETOLD_SHARE = 0.2
"""How far the sum of the buckets may be off on other text, as a share of what was measured there.
"""
CAUSE_SHARE = 0.05
"""Of the total, in KL: a bucket below it is not called a cause, however sure its sign is."""


@dataclass(frozen=True)
class Repeated:
    """Whether what does not repeat is small. `bound` is what it may be; `shown` says that its whole
    interval is.
    """

    ok: bool
    bound: float
    shown: bool


def repeated(left: Amount, total: Amount, floor: float) -> Repeated:
    """At most 10 % of the total, or the noise floor, and known at least as well as the total
    itself.
    """
    bound = max(REPEAT_SHARE * abs(total.value), floor)
    shown = left.largest <= bound
    as_sharp = left.hi - left.lo <= total.hi - total.lo
    return Repeated(shown or (abs(left.value) <= bound and as_sharp), bound, shown)


def repeated_nll(left: Amount, total: Amount, floor: float) -> Repeated:
    """As `repeated`, or the interval contains zero.

    ΔNLL of the target tokens is noisy: between two runs of an engine in 16 bits it differs by more
    than 10 % of a small total although nothing has changed. KL is what decides.
    """
    strict = repeated(left, total, floor)
    return Repeated(strict.ok or left.lo <= 0 <= left.hi, strict.bound, strict.shown)


class Place(StrEnum):
    """Where the total lies against a margin."""

    INSIDE = "inside"
    OUTSIDE = "outside"
    UNDECIDED = "undecided"


def place(total: Amount, margin: float, windows: int, *, same: bool = False) -> Place:
    """Whether the total ΔNLL lies within ± ln(1 + margin) of perplexity; fewer than 8 windows never
    decide.

    `same` says that reference and candidate are one configuration, where nothing needs windows.
    """
    if same:
        return Place.INSIDE
    if windows < MIN_WINDOWS:
        return Place.UNDECIDED
    lo, hi = math.log1p(-margin), math.log1p(margin)
    if total.interval.within(lo, hi):
        return Place.INSIDE
    return Place.OUTSIDE if total.interval.outside(lo, hi) else Place.UNDECIDED


@dataclass(frozen=True)
class Floors:
    """What would be there anyway: each engine scored again at another batch, and noise of one bf16
    rounding a layer.

    None where it was not measured.
    """

    reference: Effect | None
    candidate: Effect | None
    rounding: Effect | None

    @property
    def repeat_kl(self) -> float:
        """KL of an engine against itself, the larger one."""
        return max([0.0, *(e.kl.value for e in (self.reference, self.candidate) if e)])

    @property
    def repeat_dnll(self) -> float:
        """How far |ΔNLL| of an engine against itself may be from zero."""
        return max([0.0, *(e.dnll.largest for e in (self.reference, self.candidate) if e)])

    @property
    def largest_kl(self) -> float:
        """The largest known floor in KL, rounding included."""
        return max(self.repeat_kl, self.rounding.kl.value if self.rounding else 0.0)

    def to_json(self) -> dict[str, Any]:
        """As `results.floors`."""
        return {
            "reference": self.reference,
            "candidate": self.candidate,
            "rounding_bf16": self.rounding,
        }


# Tests that a decomposition can fail: it sums whatever its buckets are.


@dataclass(frozen=True)
class Check:
    """What the buckets say of something (`predicted`), and a measurement that took no part in them,
    nats a token.

    `quantity` is `dnll` or `kl`. `holds`: the difference is within `bound`, or its interval
    contains zero.
    """

    name: str
    quantity: str
    predicted: Amount
    measured: Amount
    difference: Amount
    bound: float
    holds: bool


Seen = Sequence[WindowObservation]


def check_step(
    name: str, direct: Seen, before: Seen, after: Seen, d: Decomposition, floors: Floors
) -> Check:
    """ΔNLL of a step that was measured directly, against the difference of two runs which its
    bucket is; by window.

    KL cannot be held against it: KL(p_before‖p_after) is another quantity than the step of
    KL(p_ref‖·).
    """
    sums = aligned({"direct": direct, "before": before, "after": after})
    by_path = sums["after"] - sums["before"]
    predicted, measured = effect(by_path).dnll, effect(sums["direct"]).dnll
    difference = effect(sums["direct"] - by_path).dnll
    state = repeated_nll(difference, d.total.dnll, floors.repeat_dnll)
    return Check(name, "dnll", predicted, measured, difference, state.bound, state.ok)


def check_sum(d: Decomposition, fresh: Seen, floors: Floors) -> Check:
    """Whether the KL of the engine and of the codec, each measured alone, adds up to that of both
    on other text.

    It fails where codec and engine act on each other, or where a bucket is that of one text only.
    """
    parts = [b.effect.kl for b in d.buckets if b.name in ("engine", "codec")]
    value = sum(p.value for p in parts)
    half = math.hypot(*(p.hi - p.value for p in parts))
    predicted, measured = Amount(value, value - half, value + half, 1.0), own_effect(fresh).kl
    off, half = measured.value - value, math.hypot(half, measured.hi - measured.value)
    bound = max(FORETOLD_SHARE * abs(measured.value), floors.repeat_kl)
    holds = abs(off) <= max(bound, half)
    return Check(
        "sum on fresh windows",
        "kl",
        predicted,
        measured,
        Amount(off, off - half, off + half, 1.0),
        bound,
        holds,
    )


@dataclass(frozen=True)
class CodecGap:
    """The codec's effect on each engine, each against itself, and the difference of the
    differences.
    """

    reference: Effect
    candidate: Effect
    gap: Effect

    def to_json(self) -> dict[str, Any]:
        """As `results.codec_gap`: ΔNLL, KL, and what each engine loses in percent of perplexity."""
        return {
            **self.gap.to_json(),
            "reference": {**self.reference.to_json(), "dppl_pct": dppl(self.reference.dnll)},
            "candidate": {**self.candidate.to_json(), "dppl_pct": dppl(self.candidate.dnll)},
        }


@dataclass
class Outcome:
    """What was found. Phases that were not run are absent; `skipped` says why others gave nothing."""

    plan: GapPlan
    decomposition: Decomposition
    floors: Floors
    codec_gap: CodecGap | None
    repeats_kl: Repeated | None
    repeats_nll: Repeated | None
    same: bool
    setup: Mapping[str, tuple[Any, Any]]
    text: Mapping[str, Any]
    engines: Mapping[str, Mapping[str, Any]]
    checks: Sequence[Check] = ()
    bytes: Mapping[str, Any] | None = None
    switches: Sequence[Mapping[str, Any]] = ()
    residuals: Sequence[StreamResidual] = ()
    noise: Mapping[str, NoiseCurve] = field(default_factory=dict)
    noise_ratio: Sequence[Mapping[str, Any]] = ()
    matched: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Attribution] = field(default_factory=dict)
    harness: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    recommendations: Sequence[Mapping[str, Any]] = ()
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def causes(self) -> list[str]:
        """Buckets and parts with at least 5 % of the total's KL that it tells from zero,
        Holm-adjusted, and that stand above twice what an engine differs from itself by.

        The largest come first; a part comes after its bucket where both are as large.
        """
        floor = 2 * self.floors.repeat_kl
        every = [b for top in self.decomposition.buckets for b in (top, *top.parts)]
        found = [
            b
            for b in every
            if b.separated and b.effect.kl.value > floor and (b.share_kl or 0.0) >= CAUSE_SHARE
        ]
        return [b.name for b in sorted(found, key=lambda b: -b.effect.kl.value)]

    @property
    def repeats(self) -> bool:
        """Whether the total that was measured on its own is the sum of the buckets."""
        return bool(
            self.repeats_kl and self.repeats_kl.ok and self.repeats_nll and self.repeats_nll.ok
        )

    def to_json(self) -> dict[str, Any]:
        """The object `results` of `assay gap`."""
        d, left = self.decomposition, None
        if d.repeatability and self.repeats_kl and self.repeats_nll:
            left = {
                **d.repeatability.to_json(),
                "closed": self.repeats,
                "shown": {"dnll": self.repeats_nll.shown, "kl": self.repeats_kl.shown},
                "bound": {"dnll": self.repeats_nll.bound, "kl": self.repeats_kl.bound},
            }
        return {
            "codec": self.plan.codec,
            "mode": self.plan.mode,
            "base_mode": self.plan.base,
            "windows": d.windows,
            "tokens": d.tokens,
            "total": {
                **d.total.to_json(),
                "dppl_pct": dppl(d.total.dnll),
                "measured_apart": left is not None,
            },
            "total_by_path": d.by_path,
            "buckets": d.buckets,
            "repeatability": left,
            "closure": left,
            "checks": [asdict(check) for check in self.checks],
            "causes": self.causes,
            "codec_gap": self.codec_gap,
            "orders": d.orders,
            "floors": self.floors,
            "setup_differences": self.setup,
            "self_test": self.same,
            "switches": self.switches,
            "bytes": self.bytes,
            "residual": {"streams": self.residuals},
            "noise": {**self.noise, "ratio": self.noise_ratio, "matched": self.matched},
            "layers": self.layers,
            "harness": self.harness,
            "calibration": self.calibration,
            "recommendations": self.recommendations,
            "phases": self.plan.phases,
            "skipped": self.skipped,
            "text": {**self.text, "length": self.plan.length, "scored": "second-half"},
            "engines": self.engines,
        }


def dppl(amount: Amount) -> dict[str, float]:
    """A mean ΔNLL as a change of perplexity in percent."""
    found = percent_change(Interval(amount.value, amount.lo, amount.hi))
    return {
        name: x if math.isfinite(x) else math.nan
        for name, x in zip(("value", "lo", "hi"), (found.value, found.lo, found.hi), strict=True)
    }


# What to do about a gap.


HOT_SHARE = 0.15
"""Share of the layers that is called hot, at least one group."""


@dataclass(frozen=True)
class Proposal:
    """Something that could be done instead, in words and as a configuration."""

    action: str
    config: Configuration


def proposals(
    corners: Corners, alone: Mapping[str, Measured], joint: Measured, layers: int
) -> list[Proposal]:
    """From the hottest groups of layers on the candidate, from the codec's bits, and another codec."""
    engine, codec = corners.plan.candidate, corners.plan.codec
    found: list[Proposal] = []
    more = with_more_bits(codec)
    if len(alone) > 1:
        hot = hot_layers(attribute(layers, corners.plan.groups, alone, joint), layers)
        found.append(
            Proposal(
                f"keep layers {span(hot)} exact",
                corners.with_codec(engine, skip_layers=hot, measured=2),
            )
        )
        if more:
            special = tuple((layer, more) for layer in hot)
            found.append(
                Proposal(
                    f"one bit more in layers {span(hot)}",
                    corners.with_codec(engine, layer_codecs=special, measured=2),
                )
            )
    if more:
        found.append(
            Proposal("one bit more everywhere", corners.with_codec(engine, codec=more, measured=2))
        )
    if "fp8" not in codec:
        found.append(
            Proposal(
                "fp8 instead", corners.with_codec(engine, codec="fp8", calibration=None, measured=2)
            )
        )
    return found


def hot_layers(attribution: Attribution, layers: int) -> tuple[int, ...]:
    """The layers of the hottest groups, up to about a seventh of all."""
    chosen: list[int] = []
    for part in attribution.hottest():
        if chosen and len(chosen) + len(part.layers) > max(1, HOT_SHARE * layers):
            break
        chosen += part.layers
    return tuple(sorted(chosen))


def with_more_bits(codec: str) -> str | None:
    """The same SPEC with one bit more in each stream; None where a codec has no bits, or no more."""
    spec = parse_spec(codec)
    try:
        k, v = (None if r is None else _one_more(r) for r in (spec.k, spec.v))
    except AssayError:
        return None
    more = str(KvSpec(k, v))
    return None if more == str(spec) else more


def _one_more(recipe: Recipe) -> Recipe:
    names = {f.name for f in fields(recipe.codec)}
    if "bits" not in names:
        return recipe
    return Recipe(recipe.around, with_parameters(recipe.codec, {"bits": recipe.codec.bits + 1}))  # type: ignore[attr-defined]


def measure_proposals(
    bench: Bench, corners: Corners, proposed: Sequence[Proposal], found: dict[str, Measured]
) -> dict[str, str]:
    """The codec as it is, and each proposal, on the fresh windows; returns what could not be run,
    and why.
    """
    anchor = corners.candidate
    as_it_is = corners.with_codec(bench.plan.candidate, measured=2)
    found["as it is"] = bench.measure(as_it_is, anchor, "fresh")
    skipped: dict[str, str] = {}
    for proposal in proposed:
        try:
            found[proposal.action] = bench.measure(proposal.config, anchor, "fresh")
        except AssayError as error:
            skipped[proposal.action] = error.message
    return skipped


def judged(found: Sequence[Proposal], runs: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """`results.recommendations`: effect, bytes, and the saving against the codec as it is, the
    largest saving first.

    `helps` says that the saving in KL is separated from zero on fresh windows.
    """
    sums = aligned({name: m.seen for name, m in runs.items()})
    before = runs["as it is"].bytes
    entries = []
    for proposal in found:
        size = runs[proposal.action].bytes if proposal.action in runs else None
        if size is None or before is None:
            continue
        own = effect(sums[proposal.action])
        saving = effect(sums["as it is"] - sums[proposal.action])
        entries.append(
            {
                "action": proposal.action,
                "codec": proposal.config.codec,
                "skip_layers": list(proposal.config.skip_layers),
                "layer_codecs": {str(k): v for k, v in proposal.config.layer_codecs},
                "bytes_ratio": size.ratio,
                "bytes_ratio_before": before.ratio,
                "bytes_more": size.stored - before.stored,
                "kld": own.kl.value,
                "kld_lo": own.kl.lo,
                "kld_hi": own.kl.hi,
                "dnll": own.dnll.value,
                "lo": own.dnll.lo,
                "hi": own.dnll.hi,
                "saving_kld": saving.kl.to_json(),
                "helps": saving.kl.lo > 0,
                "windows": len(runs[proposal.action].seen),
            }
        )
    return sorted(entries, key=lambda e: -e["saving_kld"]["value"])
