"""The checkpoint as the rules see it: documents, headers and tensors, wherever the bytes are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from assay.checkpoint.safetensors import Header, Tensor, modules

MAX_DOCUMENT_BYTES = 256 << 20
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class BrokenDocument:
    """A JSON file that is there and cannot be read as an object."""

    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint.

    `files` gives the size of every file by its relative path; `read` returns the bytes of a small one; `headers` are
    those of the safetensors files that belong to the model (an index decides, where there is one).
    """

    kind: str
    files: Mapping[str, int]
    read: Callable[[str], bytes]
    headers: Mapping[str, Header] = field(default_factory=dict)
    stray: frozenset[str] = frozenset()
    """Weight files that the index does not name: engines do not load them."""

    def document(self, name: str) -> dict[str, Any] | BrokenDocument | None:
        """A JSON file of the checkpoint as an object; None if it is not there."""
        if name not in self._documents:
            self._documents[name] = self._load(name)
        return self._documents[name]

    def object(self, name: str) -> dict[str, Any]:
        """Like `document`, with an empty object for a file that is missing or broken."""
        found = self.document(name)
        return found if isinstance(found, dict) else {}

    def text(self, name: str) -> str | None:
        """A small text file, or None if it is not there or not UTF-8."""
        if name not in self.files or self.files[name] > MAX_DOCUMENT_BYTES:
            return None
        try:
            return self.read(name).decode("utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    @cached_property
    def _documents(self) -> dict[str, dict[str, Any] | BrokenDocument | None]:
        return {}

    def _load(self, name: str) -> dict[str, Any] | BrokenDocument | None:
        if name not in self.files:
            return None
        if self.files[name] > MAX_DOCUMENT_BYTES:
            return BrokenDocument(f"it is {self.files[name]} bytes long")
        try:
            document = json.loads(self.read(name).decode("utf-8"))
        except OSError as error:
            return BrokenDocument(error.strerror or str(error))
        except RecursionError:
            return BrokenDocument("it is nested too deeply")
        except ValueError as error:
            return BrokenDocument(str(error)[:120])
        return document if isinstance(document, dict) else BrokenDocument("it is not an object")

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`, empty if there is none."""
        return self.object("config.json")

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """The configuration of the language model: `text_config` (or `llm_config`) where the config nests one."""
        for key in ("text_config", "llm_config", "language_config"):
            nested = self.config.get(key)
            if isinstance(nested, dict) and nested:
                return nested
        return self.config

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that an engine would load, by name; of a doubled one, the last."""
        return {
            tensor.name: tensor
            for file, header in self.headers.items()
            if file not in self.stray
            for tensor in header.tensors
        }

    @cached_property
    def modules(self) -> dict[str, dict[str, Tensor]]:
        """`tensors` grouped by module, then by parameter."""
        return modules(self.tensors.values())

    @cached_property
    def prefix(self) -> str:
        """What stands before `layers.0.…` of the language model, e.g. `model.` or `model.language_model.`."""
        for name in self.modules:
            if name.endswith("embed_tokens") and ".layers." not in name and not name.startswith("mtp"):
                return name.removesuffix("embed_tokens")
        for name in self.modules:
            head, marker, _ = name.partition("layers.0.")
            if marker and "vis" not in head and not head.startswith(("mtp", "audio")):
                return head
        return "model."

    def dims(self, key: str) -> int | None:
        """A natural number of the language model's config, or None."""
        value = self.text_config.get(key)
        return value if type(value) is int and value >= 0 else None
