"""A list of digests that goes with a checkpoint: written, read back, compared; and lists that come
from elsewhere.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.checkpoint.manifest import Manifest, dump, load, write
from assay.checkpoint.trusted import Expected
from assay.errors import AssayError
from checkpoint.asking import Ask, finding, statuses

TWO = "model-00002-of-00002.safetensors"
GOOD = "a" * 64

names = st.text(
    st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="\\/"),
    min_size=1,
    max_size=20,
).filter(lambda n: n not in {".", ".."})
entries = st.builds(
    Expected,
    st.just("the manifest"),
    st.text("0123456789abcdef", min_size=64, max_size=64),
    size=st.integers(0, 1 << 50),
)


@settings(max_examples=50)
@given(
    files=st.dictionaries(names, entries, min_size=1, max_size=8),
    revision=st.none() | st.text("0123456789abcdef", min_size=40, max_size=40),
)
def test_what_is_written_is_read_back(
    files: dict[str, Expected], revision: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("m") / "list.json"
    manifest = Manifest(files, "org/name", revision)
    write(path, manifest)
    assert load(path) == manifest
    rows = json.loads(path.read_text(encoding="utf-8"))["files"]
    assert [r["path"] for r in rows] == sorted(files)


def test_the_same_files_give_the_same_bytes_wherever_they_lie(
    ask: Ask, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "else" / "where")
    ask(model, "--write-manifest", tmp_path / "one.json")
    ask(tmp_path / "else" / "where", "--write-manifest", tmp_path / "two.json")
    one, two = (tmp_path / "one.json").read_bytes(), (tmp_path / "two.json").read_bytes()
    assert one == two
    assert str(tmp_path).encode() not in one


def test_written_then_held_against(ask: Ask, model: Path, tmp_path: Path) -> None:
    listing = tmp_path / "list.json"
    code, report = ask(model, "--write-manifest", listing)
    assert code == 0  # nobody was asked to vouch for the files
    assert finding(report, "manifest_written")["title"].endswith("written to list.json")
    assert ask(model)[0] == 3
    code, report = ask(model, "--manifest", listing)
    assert (code, set(statuses(report).values())) == (0, {"verified"})
    data = bytearray((model / TWO).read_bytes())
    data[-1] ^= 1
    (model / TWO).write_bytes(data)
    code, report = ask(model, "--manifest", listing)
    assert (code, statuses(report)[TWO]) == (1, "mismatch")
    (model / TWO).write_bytes(data + b"x")
    code, report = ask(model, "--manifest", listing)
    assert finding(report, "digest_mismatch")["title"].startswith(
        f"{TWO} is {len(data) + 1} bytes long"
    )
    (model / TWO).unlink()
    (model / "more.json").write_text("{}")
    code, report = ask(model, "--manifest", listing)
    assert (code, statuses(report)[TWO], statuses(report)["more.json"]) == (1, "missing", "extra")


def test_weights_that_the_manifest_does_not_know_are_not_verified(
    ask: Ask, model: Path, tmp_path: Path
) -> None:
    listing = tmp_path / "list.json"
    ask(model, "--write-manifest", listing)
    body = json.loads(listing.read_text(encoding="utf-8"))
    body["files"] = [f for f in body["files"] if f["path"] != TWO]
    listing.write_text(json.dumps(body), encoding="utf-8")
    (model / "more.json").write_text("{}")
    code, report = ask(model, "--manifest", listing)
    assert (code, statuses(report)[TWO], statuses(report)["more.json"]) == (
        3,
        "unverified",
        "extra",
    )


def test_a_manifest_beside_the_weights_is_not_a_file_of_the_checkpoint(
    ask: Ask, model: Path
) -> None:
    ask(model, "--write-manifest", model / "list.json")
    code, report = ask(model, "--manifest", model / "list.json")
    assert code == 0
    assert "list.json" not in statuses(report)


def test_the_revision_of_the_manifest_is_reported(ask: Ask, model: Path, tmp_path: Path) -> None:
    listing = tmp_path / "list.json"
    ask(model, "--write-manifest", listing)
    document = json.loads(listing.read_text())
    listing.write_text(json.dumps(document | {"repo": "org/name", "revision": "f" * 40}))
    _, report = ask(model, "--manifest", listing)
    assert report["subject"]["revision"] == "f" * 40
    assert report["subject"]["repo"] == "org/name"


def test_a_list_of_sha256sum_will_do(ask: Ask, model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        "find . -type f | xargs sha256sum",
        shell=True,
        cwd=model,
        capture_output=True,
        text=True,
        check=True,
    )
    (tmp_path / "SHA256SUMS").write_text(done.stdout)
    code, report = ask(model, "--manifest", tmp_path / "SHA256SUMS")
    assert (code, set(statuses(report).values())) == (0, {"verified"})


def test_no_manifest_of_what_could_not_be_read(
    ask: Ask, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay.checkpoint import digests

    def refuse(path: Path, *_: object) -> tuple[str, str]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(digests, "hash_stream", refuse)
    code, report = ask(model, "--write-manifest", tmp_path / "list.json")
    assert code == 2
    assert not (tmp_path / "list.json").exists()
    assert any("no manifest written" in f["title"] for f in report["findings"])


def test_a_manifest_that_cannot_be_written(ask: Ask, model: Path, tmp_path: Path) -> None:
    for place, said in (
        (
            tmp_path / "no" / "such" / "list.json",
            "cannot write the manifest list.json: No such file or directory",
        ),
        (tmp_path, f"cannot write the manifest {tmp_path.name}: Is a directory"),
    ):
        code, report = ask(model, "--write-manifest", place)
        assert (code, report["results"]) == (2, {})  # nothing was hashed first
        assert [f["title"] for f in report["findings"]] == [said]


def row(**changes: object) -> str:
    entry = {"path": "a", "size": 1, "sha256": GOOD} | changes
    return json.dumps(
        {"schema": "assay-manifest/1", "repo": None, "revision": None, "files": [entry]}
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no files"),
        ("{", "not JSON"),
        ("{}", "schema"),
        ('{"schema": "assay-manifest/1", "files": []}', "names no files"),
        ('{"schema": "assay-manifest/9", "files": [1]}', "schema"),
        ('{"schema": "assay-manifest/1", "files": [1]}', "not an object"),
        ("[" * 100_000, "neither JSON"),
        ("hello world", "neither JSON"),
        (f"{GOOD}  /etc/passwd", "outside the folder"),
        (row(path="../x"), "outside the folder"),
        (row(path="/x"), "outside the folder"),
        (row(path="a\\..\\b"), "outside the folder"),
        (row(path=""), "outside the folder"),
        (row(path=3), "lacks a path"),
        (row(sha256="abc"), "64 digits"),
        (row(sha256=None), "64 digits"),
        (row(size=-1), "natural number"),
        (row(size=True), "natural number"),
    ],
)
def test_a_bad_manifest_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(text)
    with pytest.raises(AssayError, match=words) as caught:
        load(path)
    assert "\n" not in caught.value.message
    assert str(tmp_path) not in caught.value.message


def test_binary_and_missing_manifests(ask: Ask, model: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    assert ask(model, "--manifest", tmp_path / "x")[0] == 2
    assert ask(model, "--manifest", tmp_path / "nowhere")[0] == 2


def test_a_manifest_that_knows_no_file_here_proves_nothing(
    ask: Ask, model: Path, tmp_path: Path
) -> None:
    listing = tmp_path / "foreign.sha256"
    listing.write_text("a" * 64 + "  elsewhere.txt\n")
    assert ask(model, "--manifest", listing)[0] == 3
    assert ask(model, "--manifest", listing, "--allow-unverified")[0] == 0


def test_the_text_form_is_one_file_a_line() -> None:
    text = dump(Manifest({"b": Expected("", GOOD, size=2), "a": Expected("", GOOD, size=1)}))
    assert text.splitlines()[1] == f'{{"path": "a", "size": 1, "sha256": "{GOOD}"}},'
