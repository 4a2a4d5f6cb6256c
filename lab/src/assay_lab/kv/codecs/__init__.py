"""KV codecs and the wrappers around them, which `assay_lab.kv.spec` names; here is what each of
them is.

A `Codec` is a frozen dataclass whose fields are its parameters. `fit` makes a `BlockCoder` for one
stream (K or V) of one layer, with all its KV heads, so that a codec may join heads. A coder has two
halves: `quantise`/`dequantise` turn blocks of tokens into tensors of codes and back;
`pack`/`unpack` turn those into bytes and back. The halves meet in a stream, which adds header,
index and checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import prod
from typing import Any, ClassVar, Protocol, TypeAlias
from zlib import crc32

import numpy as np
import torch

from assay.errors import AssayError
from assay_lab.quantisation import pack, packed_bytes, unpack

# The bytes of a coded KV stream: header, block index, payloads (lab/docs/methods/kv_stream.md).
#
# All integers are little-endian.
#
#     magic "AKVS" | u16 version | u16 bytes of the spec | u32 heads | u32 head_dim | u32 blocks | u32 CRC of the tables
#     spec, UTF-8 | index: per block u32 tokens, u32 bytes, u32 CRC-32 of the payload | u32 CRC-32 of all before it
#     payloads
#
# The highest bit of a token count marks a block of exact tokens.


def damaged(why: str) -> AssayError:
    """The error of a stream that cannot be what an encoder wrote."""
    return AssayError(
        f"the KV stream is damaged: {why}",
        finding_id="kv.stream_damaged",
        remedy="encode it again, or fetch the whole file again",
    )


MAGIC = b"AKVS"
VERSION = 1
_HEAD = struct.Struct("<4sHHIIII")
_ENTRY = struct.Struct("<III")
_EXACT = 1 << 31


@dataclass(frozen=True)
class Block:
    """Some tokens of a stream: `tokens` of them, exact or coded, as `payload`."""

    tokens: int
    exact: bool
    payload: bytes


@dataclass(frozen=True)
class Stream:
    """A stream taken apart. `tables` is the CRC-32 of the calibration tables that it was coded
    with.
    """

    spec: str
    heads: int
    head_dim: int
    tables: int
    blocks: tuple[Block, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all blocks."""
        return sum(block.tokens for block in self.blocks)


def to_bytes(stream: Stream) -> bytes:
    """The serialised stream."""
    spec = stream.spec.encode()
    count = len(stream.blocks)
    head = _HEAD.pack(
        MAGIC, VERSION, len(spec), stream.heads, stream.head_dim, count, stream.tables
    )
    index = b"".join(
        _ENTRY.pack(b.tokens | (_EXACT if b.exact else 0), len(b.payload), crc32(b.payload))
        for b in stream.blocks
    )
    front = head + spec + index
    return b"".join([front, struct.pack("<I", crc32(front)), *(b.payload for b in stream.blocks)])


def from_bytes(data: bytes) -> Stream:
    """A stream from its bytes; AssayError where it is cut, altered, or no such stream."""
    if len(data) < _HEAD.size or data[:4] != MAGIC:
        if data[: len(MAGIC)] == MAGIC:
            raise damaged(f"it ends after {len(data)} bytes, inside its header")
        raise AssayError(
            "this is no KV stream of assay (it does not begin with AKVS)",
            finding_id="kv.stream_unknown",
            remedy="give a file that `assay kv encode` wrote",
        )
    _, version, spec_bytes, heads, head_dim, count, tables = _HEAD.unpack_from(data)
    if version != VERSION:
        raise AssayError(
            f"the KV stream has version {version}, this assay reads version {VERSION}",
            finding_id="kv.stream_version",
            remedy="use the assay that wrote it, or encode it again",
        )
    index_at = _HEAD.size + spec_bytes
    end = index_at + _ENTRY.size * count
    if len(data) < end + 4:
        raise damaged(f"it ends after {len(data)} bytes, inside its index")
    if struct.unpack_from("<I", data, end)[0] != crc32(data[:end]):
        raise damaged("the checksum of its header does not match")
    blocks, offset = [], end + 4
    for number, (marked, size, crc) in enumerate(_ENTRY.iter_unpack(data[index_at:end])):
        payload = data[offset : offset + size]
        if len(payload) != size:
            raise damaged(f"it ends after {len(data)} bytes, inside block {number} of {count}")
        if crc32(payload) != crc:
            raise damaged(f"the checksum of block {number} does not match")
        blocks.append(Block(marked & ~_EXACT, bool(marked & _EXACT), payload))
        offset += size
    if offset != len(data):
        raise damaged(f"it has {len(data)} bytes and its index says {offset}")
    return Stream(data[_HEAD.size : index_at].decode(), heads, head_dim, tables, tuple(blocks))


