"""Hash files in parallel: sha256, and git's blob id where that is what the Hub gives.

One thread per file (hashlib releases the interpreter lock), the largest file first so that no core
idles at the end. Digests are remembered: a second run hashes only what changed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from assay.checkpoint import found, noted, plural, some, warned
from assay.errors import AssayError
from assay.runs import Kept
from assay.verdict import Finding

WEIGHTS = (".safetensors", ".gguf")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5", ".onnx", ".npz")


def read_bounded(path: Path, most: int) -> bytes:
    """A file of at most `most` bytes. Raises OSError for a longer one, and reads no more of it than
    that.
    """
    with path.open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is longer than {most} bytes")
    return data


# Digests that were computed before, by path, size, modification time, inode and change time.
#
# The change time is in the key because a file's owner can set the modification time back, but not
# that one. As in git's index, a file that was written in the very moment of hashing is not
# remembered: a later change within the clock's granularity would look the same.

GRANULARITY_NS = 50_000_000
"""Generous bound on how coarse a file system's clock is; Linux' own tick is 1 to 10 ms."""
WORTH_BYTES = 1 << 20
"""A smaller file is hashed faster than its digest is stored."""


class DigestCache:
    """Digests in a folder of the cache (`assay.runs.Kept`); without a folder it remembers nothing.
    Safe to use from threads.
    """

    def __init__(self, folder: Path | None) -> None:
        self._kept = Kept(folder) if folder else None

    def get(self, path: Path, status: os.stat_result) -> tuple[str, str] | None:
        """(sha256, git blob id) if the file is the one that was hashed."""
        known = self._kept.get(_key(path, status)) if self._kept else None
        return None if known is None else (known["sha256"], known["git"])

    def look(self, path: Path) -> tuple[str, str] | None:
        """Like `get`, for a file whose state is not known yet."""
        try:
            return self.get(path, path.stat())
        except OSError:
            return None

    def put(self, path: Path, status: os.stat_result, started: int, sha256: str, git: str) -> None:
        """Remember digests of a file whose hashing began at `started`."""
        if self._kept is None or status.st_size < WORTH_BYTES:
            return
        if max(status.st_mtime_ns, status.st_ctime_ns) > started - GRANULARITY_NS:
            return
        self._kept.put(_key(path, status), {"sha256": sha256, "git": git})


def _key(path: Path, status: os.stat_result) -> list[str | int]:
    return [
        os.fspath(path.absolute()),
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
        status.st_ctime_ns,
    ]


BLOCK = 1 << 20

Progress = Callable[[int], None]
"""Called with the number of bytes just read, from several threads."""


@dataclass(frozen=True)
class Digest:
    """The digests of one file, or the reason why it could not be read."""

    sha256: str | None = None
    git_sha1: str | None = None
    cached: bool = False
    problem: str | None = None


def hash_stream(
    path: Path, size: int, progress: Progress, stop: threading.Event
) -> tuple[str, str]:
    """(sha256, git blob id) of a file. The blob id is sha1 over `blob SIZE\\0` and the bytes.

    A large file gets no blob id (an empty string): the Hub stores it by sha256.
    """
    sha256 = hashlib.sha256()
    git = (
        hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False) if size <= MAX_GIT_BYTES else None
    )
    buffer = bytearray(min(BLOCK, max(size, 1)))
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := stream.readinto(buffer):
            sha256.update(view[:count])
            if git is not None:
                git.update(view[:count])
            progress(count)
            if stop.is_set():
                raise InterruptedError
    return sha256.hexdigest(), git.hexdigest() if git is not None else ""


MAX_GIT_BYTES = 64 << 20
"""Files above this size are never stored as plain git blobs (the Hub's own limit is 10 MB)."""


def hash_bytes(data: bytes) -> Digest:
    """Digests of bytes that are already in memory."""
    git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    return Digest(hashlib.sha256(data).hexdigest(), git.hexdigest())


def hash_files(
    files: Sequence[tuple[str, Path, int]],
    cache: DigestCache,
    digests: dict[str, Digest],
    progress: Progress = lambda count: None,
    workers: int | None = None,
) -> None:
    """Put the digest of each (name, path, size) into `digests`; an unreadable file gets a problem,
    not an exception.

    On an interrupt the digests finished so far are in `digests` and in `cache`, so the next run
    goes on there.
    """
    stop = threading.Event()

    def one(item: tuple[str, Path, int]) -> None:
        name, path, size = item
        try:
            digests[name] = _hash_or_remember(path, size, cache, progress, stop)
        except InterruptedError:
            return
        except OSError as error:
            digests[name] = Digest(problem=error.strerror or str(error))

    ordered = sorted(files, key=lambda item: -item[2])
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        try:
            list(pool.map(one, ordered))
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _hash_or_remember(
    path: Path, size: int, cache: DigestCache, progress: Progress, stop: threading.Event
) -> Digest:
    before = path.stat()
    known = cache.get(path, before)
    if known is not None:
        progress(size)
        return Digest(*known, cached=True)
    started = time.time_ns()
    sha256, git = hash_stream(path, before.st_size, progress, stop)
    after = path.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        return Digest(problem="it changed while it was being read")
    cache.put(path, before, started, sha256, git)
    return Digest(sha256, git)


# Hold the files against the digests that somebody vouches for, and say of each what came of it.

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
    """Digests that somebody vouches for. A `complete` one also says which files there are."""

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
        "path": path, "expected": expected.sha256 or expected.git_sha1, "source": expected.source,
        "actual": digest.sha256 if expected.sha256 else digest.git_sha1,
        "size": size, "expected_size": expected.size,
    }  # fmt: skip
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


