"""Layers coded alone, and how their effects add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.stats import Interval
from assay_lab.gap.buckets import Effect, WindowSums, aligned, effect, ratio
from assay_lab.gap.configuration import Corners, grouped
from assay_lab.gap.run_cache import RunCache
from assay_lab.kv.measured import Measured


@dataclass(frozen=True)
class LayerEffect:
    """A group of layers coded alone on one engine, against that engine without codec."""

    layers: tuple[int, ...]
    name: str
    effect: Effect
    sums: WindowSums

    def to_json(self) -> dict[str, Any]:
        """Layers and both currencies."""
        return {"layers": list(self.layers), "name": self.name, **self.effect.to_json()}


@dataclass(frozen=True)
class Attribution:
    """All groups of one engine, and all together. `additivity` is joint KL over the sum of the
    single ones: near 1 where errors do not meet, above where they feed each other, below where they
    drown each other."""

    parts: Sequence[LayerEffect]
    joint: Effect
    additivity: Interval | None

    def to_json(self) -> dict[str, Any]:
        """As `results.layers.ENGINE`."""
        found = self.additivity
        return {
            "parts": [p.to_json() for p in self.parts],
            "joint": self.joint.to_json(),
            "additivity": None
            if found is None
            else {"value": found.value, "lo": found.lo, "hi": found.hi},
        }

    def hottest(self) -> list[LayerEffect]:
        """Groups by KL, the worst first."""
        return sorted(self.parts, key=lambda p: -p.effect.kl.value)


def group_name(group: Sequence[int]) -> str:
    """`codec.layer.07`, or `codec.layers.00-05`."""
    if len(group) == 1:
        return f"codec.layer.{group[0]:02d}"
    return f"codec.layers.{group[0]:02d}-{group[-1]:02d}"


def measure_layers(
    run_cache: RunCache, corners: Corners, engine: str, layers: int, found: dict[str, Measured]
) -> None:
    """Each group alone against the engine without codec, by name."""
    for group in grouped(layers, run_cache.plan.groups):
        config = corners.with_codec(engine, layers=group)
        found[group_name(group)] = run_cache.measure(config, config.plain)


def attribute(
    layers: int, groups: int, alone: Mapping[str, Measured], joint: Measured
) -> Attribution:
    """Effects of all groups and of all layers together, on the same tokens."""
    sums = aligned({"joint": joint.seen, **{name: m.seen for name, m in alone.items()}})
    parts = [
        LayerEffect(group, name, effect(sums[name]), sums[name])
        for group in grouped(layers, groups)
        if (name := group_name(group)) in sums
    ]
    single = sum(p.sums.kl for p in parts)
    return Attribution(parts, effect(sums["joint"]), ratio(sums["joint"].kl, single))
