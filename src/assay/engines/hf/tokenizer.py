"""Facts of a tokenizer of transformers, the same for every engine that has one."""

from __future__ import annotations

from typing import Any

from assay.engines.scoring import TokenizerFacts, vocabulary_sha256


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
    """The id that the tokenizer puts before a text; None where it puts none, even if it names one (SmolLM2)."""
    bos: int | None = tokenizer.bos_token_id
    return bos if bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos] else None
