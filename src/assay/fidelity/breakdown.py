"""Where in the text the difference sits: by depth in the context, by the reference's confidence, by kind of token."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.fidelity.score import WindowObservation
from assay.stats.intervals import ClusterEstimate, cluster_ratio

CONFIDENCE_EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0 + 1e-9)
DEPTH_BINS = 8


@dataclass(frozen=True)
class Bin:
    """One part of the tokens: its name, how many they are, mean KL and mean ΔNLL by window, top-1 share."""

    name: str
    tokens: int
    kl: ClusterEstimate
    dnll: ClusterEstimate
    top1: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "tokens": self.tokens,
            "kld": {"mean": self.kl.value, "lo": self.kl.interval.lo, "hi": self.kl.interval.hi},
            "dnll": {"value": self.dnll.value, "lo": self.dnll.interval.lo, "hi": self.dnll.interval.hi},
            "top1": self.top1,
        }


def by_depth(seen: Sequence[WindowObservation]) -> list[Bin]:
    """Equal parts of the window, by how many tokens come before."""
    first, length = seen[0].first, seen[0].tokens.size
    edges = np.linspace(first, length, min(DEPTH_BINS, length - first) + 1).astype(int)
    return _bins(
        seen,
        [f"{lo}–{hi - 1}" for lo, hi in pairwise(edges)],
        lambda w: np.searchsorted(edges, np.arange(w.first, w.tokens.size), side="right") - 1,
    )


def by_confidence(seen: Sequence[WindowObservation]) -> list[Bin]:
    """By the reference's largest probability: how sure it was of what comes."""
    names = [f"{lo:.1f}–{min(hi, 1.0):.1f}" for lo, hi in pairwise(CONFIDENCE_EDGES)]
    return _bins(seen, names, lambda w: np.searchsorted(CONFIDENCE_EDGES, np.nan_to_num(w.conf), side="right") - 1)


def by_class(seen: Sequence[WindowObservation], class_of: Callable[[int], str]) -> list[Bin]:
    """By the kind of target token; `class_of` names it from the id."""
    ids = np.unique(np.concatenate([w.tokens for w in seen]))
    classes = {int(i): class_of(int(i)) for i in ids}
    names = sorted(set(classes.values()))
    place = {name: k for k, name in enumerate(names)}
    table = np.array([place[classes[int(i)]] for i in ids])
    return _bins(seen, names, lambda w: table[np.searchsorted(ids, w.tokens[w.first :])])


def worst_tokens(
    seen: Sequence[WindowObservation], decode: Callable[[Sequence[int]], str], count: int = 10, context: int = 24
) -> list[dict[str, Any]]:
    """The tokens of largest KL, each with the text before it."""
    rows = []
    for w in seen:
        kl = np.where(w.finite, w.kl, -np.inf)
        for i in np.argsort(kl)[::-1][:count]:
            if w.finite[i]:
                rows.append((float(kl[i]), w, int(i)))
    rows.sort(key=lambda row: -row[0])
    return [
        {
            "kld": kl,
            "window": w.index,
            "position": w.first + i,
            "token": decode([int(w.tokens[w.first + i])]),
            "before": decode([int(t) for t in w.tokens[max(0, w.first + i - context) : w.first + i]]),
            "p_reference": float(w.p_ref[i]),
            "p_candidate": float(w.p_cand[i]),
        }
        for kl, w, i in rows[:count]
    ]


def _bins(
    seen: Sequence[WindowObservation], names: Sequence[str], place: Callable[[WindowObservation], NDArray[np.int64]]
) -> list[Bin]:
    """Sums of each bin and window; bins without tokens are left out."""
    size = len(names)
    sums = {name: np.zeros((len(seen), size)) for name in ("n", "kl", "dnll", "top1")}
    for row, w in enumerate(seen):
        some = w.finite & np.isfinite(w.kl)
        where = place(w)[some]
        sums["n"][row] = np.bincount(where, minlength=size)
        for name in ("kl", "dnll", "top1"):
            values = np.asarray(getattr(w, name), np.float64)[some]
            sums[name][row] = np.bincount(where, weights=values, minlength=size)
    return [
        Bin(
            name,
            int(sums["n"][:, k].sum()),
            cluster_ratio(sums["kl"][:, k], sums["n"][:, k]),
            cluster_ratio(sums["dnll"][:, k], sums["n"][:, k]),
            float(sums["top1"][:, k].sum() / sums["n"][:, k].sum()),
        )
        for k, name in enumerate(names)
        if sums["n"][:, k].sum() > 0
    ]


