"""Read a GGUF header: magic, version, metadata and tensor table.

A hostile file costs little: every count is bounded by the bytes that are left, and all together by
`MAX_VALUES` and `MAX_HEADER_BYTES` (the largest vocabularies in use, 262,144 tokens, need a quarter
of either).

Layout (version 2 and 3, little-endian): magic `GGUF`, u32 version, u64 tensors, u64 metadata pairs;
then the pairs (string key, u32 type, value) and the table (string name, u32 rank, u64 dims, u32
type, u64 offset); then data from the next multiple of `general.alignment` (32).
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from assay.checkpoint.gguf.types import FOREIGN, TYPES
from assay.checkpoint.safetensors import Fault

MAX_STRING = 1 << 24

MAX_DEPTH = 4

MAX_TENSORS = 200_000

MAX_VALUES = 4_000_000
"""Metadata values, the entries of arrays counted one by one."""

MAX_HEADER_BYTES = 128 << 20

MAX_RANK = 4
"""Dimensions of a tensor (GGML_MAX_DIMS)."""

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
    """Names once each, data without gap or overlap but for the padding, and all of it in the
    file.
    """
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
