"""Stutter: words, syllables and pieces of words said twice, as a cache with too few bits makes
them.

One text with several stutters close together is a fault (`detect_stutter`). Fewer of them are none
in one text, but a run of texts in which they come many times as often as healthy models write them
is: `stutter_counts` counts those of one text, and `judge_stutter` holds the rate over all texts of
a run against the healthy one.

Much doubling is right: "had had", "very very", names ("Duran Duran"), reduplication, code, lists
and refrains. So code and tables are left out; in English a doubled word must be a word of the
dictionary that is not said twice; in other languages, of which many double words by grammar, one
that the text uses again and again, as articles are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import assay.coherence.language as language
from assay.coherence.detection import Detection, Family
from assay.coherence.text import TextView
from assay.stats import cluster_ratio

_SAID_TWICE = """
again aha and beep bit blah boo bye cha choo chop click clap come day ding dong down drip duck dum ever
false far fast go goose had half hear her hey hush knock left long many more much nan never night no
none now null oh one ooh over please pom quick really right round row rozenset run sh so step stop tap
that there tick tom too true tut two up very void wah wait well who win yes you yum
"""  # noqa: E501
SAID_TWICE = frozenset(_SAID_TWICE.split())
"""What English (and C) says twice."""
_TWICE = re.compile(r"(?<![\w'’-])([^\W\d_]+)(?:[ \u00a0]\1)+(?![\w'’-])", re.IGNORECASE)
_SYLLABLE = re.compile(r"([^\W\d_]{2,5}?)\1")
_BEGUN = re.compile(r"(?<![\w'’.-])([A-Za-z][a-z]{1,3}) (\1[a-z]{2,})(?![\w'’-])")
_COMMA = re.compile(r"(?<=[a-z]), ?,(?= [a-z])")
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_NOT_PROSE = re.compile(
    r"`[^`\n]*`|https?://\S+|^(?: {4,}|\t|[ \t]*[|#>$]).*$|^.*(?:[{}<>=\\;|]|\w\(|\w_\w).*$",
    re.MULTILINE,
)
MIN_STUTTER_WORDS = 2
"""Distinct words that stutter."""
MAX_GAP = 120
"""Code points per stutter, at most."""
ENGLISH = 0.7
"""Share of known words from which a text is taken for English."""
OFTEN = 4
"""Times that a word of another language stands in a text which doubles it by fault."""
LEAST_LONG, LONGEST = 5, 24
"""Letters of a word without the syllable that it doubles, and of the longest word that is no
sequence of letters.
"""
HEALTHY = 0.0004
"""Stutters a word that healthy models stay below: benchmarks/grade/results/detector_roc.md."""
TIMES = 3.0
"""Above so many times that rate a run is bad, if the interval says so."""


@dataclass(frozen=True)
class Counts:
    """The words of the prose of one text, and how often they stutter."""

    words: int
    doubled_words: int = 0
    doubled_syllables: int = 0
    doubled_pieces: int = 0
    """Words begun twice ("Wh Where"), and commas."""
    examples: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All stutters."""
        return self.doubled_words + self.doubled_syllables + self.doubled_pieces


@dataclass(frozen=True)
class StutterRate:
    """Stutters a word over a run, with its interval clustered by text, and what follows from it."""

    rate: float
    lo: float
    hi: float
    verdict: Literal["good", "bad", "unclear"]
    stutters: int
    words: int

    def __iter__(self) -> Iterator[float | str]:
        return iter((self.rate, self.lo, self.hi, self.verdict))


def stutter_counts(text: str) -> Counts:
    """Count the stutters in the prose of a text; code, tables and quoted code do not count.

    >>> stutter_counts("The information information was sent to the the control control
      room.").total
    3
    """
    view = TextView(text)
    for start, end in reversed(view.fences):
        text = text[:start] + "\n" + text[end:]
    text = _NOT_PROSE.sub("\n", text)
    words = [m.group().lower() for m in _WORD.finditer(text)]
    if not words:
        return Counts(0)
    often = Counter(words)
    bloom = language.tables().bloom
    known = {word: language.is_known_word(word, bloom) for word in often}
    english = sum(known[w] for w in words) >= ENGLISH * len(words)
    doubled = [m.group() for m in _TWICE.finditer(text) if _is_stutter(m, often, known, english)]
    pieces = [m.group() for m in _BEGUN.finditer(text) if _is_begun_twice(m, often, english)]
    syllables = [word for word in often if _doubles_syllable(word, often, known, english)]
    commas = len(_COMMA.findall(text))
    return Counts(
        len(words),
        len(doubled),
        sum(often[word] for word in syllables),
        len(pieces) + commas,
        (*doubled[:5], *syllables[:5], *pieces[:5]),
    )


