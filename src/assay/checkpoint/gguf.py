"""GGUF files: their header, what it says of the model, and the scales of their quantised blocks."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from assay.checkpoint import SHOWN, found, plural, some, unexamined, warned
from assay.checkpoint.mtp import MtpReport, Status
from assay.checkpoint.rules import template_problem
from assay.checkpoint.safetensors import Fault, Tensor
from assay.checkpoint.structure import lost_parts
from assay.verdict import Finding

# Tensor types: elements a block, bytes a block, and where a block keeps its float16 scales.


@dataclass(frozen=True)
class GgmlType:
    """`scales` are the byte offsets of float16 scales within a block."""

    name: str
    block: int
    nbytes: int
    scales: tuple[int, ...] = ()


TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    30: GgmlType("BF16", 1, 2),
    28: GgmlType("F64", 1, 8),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    2: GgmlType("Q4_0", 32, 18, (0,)),
    3: GgmlType("Q4_1", 32, 20, (0, 2)),
    6: GgmlType("Q5_0", 32, 22, (0,)),
    7: GgmlType("Q5_1", 32, 24, (0, 2)),
    8: GgmlType("Q8_0", 32, 34, (0,)),
    9: GgmlType("Q8_1", 32, 36, (0, 2)),
    10: GgmlType("Q2_K", 256, 84, (80, 82)),
    11: GgmlType("Q3_K", 256, 110, (108,)),
    12: GgmlType("Q4_K", 256, 144, (0, 2)),
    13: GgmlType("Q5_K", 256, 176, (0, 2)),
    14: GgmlType("Q6_K", 256, 210, (208,)),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66, (0,)),
    17: GgmlType("IQ2_XS", 256, 74, (0,)),
    18: GgmlType("IQ3_XXS", 256, 98, (0,)),
    19: GgmlType("IQ1_S", 256, 50, (0,)),
    20: GgmlType("IQ4_NL", 32, 18, (0,)),
    21: GgmlType("IQ3_S", 256, 110, (0,)),
    22: GgmlType("IQ2_S", 256, 82, (0,)),
    23: GgmlType("IQ4_XS", 256, 136, (0,)),
    29: GgmlType("IQ1_M", 256, 56),
    34: GgmlType("TQ1_0", 256, 54, (52,)),
    35: GgmlType("TQ2_0", 256, 66, (64,)),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18, (0,)),
}
"""By the number that a tensor table uses."""
FOREIGN = range(1024)
"""Other numbers up to here are another engine's types (ik_llama.cpp counts from 97), dropped or
newer ones.
"""

# Read a GGUF header: magic, version, metadata and tensor table.
#
# A hostile file costs little: every count is bounded by the bytes that are left, and all together
# by `MAX_VALUES` and `MAX_HEADER_BYTES` (the largest vocabularies in use, 262,144 tokens, need a
# quarter of either).
#
# Layout (version 2 and 3, little-endian): magic `GGUF`, u32 version, u64 tensors, u64 metadata
# pairs; then the pairs (string key, u32 type, value) and the table (string name, u32 rank, u64
# dims, u32 type, u64 offset); then data from the next multiple of `general.alignment` (32).

MAX_STRING = 1 << 24
MAX_DEPTH = 4
MAX_TENSORS = 200_000
MAX_VALUES = 4_000_000
"""Metadata values, the entries of arrays counted one by one."""
MAX_HEADER_BYTES = 128 << 20
MAX_RANK = 4
"""Dimensions of a tensor (GGML_MAX_DIMS)."""
MAX_HEADS = 64

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One row of the tensor table. `shape` is as stored: the fastest dimension first. Offsets count
    from the file.

    Of a type that is not in `TYPES` the length is not known, and `end` is `start`.
    """

    name: str
    type: int
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Gguf:
    """What a GGUF file says, and what is wrong with it."""

    file: str
    size: int
    version: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[GgufTensor, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def architecture(self) -> str:
        """`general.architecture`, the prefix of the model's own keys."""
        return str(self.metadata.get("general.architecture") or "")

    def setting(self, key: str) -> int:
        """A number among the architecture's keys, 0 if there is none."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if type(value) is int and value >= 0 else 0

    def blocks(self) -> dict[int, set[str]]:
        """Names of tensors below `blk.N.`, by N."""
        blocks: dict[int, set[str]] = defaultdict(set)
        for tensor in self.tensors:
            if matched := _BLOCK.match(tensor.name):
                blocks[int(matched[1])].add(matched[2])
        return blocks


_BLOCK = re.compile(r"^blk\.(\d{1,7})\.(.+)$")


class _Broken(Exception):
    """The header cannot be read further; the fault says why."""

    def __init__(self, id: str, message: str) -> None:
        super().__init__(message)
        self.fault = Fault(id, message)


@dataclass
class _Reader:
    stream: BinaryIO
    size: int
    name: str
    position: int = 0
    values: int = 0

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise _Broken(
                "truncated", f"{self.name} ends inside its own header ({self.size} bytes)"
            )
        if count > MAX_HEADER_BYTES - self.position:
            raise _Broken(
                "header_invalid", f"{self.name} has a header of more than {MAX_HEADER_BYTES} bytes"
            )
        data = self.stream.read(count)
        self.position += count
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        length = self.number("Q")
        if length > MAX_STRING:
            raise _Broken("header_invalid", f"{self.name} announces a string of {length} bytes")
        return self.take(length).decode("utf-8", "replace")

    def count(self, values: int) -> None:
        """Bound what the metadata may cost in memory."""
        self.values += values
        if self.values > MAX_VALUES:
            raise _Broken(
                "header_invalid", f"{self.name} holds more than {MAX_VALUES} metadata values"
            )

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= MAX_DEPTH:
            raise _Broken(
                "header_invalid", f"{self.name} has a metadata value of unknown type {kind}"
            )
        inner, count = self.number("I"), self.number("Q")
        width = struct.calcsize(_SCALARS[inner]) if inner in _SCALARS else 8
        if count * width > self.size - self.position:
            raise _Broken(
                "truncated",
                f"{self.name} announces an array of {count} entries, longer than the file",
            )
        self.count(count)
        if inner in _SCALARS:
            return list(struct.unpack(f"<{count}{_SCALARS[inner]}", self.take(count * width)))
        return [self.value(inner, depth + 1) for _ in range(count)]


def read_gguf(path: Path, name: str) -> Gguf:
    """The header of a GGUF file. Raises OSError if the file cannot be read; everything else becomes
    a fault.
    """
    with path.open("rb", buffering=1 << 20) as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        return parse_gguf(stream, size, name)


def parse_gguf(stream: BinaryIO, size: int, name: str) -> Gguf:
    """The header of a file of `size` bytes that `stream` stands at the beginning of."""
    reader = _Reader(stream, size, name)
    metadata: dict[str, Any] = {}
    try:
        return _read(reader, metadata)
    except _Broken as broken:
        return Gguf(name, size, metadata=metadata, faults=(broken.fault,))


def _read(reader: _Reader, metadata: dict[str, Any]) -> Gguf:
    name, size = reader.name, reader.size
    if size < 24:
        raise _Broken("truncated", f"{name} holds {size} bytes, too few for a header")
    magic = reader.take(4)
    if magic != b"GGUF":
        raise _Broken("header_invalid", f"{name} does not begin with GGUF but with {magic!r}")
    version = reader.number("I")
    if version in {2 << 24, 3 << 24}:
        raise _Broken(
            "header_invalid",
            f"{name} is big-endian, for a machine of another kind than those in use",
        )
    if version not in {2, 3}:
        raise _Broken(
            "header_invalid", f"{name} is GGUF version {version}; versions 2 and 3 are known"
        )
    count, pairs = reader.number("Q"), reader.number("Q")
    if count > MAX_TENSORS or pairs > MAX_TENSORS:
        raise _Broken(
            "header_invalid", f"{name} announces {count} tensors and {pairs} metadata pairs"
        )
    reader.count(pairs)
    faults: list[Fault] = []
    for _ in range(pairs):
        key = reader.string()
        if key in metadata:
            faults.append(Fault("header_invalid", f"{name} gives the key {key[:80]} twice"))
        metadata[key] = reader.value(reader.number("I"))
    rows = [_row(reader) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment % 8:
        raise _Broken("header_invalid", f"{name} has the alignment {alignment!r}")
    base = _aligned(reader.position, alignment)
    tensors = [t for row in rows if (t := _tensor(row, base, alignment, name, faults))]
    if len(tensors) == len(rows):
        faults.extend(_coverage(tensors, name, size, base, alignment))
    return Gguf(name, size, version, metadata, tuple(tensors), tuple(faults[:20]))


def _row(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name, rank = reader.string(), reader.number("I")
    if rank > MAX_RANK:
        raise _Broken(
            "header_invalid", f"tensor {name[:80]} of {reader.name} has {rank} dimensions"
        )
    shape = tuple(reader.number("Q") for _ in range(rank))
    return name, shape, reader.number("I"), reader.number("Q")


def _tensor(
    row: tuple[str, tuple[int, ...], int, int],
    base: int,
    alignment: int,
    file: str,
    faults: list[Fault],
) -> GgufTensor | None:
    name, shape, kind, offset = row
    where = f"tensor {name[:80]} of {file}"
    ggml = TYPES.get(kind)
    if ggml is None and kind not in FOREIGN:
        faults.append(Fault("header_invalid", f"{where} has the unknown type {kind}"))
        return None
    elements = math.prod(shape)
    if elements >= 1 << 62 or (ggml is not None and shape and shape[0] % ggml.block):
        blocks = f"blocks of {ggml.block} ({ggml.name})" if ggml is not None else "any blocks"
        problem = f"{where}: {list(shape)} does not divide into {blocks}"
        faults.append(Fault("header_invalid", problem, {"tensor": name}))
        return None
    if offset % alignment:
        faults.append(Fault("header_invalid", f"{where} is not aligned to {alignment} bytes"))
        return None
    start = base + offset
    nbytes = elements // ggml.block * ggml.nbytes if ggml is not None else 0
    return GgufTensor(name, kind, shape, start, start + nbytes)


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _coverage(
    tensors: list[GgufTensor], name: str, size: int, base: int, alignment: int
) -> Iterator[Fault]:
    """Names once each, data without gap or overlap but for the padding, and all of it in the file."""
    repeated = [n for n, count in Counter(t.name for t in tensors).items() if count > 1]
    if repeated:
        message = f"{name} names {len(repeated)} tensors twice, first {repeated[0]}"
        yield Fault("tensor_duplicate", message, {"tensors": repeated[:20]})
    end, known = base, True
    for tensor in sorted(tensors, key=lambda t: t.start):
        expected = _aligned(end, alignment)
        if tensor.start < expected or (known and tensor.start != expected):
            kind = "overlaps the one before" if tensor.start < end else "leaves a gap before it"
            message = f"tensor {tensor.name} of {name} {kind}"
            yield Fault("header_invalid", message, {"tensor": tensor.name})
            return
        end, known = tensor.end, tensor.type in TYPES
    if end > size or (not known and end == size):
        cut = [t.name for t in tensors if t.end > size or (t.end == size and t.type not in TYPES)]
        message = (
            f"{name} is {end - size} bytes shorter than its tensor table says; {len(cut)} tensors"
            " are cut"
        )
        evidence = {"path": name, "size": size, "expected": end, "tensors": cut[:20]}
        yield Fault("truncated", message, evidence)


# What a file says about itself: layers, vocabulary, special tokens, template, draft head.


def check_gguf(gguf: Gguf) -> Iterator[Finding]:
    """Everything that a GGUF file says about itself."""
    for fault in gguf.faults:
        yield found(fault.id, fault.message, **fault.evidence)
    foreign = Counter(t.type for t in gguf.tensors if t.type not in TYPES)
    if foreign:
        whose = (
            "numbers of ik_llama.cpp's" if min(foreign) >= 97 else "of another engine or version"
        )
        types = ", ".join(map(str, sorted(foreign)))
        title = (
            f"{plural(foreign.total(), 'tensor')} of {gguf.file} not examined: types {types},"
            f" {whose}"
        )
        detail = "Their length is not known, so where they end was not checked either."
        yield unexamined(title, detail=detail, path=gguf.file, types=sorted(foreign))
    if not gguf.tensors or any(f.id == "header_invalid" for f in gguf.faults):
        return
    # A vision projector, an adapter or an importance matrix is no language model.
    whole = gguf.metadata.get("general.type", "model") == "model" and gguf.architecture not in {
        "clip",
        "imatrix",
    }
    if whole and gguf.metadata.get("split.count", 1) in (0, 1):
        yield from _blocks(gguf)
        yield from _vocabulary(gguf)
    text = gguf.metadata.get("tokenizer.chat_template")
    if text is not None and (problem := template_problem(text)):
        yield found(
            "chat_template_invalid", f"the chat template in {gguf.file} {problem}", path=gguf.file
        )


def _blocks(gguf: Gguf) -> Iterator[Finding]:
    count, blocks = gguf.setting("block_count"), gguf.blocks()
    if not gguf.architecture:
        yield found("config_conflict", f"{gguf.file} does not name its architecture")
        return
    if not count or not blocks:
        return
    gaps = [i for i in range(min(count, 10_000)) if i not in blocks]
    if gaps and gaps != list(range(count - gguf.setting("nextn_predict_layers"), count)):
        title = (
            f"{plural(len(gaps), 'layer')} of {count} not in {gguf.file}: {some(map(str, gaps))}"
        )
        yield found("tensor_missing", title, layers=gaps[:SHOWN])
    if max(blocks) >= count:
        title = f"{gguf.file} says {count} layers, its tensors go on to layer {max(blocks)}"
        yield found("config_conflict", title, block_count=count, stored=max(blocks) + 1)
    ordinary = {
        i: names for i, names in blocks.items() if not any(n.startswith("nextn.") for n in names)
    }
    for index, lost in lost_parts(ordinary, 3).items():
        yield found(
            "tensor_missing",
            f"layer {index} of {gguf.file} lacks {some(lost)}",
            tensors=lost[:SHOWN],
        )
    if not any(t.name == "token_embd.weight" for t in gguf.tensors):
        yield found(
            "tensor_missing", f"{gguf.file} has no token_embd.weight", tensors=["token_embd.weight"]
        )


def _vocabulary(gguf: Gguf) -> Iterator[Finding]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    embedding = next((t for t in gguf.tensors if t.name == "token_embd.weight"), None)
    if not isinstance(tokens, list):
        yield warned("tokenizer_conflict", f"{gguf.file} has no vocabulary")
        return
    if embedding is not None and len(embedding.shape) == 2 and embedding.shape[1] != len(tokens):
        title = f"{gguf.file} has {len(tokens)} tokens and {embedding.shape[1]} rows of embedding"
        yield found("tokenizer_conflict", title, tokens=len(tokens), rows=embedding.shape[1])
    for key in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        value = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(value) is int and value >= len(tokens):
            title = f"{key}_token_id {value} of {gguf.file} is outside its {len(tokens)} tokens"
            yield found("tokenizer_conflict", title, key=key, value=value)
    if gguf.metadata.get("tokenizer.ggml.model") == "gpt2" and not gguf.metadata.get(
        "tokenizer.ggml.pre"
    ):
        title = f"{gguf.file} names no pre-tokeniser: digits and apostrophes are split by a default"
        references = ["https://github.com/ggml-org/llama.cpp/pull/6920"]
        yield warned("tokenizer_conflict", title, references=references)
    for key in ("scores", "token_type"):
        values = gguf.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(values, list) and len(values) != len(tokens):
            title = (
                f"tokenizer.ggml.{key} of {gguf.file} has {len(values)} entries for {len(tokens)}"
                " tokens"
            )
            yield found("tokenizer_conflict", title)


_GLUE = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")
_LAYER_PART = re.compile(r"(attn|ffn|post)_")


def examine_gguf(gguf: Gguf) -> MtpReport:
    """The draft head of a GGUF file: the last `nextn_predict_layers` blocks, with their `nextn.*`
    tensors.

    Each is a whole layer: it owes attention and MLP, and what all layers of the backbone have in
    common.
    """
    depth, count, blocks = (
        gguf.setting("nextn_predict_layers"),
        gguf.setting("block_count"),
        gguf.blocks(),
    )
    heads = {i: names for i, names in blocks.items() if any(n.startswith("nextn.") for n in names)}
    name, key = (
        f"gguf {gguf.architecture}",
        f"{gguf.architecture}.nextn_predict_layers" if depth else None,
    )
    if not heads:
        return MtpReport(
            "absent" if depth else "none", name, depth, 0, False if depth else None, None, key
        )
    backbone = [names for i, names in blocks.items() if i not in heads and i < count - depth]
    owed = {n for n in set.intersection(*backbone) if _LAYER_PART.match(n)} if backbone else set()
    missing: list[str] = []
    for index in range(count - min(depth, MAX_HEADS), count):
        own = blocks.get(index, set())
        missing += [f"blk.{index}.{part}" for part in (*_GLUE, *sorted(owed)) if part not in own]
        for part, start in (("attention", "attn_"), ("MLP", "ffn_")):
            if not any(n.startswith(start) and "norm" not in n for n in own):
                missing.append(f"blk.{index}.{start}* ({part})")
    status: Status = "not_announced" if not depth else "partial" if missing else "ok"
    present = sum(map(len, heads.values()))
    return MtpReport(status, name, depth, present, not missing, None, key, missing=tuple(missing))


# A model in several GGUF files: are all parts here, and do they hold the tensors that they announce
# together?

_PART = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")
MAX_PARTS = 10_000


def check_splits(ggufs: Sequence[Gguf], siblings: Iterable[str]) -> Iterator[Finding]:
    """Findings on the parts among `ggufs`; `siblings` are the names of all files that lie here."""
    here = set(siblings)
    groups: dict[tuple[str, int], list[Gguf]] = defaultdict(list)
    for gguf in ggufs:
        count = gguf.metadata.get("split.count")
        named = _PART.match(gguf.file)
        if named and type(count) is int and 1 < count <= MAX_PARTS:
            groups[named[1], count].append(gguf)
    for (stem, count), parts in groups.items():
        names = [f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
        lost = [n for n in names if n not in here]
        if lost:
            title = f"{plural(len(lost), 'part')} of {count} missing: {some(lost)}"
            yield found("shard_missing", title, paths=lost[:SHOWN])
            continue
        yield from _together(stem, parts, count)


def _together(stem: str, parts: Sequence[Gguf], count: int) -> Iterator[Finding]:
    for part in parts:
        number, named = part.metadata.get("split.no"), _PART.match(part.file)
        if named and type(number) is int and number + 1 != int(named[2]):
            title = f"{part.file} says that it is part {number + 1} of {count}"
            yield found("index_mismatch", title, path=part.file, says=number + 1)
    announced = {t for p in parts if type(t := p.metadata.get("split.tensors.count")) is int}
    stored = sum(len(p.tensors) for p in parts)
    if len(parts) == count and len(announced) == 1 and not any(p.faults for p in parts):
        (total,) = announced
        if total != stored:
            title = f"the parts of {stem} announce {total} tensors and hold {stored}"
            yield found("index_mismatch", title, announced=total, stored=stored)


# What a value scan reads of a GGUF file: the plain tensors (quantised blocks are judged by their
# scales).

_PLAIN = {0: "F32", 1: "F16", 30: "BF16", 28: "F64"}
ROWS = 1 << 16


def gguf_jobs(gguf: Gguf) -> Iterator[Tensor]:
    """The tensors of plain floats that lie wholly in the file, slowest dimension first."""
    for tensor in gguf.tensors:
        if tensor.type in _PLAIN and tensor.end <= gguf.size:
            shape = tuple(reversed(tensor.shape))
            yield Tensor(
                tensor.name, _PLAIN[tensor.type], shape, gguf.file, tensor.start, tensor.end
            )


def check_block_scales(gguf: Gguf, path: Path) -> Iterator[Finding]:
    """The float16 scales of quantised blocks: none may be Inf or NaN, and not all of a matrix may
    be zero.
    """
    nonfinite: dict[str, int] = {}
    zero: list[str] = []
    for tensor in gguf.tensors:
        if tensor.type in TYPES and TYPES[tensor.type].scales and tensor.end <= gguf.size:
            bad, used = _count(tensor, path)
            if bad:
                nonfinite[tensor.name] = bad
            if not used and not tensor.name.endswith("token_embd.weight"):
                zero.append(tensor.name)
    if nonfinite:
        title = (
            f"{plural(len(nonfinite), 'tensor')} with block scales that are no numbers:"
            f" {some(nonfinite)}"
        )
        evidence = dict(list(nonfinite.items())[:SHOWN])
        yield found(
            "nonfinite",
            title,
            causes=["an overflow when quantising"],
            tensors=evidence,
            count=len(nonfinite),
        )
    if zero:
        title = f"{plural(len(zero), 'tensor')} whose block scales are all zero: {some(zero)}"
        yield found("tensor_constant", title, tensors=zero[:SHOWN], count=len(zero))


def _count(tensor: GgufTensor, path: Path) -> tuple[int, bool]:
    """(scales that are Inf or NaN, whether any scale is nonzero)."""
    kind = TYPES[tensor.type]
    stored = np.memmap(path, np.uint8, "r", tensor.start, (tensor.end - tensor.start,)).reshape(
        -1, kind.nbytes
    )
    bad, used = 0, False
    for first in range(0, len(stored), ROWS):
        part = stored[first : first + ROWS]
        for offset in kind.scales:
            scale = np.ascontiguousarray(part[:, offset : offset + 2]).view(np.uint16) & 0x7FFF
            bad += int(np.count_nonzero(scale >= 0x7C00))
            used = used or bool(scale.any())
    return bad, used
