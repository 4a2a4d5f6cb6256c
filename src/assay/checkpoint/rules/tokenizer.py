"""The tokenizer against itself, its config and the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from assay.checkpoint.document_types import Document
from assay.checkpoint.draft import is_draft
from assay.checkpoint.findings import SHOWN, found, plural, some, warned
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.verdict import Finding

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
    "tokenizer.tiktoken",
    "qwen.tiktoken",
)

SMALLEST_SHARE = 0.8
"""A tokenizer that fills less of the embedding than this belongs to another model, as a rule."""


@dataclass(frozen=True)
class Vocabulary:
    """Token ids by text: the model's own and the added ones. `repeated` counts ids that two tokens
    share.
    """

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


def read_vocabulary(document: Document) -> Vocabulary | None:
    """The vocabulary of a tokenizer.json, or None if it gives none that can be read."""
    ids = (document.get("model") or {}).get("vocab")
    if ids is None:
        return None
    if isinstance(ids, list):  # Unigram: [token, score] by id
        ids = {row[0]: i for i, row in enumerate(ids)}
    entries = document.get("added_tokens") or ()
    added = {
        e["content"]: e["id"]
        for e in entries
        if e.get("content") is not None and e.get("id") is not None
    }
    return Vocabulary(ids, added, len(ids) - len(set(ids.values())))


def embedding_rows(checkpoint: Checkpoint) -> int | None:
    """Rows of the embedding as stored, else as configured."""
    tensor = checkpoint.tensors.get(f"{checkpoint.prefix}embed_tokens.weight")
    if tensor is not None and len(tensor.shape) == 2 and tensor.dtype != "U8":
        return tensor.shape[0]
    return checkpoint.dims("vocab_size")


def check_tokenizer(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings on tokenizer.json, tokenizer_config.json and the special tokens of config.json."""
    yield from _configured_ids(checkpoint)
    if not any(name in checkpoint.files for name in TOKENIZER_FILES):
        if not is_draft(checkpoint):  # which is served with its target's
            title = "no tokenizer: a server needs --tokenizer"
            yield warned("tokenizer_conflict", title, looked_for=list(TOKENIZER_FILES))
        return
    for name in ("tokenizer_config.json", "tokenizer.json"):
        broken = checkpoint.document(name)
        if isinstance(broken, BrokenDocument):
            yield found("tokenizer_conflict", f"{name} cannot be read: {broken.reason}")
    document = checkpoint.document("tokenizer.json")
    if not isinstance(document, dict):
        return
    vocabulary = read_vocabulary(document)
    if vocabulary is None:
        if not checkpoint.nonsense("tokenizer.json"):
            yield found(
                "tokenizer_conflict",
                "tokenizer.json cannot be used: it has no model with a vocabulary",
            )
        return
    yield from _against_embedding(checkpoint, vocabulary)
    yield from _inside(document, vocabulary)
    yield from _against_config(checkpoint.object("tokenizer_config.json"), vocabulary)


def token_ids(value: Any) -> set[int]:
    """A token id, a list of ids, or nothing, as a set."""
    return set(value) if isinstance(value, list) else set() if value is None else {value}


def _configured_ids(checkpoint: Checkpoint) -> Iterator[Finding]:
    rows = embedding_rows(checkpoint)
    generation = checkpoint.object("generation_config.json")
    for name, config in (
        ("config.json", checkpoint.text_config),
        ("generation_config.json", generation),
    ):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            outside = sorted(v for v in token_ids(config.get(key)) if rows and v >= rows)
            if outside:
                title = f"{key} {outside[0]} of {name} is outside the {rows} rows of the embedding"
                yield found("tokenizer_conflict", title, key=key, value=outside, rows=rows)


