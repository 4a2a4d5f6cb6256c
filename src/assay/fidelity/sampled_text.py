"""Text that the reference wrote itself: on it, fidelity is measured where the model really is when it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from assay.engines.base import Capability, Engine, Reply, Request
from assay.errors import AssayError
from assay.fidelity.text import SELF, Text
from assay.progress import Advance

_ROUND = 16
"""Texts that are asked for at once."""


@runtime_checkable
class _Batched(Protocol):
    def generate_batch(self, requests: Sequence[Request]) -> list[Reply]: ...


def generate_text(
    engine: Engine,
    *,
    start: tuple[int, ...],
    tokens: int,
    per_text: int = 1024,
    seed: int = 0,
    advance: Advance = lambda: None,
) -> Text:
    """At least `tokens` tokens sampled at temperature 1 from `engine`, in texts of `per_text` tokens.

    `start` are the ids that every text continues: the start token, or whatever separates documents for the model.
    Text i has the seed `seed` + i, and goes on past the end-of-text token. `advance` is called after each text.
    AssayError where the engine writes nothing.
    """
    for needed in (Capability.TOKEN_IDS_PROMPT, Capability.IGNORE_EOS):
        engine.capabilities.require(needed, "text sampled from the reference")
    texts: list[str] = []
    written = 0
    while written < tokens:
        wanted = min(_ROUND, -(-(tokens - written) // per_text))
        replies = _generate(engine, [_request(start, per_text, seed + len(texts) + i) for i in range(wanted)])
        new = sum(reply.completion_tokens or 0 for reply in replies)
        if new == 0:
            raise AssayError(
                "the reference wrote no text of its own",
                finding_id="fidelity.text_unusable",
                remedy="give a file with --text",
            )
        written += new
        texts += [reply.content for reply in replies]
        for _ in replies:
            advance()
    return Text((SELF,), "\n\n".join(texts))


def _request(start: tuple[int, ...], max_tokens: int, seed: int) -> Request:
    return Request(prompt=start, max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)


def _generate(engine: Engine, requests: list[Request]) -> list[Reply]:
    if isinstance(engine, _Batched):
        return engine.generate_batch(requests)
    return [engine.generate(request) for request in requests]
