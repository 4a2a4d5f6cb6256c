"""The decomposition of a gap into buckets that sum.

With c(engine, codec) the sums of a configuration against the one reference c(R, –) = 0, in the base mode:

    engine       c(C, –)                               candidate without codec − reference without
    codec        c(R, q)                               reference engine with codec − without
    interaction  c(C, q) − c(C, –) − c(R, q)           what the codec does to the candidate beyond that
    harness      c'(C, q) − c(C, q)                    the asked mode c' against the base mode

Their sum is c'(C, q), whatever the numbers are. `closure` is a total that was measured on its own, in another run,
minus that sum: it is zero but for what does not repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.gap.amounts import Effect, effect
from assay.gap.sums import WindowSums, zero_like
from assay.stats.holm import holm

LEVEL = 0.05
"""Of the Holm-adjusted test that a bucket is not zero."""


@dataclass(frozen=True)
class Bucket:
    """One share of the gap, nats a token. `parts` sum to it; `p` are Holm-adjusted over its siblings."""

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
            "parts": [p.to_json() for p in self.parts],
        }

    @property
    def separated(self) -> bool:
        """Whether the primary column, KL, tells it from zero after Holm's correction."""
        return self.p_kl <= LEVEL


@dataclass(frozen=True)
class Decomposition:
    """Buckets, what they leave over, and the total that was measured on its own.

    `by_path` is the sum of the buckets; `orders` the two orders in which codec and engine can be changed, and the
    Shapley value (their mean), as effects by factor.
    """

    buckets: tuple[Bucket, ...]
    total: Effect
    by_path: Effect
    closure: Effect
    orders: Mapping[str, Mapping[str, Effect]]
    windows: int
    tokens: int

    def bucket(self, name: str) -> Bucket:
        """The top-level bucket of that name."""
        return next(b for b in self.buckets if b.name == name)


def decompose(
    engine: Sequence[tuple[str, WindowSums]],
    codec: WindowSums,
    both: WindowSums,
    total: WindowSums,
    asked: WindowSums | None = None,
    *,
    layers: Sequence[tuple[str, WindowSums]] = (),
    notes: Mapping[str, str] | None = None,
) -> Decomposition:
    """Buckets from sums against the one reference, all over the same tokens.

    `engine` are the steps from the reference engine to the candidate, without codec, each with what it leads to (the
    last is the candidate); `codec` is the reference with codec, `both` the candidate with codec, `asked` the same in
    the asked mode (None: it is the base mode), `total` the independent run. `layers` are parts of the codec, each
    alone on the reference; what they do to each other becomes the part `codec.together`.
    """
    notes = notes or {}
    candidate = engine[-1][1]
    interaction = both - candidate - codec
    harness = (asked - both) if asked is not None else zero_like(both)
    top = [("engine", candidate), ("codec", codec), ("interaction", interaction), ("harness", harness)]
    by_path = both + harness
    whole = effect(total)
    parts = {"engine": _steps(engine), "codec": _layers(codec, layers)}
    buckets = _judged(
        [_bucket(name, sums, whole, parts.get(name, ()), notes.get(name, "")) for name, sums in top]
    )
    return Decomposition(
        buckets=tuple(buckets),
        total=whole,
        by_path=effect(by_path),
        closure=effect(total - by_path),
        orders=orders(candidate, codec, both),
        windows=int((total.tokens > 0).sum()),
        tokens=int(total.tokens.sum()),
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
    """The differences of neighbouring configurations; a single step says nothing that its bucket does not."""
    found = []
    before = zero_like(engine[0][1])
    for name, sums in engine:
        found.append((name, sums - before))
        before = sums
    return found if len(found) > 1 else []


def _layers(codec: WindowSums, layers: Sequence[tuple[str, WindowSums]]) -> list[tuple[str, WindowSums]]:
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