# Payloads of fixed layout: fields of bytes that follow one another, the same for every block of a
# batch.

_TOP = 15
"""Halves are scaled below 2^15, which leaves room for rounding under the largest half, 65,504."""


@dataclass(frozen=True)
class Field:
    """One tensor of codes in the payload of a block: its shape, and its type or the bits of an
    integer.

    Integers of more than 16 bits are packed in planes of 16 bits and a rest, lowest first.
    """

    shape: tuple[int, ...]
    kind: torch.dtype | int

    @property
    def size(self) -> int:
        """Bytes in a payload."""
        count = prod(self.shape)
        if isinstance(self.kind, torch.dtype):
            return count * int(self.kind.itemsize)
        return sum(packed_bytes(count, width) for width in _planes(self.kind))

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """[blocks, *shape] → uint8 [blocks, size]."""
        flat = codes.reshape(codes.shape[0], -1)
        if isinstance(self.kind, torch.dtype):
            return flat.contiguous().view(torch.uint8)
        if self.kind <= 16:
            return pack(flat, self.kind)
        planes = [
            pack((flat >> (16 * i)) & 0xFFFF, width) for i, width in enumerate(_planes(self.kind))
        ]
        return torch.cat(planes, dim=1)

    def unpack(self, raw: torch.Tensor) -> torch.Tensor:
        """The other way round; integers are uint8 up to 8 bits, int32 up to 16 and else int64."""
        shape = (raw.shape[0], *self.shape)
        if isinstance(self.kind, torch.dtype):
            # Its bytes need not stand at whole addresses.
            return (
                raw.clone(memory_format=torch.contiguous_format)
                .reshape(-1)
                .view(self.kind)
                .reshape(shape)
            )
        count, widths = prod(self.shape), _planes(self.kind)
        planes = raw.split([packed_bytes(count, width) for width in widths], dim=1)
        codes = [unpack(plane, width, count) for plane, width in zip(planes, widths, strict=True)]
        if len(codes) > 1:
            codes[0] = torch.stack([code.long() << (16 * i) for i, code in enumerate(codes)]).sum(
                dim=0
            )
        return codes[0].reshape(shape)


