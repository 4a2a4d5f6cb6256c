"""GGUF: the same reading as the format's own package, faults found, hostile files cheap, real files
whole.
"""

from __future__ import annotations

import io
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.checkpoint.gguf.header import MAX_RANK, Gguf, parse_gguf, read_gguf
from assay.checkpoint.gguf.types import TYPES
from assay.runs import cache_dir
from checkpoint.asking import Ask, finding
from checkpoint.gguf_samples import METADATA, Row, gguf, llama_rows, split, text, value, write


def parse(data: bytes) -> Gguf:
    return parse_gguf(io.BytesIO(data), len(data), "w.gguf")


def test_the_formats_own_package_reads_the_same(tmp_path: Path) -> None:
    library = pytest.importorskip("gguf")
    path = write(tmp_path / "w.gguf")
    mine, theirs = read_gguf(path, "w.gguf"), library.GGUFReader(path)
    assert mine.faults == ()
    assert {t.name: (t.type, list(t.shape), t.start, t.end - t.start) for t in mine.tensors} == {
        t.name: (int(t.tensor_type), [int(d) for d in t.shape], int(t.data_offset), int(t.n_bytes))
        for t in theirs.tensors
    }
    for key in METADATA:
        assert mine.metadata[key] == theirs.fields[key].contents(), key


def test_block_sizes_are_those_of_the_formats_own_package() -> None:
    constants = pytest.importorskip("gguf.constants")
    theirs = {int(k): v for k, v in constants.GGML_QUANT_SIZES.items()}
    theirs.pop(
        9
    )  # Q8_1: 36 bytes since its scale became float16, which the package missed; no file stores it
    assert {kind: (TYPES[kind].block, TYPES[kind].nbytes) for kind in theirs} == theirs


def test_a_whole_file_has_no_finding(ask: Ask, tmp_path: Path) -> None:
    code, report = ask(write(tmp_path / "w.gguf"), "--allow-unverified", "--values")
    assert [f["id"] for f in report["findings"]] == ["checkpoint.unverified"]
    assert (code, report["results"]["tensors"]) == (0, 29)


