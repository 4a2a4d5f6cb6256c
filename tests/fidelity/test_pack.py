"""One file for a reference: what is in it, whose head it takes, and that every change of it is
noticed.
"""

from __future__ import annotations

import json
import struct
import sys
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
from assay.fidelity.metrics.token_statistics import window_statistics
from assay.fidelity.pack.format import head_digest
from assay.fidelity.pack.reader import open_pack, pack_settings, read_pack
from assay.fidelity.pack.writer import PackOptions, write_pack

KEY = b"0123456789abcdef0123456789abcdef"


@pytest.fixture
def pack(tmp_path: Path) -> Any:
    """Makes a pack of three windows, with the options that are given."""
    (tmp_path / "key").write_bytes(KEY + b"\n")
    write(tmp_path / "store")

    def make(**options: Any) -> Path:
        out = tmp_path / "reference.pack"
        report = write_pack(
            PackOptions.of({"source": str(tmp_path / "store"), "out": out, **options})
        )
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
        assert (
            window_statistics(exact, rows).kl.max() <= found.manifest["rounding"]["kld_max"] + 1e-12
        )
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
    save_file(
        {"lm_head.weight": head().weight, "lm_head.bias": head().bias}, model / "b.safetensors"
    )
    assert open_pack(f"pack:{found.path}?head={model}").head is not None


def test_a_head_in_16_bits_and_the_same_one_widened_have_one_digest() -> None:
    narrow = Head(torch.randn(30, 8).to(torch.bfloat16))
    assert head_digest(narrow) == head_digest(Head(narrow.weight.float()))
    assert head_digest(narrow) != head_digest(Head(narrow.weight.float() + 1e-3))
    assert head_digest(narrow) != head_digest(Head(narrow.weight.reshape(8, 30)))


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from assay.fidelity.store.writer import StoreWriter

    writer = StoreWriter(tmp_path / "store", HEADER, head())
    writer.add(window(0), states(0) * 1e6)
    writer.finish()
    options = {"source": str(tmp_path / "store"), "out": tmp_path / "x"}
    with pytest.raises(AssayError, match="do not fit into float16"):
        write_pack(PackOptions.of(options))
    assert (
        write_pack(PackOptions.of({**options, "dtype": "bfloat16"})).results["dtype"] == "bfloat16"
    )


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
        # white space that pads the header, or the spelling of a number in it, carries nothing
        else:
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
    assert read_pack(path, key).signer == read_pack(path).claimed == "HMAC-SHA256"
    assert read_pack(path).signer == ""  # a claim that was not checked names nobody
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