def _planes(bits: int) -> list[int]:
    return [16] * (bits // 16) + [bits % 16] * (bits % 16 > 0)


EXPONENT = Field((), torch.int8)
"""What `to_halves` takes out of a block."""


def join_fields(fields: Sequence[Field], parts: Sequence[torch.Tensor]) -> list[bytes]:
    """Codes [blocks, ...] of fields as the bytes of each block."""
    rows = [field.pack(part) for field, part in zip(fields, parts, strict=True)]
    whole = torch.cat(rows, dim=1).cpu().contiguous().numpy()
    return [row.tobytes() for row in whole]


def split_fields(fields: Sequence[Field], payloads: Sequence[bytes]) -> tuple[torch.Tensor, ...]:
    """The codes of fields; AssayError where a payload has another length."""
    sizes = [field.size for field in fields]
    total = sum(sizes)
    for payload in payloads:
        if len(payload) != total:
            raise damaged(f"a block has {len(payload)} bytes instead of {total}")
    joined = bytearray(b"".join(payloads))
    raw = (
        torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    )
    columns = raw.reshape(len(payloads), total).split(sizes, dim=1)
    return tuple(field.unpack(column) for field, column in zip(fields, columns, strict=True))


def to_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, ...] as fp16 and an exponent int8 [blocks]: x ≈ half · 2^exponent.

    The exponent is 0 unless a value of the block is too large for fp16, so that ordinary blocks do
    not depend on it.
    """
    top = x.reshape(x.shape[0], -1).abs().amax(dim=1) if x.numel() else x.new_zeros(x.shape[0])
    exponent = torch.frexp(top)[1].sub(_TOP).clamp_min(0).to(torch.int8)
    return _scaled(x, -exponent.int()).half(), exponent


def from_halves(half: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """What `to_halves` stored, float32."""
    return _scaled(half.float(), exponent.to(half.device).int())


def _scaled(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(x.float(), exponent.reshape(-1, *[1] * (x.ndim - 1)))


# Tokens kept as they are: the bytes of a tensor in the narrowest type that holds it without loss.

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def exact_to_bytes(x: torch.Tensor) -> bytes:
    """One byte for the type, then the values of `x`, little-endian."""
    kind = x.dtype
    if kind not in (torch.bfloat16, torch.float16):
        kind = next(
            t for t in _TYPES if t == torch.float32 or torch.equal(x.to(t).float(), x.float())
        )
    raw = x.detach().to("cpu", kind).contiguous().reshape(-1).view(torch.uint8)
    return bytes([_TYPES.index(kind)]) + bytes(raw.numpy().tobytes())


def exact_from_bytes(data: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of `shape`, float32; AssayError where the bytes do not fit."""
    if not data or data[0] >= len(_TYPES):
        raise damaged("a block of exact tokens has no known type")
    kind, count = _TYPES[data[0]], prod(shape)
    if len(data) - 1 != count * kind.itemsize:
        raise damaged(f"a block of exact tokens has {len(data) - 1} bytes for {count} values")
    if not count:
        return torch.zeros(shape)
    return torch.frombuffer(bytearray(data[1:]), dtype=kind).float().reshape(shape)


# What a codec is.


Parts: TypeAlias = "tuple[torch.Tensor, ...]"
"""Codes of a batch of blocks; the first dimension of each tensor counts blocks."""
Tables: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
"""What a coder learnt, by name: what a calibration file keeps and what is billed as tables."""

BLOCK_TOKENS = 128
"""Tokens of a block of the stream, the unit of random access, for coders that code each token
alone.
"""


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

    `x` [heads, tokens, head_dim]: keys or values, as the codec will see them (before RoPE where it
    is put there). `positions` [tokens]: position of each in its window, so that sinks can be left
    out. `metric` [heads, head_dim, head_dim], or [width, width] over all heads: the error that
    counts is e M eᵀ. For keys the second moment of the queries that read them
    (`assay_lab.kv.calibration`), for values the Gram matrix of the output projection. `side` [side
    heads, tokens, side head_dim]: what the decoder has before it decodes these tokens, the heads of
    the streams `sides` (layer, stream) one after the other, keys before RoPE. `sensitivity`: KL of
    the model in nats for an error of e M eᵀ = 1 a token in this stream alone. `levels` by bits
    [2^bits]: ready levels for unit residuals, in place of those that samples would give.
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
                f"{who} needs the measured sensitivity of layer {self.site.layer}, stream"
                f" {self.site.stream}",
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
        f"the codec {who} needs a calibration with {what} of layer {site.layer}, stream"
        f" {site.stream}",
        finding_id="kv.no_calibration",
        remedy=(
            "give one by --calibration; this makes it: `assay kv calibrate MODEL --text FILE --out"
            " FILE`"
        ),
    )