FAULTS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "cut by one byte": ("truncated", lambda p: os.truncate(p, p.stat().st_size - 1)),
    "cut in the middle": ("truncated", lambda p: os.truncate(p, p.stat().st_size // 2)),
    "cut inside the header": ("truncated", lambda p: os.truncate(p, 400)),
    "empty": ("truncated", lambda p: os.truncate(p, 0)),
    "not GGUF": ("header_invalid", lambda p: p.write_bytes(b"GGML" + p.read_bytes()[4:])),
    "web page": ("header_invalid", lambda p: p.write_bytes(b"<!DOCTYPE html>" + bytes(100))),
    "version 9": (
        "header_invalid",
        lambda p: p.write_bytes(b"GGUF" + struct.pack("<I", 9) + p.read_bytes()[8:]),
    ),
    "big-endian": (
        "header_invalid",
        lambda p: p.write_bytes(b"GGUF" + struct.pack(">I", 3) + p.read_bytes()[8:]),
    ),
    "unknown type": (
        "header_invalid",
        lambda p: write(p, [*llama_rows(), ("x", (32,), 5000, bytes(32))]),
    ),
    "rows that are no whole blocks": (
        "header_invalid",
        lambda p: write(p, [*llama_rows(), ("x", (33, 1), 8, bytes(64))]),
    ),
    "five dimensions": (
        "header_invalid",
        lambda p: write(p, [*llama_rows(), ("x", (1,) * (MAX_RANK + 1), 0, bytes(4))]),
    ),
    "one name twice": ("tensor_duplicate", lambda p: write(p, [*llama_rows(), llama_rows()[0]])),
    "odd alignment": ("header_invalid", lambda p: write(p, general__alignment=7)),
    "layer missing": (
        "tensor_missing",
        lambda p: write(p, [r for r in llama_rows() if "blk.1." not in r[0]]),
    ),
    "matrix missing": (
        "tensor_missing",
        lambda p: write(p, [r for r in llama_rows() if r[0] != "blk.1.ffn_up.weight"]),
    ),
    "embedding missing": ("tensor_missing", lambda p: write(p, llama_rows()[1:])),
    "fewer layers said": ("config_conflict", lambda p: write(p, llama__block_count=2)),
    "no architecture": ("config_conflict", lambda p: write(p, general__architecture="")),
    "vocabulary of another model": (
        "tokenizer_conflict",
        lambda p: write(p, tokenizer__ggml__tokens=["a"] * 60),
    ),
    "end token outside": (
        "tokenizer_conflict",
        lambda p: write(p, tokenizer__ggml__eos_token_id=64),
    ),
    "types of tokens too few": (
        "tokenizer_conflict",
        lambda p: write(p, tokenizer__ggml__token_type=[1] * 5),
    ),
    "template that does not parse": (
        "chat_template_invalid",
        lambda p: write(p, tokenizer__chat_template="{% if %}"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(ask: Ask, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "w.gguf")
    expected, damage = FAULTS[name]
    damage(path)
    code, report = ask(path, "--allow-unverified")
    assert code == 1
    assert finding(report, expected)["severity"] == "error"


def test_a_gap_and_an_overlap(tmp_path: Path) -> None:
    rows = llama_rows()
    whole = gguf(METADATA, rows)
    name = text("blk.0.attn_q.weight")
    at = whole.index(name) + len(name) + 4 + 16 + 4
    (offset,) = struct.unpack_from("<Q", whole, at)
    for change, words in ((64, "gap"), (-64, "overlaps")):
        moved = bytearray(whole + bytes(64))
        struct.pack_into("<Q", moved, at, offset + change)
        assert words in parse(bytes(moved)).faults[0].message


def test_a_scale_that_is_no_number_and_a_matrix_of_zero_scales(ask: Ask, tmp_path: Path) -> None:
    rows = llama_rows()
    rows[1] = (*rows[1][:3], b"\x00\x7c" + rows[1][3][2:])
    rows[2] = (*rows[2][:3], bytes(34 * 32))
    code, report = ask(write(tmp_path / "w.gguf", rows), "--allow-unverified", "--values")
    assert code == 1
    assert rows[1][0] in finding(report, "nonfinite")["title"]
    assert rows[2][0] in finding(report, "tensor_constant")["title"]


@pytest.mark.parametrize(
    "changes",
    [{"general__architecture": "clip"}, {"general__type": "adapter"}, {"general__type": "imatrix"}],
    ids=["vision projector", "adapter", "importance matrix"],
)
def test_what_is_no_language_model_is_left_alone(
    ask: Ask, tmp_path: Path, changes: dict[str, Any]
) -> None:
    rows: list[Row] = [("v.patch_embd.weight", (32, 3), 0, struct.pack("<96f", *range(96)))]
    path = write(
        tmp_path / "w.gguf",
        rows,
        tokenizer__ggml__tokens=...,
        tokenizer__chat_template=...,
        **changes,
    )
    code, report = ask(path, "--allow-unverified")
    assert (code, [f["id"] for f in report["findings"]]) == (0, ["checkpoint.unverified"])


# Several files.


def test_a_split_model(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    parts = split(folder)
    code, report = ask(folder, "--allow-unverified", "--values")
    assert (code, [f["id"] for f in report["findings"]]) == (0, ["checkpoint.unverified"])
    assert ask(parts[0], "--allow-unverified")[0] == 0
    parts[1].unlink()
    for where in (folder, parts[0]):
        code, report = ask(where, "--allow-unverified")
        assert (code, finding(report, "shard_missing")["evidence"]["paths"]) == (1, [parts[1].name])


def test_parts_of_two_models(ask: Ask, tmp_path: Path) -> None:
    parts = split(tmp_path)
    parts[2].write_bytes(
        gguf(
            {
                "general.architecture": "llama",
                "split.no": 2,
                "split.count": 3,
                "split.tensors.count": 29,
            },
            llama_rows()[:2],
        )
    )
    code, report = ask(tmp_path, "--allow-unverified")
    assert (code, finding(report, "index_mismatch")["evidence"]["announced"]) == (1, 29)
    parts[2].write_bytes(parts[1].read_bytes())
    assert (
        "says that it is part 2"
        in finding(ask(tmp_path, "--allow-unverified")[1], "index_mismatch")["title"]
    )


# Hostile files.


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300), prefix=st.sampled_from([b"", b"GGUF\3\0\0\0"]))
def test_arbitrary_bytes_never_raise(data: bytes, prefix: bytes) -> None:
    parse(prefix + data)


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 2600), new=st.binary(min_size=1, max_size=8))
def test_a_damaged_header_never_raises(at: int, new: bytes) -> None:
    data = bytearray(gguf(METADATA, llama_rows()))
    data[at : at + len(new)] = new
    result = parse(bytes(data))
    for tensor in result.tensors if not result.faults else ():
        assert 0 <= tensor.start <= tensor.end <= len(data)


def pair(kind: int, body: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", kind) + body


HOSTILE: dict[str, Callable[[], bytes]] = {
    "2^60 tensors": lambda: b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(100),
    "2^60 pairs": lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(100),
    "string of 2^60": lambda: pair(8, struct.pack("<Q", 1 << 60) + bytes(100)),
    "array of 2^60": lambda: pair(9, struct.pack("<IQ", 0, 1 << 60) + bytes(100)),
    "array of 200 MB": lambda: pair(9, struct.pack("<IQ", 0, 200 << 20) + bytes(200 << 20)),
    "array of 20 million empty strings": lambda: pair(
        9, struct.pack("<IQ", 8, 20_000_000) + bytes(160_000_000)
    ),
    "arrays nested deeply": lambda: pair(9, struct.pack("<IQ", 9, 1) * 1000),
    "a million pairs": lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 1_000_000) + bytes(20_000_000),
    "key of 16 MB": lambda: (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(bytes(16 << 20)) + bytes(100)
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_costs_neither_memory_nor_time(name: str, tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_bytes(HOSTILE[name]())
    program = (
        "import sys; from pathlib import Path; from assay.checkpoint.gguf.header import read_gguf\n"
        "g = read_gguf(Path(sys.argv[1]), 'w'); print(g.faults[0].id if g.faults else 'none')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "w.gguf")],
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20)),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-300:]
    assert done.stdout.strip() in {"header_invalid", "truncated"} | (
        {"none"} if "key of" in name else set()
    )


def test_the_value_writer_of_these_tests_is_the_formats() -> None:
    assert value(5) == bytes([4, 0, 0, 0, 5, 0, 0, 0])
    assert value(["a"]) == struct.pack("<IIQQ", 9, 8, 1, 1) + b"a"


# Real files.

FOLDER = cache_dir("gguf")  # before a test moves the cache
REAL = (
    "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    pytest.param(
        "gemma3/gemma-3-270m-Q4_K_M.gguf", marks=pytest.mark.slow
    ),  # 262,144 pieces of a vocabulary
)


@pytest.mark.engine
@pytest.mark.parametrize("name", REAL)
def test_a_real_file_is_whole_and_a_cut_copy_is_not(ask: Ask, tmp_path: Path, name: str) -> None:
    path = FOLDER / name
    if not path.exists():
        pytest.skip("not built here")
    library = pytest.importorskip("gguf")
    code, report = ask(path, "--values", "--allow-unverified")
    assert (code, [f["id"] for f in report["findings"]]) == (0, ["checkpoint.unverified"])
    mine, theirs = read_gguf(path, path.name), library.GGUFReader(path)
    assert {t.name: (t.start, t.end - t.start) for t in mine.tensors} == {
        t.name: (int(t.data_offset), int(t.n_bytes)) for t in theirs.tensors
    }
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:-4096])
    assert finding(ask(tmp_path / "cut.gguf", "--allow-unverified")[1], "truncated")