# A portable list of digests that goes with a checkpoint, to verify it without a network.
#
# `assay verify DIR --write-manifest FILE` writes it, `--manifest FILE` holds the files against it.
# The lists that `sha256sum` writes are read too.

SCHEMA = "assay-manifest/1"
_SUM_LINE = re.compile(r"^([0-9a-fA-F]{64}) [ *](.+)$")
MAX_BYTES = 64 << 20
"""Of a manifest; one with 100,000 files takes 15 MB."""


_NAME = "the manifest"


@dataclass(frozen=True)
class Manifest:
    """Digests by relative path, and where they came from."""

    files: dict[str, Expected]
    repo: str | None = None
    revision: str | None = None

    def source(self) -> Source:
        """The digests as something that files are held against."""
        return Source(_NAME, self.files, complete=True)


def write(path: Path, manifest: Manifest) -> None:
    """Write the manifest, whole or not at all. Raises AssayError if it cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(dump(manifest), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _unwritable(path, error.strerror) from error


def require_writable(path: Path) -> None:
    """The same error for a place where no file can be, before hours of hashing."""
    if path.is_dir():
        raise _unwritable(path, os.strerror(errno.EISDIR))
    if not path.parent.is_dir():
        raise _unwritable(path, os.strerror(errno.ENOENT))


def _unwritable(path: Path, reason: str | None) -> AssayError:
    return AssayError(
        f"cannot write the manifest {path.name}: {reason}",
        finding_id="checkpoint.not_examined",
        remedy="name a file in a folder that you can write to",
    )


def dump(manifest: Manifest) -> str:
    """The manifest as text: sorted by path, one file a line, the same bytes on every machine."""
    rows = [
        json.dumps({"path": path, "size": entry.size, "sha256": entry.sha256}, ensure_ascii=False)
        for path, entry in sorted(manifest.files.items())
    ]
    head = json.dumps({"schema": SCHEMA, "repo": manifest.repo, "revision": manifest.revision})[:-1]
    return head + ', "files": [\n' + ",\n".join(rows) + "\n]}\n"


def load(path: Path) -> Manifest:
    """Read a manifest or a `sha256sum` list. Raises AssayError with one line if it is neither."""
    try:
        text = read_bounded(path, MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise _bad(path, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise _bad(path, "it is not text") from error
    if not text.lstrip().startswith("{"):
        return _sum_list(path, text)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"it is not JSON ({str(error)[:80]})") from error
    if document.get("schema") != SCHEMA or not isinstance(document.get("files"), list):
        raise _bad(path, f"it does not follow the schema {SCHEMA}")
    files = dict(_entry(path, row) for row in document["files"])
    if not files:
        raise _bad(path, "it names no files")
    repo, revision = document.get("repo"), document.get("revision")
    return Manifest(
        files,
        repo if isinstance(repo, str) else None,
        revision if isinstance(revision, str) else None,
    )


def _entry(path: Path, row: Any) -> tuple[str, Expected]:
    if not isinstance(row, dict):
        raise _bad(path, "an entry is not an object")
    name, digest, size = row.get("path"), row.get("sha256"), row.get("size")
    if (
        not isinstance(name, str)
        or not isinstance(digest, str)
        or not re.fullmatch(r"[0-9a-fA-F]{64}", digest)
    ):
        raise _bad(path, "an entry lacks a path or a sha256 of 64 digits")
    if size is not None and (type(size) is not int or size < 0):
        raise _bad(path, f"the size of {name} is not a natural number")
    return _safe(path, name), Expected(_NAME, digest.lower(), size=size)


def _sum_list(path: Path, text: str) -> Manifest:
    files = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        found = _SUM_LINE.match(line)
        if not found:
            raise _bad(path, "it is neither JSON nor a list of sha256 sums")
        files[_safe(path, found[2].removeprefix("./"))] = Expected(_NAME, found[1].lower())
    if not files:
        raise _bad(path, "it names no files")
    return Manifest(files)


def _safe(path: Path, name: str) -> str:
    """A relative path that stays inside the folder: a manifest comes from elsewhere."""
    parts = PurePosixPath(name)
    if not name or parts.is_absolute() or ".." in parts.parts or "\\" in name or "\0" in name:
        raise _bad(path, f"it names a path outside the folder: {name[:80]!r}")
    return parts.as_posix()


def _bad(path: Path, reason: str) -> AssayError:
    return AssayError(
        f"cannot use the manifest {path.name}: {reason}",
        finding_id="checkpoint.not_examined",
        remedy="write one with `assay verify DIR --write-manifest FILE`",
    )
