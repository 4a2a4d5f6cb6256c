"""Which tokens end an answer: config.json, generation_config.json and the tokenizer must agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from assay.checkpoint.findings import warned
from assay.checkpoint.rules.vocabulary import Vocabulary, read_vocabulary, token_text
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding


def _ids(value: Any) -> set[int]:
    return {v for v in (value if isinstance(value, list) else [value]) if type(v) is int}


def check_end_of_text(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Engines stop at the generation config's tokens (else config.json's); the chat ends with the tokenizer's."""
    generation = _ids(checkpoint.object("generation_config.json").get("eos_token_id"))
    configured = _ids(checkpoint.text_config.get("eos_token_id")) | _ids(
        checkpoint.config.get("eos_token_id")
    )
    stops = generation | configured
    references = ["https://github.com/vllm-project/vllm/pull/5954"]
    if generation and configured and not generation & configured:
        title = f"config.json ends at {sorted(configured)}, generation_config.json at {sorted(generation)}"
        evidence = {"config": sorted(configured), "generation_config": sorted(generation)}
        yield warned("tokenizer_conflict", title, references=references, **evidence)
    text = token_text(checkpoint.object("tokenizer_config.json").get("eos_token"))
    vocabulary = read_vocabulary(checkpoint.object("tokenizer.json"))
    if text is None or not isinstance(vocabulary, Vocabulary):
        return
    own = vocabulary.id_of(text)
    if own is not None and stops and own not in stops:
        title = f"the tokenizer ends with {text!r} ({own}), but the configs stop at {sorted(stops)}"
        causes = ["the answer may never stop: its end token is not one that the engine knows"]
        yield warned(
            "tokenizer_conflict", title, causes=causes, references=references, token=text, stops=sorted(stops)
        )
