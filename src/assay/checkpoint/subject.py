"""The checkpoint as the rules see it: documents, headers and tensors, wherever the bytes are; and
how one is opened.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from assay.checkpoint import hub
from assay.checkpoint.digests import WEIGHTS, read_bounded
from assay.checkpoint.documents import INDEX, NESTED, TABLES, Document, Nonsense, clean
from assay.checkpoint.safetensors import Header, Tensor, modules, read_header
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


_REMEDY = "give a folder, a .gguf file or hub:ORG/NAME"


def unreadable(message: str, remedy: str = "") -> AssayError:
    """The error for a subject that cannot be examined at all."""
    return AssayError(message, finding_id="checkpoint.not_examined", remedy=remedy)


def locate(path: Path, revision: str | None = None) -> Layout:
    """The layout of a local path. Raises AssayError with one line if there is nothing to examine."""
    try:
        path.stat()
        if path.is_file():
            return _single_file(path)
        if not path.is_dir():
            raise unreadable(f"{path} is neither a folder nor a file", _REMEDY)
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
    """A snapshot of the Hub cache: each file links to a blob whose name is the digest the Hub gave."""
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


MAX_DOCUMENT_BYTES = 128 << 20
MAX_OBJECTS = 4_000_000
"""Objects and lists of one document; a tokenizer with half a million merges has as many lists."""


@dataclass(frozen=True)
class BrokenDocument:
    """A JSON file that is there and cannot be read as an object."""

    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint.

    `files` gives the size of every file by its relative path; `read` returns the bytes of a small
    one; `headers` are those of the safetensors files that belong to the model (an index decides,
    where there is one).
    """

    kind: str
    files: Mapping[str, int]
    read: Callable[[str], bytes]
    headers: Mapping[str, Header] = field(default_factory=dict)
    stray: frozenset[str] = frozenset()
    """Weight files that the index does not name: engines do not load them."""
    _documents: dict[str, tuple[Document, list[Nonsense]] | BrokenDocument | None] = field(
        default_factory=dict, repr=False, compare=False
    )

    def document(self, name: str) -> Document | BrokenDocument | None:
        """A JSON file without the values that are nonsense; None if it is not there."""
        if name not in self._documents:
            self._documents[name] = self._load(name)
        found = self._documents[name]
        return found[0] if isinstance(found, tuple) else found

    def nonsense(self, name: str) -> list[Nonsense]:
        """The values of a JSON file that are not what their keys take."""
        self.document(name)
        found = self._documents[name]
        return found[1] if isinstance(found, tuple) else []

    def object(self, name: str) -> Document:
        """Like `document`, with an empty object for a file that is missing or broken."""
        found = self.document(name)
        return found if isinstance(found, dict) else {}

    def text(self, name: str) -> str | None:
        """A small text file, or None if it is not there or not UTF-8."""
        if name not in self.files or self.files[name] > MAX_DOCUMENT_BYTES:
            return None
        try:
            return self.read(name).decode("utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def _load(self, name: str) -> tuple[Document, list[Nonsense]] | BrokenDocument | None:
        if name not in self.files:
            return None
        if self.files[name] > MAX_DOCUMENT_BYTES:
            return BrokenDocument(f"it is {self.files[name]} bytes long")
        try:
            raw = self.read(name)
            if raw.count(b"{") + raw.count(b"[") > MAX_OBJECTS:
                return BrokenDocument(f"it holds more than {MAX_OBJECTS} objects")
            document = json.loads(raw.decode("utf-8"))
        except OSError as error:
            return BrokenDocument(error.strerror or str(error))
        except RecursionError:
            return BrokenDocument("it is nested too deeply")
        except ValueError as error:
            return BrokenDocument(str(error)[:120])
        if not isinstance(document, dict):
            return BrokenDocument("it is not an object")
        return clean(document, TABLES.get(name, {}))

    @cached_property
    def config(self) -> Document:
        """`config.json`, empty if there is none."""
        return self.object("config.json")

    @cached_property
    def text_config(self) -> Document:
        """The configuration of the language model, where the config nests one; else the config
        itself.
        """
        return next((nested for key in NESTED if (nested := self.config.get(key))), self.config)

    @cached_property
    def model_type(self) -> str:
        """`model_type` of the language model, empty if the config gives none."""
        return self.text_config.get("model_type") or ""

    @cached_property
    def weight_map(self) -> dict[str, str] | None:
        """Shard by tensor name as the index has it, or None if there is no usable index."""
        return self.object(INDEX).get("weight_map")

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that an engine would load, by name; of a doubled one, the last."""
        return {
            tensor.name: tensor
            for file, header in self.headers.items()
            if file not in self.stray
            for tensor in header.tensors
        }

    @cached_property
    def modules(self) -> dict[str, dict[str, Tensor]]:
        """`tensors` grouped by module, then by parameter."""
        return modules(self.tensors.values())

    @cached_property
    def prefix(self) -> str:
        """What stands before `layers.0.…` of the language model, e.g. `model.` or
        `model.language_model.`.
        """
        for name in self.modules:
            if (
                name.endswith("embed_tokens")
                and ".layers." not in name
                and not name.startswith("mtp")
            ):
                return name.removesuffix("embed_tokens")
        for name in self.modules:
            head, marker, _ = name.partition("layers.0.")
            if marker and "vis" not in head and not head.startswith(("mtp", "audio")):
                return head
        return "model."

    def dims(self, key: str) -> int | None:
        """A whole number of the language model's config, or None."""
        value = self.text_config.get(key)
        return value if type(value) is int else None


# Open a checkpoint, local or on the Hub: find its files, read its headers, leave its bodies alone.

HUB = "hub:"


@dataclass(frozen=True)
class Opened:
    """An opened checkpoint: `layout` where it is local, `hub` where it is remote."""

    checkpoint: Checkpoint
    layout: Layout | None = None
    hub: hub.HubRevision | None = None
    problems: tuple[tuple[str, str], ...] = ()


def open_checkpoint(source: str, revision: str | None = None) -> Opened:
    """The checkpoint at a path or `hub:ORG/NAME`. Raises AssayError if there is nothing to examine."""
    if source.startswith(HUB):
        return _open_remote(source.removeprefix(HUB), revision)
    return open_layout(locate(Path(source).expanduser(), revision))


def open_layout(layout: Layout) -> Opened:
    """Read the headers of a local layout."""
    sizes = {name: file.size for name, file in layout.files.items()}

    def read(name: str) -> bytes:
        return read_bounded(layout.files[name].real, MAX_DOCUMENT_BYTES)

    bare = Checkpoint(layout.kind, sizes, read)
    headers: dict[str, Header] = {}
    problems = list(layout.problems)
    for name in _weight_files(bare):
        try:
            headers[name] = read_header(layout.files[name].real, name)
        except OSError as error:
            problems.append((name, error.strerror or str(error)))
    return Opened(_with_headers(bare, headers), layout, None, tuple(problems))


def _open_remote(repo: str, revision: str | None) -> Opened:
    remote = hub.list_revision(repo, revision)
    sizes = {name: file.size for name, file in remote.files.items()}
    contents: dict[str, bytes] = {}

    def read(name: str) -> bytes:
        if name not in contents:
            contents[name] = hub.read_file(remote, name)
        return contents[name]

    bare = Checkpoint("hub", sizes, read)
    return Opened(_with_headers(bare, hub.read_headers(remote, _weight_files(bare))), None, remote)


def _weight_files(bare: Checkpoint) -> list[str]:
    """The safetensors files that may belong to the model: those at the root, and those the index
    names.

    Mistral's `consolidated` copy and adapters lie beside a model without being part of it.
    """
    indexed = {name for name in (bare.weight_map or {}).values() if name in bare.files}
    root = [n for n in bare.files if n.endswith(".safetensors") and "/" not in n]
    aside = [n for n in root if n.startswith(("consolidated", "adapter_model"))]
    if len(aside) < len(root):
        root = [n for n in root if n not in aside]
    return sorted(indexed | set(root))


def _with_headers(bare: Checkpoint, headers: Mapping[str, Header]) -> Checkpoint:
    """The checkpoint with its headers; weight files that the index does not name are stray."""
    stray: frozenset[str] = frozenset()
    if bare.weight_map is not None:
        named = {PurePosixPath(name).as_posix() for name in bare.weight_map.values()}
        stray = frozenset(name for name in headers if name not in named)
    return Checkpoint(bare.kind, bare.files, bare.read, headers, stray)