def _against_embedding(checkpoint: Checkpoint, vocabulary: Vocabulary) -> Iterator[Finding]:
    rows, highest = embedding_rows(checkpoint), vocabulary.highest
    if rows and highest >= rows:
        beyond = [t for t, i in (*vocabulary.ids.items(), *vocabulary.added.items()) if i >= rows]
        title = (
            f"{plural(len(beyond), 'token')} with ids beyond the {rows} rows of the embedding"
            f" (highest id {highest})"
        )
        causes = [
            "the tokenizer belongs to another model",
            "tokens were added without resizing the embedding",
        ]
        yield found(
            "tokenizer_conflict",
            title,
            causes=causes,
            tokens=beyond[:SHOWN],
            highest=highest,
            rows=rows,
        )
    elif rows and highest + 1 < SMALLEST_SHARE * rows:
        title = f"the tokenizer has {highest + 1} tokens, the embedding {rows} rows"
        causes = ["the tokenizer belongs to another model"]
        yield warned("tokenizer_conflict", title, causes=causes, tokens=highest + 1, rows=rows)


def _inside(document: Document, vocabulary: Vocabulary) -> Iterator[Finding]:
    if vocabulary.repeated:
        title = f"{plural(vocabulary.repeated, 'id')} of tokenizer.json given to two tokens"
        yield found("tokenizer_conflict", title, repeated=vocabulary.repeated)
    by_id = {i: t for t, i in vocabulary.ids.items()}
    clashing = [t for t, i in vocabulary.added.items() if i in by_id and by_id[i] != t]
    if clashing:
        title = (
            f"{plural(len(clashing), 'added token')} with the id of another token: {some(clashing)}"
        )
        yield found("tokenizer_conflict", title, tokens=clashing[:SHOWN])
    entries = document.get("added_tokens") or ()
    bare = [e for e in entries if e.get("id") is None or e.get("content") is None]
    if bare:
        yield found(
            "tokenizer_conflict",
            f"{plural(len(bare), 'added token')} without an id or without content",
        )
    model = document["model"]
    merges = model.get("merges") or () if model.get("type") in {None, "BPE"} else ()
    lost = _lost_merges(merges, vocabulary.ids)
    if lost:
        title = (
            f"{plural(len(lost), 'merge')} of tokenizer.json with parts that are no tokens:"
            f" {some(lost)}"
        )
        yield found("tokenizer_conflict", title, merges=lost[:SHOWN], count=len(lost))


def _lost_merges(merges: list[Any] | tuple[()], ids: dict[str, int]) -> list[str]:
    """Merges whose parts or result are missing; the tokenizers library refuses to load them."""
    lost = []
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if (
            not isinstance(parts, list)
            or len(parts) != 2
            or not all(isinstance(p, str) for p in parts)
        ):
            lost.append(repr(merge)[:40])
        elif parts[0] not in ids or parts[1] not in ids or parts[0] + parts[1] not in ids:
            lost.append(" ".join(parts)[:40])
    return lost


def _against_config(settings: Document, vocabulary: Vocabulary) -> Iterator[Finding]:
    decoder = settings.get("added_tokens_decoder") or {}
    by_id = {i: t for t, i in (*vocabulary.ids.items(), *vocabulary.added.items())}
    numbers = {key: int(key) for key in decoder if key.isdecimal() and len(key) < 10}
    wrong = [
        f"{key}: {token_text(decoder[key])!r}, not {by_id[i]!r}"
        for key, i in numbers.items()
        if i in by_id and token_text(decoder[key]) != by_id[i]
    ]
    if wrong:
        title = (
            f"tokenizer_config.json and tokenizer.json disagree on {plural(len(wrong), 'token')}"
            f" ({some(wrong, 2)})"
        )
        causes = ["the two come from different models"]
        yield found("tokenizer_conflict", title, causes=causes, tokens=wrong[:SHOWN])
    strange = [key for key in decoder if key not in numbers]
    if strange:
        title = (
            "added_tokens_decoder of tokenizer_config.json has keys that are no ids:"
            f" {some(k[:40] for k in strange)}"
        )
        yield found("tokenizer_conflict", title)
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        text = token_text(settings.get(key))
        if text is not None and vocabulary.id_of(text) is None:
            write = found if key == "eos_token" else warned
            yield write(
                "tokenizer_conflict",
                f"{key} {text[:40]!r} is not in the vocabulary",
                key=key,
                token=text[:40],
            )


def token_text(value: Any) -> str | None:
    """A special token of tokenizer_config.json, written as a string or as an object with
    `content`.
    """
    return (value.get("content") if isinstance(value, dict) else value) or None
