"""The evidence of a doctor in one file: reports, logs, texts, environment, digests; secrets and
home paths removed.

A bundle is a tar archive, compressed by zstd where the package `zstandard` is installed and by xz
elsewhere (the name then ends in `.tar.xz`). `manifest.json` holds the SHA-256 of every other file.
"""

from __future__ import annotations

import getpass
import hashlib
import io
import json
import os
import re
import socket
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from assay.environment import VERSION, describe
from assay.errors import AssayError
from assay.runs import tar_of
from assay.serving.diagnosis import Diagnosis
from assay.serving.launch import gpus
from assay.serving.symptoms import Observation, see
from assay.verdict import Finding, Report, Severity, Table, Verdict, jsonable

FORM = "assay-bundle/1"
_MOST_BYTES = 256 << 20
_HASHED = 1 << 30
_ZSTD = b"\x28\xb5\x2f\xfd"
_SECRETS = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}|\bsk-[A-Za-z0-9_-]{8,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bAKIA[0-9A-Z]{16}|\bxox[abp]-[\w-]{10,}|"
    r"(?i:bearer\s+)[\w.~+/=-]{8,}"
)
_NAMED = re.compile(
    r"(?i)(--[\w-]*(?:api-key|token|secret|password)\s+|"
    r"(?:api[-_]?key|token|secret|passw(?:or)?d|authorization)[\"']?\s*[=:]\s*[\"']?)([^\s\"',}\]]{4,})"
)
_SECRET_NAMES = re.compile(r"(?i)key|token|secret|passw|credential")


class Scrubber:
    """Takes secrets, home paths and names of this machine out of text."""

    def __init__(self, command_words: tuple[str, ...] = ()) -> None:
        found = {
            v: "<removed>" for n, v in os.environ.items() if _SECRET_NAMES.search(n) and len(v) >= 8
        }
        for flag, value in pairwise(command_words):
            if (
                _SECRET_NAMES.search(flag)
                and flag.startswith("--")
                and "token" not in flag[-10:].replace("hf-token", "")
            ):
                found[value] = "<removed>"
        home = str(Path.home())
        if len(home) > 2:
            found[home] = "~"
        with suppress(OSError):
            if len(name := socket.gethostname()) >= 4 and name != "localhost":
                found[name] = "<host>"
        with suppress(OSError, KeyError, ImportError):
            if len(user := getpass.getuser()) >= 3 and user not in ("root", "user"):
                found[f"/{user}/"] = "/<user>/"
        self._found = sorted(found.items(), key=lambda item: -len(item[0]))

    def text(self, text: str) -> str:
        """The text without them."""
        for value, instead in self._found:
            text = text.replace(value, instead)
        text = re.sub(r"/(?:home|Users)/[^/\s\"':]+", "~", text)
        text = _SECRETS.sub("<removed>", text)
        return _NAMED.sub(
            lambda m: (
                m[0]
                if m[2].isdigit() or m[2] in ("null", "None", "true", "false")
                else f"{m[1]}<removed>"
            ),
            text,
        )


def write_bundle(path: Path, report: Report, found: Diagnosis) -> Path:
    """Write the bundle and return its path; AssayError where it cannot be written."""
    command = found.command
    words = (*command.start, *command.fixed, *(w for s in command.settings for w in s.words))
    scrub = Scrubber(words)
    files: dict[str, str] = {
        "report.json": json.dumps(report.to_json(), ensure_ascii=False, indent=1),
        "report.html": report.to_html(),
        "environment.json": json.dumps(jsonable(describe() | {"gpu": gpus()}), indent=1),
        "checkpoint.json": json.dumps(_digests(command.model), indent=1),
        "options.json": json.dumps(jsonable(found.options.facts()), indent=1),
    }
    observations = []
    for number, start in enumerate(found.starts):
        log = f"logs/{number:03}.log"
        files[log] = start.observation.log
        body = start.observation.to_json() | {"log": log}
        observations.append(
            {
                "settings": sorted(start.configuration),
                "index": start.index,
                "state": start.seen.state,
                "bad": dict(start.seen.bad),
                "observation": body,
            }
        )
    files["starts.json"] = json.dumps(
        jsonable(
            {
                "rules": sorted(found.rules),
                "slower": found.options.slower,
                "all": sorted(found.all),
                "starts": observations,
            }
        ),
        ensure_ascii=False,
    )
    raw = {name: scrub.text(text).encode("utf-8", "replace") for name, text in files.items()}
    manifest = {
        "format": FORM,
        "assay": VERSION,
        "verdict": report.verdict.value,
        "files": {
            n: {"sha256": hashlib.sha256(b).hexdigest(), "size": len(b)} for n, b in raw.items()
        },
    }
    raw = {"manifest.json": json.dumps(manifest, indent=1).encode(), **raw}
    path, content = _compressed(path, tar_of(raw))
    try:
        path.write_bytes(content)
    except OSError as error:
        raise AssayError(
            f"cannot write the bundle {path}: {error.strerror}",
            finding_id="server.bundle",
            remedy="name another file",
        ) from error
    return path


def _compressed(path: Path, raw: bytes) -> tuple[Path, bytes]:
    try:
        import zstandard
    except ImportError:
        import lzma

        stem = path.name.removesuffix(".zst").removesuffix(".tar")
        return path.with_name(f"{stem}.tar.xz"), lzma.compress(raw)
    return path, zstandard.ZstdCompressor(level=9).compress(raw)