def key_pair(folder: Path, name: str = "pack_key", form: str = "ssh") -> tuple[Path, Path]:
    """Files of a private key and its public half, as ssh-keygen or openssl write them."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private, public = folder / name, folder / f"{name}.pub"
    if form == "ssh":
        kinds = (forms.PrivateFormat.OpenSSH, forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    else:
        kinds = (
            forms.PrivateFormat.PKCS8,
            forms.Encoding.PEM,
            forms.PublicFormat.SubjectPublicKeyInfo,
        )
    private.write_bytes(key.private_bytes(forms.Encoding.PEM, kinds[0], forms.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(kinds[1], kinds[2]) + b"\n")
    return private, public


@pytest.mark.parametrize("form", ["ssh", "pem"])
def test_a_key_pair_signs_and_its_public_half_checks(pack: Any, tmp_path: Path, form: str) -> None:
    private, public = key_pair(tmp_path, form=form)
    _, other = key_pair(tmp_path, "other", form)
    path = pack(key=private)
    assert read_pack(path, public).signer.startswith("Ed25519 key ") and read_pack(path, private)
    assert read_pack(path).claimed == read_pack(path, public).signer
    with pytest.raises(AssayError, match="not signed with this key"):
        read_pack(path, other)
    with pytest.raises(AssayError, match=r"signed by Ed25519 key .* of another kind"):
        read_pack(path, tmp_path / "key")
    with pytest.raises(AssayError, match="signed by HMAC-SHA256, and this key is of another kind"):
        read_pack(pack(key=tmp_path / "key"), public)
    with pytest.raises(AssayError, match="is not signed"):
        read_pack(pack(), public)
    with pytest.raises(AssayError, match="a public key, which checks and cannot sign"):
        pack(key=public)
    # Another signature in place of the first, with its own key beside it, is no signature of this
    # key.
    signed = pack(key=tmp_path / "other")  # the private half of another pair
    with pytest.raises(AssayError, match="not signed with this key"):
        read_pack(signed, public)


def test_the_signature_is_the_one_of_the_standard(tmp_path: Path) -> None:
    """The first two test vectors of RFC 8032, section 7.1."""
    ed = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from assay.fidelity.signature import Key

    secret = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"
    public = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    key = Key(tmp_path, b"", public, ed.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)))
    assert key.sign("r")["ed25519"] == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    key.check("p", "r", key.sign("r"))
    for metadata in (
        {"ed25519": "no hex"},
        {"ed25519": "00" * 64},
        {"ed25519": "", "ed25519_key": "x"},
    ):
        with pytest.raises(AssayError, match="not signed with this key"):
            key.check("p", "r", metadata)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
            "cannot be read as a key",
        ),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n", "cannot be read as a key"),
        (b"ssh-ed25519 nothing", "cannot be read as a key"),
        (b"-----BEGIN CERTIFICATE-----\n", "cannot be read as a key"),
    ],
)
def test_a_damaged_key_is_one_line(pack: Any, tmp_path: Path, content: bytes, said: str) -> None:
    pytest.importorskip("cryptography")
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(AssayError, match=said):
        pack(key=tmp_path / "bad")


def test_locked_and_other_keys_are_named_so(pack: Any, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    def pem(key: Any, lock: Any) -> bytes:
        return bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, lock))

    (tmp_path / "bad").write_bytes(
        pem(ed25519.Ed25519PrivateKey.generate(), forms.BestAvailableEncryption(b"x"))
    )
    with pytest.raises(AssayError, match="locked with a passphrase"):
        pack(key=tmp_path / "bad")
    (tmp_path / "bad").write_bytes(
        pem(ec.generate_private_key(ec.SECP256R1()), forms.NoEncryption())
    )
    with pytest.raises(AssayError, match="no Ed25519 key"):
        pack(key=tmp_path / "bad")


def test_without_the_library_a_key_pair_is_refused_in_one_line(
    pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    (tmp_path / "pair").write_text("ssh-ed25519 AAAA")
    with pytest.raises(AssayError, match="need the package cryptography"):
        pack(key=tmp_path / "pair")


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
    assert (
        invoke(["reference", "pack", "store", "--out", "one.pack", "--key", "key", "--json"]) == 0
    )
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
        (),
        None,
        lambda a, b: None,
        {"label": "x", "states": "float16", **facts},
        {},  # type: ignore[arg-type]
        model_sha256=model_digests(f"hf:{tmp_path}/one"),
    )
    assert reference.is_same(f"hf:{tmp_path}/two?threads=2", facts)
    assert not reference.is_same(f"hf:{tmp_path}/three", facts)
    assert not reference.is_same(f"hf:{tmp_path}/two", {**facts, "dtype": "bfloat16"})


def _public_forms(public: Path, pem: Path) -> dict[str, bytes]:
    """The forms in which a public key is passed around."""
    line = public.read_bytes().strip()
    blob = line.split()[1]
    return {
        "comment": b"# release key\n" + line,
        "rfc4716": b"---- BEGIN SSH2 PUBLIC KEY ----\nComment: x\n"
        + blob
        + b"\n---- END SSH2 PUBLIC KEY ----\n",
        "bom": b"\xef\xbb\xbf" + line,
        "blob": blob + b"\n",
        "authorized_keys": b'no-pty,command="x" ' + line,
        "bag attributes": b"Bag Attributes\n    friendlyName: x\n" + pem.read_bytes(),
        "der in base64": b"".join(pem.read_bytes().splitlines()[1:-1]) + b"\n",
    }


def test_no_form_of_a_public_key_is_taken_as_a_secret(pack: Any, tmp_path: Path) -> None:
    """Who has the public half could sign by it; so every form is a key, or refused."""
    from assay.fidelity.signature import read_key

    _, public = key_pair(tmp_path, "of ssh", "ssh")
    _, pem = key_pair(tmp_path, "of pem", "pem")
    for name, content in _public_forms(public, pem).items():
        file = tmp_path / "form"
        file.write_bytes(content)
        try:
            key = read_key(file)
        except AssayError as error:
            assert "looks like a key" in error.message, name
        else:
            assert key is not None and not key.secret and key.public, name


def test_a_key_with_a_comment_above_it_checks(pack: Any, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    path = pack(key=private)
    public.write_bytes(b"# of the release\n" + public.read_bytes())
    assert read_pack(path, public).signer.startswith("Ed25519 key ")


def test_strange_signatures_are_no_signatures(pack: Any, tmp_path: Path) -> None:
    from assay.fidelity.signature import read_key

    (tmp_path / "secret").write_bytes(KEY)
    key = read_key(tmp_path / "secret")
    assert key is not None
    with pytest.raises(AssayError, match="not signed with this key"):
        key.check("p", "r", {"hmac": "é" * 64})


@pytest.mark.parametrize("path", ["/dev/zero", "/dev", "/no/such/key"])
def test_a_key_is_a_regular_file(path: str) -> None:
    from assay.fidelity.signature import read_key

    with pytest.raises(AssayError, match=r"regular file|does not exist"):
        read_key(Path(path))
