"""Files of a store: safetensors, named after the SHA-256 of what is in them, checked whenever they
are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from assay.engines.scoring import ROOM_FACTS, Head, LogitRows, StateRows, Window, WindowRows
from assay.errors import AssayError, UsageError
from assay.runs import write_atomically

if TYPE_CHECKING:
    import torch


# llama.cpp's file of log-probabilities, `llama-perplexity --kl-divergence-base FILE`: read and
# written.
#
# Layout, little-endian (tools/perplexity/perplexity.cpp):
#
#     8 bytes   "_logits_"
#     u32       n_ctx, tokens of a window          i32   n_vocab          i32   n_chunk, number of windows
#     i32       tokens [n_chunk, n_ctx]
#     then for every window the rows of its second half, tokens n_ctx/2 + 1 … n_ctx − 1, each of 2 ⌈V/2⌉ + 4 u16:
#               f32 scale, f32 min_log_prob, u16 q [V] (one more where V is odd);  log p(v) = scale · q(v) + min_log_prob
#
# Logits more than 16 below the largest are raised to that; q has 65,536 steps. Taken at their word
# the raised ones would add up to V · e⁻¹⁶ (0.5 % of the mass for 50,000 entries), so `rows` makes
# them one bucket; llama.cpp leaves them out of KL. Where a model has a start token, llama.cpp puts
# it in place of the first token of each window when it scores; the file keeps the token of the
# text.


_MAGIC = b"_logits_"
_HEADER = struct.Struct("<Iii")
_DEPTH = 16.0
"""How far below the largest logit others are kept apart, in nats."""
_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class BaseFile:
    """A file of log-probabilities. `tokens` is [windows, length] as in the file."""

    path: Path
    vocab_size: int
    tokens: NDArray[np.int32]

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return int(self.tokens.shape[1])

    @property
    def scored_from(self) -> int:
        """Index of the first scored token."""
        return self.length // 2 + 1

    @property
    def rows_per_window(self) -> int:
        """Scored tokens of a window."""
        return self.length - self.scored_from

    def windows(self, bos_id: int | None) -> tuple[Window, ...]:
        """The windows as they were scored: with the start token of the model in front, where it has
        one.
        """
        ids = self.tokens.copy()
        if bos_id is not None:
            ids[:, 0] = bos_id
        return tuple(Window(i, tuple(row)) for i, row in enumerate(ids.tolist()))

    def log_probs(self, index: int) -> NDArray[np.float32]:
        """Log-probabilities [rows_per_window, V] of one window as the file gives them, raised ones
        included.
        """
        return self._decoded(index)[0]

    def rows(self, windows: Sequence[Window]) -> Iterator[LogitRows]:
        """The rows of the given windows, one window in memory at a time.

        Raised entries are −∞, one bucket of the rest, but for the target token: its log-probability
        is then an upper bound.
        """
        import torch

        for window in windows:
            values, raised = self._decoded(window.index)
            gold = np.array(window.tokens[self.scored_from :])
            raised[np.arange(len(gold)), gold] = False
            values[raised] = -np.inf
            yield LogitRows(window, self.scored_from, torch.from_numpy(values), rest=True)

    def _decoded(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Log-probabilities of one window, and which of them stand for anything below."""
        width = _row_width(self.vocab_size)
        count = self.rows_per_window
        start = len(_MAGIC) + _HEADER.size + 4 * self.tokens.size + index * count * width * 2
        raw = np.fromfile(self.path, dtype="<u2", count=count * width, offset=start).reshape(
            count, width
        )
        scale, lowest = np.ascontiguousarray(raw[:, :4]).view("<f4").T
        steps = raw[:, 4 : 4 + self.vocab_size]
        values: NDArray[np.float32] = steps.astype(np.float32)
        values *= scale[:, None]
        values += lowest[:, None]
        cut = scale * 65535 > 0.999 * _DEPTH  # else step 0 is the smallest logit itself
        return values, (steps == 0) & cut[:, None]


