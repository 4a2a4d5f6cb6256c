"""Write a stored reference window by window; an interrupted run goes on where it stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.engines.scoring import Head, Window
from assay.errors import AssayError

if TYPE_CHECKING:
    import torch
from assay.fidelity.store.manifest import (
    NAME,
    HeadFacts,
    Manifest,
    StoredWindow,
    StoreHeader,
    read_manifest,
)
from assay.fidelity.store.reader import Store
from assay.fidelity.store.tensors import is_whole, read_tensors, write_tensors


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
