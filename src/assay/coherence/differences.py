"""Statistics of the differences between two fingerprints."""

from __future__ import annotations

import math
import unicodedata

from assay.coherence.fingerprint import ROUNDING, Fingerprint, Item
from assay.coherence.passages import passages


def item_pairs(a: Fingerprint, b: Fingerprint) -> list[list[tuple[Item, Item]]]:
    """Items of the same prompts, by fixed text."""
    return [list(zip(x, y, strict=True)) for x, y in zip(a.items, b.items, strict=False)]


def moved(a: Item, b: Item) -> float:
    """Share of probability that moved: total variation distance over the tokens that both list, and
    all others as one.

    Lumping never increases it (the data-processing inequality), so it is a lower bound of the whole
    distribution's.
    """
    both = a.likely.keys() & b.likely.keys()
    p, q = ([math.exp(side.likely[t]) for t in both] for side in (a, b))
    rest = abs(sum(p) - sum(q))
    return (sum(abs(x - y) for x, y in zip(p, q, strict=True)) + rest) / 2


def _moved(a: Fingerprint, b: Fingerprint) -> list[list[float]]:
    groups = [
        [moved(x, y) for x, y in pairs if x.likely and y.likely] for pairs in item_pairs(a, b)
    ]
    return [g for g in groups if g]


def _flips(a: Fingerprint, b: Fingerprint) -> list[list[float]]:
    groups = [
        [float(x.token != y.token) for x, y in pairs if x.likely and x.gap > ROUNDING]
        for pairs in item_pairs(a, b)
    ]
    return [g for g in groups if g]


def _tokens(a: Fingerprint, b: Fingerprint) -> list[list[float]]:
    return [
        [float(_same_text(x.token) != _same_text(y.token)) for x, y in pairs]
        for pairs in item_pairs(a, b)
    ]


def _scores(a: Fingerprint, b: Fingerprint) -> list[list[float]]:
    sizes = [len(text.encode()) * math.log(2.0) for text in passages()]
    return [[abs(x - y) / size] for x, y, size in zip(a.nats, b.nats, sizes, strict=False)]


STATISTICS = {"moved": _moved, "flips": _flips, "tokens": _tokens, "scores": _scores}


def _same_text(token: str) -> str:
    return unicodedata.normalize("NFC", token)
