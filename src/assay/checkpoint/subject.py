"""The checkpoint as the rules see it: documents, headers and tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from assay.checkpoint.document_types import Document, Nonsense, clean
from assay.checkpoint.documents import INDEX, NESTED, TABLES
from assay.checkpoint.safetensors import Header
from assay.checkpoint.tensors import Tensor, modules

MAX_DOCUMENT_BYTES = 128 << 20

MAX_OBJECTS = 4_000_000
"""Objects and lists of one document; a tokenizer with half a million merges has as many lists."""


@dataclass(frozen=True)
class BrokenDocument:
    """A JSON file that is there and cannot be read as an object."""

    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint.

    `files` gives the size of every file by its relative path; `read` returns the bytes of a small
    one; `headers` are those of the safetensors files that belong to the model (an index decides,
    where there is one).
    """

    kind: str
    files: Mapping[str, int]
    read: Callable[[str], bytes]
    headers: Mapping[str, Header] = field(default_factory=dict)
    stray: frozenset[str] = frozenset()
    """Weight files that the index does not name: engines do not load them."""
    _documents: dict[str, tuple[Document, list[Nonsense]] | BrokenDocument | None] = field(
        default_factory=dict, repr=False, compare=False
    )

    def document(self, name: str) -> Document | BrokenDocument | None:
        """A JSON file without the values that are nonsense; None if it is not there."""
        if name not in self._documents:
            self._documents[name] = self._load(name)
        found = self._documents[name]
        return found[0] if isinstance(found, tuple) else found

    def nonsense(self, name: str) -> list[Nonsense]:
        """The values of a JSON file that are not what their keys take."""
        self.document(name)
        found = self._documents[name]
        return found[1] if isinstance(found, tuple) else []

    def object(self, name: str) -> Document:
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

    def _load(self, name: str) -> tuple[Document, list[Nonsense]] | BrokenDocument | None:
        if name not in self.files:
            return None
        if self.files[name] > MAX_DOCUMENT_BYTES:
            return BrokenDocument(f"it is {self.files[name]} bytes long")
        try:
            raw = self.read(name)
            if raw.count(b"{") + raw.count(b"[") > MAX_OBJECTS:
                return BrokenDocument(f"it holds more than {MAX_OBJECTS} objects")
            document = json.loads(raw.decode("utf-8"))
        except OSError as error:
            return BrokenDocument(error.strerror or str(error))
        except RecursionError:
            return BrokenDocument("it is nested too deeply")
        except ValueError as error:
            return BrokenDocument(str(error)[:120])
        if not isinstance(document, dict):
            return BrokenDocument("it is not an object")
        return clean(document, TABLES.get(name, {}))

    @cached_property
    def config(self) -> Document:
        """`config.json`, empty if there is none."""
        return self.object("config.json")

    @cached_property
    def text_config(self) -> Document:
        """The configuration of the language model, where the config nests one; else the config
        itself.
        """
        return next((nested for key in NESTED if (nested := self.config.get(key))), self.config)

    @cached_property
    def model_type(self) -> str:
        """`model_type` of the language model, empty if the config gives none."""
        return self.text_config.get("model_type") or ""

    @cached_property
    def weight_map(self) -> dict[str, str] | None:
        """Shard by tensor name as the index has it, or None if there is no usable index."""
        return self.object(INDEX).get("weight_map")

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
        """What stands before `layers.0.…` of the language model, e.g. `model.` or
        `model.language_model.`.
        """
        for name in self.modules:
            if (
                name.endswith("embed_tokens")
                and ".layers." not in name
                and not name.startswith("mtp")
            ):
                return name.removesuffix("embed_tokens")
        for name in self.modules:
            head, marker, _ = name.partition("layers.0.")
            if marker and "vis" not in head and not head.startswith(("mtp", "audio")):
                return head
        return "model."

    def dims(self, key: str) -> int | None:
        """A whole number of the language model's config, or None."""
        value = self.text_config.get(key)
        return value if type(value) is int else None