def _is_stutter(
    match: re.Match[str], often: Counter[str], known: dict[str, bool], english: bool
) -> bool:
    said = match.group().split()
    word = match.group(1).lower()
    if all(w[0].isupper() for w in said) or not match.group(1).isalpha():
        return False  # a name
    if len(word) == 1 and word not in "aeioyàéóв":
        return False
    if english:
        return known.get(word, False) and word not in SAID_TWICE
    return (often[word] - len(said) >= OFTEN and not known.get(word, False)) or len(said) > 2


def _is_begun_twice(match: re.Match[str], often: Counter[str], english: bool) -> bool:
    begun = match.group(1).lower()
    return (
        english and often[begun] == 1 and not language.is_known_word(begun, language.tables().bloom)
    )


def _doubles_syllable(
    word: str, often: Counter[str], known: dict[str, bool], english: bool
) -> bool:
    """Whether a word says one of its syllables twice, and without that is a word of English or one
    this text repeats.
    """
    if not LEAST_LONG + 2 <= len(word) <= LONGEST or known[word]:
        return False
    for match in _SYLLABLE.finditer(word):
        once = word[: match.start(1)] + word[match.end(1) :]
        if len(once) < LEAST_LONG:
            continue
        if often[once] >= 2 or (english and language.is_known_word(once, language.tables().bloom)):
            return True
    return False


def judge_stutter(
    counts: Iterable[Counts],
    healthy: float = HEALTHY,
    confidence: float = 0.95,
    times: float = TIMES,
) -> StutterRate:
    """Whether the texts of a run stutter more than those of healthy models, at a rate of `healthy`
    a word.

    The rate is a ratio of sums. Its interval is the wider of two at each end: CR1, clustered by
    text, and that of a Poisson count, which knows what no stutter at all in few words is worth
    (Garwood, Biometrika 28 (1936) 437). `bad` if even its lower end is above `times` the healthy
    rate and three texts stutter; `good` if its upper end is not above; else `unclear`.
    """
    from scipy.special import gammaincinv

    kept = [c for c in counts if c.words]
    total, words = sum(c.total for c in kept), sum(c.words for c in kept)
    if not kept:
        return StutterRate(float("nan"), 0.0, float("inf"), "unclear", 0, 0)
    tail = (1 - confidence) / 2
    lo = float(gammaincinv(total, tail)) / words if total else 0.0
    hi = float(gammaincinv(total + 1, 1 - tail)) / words
    if len(kept) > 1:
        clustered = cluster_ratio(
            [c.total for c in kept], [c.words for c in kept], confidence
        ).interval
        lo, hi = min(lo, max(0.0, clustered.lo)), max(hi, clustered.hi)
    limit = times * healthy
    texts = sum(c.total > 0 for c in kept)
    verdict: Literal["good", "bad", "unclear"]
    verdict = (
        "bad"
        if lo > limit and texts >= 3
        else "good"
        if hi <= limit or total / words <= healthy
        else "unclear"
    )
    return StutterRate(total / words, lo, hi, verdict, total, words)


def detect_stutter(view: TextView) -> Detection | None:
    """The first of several doubled words that stand close together."""
    doubled = [
        m for m in _TWICE.finditer(view.text) if len(m.group(1)) > 2 and m.group(1).islower()
    ]
    doubled = [m for m in doubled if m.group(1) not in SAID_TWICE and m.group(1).isascii()]
    if len(doubled) < MIN_STUTTER_WORDS:
        return None
    bloom = language.tables().bloom  # other languages double words as a matter of grammar
    found = [m for m in doubled if language.is_known_word(m.group(1), bloom)]
    for index in range(len(found) - MIN_STUTTER_WORDS + 1):
        group = found[index : index + MIN_STUTTER_WORDS]
        if (
            len({m.group(1) for m in group}) == MIN_STUTTER_WORDS
            and group[-1].end() - group[0].start() <= MAX_GAP
        ):
            onset = group[0].start() + len(group[0].group(1))
            evidence = {"words": [m.group(1) for m in found[:5]], "count": len(found)}
            return Detection("stutter", onset, found[-1].end(), evidence, Family.STUTTER)
    return None
