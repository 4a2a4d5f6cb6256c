"""`--repo` and `hub:` against a Hub on loopback: what is held against what, and every way in which
it can go wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from assay.checkpoint import hub_requests as limits
from checkpoint.asking import Ask, finding, statuses
from checkpoint.loopback_hub import LoopbackHub, closed_port
from checkpoint_samples import edit_json, llama

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
REPO = "org/tiny"


@pytest.fixture
def commit(hub: LoopbackHub, model: Path) -> str:
    return hub.upload(REPO, model)


# A local folder against the Hub's digests.


def test_a_whole_folder_is_verified_at_the_commit_that_main_stands_for(
    ask: Ask, model: Path, commit: str
) -> None:
    code, report = ask(model, "--repo", REPO)
    assert code == 0, report["findings"]
    assert set(statuses(report).values()) == {"verified"}
    assert report["subject"]["revision"] == commit
    assert report["subject"]["repo"] == REPO
    assert all(len(f["sha256"]) == 64 for f in report["results"]["files"])


@pytest.mark.parametrize("name", [TWO, "config.json"], ids=["stored by sha256", "stored by git"])
def test_one_flipped_bit_fails(ask: Ask, model: Path, commit: str, name: str) -> None:
    data = bytearray((model / name).read_bytes())
    data[-40] ^= 1
    (model / name).write_bytes(data)
    code, report = ask(model, "--repo", REPO)
    assert code == 1
    assert finding(report, "digest_mismatch")["evidence"]["path"] == name
    assert statuses(report)[name] == "mismatch"


def test_a_moved_branch_is_found_and_an_older_revision_still_verifies(
    ask: Ask, hub: LoopbackHub, model: Path, commit: str, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "newer")
    llama(tmp_path / "newer", seed=5)
    newer = hub.upload(REPO, tmp_path / "newer")
    assert newer != commit
    code, report = ask(model, "--repo", REPO)
    assert (code, report["subject"]["revision"]) == (1, newer)
    assert statuses(report)[ONE] == "mismatch"
    code, report = ask(model, "--repo", REPO, "--revision", commit)
    assert (code, report["subject"]["revision"]) == (0, commit)


def test_branches_and_tags_with_slashes_resolve(
    ask: Ask, hub: LoopbackHub, model: Path, commit: str
) -> None:
    hub.repos[REPO].refs["refs/pr/1"] = commit
    code, report = ask(model, "--repo", REPO, "--revision", "refs/pr/1")
    assert (code, report["subject"]["revision"]) == (0, commit)


def test_missing_and_extra_files_are_named(ask: Ask, hub: LoopbackHub, model: Path) -> None:
    hub.upload(REPO, model, **{"added_tokens.json": b"{}", "sub/more.json": b"{}"})
    (model / "notes.txt").write_text("mine")
    code, report = ask(model, "--repo", REPO)
    assert code == 0  # neither is part of what is served
    assert statuses(report)["notes.txt"] == "extra"
    assert statuses(report)["added_tokens.json"] == "missing"
    assert finding(report, "shard_missing")["severity"] == "warning"
    assert finding(report, "unverified")["severity"] == "warning"


def test_a_missing_shard_fails(ask: Ask, model: Path, commit: str) -> None:
    (model / TWO).unlink()
    code, report = ask(model, "--repo", REPO)
    assert code == 1
    assert statuses(report)[TWO] == "missing"


def test_the_verdict_is_that_of_huggingface_hubs_own_check(
    ask: Ask, hub: LoopbackHub, model: Path, commit: str
) -> None:
    """The same tree, the same files: both must name the same mismatches, missing and
    extra files.
    """
    from huggingface_hub import HfApi

    data = bytearray((model / ONE).read_bytes())
    data[-1] ^= 1
    (model / ONE).write_bytes(data)
    (model / "generation_config.json").unlink()
    (model / "extra.bin").write_bytes(b"x")
    theirs = HfApi(endpoint=hub.url).verify_repo_checksums(REPO, local_dir=model)
    _, report = ask(model, "--repo", REPO)
    mine = statuses(report)
    assert [m["path"] for m in theirs.mismatches] == [p for p, s in mine.items() if s == "mismatch"]
    assert theirs.missing_paths == [p for p, s in mine.items() if s == "missing"]
    assert theirs.extra_paths == [p for p, s in mine.items() if s == "extra"]
    paths = {f.path: f for f in HfApi(endpoint=hub.url).get_paths_info(REPO, [ONE, "config.json"])}
    assert paths[ONE].lfs is not None
    assert finding(report, "digest_mismatch")["evidence"]["expected"] == paths[ONE].lfs.sha256


# On headers alone.


def test_a_remote_checkpoint_is_examined_without_its_bodies(
    ask: Ask, hub: LoopbackHub, model: Path, commit: str
) -> None:
    big = {"pytorch_model.bin": bytes(3_000_000)}
    hub.upload(REPO, model, **big)
    hub.seen.clear()
    code, report = ask(f"hub:{REPO}")
    assert code == 3  # the bodies are not here
    assert statuses(report)[ONE] == "unverified"
    assert statuses(report)["config.json"] == "verified"
    assert report["results"]["tensors"] == 39
    assert [f["id"] for f in report["findings"] if f["severity"] == "error"] == []
    code, report = ask(f"hub:{REPO}", "--allow-unverified")
    assert code == 0
    assert report["results"]["advice"]["command"] == f"vllm serve {REPO}"
    assert not any("pytorch_model.bin" in s.path for s in hub.seen)
    shards = [s for s in hub.seen if s.cdn and s.path.endswith(".safetensors")]
    assert shards
    assert all("range" in s.headers for s in shards)


def test_names_and_shapes_are_those_that_huggingface_hub_reads(
    hub: LoopbackHub, commit: str
) -> None:
    from huggingface_hub import HfApi

    from assay.checkpoint.opening import open_checkpoint

    theirs = HfApi(endpoint=hub.url).get_safetensors_metadata(REPO)
    mine = open_checkpoint(f"hub:{REPO}").checkpoint.tensors
    assert {n: (t.dtype, list(t.shape)) for n, t in mine.items()} == {
        name: (info.dtype, list(info.shape))
        for file in theirs.files_metadata.values()
        for name, info in file.tensors.items()
    }


def test_a_fault_in_a_remote_header_is_found(
    ask: Ask, hub: LoopbackHub, model: Path, tmp_path: Path
) -> None:
    edit_json(model / "config.json", num_hidden_layers=6)
    hub.upload(REPO, model)
    code, report = ask(f"hub:{REPO}", "--allow-unverified")
    assert code == 1
    assert finding(report, "tensor_missing")["evidence"]["layers"] == [4, 5]


def test_a_header_longer_than_the_first_range_is_read_in_full(
    ask: Ask, hub: LoopbackHub, model: Path, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay.checkpoint import hub as reading

    monkeypatch.setattr(reading, "HEAD_BYTES", 64)
    _, report = ask(f"hub:{REPO}", "--allow-unverified")
    assert report["results"]["tensors"] == 39


def test_a_server_that_ignores_ranges_costs_no_more_than_was_asked_for(
    ask: Ask, hub: LoopbackHub, model: Path
) -> None:
    body = (model / ONE).read_bytes() + bytes(32 << 20)
    hub.upload(REPO, model, **{ONE: body})
    hub.twist(rf"/org/tiny/\w+/{ONE}", status=200, body=body)
    began = hub.sent
    code, _ = ask(f"hub:{REPO}", "--allow-unverified")
    assert code == 1  # bytes after the last tensor
    assert hub.sent - began < 16 << 20


def test_a_small_file_that_was_altered_on_the_way_is_a_mismatch(
    ask: Ask, hub: LoopbackHub, model: Path, commit: str
) -> None:
    altered = (model / "config.json").read_bytes().replace(b"10000.0", b"20000.0")
    hub.twist(r"resolve/.*/config\.json", status=200, body=altered)
    code, report = ask(f"hub:{REPO}", "--allow-unverified")
    assert code == 1
    assert finding(report, "digest_mismatch")["evidence"]["path"] == "config.json"


def test_a_manifest_is_not_written_of_what_is_not_here(
    ask: Ask, hub: LoopbackHub, commit: str, tmp_path: Path
) -> None:
    code, report = ask(f"hub:{REPO}", "--write-manifest", tmp_path / "list.json")
    assert code == 2
    assert "are not here" in report["findings"][0]["title"]


# Everything that can go wrong.


@pytest.mark.parametrize(
    ("status", "headers", "code", "words"),
    [
        (401, {"X-Error-Code": "RepoNotFound"}, 2, "denies access (401)"),
        (403, {"X-Error-Code": "GatedRepo"}, 2, "denies access (403)"),
        (404, {"X-Error-Code": "RepoNotFound"}, 2, "no such repository"),
        (429, {"Retry-After": "0"}, 3, "limits the rate"),
        (429, {"Retry-After": "3600"}, 3, "limits the rate"),
        (429, {"RateLimit": '"api";r=0;t=300'}, 3, "limits the rate"),
        (500, {}, 2, "status 500"),
        (503, {"Retry-After": "0"}, 2, "status 503"),
        (503, {"Retry-After": "Fri, 31 Dec 2027 23:59:59 GMT"}, 2, "status 503"),
    ],
)
@pytest.mark.parametrize(
    "where", ["/api/models/[^/]+/[^/]+/revision", "/tree/"], ids=["info", "tree"]
)
def test_a_status_is_one_line_and_its_exit_code(
    ask: Ask, hub: LoopbackHub, commit: str, where: str, status: int, headers: dict[str, str], code: int, words: str  # noqa: E501
) -> None:  # fmt: skip
    hub.twist(where, status=status, headers=headers)
    began = time.monotonic()
    got, report = ask(f"hub:{REPO}")
    if status == 404 and "revision" in where:
        assert got == 3  # a mirror without model info still serves trees
        return
    assert got == code
    assert words in report["findings"][0]["title"]
    assert "\n" not in report["findings"][0]["title"]
    assert len(hub.seen) <= 6
    assert time.monotonic() - began < 30


def test_a_hiccup_is_tried_again(ask: Ask, hub: LoopbackHub, model: Path, commit: str) -> None:
    hub.twist("/tree/", status=503, times=1, headers={"Retry-After": "0"})
    hub.twist("resolve/.*/config.json", status=502, times=1)
    hub.twist(TWO, status=500, times=1)
    assert ask(f"hub:{REPO}", "--allow-unverified")[0] == 0


def test_an_unknown_revision(ask: Ask, commit: str) -> None:
    code, report = ask(f"hub:{REPO}", "--revision", "v9")
    assert code == 2
    assert "no revision v9" in report["findings"][0]["title"]


def test_an_unknown_repository(ask: Ask, hub: LoopbackHub) -> None:
    code, report = ask("hub:org/nowhere")
    assert code == 2
    assert "org/nowhere" in report["findings"][0]["title"]


@pytest.mark.parametrize("name", ["a b", "a/b/c", "../x", "-x/y", ""])
def test_what_is_no_repository_id_is_refused_before_any_request(
    ask: Ask, hub: LoopbackHub, name: str
) -> None:
    code, report = ask(f"hub:{name}")
    assert code == 2
    assert "is not a repository id" in report["findings"][0]["title"]
    assert hub.seen == []


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[1, 2]", b'[{"type": "file"}]', b"null"])
def test_an_answer_that_is_not_the_api(
    ask: Ask, hub: LoopbackHub, commit: str, body: bytes
) -> None:
    hub.twist("/tree/", status=200, body=body, headers={"Content-Type": "application/json"})
    code, report = ask(f"hub:{REPO}")
    assert code == 2
    assert "cannot read org/tiny" in report["findings"][0]["title"]


def test_a_silent_hub_is_inconclusive(
    ask: Ask, hub: LoopbackHub, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 0.5)
    hub.twist("/api/models", delay=20)
    began = time.monotonic()
    code, report = ask(f"hub:{REPO}")
    assert code == 3
    assert "did not answer" in report["findings"][0]["title"]
    assert time.monotonic() - began < 15


def test_a_shard_whose_bytes_stop_short_is_asked_for_again_and_then_named(
    ask: Ask, hub: LoopbackHub, commit: str
) -> None:
    hub.twist(ONE, cut=100, times=1)
    assert ask(f"hub:{REPO}", "--allow-unverified")[0] == 0
    hub.twist(ONE, cut=100)
    code, report = ask(f"hub:{REPO}", "--allow-unverified")
    assert code == 2
    assert "cannot read org/tiny" in report["findings"][0]["title"]


def test_a_file_listed_but_not_served(ask: Ask, hub: LoopbackHub, commit: str) -> None:
    hub.twist("resolve/.*/config.json", status=404, headers={"X-Error-Code": "EntryNotFound"})
    code, report = ask(f"hub:{REPO}", "--allow-unverified")
    assert code == 1
    assert "config.json cannot be read" in finding(report, "config_conflict")["title"]


def test_nobody_listens(
    ask: Ask, hub: LoopbackHub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_port() as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        code, report = ask(f"hub:{REPO}")
        assert code == 2
        assert "cannot be reached" in report["findings"][0]["title"]
        # What can be examined without the Hub still is.
        code, report = ask(model, "--repo", REPO)
    assert code == 2
    assert set(statuses(report).values()) == {"unverified"}
    assert all(f["sha256"] for f in report["results"]["files"])
    assert report["results"]["tensors"] == 39


def test_a_broken_checkpoint_fails_even_where_the_hub_is_away(
    ask: Ask, hub: LoopbackHub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(model / TWO, 5000)
    with closed_port() as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        code, report = ask(model, "--repo", REPO)
    assert code == 1
    assert finding(report, "truncated")


# Secrets.


def test_a_private_repository_wants_the_token_and_the_cdn_never_sees_it(
    ask: Ask, hub: LoopbackHub, model: Path, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_" + "s" * 34
    code, report = ask(f"hub:{REPO}", "--allow-unverified")
    assert code == 2
    assert report["findings"][0]["remedies"] == ["log in with `hf auth login`"]
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.seen.clear()
    code, report = ask(f"hub:{REPO}", "--allow-unverified")
    assert code == 0
    assert hub.token not in json.dumps(report)
    assert any(s.cdn for s in hub.seen)
    assert all("authorization" not in s.headers for s in hub.seen if s.cdn)


# As a program.


def program(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "assay", "verify", *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_a_network_the_program_says_one_line_and_no_more(offline: str) -> None:
    pytest.importorskip("huggingface_hub")
    with closed_port() as url:
        done = program("hub:org/name", HF_ENDPOINT=url, HF_HUB_OFFLINE=offline)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr == ""
    assert sum("annot read org/name" in line for line in done.stdout.splitlines()) == 1
