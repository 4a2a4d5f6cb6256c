"""The tokenizer of a GGUF file, as llama.cpp applies it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import TokenizerFacts, vocabulary_sha256

if TYPE_CHECKING:
    pass

CELLS = 256
"""llama.cpp pads the cache of a sequence to a multiple of this."""


def tokenizer_facts(library: Any, model: Any) -> TokenizerFacts:
    """Facts of the vocabulary of `model`. `bos_id` is the start token, None where the model puts
    none before a text.
    """
    vocabulary = library.llama_model_get_vocab(model)
    count = int(library.llama_vocab_n_tokens(vocabulary))
    # Converters write the user's own tokens of SentencePiece vocabularies with spaces in place of
    # transformers' ▁.
    sentencepiece = library.llama_vocab_type(vocabulary) == library.LLAMA_VOCAB_TYPE_SPM
    pieces = {}
    for token in range(count):
        piece = library.llama_vocab_get_text(vocabulary, token).decode("utf-8", "surrogateescape")
        pieces[piece.replace(" ", "▁") if sentencepiece else piece] = token
    adds_bos = bool(library.llama_vocab_get_add_bos(vocabulary))
    return TokenizerFacts(
        sha256=vocabulary_sha256(pieces),
        vocab_size=count,
        bos_id=int(library.llama_vocab_bos(vocabulary)) if adds_bos else None,
        encode=lambda text: encode(library, vocabulary, text),
        decode=lambda ids: decode(library, vocabulary, ids),
    )


def encode(library: Any, vocabulary: Any, text: str) -> list[int]:
    """Ids of `text` without a start token; names of special tokens within it count as those
    tokens.
    """
    raw = text.encode("utf-8", "surrogatepass")
    size = len(raw) + 8
    ids = (library.llama_token * size)()
    count = library.llama_tokenize(vocabulary, raw, len(raw), ids, size, False, True)
    if count < 0:
        raise ValueError(f"llama.cpp needs {-count} tokens for {len(raw)} bytes")
    return list(ids[:count])


def decode(library: Any, vocabulary: Any, ids: Sequence[int]) -> str:
    """Text of `ids`, special tokens included; bytes that are no UTF-8 become the replacement
    character.
    """
    tokens = (library.llama_token * len(ids))(*ids)
    size = 16 * len(ids) + 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        count = library.llama_detokenize(vocabulary, tokens, len(ids), buffer, size, False, True)
        if count >= 0:
            return buffer.raw[:count].decode("utf-8", "replace")
        size = -count