# Another engine's tensor types, and a draft head that is a whole layer.


def retyped(kind: int, nbytes: int) -> list[Row]:
    """The rows with every matrix of the layers in a type of its own."""
    return [
        (name, dims, kind, bytes(nbytes))
        if name.startswith("blk.") and len(dims) == 2
        else (name, dims, old, data)
        for name, dims, old, data in llama_rows()
    ]


@pytest.mark.parametrize("kind", [4, 36, 97, 139, 206, 340])
def test_types_of_another_engine_are_said_once(ask: Ask, tmp_path: Path, kind: int) -> None:
    path = write(tmp_path / "w.gguf", retyped(kind, 96))
    code, report = ask(path, "--allow-unverified", "--values")
    assert code == 0
    (said,) = [f for f in report["findings"] if f["id"] != "checkpoint.unverified"]
    assert (said["id"], said["evidence"]["types"]) == ("checkpoint.not_examined", [kind])
    assert ("ik_llama.cpp" in said["title"]) is (kind >= 97)
    assert ask(path)[0] == 3


def test_what_can_be_seen_of_another_engines_file_is_still_judged(ask: Ask, tmp_path: Path) -> None:
    rows = [row for row in retyped(139, 96) if row[0] != "blk.1.ffn_up.weight"]
    code, report = ask(write(tmp_path / "w.gguf", rows), "--allow-unverified")
    assert (code, finding(report, "tensor_missing")["evidence"]["tensors"]) == (
        1,
        ["ffn_up.weight"],
    )
    path = write(tmp_path / "x.gguf", retyped(139, 96))
    os.truncate(path, path.stat().st_size // 2)
    assert finding(ask(path, "--allow-unverified")[1], "truncated")


def head_rows(*parts: str) -> list[Row]:
    """A fourth layer that drafts: its glue, and of an ordinary layer the tensors that begin with
    one of `parts`.
    """
    glue = ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    rows: list[Row] = [(f"blk.3.nextn.{n}.weight", (32,), 0, bytes(128)) for n in glue]
    layer = [r for r in llama_rows() if r[0].startswith("blk.2.")]
    return rows + [
        (n.replace("blk.2.", "blk.3."), *rest) for n, *rest in layer if n.startswith(parts, 6)
    ]


@pytest.mark.parametrize("architecture", ["llama", "glm4moe", "deepseek2"])
@pytest.mark.parametrize(
    ("parts", "lost"),
    [
        (("attn_", "ffn_"), None), ((), "attention"), (("ffn_",), "attention"), (("attn_",), "MLP"),
        (("attn_q", "attn_k", "attn_v", "attn_o", "ffn_"), "attn_norm"),
    ],
)  # fmt: skip
def test_a_draft_layer_owes_attention_and_mlp(
    ask: Ask, tmp_path: Path, architecture: str, parts: tuple[str, ...], lost: str | None
) -> None:
    keys = {
        f"{architecture}.block_count": 4,
        f"{architecture}.nextn_predict_layers": 1,
        "general.architecture": architecture,
    }
    path = tmp_path / "w.gguf"
    path.write_bytes(gguf(METADATA | keys, [*llama_rows(), *head_rows(*parts)]))
    code, report = ask(path, "--allow-unverified")
    if lost is None:
        assert (code, report["results"]["mtp"]["status"]) == (0, "ok")
    else:
        assert (code, report["results"]["mtp"]["status"]) == (1, "partial")
        assert any(lost in name for name in finding(report, "mtp_partial")["evidence"]["missing"])
