"""The cache folder, and the one way to resume: measured values kept by key.

`Kept` is a folder of values. A key names everything that can change its value, so an interrupted
run goes on where it stopped, and the next command finds what an earlier one measured. Nothing has
to be invalidated: another model, text, option or version is another key.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any
from zipfile import BadZipFile

import numpy as np

from assay.errors import AssayError, UsageError
from assay.secrets import scrub
from assay.verdict import Finding, Severity


def cache_path(name: str) -> Path:
    """Where `name` lies inside the cache: in `ASSAY_CACHE`, else in the user's cache directory."""
    root = os.environ.get("ASSAY_CACHE")
    if not root:
        from platformdirs import user_cache_dir  # which an engine's own environment may lack

        root = user_cache_dir("assay")
    return Path(root) / name


def cache_dir(name: str) -> Path:
    """The folder `name` inside the cache, made if it is missing; AssayError where that
    cannot be.
    """
    folder = cache_path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AssayError(
            f"cannot make the cache folder {folder}: {error.strerror}",
            finding_id="server.cache",
            remedy="name a folder that can be written to by ASSAY_CACHE",
        ) from error
    return folder


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A tar archive of files by name, without times and owners: the same bytes for the
    same files.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def write_atomically(path: Path, content: str | bytes, *, sync: bool = False) -> None:
    """Write `path` so that a reader sees the old file or the whole new one, and nothing is left of
    a failed attempt.

    `sync` waits until the content is on the disk. A text is written without the secrets of the run.
    OSError where it cannot be written.
    """
    raw = scrub(content).encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@cache
