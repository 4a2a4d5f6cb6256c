"""KL that noise of known size causes on both engines, and the codec's KL beside it.

Gaussian noise of σ · rms goes where the codec's error goes. KL grows with the power of a small
error (`assay_lab.kv.noise_growth`); the codec's own error, put on that curve, tells whether it is
worse than noise of its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from assay.stats import Resampling
from assay_lab.gap.buckets import Effect, WindowSums, aligned, effect
from assay_lab.gap.configuration import Corners
from assay_lab.gap.run_cache import RunCache
from assay_lab.kv.measured import Measured
from assay_lab.kv.noise_growth import NoiseGrowth, noise_growth
from assay_lab.kv.spec import parse_spec

_FALLBACK = 0.02
"""σ of a codec without error: something to sweep around."""


@dataclass(frozen=True)
class NoiseCurve:
    """KL of a sweep on one engine, and how it grows: only levels whose KL stands above the floor
    say that.
    """

    sigmas: tuple[float, ...]
    effects: tuple[Effect, ...]
    growth: NoiseGrowth
    sums: Mapping[float, WindowSums]

    @property
    def linear(self) -> tuple[float, float] | None:
        """The σ between which the answer is linear: KL grows as σ²."""
        found = self.growth
        return None if found.lo is None or found.hi is None else (found.lo, found.hi)

    def to_json(self) -> dict[str, Any]:
        """As `results.noise.ENGINE`."""
        slope, level = self.growth.slope, self.growth.coefficient
        return {
            "points": [
                {"sigma": s, **e.to_json()} for s, e in zip(self.sigmas, self.effects, strict=True)
            ],
            "slope": None if slope is None else asdict(slope),
            "linear_range": None if self.linear is None else list(self.linear),
            "kld_per_squared_sigma": None if level is None else asdict(level),
        }


def noise_codec(codec: str, sigma: float, seed: int) -> str:
    """Noise at the place of the codec: before RoPE where the codec is, on the streams that it
    codes.
    """
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
    run_cache: RunCache,
    corners: Corners,
    engine: str,
    sigmas: Sequence[float],
    found: dict[float, Measured],
) -> None:
    """Every level against the engine without noise."""
    for sigma in sigmas:
        codec = noise_codec(run_cache.plan.codec, sigma, run_cache.plan.seed)
        config = corners.with_codec(engine, codec=codec, calibration=None)
        found[sigma] = run_cache.measure(config, config.plain)


def curve(measured: Mapping[float, Measured], floor: float, seed: int = 0) -> NoiseCurve:
    """The curve of one engine; a KL under twice the floor says nothing of how it grows."""
    by_name = aligned({str(sigma): m.seen for sigma, m in measured.items()})
    sigmas = tuple(sorted(measured))
    sums = {sigma: by_name[str(sigma)] for sigma in sigmas}
    effects = tuple(effect(sums[s]) for s in sigmas)
    above = [s for s, e in zip(sigmas, effects, strict=True) if e.kl.value > 2 * floor]
    growth = NoiseGrowth(None, None, None, None)
    if above:
        tokens = [int(t) for t in sums[sigmas[0]].tokens]
        growth = noise_growth(
            above, [list(sums[s].kl) for s in above], tokens, Resampling(2000, seed)
        )
    return NoiseCurve(sigmas, effects, growth, sums)


def kl_at(found: NoiseCurve, sigma: float) -> float | None:
    """KL of noise of this size, read off the curve (log–log, no further out than its ends)."""
    points = [
        (math.log(s), math.log(e.kl.value))
        for s, e in zip(found.sigmas, found.effects, strict=True)
        if e.kl.value > 0
    ]
    if (
        not points
        or not sigma > 0
        or not points[0][0] - 1e-9 <= math.log(sigma) <= points[-1][0] + 1e-9
    ):
        return None
    return float(
        math.exp(np.interp(math.log(sigma), [x for x, _ in points], [y for _, y in points]))
    )
