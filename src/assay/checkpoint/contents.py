"""Say which files of a checkpoint nobody opens."""

from __future__ import annotations

from assay.checkpoint.digests import PICKLES, WEIGHTS
from assay.checkpoint.findings import found, noted, plural, some, warned
from assay.checkpoint.state import VerifyState


def examine_contents(state: VerifyState) -> None:
    """Files that could not be reached, a folder without a config, and pickles."""
    for name, reason in state.opened.problems:
        title = f"cannot read {name}: {reason}"
        state.findings.append(found("not_examined", title, path=name, reason=reason))
    _configless(state)
    _pickles(state)


def _configless(state: VerifyState) -> None:
    """A folder without config.json (and without GGUF) can be hashed, but not examined."""
    checkpoint = state.opened.checkpoint
    files = checkpoint.files
    if checkpoint.kind in {"gguf", "safetensors"} or "config.json" in files:
        return
    if any(f.endswith(".gguf") for f in files):
        return
    if "adapter_config.json" in files:
        title = "an adapter: its tensors were not held against a model"
        state.findings.append(noted("not_examined", title))
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
