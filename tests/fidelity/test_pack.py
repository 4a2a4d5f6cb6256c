"""One file for a reference: what is in it, whose head it takes, and that every change of it is noticed."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file
from test_store import FIRST, HEADER, LENGTH, VOCAB, head, states, window, write

from assay.cli.main import invoke
from assay.engines.scoring import Head, StateRows
from assay.errors import AssayError
from assay.fidelity.metrics import window_statistics
from assay.fidelity.pack import PackOptions, head_digest, open_pack, pack_settings, read_pack, write_pack

KEY = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def pack(tmp_path: Path) -> Any:
    """Makes a pack of three windows, with the options that are given."""
    (tmp_path / "key").write_bytes(KEY + b"\n")
    write(tmp_path / "store")

    def make(**options: Any) -> Path:
        out = tmp_path / "reference.pack"
        report = write_pack(PackOptions.of({"source": str(tmp_path / "store"), "out": out, **options}))
        assert report.verdict.exit_code == 0
        return out

    return make


def test_a_pack_holds_what_the_store_does_in_16_bits(pack: Any) -> None:
    found = read_pack(pack(head=True))
    assert found.windows == tuple(window(i) for i in range(3))
    assert found.header == replace(HEADER, dtype="float16")
    for i, rows in enumerate(found.rows(found.windows)):
        assert torch.equal(rows.states, states(i).to(torch.float16))
        exact = StateRows(window(i), FIRST, states(i), head())
        assert window_statistics(exact, rows).kl.max() <= found.manifest["rounding"]["kld_max"] + 1e-12
    assert found.manifest["rounding"]["kld_mean"] < 1e-6
    assert pack_settings(f"pack:{found.path}") == {
        "windows": 3,
        "length": LENGTH,
        "scored": "second-half",
        "path": "prefill",
    }


def test_the_head_is_in_the_pack_or_known_by_its_digest(pack: Any, tmp_path: Path) -> None:
    assert read_pack(pack(head=True)).head is not None
    found = read_pack(pack())
    assert found.head is None and found.path.stat().st_size < 5000
    with pytest.raises(AssayError, match="holds no output head") as failure:
        found.find_head(SimpleNamespace(head=head(seed=9)))
    assert failure.value.finding_id == "fidelity.pack_head"
    with pytest.raises(AssayError, match="holds no output head"):
        found.find_head(SimpleNamespace())  # an engine in a worker has none to give
    found.find_head(SimpleNamespace(head=head()))
    assert torch.equal(next(found.rows(found.windows[:1])).head.weight, head().weight)

    model = tmp_path / "model"
    model.mkdir()
    save_file({"model.embed_tokens.weight": torch.zeros(VOCAB, 16)}, model / "a.safetensors")
    with pytest.raises(AssayError, match="does not hold the output head"):
        open_pack(f"pack:{found.path}?head={model}")
    save_file({"lm_head.weight": head().weight, "lm_head.bias": head().bias}, model / "b.safetensors")
    assert open_pack(f"pack:{found.path}?head={model}").head is not None


def test_a_head_in_16_bits_and_the_same_one_widened_have_one_digest() -> None:
    narrow = Head(torch.randn(30, 8).to(torch.bfloat16))
    assert head_digest(narrow) == head_digest(Head(narrow.weight.float()))
    assert head_digest(narrow) != head_digest(Head(narrow.weight.float() + 1e-3))
    assert head_digest(narrow) != head_digest(Head(narrow.weight.reshape(8, 30)))


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from assay.fidelity.store import StoreWriter

    writer = StoreWriter(tmp_path / "store", HEADER, head())
    writer.add(window(0), states(0) * 1e6)
    writer.finish()
    options = {"source": str(tmp_path / "store"), "out": tmp_path / "x"}
    with pytest.raises(AssayError, match="do not fit into float16"):
        write_pack(PackOptions.of(options))
    assert write_pack(PackOptions.of({**options, "dtype": "bfloat16"})).results["dtype"] == "bfloat16"


def altered(path: Path, change: Any) -> None:
    """Rewrite the metadata of a pack."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def test_every_flipped_byte_is_noticed(pack: Any) -> None:
    path = pack()
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    places = {0, 3, len(whole) - 1, *(int(i) for i in rng.integers(0, len(whole), 120))}
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(damaged))
        try:
            found = read_pack(path)
        except AssayError as error:
            assert "\n" not in error.message
        else:  # white space that pads the header, or the spelling of a number in it, carries nothing
            path.write_bytes(whole)
            again = read_pack(path)
            assert found.windows == again.windows and torch.equal(found.states, again.states)
            assert found.manifest == again.manifest
    for cut in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(AssayError, match="damaged or altered"):
            read_pack(path)


