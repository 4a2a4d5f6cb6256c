"""What a codec leaves out of each stream, on both engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.stats import Interval
from assay.verdict import jsonable
from assay_lab.gap.buckets import ratio
from assay_lab.kv.cache_bytes import stream_facts
from assay_lab.kv.measured import Measured
from assay_lab.kv.stream_coder import Key
from assay_lab.kv.stream_facts import StreamFacts


@dataclass(frozen=True)
class StreamResidual:
    """One stream of one layer. Powers are Σx², errors Σ(x − x̂)², both summed over the windows that
    both engines coded.

    `power_ratio` and `error_ratio` are candidate over reference; `relative` the error over the
    power of each engine.
    """

    layer: int
    stream: str
    relative_reference: float
    relative_candidate: float
    power_ratio: Interval | None
    error_ratio: Interval | None
    equal_streams: int
    windows: int

    def to_json(self) -> dict[str, Any]:
        """As an entry of `results.residual.streams`."""
        return {
            "layer": self.layer,
            "stream": self.stream,
            "relative_error": {
                "reference": self.relative_reference,
                "candidate": self.relative_candidate,
            },
            "power_ratio": jsonable(self.power_ratio),
            "error_ratio": jsonable(self.error_ratio),
            "equal_streams": self.equal_streams,
            "windows": self.windows,
        }


def residuals(reference: Measured, candidate: Measured) -> list[StreamResidual]:
    """Streams of both engines, paired by window."""
    sides = [_by_window(m) for m in (reference, candidate)]
    windows = sorted(set(sides[0]) & set(sides[1]))
    if not windows:
        return []
    keys = sorted(k for k in sides[0][windows[0]] if sides[0][windows[0]][k].sha256)
    found = []
    for layer, stream in keys:
        a = [sides[0][w][layer, stream] for w in windows]
        b = [sides[1][w][layer, stream] for w in windows]
        found.append(
            StreamResidual(
                layer,
                stream,
                _relative(a),
                _relative(b),
                ratio([f.power for f in b], [f.power for f in a]),
                ratio([f.error for f in b], [f.error for f in a]),
                sum(x.sha256 == y.sha256 for x, y in zip(a, b, strict=True)),
                len(windows),
            )
        )
    return found


def relative_error(measured: Measured) -> float:
    """√(Σ error / Σ power) over all coded streams: the codec as noise of this size. 0 where nothing
    was looked at.
    """
    facts = [
        f
        for found in stream_facts(measured.engagement).values()
        for f in found
        if f.sha256 and f.power > 0
    ]
    # Noise is as large as each stream's own power allows, so streams count alike.
    return (sum(f.error / f.power for f in facts) / len(facts)) ** 0.5 if facts else 0.0


def _by_window(measured: Measured) -> dict[int, Mapping[Key, StreamFacts]]:
    facts = stream_facts(measured.engagement)
    return {
        window: {key: found[i] for key, found in facts.items() if i < len(found)}
        for i, window in enumerate(measured.windows)
    }


def _relative(facts: list[StreamFacts]) -> float:
    power = sum(f.power for f in facts)
    return (sum(f.error for f in facts) / power) ** 0.5 if power else 0.0
