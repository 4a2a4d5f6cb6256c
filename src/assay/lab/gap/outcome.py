"""Everything that one decomposition found, and its machine-readable form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.lab.gap.buckets import Amount, Decomposition, Effect
from assay.lab.gap.phases import Attribution, NoiseCurve, StreamResidual
from assay.lab.gap.plan import GapPlan
from assay.stats.equivalence import MIN_WINDOWS
from assay.stats.intervals import Interval, percent_change

# -----------------------------------------------------------------------------
# Is the gap explained, and does it stay within the margin? Rules on intervals; no number is made here.

CLOSED_SHARE = 0.1
"""What the buckets may leave over, as a share of the total."""


@dataclass(frozen=True)
class Closed:
    """Whether what is left over is small. `bound` is what it may be; `shown` says that its whole interval is."""

    ok: bool
    bound: float
    shown: bool


def closed(closure: Amount, total: Amount, floor: float) -> Closed:
    """At most 10 % of the total, or the noise floor, and known at least as well as the total itself."""
    bound = max(CLOSED_SHARE * abs(total.value), floor)
    shown = closure.largest <= bound
    as_sharp = closure.hi - closure.lo <= total.hi - total.lo
    return Closed(shown or (abs(closure.value) <= bound and as_sharp), bound, shown)


def closed_nll(closure: Amount, total: Amount, floor: float) -> Closed:
    """As `closed`, or the interval contains zero.

    ΔNLL of the tokens that came is noisy: between two runs of an engine in 16 bits it differs by more than 10 % of a
    small total although nothing has changed. KL is what decides.
    """
    strict = closed(closure, total, floor)
    return Closed(strict.ok or closure.lo <= 0 <= closure.hi, strict.bound, strict.shown)


class Place:
    """Where the total lies against a margin."""

    INSIDE = "inside"
    OUTSIDE = "outside"
    UNDECIDED = "undecided"


def place(total: Amount, margin: float, windows: int, *, same: bool = False) -> str:
    """Whether the total ΔNLL lies within ± ln(1 + margin) of perplexity; fewer than 8 windows never decide.

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


# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Floors:
    """What would be there anyway: each engine scored again at another batch, and noise of one bf16 rounding a layer."""

    reference: Effect
    candidate: Effect
    rounding: Effect | None

    @property
    def repeat_kl(self) -> float:
        """KL of an engine against itself, the larger one."""
        return max(self.reference.kl.value, self.candidate.kl.value, 0.0)

    @property
    def repeat_dnll(self) -> float:
        """How far |ΔNLL| of an engine against itself may be from zero."""
        return max(self.reference.dnll.largest, self.candidate.dnll.largest)

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


@dataclass(frozen=True)
class CodecGap:
    """The codec's effect on each engine, each against itself, and the difference of the differences."""

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
    codec_gap: CodecGap
    closed_kl: Closed
    closed_nll: Closed
    same: bool
    setup: Mapping[str, tuple[Any, Any]]
    text: Mapping[str, Any]
    engines: Mapping[str, Mapping[str, Any]]
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
        """Buckets and parts that KL tells from zero, Holm-adjusted, and that stand above twice the repeat floor.

        The largest come first; a part comes after its bucket where both are as large.
        """
        floor = 2 * self.floors.repeat_kl
        every = [b for top in self.decomposition.buckets for b in (top, *top.parts)]
        found = [b for b in every if b.separated and abs(b.effect.kl.value) > floor]
        return [b.name for b in sorted(found, key=lambda b: -abs(b.effect.kl.value))]

    def to_json(self) -> dict[str, Any]:
        """The object `results` of `assay gap`."""
        d = self.decomposition
        return {
            "codec": self.plan.codec,
            "mode": self.plan.mode,
            "base_mode": self.plan.base_mode,
            "windows": d.windows,
            "tokens": d.tokens,
            "total": {**d.total.to_json(), "dppl_pct": dppl(d.total.dnll)},
            "total_by_path": d.by_path,
            "buckets": d.buckets,
            "closure": {
                **d.closure.to_json(),
                "closed": self.closed_kl.ok and self.closed_nll.ok,
                "shown": {"dnll": self.closed_nll.shown, "kl": self.closed_kl.shown},
                "bound": {"dnll": self.closed_nll.bound, "kl": self.closed_kl.bound},
            },
            "causes": self.causes,
            "codec_gap": self.codec_gap,
            "orders": d.orders,
            "floors": self.floors,
            "setup_differences": self.setup,
            "self_test": self.same,
            "switches": self.switches,
            "bytes": self.bytes,
            "residual": {"streams": self.residuals},
            "noise": {
                **self.noise,
                "ratio": self.noise_ratio,
                "matched": self.matched,
            },
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
