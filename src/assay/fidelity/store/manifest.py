"""The manifest of a stored reference: plain data, written whole, with a hash of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import ROOM_FACTS
from assay.errors import AssayError
from assay.runs import write_atomically

if TYPE_CHECKING:
    pass


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
        mine, theirs = (as_plain_json(asdict(header)) for header in (self, other))
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
    """How large a store is. The head is counted apart: it is there once, for any number of
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
        write_atomically(folder / NAME, dump_json(asdict(self)))


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`; AssayError where it is missing, damaged or of another version."""
    path = folder / NAME
    try:
        raw = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise unusable(
            f"the folder {folder} is no stored reference: it has no {NAME}",
            "make one with `assay reference`",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, f"it cannot be read ({error})") from error
    try:
        data = json.loads(raw)
        found = (data.pop("format"), data.pop("version"))
        data.pop("sha256")
        if found == (FORMAT, VERSION) and dump_json(data) != raw:
            raise damaged(path, "its own hash does not match")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise damaged(path, "it is not what assay wrote") from error
    if found != (FORMAT, VERSION):
        raise unusable(
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


def unusable(message: str, remedy: str) -> AssayError:
    """The error for a store that cannot be used."""
    return AssayError(message, finding_id="fidelity.store_unusable", remedy=remedy)


def as_plain_json(value: Any) -> Any:
    """A value as it comes back from JSON, so that tuples equal lists."""
    return json.loads(json.dumps(value, default=dict))


def dump_json(content: Mapping[str, Any]) -> str:
    """The one way in which a manifest is written; any other spelling of it counts as damage."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=dict).encode()).hexdigest()
    whole = {"format": FORMAT, "version": VERSION, "sha256": digest, **content}
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True, default=dict) + "\n"
