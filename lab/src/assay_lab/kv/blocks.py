"""Blocks of the KV cache as entropy-coded streams that may leave the engine (lab/docs/tier.md).

A block is some tokens of all layers, keys and values. All integers are little-endian:

    magic "AKVB" | u16 version | u8 type of the exact values | u8 zero | 16 bytes digest of the
    tables
    32 bytes key | u32 first token, tokens, exact tokens | u16 layers, KV heads, head_dim, zero
    u32 bytes of the whole block | first 16 bytes of SHA-256 of all other bytes
    u32 bytes of each section, K and V of layer 0, of layer 1, … | exact tokens [layers, 2, exact,
    width]
    sections: u32 escapes, their float32 | 4 u32 states | u16 words, as `assay_lab.kv.rans` has them

Nothing is decoded before version, tables, key and checksum hold. The tables are a file of their
own, named by the digest of what is in them; they say which model and codec they are of. Streams are
predicted from lower layers of the same tokens as the codec says, so a block needs no other block.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assay.checkpoint.digests import Digest, DigestCache, hash_files
from assay.errors import AssayError
from assay.runs import cache_dir, write_atomically
from assay_lab.kv import rans
from assay_lab.kv.codecs.pca_entropy import ESCAPE, RADIUS, RangeCoder, code_lengths, radii
from assay_lab.kv.layer_coders import CoderSet, LayerCoders
from assay_lab.kv.pages.source import BLOCKS, source_of
from assay_lab.kv.spec import KvSpec, parse_spec
from assay_lab.kv.stream_coder import Key

MAGIC, VERSION = b"AKVB", 2
_HEAD = struct.Struct("<4sHBB16s32sIIIHHHHI16s")
_CHECK = 16
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_TABLES = "assay-kv-tables/1"
_TOGETHER = 512
"""Tokens that a thread decodes together: matrices that stay in its second cache."""


class BlockRefused(AssayError):
    """A stored block that is not read; the base of the reasons why."""

    reason = "kv.block_refused"

    def __init__(self, message: str, remedy: str = "delete it: it is computed again") -> None:
        super().__init__(message, finding_id=self.reason, remedy=remedy)


class BlockDamaged(BlockRefused):
    """Its bytes are not those that were written."""

    reason = "kv.block_damaged"


class BlockOfOtherVersion(BlockRefused):
    """Its format is of another assay."""

    reason = "kv.block_version"


class BlockOfOtherTables(BlockRefused):
    """It was coded for another model, by another codec, or with another calibration."""

    reason = "kv.block_other_tables"


class BlockOfOtherTokens(BlockRefused):
    """It is a good block, but not the one that was asked for."""

    reason = "kv.block_other_tokens"


# Tables: what all blocks share.


@dataclass(frozen=True)
class Facts:
    """What tables are of. `model` names the weights by digest, `exact_first` the sinks; keys are
    coded before RoPE or after.

    `scaling` is the factor that RoPE's variants for long contexts put on cosines and sines.
    """

    spec: str
    model: str
    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    exact_first: int
    before_rope: bool
    scaling: float

    @property
    def width(self) -> int:
        """Values of a token in one stream of a layer."""
        return self.kv_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in bf16, all layers."""
        return 4 * self.layers * self.width


def check_codec(spec: KvSpec) -> None:
    """AssayError for a codec that has no stored blocks: they hold range-coded `pca` of both
    streams, of one quantiser.
    """
    for stream in ("k", "v"):
        recipe = spec.of(stream)
        why = None
        if recipe is None:
            why = f"{stream.upper()} is left exact"
        elif getattr(recipe.codec, "coding", "") != "range":
            why = f"{recipe.codec.name} is not entropy-coded"
        elif getattr(recipe.codec, "trellis", 0):
            why = (
                "with a trellis each number hangs on those before it, which four states at once"
                " cannot follow"
            )
        elif any(part.name not in ("prerope", "sinks") for part in recipe.around):
            why = (
                f"{recipe.around[0].name if len(recipe.around) == 1 else str(recipe)} is around the"
                " codec"
            )
        elif recipe.exact_last:
            why = "recent tokens stay exact"
        if why is not None:
            raise AssayError(
                f"blocks cannot be stored in {spec}: {why}",
                finding_id="kv.unsupported",
                remedy=(
                    'use --codec "prerope+sinks(n=4)+pca(step=0.005, predict=all,'
                    ' weights=measured)" or the like'
                ),
            )