@dataclass(frozen=True)
class Stage:
    """What one stage of a coder did to blocks [blocks, heads, tokens, head_dim], for diagnosis.

    `decoded`: what would come back if all later stages lost nothing. `values` [blocks, heads, n]:
    what the next stage takes, NaN where a block has fewer. `figures`: what else there is to say,
    [blocks, heads] by name.
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
    """Whether it codes each KV head as if it were alone; else ranks that share the heads cannot run
    it.
    """

    def fit(self, samples: Samples) -> BlockCoder:
        """A coder for the site of `samples`; AssayError where it needs samples that are not there."""
        raise NotImplementedError

    def sides(self, site: Site) -> tuple[tuple[int, str], ...]:
        """The streams (layer, stream) out of which it predicts those of a site; they must be coded
        before it.
        """
        return ()

    @property
    def joins_heads(self) -> bool:
        """Whether what a head becomes depends on the others, by its parameters."""
        return not self.single_heads

    def restore(self, site: Site, tables: Tables) -> BlockCoder:
        """The coder whose `tables` were kept. A codec that learns nothing needs none."""
        return self.fit(Samples(site))

    def __str__(self) -> str:
        given = [
            f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self) if self._is_set(f.name)
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name

    def _is_set(self, field: str) -> bool:
        default = next(f.default for f in fields(self) if f.name == field)
        return bool(getattr(self, field) != default)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


class BlockCoder:
    """A codec fitted to one site. Blocks are [blocks, heads, tokens, head_dim] of any floating type
    and device.

    `granularity` is the number of tokens that are reconstructed from common side information (1:
    each token alone); `block_tokens` is the length of a full block, a multiple of it; only the last
    block of a sequence may be shorter.
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
        """What blocks become, float32. A coder that has a faster way to the same values overrides
        it.
        """
        return self.dequantise(self.quantise(x, side), side)

    def layout(self, tokens: int) -> list[Field]:
        """The fields of a payload of so many tokens, one for each tensor of codes, where all are of
        fixed size.
        """
        raise NotImplementedError

    def pack(self, parts: Parts) -> list[bytes]:
        """The bytes of each block."""
        return join_fields(
            self.layout(0), parts
        )  # how many tokens there are, the codes themselves say

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        """The codes in `payloads`, blocks of `tokens` tokens each; AssayError where a payload is
        damaged.
        """
        return split_fields(self.layout(tokens), payloads)

    def stages(self, x: torch.Tensor, side: torch.Tensor | None = None) -> list[Stage]:
        """The stages that blocks go through, the last of which is the whole round trip; none where
        it is one step.
        """
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

    Tokens are coded in blocks of `granularity`, each on its own: coding two blocks together or one
    after the other gives the same. The first `exact_first` tokens of a sequence and, at any time,
    the last `exact_last` stay exact.
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
        """Streams (layer, stream) whose reconstruction of the same tokens it needs, in the order of
        `side`'s heads.
        """
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
        """What whole blocks become, sinks and recent tokens aside: decode(encode(x)) without the
        bytes.
        """
        ...


# What goes around a codec: placements, which decide where and on which tokens it works, and
# wrappers of its values.


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
        """The same from kept tables, whose names begin with `inner.` where they are of the codec
        inside.
        """
        raise NotImplementedError


def inner_tables(tables: Tables) -> Tables:
    """The tables of the codec inside a wrapper."""
    return {
        name.removeprefix("inner."): t for name, t in tables.items() if name.startswith("inner.")
    }


# What of a model's configuration decides the shape of its KV cache.


@dataclass(frozen=True)
class CacheShape:
    """Layers, KV heads and width of the cache; `windows` is the sliding window of each layer, None
    where full.
    """

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
    """The cache of a model of transformers; AssayError where it is not one of keys and values in
    every layer.
    """
    config = model.config.get_text_config()
    types = list(
        getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    )
    known = {"full_attention", "sliding_attention"}
    if other := sorted(set(types) - known):
        raise AssayError(
            f"{type(model).__name__} has layers of the kind {other[0]!r}, whose cache is not keys"
            " and values",
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
