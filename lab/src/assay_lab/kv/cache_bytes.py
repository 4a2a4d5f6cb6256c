"""Bytes of a compressed cache, and the ratio they give, from what a hook measured.

Stored bytes are those of the real streams at the end of a window, over all layers: exact tokens,
headers and uncompressed layers included. Calibration tables count once, however many sequences use
them: `ratio` adds the share of a window where `table_tokens` tokens share the tables, `ratio_at`
counts them whole against one sequence of so many tokens.

Stored bytes are those of the real streams at the end of a window, over all layers: exact tokens,
headers and uncompressed layers included. Calibration tables are there once, however many
sequences use them: `ratio` adds the share of them that falls to a window where `table_tokens`
tokens share the tables, `ratio_at` counts them whole against one sequence of so many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from assay.engines.scoring import Engagement
from assay.errors import AssayError
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.stream_coder import Coders, Key
from assay_lab.kv.stream_facts import StreamFacts
from assay_lab.options import TABLE_TOKENS

LENGTHS = (1024, 8192, 32_768)
NOTE = "kv"
"""Key of `Engagement.notes` under which a codec's hook leaves what it measured."""
_MOST_TOKENS = 1 << 30
APART = 0.05
"""Share of a codec's squared error by which its streams may differ from what attention read, of a
codec that predicts by which the sizes of both errors may: prediction carries on where a sum on a
GPU falls on the other side of a tie (`LiveStream._apart`)."""
ROUNDING = 2.0**-16
"""The same of the power: one rounding to bf16."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer's streams, the same in bf16, both summed over the measured windows; its
    sliding window.
    """

    stored: int
    bf16: int
    window: int | None = None

    def grown(self, tokens: int, length: int) -> float:
        """How many times as many tokens the layer holds after `length` tokens as it did after
        `tokens`.
        """
        most = _MOST_TOKENS if self.window is None else self.window - 1
        return min(length, most) / min(tokens, most)


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache, measured on `windows` windows of `tokens` cached tokens.

    `tables` are those that a decoder needs, `encoder_tables` what an encoder needs beyond them.
    """

    layers: Mapping[int, LayerBytes]
    tables: int
    encoder_tables: int
    tokens: int
    windows: int
    table_tokens: int

    @property
    def stored(self) -> float:
        """Bytes of one window's streams with its share of the tables."""
        share = self.tables * self.tokens / self.table_tokens
        return sum(layer.stored for layer in self.layers.values()) / self.windows + share

    @property
    def bf16(self) -> float:
        """Bytes of the same tokens in bf16."""
        return sum(layer.bf16 for layer in self.layers.values()) / self.windows

    @property
    def ratio(self) -> float:
        """bf16 bytes over stored bytes."""
        return self.bf16 / self.stored if self.stored else float("inf")

    @property
    def sharing(self) -> float:
        """How many sequences of this length share the tables in `ratio`."""
        return self.table_tokens / self.tokens

    def saved(self, length: int) -> float:
        """Bytes that the streams of one sequence of `length` tokens save against bf16, tables
        aside.
        """
        saved = (b.grown(self.tokens, length) * (b.bf16 - b.stored) for b in self.layers.values())
        return sum(saved) / self.windows

    def ratio_at(self, length: int) -> float:
        """The ratio of one sequence of `length` tokens that carries the decoder's tables alone."""
        exact = (
            sum(b.grown(self.tokens, length) * b.bf16 for b in self.layers.values()) / self.windows
        )
        return exact / (exact - self.saved(length) + self.tables)

    @property
    def break_even_tokens(self) -> int | None:
        """Tokens from which one sequence is smaller than in bf16, decoder's tables included; None:
        never.
        """
        lo, hi = 0, 1
        while self.saved(hi) <= self.tables:
            lo, hi = hi, 2 * hi
            if hi > _MOST_TOKENS:
                return None
        while hi - lo > 1:
            middle = (lo + hi) // 2
            lo, hi = (middle, hi) if self.saved(middle) <= self.tables else (lo, middle)
        return hi

    def to_json(self) -> dict[str, Any]:
        """As `results.bytes`."""
        return {
            "stored": self.stored,
            "bf16": self.bf16,
            "ratio": self.ratio,
            "bits_per_value": 16 / self.ratio,
            "tables": self.tables,
            "tables_decoder": self.tables,
            "tables_encoder": self.encoder_tables,
            "table_tokens": self.table_tokens,
            "ratio_at": {str(length): self.ratio_at(length) for length in LENGTHS},
            "break_even_tokens": self.break_even_tokens,
            "tokens": self.tokens,
            "windows": self.windows,
            "ratio_by_layer": {str(k): b.bf16 / b.stored for k, b in self.layers.items()},
        }


