"""KKTV files and golden streams: what was written once is read the same for good."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from codec_cases import SITES

from assay.errors import AssayError
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.codecs.stream import Block, Stream, from_bytes, to_bytes
from assay_lab.kv.kktv import read_kktv, write_kktv
from assay_lab.kv.spec import parse_recipe

GOLDEN = Path(__file__).parent / "kv_streams"
GOLDEN_SPECS = {
    "identity": "identity",
    "bf16": "bf16",
    "fp8": "fp8",
    "int": "int(bits=3, group=8, residual=2)",
    "hadamard": "sinks(n=2)+hadamard(bits=3.5)",
    "lattice": "lattice(lattice=D4, q=4)",
    "outliers": "outliers+mean(of=block)+hadamard(bits=2)",
}


def ramp() -> torch.Tensor:
    """[3, 21, 64] without a random number: multiples of 1/32 in −4 … 4."""
    values = (torch.arange(3 * 21 * 64) * 7919 % 257 - 128).float() / 32
    return values.reshape(3, 21, 64)


@pytest.mark.parametrize("name", GOLDEN_SPECS)
def test_golden_streams(name: str) -> None:
    codec = parse_recipe(GOLDEN_SPECS[name]).fit(Samples(SITES["k64"]))
    stream = (GOLDEN / f"{name}.akvs").read_bytes()
    fresh = codec.encode(ramp())
    if name in ("identity", "bf16", "fp8", "int"):
        assert fresh == stream
    # Sums in another order may round a factor to its other neighbour in fp16.
    assert len(fresh) == len(stream)
    torch.testing.assert_close(codec.decode(stream), codec.decode(fresh), rtol=2e-3, atol=2e-3)
    wanted = (
        ramp() if name == "identity" else torch.from_numpy(np.load(GOLDEN / "decoded.npz")[name])
    )
    torch.testing.assert_close(codec.decode(stream), wanted, rtol=1e-6, atol=1e-6)
    assert from_bytes(stream).tokens == 21


@pytest.mark.parametrize(
    "name", sorted(p.stem for p in GOLDEN.glob("*.npz") if p.stem != "decoded")
)
def test_streams_of_version_0_1_0_decode_to_its_values(name: str) -> None:
    """Each file holds a stream of 40 tokens, its tables and what 0.1.0 (commit ba7355e) decoded, by
    `kv_streams/make.py`.
    """
    with np.load(GOLDEN / f"{name}.npz") as kept:
        found = dict(kept)
    tables = {
        name.removeprefix("table."): t for name, t in found.items() if name.startswith("table.")
    }
    codec = parse_recipe(str(found["spec"])).restore(LayerStream("k", 1, 4, 2, 24), tables)
    back = codec.decode(found["stream"].tobytes())
    torch.testing.assert_close(back, torch.from_numpy(found["decoded"]), rtol=1e-5, atol=1e-5)


def test_the_stream_by_hand() -> None:
    import zlib

    stream = Stream("bf16", 1, 2, 7, (Block(3, False, b"abc"), Block(1, True, b"z")))
    front = struct.pack("<4sHHIIII", b"AKVS", 1, 4, 1, 2, 2, 7) + b"bf16"
    front += struct.pack("<III", 3, 3, zlib.crc32(b"abc"))
    front += struct.pack("<III", 1 + 2**31, 1, zlib.crc32(b"z"))
    data = front + struct.pack("<I", zlib.crc32(front)) + b"abcz"
    assert to_bytes(stream) == data
    assert from_bytes(data) == stream


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_words(data: bytes) -> None:
    with pytest.raises(AssayError):
        from_bytes(data)
    with pytest.raises(AssayError):
        from_bytes(b"AKVS\x01\x00" + data)


def test_a_later_version_is_named() -> None:
    data = to_bytes(Stream("bf16", 1, 2, 0, ()))
    with pytest.raises(AssayError, match="version 9"):
        from_bytes(data[:4] + b"\x09\x00" + data[6:])


@given(n=st.integers(0, 5), d=st.integers(1, 7))
def test_kktv_round_trip(tmp_path_factory: pytest.TempPathFactory, n: int, d: int) -> None:
    path = tmp_path_factory.mktemp("kktv") / "x.kktv"
    x = np.arange(n * d, dtype=np.float32).reshape(n, d) / 3
    write_kktv(path, x)
    np.testing.assert_array_equal(read_kktv(path), x)
    assert path.stat().st_size == 24 + 4 * n * d


def test_kktv_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "x.kktv"
    path.write_bytes(
        bytes.fromhex("56544b4b 01000000 0100000000000000 02000000 00000000 0000803f 000000c0")
    )
    assert read_kktv(path).tolist() == [[1.0, -2.0]]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "less than the 24"),
        (b"\0" * 24, "no KKTV file"),
        (struct.pack("<IIQII", 0x4B4B5456, 2, 0, 4, 0), "version 2"),
        (struct.pack("<IIQII", 0x4B4B5456, 1, 2, 4, 0) + b"\0" * 31, "need 56"),
        (struct.pack("<IIQII", 0x4B4B5456, 1, 2**60, 4, 0), "need"),
    ],
)
def test_wrong_kktv_files(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "x.kktv"
    path.write_bytes(data)
    with pytest.raises(AssayError, match=why):
        read_kktv(path)
    with pytest.raises(AssayError, match="cannot be read"):
        read_kktv(tmp_path / "missing")
    with pytest.raises(AssayError, match="matrix"):
        write_kktv(path, np.zeros(3))
