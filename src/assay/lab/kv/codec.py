"""What a KV codec is: parameters, what it learns from samples, and how it codes blocks of tokens.

A `Codec` is a frozen dataclass whose fields are its parameters. `fit` makes a `BlockCoder` for one stream (K or V) of
one layer, with all its KV heads, so that a codec may join heads. A coder has two halves: `quantise`/`dequantise` turn
blocks of tokens into tensors of codes and back; `pack`/`unpack` turn those into bytes and back. The halves meet in
`assay.lab.kv.stream`, which adds header, index and checksums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import torch

from assay.errors import AssayError
from assay.lab.kv.stream import Field, join_fields, split_fields

Parts: TypeAlias = "tuple[torch.Tensor, ...]"
"""Codes of a batch of blocks; the first dimension of each tensor counts blocks."""
Tables: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
"""What a coder learnt, by name: what a calibration file keeps and what is billed as tables."""

BLOCK_TOKENS = 128
"""Tokens of a block of the stream, the unit of random access, for coders that code each token alone."""


@dataclass(frozen=True)
class Site:
    """One stream of one layer: where a codec is put."""

    stream: str
    layer: int
    layers: int
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Values of one token over all KV heads."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Samples:
    """What a codec may learn from, of one site. Leave out what is not known.

    `x` [heads, tokens, head_dim]: keys or values, as the codec will see them (before RoPE where it is put there).
    `positions` [tokens]: position of each in its window, so that sinks can be left out.
    `metric` [heads, head_dim, head_dim], or [width, width] over all heads: the error that counts is e M eᵀ. For keys
    the second moment of the queries that read them (`assay.lab.kv.metric`), for values the Gram matrix of the output
    projection.
    `side` [side heads, tokens, side head_dim]: what the decoder has before it decodes these tokens, the heads of the
    streams `sides` (layer, stream) one after the other, keys before RoPE.
    `sensitivity`: KL of the model in nats for an error of e M eᵀ = 1 a token in this stream alone.
    `levels` by bits [2^bits]: ready levels for unit residuals, in place of those that samples would give.
    """

    site: Site
    x: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    metric: torch.Tensor | None = None
    side: torch.Tensor | None = None
    sides: tuple[tuple[int, str], ...] = ()
    sensitivity: float | None = None
    levels: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def need_x(self, who: str) -> torch.Tensor:
        """The sampled tokens as float32; AssayError where there are none."""
        if self.x is None or self.x.shape[1] == 0:
            raise _missing(who, self.site, "sample keys and values")
        return self.x.float()

    def need_metric(self, who: str) -> torch.Tensor:
        """The metric per head [heads, head_dim, head_dim], float64; AssayError where there is none."""
        if self.metric is None:
            raise _missing(who, self.site, "second moments of queries")
        if self.metric.ndim == 3:
            return self.metric.double()
        h, d = self.site.heads, self.site.head_dim
        blocks = self.metric.double().reshape(h, d, h, d)
        return torch.stack([blocks[i, :, i] for i in range(h)])

    def need_sensitivity(self, who: str) -> float:
        """The measured sensitivity; AssayError where it was not measured."""
        if self.sensitivity is None or self.sensitivity <= 0:
            raise AssayError(
                f"{who} needs the measured sensitivity of layer {self.site.layer}, stream {self.site.stream}",
                finding_id="kv.no_calibration",
                remedy="make the calibration with `assay kv calibrate --sensitivity 8`",
            )
        return self.sensitivity

    def joint_metric(self) -> torch.Tensor:
        """The metric over all heads [width, width], float64; the identity where none is known."""
        if self.metric is None:
            return torch.eye(self.site.width, dtype=torch.float64)
        metric = self.metric.double()
        return torch.block_diag(*metric) if metric.ndim == 3 else metric


def _missing(who: str, site: Site, what: str) -> AssayError:
    return AssayError(
        f"{who} needs a calibration with {what} of layer {site.layer}, stream {site.stream}",
        finding_id="kv.no_calibration",
        remedy="give one by --calibration; this makes it: `assay kv calibrate MODEL --text FILE --out FILE`",
    )


@dataclass(frozen=True)
class Stage:
    """What one stage of a coder did to blocks [blocks, heads, tokens, head_dim], for diagnosis.

    `decoded`: what would come back if all later stages lost nothing. `values` [blocks, heads, n]: what the next stage
    takes, NaN where a block has fewer. `figures`: what else there is to say, [blocks, heads] by name.
    """

    name: str
    decoded: torch.Tensor
    values: torch.Tensor | None = None
    figures: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Codec:
    """Base of all codecs: the fields of a subclass are its parameters, in the order of its SPEC."""

    name: ClassVar[str]
    summary: ClassVar[str]
    instead: ClassVar[Mapping[str, str]] = {}
    """Parameters, once they are set, in whose place another would say nothing."""
    single_heads: ClassVar[bool] = False
    """Whether it codes each KV head as if it were alone; else ranks that share the heads cannot run it."""

    def fit(self, samples: Samples) -> BlockCoder:
        """A coder for the site of `samples`; AssayError where it needs samples that are not there."""
        raise NotImplementedError

    def sides(self, site: Site) -> tuple[tuple[int, str], ...]:
        """The streams (layer, stream) out of which it predicts those of a site; they must be coded before it."""
        return ()

    @property
    def joins_heads(self) -> bool:
        """Whether what a head becomes depends on the others, by its parameters."""
        return not self.single_heads

    def restore(self, site: Site, tables: Tables) -> BlockCoder:
        """The coder whose `tables` were kept. A codec that learns nothing needs none."""
        return self.fit(Samples(site))

    def __str__(self) -> str:
        given = [f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self) if self._is_set(f.name)]
        return f"{self.name}({', '.join(given)})" if given else self.name

    def _is_set(self, field: str) -> bool:
        default = next(f.default for f in fields(self) if f.name == field)
        return bool(getattr(self, field) != default)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


class BlockCoder:
    """A codec fitted to one site. Blocks are [blocks, heads, tokens, head_dim] of any floating type and device.

    `granularity` is the number of tokens that are reconstructed from common side information (1: each token alone);
    `block_tokens` is the length of a full block, a multiple of it; only the last block of a sequence may be shorter.
    """

    granularity: int = 1
    block_tokens: int = BLOCK_TOKENS
    exact_last: int = 0
    lossless: bool = False

    def __init__(self, site: Site) -> None:
        self.site = site

    @property
    def tables(self) -> Tables:
        """What was learnt, enough for `Codec.restore`."""
        return {}

    @property
    def table_bytes(self) -> int:
        """Bytes of `tables`: what the decoder must hold beside the stream."""
        return sum(int(table.nbytes) for table in self.tables.values())

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        """Codes of whole blocks."""
        raise NotImplementedError

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        """What the codes stand for: [blocks, heads, tokens, head_dim], float32."""
        raise NotImplementedError

    def reconstruct(self, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
        """What blocks become, float32. A coder that has a faster way to the same values overrides it."""
        return self.dequantise(self.quantise(x, side), side)

    def layout(self, tokens: int) -> list[Field]:
        """The fields of a payload of so many tokens, one for each tensor of codes, where all are of fixed size."""
        raise NotImplementedError

    def pack(self, parts: Parts) -> list[bytes]:
        """The bytes of each block."""
        return join_fields(self.layout(0), parts)  # how many tokens there are, the codes themselves say

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        """The codes in `payloads`, blocks of `tokens` tokens each; AssayError where a payload is damaged."""
        return split_fields(self.layout(tokens), payloads)

    def stages(self, x: torch.Tensor, side: torch.Tensor | None = None) -> list[Stage]:
        """The stages that blocks go through, the last of which is the whole round trip; none where it is one step."""
        return []

    def to(self, device: torch.device) -> None:
        """Move what was learnt to `device`."""


def need_table(tables: Mapping[str, Any], name: str, who: str, site: Site) -> Any:
    """A table by name; AssayError where a calibration file lacks it."""
    if name not in tables:
        raise _missing(who, site, f"the table {name!r}")
    return tables[name]


# What the harness needs of a codec that is fitted to one stream (K or V) of one layer.


class StreamCoder(Protocol):
    """A fitted codec for one stream of one layer. Tensors are [KV heads, tokens, head_dim].

    Tokens are coded in blocks of `granularity`, each on its own: coding two blocks together or one after the other
    gives the same. The first `exact_first` tokens of a sequence and, at any time, the last `exact_last` stay exact.
    """

    @property
    def granularity(self) -> int:
        """Tokens of a block; 1 where every token is coded alone."""
        ...

    @property
    def exact_first(self) -> int:
        """Sinks: tokens at the start that are kept as they are."""
        ...

    @property
    def exact_last(self) -> int:
        """Recent tokens that are kept as they are until newer ones come."""
        ...

    @property
    def before_rope(self) -> bool:
        """Whether it codes keys as they are before RoPE."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether what comes back is always bit for bit what went in."""
        ...

    @property
    def sides(self) -> tuple[tuple[int, str], ...]:
        """Streams (layer, stream) whose reconstruction of the same tokens it needs, in the order of `side`'s heads."""
        ...

    @property
    def table_bytes(self) -> int:
        """Bytes of calibration tables that the decoder of this stream needs."""
        ...

    def encode(self, x: torch.Tensor, side: torch.Tensor | None = None) -> bytes:
        """The stream of a whole sequence, exact tokens included."""
        ...

    def decode(self, stream: bytes, *, side: torch.Tensor | None = None) -> torch.Tensor:
        """What a stream holds, float32."""
        ...

    def reconstruct(self, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
        """What whole blocks become, sinks and recent tokens aside: decode(encode(x)) without the bytes."""
        ...


# What goes around a codec: placements, which decide where and on which tokens it works, and wrappers of its values.


@dataclass(frozen=True)
class Placement(Codec):
    """Where a codec works; it does not change values."""

    single_heads = True
    before_rope = False

    def exact_first(self) -> int:
        """Tokens at the start of a sequence that stay exact."""
        return 0

    def exact_last(self) -> int:
        """Tokens at the end of a sequence that stay exact."""
        return 0

    def skips(self, site: Site) -> bool:
        """Whether the site stays exact altogether."""
        return False


@dataclass(frozen=True)
class Wrapper(Codec):
    """Changes what the codec inside sees, and undoes that."""

    single_heads = True

    def wrap(self, inner: Codec, samples: Samples) -> BlockCoder:
        """The coder of `inner` with this around it, fitted to `samples`."""
        raise NotImplementedError

    def rewrap(self, inner: Codec, site: Site, tables: Tables) -> BlockCoder:
        """The same from kept tables, whose names begin with `inner.` where they are of the codec inside."""
        raise NotImplementedError


def inner_tables(tables: Tables) -> Tables:
    """The tables of the codec inside a wrapper."""
    return {name.removeprefix("inner."): t for name, t in tables.items() if name.startswith("inner.")}


# What of a model's configuration decides the shape of its KV cache.


@dataclass(frozen=True)
class CacheShape:
    """Layers, KV heads and width of the cache; `windows` is the sliding window of each layer, None where full."""

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    architecture: str

    def of_rank(self, ranks: int) -> CacheShape:
        """What one of so many ranks has of it, each an even share of the heads."""
        return replace(self, kv_heads=self.kv_heads // ranks, query_heads=self.query_heads // ranks)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def cache_shape(model: Any) -> CacheShape:
    """The cache of a model of transformers; AssayError where it is not one of keys and values in every layer."""
    config = model.config.get_text_config()
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    known = {"full_attention", "sliding_attention"}
    if other := sorted(set(types) - known):
        raise AssayError(
            f"{type(model).__name__} has layers of the kind {other[0]!r}, whose cache is not keys and values",
            finding_id="kv.unsupported",
            remedy="codecs take models whose every layer is full or sliding attention",
        )
    sliding = getattr(config, "sliding_window", None)
    heads = config.num_attention_heads
    return CacheShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        query_heads=heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        windows=tuple(sliding if kind == "sliding_attention" else None for kind in types),
        architecture=type(model).__name__,
    )
