"""Find the files of a local checkpoint: a folder, a file, a snapshot of the Hub cache."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from assay.checkpoint.digests import WEIGHTS, read_bounded
from assay.errors import AssayError

_SKIPPED_FOLDERS = {".git", "__pycache__"}

_COMMIT = re.compile(r"[0-9a-f]{40}")

_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

MAX_DEPTH, MAX_FILES = 32, 100_000

MAX_NOTE_BYTES = 1 << 16


@dataclass(frozen=True)
class LocalFile:
    """One file of the checkpoint: `path` is relative with `/`, `real` where the bytes are."""

    path: str
    real: Path
    size: int


@dataclass(frozen=True)
class Layout:
    """Where a local checkpoint lies. `problems` holds (path, reason) of files that could not be
    reached.
    """

    kind: str
    root: Path
    files: dict[str, LocalFile]
    repo: str | None = None
    revision: str | None = None
    problems: tuple[tuple[str, str], ...] = ()
    dangling: tuple[str, ...] = ()
    recorded: dict[str, str] = field(default_factory=dict)
    """Digest that the Hub gave at download time, by path: a sha256 (64 digits) or a git blob id
    (40).
    """


_VIEWS = ("/proc", "/sys", "/dev")
"""Folders without files: what is read there has no end, or no size."""
_REMEDY = "give a folder, a .gguf file or hub:ORG/NAME"


def unreadable(message: str, remedy: str = "") -> AssayError:
    """The error for a subject that cannot be examined at all."""
    return AssayError(message, finding_id="checkpoint.not_examined", remedy=remedy)


def locate(path: Path, revision: str | None = None) -> Layout:
    """The layout of a local path. Raises AssayError with one line if there is nothing to
    examine.
    """
    try:
        path.stat()
        if path.is_file():
            return _single_file(path)
        if not path.is_dir():
            raise unreadable(f"{path} is neither a folder nor a file", _REMEDY)
        if any(path.resolve().is_relative_to(view) for view in _VIEWS):
            raise unreadable(f"{path} is a view of the system, no folder of files", _REMEDY)
        return _folder(path, revision)
    except FileNotFoundError as error:
        remedy = _REMEDY
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
            remedy = f"write hub:{path} if it is a repository on the Hub"
        raise unreadable(f"no such path: {path}", remedy) from error
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise unreadable(f"cannot open {path}: {reason}", _REMEDY) from error


def _folder(path: Path, revision: str | None) -> Layout:
    root = path.resolve()
    if (root / "snapshots").is_dir() and (root / "blobs").is_dir():
        return _snapshot(_cached_snapshot(root, revision))
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        return _snapshot(root)
    files, problems, dangling = _walk(root)
    if not files and not problems and not dangling:
        raise unreadable(f"{path} is empty", "download the checkpoint first")
    recorded, commit = _download_records(root)
    return Layout("folder", root, files, None, commit, tuple(problems), tuple(dangling), recorded)


def _single_file(path: Path) -> Layout:
    if path.suffix not in WEIGHTS:
        raise unreadable(
            f"{path.name} is not a weight file that assay reads",
            "give a folder, a .gguf or a .safetensors file",
        )
    real = path.resolve()
    file = LocalFile(path.name, real, real.stat().st_size)
    around = path.parent.resolve()  # where the link lies, not where the bytes are
    recorded, repo, commit = _blob_digest(file), None, None
    if recorded and around.parent.name == "snapshots":
        repo, commit = _identity(around)
    elif not recorded:
        noted, commit = _download_records(around)
        recorded = {path.name: noted[path.name]} if path.name in noted else {}
    kind = path.suffix.removeprefix(".")
    return Layout(kind, path.parent, {path.name: file}, repo, commit, recorded=recorded)


def _cached_snapshot(repo: Path, revision: str | None) -> Path:
    """The snapshot folder of a cached repository that a revision (default `main`) stands for."""
    snapshots = sorted(p for p in (repo / "snapshots").iterdir() if p.is_dir())
    wanted = revision or "main"
    reference = repo / "refs" / wanted
    commit = wanted
    if ".." not in wanted and reference.is_file():
        commit = read_bounded(reference, MAX_NOTE_BYTES).decode("utf-8", "replace").strip()
    for snapshot in snapshots:
        if snapshot.name == commit:
            return snapshot
    if revision is None and len(snapshots) == 1:
        return snapshots[0]
    names = ", ".join(p.name[:12] for p in snapshots) or "none"
    message = f"revision {wanted} is not in {repo.name} (snapshots: {names})"
    raise unreadable(message, "give --revision COMMIT")


def _snapshot(root: Path) -> Layout:
    """A snapshot of the Hub cache: each file links to a blob whose name is the digest the Hub
    gave.
    """
    files, problems, dangling = _walk(root)
    if not files and not dangling:
        raise unreadable(f"the snapshot {root.name} is empty", "download the checkpoint first")
    recorded: dict[str, str] = {}
    for file in files.values():
        recorded |= _blob_digest(file)
    repo, commit = _identity(root)
    return Layout("hf_cache", root, files, repo, commit, tuple(problems), tuple(dangling), recorded)


def _blob_digest(file: LocalFile) -> dict[str, str]:
    """The digest that the Hub cache names a file's bytes by."""
    blob = file.real.name
    known = file.real.parent.name == "blobs" and _DIGEST.fullmatch(blob)
    return {file.path: blob} if known else {}


