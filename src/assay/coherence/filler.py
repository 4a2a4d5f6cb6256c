"""Varied plain sentences that fill a context.

A paragraph repeated would make a hidden fact visible, and would let a prefix cache answer.
"""

from __future__ import annotations

import random

FILLER_CHARS_PER_TOKEN = 4
_PEOPLE = (
    "Anna",
    "Tomas",
    "Ines",
    "Marek",
    "Lucia",
    "Henrik",
    "Olga",
    "Samir",
    "Greta",
    "Paolo",
    "Nadia",
    "Viktor",
)
PLACES = (
    "library",
    "harbour",
    "bakery",
    "town hall",
    "museum",
    "railway station",
    "market",
    "school",
    "hospital",
)
_THINGS = (
    "lamp",
    "bicycle",
    "window",
    "ladder",
    "notice board",
    "water pipe",
    "door",
    "roof",
    "clock",
    "bench",
)
_DEEDS = (
    "repaired",
    "painted",
    "measured",
    "cleaned",
    "photographed",
    "moved",
    "replaced",
    "inspected",
    "described",
)
_WHEN = (
    "on Monday",
    "before noon",
    "last winter",
    "after the rain",
    "in the evening",
    "at the end of May",
    "early",
)


def filler(seed: str, tokens: int) -> str:
    """About `tokens` tokens of plain sentences, different for every seed from the first word on."""
    text = " ".join(plain_sentences(seed, tokens))
    return text[: tokens * FILLER_CHARS_PER_TOKEN]


def plain_sentences(seed: str, tokens: int) -> list[str]:
    """At least `tokens` tokens of sentences: none of them has fewer than eight."""
    rng = random.Random(seed)
    return [_sentence(rng) for _ in range(tokens // 8)]


def _sentence(rng: random.Random) -> str:
    """One plain sentence of a town's chronicle; eight tokens or more in any tokenizer of
    the field.
    """
    person, place, thing, deed, when = (
        rng.choice(words) for words in (_PEOPLE, PLACES, _THINGS, _DEEDS, _WHEN)
    )
    number = rng.randint(2, 97)
    return rng.choice(
        (
            f"{person} {deed} the {thing} of the {place} {when}.",
            f"The {thing} at the {place} was {deed} {when}, and it cost {number} crowns.",
            f"{when[0].upper()}{when[1:]}, {person} counted {number} visitors at the {place}.",
            (
                f"Nobody remembers who {deed} the {thing} behind the {place}, but {person} kept the"
                " bill."
            ),
            f"The {place} stayed open {when}, although its {thing} had to be {deed}.",
        )
    )
