"""Read a bundle within bounds, show what it holds, and verify it: digests, and every start judged
again.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.bounded_json import join_halves, loads
from assay.errors import AssayError
from assay.files import read_bounded
from assay.serving.bundle import FORM
from assay.serving.symptoms import Observation, see
from assay.verdict import Finding, Report, Severity, Table, Verdict, worst

MOST_BYTES = 256 << 20
"""The longest archive that is read, and the longest that is unpacked."""
MOST_FILES = 20_000
_ZSTD = b"\x28\xb5\x2f\xfd"
_REMEDY = "name what assay doctor --bundle wrote"
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What a report of another shape raises where it is read."""


def read_bundle(path: Path) -> dict[str, bytes]:
    """The files of a bundle, by name. Nothing is written to the disk.

    Raises:
        AssayError: The file is no bundle, or unpacks to more than `MOST_BYTES`.
    """
    raw = read_bounded(
        path, MOST_BYTES, what="a bundle", finding_id="server.bundle", remedy=_REMEDY
    )
    try:
        files = dict(_members(_unpacked(raw)))
        manifest = loads(files["manifest.json"])
        if manifest["format"] != FORM:
            raise ValueError("another format")
    except ImportError as error:
        raise AssayError(
            f"{path} is compressed by zstd, which this Python cannot read",
            finding_id="server.bundle",
            remedy="pip install zstandard",
        ) from error
    except Exception as error:  # decompressors and tarfile raise many kinds
        raise _unreadable(path, str(error) or type(error).__name__) from error
    return files


def _unpacked(raw: bytes) -> bytes:
    """The tar archive in a compressed one; ValueError where it is longer than a bundle can be."""
    if raw.startswith(_ZSTD):
        import zstandard

        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)) as reader:
            found: bytes = reader.read(MOST_BYTES + 1)
    else:
        found = lzma.LZMADecompressor().decompress(raw, max_length=MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise ValueError(f"it unpacks to more than {MOST_BYTES:,} bytes")
    return found


def _members(raw: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of every regular file of an archive. A sparse one claims more than is there,
    so it is refused.
    """
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        for number, member in enumerate(tar):
            if number >= MOST_FILES:
                raise ValueError(f"it holds more than {MOST_FILES:,} files")
            if member.issparse() or member.size > len(raw):
                raise ValueError(f"{member.name} claims more bytes than the archive has")
            if member.isfile() and (file := tar.extractfile(member)) is not None:
                yield join_halves(member.name), file.read()


def _unreadable(path: Path, why: str) -> AssayError:
    return AssayError(
        f"{path} is no bundle that can be read: {why}", finding_id="server.bundle", remedy=_REMEDY
    )


@dataclass(frozen=True)
class Stated:
    """The report that a bundle holds, read."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    subject: Mapping[str, Any]
    results: Mapping[str, Any]
    environment: Mapping[str, Any]


def _stated(files: Mapping[str, bytes]) -> Stated:
    found = loads(files["report.json"])
    findings = tuple(_finding(f) for f in found["findings"])
    return Stated(
        Verdict(found["verdict"]),
        findings,
        dict(found.get("subject") or {}),
        dict(found["results"]),
        dict(found.get("environment") or {}),
    )


def _finding(data: Mapping[str, Any]) -> Finding:
    """A finding as it was written; every field has the type that reports draw."""
    return Finding(
        str(data["id"]),
        Severity(data["severity"]),
        str(data["title"]),
        str(data.get("detail") or ""),
        evidence=dict(data.get("evidence") or {}),
        causes=tuple(map(str, data.get("causes") or ())),
        remedies=tuple(map(str, data.get("remedies") or ())),
        references=tuple(map(str, data.get("references") or ())),
    )


def show_bundle(path: Path) -> Report:
    """What a bundle holds: its report's verdict and findings, and its files.

    Raises:
        AssayError: The file is no bundle.
    """
    files = read_bundle(path)
    try:
        stated = _stated(files)
    except _WRONG as error:
        raise _unreadable(path, f"report.json: {error}") from error
    rows = [(name, f"{len(body):,}") for name, body in files.items()]
    return Report(
        command="bundle",
        verdict=stated.verdict,
        subject={"bundle": str(path), **stated.subject},
        findings=stated.findings,
        results=stated.results,
        environment=stated.environment,
        blocks=(Table("Files", ("file", "bytes"), rows, frozenset({1})),),
    )


def verify_bundle(path: Path) -> Report:
    """Compare every file with the manifest, and judge the kept starts again: the same states?

    The verdict is inconclusive where there is no start to judge. Digests are not signed, which a
    finding says: they show damage, not who wrote the bundle.

    Raises:
        AssayError: The file is no bundle.
    """
    files = read_bundle(path)
    try:
        findings = list(_changed(files))
        stated = _stated(files)
        rows, again = _judged_again(loads(files["starts.json"]))
    except _WRONG as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    for row in rows:
        if row[2] != row[3]:
            title = (
                f"{row[0]}, start {row[1]}: the bundle says {row[2]}, its evidence says {row[3]}"
            )
            findings.append(Finding("server.bundle_rejudged", Severity.ERROR, title))
    verdicts = [Verdict.FAIL if findings else Verdict.PASS]
    if not rows:
        verdicts.append(Verdict.INCONCLUSIVE)
        findings.append(
            Finding(
                "server.bundle_empty",
                Severity.WARNING,
                "the bundle holds no start, so nothing was judged again",
                remedies=("ask for the bundle of a doctor that launched something",),
            )
        )
    findings.append(_UNSIGNED)
    verdict = worst(verdicts)
    return Report(
        command="bundle",
        verdict=verdict,
        subject={"bundle": str(path)},
        findings=findings,
        results={
            "files": len(files),
            "stated_verdict": stated.verdict.value,
            "starts": again,
            "guilty": stated.results.get("guilty"),
        },
        blocks=(
            Table("Starts, judged again", ("configuration", "start", "stated", "again"), rows),
        ),
        summary=(
            f"{len(files)} files are as they were written, and {len(rows)} starts are judged as"
            " stated."
            if verdict is Verdict.PASS
            else ""
        ),
    )


_UNSIGNED = Finding(
    "server.bundle_unsigned",
    Severity.INFO,
    "the digests are not signed: who changed a file could have changed its digest too",
    remedies=("take the bundle from somebody you trust, or sign the file itself",),
)


def _changed(files: Mapping[str, bytes]) -> Iterator[Finding]:
    """A finding for every file that is not as the manifest lists it."""
    listed = loads(files["manifest.json"])["files"]
    for name in sorted({*listed, *files} - {"manifest.json"}):
        body = files.get(name)
        if body is None:
            what = "is missing"
        elif name not in listed:
            what = "is not listed"
        elif hashlib.sha256(body).hexdigest() != listed[name]["sha256"]:
            what = "was changed"
        else:
            continue
        yield Finding("server.bundle_changed", Severity.ERROR, f"{name} {what}")


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
