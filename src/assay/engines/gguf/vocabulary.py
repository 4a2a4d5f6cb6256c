"""The tokenizer in a GGUF file, in the terms that other engines use, so that equal ones are seen to be equal."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from assay.engines.scoring import TokenizerFacts, vocabulary_sha256


def tokenizer_facts(library: Any, model: Any) -> TokenizerFacts:
    """Facts of the vocabulary of `model`. `bos_id` is the start token, None where the model puts none before a text."""
    vocabulary = library.llama_model_get_vocab(model)
    count = int(library.llama_vocab_n_tokens(vocabulary))
    adds_bos = bool(library.llama_vocab_get_add_bos(vocabulary))
    return TokenizerFacts(
        sha256=vocabulary_sha256(_pieces(library, vocabulary, count)),
        vocab_size=count,
        bos_id=int(library.llama_vocab_bos(vocabulary)) if adds_bos else None,
        encode=lambda text: _encode(library, vocabulary, text),
        decode=lambda ids: _decode(library, vocabulary, ids),
    )


def _pieces(library: Any, vocabulary: Any, count: int) -> dict[str, int]:
    """Piece to id, spelled as transformers spells them.

    Converters write the user's own tokens of SentencePiece vocabularies with spaces in place of ▁.
    """
    sentencepiece = library.llama_vocab_type(vocabulary) == library.LLAMA_VOCAB_TYPE_SPM
    pieces = {}
    for token in range(count):
        piece = library.llama_vocab_get_text(vocabulary, token).decode("utf-8", "surrogateescape")
        pieces[piece.replace(" ", "▁") if sentencepiece else piece] = token
    return pieces


def _encode(library: Any, vocabulary: Any, text: str) -> list[int]:
    """Ids of `text` without a start token; names of special tokens within it count as those tokens."""
    raw = text.encode("utf-8", "surrogatepass")
    size = len(raw) + 8
    ids = (library.llama_token * size)()
    count = library.llama_tokenize(vocabulary, raw, len(raw), ids, size, False, True)
    if count < 0:
        raise ValueError(f"llama.cpp needs {-count} tokens for {len(raw)} bytes")
    return list(ids[:count])


def _decode(library: Any, vocabulary: Any, ids: Sequence[int]) -> str:
    """Text of `ids`, special tokens included; bytes that are no UTF-8 become the replacement character."""
    tokens = (library.llama_token * len(ids))(*ids)
    size = 16 * len(ids) + 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        count = library.llama_detokenize(vocabulary, tokens, len(ids), buffer, size, False, True)
        if count >= 0:
            return buffer.raw[:count].decode("utf-8", "replace")
        size = -count
