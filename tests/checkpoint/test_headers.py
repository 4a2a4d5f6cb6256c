"""safetensors headers: what the format's own library writes is read the same, and nothing hostile
costs memory or time.
"""

from __future__ import annotations

import itertools
import json
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.checkpoint.safetensors import MAX_HEADER_BYTES, Header, parse_header, read_header
from assay.checkpoint.tensors import DTYPE_BITS


def parse(data: bytes, size: int | None = None) -> Header:
    return parse_header(lambda start, count: data[start : start + count], size or len(data), "w")


def file_of(entries: dict[str, Any] | bytes, body: int = 0, length: int | None = None) -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(body)


def entry(
    dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4), **more: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def ids(header: Header) -> list[str]:
    return [f.id for f in header.faults]


def test_what_the_formats_own_library_writes_is_read_the_same(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    import numpy as np
    from safetensors import safe_open

    arrays = {
        "a.weight": np.zeros((3, 5), np.float32),
        "b": np.zeros((), np.float64),
        "c": np.zeros((0, 7), np.int8),
        "ü.x": np.zeros((2, 2, 2), np.float16),
        "flag": np.zeros(9, np.bool_),
        "i": np.zeros(4, np.int64),
    }
    safetensors.save_file(arrays, tmp_path / "w", metadata={"format": "pt"})
    header = read_header(tmp_path / "w", "w")
    assert header.faults == ()
    assert header.metadata == {"format": "pt"}
    assert header.data_end == (tmp_path / "w").stat().st_size
    with safe_open(tmp_path / "w", "np") as theirs:
        found = {t.name: (t.dtype, list(t.shape)) for t in header.tensors}
        assert found == {
            n: (theirs.get_slice(n).get_dtype(), theirs.get_slice(n).get_shape())
            for n in theirs.keys()  # noqa: SIM118
        }
    whole = (tmp_path / "w").read_bytes()
    for tensor in header.tensors:
        assert whole[tensor.start : tensor.end] == arrays[tensor.name].tobytes()


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_has_the_size_that_the_library_gives_it(dtype: str, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors")
    count = 8  # whole bytes for 4 and 6 bits too
    nbytes = count * DTYPE_BITS[dtype] // 8
    (tmp_path / "w").write_bytes(file_of({"t": entry(dtype, [count], [0, nbytes])}, nbytes))
    assert read_header(tmp_path / "w", "w").faults == ()
    try:
        with library.safe_open(tmp_path / "w", "np") as theirs:
            assert list(theirs.keys()) == ["t"]
    except library.SafetensorError as error:
        assert "unknown variant" in str(error)  # a dtype of a newer release than the one installed
    wrong = file_of({"t": entry(dtype, [count], [0, nbytes + 1])}, nbytes + 1)
    assert ids(parse(wrong)) == ["header_invalid"]


@pytest.mark.parametrize(
    ("data", "fault", "words"),
    [
        (b"", "truncated", "0 bytes"),
        (bytes(7), "truncated", "7 bytes"),
        (bytes(16), "header_invalid", "eight zero bytes"),
        (struct.pack("<Q", 1 << 63) + b"{}", "header_invalid", "no safetensors file has"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "header_invalid", "no safetensors file has"),  # noqa: E501
        (file_of(b'{"a', length=1000), "truncated", "inside its own header"),
        (file_of(b"[1, 2]"), "header_invalid", "not a JSON object"),
        (file_of(b"{" * 3), "header_invalid", "not JSON"),
        (file_of(b"[" * 200_000), "header_invalid", "nested too deeply"),
        (file_of(b'{"a":' * 100_000), "header_invalid", "nested too deeply"),
        (file_of(b'{"a": \xff}'), "header_invalid", "not JSON"),
        (file_of(b'{"a": ' + b"9" * 5000 + b"}"), "header_invalid", ""),
        (file_of({"a": 1}), "header_invalid", "not an object"),
        (file_of({"a": {}}), "header_invalid", "unknown dtype"),
        (file_of({"a": entry(dtype="Q4")}, 4), "header_invalid", "unknown dtype"),
        (file_of({"a": entry(dtype=["F32"])}, 4), "header_invalid", "unknown dtype"),
        (file_of({"a": entry(shape="x")}, 4), "header_invalid", "natural numbers"),
        (file_of({"a": entry(shape=[-1])}, 4), "header_invalid", "natural numbers"),
        (file_of({"a": entry(shape=[1.0])}, 4), "header_invalid", "natural numbers"),
        (file_of({"a": entry(shape=[True])}, 4), "header_invalid", "natural numbers"),
        (file_of({"a": entry(shape=[1] * 99)}, 4), "header_invalid", "natural numbers"),
        (file_of({"a": entry(shape=[1 << 61, 1 << 61])}, 4), "header_invalid", "takes"),
        (file_of({"a": entry(offsets=[-4, 0])}, 4), "header_invalid", "two natural numbers"),
        (file_of({"a": entry(offsets=[4, 0])}, 4), "header_invalid", "span -4"),
        (file_of({"a": entry(offsets=[0, 1 << 70])}, 4), "header_invalid", "two natural numbers"),
        (file_of({"a": entry(offsets=[0])}, 4), "header_invalid", "two natural numbers"),
        (file_of({"a": entry(shape=[2])}, 4), "header_invalid", "takes 8 bytes"),
        (file_of({"__metadata__": 3, "a": entry()}, 4), "header_invalid", "__metadata__"),
        (file_of({"a": entry(), "b": entry()}, 4), "header_invalid", "overlaps"),
        (file_of({"a": entry(offsets=[4, 8])}, 8), "header_invalid", "gap"),
        (file_of({"a": entry()}, 3), "truncated", "1 bytes shorter"),
        (file_of({"a": entry()}, 9), "header_invalid", "5 bytes after its last tensor"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "header_invalid", "Git LFS pointer"),  # noqa: E501
        (b"<!DOCTYPE html><html>Access denied</html>", "header_invalid", "web page"),
        (b'<?xml version="1.0"?><Error>AccessDenied</Error>', "header_invalid", "web page"),
    ],
)  # fmt: skip
def test_a_bad_header_is_one_fault(data: bytes, fault: str, words: str) -> None:
    header = parse(data)
    assert ids(header)[:1] == [fault]
    assert words in header.faults[0].message
    assert len(header.faults[0].message) < 400


def test_a_name_given_twice() -> None:
    one = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    assert ids(parse(file_of(b"{" + one + b"," + one + b"}", 4))) == ["tensor_duplicate"]


def test_names_with_colons_and_braces_are_no_repetition() -> None:
    names = {'a:{"b":1}': entry(), "c": entry(offsets=[4, 8])}
    assert parse(file_of({"__metadata__": {"k": "a:b:{"}} | names, 8)).faults == ()
    inner = b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    assert (
        parse(file_of(inner, 4)).faults == ()
    )  # a repeated field is the last one's value, as for the library


@settings(max_examples=200)
@given(names=st.lists(st.sampled_from(["a", "b", 'c":', "d{"]), min_size=1, max_size=6))
def test_every_repetition_is_found(names: list[str]) -> None:
    rows = [
        json.dumps(n) + ":" + json.dumps(entry(offsets=[4 * i, 4 * i + 4]))
        for i, n in enumerate(names)
    ]
    header = parse(file_of(("{" + ",".join(rows) + "}").encode(), 4 * len(names)))
    assert ("tensor_duplicate" in ids(header)) == (len(set(names)) < len(names))


def test_an_empty_header_is_valid() -> None:
    assert parse(file_of({})).faults == ()
    assert parse(file_of({"__metadata__": {"format": "pt"}})).metadata == {"format": "pt"}


def test_truncation_names_the_tensors_that_are_cut() -> None:
    whole = file_of({"a": entry(), "b": entry(offsets=[4, 8])}, 8)
    cut = parse(whole[:-2])
    assert cut.faults[0].evidence["tensors"] == ["b"]
    assert cut.faults[0].evidence["missing_bytes"] == 2
    assert [t.name for t in cut.tensors] == ["a", "b"]


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=200), body=st.integers(0, 30))
def test_arbitrary_bytes_never_raise(raw: bytes, body: int) -> None:
    parse(file_of(raw, body))
    parse(raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(sorted(DTYPE_BITS)) | json_values,
        "shape": st.lists(st.integers(-2, 1 << 64), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-2, 1 << 64), max_size=3) | json_values,
    },
)


