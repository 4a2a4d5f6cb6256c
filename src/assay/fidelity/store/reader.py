"""Read a stored reference: its windows, its output head, the final states of each window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from assay.engines.scoring import Head, StateRows, Window
from assay.errors import AssayError, UsageError

if TYPE_CHECKING:
    pass
from assay.fidelity.store.manifest import (
    Manifest,
    StoredWindow,
    StoreHeader,
    StoreSize,
    damaged,
    read_manifest,
)
from assay.fidelity.store.tensors import read_tensors


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
        """States [n, d] of the window with this number, with the head that turns them
        into logits.
        """
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
