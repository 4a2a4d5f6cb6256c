"""Phase 3: what an error of known size does, on both engines.

Gaussian noise of σ · rms goes where the codec's error goes. KL grows with the power of a small error, so its slope over
σ in log–log is 2 as long as the model answers linearly; the codec's own error, put on that line, tells whether the
codec's error is worse than noise of its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from assay.gap.amounts import Effect, effect, ratio
from assay.gap.baseline import Corners
from assay.gap.bench import Bench, Measured
from assay.gap.sums import WindowSums, aligned
from assay.kv.spec import parse_spec
from assay.stats.interval import Interval

LINEAR = 0.25
"""How far a slope may be from 2."""
_FALLBACK = 0.02
"""σ of a codec without error: something to sweep around."""


@dataclass(frozen=True)
class NoiseCurve:
    """KL of a sweep on one engine. `slopes` are those between neighbours, `linear` the σ where the answer is linear."""

    sigmas: tuple[float, ...]
    effects: tuple[Effect, ...]
    slopes: tuple[Interval | None, ...]
    linear: tuple[float, float] | None
    sums: Mapping[float, WindowSums]

    def to_json(self) -> dict[str, Any]:
        """As `results.noise.ENGINE`."""
        return {
            "points": [{"sigma": s, **e.to_json()} for s, e in zip(self.sigmas, self.effects, strict=True)],
            "slopes": [
                None if s is None else {"value": s.value, "lo": s.lo, "hi": s.hi} for s in self.slopes
            ],
            "linear_range": None if self.linear is None else list(self.linear),
        }


def noise_codec(codec: str, sigma: float, seed: int) -> str:
    """Noise at the place of the codec: before RoPE where the codec is, on the streams that it codes."""
    spec = parse_spec(codec)
    parts = []
    for stream in "kv":
        recipe = spec.of(stream)
        if recipe is not None:
            place = "prerope+" if stream == "k" and recipe.before_rope else ""
            parts.append(f"{stream}:{place}noise(sigma={sigma:g},seed={seed})")
    return ";".join(parts)


def sigmas_of(error: float, sweep: Sequence[float]) -> tuple[float, ...]:
    """The levels of a sweep: multiples of the codec's relative error, to three digits."""
    base = error if error > 0 else _FALLBACK
    return tuple(float(f"{base * s:.3g}") for s in sorted(sweep))


def measure_noise(
    bench: Bench, corners: Corners, engine: str, sigmas: Sequence[float]
) -> dict[float, Measured]:
    """Every level against the engine without noise."""
    anchor = corners.with_codec(engine).plain
    return {
        sigma: bench.measure(
            corners.with_codec(
                engine, codec=noise_codec(bench.plan.codec, sigma, bench.plan.seed), calibration=None
            ),
            anchor,
        )
        for sigma in sigmas
    }


def curve(measured: Mapping[float, Measured], floor: float) -> NoiseCurve:
    """The curve of one engine; KL under twice the floor says nothing of a slope."""
    names = {str(sigma): m.seen for sigma, m in measured.items()}
    by_name = aligned(names)
    sums = {sigma: by_name[str(sigma)] for sigma in measured}
    sigmas = tuple(sorted(sums))
    effects = tuple(effect(sums[s]) for s in sigmas)
    slopes = tuple(_slope(sums[a].kl, sums[b].kl, a, b) for a, b in pairwise(sigmas))
    return NoiseCurve(sigmas, effects, slopes, linear_range(sigmas, effects, slopes, floor), sums)


def _slope(low: Any, high: Any, a: float, b: float) -> Interval | None:
    """d log KL / d log σ between two levels, from the ratio of their KL on the same windows."""
    found = ratio(high, low)
    if found is None or not found.value > 0:
        return None
    span = math.log(b / a)
    lo, hi = (math.log(x) / span if x > 0 else -math.inf for x in (found.lo, found.hi))
    return Interval(math.log(found.value) / span, lo, hi)


def linear_range(
    sigmas: Sequence[float], effects: Sequence[Effect], slopes: Sequence[Interval | None], floor: float
) -> tuple[float, float] | None:
    """The longest run of neighbours with a slope of 2 ± 0.25 and a KL above twice the floor."""
    best: tuple[float, float] | None = None
    start: float | None = None
    for (a, b), left, slope in zip(pairwise(sigmas), effects[:-1], slopes, strict=True):
        good = slope is not None and abs(slope.value - 2) <= LINEAR and left.kl.value > 2 * floor
        start = (start if start is not None else a) if good else None
        if start is not None and (best is None or b / start > best[1] / best[0]):
            best = (start, b)
    return best


def kl_at(found: NoiseCurve, sigma: float) -> float | None:
    """KL of noise of this size, read off the curve (log–log, no further out than its ends)."""
    points = [
        (math.log(s), math.log(e.kl.value))
        for s, e in zip(found.sigmas, found.effects, strict=True)
        if e.kl.value > 0
    ]
    if not points or not sigma > 0 or not points[0][0] - 1e-9 <= math.log(sigma) <= points[-1][0] + 1e-9:
        return None
    import numpy as np

    return float(math.exp(np.interp(math.log(sigma), [x for x, _ in points], [y for _, y in points])))