@settings(max_examples=300, deadline=None)
@given(
    document=st.dictionaries(st.text(max_size=6), fields | json_values, max_size=5),
    body=st.integers(0, 40),
)
def test_a_header_without_faults_covers_its_file(document: dict[str, Any], body: int) -> None:
    data = file_of(document, body)
    header = parse(data)
    if header.faults:
        return
    assert header.data_end == len(data)
    spans = sorted((t.start, t.end) for t in header.tensors)
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end == start
    for tensor in header.tensors:
        assert 0 <= tensor.nbytes * 8 - tensor.elements * DTYPE_BITS[tensor.dtype] < 8


# What a hostile file may cost. Each runs in a process of its own with a limit on its memory.


HOSTILE = {
    "entries that all are wrong": lambda: file_of(
        b"{" + b",".join(b'"%d":{}' % i for i in range(400_000)) + b"}"
    ),
    "announces 2^60 bytes": lambda: struct.pack("<Q", 1 << 60) + bytes(100),
    "announces 90 MB in a small file": lambda: struct.pack("<Q", 90_000_000) + b"{" + bytes(1000),
    "90 MB of brackets": lambda: file_of(b"[" * 90_000_000),
    "90 MB of empty objects": lambda: file_of(b"{" + b'"name":{},' * 9_000_000 + b'"b":{}}'),
    "90 MB of numbers": lambda: file_of(b'{"a":{"shape":[' + b"0," * 44_000_000 + b"0]}}"),
    "90 MB of spaces": lambda: file_of(b" " * 90_000_000),
    "one name of 90 MB": lambda: file_of(b'{"' + b"x" * 90_000_000 + b'":{}}'),
}


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_costs_neither_memory_nor_time(name: str, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(HOSTILE[name]())
    program = (
        "import sys; from pathlib import Path; from assay.checkpoint.safetensors import"
        " read_header\nh = read_header(Path(sys.argv[1]), 'w'); print(h.faults[0].id,"
        " len(h.faults[0].message))"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "w")],
        capture_output=True, text=True, timeout=240, preexec_fn=limited, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-400:]
    fault, length = done.stdout.split()
    assert fault in {"header_invalid", "truncated"}
    assert int(length) < 400
    assert time.monotonic() - began < 20


def test_a_header_of_a_hundred_thousand_tensors_is_read_quickly(tmp_path: Path) -> None:
    """The largest mixtures of experts have about that many in all their shards."""
    entries = {
        f"model.layers.{i}.weight": entry("BF16", [2, 2], [8 * i, 8 * i + 8])
        for i in range(100_000)
    }
    (tmp_path / "w").write_bytes(file_of(entries, 800_000))
    began = time.monotonic()
    header = read_header(tmp_path / "w", "w")
    assert (len(header.tensors), header.faults) == (100_000, ())
    assert time.monotonic() - began < 20
