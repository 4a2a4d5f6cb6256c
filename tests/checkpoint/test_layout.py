"""Where a checkpoint may lie: a folder, the Hub cache, a download with its notes, one file; and
what is no checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.checkpoint.layout import locate
from assay.errors import AssayError
from checkpoint.asking import Ask, finding, statuses
from checkpoint.loopback_hub import git_oid
from checkpoint_samples import rewrite

COMMIT, OTHER = "a" * 40, "b" * 40
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def cached(home: Path, model: Path, commit: str = COMMIT, branch: str | None = "main") -> Path:
    """The model as the Hub cache keeps it: blobs by digest, links in a snapshot, a reference."""
    repo = home / "models--org--tiny"
    snapshot = repo / "snapshots" / commit
    (repo / "blobs").mkdir(parents=True, exist_ok=True)
    for file in sorted(p for p in model.rglob("*") if p.is_file()):
        data = file.read_bytes()
        digest = (
            hashlib.sha256(data).hexdigest() if file.suffix == ".safetensors" else git_oid(data)
        )
        (repo / "blobs" / digest).write_bytes(data)
        link = snapshot / file.relative_to(model)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(repo / "blobs" / digest, link.parent))
    if branch is not None:
        reference = repo / "refs" / branch
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
    return repo


# The Hub cache.


def test_the_cache_is_verified_by_its_blobs_and_says_its_commit(
    ask: Ask, model: Path, tmp_path: Path
) -> None:
    repo = cached(tmp_path / "hub", model)
    code, report = ask(repo)
    assert (code, set(statuses(report).values())) == (0, {"verified"})
    subject = report["subject"]
    assert (subject["layout"], subject["repo"], subject["revision"]) == (
        "hf_cache",
        "org/tiny",
        COMMIT,
    )
    assert report["results"]["advice"]["command"] == "vllm serve org/tiny"
    code, report = ask(repo / "snapshots" / COMMIT)
    assert (code, report["subject"]["revision"]) == (0, COMMIT)


def test_a_snapshot_is_recognised_from_inside(
    ask: Ask, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = cached(tmp_path / "hub", model)
    monkeypatch.chdir(repo / "snapshots" / COMMIT)
    assert ask(".")[1]["subject"]["layout"] == "hf_cache"
    (tmp_path / "link").symlink_to(repo / "snapshots" / COMMIT)
    assert ask(tmp_path / "link")[1]["subject"]["revision"] == COMMIT


def test_a_damaged_blob_fails(ask: Ask, model: Path, tmp_path: Path) -> None:
    repo = cached(tmp_path / "hub", model)
    blob = (repo / "snapshots" / COMMIT / TWO).resolve()
    data = bytearray(blob.read_bytes())
    data[-9] ^= 4
    blob.write_bytes(data)
    code, report = ask(repo)
    assert code == 1
    assert finding(report, "digest_mismatch")["evidence"]["source"] == "the Hub cache"


def test_a_blob_that_was_never_finished_is_a_missing_file(
    ask: Ask, model: Path, tmp_path: Path
) -> None:
    repo = cached(tmp_path / "hub", model)
    (repo / "snapshots" / COMMIT / TWO).resolve().unlink()
    code, report = ask(repo)
    assert (code, statuses(report)[TWO]) == (1, "missing")


def test_references_name_snapshots(ask: Ask, model: Path, tmp_path: Path) -> None:
    cached(tmp_path / "hub", model)
    repo = cached(tmp_path / "hub", model, OTHER, "refs/pr/3")
    assert ask(repo)[1]["subject"]["revision"] == COMMIT
    assert ask(repo, "--revision", "refs/pr/3")[1]["subject"]["revision"] == OTHER
    assert ask(repo, "--revision", OTHER)[1]["subject"]["revision"] == OTHER
    code, report = ask(repo, "--revision", "v2")
    assert code == 2
    assert "revision v2 is not in models--org--tiny" in report["findings"][0]["title"]


def test_a_reference_cannot_point_out_of_the_cache(model: Path, tmp_path: Path) -> None:
    repo = cached(tmp_path / "hub", model)
    (tmp_path / "secret").write_text(COMMIT)
    with pytest.raises(AssayError, match="is not in"):
        locate(repo, "../../../secret")


def test_one_snapshot_without_a_reference_will_do_and_two_will_not(
    model: Path, tmp_path: Path
) -> None:
    repo = cached(tmp_path / "hub", model, branch=None)
    assert locate(repo).revision == COMMIT
    cached(tmp_path / "hub", model, OTHER, branch=None)
    with pytest.raises(AssayError, match="is not in"):
        locate(repo)


def test_one_file_of_the_cache_keeps_its_digest(ask: Ask, model: Path, tmp_path: Path) -> None:
    repo = cached(tmp_path / "hub", model)
    code, report = ask(repo / "snapshots" / COMMIT / ONE)
    assert (code, statuses(report)) == (0, {ONE: "verified"})
    assert report["subject"]["revision"] == COMMIT


def test_huggingface_hub_lays_its_cache_out_the_same(model: Path, tmp_path: Path) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    from huggingface_hub import scan_cache_dir

    assert constants is not None
    cached(tmp_path / "hub", model)
    (info,) = scan_cache_dir(tmp_path / "hub").repos
    (revision,) = info.revisions
    assert (info.repo_id, revision.commit_hash) == ("org/tiny", COMMIT)
    assert {f.file_name for f in revision.files} == set(
        locate(tmp_path / "hub" / "models--org--tiny").files
    )


# A download with its notes.


def noted(model: Path, name: str, digest: str, commit: str = COMMIT) -> None:
    note = model / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(f"{commit}\n{digest}\n1767225600.0\n")


def test_the_notes_of_a_download_vouch_for_its_files(ask: Ask, model: Path) -> None:
    for file in model.iterdir():
        data = file.read_bytes()
        shard = file.suffix == ".safetensors"
        noted(model, file.name, hashlib.sha256(data).hexdigest() if shard else git_oid(data))
    code, report = ask(model)
    assert (code, report["subject"]["revision"]) == (0, COMMIT)
    assert not any(".cache" in p for p in statuses(report))
    (model / "config.json").write_text((model / "config.json").read_text().replace("512", "513"))
    code, report = ask(model)
    assert code == 1
    assert finding(report, "digest_mismatch")["evidence"]["source"] == "the download's own record"


def test_broken_notes_vouch_for_nothing(ask: Ask, model: Path) -> None:
    noted(model, ONE, "not a digest")
    (model / ".cache" / "huggingface" / "download" / "x.metadata").write_bytes(b"\xff\x00")
    code, report = ask(model)
    assert (code, report["subject"]["revision"]) == (3, None)


# One file.


def test_one_shard_alone(ask: Ask, model: Path) -> None:
    code, report = ask(model / ONE, "--allow-unverified")
    assert (code, statuses(report)) == (0, {ONE: "unverified"})
    assert report["results"]["tensors"] > 0
    os.truncate(model / ONE, 900)
    assert ask(model / ONE, "--allow-unverified")[0] == 1


def test_one_file_against_a_manifest_of_the_folder(ask: Ask, model: Path, tmp_path: Path) -> None:
    ask(model, "--write-manifest", tmp_path / "list.json")
    code, report = ask(model / ONE, "--manifest", tmp_path / "list.json")
    assert (code, statuses(report)) == (0, {ONE: "verified"})


# Pickles.


def test_pickles_are_listed_hashed_and_never_opened(ask: Ask, model: Path) -> None:
    payload = b"cos\nsystem\n(S'touch " + str(model / "ran").encode() + b"'\ntR."
    (model / "pytorch_model.bin").write_bytes(payload)
    (model / "optimizer.pt").write_bytes(payload)
    code, report = ask(model, "--allow-unverified", "--values")
    assert code == 0
    note = finding(report, "not_examined")
    assert note["severity"] == "info"
    assert note["evidence"]["paths"] == ["optimizer.pt", "pytorch_model.bin"]
    assert "can run code" in note["detail"]
    assert not (model / "ran").exists()
    rows = {f["path"]: f["sha256"] for f in report["results"]["files"]}
    assert rows["pytorch_model.bin"] == hashlib.sha256(payload).hexdigest()


def test_only_pickles_is_a_warning(ask: Ask, model: Path) -> None:
    for shard in (ONE, TWO, "model.safetensors.index.json"):
        (model / shard).unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    code, report = ask(model, "--allow-unverified")
    assert code == 0
    assert finding(report, "not_examined")["severity"] == "warning"


# What is read is bounded, in size and in depth.


def sparse(path: Path, size: int = 3 << 30) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.truncate(size)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors.index.json", "chat_template.jinja"]
)
def test_a_document_of_three_gigabytes_is_not_read(ask: Ask, model: Path, name: str) -> None:
    sparse(model / name)
    code, report = ask(model, "--allow-unverified", "--hash", "none")
    assert code == 1
    assert any(
        words in f["title"] for f in report["findings"] for words in ("bytes long", "is not text")
    )


def test_notes_and_references_of_three_gigabytes_are_not_read(
    ask: Ask, model: Path, tmp_path: Path
) -> None:
    repo = cached(tmp_path / "hub", model)
    sparse(model / ".cache" / "huggingface" / "download" / "config.json.metadata")
    assert ask(model, "--allow-unverified", "--hash", "none")[0] == 0
    sparse(repo / "refs" / "main")
    code, report = ask(repo)
    assert (code, len(report["findings"])) == (2, 1)
    assert "longer than" in report["findings"][0]["title"]


NO_FILE = "it is a device, and the file must be a regular file"


@pytest.mark.parametrize("what", ["zero", "sparse"])
def test_a_manifest_without_end(ask: Ask, model: Path, tmp_path: Path, what: str) -> None:
    listing = Path("/dev/zero") if what == "zero" else tmp_path / "list.json"
    if what == "sparse":
        sparse(listing)
    code, report = ask(model, "--manifest", listing)
    assert code == 2
    assert [f["title"] for f in report["findings"]] == [
        f"cannot use the manifest {listing.name}: "
        + ("it is longer than 67108864 bytes" if what == "sparse" else NO_FILE)
    ]


def test_devices_among_the_files(ask: Ask, model: Path) -> None:
    for name in ("config.json", "added.json"):
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to("/dev/zero")
    code, report = ask(model, "--allow-unverified", "--hash", "none")
    assert code == 2
    assert {f["title"] for f in report["findings"] if "not a regular file" in f["title"]} == {
        "cannot read config.json: not a regular file", "cannot read added.json: not a regular file",
    }  # fmt: skip


@pytest.mark.parametrize("place", ["", ".cache/huggingface/download"])
def test_folders_nested_without_end(ask: Ask, model: Path, place: str) -> None:
    deep = model / place
    deep.mkdir(parents=True, exist_ok=True)
    here = os.open(deep, os.O_RDONLY)
    for _ in range(1500):  # longer than any path may be
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    code, report = ask(model, "--allow-unverified", "--hash", "none")
    said = [f["title"] for f in report["findings"] if "nested deeper" in f["title"]]
    assert (code, len(said)) == ((2, 1) if not place else (0, 0))
    subprocess.run(["rm", "-rf", str(deep / "d")], check=True)


def test_a_document_of_very_many_objects(ask: Ask, model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": [' + "[]," * 4_000_001 + "[]]}")
    code, report = ask(model, "--allow-unverified", "--hash", "none")
    assert (
        code,
        "more than 4000000 objects" in finding(report, "tokenizer_conflict")["title"],
    ) == (1, True)


def test_names_with_endless_numbers(ask: Ask, model: Path) -> None:
    rewrite(
        model,
        lambda t: t | {f"model.layers.{'9' * 5000}.mlp.up_proj.weight": t["model.norm.weight"]},
    )
    assert ask(model, "--allow-unverified", "--hash", "none")[0] in {0, 1}


# Bad input: exit 2 with one line.


def refused(ask: Ask, *words: object) -> str:
    code, report = ask(*words)
    assert code == 2
    errors = [f for f in report["findings"] if f["severity"] == "error"]
    assert len(errors) == 1
    title: str = errors[0]["title"]
    assert errors[0]["id"] == "checkpoint.not_examined"
    assert "\n" not in title
    return title


def test_no_such_path(ask: Ask, tmp_path: Path) -> None:
    assert "no such path" in refused(ask, tmp_path / "nowhere")


def test_a_repository_id_without_hub_is_explained(ask: Ask) -> None:
    _, report = ask("some-org/some-name")
    assert report["findings"][0]["remedies"] == [
        "write hub:some-org/some-name if it is a repository on the Hub"
    ]


def test_an_empty_folder(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is empty" in refused(ask, tmp_path / "empty")


def test_no_config(ask: Ask, model: Path) -> None:
    (model / "config.json").unlink()
    assert "no config.json" in refused(ask, model)
    assert "no config.json" in refused(ask, model, "--allow-unverified")


def test_what_is_no_weight_file(ask: Ask, model: Path) -> None:
    assert "is not a weight file" in refused(ask, model / "config.json")
    assert "neither a folder nor a file" in refused(ask, "/dev/null")


def test_loops_of_links(ask: Ask, tmp_path: Path, model: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert "symbolic links" in refused(ask, tmp_path / "a")
    (model / "loop").symlink_to(model)  # a folder within itself is not walked for ever
    (model / "self").symlink_to(model / "self")
    assert "cannot read self" in refused(ask, model, "--allow-unverified")


def test_a_pipe_in_the_folder_does_not_block(ask: Ask, model: Path) -> None:
    os.mkfifo(model / "pipe")
    assert "cannot read pipe: not a regular file" in refused(ask, model, "--allow-unverified")


def test_a_name_that_is_no_text(ask: Ask, model: Path) -> None:
    try:
        (Path(os.fsdecode(os.fsencode(model) + b"/\xff\xfe.safetensors"))).write_bytes(b"x")
    except OSError:
        pytest.skip("the file system takes UTF-8 names only")
    assert "not UTF-8" in refused(ask, model, "--allow-unverified")


def test_odd_paths(ask: Ask) -> None:
    assert "cannot open" in refused(ask, "a\0b") or "no such path" in refused(ask, "a\0b")
    assert refused(ask, "x" * 5000)


@pytest.fixture
def readable_by_all(model: Path) -> Iterator[Path]:
    """A copy of the model outside the tests' private folder."""
    folder = Path(tempfile.mkdtemp(prefix="assay-test-"))
    shutil.copytree(model, folder / "model")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield folder / "model"
    shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_may_not_be_read(ask: Ask, readable_by_all: Path, what: str) -> None:
    model, root = readable_by_all, os.geteuid() == 0
    ask(model)  # everything is imported now: nobody may read the libraries either
    target = model / ONE if what == "file" else model
    target.chmod(0)
    if root:  # who may read everything
        os.seteuid(65534)
    try:
        code, report = ask(model, "--allow-unverified", "--no-digest-cache")
    finally:
        if root:
            os.seteuid(0)
        target.chmod(0o755)
    assert any("Permission denied" in f["title"] for f in report["findings"])
    assert code == (1 if what == "file" else 2)  # without that shard its tensors are missing
    if what == "file":  # a partial failure still reports the rest
        assert statuses(report)[TWO] == "unverified"
        assert {f["path"]: f["sha256"] for f in report["results"]["files"]}[TWO]


@pytest.mark.parametrize("option", [("--target", "nope"), ("--revision", "0123abc")])
def test_an_option_that_would_say_nothing_is_refused(
    ask: Ask, model: Path, option: tuple[str, str]
) -> None:
    code, report = ask(model, *option)
    assert (code, report["findings"][0]["id"]) == (2, "checkpoint.usage")
    assert report["findings"][0]["remedies"]