def streams_note(
    facts: Mapping[Key, Sequence[StreamFacts]], coders: Coders, shape: CacheShape
) -> dict[str, Any]:
    """What a hook measured, as plain JSON: facts of the measured windows' streams by
    `layer.stream`.
    """
    whole = sum(int(t.nbytes) for c in coders.values() for t in getattr(c, "tables", {}).values())
    tables = sum(coder.table_bytes for coder in coders.values())
    return {
        "streams": {
            f"{layer}.{stream}": [asdict(f) for f in found]
            for (layer, stream), found in facts.items()
        },
        "tables": tables,
        "encoder_tables": whole - tables,
        "lossless": all(coder.lossless for coder in coders.values()),
        "coded": sorted(f"{layer}.{stream}" for layer, stream in coders),
        "cache": shape.to_json(),
    }


def merged_notes(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The notes of ranks that share the heads or the layers of a cache: bytes and errors of a
    window's stream are added.
    """
    streams: dict[str, list[dict[str, Any]]] = {}
    for note in notes:
        for name, found in note["streams"].items():
            known = streams.get(name)
            both = zip(known, found, strict=True) if known else ((None, one) for one in found)
            streams[name] = [dict(new) if old is None else _added(old, new) for old, new in both]
    return {
        **notes[0],
        "streams": streams,
        "tables": sum(note["tables"] for note in notes),
        "encoder_tables": sum(note["encoder_tables"] for note in notes),
        "lossless": all(note["lossless"] for note in notes),
        "coded": sorted({name for note in notes for name in note["coded"]}),
    }


def _added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a stream whose heads lie in two ranks; its hash is that of both hashes."""
    found = {name: value + other[name] for name, value in one.items() if name != "sha256"}
    both = one["sha256"] + other["sha256"]
    return {**found, "sha256": sha256(both.encode()).hexdigest() if both else ""}


def stream_facts(engagement: Engagement) -> dict[Key, list[StreamFacts]]:
    """The facts of the measured windows' streams, read back; AssayError where no codec's hook was
    in place.
    """
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


def measured_bytes(
    engagement: Engagement, tokens: int, table_tokens: int = TABLE_TOKENS
) -> CacheBytes:
    """Bytes of the cache that a codec's hook measured, at the end of windows of `tokens` cached
    tokens.

    ValueError where it measured no window, or not every stream of one; AssayError where a stream
    does not give back what attention read.
    """
    facts = stream_facts(engagement)
    for key, found in facts.items():
        check_read(key, found)
    counts = {len(found) for found in facts.values()}
    if len(counts) != 1 or 0 in counts:
        raise ValueError("every stream must have been measured on the same windows")
    windows, note = counts.pop(), engagement.notes[NOTE]
    layers = {
        layer: LayerBytes(
            sum(f.stored for (i, _), found in facts.items() if i == layer for f in found),
            sum(f.exact for (i, _), found in facts.items() if i == layer for f in found),
            note["cache"]["windows"][layer],
        )
        for layer in sorted({layer for layer, _ in facts})
    }
    return CacheBytes(
        layers, note["tables"], note.get("encoder_tables", 0), tokens, windows, table_tokens
    )


def check_read(key: Key, facts: Sequence[StreamFacts]) -> None:
    """AssayError where streams of one layer do not give back what attention read: their bytes say
    nothing of its quality.

    Exact tokens may be rounded to bf16, and single values between two levels may fall to
    either side.
    """
    apart, error, power = (
        sum(getattr(f, name) for f in facts) for name in ("apart", "error", "power")
    )
    if apart <= APART * error + ROUNDING * power:
        return
    raise AssayError(
        f"stream {key[1]} of layer {key[0]} does not give back what attention read: they differ by"
        f" {apart / power:.2g} of the power, where the codec's own error is {error / power:.2g}",
        finding_id="kv.stream_mismatch",
        remedy=(
            "mend the codec: reconstruct must be what decode makes of encode's stream, or bytes and"
            " quality are of different things"
        ),
        evidence={
            "layer": key[0],
            "stream": key[1],
            "apart": apart,
            "error": error,
            "power": power,
        },
    )
