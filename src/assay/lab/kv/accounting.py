"""Bytes of a compressed cache, and the ratio they give; how a hook hands over what it measured.

Stored bytes are those of the real streams at the end of a window, over all layers, exact tokens, headers and
uncompressed layers included; calibration tables are counted in full against one cache of `table_tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from assay.engines.scoring import Engagement
from assay.errors import AssayError
from assay.lab.kv.codec import CacheShape
from assay.lab.kv.live_stream import Coders, Key, StreamFacts
from assay.lab.options import TABLE_TOKENS

NOTE = "kv"
"""Key of `Engagement.notes` under which a codec's hook leaves what it measured."""


@dataclass(frozen=True)
class CacheBytes:
    """Mean bytes of one window's cache: `stored` (tables' share included), the same in `bf16`, whole `tables`."""

    stored: float
    bf16: float
    tables: int
    tokens: int
    windows: int
    by_layer: Mapping[int, float]

    @property
    def ratio(self) -> float:
        """bf16 bytes over stored bytes."""
        return self.bf16 / self.stored if self.stored else float("inf")

    def to_json(self) -> dict[str, Any]:
        """As `results.bytes`."""
        return {
            "stored": self.stored,
            "bf16": self.bf16,
            "ratio": self.ratio,
            "bits_per_value": 16 / self.ratio,
            "tables": self.tables,
            "tokens": self.tokens,
            "windows": self.windows,
            "ratio_by_layer": {str(k): v for k, v in self.by_layer.items()},
        }


def cache_bytes(
    sizes: Mapping[tuple[int, str], Sequence[int]],
    exact_sizes: Mapping[tuple[int, str], Sequence[int]],
    tables: int,
    tokens: int,
    table_tokens: int = TABLE_TOKENS,
) -> CacheBytes:
    """Mean over the measured windows. ValueError where none was measured."""
    counts = {len(v) for v in sizes.values()}
    if len(counts) != 1 or 0 in counts:
        raise ValueError("every stream must have been measured on the same windows")
    windows = counts.pop()
    stored = sum(sum(v) for v in sizes.values()) / windows
    exact = sum(sum(v) for v in exact_sizes.values()) / windows
    layers = sorted({layer for layer, _ in sizes})
    by_layer = {
        layer: sum(sum(v) for (i, _), v in exact_sizes.items() if i == layer)
        / sum(sum(v) for (i, _), v in sizes.items() if i == layer)
        for layer in layers
    }
    share = tables * tokens / table_tokens
    return CacheBytes(stored + share, exact, tables, tokens, windows, by_layer)


def streams_note(
    facts: Mapping[Key, Sequence[StreamFacts]], coders: Coders, shape: CacheShape
) -> dict[str, Any]:
    """What a hook measured, as plain JSON: facts of the measured windows' streams by `layer.stream`."""
    return {
        "streams": {
            f"{layer}.{stream}": [asdict(f) for f in found] for (layer, stream), found in facts.items()
        },
        "tables": sum(coder.table_bytes for coder in coders.values()),
        "lossless": all(coder.lossless for coder in coders.values()),
        "coded": sorted(f"{layer}.{stream}" for layer, stream in coders),
        "cache": shape.to_json(),
    }


def stream_facts(engagement: Engagement) -> dict[Key, list[StreamFacts]]:
    """The facts of the measured windows' streams, read back; AssayError where no codec's hook was in place."""
    try:
        note = engagement.notes[NOTE]["streams"]
    except KeyError as error:
        raise AssayError(
            "no codec was in the KV cache, so that there are no streams to count",
            finding_id="fidelity.not_engaged",
        ) from error
    keys = {name: name.partition(".") for name in note}
    return {
        (int(layer), stream): [StreamFacts(**f) for f in note[name]]
        for name, (layer, _, stream) in keys.items()
    }


def measured_bytes(engagement: Engagement, tokens: int, table_tokens: int = TABLE_TOKENS) -> CacheBytes:
    """Bytes of the cache that a codec's hook measured, at the end of windows of `tokens` cached tokens."""
    facts = stream_facts(engagement)
    return cache_bytes(
        {key: [f.stored for f in found] for key, found in facts.items()},
        {key: [f.exact for f in found] for key, found in facts.items()},
        engagement.notes[NOTE]["tables"],
        tokens,
        table_tokens,
    )
