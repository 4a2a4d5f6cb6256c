"""The decomposition of a gap into buckets that sum.

With c(engine, codec) the sums of a configuration against the one reference c(R, –) = 0, in the base
mode:

    engine       c(C, –)                               candidate without codec − reference without
    codec        c(R, q)                               reference engine with codec − without
    interaction  c(C, q) − c(C, –) − c(R, q)           what the codec does to the candidate beyond
    that harness      c'(C, q) − c(C, q)                    the asked mode c' against the base mode

Their sum is c'(C, q), for any numbers. `repeatability` is a total that was measured on its
own, in another run, minus that sum: it is zero but for what does not repeat. Without a codec there
is the bucket `engine` alone.

The window is the unit of every interval, so sums by window are all that is needed: of d = NLL_k −
NLL_ref and of KL(p_ref‖p_k) over its tokens. Both are differences from one reference, so the step
from configuration k − 1 to k is their difference, and steps telescope exactly to the last
configuration:

    Σ_k (d_k − d_{k−1}) = d_n,        Σ_k (KL_k − KL_{k−1}) = KL(p_ref‖p_n),

the second because KL_k − KL_{k−1} = E_{p_ref} [log p_{k−1} − log p_k].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.errors import AssayError
from assay.fidelity.observation import WindowObservation
from assay.stats import Interval, cluster_ratio, not_negative
from assay.stats.multiplicity import holm
from assay.stats.non_inferiority import paired_difference


@dataclass(frozen=True)
class WindowSums:
    """Sums of G windows, each array [G]: `dnll` and `kl` in nats, `tokens` how many were counted.

    Sums over the same tokens can be added, subtracted and scaled; that is how buckets are made.
    """

    dnll: NDArray[np.float64]
    kl: NDArray[np.float64]
    tokens: NDArray[np.float64]
    direct: bool = False
    """Whether `kl` is that of a configuration itself, which is never negative, and no difference.
    """

    def __add__(self, other: WindowSums) -> WindowSums:
        return WindowSums(self.dnll + other.dnll, self.kl + other.kl, self.tokens)

    def __sub__(self, other: WindowSums) -> WindowSums:
        return WindowSums(self.dnll - other.dnll, self.kl - other.kl, self.tokens)

    def __mul__(self, factor: float) -> WindowSums:
        return WindowSums(self.dnll * factor, self.kl * factor, self.tokens)


def zero_like(sums: WindowSums) -> WindowSums:
    """No difference at all, on the same tokens: what the reference itself comes to."""
    return sums * 0.0


def aligned(seen: Mapping[str, Sequence[WindowObservation]]) -> dict[str, WindowSums]:
    """Sums of every configuration over the tokens that are finite in all of them.

    A token that one configuration cannot score is left out everywhere; otherwise differences would
    compare different tokens. AssayError where windows differ or nothing is left.
    """
    if not seen:
        return {}
    first = next(iter(seen.values()))
    for name, windows in seen.items():
        if [(w.index, w.first) for w in windows] != [(w.index, w.first) for w in first] or any(
            not np.array_equal(a.tokens, b.tokens) for a, b in zip(windows, first, strict=True)
        ):
            raise ValueError(f"{name} was scored on other windows than {next(iter(seen))}")
    masks = [
        np.logical_and.reduce([_usable(windows[i]) for windows in seen.values()])
        for i in range(len(first))
    ]
    tokens = np.array([float(mask.sum()) for mask in masks])
    if not tokens.any():
        raise AssayError(
            "no token has finite logits in all configurations",
            finding_id="gap.nonfinite",
            remedy=(
                "look for NaN in the checkpoint (assay verify --values), or score in a wider type"
                " (?dtype=float32)"
            ),
        )
    return {
        name: WindowSums(
            np.array([float(w.dnll[mask].sum()) for w, mask in zip(windows, masks, strict=True)]),
            np.array([float(w.kl[mask].sum()) for w, mask in zip(windows, masks, strict=True)]),
            tokens,
            direct=True,
        )
        for name, windows in seen.items()
    }


def _usable(window: WindowObservation) -> NDArray[np.bool_]:
    """Finite on both sides, and the candidate does not rule out what the reference allows (KL would
    be infinite).
    """
    return window.finite & np.isfinite(window.kl) & np.isfinite(window.dnll)


@dataclass(frozen=True)
class Amount:
    """A mean a token with its two-sided 95 % interval (CR1, t with G − 1) and the p-value of "it is
    zero".
    """

    value: float
    lo: float
    hi: float
    p: float

    @property
    def interval(self) -> Interval:
        """Value and bounds."""
        return Interval(self.value, self.lo, self.hi)

    @property
    def largest(self) -> float:
        """The largest magnitude that the interval allows."""
        return max(abs(self.lo), abs(self.hi))

    def to_json(self) -> dict[str, float]:
        """`{value, lo, hi}`."""
        return {"value": self.value, "lo": self.lo, "hi": self.hi}


@dataclass(frozen=True)
class Effect:
    """One difference in both currencies, nats a token."""

    dnll: Amount
    kl: Amount

    def to_json(self) -> dict[str, Any]:
        """ΔNLL at the top, KL beside it."""
        return {**self.dnll.to_json(), "kl": self.kl.to_json()}


def amount(sums: ArrayLike, tokens: ArrayLike, *, negative: bool = True) -> Amount:
    """The mean a token of sums by window [G] over their tokens [G]; `negative`: whether it may be
    below zero.
    """
    values = np.asarray(sums, dtype=np.float64)
    found = paired_difference(values, np.zeros_like(values), tokens)
    bounds = (found.difference if negative else not_negative(found.difference)).interval
    # Rounding alone may make a KL of nothing negative.
    value = bounds.value if negative else max(bounds.value, 0.0)
    # One window says nothing of the error: no evidence of a difference.
    return Amount(value, bounds.lo, bounds.hi, 1.0 if math.isnan(found.p_value) else found.p_value)


def effect(sums: WindowSums) -> Effect:
    """Both currencies of a (combined) configuration."""
    return Effect(
        amount(sums.dnll, sums.tokens), amount(sums.kl, sums.tokens, negative=not sums.direct)
    )


def own_effect(seen: Sequence[WindowObservation]) -> Effect:
    """The effect of one run over its own tokens."""
    return effect(aligned({"run": seen})["run"])


def ratio(numerators: ArrayLike, denominators: ArrayLike) -> Interval | None:
    """Σ numerators / Σ denominators with the interval by window; None where there is nothing to
    divide by.
    """
    below = np.asarray(denominators, dtype=np.float64)
    if not (below > 0).any() or (below < 0).any():
        return None
    return cluster_ratio(numerators, below).interval


LEVEL = 0.05
"""Of the Holm-adjusted test that a bucket is not zero."""


@dataclass(frozen=True)
class Bucket:
    """One share of the gap, nats a token. `parts` sum to it; `p` are Holm-adjusted over its
    siblings.
    """

    name: str
    effect: Effect
    share: float | None = None
    share_kl: float | None = None
    p_dnll: float = 1.0
    p_kl: float = 1.0
    note: str = ""
    parts: tuple[Bucket, ...] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """`{name, dnll, lo, hi, share}` in ΔNLL, and the same in KL."""
        kl = self.effect.kl
        return {
            "name": self.name,
            "dnll": self.effect.dnll.value,
            "lo": self.effect.dnll.lo,
            "hi": self.effect.dnll.hi,
            "share": self.share,
            "p_holm": self.p_dnll,
            "kl": {**kl.to_json(), "share": self.share_kl, "p_holm": self.p_kl},
            "separated_from_zero": self.separated,
            "note": self.note,
            "parts": self.parts,
        }

    @property
    def separated(self) -> bool:
        """Whether the primary column, KL, tells it from zero after Holm's correction."""
        return self.p_kl <= LEVEL


