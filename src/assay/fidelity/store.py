"""Files of a store: safetensors, named after the SHA-256 of what is in them, checked whenever they are read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import ROOM_FACTS, Head, StateRows, Window
from assay.errors import AssayError, UsageError
from assay.fidelity.llama_base import open_base
from assay.runs import write_atomically

if TYPE_CHECKING:
    import torch


# -----------------------------------------------------------------------------
# The manifest of a stored reference: plain data, written whole, with a hash of itself.

NAME = "manifest.json"
FORMAT = "assay-reference"
VERSION = 1
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class StoreHeader:
    """What was scored, how, and by what. Two runs may share a store only if all of it agrees but `environment`, and
    the engine's `ROOM_FACTS`: those depend on what a machine has free, and change no more than last bits.

    `engine` is what the engine says of itself, `tokenizer` holds at least its `sha256`, `text` the sources and hash of
    the text, `path` is the scoring path, `scored_from` the first scored token of every window, `length` their common
    length in tokens, `dtype` the number format of the states.
    """

    engine: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    text: Mapping[str, Any]
    path: str
    scored_from: int
    length: int
    dtype: str = "bfloat16"
    environment: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"states are stored as one of {', '.join(DTYPES)}, not {self.dtype}")
        if not 1 <= self.scored_from < self.length:
            raise ValueError(f"nothing to score from token {self.scored_from} of {self.length} on")

    def differences(self, other: StoreHeader) -> list[str]:
        """Names of the entries that differ; of the engine each fact by its name."""
        mine, theirs = (_plain(asdict(header)) for header in (self, other))
        found = [n for n in mine if n not in ("environment", "engine") and mine[n] != theirs[n]]
        own, its = mine["engine"], theirs["engine"]
        facts = sorted({*own, *its} - ROOM_FACTS)
        return [*(f"the engine's {n}" for n in facts if own.get(n) != its.get(n)), *found]


@dataclass(frozen=True)
class StoredFile:
    """A file of the store: its path inside it, its SHA-256, its size."""

    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class HeadFacts:
    """The output head: its file and what is not in the matrix."""

    stored: StoredFile
    vocab_size: int
    width: int
    dtype: str
    softcap: float | None
    scale: float


@dataclass(frozen=True)
class StoredWindow:
    """One window: its number, the hash of its token ids, its file."""

    index: int
    sha256: str
    stored: StoredFile


@dataclass(frozen=True)
class StoreSize:
    """How large a store is. The head is counted apart: it is there once, whatever the number of tokens."""

    tokens: int
    states_bytes: int
    head_bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the files of all windows for each scored token."""
        return self.states_bytes / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class Manifest:
    """Everything in `manifest.json`."""

    header: StoreHeader
    head: HeadFacts
    windows: tuple[StoredWindow, ...] = ()
    tokens: StoredFile | None = None
    """The ids of all windows; None as long as the store is not finished."""

    @property
    def size(self) -> StoreSize:
        """Sizes of what is stored."""
        count = self.header.length - self.header.scored_from
        states = sum(w.stored.bytes for w in self.windows)
        return StoreSize(count * len(self.windows), states, self.head.stored.bytes)

    def with_window(self, window: StoredWindow) -> Manifest:
        """The manifest with one window more, in the order of their numbers; not finished."""
        windows = tuple(sorted((*self.windows, window), key=lambda w: w.index))
        return replace(self, windows=windows, tokens=None)

    def write(self, folder: Path) -> None:
        """Replace the manifest in `folder`."""
        write_atomically(folder / NAME, _dump(asdict(self)))


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`; AssayError where it is missing, damaged or of another version."""
    path = folder / NAME
    try:
        raw = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _unusable(
            f"{folder} is no stored reference: it has no {NAME}", "make one with `assay reference`"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, f"it cannot be read ({error})") from error
    try:
        data = json.loads(raw)
        found = (data.pop("format"), data.pop("version"))
        data.pop("sha256")
        if found == (FORMAT, VERSION) and _dump(data) != raw:
            raise damaged(path, "its own hash does not match")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise damaged(path, "it is not what assay wrote") from error
    if found != (FORMAT, VERSION):
        raise _unusable(
            f"{path} is of the format {found[0]} {found[1]}, this assay reads {FORMAT} {VERSION}",
            "make the reference again",
        )
    return Manifest(
        header=StoreHeader(**data["header"]),
        head=HeadFacts(**data["head"] | {"stored": StoredFile(**data["head"]["stored"])}),
        windows=tuple(StoredWindow(**w | {"stored": StoredFile(**w["stored"])}) for w in data["windows"]),
        tokens=StoredFile(**data["tokens"]) if data["tokens"] else None,
    )


def damaged(path: Path, reason: str) -> AssayError:
    """The error of a file that is not what was stored. Without its manifest a store cannot be gone on with."""
    lost = path.name == NAME
    return AssayError(
        f"{path} is damaged: {reason}",
        finding_id="fidelity.store_damaged",
        remedy="delete the folder and make the reference again: `assay reference`"
        if lost
        else "repair it, windows that are whole are kept: `assay reference` with the same options and --out",
        evidence={"file": path.name},
    )


def _unusable(message: str, remedy: str) -> AssayError:
    return AssayError(message, finding_id="fidelity.store_unusable", remedy=remedy)


def _plain(value: Any) -> Any:
    """A value as it comes back from JSON, so that tuples equal lists."""
    return json.loads(json.dumps(value, default=dict))


def _dump(content: Mapping[str, Any]) -> str:
    """The one way in which a manifest is written; any other spelling of it counts as damage."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=dict).encode()).hexdigest()
    whole = {"format": FORMAT, "version": VERSION, "sha256": digest, **content}
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True, default=dict) + "\n"


# -----------------------------------------------------------------------------


def write_tensors(folder: Path, kind: str, tensors: Mapping[str, torch.Tensor]) -> StoredFile:
    """Write `folder`/`kind`/SHA.safetensors, whole or not at all; a file that is there already is left alone."""
    from safetensors.torch import save

    raw = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    digest = hashlib.sha256(raw).hexdigest()
    stored = StoredFile(f"{kind}/{digest}.safetensors", digest, len(raw))
    path = folder / stored.file
    if not is_whole(folder, stored):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            with part.open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise AssayError(
                f"cannot write {path}: {error.strerror}",
                finding_id="fidelity.store_unwritable",
                remedy="make room, or give another folder; the windows stored so far are kept",
            ) from error
    return stored


def read_tensors(folder: Path, stored: StoredFile) -> dict[str, torch.Tensor]:
    """The tensors of a file, checked first; AssayError names it where it is missing or has changed."""
    from safetensors.torch import load

    path = folder / stored.file
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error
    if len(raw) != stored.bytes:
        raise damaged(path, f"it has {len(raw):,} bytes in place of {stored.bytes:,}")
    if hashlib.sha256(raw).hexdigest() != stored.sha256:
        raise damaged(path, "its SHA-256 is not the one that was stored")
    tensors: dict[str, torch.Tensor] = load(raw)
    return tensors


def is_whole(folder: Path, stored: StoredFile) -> bool:
    """Whether the file is there with the right content."""
    path = folder / stored.file
    try:
        if path.stat().st_size != stored.bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == stored.sha256
    except OSError:
        return False


# -----------------------------------------------------------------------------
# Read a stored reference; every file is checked against its hash as it is read.


class Store:
    """A finished reference. Windows are those that were stored, in their order; states are read when asked for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._manifest = manifest

    @property
    def header(self) -> StoreHeader:
        """What was scored, how, and by what."""
        return self._manifest.header

    @property
    def size(self) -> StoreSize:
        """Sizes on disk."""
        return self._manifest.size

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """All windows with their token ids."""
        stored = self._manifest.tokens
        if stored is None:
            raise ValueError("the store is not finished")
        ids = read_tensors(self.folder, stored)["tokens"].tolist()
        windows = tuple(Window(w.index, tuple(row)) for w, row in zip(self._manifest.windows, ids, strict=True))
        for window, entry in zip(windows, self._manifest.windows, strict=True):
            if window.sha256 != entry.sha256:
                raise damaged(self.folder / stored.file, f"the ids of window {entry.index} are not its own")
        return windows

    @cached_property
    def head(self) -> Head:
        """The output head."""
        facts = self._manifest.head
        tensors = read_tensors(self.folder, facts.stored)
        head = Head(tensors["weight"], tensors.get("bias"), softcap=facts.softcap, scale=facts.scale)
        head.file = (self.folder / facts.stored.file).resolve()
        return head

    def drop_head(self) -> None:
        """Free the memory of the output head; it is read again where it is needed."""
        self.__dict__.pop("head", None)

    def states(self, index: int) -> StateRows:
        """States [n, d] of the window with this number, with the head that turns them into logits."""
        entry = self._entry(index)
        tensors = read_tensors(self.folder, entry.stored)
        window = Window(index, tuple(tensors["tokens"].tolist()))
        if window.sha256 != entry.sha256:
            raise damaged(self.folder / entry.stored.file, "it holds another window")
        return StateRows(window, self.header.scored_from, tensors["states"], self.head)

    def rows(self, windows: Sequence[Window]) -> Iterator[StateRows]:
        """States of the given windows, one in memory at a time; AssayError where one was not stored."""
        for window in windows:
            if self._entry(window.index).sha256 != window.sha256:
                raise AssayError(
                    f"{self.folder}: window {window.index} was stored with other tokens",
                    finding_id="fidelity.store_unusable",
                    remedy="compare on the windows of the store, or store these",
                )
            yield self.states(window.index)

    def verify(self) -> None:
        """Read every file once; AssayError names the first that is damaged."""
        _ = self.head, self.windows
        for entry in self._manifest.windows:
            read_tensors(self.folder, entry.stored)

    def _entry(self, index: int) -> StoredWindow:
        for entry in self._manifest.windows:
            if entry.index == index:
                return entry
        raise AssayError(
            f"{self.folder} holds no window {index}, only {len(self._manifest.windows)} windows",
            finding_id="fidelity.store_unusable",
            remedy="ask for fewer windows, or store more",
        )


def open_store(folder: Path) -> Store:
    """The reference in `folder`; AssayError where there is none, or one that is not finished."""
    manifest = read_manifest(folder)
    if manifest.tokens is None:
        raise AssayError(
            f"{folder} is not finished: it holds {len(manifest.windows)} windows so far",
            finding_id="fidelity.store_unusable",
            remedy="run the same `assay reference` again: it goes on where it stopped",
        )
    return Store(folder, manifest)


# -----------------------------------------------------------------------------
# With what a stored reference was scored, which is how its candidates have to be scored too.


def stored_path(spec: str) -> Path:
    """The folder or file of `run:PATH`; UsageError where it names none."""
    name = spec.removeprefix("run:")
    if not name:
        raise UsageError(
            "run: names no stored reference",
            remedy="write run:DIR, with the folder that assay reference wrote",
            finding_id="fidelity.usage",
        )
    return Path(name).expanduser()


def stored_settings(spec: str) -> dict[str, Any]:
    """`windows`, `length`, `scored` and `path` of what `run:PATH` names; AssayError where it cannot be read."""
    path = stored_path(spec)
    if path.is_file():
        base = open_base(path)
        return _settings(len(base.tokens), base.length, base.scored_from, "prefill")
    manifest = read_manifest(path)
    header = manifest.header
    return stored_settings_of(header, len(manifest.windows))


def stored_settings_of(header: StoreHeader, windows: int) -> dict[str, Any]:
    """The same of a header."""
    return _settings(windows, header.length, header.scored_from, header.path)


def _settings(windows: int, length: int, scored_from: int, path: str) -> dict[str, Any]:
    scored = "all" if scored_from == 1 else "second-half"
    return {"windows": windows, "length": length, "scored": scored, "path": path}


# -----------------------------------------------------------------------------
# Write a stored reference, window by window; an interrupted run goes on where it stopped.


class StoreWriter:
    """A store that is being written.

    Where the folder holds windows of the same header and head already, those that are whole are kept (`has`); a store
    of anything else there is an AssayError, never overwritten.
    """

    def __init__(self, folder: Path, header: StoreHeader, head: Head) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        before = read_manifest(folder) if (folder / NAME).exists() else None
        if before and (differing := before.header.differences(header)):
            raise _another(folder, ", ".join(differing))
        facts = _write_head(folder, head)
        if before and before.head != facts:
            raise _another(folder, "the output head")
        kept = tuple(w for w in before.windows if is_whole(folder, w.stored)) if before else ()
        # A finished store stays one unless a window is missing.
        tokens = before.tokens if before and len(kept) == len(before.windows) else None
        self._manifest = Manifest(header, facts, kept, tokens)
        self._manifest.write(folder)

    @property
    def kept(self) -> int:
        """How many windows are stored already."""
        return len(self._manifest.windows)

    def has(self, window: Window) -> bool:
        """Whether this window is stored already."""
        return any(w.index == window.index and w.sha256 == window.sha256 for w in self._manifest.windows)

    def add(self, window: Window, states: torch.Tensor) -> None:
        """Store the final states [length − scored_from, d] of one window; a stored one is not written again."""
        import torch

        header, facts = self._manifest.header, self._manifest.head
        expected = (header.length - header.scored_from, facts.width)
        if len(window.tokens) != header.length or tuple(states.shape) != expected:
            raise ValueError(
                f"window {window.index}: {len(window.tokens)} tokens with states {tuple(states.shape)}, "
                f"the store takes {header.length} with {expected}"
            )
        if self.has(window):
            return
        if any(w.index == window.index for w in self._manifest.windows):
            raise _another(self.folder, f"window {window.index}")
        tensors = {
            "states": states.to(getattr(torch, header.dtype)),
            "tokens": torch.tensor(window.tokens, dtype=torch.int32),
        }
        stored = write_tensors(self.folder, "states", tensors)
        self._manifest = self._manifest.with_window(StoredWindow(window.index, window.sha256, stored))
        self._manifest.write(self.folder)

    def finish(self) -> Store:
        """Close the store; from now on it can be opened."""
        import torch

        if not self._manifest.windows:
            raise ValueError("a reference needs at least one window")
        ids = [read_tensors(self.folder, w.stored)["tokens"] for w in self._manifest.windows]
        tokens = write_tensors(self.folder, "tokens", {"tokens": torch.stack(ids)})
        self._manifest = replace(self._manifest, tokens=tokens)
        self._manifest.write(self.folder)
        return Store(self.folder, self._manifest)


def _write_head(folder: Path, head: Head) -> HeadFacts:
    tensors = {"weight": head.weight}
    if head.bias is not None:
        tensors["bias"] = head.bias
    vocab_size, width = head.weight.shape
    return HeadFacts(
        stored=write_tensors(folder, "head", tensors),
        vocab_size=int(vocab_size),
        width=int(width),
        dtype=str(head.weight.dtype).removeprefix("torch."),
        softcap=head.softcap,
        scale=head.scale,
    )


def _another(folder: Path, what: str) -> AssayError:
    return AssayError(
        f"{folder} holds a reference that differs in {what}",
        finding_id="fidelity.store_unusable",
        remedy="give another folder with --out, or delete this one",
    )
