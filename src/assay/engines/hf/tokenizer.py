"""The tokenizer of a checkpoint, read once for all engines of a process that use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import transformers

from assay.engines.scoring import TokenizerFacts
from assay.engines.tokenizer import tokenizer_facts

_WEIGHTS = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth"})
_KEPT = 4
"""Tokenizers that a process keeps: those of a reference, its candidates and a draft."""
_TEXTS = 2
"""Encoded texts that are kept of each tokenizer: reference and candidate score the same one."""


def read_tokenizer(model: str, *, local_files_only: bool = False) -> Any:
    """The tokenizer of a model, without code of its own.

    Args:
        model: A folder, whose tokenizer is read again only after one of its files has changed, or a
            name on the Hub.
        local_files_only: Ask the Hub for nothing.

    Returns:
        The tokenizer of transformers. Callers share it, so they must not change it.
    """
    folder = Path(model)
    if not folder.is_dir():
        return _read(model, local_files_only)
    return _of_folder(model, str(folder.resolve()), _state(folder))


@lru_cache(maxsize=_KEPT)
def facts_of(tokenizer: Any) -> TokenizerFacts:
    """What a comparison needs of a tokenizer, with the last texts that it encoded."""
    facts = tokenizer_facts(tokenizer)

    @lru_cache(maxsize=_TEXTS)
    def encoded(text: str) -> Sequence[int]:
        return tuple(facts.encode(text))

    return replace(facts, encode=lambda text: list(encoded(text)))


@lru_cache(maxsize=_KEPT)
def _of_folder(model: str, resolved: str, state: Sequence[tuple[str, int, int]]) -> Any:
    """`resolved` and `state` are a part of the key alone."""
    return _read(model, local_files_only=True)


def _read(model: str, local_files_only: bool) -> Any:
    return transformers.AutoTokenizer.from_pretrained(
        model, trust_remote_code=False, local_files_only=local_files_only
    )


def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change (ns) of each file that is no weight."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix not in _WEIGHTS and path.is_file():
            facts = path.stat()
            found.append((path.name, facts.st_size, facts.st_mtime_ns))
    return tuple(found)
