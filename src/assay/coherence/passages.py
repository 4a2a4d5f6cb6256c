"""Texts to score, and facts to find in long ones.

Bits per byte of fixed texts: how well does the model predict plain text, by itself and deep in a context?

A sane language model needs well under 2 bits for a byte of English; a broken one needs more, long before its text
looks wrong. Against a reference, which scores the same texts, much smaller differences show.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from assay.coherence.conversation import Context, Step, Talk, answer_text, user
from assay.coherence.record import AnswerCheck, PassageScore
from assay.engines.base import Capability, Engine, Reply, score_all

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
    """Score the first `count` texts, each by itself; a few in one request where the engine takes that."""
    for begin in range(0, count, _TOGETHER):
        part = passages()[begin : min(begin + _TOGETHER, count)]
        for index, scores in enumerate(score_all(engine, part), begin):
            yield PassageScore(_name(index), 0, scores.nll, len(passages()[index].encode()))


def score_in_context(engine: Engine, context: int) -> Iterator[PassageScore]:
    """Score the texts behind one another, twice: from the start, and behind a filler, up to `context` tokens.

    One request scores all texts that fit, each at its own depth. Needs the engine's own tokenizer, to know which tokens
    are those of which text; the second order begins with the second half of the texts.
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
    """Scores of the texts in this order behind `before`, as many as fit into `context` tokens; returns the tokens sent."""
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
        nats = -sum(value for value in logprobs[special + start : special + end] if value is not None)
        yield PassageScore(_name(index), start, nats, len(passages()[index].encode()))
    return spans[-1][2]


def _name(index: int) -> str:
    return f"p{index:02d}"


# -----------------------------------------------------------------------------
# A fact hidden in a long text: a grid of depth × length from the server's own context length.
#
# The filler is varied (a paragraph repeated would make the needle stand out, and the cache idle), the needle looks
# like its surroundings, and each cell has a fact of its own.


DEPTHS = (0.1, 0.5, 0.9)
DEFAULT_LONGEST = 8192
_ANSWER_TOKENS = 60
_MARGIN_TOKENS = 128
_CHARS_PER_TOKEN = 4

_PEOPLE = (
    "Anna", "Tomas", "Ines", "Marek", "Lucia", "Henrik", "Olga", "Samir", "Greta", "Paolo", "Nadia", "Viktor",
)  # fmt: skip
_PLACES = (
    "library", "harbour", "bakery", "town hall", "museum", "railway station", "market", "school", "hospital",
)  # fmt: skip
_THINGS = (
    "lamp", "bicycle", "window", "ladder", "notice board", "water pipe", "door", "roof", "clock", "bench",
)  # fmt: skip
_DEEDS = (
    "repaired", "painted", "measured", "cleaned", "photographed", "moved", "replaced", "inspected",
    "described",
)  # fmt: skip
_WHEN = (
    "on Monday", "before noon", "last winter", "after the rain", "in the evening", "at the end of May",
    "early",
)  # fmt: skip
_CODES = (
    "heron", "walnut", "copper", "meadow", "lantern", "saffron", "granite", "willow", "falcon", "amber",
    "violin",
)  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """Find one fact in a text of `lengths` tokens at `depths` of it.

    `count_tokens` is the server's own tokenizer; without one, lengths are estimated from characters.
    """

    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = DEPTHS
    seed: int = 0
    count_tokens: Callable[[str], int] | None = None
    name: str = "needle"
    title: str = "a fact in a long context"
    needs: frozenset[Capability] = frozenset()

    @property
    def variants(self) -> Sequence[str]:
        """One cell of the grid each, as `LENGTH@DEPTH`."""
        return tuple(f"{length}@{depth:g}" for length in self.lengths for depth in self.depths)

    def talk(self, context: Context, variant: str) -> Talk:
        """Ask for the fact after the text."""
        length, depth = _parse(variant)
        place, _ = self._fact(variant)
        text = self._haystack(variant, length, depth)
        question = f"According to the text, which word opens the store room of the {place}?"
        yield Step(
            messages=(user(f"{text}\n\n{question} Answer with that one word."),),
            prompt=f"{text}\n\nQuestion: {question}\nAnswer: The word that opens the store room of the {place} is",
            max_tokens=_ANSWER_TOKENS,
        )

    def check(self, replies: Sequence[Reply], variant: str) -> tuple[AnswerCheck, ...]:
        """The code word is in the answer."""
        code = self._fact(variant)[1]
        passed = code in answer_text(replies[-1]).casefold()
        return (AnswerCheck("finds_needle", passed, f"expected {code!r} at {variant}"),)

    def _fact(self, variant: str) -> tuple[str, str]:
        rng = random.Random(f"{self.seed}/{variant}/fact")
        return rng.choice(_PLACES), rng.choice(_CODES)

    def _haystack(self, variant: str, length: int, depth: float) -> str:
        place, code = self._fact(variant)
        needle = f"The word that opens the store room of the {place} is {code}."
        sentences = _sentences(f"{self.seed}/{variant}/filler", length)
        count = self.count_tokens or (lambda text: len(text) // _CHARS_PER_TOKEN)
        # Tokens grow with sentences; two corrections bring the text close to the length that was asked for.
        keep = len(sentences)
        for _ in range(2):
            tokens = max(count(" ".join(sentences[:keep])), 1)
            keep = min(len(sentences), max(1, int(keep * length / tokens)))
        sentences = sentences[:keep]
        sentences.insert(int(len(sentences) * depth), needle)
        return " ".join(sentences)


def needle_lengths(max_model_len: int | None, longest: int = DEFAULT_LONGEST) -> tuple[int, ...]:
    """A quarter, a half and the whole of the usable context, in tokens; at most `longest`."""
    usable = min(max_model_len or longest, longest) - _ANSWER_TOKENS - _MARGIN_TOKENS
    return tuple(sorted({length for length in (usable // 4, usable // 2, usable) if length >= 128}))


def filler(seed: str, tokens: int) -> str:
    """About `tokens` tokens of plain sentences, different for every seed from the first word on."""
    text = " ".join(_sentences(seed, tokens))
    return text[: tokens * _CHARS_PER_TOKEN]


def _sentences(seed: str, tokens: int) -> list[str]:
    """At least `tokens` tokens of sentences: none of them has fewer than eight."""
    rng = random.Random(seed)
    return [_sentence(rng) for _ in range(tokens // 8)]


def _parse(variant: str) -> tuple[int, float]:
    length, _, depth = variant.partition("@")
    return int(length), float(depth)


def _sentence(rng: random.Random) -> str:
    """One plain sentence of a town's chronicle; eight tokens or more in any tokenizer of the field."""
    person, place, thing, deed, when = (
        rng.choice(words) for words in (_PEOPLE, _PLACES, _THINGS, _DEEDS, _WHEN)
    )
    number = rng.randint(2, 97)
    return rng.choice(
        (
            f"{person} {deed} the {thing} of the {place} {when}.",
            f"The {thing} at the {place} was {deed} {when}, and it cost {number} crowns.",
            f"{when[0].upper()}{when[1:]}, {person} counted {number} visitors at the {place}.",
            f"Nobody remembers who {deed} the {thing} behind the {place}, but {person} kept the bill.",
            f"The {place} stayed open {when}, although its {thing} had to be {deed}.",
        )
    )
