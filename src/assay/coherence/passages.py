"""Bits per byte of fixed texts: how well does the model predict plain text, near the start and deep in the context?

A sane language model needs well under 2 bits for a byte of English; a broken one needs more, long before its text
looks wrong. Against a reference, which scores the same texts, much smaller differences show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files

from assay.coherence.record import PassageScore
from assay.engines.base import Capability, Engine

LONGEST_CONTEXT = 4096
"""Deepest position, in tokens, at which passages are scored."""

_DEEP_PASSAGES = 4
_MARGIN_TOKENS = 32


@cache
def passages() -> tuple[str, ...]:
    """The fixed texts, shipped with assay."""
    text = (files("assay.coherence") / "data" / "passages.txt").read_text(encoding="utf-8")
    body = "\n".join(line for line in text.splitlines() if not line.startswith("# Fixed texts"))
    return tuple(block.strip("\n") for block in body.split("\n----\n"))


def score_passages(
    engine: Engine, max_model_len: int | None, on_done: Callable[[], None] = lambda: None
) -> Iterator[PassageScore]:
    """Score every passage by itself, and a few of them again at half and at full depth of the context.

    Depth needs the engine's own tokenizer; without it only the passages by themselves are scored.
    """
    texts = passages()
    for index, text in enumerate(texts):
        scores = engine.score(text)
        yield PassageScore(f"p{index:02d}", 0, scores.nll, len(text.encode()))
        on_done()
    if Capability.TOKENIZE not in engine.capabilities:
        return
    counts = [len(engine.tokenize(text)) for text in texts]
    usable = min(max_model_len or LONGEST_CONTEXT, LONGEST_CONTEXT) - _MARGIN_TOKENS
    for share in (0.5, 1.0):
        for target in range(_DEEP_PASSAGES):
            context = _context(texts, counts, target, int(usable * share) - counts[target])
            if context is None:
                return
            yield _score_last(engine, f"p{target:02d}", f"{context}\n\n", texts[target], counts[target])
            on_done()


def planned_scores(max_model_len: int | None) -> int:
    """How many scores `score_passages` will yield at most, for a progress bar."""
    return len(passages()) + 2 * _DEEP_PASSAGES


def _context(texts: tuple[str, ...], counts: list[int], target: int, tokens: int) -> str | None:
    """Other passages, over and over, up to `tokens` tokens; None where not even two of them fit."""
    chosen: list[str] = []
    total, index = 0, target
    while True:
        index = (index + 1) % len(texts)
        if index == target:
            continue
        if total + counts[index] + 2 > tokens:
            break
        chosen.append(texts[index])
        total += counts[index] + 2
    return "\n\n".join(chosen) if len(chosen) >= 2 else None


def _score_last(engine: Engine, name: str, context: str, text: str, tokens: int) -> PassageScore:
    """Score `context + text` and keep the tokens of `text`, which are the last ones."""
    logprobs = engine.score(context + text).token_logprobs
    last = logprobs[-tokens:]
    nats = -sum(value for value in last if value is not None)
    return PassageScore(name, len(logprobs) - tokens, nats, len(text.encode()))