def test_a_signature_tells_who_packed_it(pack: Any, tmp_path: Path) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    other.write_bytes(b"another key of 32 bytes.........")
    path = pack(key=key)
    assert read_pack(path, key).signed and read_pack(path).signed
    with pytest.raises(AssayError, match="not signed with this key"):
        read_pack(path, other)
    # Who changes the manifest and its hash, but has no key.
    from hashlib import sha256

    def forge(metadata: dict[str, str]) -> None:
        manifest = json.loads(metadata["manifest"])
        manifest["header"]["engine"]["model"] = "another"
        metadata["manifest"] = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
        metadata["sha256"] = sha256(metadata["manifest"].encode()).hexdigest()

    altered(path, forge)
    assert read_pack(path).header.engine["model"] == "another"  # without the key nobody can tell
    with pytest.raises(AssayError, match="not signed with this key"):
        read_pack(path, key)
    with pytest.raises(AssayError, match="is not signed"):
        read_pack(pack(), key)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("pack:", "names no file"),
        ("pack:nothing.pack", "No such file"),
        ("pack:reference.pack?keys=a", "unknown option 'keys'"),
        ("pack:reference.pack?key=short", "fewer than 16 bytes"),
        ("pack:reference.pack?key=other", "not signed with this key"),
        ("pack:altered.pack", "damaged or altered"),
        ("pack:text.pack", "no pack"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    pack: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spec: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "short").write_text("abc")
    (tmp_path / "other").write_text("another key of 32 bytes.........")
    (tmp_path / "text.pack").write_text("no pack at all")
    raw = bytearray(pack(key=tmp_path / "key").read_bytes())
    raw[-20] ^= 4
    (tmp_path / "altered.pack").write_bytes(bytes(raw))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code = invoke(["compare", spec, "hf:./model", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 2 and said in report["findings"][0]["title"]
    assert "\n" not in report["findings"][0]["title"]


def test_the_command_packs_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_bytes(KEY)
    write(tmp_path / "store")
    assert invoke(["reference", "pack", "store", "--out", "one.pack", "--key", "key", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["command"] == "reference pack" and made["results"]["tokens"] == 3 * (LENGTH - FIRST)
    assert invoke(["reference", "pack", "one.pack", "--key", "key", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["results"] == made["results"] and made["results"]["signed"]
    assert invoke(["reference", "pack", "nothing", "--out", "two.pack"]) == 2
    assert invoke(["reference", "pack"]) == 2
    assert "reference pack --help" in capsys.readouterr().out


def test_a_pack_is_no_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["compare", "hf:a", "pack:b"]) == 2
    assert "no model to score" in capsys.readouterr().out


def test_a_strangers_copy_of_the_model_is_the_reference_itself(tmp_path: Path) -> None:
    from assay.fidelity.reference import Reference, model_digests

    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("other" if name == "three" else "same")
    facts = {"engine": "hf", "dtype": "float32"}
    reference = Reference(
        (), None, lambda a, b: None, {"label": "x", "states": "float16", **facts}, {},  # type: ignore[arg-type]
        model_sha256=model_digests(f"hf:{tmp_path}/one"),
    )  # fmt: skip
    assert reference.is_same(f"hf:{tmp_path}/two?threads=2", facts)
    assert not reference.is_same(f"hf:{tmp_path}/three", facts)
    assert not reference.is_same(f"hf:{tmp_path}/two", {**facts, "dtype": "bfloat16"})
