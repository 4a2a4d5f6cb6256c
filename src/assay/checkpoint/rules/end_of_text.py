"""The tokens that end an answer: configs, tokenizer and template must agree."""

from __future__ import annotations

from collections.abc import Iterator

from assay.checkpoint.findings import warned
from assay.checkpoint.rules.chat_template import special_tokens, templates, turn_end
from assay.checkpoint.rules.tokenizer import Vocabulary, read_vocabulary, token_ids, token_text
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding

_REFERENCE = "https://github.com/vllm-project/vllm/pull/5954"


def check_end_of_text(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Engines stop at the generation config's tokens (else config.json's) and at the tokenizer's
    end token.
    """
    generation = token_ids(checkpoint.object("generation_config.json").get("eos_token_id"))
    configured = token_ids(checkpoint.text_config.get("eos_token_id")) | token_ids(
        checkpoint.config.get("eos_token_id")
    )
    if generation and configured - generation:
        said, stops = sorted(configured), sorted(generation)
        title = f"config.json ends at {said}, generation_config.json at {stops}"
        if configured & generation:
            title = (
                "generation_config.json drops end tokens of config.json:"
                f" {sorted(configured - generation)}"
            )
        detail = (
            "Engines stop at the tokens of generation_config.json only, and run on over the others."
        )
        remedies = [
            f"set eos_token_id of generation_config.json to {sorted(configured | generation)}"
        ]
        yield warned(
            "tokenizer_conflict",
            title,
            detail=detail,
            remedies=remedies,
            references=[_REFERENCE],
            config=said,
            generation_config=stops,
        )
    settings = checkpoint.object("tokenizer_config.json")
    text = token_text(settings.get("eos_token"))
    vocabulary = read_vocabulary(checkpoint.object("tokenizer.json"))
    if vocabulary is None:
        return
    own, stops_at = vocabulary.id_of(text) if text else None, generation or configured
    if own is not None and stops_at and own not in generation | configured:
        title = (
            f"the tokenizer ends with {text!r} ({own}), but the configs stop at {sorted(stops_at)}"
        )
        causes = ["the answer may never stop: its end token is not one that the engine knows"]
        evidence = {"token": text, "stops": sorted(stops_at)}
        yield warned(
            "tokenizer_conflict", title, causes=causes, references=[_REFERENCE], **evidence
        )
    yield from _turn_end(checkpoint, vocabulary, stops_at | ({own} if own is not None else set()))


def _turn_end(checkpoint: Checkpoint, vocabulary: Vocabulary, stops: set[int]) -> Iterator[Finding]:
    """The token that the chat template writes after an answer is one that the model learned to end
    with.
    """
    for where, template in templates(checkpoint).items() if stops else ():
        ends = turn_end(template, special_tokens(checkpoint), vocabulary.added)
        known = {vocabulary.added[token] for token in ends}
        if known and not known & stops:
            token = ends[0]
            title = (
                f"the chat template ends a turn with {token!r} ({vocabulary.added[token]}), and"
                " nothing stops there"
            )
            causes = ["eos_token_id is that of the base model, or was lost when converting"]
            detail = (
                "A model that learned this template writes the token and goes on: the answer runs"
                " into the next turn."
            )
            remedies = [f"add {vocabulary.added[token]} to eos_token_id of generation_config.json"]
            yield warned(
                "tokenizer_conflict",
                title,
                detail=detail,
                causes=causes,
                remedies=remedies,
                path=where,
                token=token,
                stops=sorted(stops),
            )
