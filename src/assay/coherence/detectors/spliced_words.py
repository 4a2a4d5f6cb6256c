"""One word of another language, spliced again and again into sentences that are sane without it."""

from __future__ import annotations

import unicodedata
from collections import defaultdict

import numpy as np

import assay.coherence.language as language
from assay.coherence.detection import CAUSES, TOKENIZER, Detection, Family
from assay.coherence.language import FUNCTION_WORDS
from assay.coherence.text import TextView

LEAST, NEAR = 6, 1500
"""How often the word must stand in so many code points."""
SANE_WITHOUT = 0.45
"""Share of its places where the words beside it are usual neighbours."""
LOOSE = 1
"""Places where a small word or a number follows, so that it is no mere adjective."""
KNOWN = 0.7
"""Share of English words among the others."""
_BEFORE_NOUNS = frozenset(
    (
        "the",
        "a",
        "an",
        "this",
        "that",
        "each",
        "every",
        "one",
        "my",
        "your",
        "his",
        "her",
        "its",
        "our",
    )
)


def detect_spliced_words(view: TextView) -> Detection | None:
    """Find a word with letters that English has not, which nothing around it needs."""
    if view.text.isascii() or len(view.words) < 8 * LEAST:
        return None
    words = view.words
    places: dict[str, list[int]] = defaultdict(list)
    for place, word in enumerate(words[1:-1], 1):
        if not word.isascii() and word.isalpha() and word.islower():
            places[word].append(place)
    bloom = language.tables().bloom
    for word, at in places.items():
        if len(at) < LEAST or language.is_known_word(_plain(word), bloom):
            continue  # naïve, café
        beside = [
            (words[i - 1], words[i + 1])
            for i in at
            if words[i - 1].isascii() and words[i - 1].isalpha() and words[i + 1].isalnum()
        ]
        if len(beside) < LEAST or len(beside) < 0.8 * len(at) or len(set(beside)) < LEAST:
            continue
        first, last = int(view.tokens.starts[at[0]]), int(view.tokens.ends[at[-1]])
        if last - first > NEAR * len(at) / LEAST:
            continue
        flat = [w.lower() for pair in beside for w in pair]
        if sum(language.is_known_word(w, bloom) for w in flat) < KNOWN * len(flat):
            continue
        keys = language.word_keys(flat)
        usual = language.is_in(language.pair_numbers(keys)[::2], language.tables().pairs)
        if any(a.lower() in _BEFORE_NOUNS and b.lower() in FUNCTION_WORDS for a, b in beside):
            continue  # "the jalapeño is": it is the noun itself
        loose = sum(b.lower() in FUNCTION_WORDS or b.isdigit() for _, b in beside)
        if float(np.mean(usual)) >= SANE_WITHOUT and loose >= LOOSE:
            evidence = {
                "word": word,
                "count": len(at),
                "usual_without": round(float(usual.mean()), 2),
            }
            causes = (*CAUSES[Family.SALAD], TOKENIZER)
            return Detection("spliced_word", first, last, evidence, Family.SALAD, causes)
    return None


def _plain(word: str) -> str:
    """The word without its accents."""
    return "".join(c for c in unicodedata.normalize("NFD", word) if not unicodedata.combining(c))