# -----------------------------------------------------------------------------
# What kind of text a token is part of, told from its decoded text alone.


class TokenClass(StrEnum):
    """Classes of tokens, as a breakdown lists them."""

    WORDS = "words"
    """Letters of the Latin script, with what holds words together (' - .)."""
    DIGITS = "digits"
    """Numbers, with the marks within them."""
    PUNCTUATION = "punctuation"
    """Marks and symbols of prose."""
    CODE = "code"
    """What prose does not have: operators, brackets other than (), names such as snake_case and camelCase."""
    OTHER_SCRIPTS = "other scripts"
    """Letters of any other script, also a part of a character (a lone byte of UTF-8)."""
    SPECIAL = "whitespace and special"
    """White space, control characters, and tokens such as <|endoftext|>."""


# A whole token in angle brackets or brackets of a kind that tokenizers use for themselves, and byte tokens.
_SPECIAL = re.compile(r"<\|[^|<>]*\|>|</?[a-z_]+\d*>|\[(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|/?INST)\]|<0x[0-9A-F]{2}>")
_CODE_MARKS = frozenset("{}[]<>=_\\|^~@#$&`*+")
_CODE_PAIRS = ("()", "::", "//", "/*", "--", "();", ").", "')", '")', "('", '("', "/>", "%s", "%d")
_CAMEL = re.compile(r"[a-z][A-Z]|[A-Z]{2,}[a-z]{2,}")
_NUMBER_MARKS = frozenset(".,:/-+%")


@lru_cache(maxsize=1 << 16)
def token_class(text: str) -> TokenClass:
    """The class of one token, given as its decoded text (leading space included)."""
    core = text.strip()
    if not core or _SPECIAL.fullmatch(core) or all(_is_control(c) for c in core):
        return TokenClass.SPECIAL
    if any(_is_foreign(c) for c in core):
        return TokenClass.OTHER_SCRIPTS
    letters = any(c.isalpha() for c in core)
    digits = any(c.isnumeric() for c in core)
    if letters:
        return TokenClass.CODE if _is_name(core, digits) else TokenClass.WORDS
    if digits:
        whole = all(c.isnumeric() or c in _NUMBER_MARKS for c in core)
        return TokenClass.DIGITS if whole else TokenClass.CODE
    marked = any(c in _CODE_MARKS for c in core) or any(pair in core for pair in _CODE_PAIRS)
    # A run of one mark (----, ****, ####) is a rule or a heading in prose; two of them are an operator.
    run = len(core) > 2 and len(set(core)) == 1
    return TokenClass.CODE if marked and not run else TokenClass.PUNCTUATION


def token_classes(texts: Iterable[str]) -> list[TokenClass]:
    """The classes of many tokens."""
    return [token_class(text) for text in texts]


def _is_name(core: str, digits: bool) -> bool:
    """Whether something with Latin letters is code rather than a word or a part of one."""
    return digits or any(c in _CODE_MARKS for c in core) or "(" in core or bool(_CAMEL.search(core))


def _is_foreign(c: str) -> bool:
    """A letter or a mark outside the Latin script, or the sign for a broken character."""
    if c == "\ufffd":
        return True
    category = unicodedata.category(c)
    if category[0] not in "LM":
        return False
    if ord(c) < 0x250:
        return False
    # Combining marks (category M) up to U+036F belong to Latin; other letters say their script in their name.
    return not (0x300 <= ord(c) < 0x370 or "LATIN" in unicodedata.name(c, ""))


def _is_control(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn", "Zs", "Zl", "Zp")
