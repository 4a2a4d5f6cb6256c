"""What a tokenizer of transformers says of itself: its vocabulary, its start token."""

from __future__ import annotations

from typing import Any

from assay.engines.scoring import TokenizerFacts, vocabulary_sha256
from assay.errors import AssayError


def tokenizer_facts(tokenizer: Any) -> TokenizerFacts:
    """What a comparison needs of the tokenizer that lies beside the weights."""
    return TokenizerFacts(
        sha256=vocabulary_sha256(tokenizer.get_vocab()),
        vocab_size=len(tokenizer),
        bos_id=start_token(tokenizer),
        encode=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        decode=lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)),
    )


def start_token(tokenizer: Any) -> int | None:
    """The id that the tokenizer puts before a text; None where it puts none, even if it names one
    (SmolLM2).
    """
    bos: int | None = tokenizer.bos_token_id
    return bos if bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos] else None


def document_start(tokenizer: Any) -> int:
    """The id after which a text of the model's own begins.

    The start token where the tokenizer puts one before a text, else `<|endoftext|>`, with which
    models that have no start token separate documents, else the start or end token that it names.
    AssayError where it has none of these.
    """
    between = tokenizer.get_vocab().get("<|endoftext|>")
    for token in (start_token(tokenizer), between, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise AssayError(
        "the tokenizer has no token that a text could begin after",
        finding_id="fidelity.text_unusable",
        remedy="give a file with --text",
    )
