"""Salads made from legitimate text: pieces of many words, shuffled words, function words, scripts mixed at random.

They widen what the salad weights are fitted on beyond the vocabularies of the few models that can be broken on a
laptop. Only texts of the tune half are cut up; no synthetic salad is reported on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from legit_texts import Legit

from assay.coherence.detectors.units import FUNCTION_WORDS
from assay.coherence.textview import TextView


def salads(texts: Sequence[Legit], count: int = 400, seed: int = 7) -> Iterator[tuple[str, str]]:
    """`count` pairs of a kind and a salad."""
    rng = random.Random(seed)
    english = [t for t in texts if t.category in {"wikitext", "pydoc", "python"}]
    foreign = [t for t in texts if t.category in {"languages", "messages"}]
    pools = {name: _words(rng.sample(group, min(len(group), 400))) for name, group in (("en", english), ("xx", foreign))}
    makers = (_pieces, _pieces, _mixed, _shuffled, _function, _few)
    for index in range(count):
        maker = makers[index % len(makers)]
        yield maker.__name__[1:], maker(rng, pools)


def _words(texts: Sequence[Legit]) -> list[str]:
    return [w for t in texts for w in TextView(t.text).words]


def _pieces(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """Random subwords, joined as a byte-pair vocabulary would: two in three begin a word."""
    share = rng.choice([0.0, 0.05, 0.2])
    out = []
    for _ in range(rng.randint(40, 300)):
        word = rng.choice(pools["xx" if rng.random() < share else "en"])
        if word in FUNCTION_WORDS and rng.random() < 0.8:
            continue
        if len(word) > 4 and rng.random() < 0.5:
            cut = rng.randint(2, len(word) - 2)
            word = word[:cut] if rng.random() < 0.5 else word[cut:]
        if rng.random() < 0.15:
            word = word.title()
        out.append((" " if rng.random() < 0.66 else "") + word)
    return "".join(out)


def _mixed(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """Words of any language, one after the other, some of them glued."""
    out = []
    for _ in range(rng.randint(40, 300)):
        word = rng.choice(pools[rng.choice(["xx", "xx", "en"])])
        out.append((" " if rng.random() < 0.7 else "") + word + ("\n" if rng.random() < 0.02 else ""))
    return "".join(out)


def _shuffled(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """English words in random order."""
    return " ".join(rng.choice(pools["en"]) for _ in range(rng.randint(40, 300)))


def _function(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """Mostly function words and marks."""
    common = ["the", "of", "and", "a", "in", "to", ".", ",", "is", "I", "that", "for", "on", "it", "as", "with", "or"]
    return "".join(" " + (rng.choice(common) if rng.random() < 0.7 else rng.choice(pools["en"])) for _ in range(rng.randint(40, 200)))


def _few(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """A handful of words in random order."""
    words = [rng.choice(pools["en"]) for _ in range(rng.randint(4, 12))] + ["the", "and", ",", "of"]
    return " ".join(rng.choice(words) for _ in range(rng.randint(50, 250)))
