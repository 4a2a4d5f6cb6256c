"""Read a safetensors header without touching the body.

Format: 8 bytes little-endian length N, N bytes of JSON `{name: {dtype, shape, data_offsets}}` (at
most 100 MB), then the data. The offsets cover the data without gap or overlap. A hostile header is
refused before it can cost memory: its length, its depth and the number of its objects are bounded
before it is parsed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.checkpoint.findings import plural
from assay.checkpoint.tensors import DTYPE_BITS, Tensor

MAX_HEADER_BYTES = 100_000_000

MAX_OBJECTS = 500_000
"""Tensors of one file; the largest models have about 100,000 in all their shards."""

MAX_FAULTS = 20

MAX_DIMENSIONS = 16

MAX_OFFSET = 1 << 62


@dataclass(frozen=True)
class Fault:
    """Something wrong with a header: `id` names the finding (without its area), `message` says what
    and where.
    """

    id: str
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Header:
    """What a header says, and what is wrong with it. `tensors` holds only entries that make
    sense.
    """

    file: str
    size: int
    header_bytes: int = 0
    tensors: tuple[Tensor, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    @property
    def data_end(self) -> int:
        """Byte offset at which the last tensor ends; what the file's size should be."""
        return max((t.end for t in self.tensors), default=8 + self.header_bytes)


def read_header(path: Path, name: str) -> Header:
    """The header of a local file, called `name` in findings. Raises OSError if the file cannot be
    read.
    """
    with path.open("rb") as stream:
        size = stream.seek(0, 2)

        def fetch(start: int, count: int) -> bytes:
            stream.seek(start)
            return stream.read(count)

        return parse_header(fetch, size, name)


def parse_header(fetch: Callable[[int, int], bytes], size: int, name: str) -> Header:
    """The header of a file of `size` bytes that `fetch(start, count)` reads, locally or by range
    requests.
    """
    if size < 8:
        return _refused(
            name, size, Fault("truncated", f"{name} holds {size} bytes, too few for a header")
        )
    first = fetch(0, 8)
    (length,) = struct.unpack("<Q", first)
    if length > MAX_HEADER_BYTES or length == 0:
        return _refused(
            name, size, Fault("header_invalid", _not_a_header(name, first, length, fetch))
        )
    raw = fetch(8, min(length, size - 8))
    if len(raw) < length:
        if raw[:1] != b"{":
            return _refused(
                name, size, Fault("header_invalid", _not_a_header(name, first, length, fetch))
            )
        message = f"{name} ends inside its own header ({size} bytes, header of {length})"
        return _refused(name, size, Fault("truncated", message, {"expected_at_least": length + 8}))
    document, repeated, fault = _decode(raw, name)
    if fault is not None:
        return _refused(name, size, fault)
    return _check(document, repeated, name, size, int(length))


def _refused(name: str, size: int, fault: Fault) -> Header:
    return Header(name, size, faults=(fault,))


def _not_a_header(name: str, first: bytes, length: int, fetch: Callable[[int, int], bytes]) -> str:
    head = fetch(0, 64)
    if head.startswith(b"version https://git-lfs"):
        return f"{name} is a Git LFS pointer, not the weights"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return f"{name} is a web page, not weights (an error page saved under the shard's name)"
    if first == bytes(8):
        return f"{name} begins with eight zero bytes where the header length belongs"
    return f"{name} announces a header of {length} bytes, which no safetensors file has"


def _decode(raw: bytes, name: str) -> tuple[dict[str, Any], tuple[str, ...], Fault | None]:
    """(document, names given twice, what keeps it from being read)."""
    if (
        raw.count(b"{") > MAX_OBJECTS
        or raw.count(b"[") > 2 * MAX_OBJECTS
        or raw.count(b",") > 10 * MAX_OBJECTS
    ):
        return (
            {},
            (),
            Fault("header_invalid", f"the header of {name} holds more than {MAX_OBJECTS} objects"),
        )
    repeated: tuple[str, ...] = ()
    try:
        document = json.loads(raw.decode("utf-8"))
        if isinstance(document, dict) and _keys(document) != raw.count(b":"):
            repeated = _repeated(raw)
    except (ValueError, RecursionError) as problem:
        reason = "nested too deeply" if isinstance(problem, RecursionError) else str(problem)[:120]
        return {}, (), Fault("header_invalid", f"the header of {name} is not JSON: {reason}")
    if not isinstance(document, dict):
        return {}, (), Fault("header_invalid", f"the header of {name} is not a JSON object")
    return document, repeated, None