@dataclass(frozen=True)
class Decomposition:
    """Buckets, and the total that was measured on its own (`repeatability`: minus their sum; None
    where it was not).

    `by_path` is the sum of the buckets. `orders` are both orders in which codec and engine can be
    changed, and the Shapley value (their mean), as effects by factor; none without a codec.
    """

    buckets: tuple[Bucket, ...]
    total: Effect
    by_path: Effect
    repeatability: Effect | None
    orders: Mapping[str, Mapping[str, Effect]]
    windows: int
    tokens: int

    def bucket(self, name: str) -> Bucket:
        """The top-level bucket of that name."""
        return next(b for b in self.buckets if b.name == name)


def decompose(
    engine: Sequence[tuple[str, WindowSums]],
    codec: WindowSums | None = None,
    both: WindowSums | None = None,
    total: WindowSums | None = None,
    asked: WindowSums | None = None,
    *,
    layers: Sequence[tuple[str, WindowSums]] = (),
    notes: Mapping[str, str] | None = None,
) -> Decomposition:
    """Buckets from sums against the one reference, all over the same tokens.

    `engine` are the steps from the reference engine to the candidate, without codec, each with what
    it leads to (the last is the candidate); `codec` is the reference with codec, `both` the
    candidate with codec, `asked` the same in the asked mode (None: it is the base mode), `total`
    the independent run. `layers` are parts of the codec, each alone on the reference; what they do
    to each other becomes the part `codec.together`.
    """
    notes = notes or {}
    candidate = by_path = engine[-1][1]
    top, found = [("engine", candidate)], {}
    if codec is not None and both is not None:
        harness = zero_like(both) if asked is None else asked - both
        by_path = both + harness
        top += [("codec", codec), ("interaction", both - candidate - codec), ("harness", harness)]
        found = orders(candidate, codec, both)
    whole = by_path if total is None else total
    parts = {"engine": _steps(engine), "codec": _layers(codec, layers) if codec is not None else ()}
    share = effect(whole)
    return Decomposition(
        buckets=tuple(
            _judged(
                [
                    _bucket(name, sums, share, parts.get(name, ()), notes.get(name, ""))
                    for name, sums in top
                ]
            )
        ),
        total=share,
        by_path=effect(by_path),
        repeatability=None if total is None else effect(total - by_path),
        orders=found,
        windows=int((whole.tokens > 0).sum()),
        tokens=int(whole.tokens.sum()),
    )


