"""Blocks of the KV cache as entropy-coded streams that may leave the engine (lab/docs/tier.md).

A block is some tokens of all layers, keys and values. All integers are little-endian:

    magic "AKVB" | u16 version | u8 type of the exact values | u8 zero
    16 bytes digest of the tables | 32 bytes key
    u32 first token, tokens, exact tokens | u16 layers, KV heads, head_dim, zero
    u32 bytes of the whole block | first 16 bytes of SHA-256 of all other bytes
    u32 bytes of each section: K and V of layer 0, of layer 1, …
    exact tokens [layers, 2, exact, width]
    sections: u32 escapes, their float32 | 4 u32 states | u16 words, as in `assay_lab.kv.rans`

Version, tables, key and checksum are checked before anything is decoded. Streams are predicted from
lower layers of the same tokens, so a block needs no other block.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from assay.errors import AssayError
from assay_lab.kv import rans
from assay_lab.kv.block_errors import (
    BlockDamaged,
    BlockOfOtherTables,
    BlockOfOtherTokens,
    BlockOfOtherVersion,
)
from assay_lab.kv.block_tables import BlockTables, check_codec
from assay_lab.kv.codecs.distributions import ESCAPE, RADIUS, code_lengths, radii
from assay_lab.kv.spec import KvSpec, parse_spec
from assay_lab.kv.stream_coder import Key

MAGIC, VERSION = b"AKVB", 2
_HEAD = struct.Struct("<4sHBB16s32sIIIHHHHI16s")
_CHECK = 16
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_TOGETHER = 512
"""Tokens that a thread decodes together: matrices that stay in its second cache."""


@dataclass(frozen=True)
class Header:
    """The header of a block; `sizes` are the bytes of each section."""

    kind: torch.dtype
    key: bytes
    first: int
    tokens: int
    exact: int
    sizes: tuple[int, ...]
    exact_at: int


@dataclass(frozen=True)
class _Stream:
    """The tables of one stream, as the loops need them.

    `weight` [width, rank + 2 + predictor width], bf16, makes tokens out of scaled coefficients, two
    ones (for the mean and what bf16 leaves of it), and what the streams of `predictor_keys` were
    decoded to: one product a stream.
    """

    predictor_keys: tuple[Key, ...]
    weight: torch.Tensor
    mean: torch.Tensor
    analysis: torch.Tensor
    scale: NDArray[np.float32]
    laws: NDArray[np.int64]
    classes: tuple[NDArray[np.uint8], NDArray[np.uint32]]
    gaps: NDArray[np.float32]
    zero: NDArray[np.int64]
    radius: NDArray[np.int64]
    kind_bits: NDArray[np.float32]
    rdo: float

    @property
    def rank(self) -> int:
        """Coefficients of a token."""
        return len(self.scale)

    def inputs(
        self, tokens: int, decoded: Mapping[Key, torch.Tensor], room: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What `weight` takes [.., tokens], bf16, but for the coefficients; in `room`, flat, where
        it is given.
        """
        depth = self.weight.shape[1]
        if room is None:
            room = torch.empty(depth * tokens, dtype=torch.bfloat16)
        found = room[: depth * tokens].view(depth, tokens)
        found[self.rank : self.rank + 2] = 1
        if self.predictor_keys:
            torch.cat([decoded[key] for key in self.predictor_keys], out=found[self.rank + 2 :])
        return found


