"""Open a checkpoint, local or on the Hub: read its headers, leave its bodies alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from assay.checkpoint import hub
from assay.checkpoint.digests import read_bounded
from assay.checkpoint.layout import Layout, locate
from assay.checkpoint.safetensors import Header, read_header
from assay.checkpoint.subject import MAX_DOCUMENT_BYTES, Checkpoint

HUB = "hub:"


@dataclass(frozen=True)
class Opened:
    """An opened checkpoint: `layout` where it is local, `hub` where it is remote."""

    checkpoint: Checkpoint
    layout: Layout | None = None
    hub: hub.HubRevision | None = None
    problems: tuple[tuple[str, str], ...] = ()


def open_checkpoint(source: str, revision: str | None = None) -> Opened:
    """The checkpoint at a path or `hub:ORG/NAME`. Raises AssayError if there is nothing to
    examine.
    """
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