def _identity(snapshot: Path) -> tuple[str | None, str | None]:
    """(repository, commit) of a snapshot of the Hub cache, as its folders say."""
    folder = snapshot.parent.parent.name
    repo = (
        folder.removeprefix("models--").replace("--", "/", 1)
        if folder.startswith("models--")
        else None
    )
    return repo, snapshot.name if _COMMIT.fullmatch(snapshot.name) else None


def _walk(root: Path) -> tuple[dict[str, LocalFile], list[tuple[str, str]], list[str]]:
    """All files below `root`; folders that are links are not followed, so a loop cannot trap it."""
    files: dict[str, LocalFile] = {}
    problems: list[tuple[str, str]] = []
    dangling: list[str] = []

    def failed(error: OSError) -> None:
        where = Path(error.filename) if error.filename else root
        path = where.relative_to(root).as_posix() if where != root else "."
        problems.append((path, error.strerror or str(error)))

    for at, subfolders, names in os.walk(root, onerror=failed):
        folder = Path(at)
        if len(files) + len(names) > MAX_FILES:
            problems.append(
                (folder.relative_to(root).as_posix(), f"more than {MAX_FILES} files lie here")
            )
            break
        if subfolders and len(folder.relative_to(root).parts) >= MAX_DEPTH:
            problems.append(
                (folder.relative_to(root).as_posix(), f"folders nested deeper than {MAX_DEPTH}")
            )
            subfolders.clear()
        subfolders[:] = sorted(s for s in subfolders if not _skipped(folder / s, root))
        for name in names:
            entry = folder / name
            relative = entry.relative_to(root).as_posix()
            if not _is_text(relative):
                problems.append((ascii(relative)[1:-1], "its name is not UTF-8"))
                continue
            try:
                real = entry.resolve(strict=True)
                status = real.stat()
            except FileNotFoundError:
                dangling.append(relative)
                continue
            except (
                OSError,
                RuntimeError,
            ) as error:  # RuntimeError: a loop of links on Python 3.11 and 3.12
                problems.append(
                    (relative, getattr(error, "strerror", None) or "a loop of symbolic links")
                )
                continue
            if real.is_file():
                files[relative] = LocalFile(relative, real, status.st_size)
            elif not real.is_dir():
                problems.append((relative, "not a regular file"))
    return dict(sorted(files.items())), problems, sorted(dangling)


def _is_text(name: str) -> bool:
    """Whether a file name can be written into a report or a manifest."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _skipped(folder: Path, root: Path) -> bool:
    return folder.name in _SKIPPED_FOLDERS or folder == root / ".cache" / "huggingface"


def _download_records(root: Path) -> tuple[dict[str, str], str | None]:
    """What `hf download --local-dir` noted beside the files: digests by path, and the commit if it
    is one.
    """
    folder = root / ".cache" / "huggingface" / "download"
    recorded: dict[str, str] = {}
    commits: set[str] = set()
    for name, note in _walk(folder)[0].items() if folder.is_dir() else ():
        if not name.endswith(".metadata") or note.size > MAX_NOTE_BYTES:
            continue
        lines = read_bounded(note.real, MAX_NOTE_BYTES).decode("utf-8", "replace").splitlines()
        if len(lines) >= 2 and _COMMIT.fullmatch(lines[0]) and _DIGEST.fullmatch(lines[1]):
            recorded[name.removesuffix(".metadata")] = lines[1]
            commits.add(lines[0])
    return recorded, commits.pop() if len(commits) == 1 else None
