"""A portable list of digests, to verify a checkpoint without a network.

`assay verify DIR --write-manifest FILE` writes it, `--manifest FILE` compares the files with
it. The
lists that `sha256sum` writes are read too.
"""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from assay.checkpoint.digests import read_bounded
from assay.checkpoint.trusted import Expected, Source
from assay.errors import AssayError

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
        """The digests that files are compared with."""
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
