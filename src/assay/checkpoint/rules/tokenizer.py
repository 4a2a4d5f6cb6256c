"""The tokenizer against itself, against its config and against the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from assay.checkpoint.findings import SHOWN, found, plural, some, warned
from assay.checkpoint.rules.vocabulary import (
    TOKENIZER_FILES,
    Vocabulary,
    embedding_rows,
    read_vocabulary,
    token_text,
)
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.verdict import Finding

SMALLEST_SHARE = 0.8
"""A tokenizer that fills less of the embedding than this belongs to another model, as a rule."""


def check_tokenizer(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings on tokenizer.json, tokenizer_config.json and the special tokens of config.json."""
    yield from _configured_ids(checkpoint)
    if not any(name in checkpoint.files for name in TOKENIZER_FILES):
        title = "no tokenizer: a server needs --tokenizer"
        yield warned("tokenizer_conflict", title, looked_for=list(TOKENIZER_FILES))
        return
    settings = checkpoint.document("tokenizer_config.json")
    if isinstance(settings, BrokenDocument):
        yield found("tokenizer_conflict", f"tokenizer_config.json cannot be read: {settings.reason}")
        settings = None
    document = checkpoint.document("tokenizer.json")
    if isinstance(document, BrokenDocument):
        yield found("tokenizer_conflict", f"tokenizer.json cannot be read: {document.reason}")
        return
    if document is None:
        return
    vocabulary = read_vocabulary(document)
    if isinstance(vocabulary, str):
        yield found("tokenizer_conflict", f"tokenizer.json cannot be used: {vocabulary}")
        return
    yield from _against_embedding(checkpoint, vocabulary)
    yield from _inside(document, vocabulary)
    if isinstance(settings, dict):
        yield from _against_config(settings, vocabulary)


def _configured_ids(checkpoint: Checkpoint) -> Iterator[Finding]:
    rows = embedding_rows(checkpoint)
    if not rows:
        return
    for name, config in (
        ("config.json", checkpoint.text_config),
        ("generation_config.json", checkpoint.object("generation_config.json")),
    ):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            value = config.get(key)
            outside = [
                v for v in (value if isinstance(value, list) else [value]) if type(v) is int and v >= rows
            ]
            if outside:
                title = f"{key} {outside[0]} of {name} is outside the {rows} rows of the embedding"
                yield found("tokenizer_conflict", title, key=key, value=outside, rows=rows)


def _against_embedding(checkpoint: Checkpoint, vocabulary: Vocabulary) -> Iterator[Finding]:
    rows, highest = embedding_rows(checkpoint), vocabulary.highest
    if not rows:
        return
    if highest >= rows:
        beyond = [t for t, i in (*vocabulary.ids.items(), *vocabulary.added.items()) if i >= rows]
        title = f"{plural(len(beyond), 'token')} with ids beyond the {rows} rows of the embedding (highest id {highest})"
        causes = [
            "the tokenizer belongs to another model",
            "tokens were added without resizing the embedding",
        ]
        yield found(
            "tokenizer_conflict", title, causes=causes, tokens=beyond[:SHOWN], highest=highest, rows=rows
        )
    elif highest + 1 < SMALLEST_SHARE * rows:
        title = f"the tokenizer has {highest + 1} tokens, the embedding {rows} rows"
        causes = ["the tokenizer belongs to another model"]
        yield warned("tokenizer_conflict", title, causes=causes, tokens=highest + 1, rows=rows)


def _inside(document: dict[str, Any], vocabulary: Vocabulary) -> Iterator[Finding]:
    if vocabulary.repeated:
        title = f"{plural(vocabulary.repeated, 'id')} of tokenizer.json given to two tokens"
        yield found("tokenizer_conflict", title, repeated=vocabulary.repeated)
    by_id = {i: t for t, i in vocabulary.ids.items()}
    clashing = [t for t, i in vocabulary.added.items() if i in by_id and by_id[i] != t]
    if clashing:
        title = f"{plural(len(clashing), 'added token')} with the id of another token: {some(clashing)}"
        yield found("tokenizer_conflict", title, tokens=clashing[:SHOWN])
    model = document["model"]
    merges = model.get("merges") if model.get("type") in {None, "BPE"} else None
    lost = _lost_merges(merges, vocabulary.ids) if isinstance(merges, list) else []
    if lost:
        title = f"{plural(len(lost), 'merge')} of tokenizer.json with parts that are no tokens: {some(lost)}"
        yield found("tokenizer_conflict", title, merges=lost[:SHOWN], count=len(lost))


def _lost_merges(merges: list[Any], ids: dict[str, int]) -> list[str]:
    """Merges whose parts or result are missing; the tokenizers library refuses to load them."""
    lost = []
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) for p in parts):
            lost.append(str(merge)[:40])
        elif parts[0] not in ids or parts[1] not in ids or parts[0] + parts[1] not in ids:
            lost.append(" ".join(parts)[:40])
    return lost


def _against_config(settings: dict[str, Any], vocabulary: Vocabulary) -> Iterator[Finding]:
    decoder = settings.get("added_tokens_decoder")
    by_id = {i: t for t, i in (*vocabulary.ids.items(), *vocabulary.added.items())}
    wrong = [
        f"{key}: {token_text(entry)!r}, not {by_id[int(key)]!r}"
        for key, entry in (decoder.items() if isinstance(decoder, dict) else ())
        if key.isdigit() and int(key) in by_id and token_text(entry) != by_id[int(key)]
    ]
    if wrong:
        title = f"tokenizer_config.json and tokenizer.json disagree on {plural(len(wrong), 'token')} ({some(wrong, 2)})"
        yield found(
            "tokenizer_conflict", title, causes=["the two come from different models"], tokens=wrong[:SHOWN]
        )
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        text = token_text(settings.get(key))
        if text is not None and vocabulary.id_of(text) is None:
            write = found if key == "eos_token" else warned
            yield write("tokenizer_conflict", f"{key} {text!r} is not in the vocabulary", key=key, token=text)