def _keys(document: dict[str, Any]) -> int:
    """Keys of the document and of its entries. Each took a colon, so fewer keys than colons may
    mean a name twice.
    """
    return len(document) + sum(len(entry) for entry in document.values() if isinstance(entry, dict))


def _repeated(raw: bytes) -> tuple[str, ...]:
    """Names that the document's own level gives twice; slower than plain parsing by half."""
    last: list[str] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal last
        document = dict(found)
        seen: set[str] = set()
        last = []
        if len(document) != len(found):
            for key, _ in found:
                if key in seen:
                    last.append(key)
                seen.add(key)
        return document

    json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)  # the outermost object is closed last
    return tuple(last)


def _check(
    document: dict[str, Any], repeated: tuple[str, ...], name: str, size: int, length: int
) -> Header:
    faults: list[Fault] = []
    if repeated:
        message = f"{name} names {plural(len(repeated), 'tensor')} twice, first {repeated[0][:200]}"
        faults.append(
            Fault("tensor_duplicate", message, {"tensors": [r[:200] for r in repeated[:20]]})
        )
    metadata = document.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        faults.append(Fault("header_invalid", f"__metadata__ of {name} is not an object"))
        metadata = {}
    tensors: list[Tensor] = []
    base = 8 + length
    for key, entry in document.items():
        if len(faults) == MAX_FAULTS:
            break
        problem = _entry_problem(entry)
        if problem is None:
            begin, end = entry["data_offsets"]
            tensors.append(
                Tensor(key, entry["dtype"], tuple(entry["shape"]), name, base + begin, base + end)
            )
        else:
            faults.append(
                Fault(
                    "header_invalid",
                    f"tensor {key[:200]} of {name}: {problem}",
                    {"tensor": key[:200]},
                )
            )
    if not any(f.id == "header_invalid" for f in faults):
        faults.extend(_coverage(tensors, name, size, base))
    texts = {k: v for k, v in metadata.items() if isinstance(v, str)}
    return Header(name, size, length, tuple(tensors), texts, tuple(faults))


def _naturals(values: list[Any]) -> bool:
    # A bool is no number here.
    return all(type(value) is int and 0 <= value <= MAX_OFFSET for value in values)


def _entry_problem(entry: Any) -> str | None:
    if not isinstance(entry, dict):
        return "its entry is not an object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"unknown dtype {str(dtype)[:40]!r}"
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not _naturals(shape):
        return "its shape is not a list of natural numbers"
    if not isinstance(offsets, list) or len(offsets) != 2 or not _naturals(offsets):
        return "its offsets are not two natural numbers"
    bits = DTYPE_BITS[dtype]
    for dimension in shape:
        bits *= dimension
    if offsets[1] - offsets[0] != (bits + 7) // 8:
        return (
            f"{dtype} {shape} takes {(bits + 7) // 8} bytes, its offsets span"
            f" {offsets[1] - offsets[0]}"
        )
    return None


def _coverage(tensors: list[Tensor], name: str, size: int, base: int) -> list[Fault]:
    position = base
    for tensor in sorted(tensors, key=lambda t: (t.start, t.end)):
        if tensor.start != position:
            kind = (
                "overlaps the one before" if tensor.start < position else "leaves a gap before it"
            )
            return [
                Fault(
                    "header_invalid",
                    f"tensor {tensor.name} of {name} {kind}",
                    {"tensor": tensor.name},
                )
            ]
        position = tensor.end
    if position > size:
        lost = position - size
        cut = [t.name for t in tensors if t.end > size]
        message = f"{name} is {lost} bytes shorter than its header says; {len(cut)} tensors are cut"
        evidence = {
            "path": name,
            "size": size,
            "expected": position,
            "missing_bytes": lost,
            "tensors": cut[:20],
        }
        return [Fault("truncated", message, evidence)]
    if position < size:
        message = f"{name} has {size - position} bytes after its last tensor"
        return [
            Fault("header_invalid", message, {"path": name, "size": size, "expected": position})
        ]
    return []
