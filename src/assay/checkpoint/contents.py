"""Say which files of a checkpoint are not opened."""

from __future__ import annotations

import contextlib

from assay.checkpoint.digests import PICKLES, WEIGHTS
from assay.checkpoint.findings import found, noted, plural, some, warned
from assay.checkpoint.state import VerifyState
from assay.checkpoint.trusted import matters

POINTER, POINTER_BYTES = b"version https://git-lfs", 1024
"""Beginning of a Git LFS pointer, and the size that none exceeds."""


def examine_contents(state: VerifyState) -> None:
    """Files that could not be reached, a folder without a config, and pickles."""
    for name, reason in state.opened.problems:
        title = f"cannot read {name}: {reason}"
        state.findings.append(found("not_examined", title, path=name, reason=reason))
    _configless(state)
    _pickles(state)
    _pointers(state)


def _configless(state: VerifyState) -> None:
    """A folder without config.json (and without GGUF) can be hashed, but not examined."""
    checkpoint = state.opened.checkpoint
    files = checkpoint.files
    if checkpoint.kind in {"gguf", "safetensors"} or "config.json" in files:
        return
    if any(f.endswith(".gguf") for f in files):
        return
    if "adapter_config.json" in files:
        title = "a LoRA adapter, not a model: no engine serves it alone"
        remedies = ["verify the base model, and name the adapter with --lora-modules when serving"]
        state.findings.append(found("not_examined", title, remedies=remedies))
        return
    remedies = ["give the folder that holds config.json, or download it"]
    title = "no config.json: this is no checkpoint that can be examined"
    state.findings.append(found("not_examined", title, remedies=remedies))


def _pickles(state: VerifyState) -> None:
    files = state.opened.checkpoint.files
    names = [n for n in files if n.endswith(PICKLES)]
    if not names:
        return
    title = f"{plural(len(names), 'file')} not examined: {some(names)}"
    detail = (
        "Opening a pickle can run code, so assay only hashes such files; convert them to"
        " safetensors."
    )
    write = noted if any(n.endswith(WEIGHTS) for n in files) else warned
    state.findings.append(write("not_examined", title, detail=detail, paths=names[:20]))


def _pointers(state: VerifyState) -> None:
    """Git LFS pointers in place of files. Those of weights are found when their header is read."""
    checkpoint = state.opened.checkpoint
    if state.opened.layout is None:
        return
    pointers = []
    for name, size in checkpoint.files.items():
        if size <= POINTER_BYTES and not name.endswith(WEIGHTS):
            with contextlib.suppress(OSError):
                if checkpoint.read(name).startswith(POINTER):
                    pointers.append(name)
    needed = [name for name in pointers if matters(name)]
    title = f"{plural(len(pointers), 'Git LFS pointer')} in place of a file: {some(pointers)}"
    remedies = ["fetch the files: git lfs pull, or hf download"]
    if pointers:
        write = found if needed else warned
        state.findings.append(
            write("truncated", title, remedies=remedies, paths=pointers[:20], needed=needed[:20])
        )
