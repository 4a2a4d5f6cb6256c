"""Compare files with trusted digests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from assay.checkpoint.digests import PICKLES, Digest
from assay.checkpoint.findings import found, noted, plural, some, warned
from assay.verdict import Finding

Status = Literal["verified", "mismatch", "missing", "extra", "unverified"]

_DECORATION = {
    "README.md",
    ".gitattributes",
    ".gitignore",
    "LICENSE",
    "LICENSE.txt",
    "USE_POLICY.md",
    "NOTICE",
}

_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".md", ".webp", ".mp4")


@dataclass(frozen=True)
class Expected:
    """What one file should be, as `source` says: a sha256, or git's blob id for a small file of the
    Hub.
    """

    source: str
    sha256: str | None = None
    git_sha1: str | None = None
    size: int | None = None


@dataclass(frozen=True)
class Source:
    """Digests of one source. A `complete` source also says which files there are."""

    name: str
    files: Mapping[str, Expected]
    complete: bool


@dataclass(frozen=True)
class FileResult:
    """One row of `results.files`."""

    path: str
    size: int | None
    sha256: str | None
    status: Status
    against: str | None = None


def recorded_source(name: str, digests: Mapping[str, str]) -> Source:
    """Digests the Hub gave at download time (64 digits: sha256, 40: git blob id)."""
    files = {
        path: (
            Expected(name, sha256=digest) if len(digest) == 64 else Expected(name, git_sha1=digest)
        )
        for path, digest in digests.items()
    }
    return Source(name, files, complete=False)


def matters(path: str) -> bool:
    """Whether the file takes part in what a server answers; a README does not."""
    name = PurePosixPath(path).name
    return name not in _DECORATION and not name.lower().endswith(_PICTURES)


def judge(
    files: Mapping[str, int],
    digests: Mapping[str, Digest],
    sources: Sequence[Source],
    dangling: Sequence[str] = (),
    loaded: Collection[str] = (),
    accepted: bool = False,
) -> tuple[list[FileResult], list[Finding]]:
    """A result for every file, and findings for those that are wrong, missing, extra or unverified.

    A file that a complete list does not know is extra; one of `loaded`, which the model is made of,
    is unverified. Files without a digest are only noted if the user `accepted` them.
    """
    results: list[FileResult] = []
    findings: list[Finding] = []
    complete = [s for s in sources if s.complete]
    for path, size in files.items():
        digest = digests.get(path, Digest())
        expected = [s.files[path] for s in sources if path in s.files]
        wrong = [e for e in expected if _differs(e, digest, size)]
        status: Status = "unverified"
        if wrong:
            status = "mismatch"
            findings.append(_mismatch(path, size, digest, wrong[0]))
        elif any(_agrees(e, digest) for e in expected):
            status = "verified"
        elif complete and not expected and path not in loaded:
            status = "extra"
        against = expected[0].source if expected else None
        results.append(FileResult(path, size, digest.sha256, status, against))
    wanted = {path: e for s in complete for path, e in s.files.items()}
    gone = sorted((set(wanted) | set(dangling)) - set(files))
    for path in gone:
        entry = wanted.get(path)
        results.append(
            FileResult(
                path,
                entry.size if entry else None,
                None,
                "missing",
                entry.source if entry else None,
            )
        )
    findings.extend(_missing(gone, files))
    findings.extend(_loose(results, complete, accepted))
    return sorted(results, key=lambda r: r.path), findings


def _differs(expected: Expected, digest: Digest, size: int) -> bool:
    if expected.size is not None and expected.size != size:
        return True
    if expected.sha256 and digest.sha256:
        return expected.sha256 != digest.sha256
    return bool(expected.git_sha1 and digest.git_sha1 and expected.git_sha1 != digest.git_sha1)


def _agrees(expected: Expected, digest: Digest) -> bool:
    if expected.sha256:
        return expected.sha256 == digest.sha256
    return bool(expected.git_sha1) and expected.git_sha1 == digest.git_sha1


def _mismatch(path: str, size: int, digest: Digest, expected: Expected) -> Finding:
    evidence: dict[str, Any] = {
        "path": path,
        "expected": expected.sha256 or expected.git_sha1,
        "source": expected.source,
        "actual": digest.sha256 if expected.sha256 else digest.git_sha1,
        "size": size,
        "expected_size": expected.size,
    }
    if expected.size is not None and expected.size != size:
        title = f"{path} is {size} bytes long, {expected.source} says {expected.size}"
        causes = [
            "the download stopped early or was resumed wrongly",
            "the file belongs to another revision",
        ]
    else:
        title = f"the digest of {path} is not the one that {expected.source} gives"
        causes = [
            "bytes were damaged on the way or on disk",
            "the file belongs to another revision or was edited",
        ]
    remedies = [f"delete {path} and download it again, then verify once more"]
    write = found if matters(path) else warned
    return write("digest_mismatch", title, causes=causes, remedies=remedies, **evidence)


def _missing(gone: Sequence[str], files: Mapping[str, int]) -> list[Finding]:
    has_safetensors = any(f.endswith(".safetensors") for f in files)

    def needed(path: str) -> bool:
        if path == "config.json" or path.endswith(".safetensors.index.json"):
            return True
        weights = (
            (".safetensors", ".gguf") if has_safetensors else (".safetensors", ".gguf", *PICKLES)
        )
        return "/" not in path and path.endswith(weights) and not path.startswith("consolidated")

    findings = []
    needful = [path for path in gone if needed(path)]
    if needful:
        title = f"{plural(len(needful), 'file')} of the checkpoint missing: {some(needful)}"
        remedy = "download the missing files again"
        findings.append(found("shard_missing", title, paths=needful, remedies=[remedy]))
    rest = [path for path in gone if not needed(path) and matters(path)]
    if rest:
        title = f"{plural(len(rest), 'file')} of the revision not here: {some(rest)}"
        detail = (
            "Weights are complete; a server may still want these (a tokenizer, a template, other"
            " formats)."
        )
        findings.append(warned("shard_missing", title, detail=detail, paths=rest))
    return findings


def _loose(
    results: Sequence[FileResult], complete: Sequence[Source], accepted: bool
) -> list[Finding]:
    findings = []
    extra = [r.path for r in results if r.status == "extra"]
    if extra:
        names = " and ".join(s.name for s in complete)
        title = f"{plural(len(extra), 'file')} that {names} does not know: {some(extra)}"
        write = warned if any(matters(p) for p in extra) else noted
        findings.append(
            write(
                "unverified", title, paths=extra, remedies=["remove them if nobody put them there"]
            )
        )
    loose = [r.path for r in results if r.status == "unverified"]
    if loose:
        title = f"{plural(len(loose), 'file')} with no digest to hold against: {some(loose)}"
        remedies = ["give --repo ORG/NAME (the Hub's digests) or --manifest FILE"]
        if not accepted:
            remedies.append("accept it knowingly with --allow-unverified")
        findings.append(
            (noted if accepted else warned)("unverified", title, paths=loose, remedies=remedies)
        )
    return findings
