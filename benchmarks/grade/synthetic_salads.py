"""Salads made from legitimate text: pieces of many words, shuffled words, function words, scripts
mixed at random.

They widen what the salad weights are fitted on beyond the vocabularies of the few models that can
be broken on a laptop. Only texts of the tune half are cut up; no synthetic salad is reported on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from assay.coherence.language import FUNCTION_WORDS
from assay.coherence.text import TextView
from legit_texts import Legit


def salads(texts: Sequence[Legit], count: int = 1600, seed: int = 7) -> Iterator[tuple[str, str]]:
    """`count` pairs of a kind and a salad."""
    rng = random.Random(seed)
    english = [t for t in texts if t.category in {"wikitext", "pydoc", "python"}]
    foreign = [t for t in texts if t.category in {"languages", "messages"}]
    pools = {
        name: _words(rng.sample(group, min(len(group), 400)))
        for name, group in (("en", english), ("xx", foreign))
    }
    makers = (
        _any,
        _any,
        _any,
        _pieces,
        _any,
        _code_pieces,
        _any,
        _mixed,
        _any,
        _shuffled,
        _any,
        _function,
        _any,
        _few,
        _any,
        _digits,
        _letters,
        _codes,
    )
    for index in range(count):
        maker = makers[index % len(makers)]
        yield maker.__name__[1:], maker(rng, pools)


def _words(texts: Sequence[Legit]) -> list[str]:
    return [w for t in texts for w in TextView(t.text).words]


def _any(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """A soup of any make: how many pieces, marks, capitals, scripts and joints it has is drawn anew
    each time.
    """
    piece, glue, mark = (
        rng.random(),
        rng.uniform(0, 0.7),
        rng.choice([0, 0, 0.1, 0.3]) * rng.random(),
    )
    foreign, capital, number = (
        rng.random() ** 3,
        rng.random() ** 3 / 2,
        rng.choice([0, 0, 0.1]) * rng.random(),
    )
    grammar = rng.choice([0.0, 0.0, 0.1, 0.3]) * rng.random()
    proper = rng.random() < 0.6  # marks stand where a text would have them
    vocabulary: list[str] = []
    while len(vocabulary) < rng.choice([60, 300, 2000]):
        word = rng.choice(pools["xx" if rng.random() < foreign else "en"])
        if not word[0].isalpha():
            continue
        if len(word) > 3 and rng.random() < piece:
            a, b = sorted(rng.sample(range(len(word) + 1), 2))
            word = word[a : b + 1] if b - a > 1 else word[:3]
        if word.lower() in FUNCTION_WORDS and rng.random() > grammar:
            continue
        vocabulary.append(word.title() if rng.random() < capital else word)
    out = []
    for _ in range(rng.randint(50, 300)):
        chance = rng.random()
        if proper and chance < mark:
            out.append(rng.choice([".", ",", ",", ".\n", ".\n\n", ":", "\n", ", and"]))
        elif chance < mark:
            out.append(rng.choice([".", ",", "(", ")", '"', ":", "-", "/", "\n", "_", "*", "'"]))
        elif chance < mark + number:
            out.append(str(rng.randint(0, 9999)))
        else:
            out.append(("" if rng.random() < glue else " ") + rng.choice(vocabulary))
    return "".join(out)


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


def _code_pieces(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """Subwords with the marks and capitals of code between them, as a web-and-code vocabulary
    throws up.
    """
    marks = [
        "_",
        ".",
        "(",
        ")",
        "();",
        "</",
        "//",
        "{",
        "->",
        "=",
        '"',
        "\n",
        "\n\n",
        "    ",
        "'s",
        "*",
        "$",
        ",",
        "://",
        "[",
    ]
    out = []
    for _ in range(rng.randint(40, 300)):
        if rng.random() < 0.25:
            out.append(rng.choice(marks))
            continue
        word = rng.choice(pools["en"])
        if len(word) > 3 and rng.random() < 0.5:
            word = word[rng.randint(1, len(word) - 2) :]
        word = word.title() if rng.random() < 0.3 else word.upper() if rng.random() < 0.05 else word
        out.append((" " if rng.random() < 0.5 else "") + word)
    return "".join(out)


def _digits(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """Numbers and words that run into one another."""
    common = ["the", "and", "I", "The", "but", "So", "Okay", "This", ".", ",", ")", "\n\n", "\\"]
    pieces = [
        str(rng.randint(0, 10 ** rng.randint(1, 9))) if rng.random() < 0.5 else rng.choice(common)
        for _ in range(rng.randint(40, 200))
    ]
    return "".join((" " if rng.random() < 0.4 else "") + p for p in pieces)


def _letters(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """A sentence that falls apart into single letters with one kind of mark between them."""
    letters = rng.sample("abcdefghijklmnoprstuvwyABCDEFS", rng.randint(3, 8))
    marks = rng.sample(
        ["'", "'", ",", ".", '"', "#", "-", " ", "(", ")", "/", ":", "_", "*"], rng.randint(1, 4)
    )
    words = [rng.choice(pools["en"]) for _ in range(rng.randint(0, 40))]
    tail = []
    for _ in range(rng.randint(40, 200)):
        piece = (
            rng.choice(letters)
            if rng.random() < 0.93
            else rng.choice([rng.choice(pools["en"]), "10", "0", "\n"])
        )
        tail.append(piece + (rng.choice(marks) if rng.random() < 0.9 else ""))
    return " ".join(words) + " " + "".join(tail)


def _codes(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """Capitals, initials and numbers with commas, stops and line breaks: headings of no text."""
    names = []
    for _ in range(rng.randint(4, 14)):
        word = rng.choice(pools["en"])
        names.append(
            rng.choice([word.upper(), word[:3].upper(), word.title(), word[:1].upper(), word])
        )
    joints = [
        ", ",
        ", ",
        ". ",
        "\n",
        "-",
        ".",
        ",",
        ": ",
        " ",
        " is ",
        " of ",
        "\n#",
        "_",
        " (",
        ") ",
        "'",
    ]
    out = []
    for _ in range(rng.randint(40, 200)):
        number = str(rng.choice([0, 1, 2, 10, 10, 11, 100, 200, rng.randint(0, 5000)]))
        out.append((number if rng.random() < 0.3 else rng.choice(names)) + rng.choice(joints))
    return "".join(out)


def _mixed(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """Words of any language, one after the other, some of them glued."""
    out = []
    for _ in range(rng.randint(40, 300)):
        word = rng.choice(pools[rng.choice(["xx", "xx", "en"])])
        out.append(
            (" " if rng.random() < 0.7 else "") + word + ("\n" if rng.random() < 0.02 else "")
        )
    return "".join(out)


def _shuffled(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """English words in random order."""
    return " ".join(rng.choice(pools["en"]) for _ in range(rng.randint(40, 300)))


def _function(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """Mostly function words and marks."""
    common = [
        "the",
        "of",
        "and",
        "a",
        "in",
        "to",
        ".",
        ",",
        "is",
        "I",
        "that",
        "for",
        "on",
        "it",
        "as",
        "with",
        "or",
    ]
    return "".join(
        " " + (rng.choice(common) if rng.random() < 0.7 else rng.choice(pools["en"]))
        for _ in range(rng.randint(40, 200))
    )


def _few(rng: random.Random, pools: dict[str, list[str]]) -> str:
    """A handful of words in random order."""
    words = [rng.choice(pools["en"]) for _ in range(rng.randint(4, 12))] + ["the", "and", ",", "of"]
    return " ".join(rng.choice(words) for _ in range(rng.randint(50, 250)))