def _digests(model: str | None) -> list[dict[str, Any]]:
    """Names, sizes and SHA-256 of the checkpoint's files; of very large ones the size only."""
    path = Path(model).expanduser() if model else None
    if path is None or not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            size = file.stat().st_size
            digest = (
                hashlib.file_digest(file.open("rb"), "sha256").hexdigest()
                if size <= _HASHED
                else None
            )
            found.append({"path": file.name, "size": size, "sha256": digest})
    return found


# Read a bundle.


def read_bundle(path: Path) -> dict[str, bytes]:
    """The files of a bundle; AssayError for anything else. Nothing is written to the disk."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    try:
        if raw.startswith(_ZSTD):
            import zstandard

            raw = zstandard.ZstdDecompressor().decompressobj().decompress(raw)
        else:
            import lzma

            raw = lzma.LZMADecompressor().decompress(raw, max_length=_MOST_BYTES)
        if len(raw) > _MOST_BYTES:
            raise ValueError("it is too large")
        with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
            members = [m for m in tar.getmembers() if m.isfile()]
            files = {m.name: (tar.extractfile(m) or io.BytesIO()).read() for m in members}
        if json.loads(files["manifest.json"])["format"] != FORM:
            raise ValueError("another format")
    except ImportError as error:
        raise AssayError(
            f"{path} is compressed by zstd, which this Python cannot read",
            finding_id="server.bundle", remedy="pip install zstandard",
        ) from error  # fmt: skip
    except Exception as error:  # decompressors and tarfile raise many kinds
        raise _unreadable(path, str(error) or type(error).__name__) from error
    return files


def _unreadable(path: Path, why: str) -> AssayError:
    return AssayError(
        f"{path} is no bundle that can be read: {why}",
        finding_id="server.bundle",
        remedy="name what assay doctor --bundle wrote",
    )


def _report(files: Mapping[str, bytes]) -> dict[str, Any]:
    found = json.loads(files["report.json"])
    if not isinstance(found, dict):
        raise ValueError("report.json is no report")
    return found


def show_bundle(path: Path) -> Report:
    """What a bundle holds: its report's verdict and findings, and its files."""
    files = read_bundle(path)
    try:
        report = _report(files)
        findings = [
            Finding(**f | {"severity": Severity(f["severity"])}) for f in report["findings"]
        ]
        verdict = Verdict(report["verdict"])
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, str(error)) from error
    rows = [(name, f"{len(body):,}") for name, body in files.items()]
    return Report(
        command="bundle",
        verdict=verdict,
        subject={"bundle": str(path), **report.get("subject", {})},
        findings=findings,
        results=report["results"],
        environment=report.get("environment") or {},
        blocks=(Table("Files", ("file", "bytes"), rows, frozenset({1})),),
    )


def verify_bundle(path: Path) -> Report:
    """Hold every file against the manifest, and judge the kept starts again: the same states, the
    same verdict?
    """
    files = read_bundle(path)
    findings: list[Finding] = []
    try:
        listed = json.loads(files["manifest.json"])["files"]
        for name in sorted({*listed, *files} - {"manifest.json"}):
            body = files.get(name)
            if (
                body is None
                or name not in listed
                or hashlib.sha256(body).hexdigest() != listed[name]["sha256"]
            ):
                what = (
                    "is missing"
                    if body is None
                    else "is not listed"
                    if name not in listed
                    else "was changed"
                )
                findings.append(Finding("server.bundle_changed", Severity.ERROR, f"{name} {what}"))
        stated = _report(files)
        rows, again = _judged_again(json.loads(files["starts.json"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    for row in rows:
        if row[2] != row[3]:
            title = (
                f"{row[0]}, start {row[1]}: the bundle says {row[2]}, its evidence says {row[3]}"
            )
            findings.append(Finding("server.bundle_rejudged", Severity.ERROR, title))
    fails = bool(findings)
    return Report(
        command="bundle",
        verdict=Verdict.FAIL if fails else Verdict.PASS,
        subject={"bundle": str(path)},
        findings=findings,
        results={
            "files": len(files),
            "stated_verdict": stated.get("verdict"),
            "starts": again,
            "guilty": stated["results"].get("guilty"),
        },
        blocks=(
            Table("Starts, judged again", ("configuration", "start", "stated", "again"), rows),
        ),
        summary=(
            ""
            if fails
            else (
                f"{len(files)} files are as they were written, and {len(rows)} starts are judged as"
                " stated."
            )
        ),
    )


def _judged_again(
    kept: Mapping[str, Any],
) -> tuple[list[tuple[str, str, str, str]], list[dict[str, Any]]]:
    starts = kept["starts"]
    base: Observation | None = None
    rows: list[tuple[str, str, str, str]] = []
    again: list[dict[str, Any]] = []
    for start in starts:
        seen = Observation.from_json(start["observation"])
        rules = set(start["bad"]) - {"start"} if start["state"] == "bad" else set(kept["rules"])
        state: str = see(seen, base, rules, kept["slower"]).state
        if base is None and not start["settings"] and not seen.failed:
            base = seen
            if state == "undecided":
                state = start["state"]
        rows.append(
            (
                ", ".join(start["settings"]) or "baseline",
                str(start["index"] + 1),
                start["state"],
                state,
            )
        )
        again.append({"settings": start["settings"], "stated": start["state"], "again": state})
    return rows, again


__all__ = ["FORM", "Scrubber", "read_bundle", "show_bundle", "verify_bundle", "write_bundle"]
