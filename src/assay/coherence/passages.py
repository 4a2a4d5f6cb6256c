"""Fixed texts that a model scores, each by itself or deep in a context.

A sane language model needs well under 2 bits for a byte of English; a broken one needs more, long
before its text looks wrong. Against a reference, which scores the same texts, much smaller
differences show.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import cache
from importlib.resources import files

from assay.coherence.filler import filler
from assay.coherence.record import PassageScore
from assay.engines import Engine, score_all

LONGEST_CONTEXT = 4096
"""Deepest position, in tokens, at which texts are scored."""
LEAST_CONTEXT = 512
"""A shorter context says nothing of depth."""
LEAST_TEXTS = 8
"""So many texts must be scored on both sides for a comparison."""
MARGIN_TOKENS = 32
CHARS_PER_TOKEN = 4.2
"""Of the texts, in the tokenizers of the field: for planning only."""
_BETWEEN = "\n\n"
_TOGETHER = 4


@cache
def passages() -> tuple[str, ...]:
    """The fixed texts, shipped with assay."""
    text = (files("assay.coherence") / "passages.txt").read_text(encoding="utf-8")
    body = "\n".join(line for line in text.splitlines() if not line.startswith("# Fixed texts"))
    return tuple(block.strip("\n") for block in body.split("\n----\n"))


def planned_tokens(texts: int, context: int) -> int:
    """About how many tokens `score_alone` (context 0) or `score_in_context` sends."""
    alone = round(sum(map(len, passages()[:texts])) / CHARS_PER_TOKEN)
    return min(alone, context) + context if context else alone


def score_alone(engine: Engine, count: int) -> Iterator[PassageScore]:
    """Score the first `count` texts, each by itself; a few in one request where the engine takes
    that.
    """
    for begin in range(0, count, _TOGETHER):
        part = passages()[begin : min(begin + _TOGETHER, count)]
        for index, scores in enumerate(score_all(engine, part), begin):
            yield PassageScore(_name(index), 0, scores.nll, len(passages()[index].encode()))


def score_in_context(engine: Engine, context: int) -> Iterator[PassageScore]:
    """Score the texts behind one another, twice: from the start, and behind a filler, up to
    `context` tokens.

    One request scores all texts that fit, each at its own depth. Needs the engine's own tokenizer,
    to know which tokens are those of which text; the second order begins with the second half of
    the texts.
    """
    half = len(passages()) // 2
    orders = (list(range(len(passages()))), [*range(half, len(passages())), *range(half)])
    first = yield from _score_together(engine, orders[0], "", context)
    room = context - first
    if room >= LEAST_CONTEXT // 4:
        # Where the texts leave room, what stands before them is as deep as the context allows.
        yield from _score_together(engine, orders[1], filler("depth", room) + _BETWEEN, context)
    else:
        yield from _score_together(engine, orders[1], "", context)


def _score_together(
    engine: Engine, order: list[int], before: str, context: int
) -> Generator[PassageScore, None, int]:
    """Scores of the texts in this order behind `before`, as many as fit into `context` tokens;
    returns the tokens sent.
    """
    text, spans = before, list[tuple[int, int, int]]()
    for index in order:
        start = len(engine.tokenize(text)) if text else 0
        longer = text + passages()[index]
        end = len(engine.tokenize(longer))
        if end > context:
            break
        spans.append((index, start, end))
        text = longer + _BETWEEN
    text = text.removesuffix(_BETWEEN)
    if not spans:
        return 0
    logprobs = engine.score(text).token_logprobs
    special = len(logprobs) - len(engine.tokenize(text))  # a start token, where the engine adds one
    for index, start, end in spans:
        if not start:  # by itself, it was scored before
            continue
        nats = -sum(
            value for value in logprobs[special + start : special + end] if value is not None
        )
        yield PassageScore(_name(index), start, nats, len(passages()[index].encode()))
    return spans[-1][2]


def _name(index: int) -> str:
    return f"p{index:02d}"