def open_base(path: Path) -> BaseFile:
    """Open a file of log-probabilities; AssayError where it is none, or cut short."""
    try:
        with path.open("rb") as file:
            magic, fixed = file.read(len(_MAGIC)), file.read(_HEADER.size)
            size = path.stat().st_size
    except OSError as error:
        raise _unusable_base(f"cannot read {path}: {error.strerror}") from error
    if magic != _MAGIC or len(fixed) != _HEADER.size:
        raise _unusable_base(
            f"{path} is no file of log-probabilities: it does not begin with {_MAGIC.decode()}"
        )
    length, vocab_size, count = _HEADER.unpack(fixed)
    if length < 4 or vocab_size < 1 or count < 1:
        raise _unusable_base(
            f"{path} claims {count} windows of {length} tokens and {vocab_size} vocabulary entries"
        )
    rows = count * (length - 1 - length // 2)
    expected = len(_MAGIC) + _HEADER.size + 4 * length * count + 2 * _row_width(vocab_size) * rows
    if size != expected:
        raise _unusable_base(
            f"{path} has {size:,} bytes, {count} windows of {length} tokens take {expected:,}: "
            + ("it is cut short" if size < expected else "there is something behind them")
        )
    tokens = np.fromfile(path, dtype="<i4", count=length * count, offset=len(_MAGIC) + _HEADER.size)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise _unusable_base(f"{path} holds token ids outside its vocabulary of {vocab_size}")
    return BaseFile(path, vocab_size, tokens.reshape(count, length))


def write_base(path: Path, windows: Sequence[Window], rows: Iterable[WindowRows]) -> BaseFile:
    """Write the rows of `windows` (in the same order, scored from the second half on) as llama.cpp
    would.

    The file appears when it is whole. ValueError where a window was scored from another token.
    """
    length = len(windows[0].tokens)
    ids = np.array([w.tokens for w in windows], dtype="<i4")
    part = path.with_name(path.name + ".part")
    vocab_size: int | None = None
    with part.open("wb") as file:
        for window, scored in zip(windows, rows, strict=True):
            if scored.window.sha256 != window.sha256 or scored.first != length // 2 + 1:
                raise ValueError(
                    f"window {window.index} was not scored from token {length // 2 + 1} on"
                )
            if vocab_size is None:
                vocab_size = scored.vocab_size
                file.write(_MAGIC + _HEADER.pack(length, vocab_size, len(windows)) + ids.tobytes())
            count = length - scored.first
            step = max(1, _BLOCK_BYTES // (4 * vocab_size))
            for lo in range(0, count, step):
                logits = scored.logits(lo, min(lo + step, count))[:, :vocab_size]
                file.write(encode_rows(logits.cpu().numpy()).tobytes())
    part.replace(path)
    return open_base(path)


def encode_rows(logits: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Logits [n, V] as rows of the file, u16 [n, 2 ⌈V/2⌉ + 4]."""
    count, vocab_size = logits.shape
    largest = logits.max(axis=1)
    lowest = np.maximum(logits.min(axis=1), largest - np.float32(_DEPTH))
    partition = np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)
    log_partition = np.log(partition).astype(np.float32)
    scale = (largest - lowest) / np.float32(65535)
    steps = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    encoded = np.zeros((count, _row_width(vocab_size)), dtype="<u2")
    facts = np.stack([scale, lowest - largest - log_partition], axis=1).astype("<f4")
    encoded[:, :4] = facts.view("<u2")
    above = np.maximum(logits - lowest[:, None], 0)
    encoded[:, 4 : 4 + vocab_size] = np.rint(above * steps[:, None]).astype(np.uint16)
    return encoded


def _row_width(vocab_size: int) -> int:
    """u16 values of one row."""
    return 2 * ((vocab_size + 1) // 2) + 4


def _unusable_base(message: str) -> AssayError:
    return AssayError(
        message,
        finding_id="fidelity.store_unusable",
        remedy="write it again: llama-perplexity -m MODEL -f TEXT --kl-divergence-base FILE",
    )


# Files of a store.


# The manifest of a stored reference: plain data, written whole, with a hash of itself.

NAME = "manifest.json"
FORMAT = "assay-reference"
VERSION = 1
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class StoreHeader:
    """What was scored, how, and by what. Two runs may share a store only if all of it agrees but
    `environment`, and the engine's `ROOM_FACTS`: those depend on what a machine has free, and
    change no more than last bits.

    `engine` is what the engine says of itself, `tokenizer` holds at least its `sha256`, `text` the
    sources and hash of the text, `path` is the scoring path, `scored_from` the first scored token
    of every window, `length` their common length in tokens, `dtype` the number format of the
    states.
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
    """How large a store is. The head is counted apart: it is there once, whatever the number of
    tokens.
    """

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
            f"the folder {folder} is no stored reference: it has no {NAME}",
            "make one with `assay reference`",
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
        windows=tuple(
            StoredWindow(**w | {"stored": StoredFile(**w["stored"])}) for w in data["windows"]
        ),
        tokens=StoredFile(**data["tokens"]) if data["tokens"] else None,
    )


def damaged(path: Path, reason: str) -> AssayError:
    """The error of a file that is not what was stored. Without its manifest a store cannot be gone
    on with.
    """
    lost = path.name == NAME
    return AssayError(
        f"{path} is damaged: {reason}",
        finding_id="fidelity.store_damaged",
        remedy=(
            "delete the folder and make the reference again: `assay reference`"
            if lost
            else (
                "repair it, windows that are whole are kept: `assay reference` with the same"
                " options and --out"
            )
        ),
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


def write_tensors(folder: Path, kind: str, tensors: Mapping[str, torch.Tensor]) -> StoredFile:
    """Write `folder`/`kind`/SHA.safetensors, whole or not at all; a file that is there already is
    left alone.
    """
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


# Read a stored reference; every file is checked against its hash as it is read.


class Store:
    """A finished reference. Windows are those that were stored, in their order; states are read
    when asked for.
    """

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
        windows = tuple(
            Window(w.index, tuple(row)) for w, row in zip(self._manifest.windows, ids, strict=True)
        )
        for window, entry in zip(windows, self._manifest.windows, strict=True):
            if window.sha256 != entry.sha256:
                raise damaged(
                    self.folder / stored.file, f"the ids of window {entry.index} are not its own"
                )
        return windows

    @cached_property
    def head(self) -> Head:
        """The output head."""
        facts = self._manifest.head
        tensors = read_tensors(self.folder, facts.stored)
        head = Head(
            tensors["weight"], tensors.get("bias"), softcap=facts.softcap, scale=facts.scale
        )
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
        """States of the given windows, one in memory at a time; AssayError where one was not
        stored.
        """
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
    """`windows`, `length`, `scored` and `path` of what `run:PATH` names; AssayError where it cannot
    be read.
    """
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


# Write a stored reference, window by window; an interrupted run goes on where it stopped.


class StoreWriter:
    """A store that is being written.

    Where the folder holds windows of the same header and head already, those that are whole are
    kept (`has`); a store of anything else there is an AssayError, never overwritten.
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
        return any(
            w.index == window.index and w.sha256 == window.sha256 for w in self._manifest.windows
        )

    def add(self, window: Window, states: torch.Tensor) -> None:
        """Store the final states [length − scored_from, d] of one window; a stored one is not
        written again.
        """
        import torch

        header, facts = self._manifest.header, self._manifest.head
        expected = (header.length - header.scored_from, facts.width)
        if len(window.tokens) != header.length or tuple(states.shape) != expected:
            raise ValueError(
                f"window {window.index}: {len(window.tokens)} tokens with states"
                f" {tuple(states.shape)}, the store takes {header.length} with {expected}"
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
        self._manifest = self._manifest.with_window(
            StoredWindow(window.index, window.sha256, stored)
        )
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