class BlockCodec:
    """Encodes and decodes blocks of one model by its tables, on `threads` threads of the CPU.

    Tensors are [layers, 2, tokens, KV heads · head_dim]: keys (after RoPE, as caches hold them) and
    values.
    """

    def __init__(self, tables: BlockTables, threads: int = 2) -> None:
        self.tables = tables
        self.facts = tables.facts
        self.threads, self.device = max(1, threads), torch.device("cpu")
        spec = parse_spec(self.facts.spec)
        check_codec(spec)
        self._streams: dict[Key, _Stream] = {
            (layer, stream): self._stream(layer, stream, _rdo(spec, stream))
            for layer in range(self.facts.layers)
            for stream in ("k", "v")
        }
        self._kept = threading.local()
        self._needed = {
            source for stream in self._streams.values() for source in stream.predictor_keys
        }
        self._pool = (
            ThreadPoolExecutor(self.threads, "assay-kv", pin_single_thread)
            if self.threads > 1
            else None
        )

    def _stream(self, layer: int, stream: str, rdo: float) -> _Stream:
        start = f"{layer}.{stream}."
        own = {
            n.removeprefix(start): t for n, t in self.tables.tensors.items() if n.startswith(start)
        }
        laws, mean = own["inner.laws"].astype(np.int64), torch.from_numpy(own["mean"])
        parts = [
            torch.from_numpy(own["synthesis"]).T,
            mean[:, None],
            (mean - mean.bfloat16())[:, None],
        ]
        if "predictor" in own:
            predictor = own["predictor"].astype(np.float32) * own["predictor_scale"].astype(
                np.float32
            )
            parts.append(torch.from_numpy(predictor).T)
        odds = own["inner.odds"].astype(np.float32)
        return _Stream(
            tuple((int(number), "kv"[int(source)]) for number, source in own["sides"]),
            torch.cat([part.bfloat16() for part in parts], dim=1).contiguous(),
            mean,
            torch.from_numpy(own["analysis"]).T.contiguous(),
            own["synthesis_scale"].astype(np.float32),
            laws,
            rans.tables_of_classes(own["inner.odds"]),
            (own["inner.shrink"] / np.float32(256)).astype(np.float32),
            laws * code_lengths().shape[1] + RADIUS,
            radii()[laws],
            -np.log2(odds),
            rdo,
        )

    # Encoding.

    # Threads of the pool are not in an engine's inference mode.
    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    def encode(self, x: torch.Tensor, *, first: int, key: bytes, exact: int | None = None) -> bytes:
        """The block of tokens `first` … of a request. The first `exact` stay as they are: by
        default the sinks.

        AssayError for NaN, infinity, or a wrong shape.
        """
        facts, tokens = self.facts, x.shape[2]
        if (
            x.shape != (facts.layers, 2, tokens, facts.width)
            or x.dtype not in _TYPES
            or len(key) != 32
        ):
            raise AssayError(
                f"{x.dtype} of shape {list(x.shape)} is no block of {facts.layers} layers with"
                f" {facts.kv_heads} heads of {facts.head_dim}",
                finding_id="kv.shape",
            )
        if not bool(torch.isfinite(x).all()):
            raise AssayError("a block holds NaN or infinity", finding_id="kv.not_finite")
        exact = max(0, min(facts.exact_first - first, tokens)) if exact is None else exact
        sections: list[bytes] = []
        decoded: dict[Key, torch.Tensor] = {}
        turn = self._rotation([(first + exact, tokens - exact)])
        for (layer, name), stream in self._streams.items():
            rows = x[layer, "kv".index(name), exact:].float()
            if name == "k" and facts.before_rope:
                rows = rows.clone()
                _turn(rows.numpy(), *turn, facts.kv_heads, True)
            section, back = self._encode_stream(
                stream, rows.T, decoded, needed=(layer, name) in self._needed
            )
            sections.append(section)
            decoded[layer, name] = back
        return self.assembled(x[:, :, :exact], sections, key=key, first=first, tokens=tokens)

    def assembled(
        self, exact: torch.Tensor, sections: Sequence[bytes], *, key: bytes, first: int, tokens: int
    ) -> bytes:
        """A block of its sections and of the tokens that stay exact [layers, 2, exact, width]."""
        facts, raw = self.facts, exact.contiguous().view(torch.uint8).numpy().tobytes()
        body = b"".join([struct.pack(f"<{len(sections)}I", *map(len, sections)), raw, *sections])
        head = _HEAD.pack(
            MAGIC,
            VERSION,
            _TYPES.index(exact.dtype),
            0,
            self.tables.digest,
            key,
            first,
            tokens,
            exact.shape[2],
            facts.layers,
            facts.kv_heads,
            facts.head_dim,
            0,
            _HEAD.size + len(body),
            bytes(_CHECK),
        )
        front = head[:-_CHECK]
        return b"".join([front, _checksum(front, body), body])

    def _encode_stream(
        self, stream: _Stream, x: torch.Tensor, decoded: Mapping[Key, torch.Tensor], *, needed: bool
    ) -> tuple[bytes, torch.Tensor]:
        """The section of `x` [width, tokens], and in bf16 what a decoder has of it where others
        need it.
        """
        inputs, rank, rest = (
            stream.inputs(x.shape[1], decoded),
            stream.rank,
            x - stream.mean[:, None],
        )
        if stream.predictor_keys:
            rest = rest - stream.weight[:, rank + 2 :] @ inputs[rank + 2 :]
        c = np.ascontiguousarray((stream.analysis @ rest).numpy().T)
        numbers, kinds = np.empty(c.shape[::-1], np.int16), np.empty(len(c), np.uint8)
        rans.choose(
            c,
            _lengths(),
            stream.zero,
            stream.radius,
            stream.kind_bits,
            np.float32(stream.rdo),
            numbers,
            kinds,
        )
        states, words = rans.encode(numbers, kinds, stream.laws, stream.classes[1])
        escaped = np.ascontiguousarray(c.T)[numbers == ESCAPE].astype("<f4")
        section = b"".join(
            [struct.pack("<I", escaped.size), escaped.tobytes(), states.astype("<u4").tobytes(),
             words.astype("<u2").tobytes()]
        )  # fmt: skip
        if not needed:
            return section, x
        rans.values(numbers, stream.gaps, stream.scale, escaped, _bits(inputs), 0)
        return section, stream.weight @ inputs

    # Decoding.

    @staticmethod
    def sound(data: bytes | memoryview) -> bool:
        """Whether the checksum of a block holds."""
        head, body = data[: _HEAD.size], memoryview(data)[_HEAD.size :]
        return bytes(head[-_CHECK:]) == _checksum(head[:-_CHECK], body)

    def check(
        self, data: bytes | memoryview, key: bytes | None = None, *, checksum: bool = True
    ) -> Header:
        """The header of a block whose checksum holds; BlockRefused with the reason for any other.

        Without `checksum` whoever asks must see to it (`sound`) before the block is believed.
        """
        if len(data) < _HEAD.size or bytes(data[:4]) != MAGIC:
            raise BlockDamaged(f"{len(data)} bytes are no stored block")
        (
            _,
            version,
            kind,
            _,
            tables,
            own,
            first,
            tokens,
            exact,
            layers,
            heads,
            width,
            _,
            size,
            _,
        ) = _HEAD.unpack_from(data)
        if version != VERSION:
            raise BlockOfOtherVersion(
                f"a block has version {version}, this assay reads version {VERSION}"
            )
        if tables != self.tables.digest:
            raise BlockOfOtherTables(
                f"a block was coded with the tables {tables.hex()}, not with"
                f" {self.tables.digest.hex()}",
                "decode it with the tables, model and codec that it was coded with",
            )
        if size != len(data):
            raise BlockDamaged(f"a block of {size} bytes has {len(data)}")
        if checksum and not self.sound(data):
            raise BlockDamaged("the checksum of a block does not match")
        if key is not None and own != key:
            raise BlockOfOtherTokens("a block is of other tokens than those that were asked for")
        facts = self.facts
        count = 2 * facts.layers
        sizes = (
            struct.unpack_from(f"<{count}I", data, _HEAD.size)
            if len(data) >= _HEAD.size + 4 * count
            else ()
        )
        start = _HEAD.size + 4 * count
        if kind < len(_TYPES):
            raw = count * exact * facts.width * _TYPES[kind].itemsize
            if (
                (layers, heads, width) == (facts.layers, facts.kv_heads, facts.head_dim)
                and exact <= tokens
                and start + raw + sum(sizes) == len(data)
            ):
                return Header(_TYPES[kind], own, first, tokens, exact, sizes, start)
        raise BlockDamaged("the header of a block contradicts itself")

    def decode_groups(
        self, blocks: Sequence[bytes], keys: Sequence[bytes] | None = None
    ) -> Iterator[torch.Tensor]:
        """What `decode` gives, in parts that an engine can take while the next ones are decoded:
        here all at once.
        """
        yield self.decode(blocks, keys)

    @torch.inference_mode(False)  # type: ignore[untyped-decorator]
    def decode(self, blocks: Sequence[bytes], keys: Sequence[bytes] | None = None) -> torch.Tensor:
        """The tokens of blocks one after the other, in their type; BlockRefused if one of them is
        not to be believed.
        """
        heads = [
            self.check(data, keys[i] if keys is not None else None) for i, data in enumerate(blocks)
        ]
        if not heads:
            return torch.empty(self.facts.layers, 2, 0, self.facts.width, dtype=torch.bfloat16)
        total = sum(head.tokens for head in heads)
        out = torch.empty(self.facts.layers, 2, total, self.facts.width, dtype=heads[0].kind)
        parts: list[tuple[list[int], int]] = []
        most = min(_TOGETHER, -(-total // self.threads))
        at = held = 0
        for i, head in enumerate(heads):
            if not parts or held + head.tokens > most:
                parts.append(([], at))
                held = 0
            parts[-1][0].append(i)
            at, held = at + head.tokens, held + head.tokens

        def one(part: tuple[list[int], int]) -> None:
            some, start = part
            tokens = sum(heads[i].tokens for i in some)
            self._decode(
                [blocks[i] for i in some],
                [heads[i] for i in some],
                out[:, :, start : start + tokens],
            )

        if self._pool is None or len(parts) == 1:
            for part in parts:
                one(part)
        else:
            list(self._pool.map(one, parts))
        return out

    def _decode(self, blocks: Sequence[bytes], heads: Sequence[Header], out: torch.Tensor) -> None:
        facts = self.facts
        coded = np.array([head.tokens - head.exact for head in heads])
        turn = self._rotation(
            [(head.first + head.exact, n) for head, n in zip(heads, coded, strict=True)]
        )
        places = np.cumsum([0, *map(len, blocks)])[:-1]
        raw = b"".join(blocks)
        ends = np.empty((2 * facts.layers, len(heads)), np.int64)
        to = np.empty(len(heads), np.int64)
        start = 0
        for i, head in enumerate(heads):
            at = int(places[i]) + head.exact_at
            size = 2 * facts.layers * head.exact * facts.width * head.kind.itemsize
            if head.exact:
                rows = torch.frombuffer(bytearray(raw[at : at + size]), dtype=head.kind)
                out[:, :, start : start + head.exact] = rows.view(
                    facts.layers, 2, head.exact, facts.width
                )
            ends[:, i] = at + size + np.cumsum(head.sizes)
            to[i], start = start + head.exact, start + head.tokens
        begins = ends - np.array([head.sizes for head in heads]).T
        if len(raw) % 2 or (ends % 2).any():
            raise BlockDamaged("a section of a block is no whole number of words")
        words, begins, ends = np.frombuffer(raw, "<u2"), begins // 2, ends // 2
        columns = np.cumsum(coded) - coded
        decoded: dict[Key, torch.Tensor] = {}
        total = int(coded.sum())
        room, kept = self._room(total)
        bf16 = out.dtype == torch.bfloat16
        filled = out.view(torch.uint16).numpy() if bf16 else np.empty(0)
        for number, ((layer, name), stream) in enumerate(self._streams.items()):
            inputs = stream.inputs(total, decoded, room)
            self._read(stream, words, begins[number], ends[number], coded, columns, _bits(inputs))
            i, turned = "kv".index(name), name == "k" and facts.before_rope
            # Of two layers at a time: no layer predicts from farther below.
            found = torch.mm(stream.weight, inputs, out=kept[layer % 2, i])
            if (layer, name) in self._needed:
                decoded[layer, name] = found
            if bf16:
                _place(
                    _bits(found),
                    columns,
                    coded,
                    filled[layer, i],
                    to,
                    *turn,
                    facts.kv_heads,
                    turned,
                )
            else:
                rows = found.T.float().contiguous()
                if turned:
                    _turn(rows.numpy(), *turn, facts.kv_heads, False)
                for there, here, tokens in zip(to, columns, coded, strict=True):
                    out[layer, i, there : there + tokens] = rows[here : here + tokens]
            decoded.pop((layer - 2, name), None)

    def _read(
        self,
        stream: _Stream,
        words: NDArray[np.uint16],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        tokens: NDArray[np.int64],
        columns: NDArray[np.int64],
        out: NDArray[np.uint16],
    ) -> None:
        """Decode a stream's scaled coefficients in some blocks into the first rows of `out`."""
        tables = *rans.tables(), *stream.classes, stream.gaps, stream.scale
        if rans.sections(words, begins, ends, tokens, columns, stream.laws, tables, out) >= 0:
            raise BlockDamaged("a section of a block is no code of its tables")

    def _room(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of this thread for what products take and give, kept from call to call: new pages
        take longer than use.
        """
        depth, width = (
            max(stream.weight.shape[1] for stream in self._streams.values()),
            self.facts.width,
        )
        room: torch.Tensor | None = getattr(self._kept, "room", None)
        if room is None or room.numel() < (depth + 4 * width) * tokens:
            room = self._kept.room = torch.empty((depth + 4 * width) * tokens, dtype=torch.bfloat16)
        rows = room[depth * tokens : (depth + 4 * width) * tokens].view(2, 2, width, tokens)
        return room[: depth * tokens], rows

    def _rotation(
        self, spans: Sequence[tuple[int, int]]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Cosines and sines [tokens, head_dim / 2] of spans (first, tokens)."""
        places = np.concatenate(
            [np.arange(first, first + n, dtype=np.float64) for first, n in spans]
        )
        angles = places[:, None] * self.tables.tensors["inv_freq"]
        scale = self.facts.scaling
        return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(
            np.float32
        )


def block_bytes(data: bytes) -> int:
    """How long a block is by its header, where something else may follow it; 0 where there is
    none.
    """
    return int(_HEAD.unpack_from(data)[-2]) if len(data) >= _HEAD.size and data[:4] == MAGIC else 0


def block_tokens(data: bytes) -> int:
    """Tokens of a block by its header, unchecked; 0 where there is
    none.
    """
    return int(_HEAD.unpack_from(data)[7]) if len(data) >= _HEAD.size and data[:4] == MAGIC else 0


def _checksum(front: bytes | memoryview, body: bytes | memoryview) -> bytes:
    """Of SHA-256, for which processors have instructions."""
    found = hashlib.sha256(front)
    found.update(body)
    return found.digest()[:_CHECK]


def _rdo(spec: KvSpec, stream: str) -> float:
    return float(getattr(getattr(spec.of(stream), "codec", None), "rdo", 0.0))


def _bits(x: torch.Tensor) -> NDArray[np.uint16]:
    """A bf16 tensor as numpy has it."""
    found: NDArray[np.uint16] = x.view(torch.uint16).numpy()
    return found


def _lengths() -> NDArray[np.float32]:
    return code_lengths().reshape(-1)


def pin_single_thread() -> None:
    """Make a thread of its own: one thread for torch's products, and any core, where an engine has
    bound its own to one.
    """
    torch._C.set_num_threads(
        1
    )  # vLLM's CPU worker puts a warning in the place of torch.set_num_threads
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


@rans.compiled
def _turn(rows, cos, sin, heads, back):  # type: ignore[no-untyped-def]
    """Put RoPE on rows [tokens, heads · d], or with `back` take it off, in place."""
    half = cos.shape[1]
    for t in range(rows.shape[0]):
        for h in range(heads):
            low = rows[t, h * 2 * half : h * 2 * half + half]
            high = rows[t, h * 2 * half + half : h * 2 * half + 2 * half]
            for i in range(half):
                a, b, c, s = low[i], high[i], cos[t, i], sin[t, i]
                if back:
                    size = c * c + s * s
                    low[i], high[i] = (a * c + b * s) / size, (b * c - a * s) / size
                else:
                    low[i], high[i] = a * c - b * s, b * c + a * s


@rans.compiled
def _place(bits, columns, counts, out, to, cos, sin, heads, turned):  # type: ignore[no-untyped-def]
    """Tokens of `bits` [width, tokens] into `out` [tokens, width], both bf16; RoPE put on where
    `turned`.

    Of each block `counts` tokens, from `columns` on, to the rows from `to` on.
    """
    width = bits.shape[0]
    row = np.empty(width, np.uint32)
    x = row.view(np.float32)
    half = width // heads // 2
    for block in range(counts.size):
        for n in range(counts[block]):
            t = columns[block] + n
            for i in range(width):
                row[i] = np.uint32(bits[i, t]) << np.uint32(16)
            if turned:
                for h in range(heads):
                    low, high = (
                        x[h * 2 * half : h * 2 * half + half],
                        x[h * 2 * half + half : (h + 1) * 2 * half],
                    )
                    for i in range(half):
                        a, b, c, s = low[i], high[i], cos[t, i], sin[t, i]
                        low[i], high[i] = a * c - b * s, b * c + a * s
            line = out[to[block] + n]
            for i in range(width):
                w = row[i]
                line[i] = np.uint16(
                    (w + np.uint32(0x7FFF) + ((w >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
                )