def orders(engine: WindowSums, codec: WindowSums, both: WindowSums) -> dict[str, dict[str, Effect]]:
    """Both orders of changing engine and codec, and the Shapley value: half of each."""
    engine_last, codec_last = both - codec, both - engine
    return {
        "engine_first": {"engine": effect(engine), "codec": effect(codec_last)},
        "codec_first": {"engine": effect(engine_last), "codec": effect(codec)},
        "shapley": {
            "engine": effect((engine + engine_last) * 0.5),
            "codec": effect((codec + codec_last) * 0.5),
        },
    }


def _steps(engine: Sequence[tuple[str, WindowSums]]) -> list[tuple[str, WindowSums]]:
    """The differences of neighbouring configurations; a single step says nothing that its bucket
    does not.
    """
    found = []
    before = zero_like(engine[0][1])
    for name, sums in engine:
        found.append((name, sums - before))
        before = sums
    return found if len(found) > 1 else []


def _layers(
    codec: WindowSums, layers: Sequence[tuple[str, WindowSums]]
) -> list[tuple[str, WindowSums]]:
    if not layers:
        return []
    alone = zero_like(codec)
    for _, sums in layers:
        alone = alone + sums
    return [*layers, ("codec.together", codec - alone)]


def _bucket(
    name: str, sums: WindowSums, total: Effect, parts: Sequence[tuple[str, WindowSums]], note: str
) -> Bucket:
    found = effect(sums)
    return Bucket(
        name=name,
        effect=found,
        share=_share(found.dnll.value, total.dnll.value),
        share_kl=_share(found.kl.value, total.kl.value),
        note=note,
        parts=tuple(_judged([_bucket(part, s, total, (), "") for part, s in parts])),
    )


def _share(value: float, total: float) -> float | None:
    return value / total if total else None


def _judged(buckets: Sequence[Bucket]) -> list[Bucket]:
    """With p-values adjusted over all of them."""
    dnll = holm([b.effect.dnll.p for b in buckets])
    kl = holm([b.effect.kl.p for b in buckets])
    return [replace(b, p_dnll=p, p_kl=q) for b, p, q in zip(buckets, dnll, kl, strict=True)]