class BlockTables:
    """Tables of all streams of a model, by name as their coders have them, and what they are of."""

    def __init__(self, facts: Facts, tensors: Mapping[str, NDArray[Any]]) -> None:
        self.facts = facts
        self.tensors = dict(sorted(tensors.items()))

    @classmethod
    def of(
        cls,
        spec: KvSpec,
        coders: CoderSet,
        model: str,
        shape: Any,
        inv_freq: torch.Tensor,
        scaling: float,
    ) -> BlockTables:
        """From fitted coders; AssayError for a codec that has no stored blocks. `inv_freq`
        [head_dim / 2] of RoPE.
        """
        check_codec(spec)
        tensors: dict[str, NDArray[Any]] = {"inv_freq": inv_freq.double().cpu().numpy()}
        first = before = None
        for (layer, stream), fitted in coders.by_stream.items():
            if not isinstance(fitted.coder, RangeCoder):
                raise AssayError(
                    f"layer {layer}, stream {stream}, is not range-coded",
                    finding_id="kv.unsupported",
                )
            first = max(first or 0, fitted.exact_first)
            before = fitted.before_rope if stream == "k" else before
            tensors |= {
                f"{layer}.{stream}.{name}": table for name, table in fitted.coder.tables.items()
            }
            sides = [[number, side == "v"] for number, side in fitted.sides]
            tensors[f"{layer}.{stream}.sides"] = np.array(sides, np.int32).reshape(-1, 2)
        facts = Facts(
            str(spec), model, shape.architecture, shape.layers, shape.kv_heads, shape.head_dim,
            first or 0, bool(before), scaling,
        )  # fmt: skip
        return cls(facts, tensors)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes of BLAKE2b over facts and tensors: names, types, shapes, values."""
        found = hashlib.blake2b(
            json.dumps(vars(self.facts), sort_keys=True).encode(), digest_size=16
        )
        for name, table in self.tensors.items():
            found.update(f"{name} {table.dtype.str} {table.shape}".encode())
            found.update(np.ascontiguousarray(table).tobytes())
        return found.digest()

    @property
    def decoder_bytes(self) -> int:
        """Bytes that a decoder needs; the encoder's `analysis` is not among them."""
        return sum(t.nbytes for name, t in self.tensors.items() if not name.endswith("analysis"))

    def write(self, folder: Path) -> Path:
        """Keep them in a folder as `DIGEST.tables`; the path."""
        from safetensors.numpy import save

        path = folder / f"{self.digest.hex()}.tables"
        with suppress(BlockRefused):  # what is damaged is written anew
            self.read(path)
            return path
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"format": _TABLES, "facts": json.dumps(vars(self.facts))}
        write_atomically(
            path, save({n: np.ascontiguousarray(t) for n, t in self.tensors.items()}, facts)
        )
        return path

    @classmethod
    def read(cls, path: Path) -> BlockTables:
        """From their file; BlockDamaged where it is none, or its content has another digest than
        its name.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        except (OSError, SafetensorError) as error:
            raise BlockDamaged(
                f"cannot read the tables {path}: {error}", "make them again"
            ) from error
        if metadata.get("format") != _TABLES:
            raise BlockOfOtherVersion(
                f"{path} holds no tables of this assay ({_TABLES})", "make them again"
            )
        try:
            found = cls(Facts(**json.loads(metadata["facts"])), tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise BlockDamaged(
                f"cannot read the tables {path}: {error}", "make them again"
            ) from error
        if found.digest.hex() != path.stem:
            raise BlockDamaged(
                f"the tables {path.name} are not what they were: their digest is"
                f" {found.digest.hex()}",
                "delete the file, and start again",
            )
        return found


def tables_for(model: str, codec: str, calibration: str | None, folder: Path) -> BlockTables:
    """The tables of a codec for the checkpoint in the folder `model`, fitted once and then kept in
    `folder`.

    AssayError for a model whose cache blocks cannot hold, a codec that has none, and a calibration
    of another model.
    """
    spec = parse_spec(codec)
    check_codec(spec)
    if calibration is None:
        raise AssayError(
            "stored blocks need a calibration",
            finding_id="kv.no_calibration",
            remedy=(
                "make one: assay kv calibrate MODEL --text FILE --out FILE, and give it by"
                " --calibration"
            ),
        )
    weights = weights_digest(Path(model))
    source = source_of(calibration, model, BLOCKS)
    cache = DigestCache(cache_dir("digests"))
    named = hashlib.blake2b(
        f"{_TABLES} {spec} {weights} {_digests([Path(calibration)], cache)}".encode(),
        digest_size=16,
    )
    link = folder / f"{named.hexdigest()}.fitted"
    with suppress(BlockRefused, OSError, ValueError):  # not there, or damaged
        kept = BlockTables.read(folder / f"{link.read_text().strip()}.tables")
        if kept.facts.model == weights and kept.facts.spec == str(spec):
            return kept
    try:
        coders = LayerCoders(source.shape, source.rotary, source.calibration).fit_all(
            lambda _, stream: spec.of(stream)
        )
    except torch.linalg.LinAlgError as error:
        raise AssayError(
            f"{spec} cannot be fitted to {calibration}: its numbers are not finite",
            finding_id="kv.spec",
            remedy="give a larger step",
        ) from error
    found = BlockTables.of(spec, coders, weights, source.shape, source.inv_freq, source.scaling)
    found.write(folder)
    write_atomically(link, found.digest.hex())
    return found


def weights_digest(model: Path) -> str:
    """A digest of configuration and weights of a checkpoint's folder; AssayError where there are
    none.
    """
    files = sorted([*model.glob("*.safetensors"), *model.glob("*.bin"), *model.glob("config.json")])
    if len(files) < 2:
        raise AssayError(
            f"{model} is no folder with config.json and weights, so that blocks could not tell its"
            " model from others",
            finding_id="kv.unsupported",
            remedy="download the checkpoint, and give its folder",
        )
    return _digests(files, DigestCache(cache_dir("digests")))


def _digests(files: Sequence[Path], cache: DigestCache) -> str:
    found: dict[str, Digest] = {}
    hash_files([(path.name, path, path.stat().st_size) for path in files], cache, found)
    if wrong := next((name for name, digest in found.items() if digest.problem), None):
        raise AssayError(
            f"cannot read {wrong}: {found[wrong].problem}",
            finding_id="kv.unreadable",
            remedy="check the path",
        )
    text = "".join(f"{name} {found[name].sha256}\n" for name in sorted(found))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# Blocks.


@dataclass(frozen=True)
class Header:
    """What stands before the streams of a block; `sizes` are the bytes of each section."""

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

    `weight` [width, rank + 2 + side width], bf16, makes tokens out of scaled coefficients, two ones
    (for the mean and what bf16 leaves of it), and what the streams of `sides` were decoded to: one
    product a stream.
    """

    sides: tuple[Key, ...]
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
        if self.sides:
            torch.cat([decoded[key] for key in self.sides], out=found[self.rank + 2 :])
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
        self._needed = {side for stream in self._streams.values() for side in stream.sides}
        self._pool = (
            ThreadPoolExecutor(self.threads, "assay-kv", alone) if self.threads > 1 else None
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
            tuple((int(number), "kv"[int(side)]) for number, side in own["sides"]),
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
        if stream.sides:
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
            # Of two layers at a time: nobody predicts from farther below.
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
        self, stream: _Stream, words: NDArray[np.uint16], begins: NDArray[np.int64], ends: NDArray[np.int64],
        tokens: NDArray[np.int64], columns: NDArray[np.int64], out: NDArray[np.uint16],
    ) -> None:  # fmt: skip
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
    """How long a block is by its header, where something else may follow it; 0 where there is none."""
    return int(_HEAD.unpack_from(data)[-2]) if len(data) >= _HEAD.size and data[:4] == MAGIC else 0


def block_tokens(data: bytes) -> int:
    """How many tokens a block has by its header, which nobody has checked; 0 where there is none."""
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


def alone() -> None:
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