def source_digest(*packages: str | Path) -> str:
    """Hash of the source of some packages or files: a change of it can change what they compute.

    A text is a place within assay, a Path the folder of another package.
    """
    digest = hashlib.sha256()
    for package in packages:
        root = Path(__file__).parent if isinstance(package, str) else package.parent
        part = root / package
        for path in [part] if part.is_file() else sorted(part.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


# Values by key.

_FORMAT = "assay-kept/1"
_TOUCHED = 3600.0
"""Seconds for which an entry is not deleted after it was used: another run may be about to read it.
"""
_MISSING = object()


@dataclass
class _Trouble:
    """What went wrong with the folder of a run, and the values that could only be kept in memory
    for it.
    """

    damaged: int = 0
    unwritable: str = ""
    memory: dict[str, Any] = field(default_factory=dict)


class Kept:
    """Measured values in a folder, by key.

    A key is plain data (what JSON can write, dataclasses and paths too); a value is plain data or a
    mapping of names to numpy arrays. An entry is a file named after the hash of its key. It is
    written whole or not at all and carries that hash and the SHA-256 of its content: an entry that
    is damaged, or that is another key's, is deleted, counted, and measured again. Runs that work on
    equal keys at the same time write equal entries and need no lock. Where the folder cannot be
    written (a full disk), values stay in memory and the run goes on. `notices` are the findings
    that say so.
    """

    def __init__(self, folder: Path, about: Any = None) -> None:
        self.folder = folder
        self._about = about
        self._trouble = _Trouble()

    def within(self, about: Any) -> Kept:
        """The same folder, with `about` as a part of every key."""
        found = Kept(self.folder, [self._about, about])
        found._trouble = self._trouble
        return found

    def __contains__(self, key: Any) -> bool:
        path = self._path(key)
        return path.name in self._trouble.memory or path.exists()

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, `default` where there is none or a damaged one."""
        path = self._path(key)
        if path.name in self._trouble.memory:
            return self._trouble.memory[path.name]
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
                raise ValueError("no file")
            value = _unpacked(path.read_bytes(), path.name)
        except (FileNotFoundError, NotADirectoryError):
            return default
        except _DAMAGE:
            self._trouble.damaged += 1
            _remove(path)
            return default
        with suppress(OSError):  # when it was used last, for `trim`
            os.utime(path)
        return value

    def put(self, key: Any, value: Any) -> None:
        """Keep a value, in place of what was there."""
        path = self._path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, _packed(value, path.name))
        except OSError as error:
            self._trouble.unwritable = error.strerror or str(error)
            self._trouble.memory[path.name] = value

    def forget(self, key: Any) -> None:
        """Delete what is kept of a key."""
        path = self._path(key)
        self._trouble.memory.pop(path.name, None)
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def have(self, key: Any, measure: Callable[[], Any]) -> Any:
        """The value of a key: read where it was measured before, else measured and kept."""
        value = self.get(key, _MISSING)
        if value is _MISSING:
            value = measure()
            self.put(key, value)
        return value

    def trim(self, limit: int) -> None:
        """Delete the entries that were used longest ago until the folder holds `limit` bytes at
        most.
        """
        now, entries = time.time(), []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            try:
                facts = path.stat()
            except OSError:  # another run deletes too
                continue
            entries.append((facts.st_mtime, facts.st_size, path))
        total = sum(size for _, size, _ in entries)
        for used, size, path in sorted(entries):
            if total <= limit or now - used < _TOUCHED:
                break
            with suppress(OSError):
                path.unlink(missing_ok=True)
            total -= size

    def notices(self, area: str) -> list[Finding]:
        """What a report should say of the folder, under ids of `area`."""
        found, trouble = [], self._trouble
        if trouble.damaged:
            entries = "an entry" if trouble.damaged == 1 else f"{trouble.damaged} entries"
            found.append(
                Finding(
                    f"{area}.kept_damaged",
                    Severity.WARNING,
                    f"{entries} of the cache were damaged and have been measured again",
                    causes=("a disk that fails", "a file that was changed by hand"),
                )
            )
        if trouble.unwritable:
            found.append(
                Finding(
                    f"{area}.not_kept",
                    Severity.WARNING,
                    f"the cache cannot be written ({trouble.unwritable}): the next run measures"
                    " again",
                    remedies=("make room, or name a folder that can be written to by ASSAY_CACHE",),
                )
            )
        return found

    def _path(self, key: Any) -> Path:
        text = json.dumps([self._about, key], sort_keys=True, default=_plain)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be part of a key")


def read_value(path: Path) -> Any:
    """The value that `keep_value` wrote there; None where there is none.

    A file that is damaged, or that was written as another one, is removed: its value is measured
    again.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("no file")
        return _unpacked(path.read_bytes(), _own_name(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except _DAMAGE:
        _remove(path)
        return None


def keep_value(path: Path, value: Any) -> None:
    """Write one value of a run, with its checksum, into a file of the run's folder."""
    write_atomically(path, _packed(value, _own_name(path)))


def _own_name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


_DAMAGE = (OSError, ValueError, KeyError, TypeError, RecursionError, BadZipFile)
"""What a damaged entry raises."""


def _remove(path: Path) -> None:
    """Remove the file or folder that has the name of an entry."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _packed(value: Any, key: str) -> bytes:
    """A line that says what follows, and the value."""
    if isinstance(value, Mapping) and any(isinstance(v, np.ndarray) for v in value.values()):
        kind, body = "arrays", io.BytesIO()
        np.savez(body, **value)
        raw = body.getvalue()
    else:
        kind, raw = "json", json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(raw).hexdigest()
    head = {"format": _FORMAT, "kind": kind, "sha256": digest, "key": key}
    return json.dumps(head).encode() + b"\n" + raw


def _unpacked(content: bytes, key: str) -> Any:
    """What `_packed` wrote of this key; ValueError or KeyError for anything else.

    Entries of 0.2.0 do not say whose they are.
    """
    line, _, raw = content.partition(b"\n")
    head = json.loads(line)
    if head["format"] != _FORMAT or head["sha256"] != hashlib.sha256(raw).hexdigest():
        raise ValueError("the entry is damaged")
    if head.get("key", key) != key:
        raise ValueError("the entry is that of another key")
    if head["kind"] == "json":
        return json.loads(raw.decode("utf-8", "surrogatepass"))
    with np.load(io.BytesIO(raw), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


class KeptFile:
    """Values by name in one JSON file of the user's, all of one `plan`; every new one is added to
    what the file holds then.

    UsageError `finding_id` for a file of another plan, one that cannot be read, and where it could
    not be written.
    """

    def __init__(self, path: Path, plan: Mapping[str, Any], form: str, finding_id: str) -> None:
        self._path = path
        self._form = form
        self._finding_id = finding_id
        self._plan: dict[str, Any] = json.loads(json.dumps(plan))
        # A file that cannot be written should not cost a measurement first.
        if not path.parent.is_dir():
            raise self._unusable("is in a folder that does not exist")
        self._rows = self._read()

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def have(self, name: str, measure: Callable[[], Any]) -> Any:
        """The value of a name: as it stands in the file, else measured and written."""
        if name not in self._rows:
            value = measure()
            with _one_at_a_time(self._path.parent):
                # Another run may have written since.
                self._rows = {**self._read(), **self._rows, name: value}
                document = {"format": self._form, "plan": self._plan, "rows": self._rows}
                try:
                    write_atomically(
                        self._path, json.dumps(document, indent=1, ensure_ascii=False) + "\n"
                    )
                except OSError as error:
                    raise self._unusable(f"cannot be written: {error.strerror}") from error
        return self._rows[name]

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            theirs, rows = document["plan"], document["rows"]
            known = (
                document["format"] == self._form
                and isinstance(theirs, dict)
                and isinstance(rows, dict)
            )
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._unusable(f"cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._unusable("holds no rows of this command") from error
        if not known:
            raise self._unusable("holds no rows of this command")
        if differing := sorted(
            k for k in {*theirs, *self._plan} if theirs.get(k) != self._plan.get(k)
        ):
            raise self._unusable(f"holds rows of another run: it differs in {', '.join(differing)}")
        return dict(rows)

    def _unusable(self, why: str) -> UsageError:
        return UsageError(
            f"{self._path} {why}",
            remedy="name another file with --out, or none",
            finding_id=self._finding_id,
        )


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Processes that are here for one folder wait for each other."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


# Folders that are one run's at a time, where a run deletes its folder at its end.
