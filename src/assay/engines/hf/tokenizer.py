"""Facts of a tokenizer of transformers, the same for every engine that has one."""

from __future__ import annotations

from typing import Any

from assay.engines.scoring import TokenizerFacts, vocabulary_sha256


def tokenizer_facts(tokenizer: Any) -> TokenizerFacts:
    """What a comparison needs of the tokenizer that lies beside the weights."""
    return TokenizerFacts(
        sha256=vocabulary_sha256(tokenizer.get_vocab()),
        vocab_size=len(tokenizer),
        bos_id=tokenizer.bos_token_id,
        encode=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        decode=lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)),
    )
