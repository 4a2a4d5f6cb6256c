"""How an engine or a text of the command line is named, and whether it has changed."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from pathlib import Path

from assay.engines.server.endpoint import without_credentials

PREFIXES = ("hf:", "vllm:", "gguf:", "run:", "pack:", "jsonl:", "datasets:")


def label_of(spec: str, among: Sequence[str] = ()) -> str:
    """A short name without folders: `hf:model?dtype=float32`. Where two would be equal, their
    number is added.
    """
    label = _short(spec)
    same = [other for other in among if _short(other) == label]
    return label if len(same) < 2 else f"{label} #{same.index(spec) + 1}"


def _short(spec: str) -> str:
    if "://" in spec:
        return printable(spec)
    head, mark, options = spec.partition("?")
    prefix = next((p for p in PREFIXES if head.startswith(p)), "")
    kept = "&".join(_without_folders(option) for option in options.split("&"))
    return f"{prefix}{Path(head.removeprefix(prefix)).name}{mark}{kept}"


def _without_folders(option: str) -> str:
    """`python=/a/b/python` as `python=python`: a folder of this machine has no place in
    a result.
    """
    name, mark, value = option.partition("=")
    return f"{name}={Path(value).name}" if mark and Path(value).is_absolute() else option


def printable(spec: str) -> str:
    """A spec without a user and a password, which the URL of a server may hold."""
    head, mark, options = spec.partition("?")
    return f"{without_credentials(head)}{mark}{options}" if "://" in head else spec


def fingerprint(spec: str) -> str:
    """Hash of a spec and of name, size and time of the files it names; of the spec alone where it
    names none.

    Two ways to write one path, or the same options in another order, have the same fingerprint.
    """
    head, mark, options = spec.partition("?")
    prefix = next((p for p in PREFIXES if head.startswith(p)), "")
    head = head.removeprefix(prefix)
    head = str(Path(head).expanduser()) if head.startswith("~") else head
    whole = Path(head).exists()
    canonical = (
        f"{prefix}{Path(head).resolve()}{mark}{'&'.join(sorted(options.split('&')))}"
        if whole
        else spec
    )
    digest = hashlib.sha256(canonical.encode())
    paths = [Path(head)] if whole else [Path(p) for p in sorted(glob.glob(head))]  # noqa: PTH207 - takes absolute patterns
    for path in paths:
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
        for file in files:
            facts = file.stat()
            digest.update(f"{file.name}\t{facts.st_size}\t{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()
