"""The vocabulary of a tokenizer.json: tokens, ids, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from assay.checkpoint.subject import Checkpoint

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model", "sentencepiece.bpe.model",
    "vocab.txt", "tokenizer.tiktoken", "qwen.tiktoken",
)  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """Token ids by text: the model's own and the added ones. `repeated` counts ids that two tokens share."""

    ids: dict[str, int]
    added: dict[str, int]
    repeated: int

    @property
    def highest(self) -> int:
        """The highest id (-1 for an empty vocabulary)."""
        return max((*self.ids.values(), *self.added.values()), default=-1)

    def id_of(self, token: str) -> int | None:
        """Id of a token, added or not."""
        return self.added.get(token, self.ids.get(token))


def read_vocabulary(document: dict[str, Any]) -> Vocabulary | str:
    """The vocabulary, or one line saying why there is none that can be read."""
    model = document.get("model")
    if not isinstance(model, dict):
        return "it has no model"
    raw = model.get("vocab")
    if isinstance(raw, dict):
        ids = raw
    elif isinstance(raw, list):  # Unigram: [token, score] by id
        ids = {str(row[0]): i for i, row in enumerate(raw) if isinstance(row, list) and row}
    else:
        return "its model has no vocabulary"
    if not all(type(v) is int and v >= 0 for v in ids.values()):
        return "its vocabulary has ids that are not natural numbers"
    added = {}
    for entry in document.get("added_tokens") or ():
        if (
            not isinstance(entry, dict)
            or type(entry.get("id")) is not int
            or not isinstance(entry.get("content"), str)
        ):
            return "an added token has no id or no content"
        added[entry["content"]] = entry["id"]
    return Vocabulary(ids, added, len(ids) - len(set(ids.values())))


def embedding_rows(checkpoint: Checkpoint) -> int | None:
    """Rows of the embedding as stored, else as configured."""
    tensor = checkpoint.tensors.get(f"{checkpoint.prefix}embed_tokens.weight")
    if tensor is not None and len(tensor.shape) == 2 and tensor.dtype != "U8":
        return tensor.shape[0]
    return checkpoint.dims("vocab_size")


def token_text(value: Any) -> str | None:
    """A special token of tokenizer_config.json, written as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
