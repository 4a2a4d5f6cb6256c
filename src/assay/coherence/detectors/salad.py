"""Salads: text whose characters, words or word order no language would produce.

Each window of tokens gets a score, the log-odds of boosted trees on its measures. They were fitted
by `benchmarks/fit_salad.py` on legitimate text (prose, code, data, 300 languages) against outputs
of broken models and synthetic salads, never on what the benchmark reports
(docs/methods/degeneration.md). A measure that can only speak for salad, such as strange letters,
can only raise the score (monotone constraints), so that a text stranger than any seen is not
acquitted.

One window may be a strange list; a salad goes on. So windows of two lengths are averaged over a
stretch, and the longer the stretch (or if it is the whole of a short text), the lower the mean
score that makes it a salad.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

import assay.coherence.text as language
from assay.coherence.text import FUNCTION_WORDS, Detection, TextView, true_stretches

# What is measured of every token: bits, counts and flags, from the tables of
# `assay.coherence.text`. Encoded data weigh nothing, and so does notation where it is given: they
# look like nothing and mean no harm.

BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"))
ODD_SHAPE_BITS, BAD_PAIR_BITS = 7.0, -2.0
"""Bits from which a character is odd after the two before it, and below which two classes of words
avoid each other.
"""


def token_measures(
    view: TextView, notation: Iterable[tuple[int, int]] = ()
) -> dict[str, NDArray[np.float64]]:
    """Per token: bits, counts and flags. Tokens of encoded data, and in the spans of notation,
    weigh nothing.
    """
    tables = language.tables()
    starts, ends = view.tokens.starts, view.tokens.ends
    classes = language.character_classes(view.codes)
    letters = language.letter_codes(view.codes)
    shape_bits = _shape_bits(classes, tables.shapes)
    shape = running_sum(shape_bits)
    letter = running_sum(_letter_bits(letters, tables.letters))
    is_latin = running_sum((letters < language.EDGE).astype(float))
    prose = _outside(view, notation)
    weight = prose * _outside(view, encoded_spans(view.text))

    # A token owns the blanks before it.
    owned = np.concatenate(([0], ends[:-1]))
    letter_count = (is_latin[ends] - is_latin[starts]) * weight
    bits = (letter[ends] - letter[starts]) * weight
    distinct, which = view.distinct_words
    listed = np.array(
        [language.is_known_word(w.lower(), tables.bloom) for w in distinct], dtype=bool
    )
    known = listed[which].astype(float)
    function = np.array([w.lower() in FUNCTION_WORDS for w in distinct], dtype=float)[which]
    first_class = classes[starts]
    before = classes[np.maximum(starts - 1, 0)]
    glued = (starts > 0) & (starts == owned)
    latin_word = ((letter_count == ends - starts) & (letter_count > 0)).astype(float) * weight
    is_word = view.is_word * weight
    syntax_class = language.word_classes(distinct, listed.tolist())[which]
    pair = np.concatenate(([0.0], tables.syntax[syntax_class[:-1], syntax_class[1:]]))
    breaks = running_sum((view.codes == ord("\n")).astype(float))[starts]
    no_break = np.concatenate(([0.0], (breaks[1:] == breaks[:-1]) * prose[:-1]))
    mixed = _neighbours(view, latin_word > 0, which, before, no_break)
    odd_shape = running_sum((shape_bits > ODD_SHAPE_BITS).astype(float))
    known_gram, all_grams = _known_grams(view.codes, tables.grams)
    mark = first_class >= language.FIRST_MARK
    unmarked = syntax_class != language.MARK_CLASS
    no_break *= np.concatenate(([0.0], (unmarked[1:] & unmarked[:-1]).astype(float)))
    spaced = (before == language.SPACE) & (
        np.append(classes, language.SPACE)[np.minimum(ends, len(classes))] == language.SPACE
    )
    return {
        "prose": prose,
        "one": weight,
        "chars": (ends - owned) * weight,
        "shape_bits": (shape[ends] - shape[owned]) * weight,
        "letter_bits": bits,
        "letters": letter_count,
        "latin_word": latin_word,
        "odd": (bits > 4.2 * letter_count) * latin_word,
        "known": known * latin_word,
        "function": function * latin_word,
        "is_word": is_word,
        "single": (ends - starts == 1) * latin_word,
        "pairs": no_break * weight,
        "pair_bits": pair * no_break * weight,
        "script_jump": _script_jumps(classes, starts, ends) * weight,
        "case_jump": _inner_jumps(classes, starts, ends, language.LOWER, language.UPPER) * weight,
        "digit_jump": (
            (
                glued
                & ((first_class == language.DIGIT) != (before == language.DIGIT))
                & _alnum(first_class)
                & _alnum(before)
            )
            * weight
        ),
        "known_gram": (known_gram[ends] - known_gram[owned]) * weight,
        "grams": (all_grams[ends] - all_grams[owned]) * weight,
        "odd_shape": (odd_shape[ends] - odd_shape[owned]) * weight,
        "bad_pair": (pair < BAD_PAIR_BITS) * no_break * weight,
        "stub": ((ends - starts <= 2) & (latin_word > 0) & (function == 0)) * weight,
        **{f"open_{o}": _opened(first_class, o, c) * weight for o, c in BRACKETS},
        **{name: values * weight for name, values in mixed.items()},
        "loose_mark": (mark & spaced) * weight,
        "seen_before": _seen_before(view.tokens.ids) * weight,
        "breaks": np.diff(breaks, prepend=0).clip(0, 3) * weight,
    }


def _neighbours(
    view: TextView,
    latin: NDArray[np.bool_],
    which: NDArray[np.int64],
    before: NDArray[np.int64],
    same_line: NDArray[np.float64],
) -> dict[str, NDArray[np.float64]]:
    """How every token goes with the one before it on its line: known pairs, sentence starts,
    capitals inside.
    """
    distinct = view.distinct_words[0]
    keys = language.word_keys(distinct)[which]
    known = _after(language.is_in(language.pair_numbers(keys), language.tables().pairs))
    both = _after(latin[1:] & latin[:-1]) * same_line
    joint = _after(view.is_word[1:] != view.is_word[:-1]) * same_line
    classes = language.character_classes(view.codes)[view.tokens.starts]
    upper, lower = classes == language.UPPER, classes == language.LOWER
    is_stop = np.array([w in ".!?" for w in distinct], dtype=bool)[which]
    starts = (_after(is_stop[:-1]) > 0) & (before == language.SPACE)
    return {
        "known_pair": known * both,
        "word_pairs": both,
        "known_joint": known * joint,
        "joints": joint,
        "low_start": (starts & lower).astype(float),
        "starts": (starts & (lower | upper)).astype(float),
        "inner_capital": upper * _after(lower[:-1] & latin[:-1]) * both,
    }


def _after(flags: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Flags of all tokens but the first, as one number for each token."""
    return np.concatenate(([0.0], flags.astype(float)))


def _opened(first_class: NDArray[np.int64], opening: str, closing: str) -> NDArray[np.float64]:
    """1 for every opening bracket, −1 for every closing one."""
    opened = (first_class == language.mark_class(opening)).astype(float)
    difference: NDArray[np.float64] = opened - (first_class == language.mark_class(closing))
    return difference


def _known_grams(
    codes: NDArray[np.uint32], filter_: NDArray[np.uint8]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Running sums over the code points: known runs of five characters that end there, and all of
    them.
    """
    numbers, places = language.gram_numbers(codes)
    known, all_ = np.zeros(len(codes)), np.zeros(len(codes))
    known[places], all_[places] = language.is_in(numbers, filter_), 1.0
    return running_sum(known), running_sum(all_)


def _outside(view: TextView, spans: Iterable[tuple[int, int]]) -> NDArray[np.float64]:
    """1 for every token outside the spans, 0 for those inside."""
    outside = np.ones(len(view.words))
    for span in spans:
        first, end = np.searchsorted(view.tokens.starts, span)
        outside[first:end] = 0.0
    return outside


def _shape_bits(classes: NDArray[np.int64], table: NDArray[np.float32]) -> NDArray[np.float64]:
    padded = np.concatenate(([language.BREAK, language.BREAK], classes))
    return table[padded[:-2], padded[1:-1], padded[2:]].astype(float)


def _letter_bits(letters: NDArray[np.int64], table: NDArray[np.float32]) -> NDArray[np.float64]:
    """Bits of every letter given the letters before it in its word; 0 for what is no Latin letter."""
    padded = np.concatenate(([language.EDGE] * 3, letters))
    third, second, first, own = (padded[:-3].copy(), padded[1:-2].copy(), padded[2:-1], padded[3:])
    third[(second == language.EDGE) | (first == language.EDGE)] = language.EDGE
    second[first == language.EDGE] = language.EDGE
    return np.where(own < language.EDGE, table[third, second, first, own], 0.0)


def _inner_jumps(
    classes: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    left: int,
    right: int,
) -> NDArray[np.float64]:
    """How often in each token a character of class `left` stands before one of class `right`."""
    jumps = running_sum(
        np.concatenate(([0], (classes[:-1] == left) & (classes[1:] == right))).astype(float)
    )
    return jumps[ends] - jumps[np.minimum(starts + 1, ends)]


def _script_jumps(
    classes: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Whether a token is of another script than the word before it (0.5), or mixes scripts itself
    (1).
    """
    script = np.full(language.CLASSES, -1)
    script[[language.LOWER, language.UPPER, language.LOWER_LATIN, language.UPPER_LATIN]] = 0
    script[language.FIRST_SCRIPT : language.OTHER_LETTER + 1] = np.arange(
        1, language.OTHER_LETTER - language.FIRST_SCRIPT + 2
    )
    # Japanese writes three scripts at once.
    script[language.FIRST_SCRIPT + 3 : language.FIRST_SCRIPT + 5] = script[
        language.FIRST_SCRIPT + 2
    ]
    own = script[classes]
    inside = np.concatenate(([0], (own[:-1] != own[1:]) & (own[:-1] >= 0) & (own[1:] >= 0))).astype(
        float
    )
    inner = running_sum(inside)
    mixed = (inner[ends] - inner[np.minimum(starts + 1, ends)] > 0).astype(float)
    first = own[starts]
    lettered = np.flatnonzero(first >= 0)
    jump = np.zeros(len(starts))
    if len(lettered) > 1:
        jump[lettered[1:]] = 0.5 * (first[lettered[1:]] != first[lettered[:-1]])
    either: NDArray[np.float64] = np.maximum(jump, mixed)
    return either


def _seen_before(ids: NDArray[np.int64], span: int = 64) -> NDArray[np.float64]:
    """Whether a token stood among the `span` tokens before it."""
    order = np.argsort(ids, kind="stable")
    gap = np.full(len(ids), span + 1)
    same = ids[order[1:]] == ids[order[:-1]]
    gap[order[1:][same]] = (order[1:] - order[:-1])[same]
    return (gap <= span).astype(float)


def _alnum(classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.isin(classes, [language.DIGIT, language.LOWER, language.UPPER])


def running_sum(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Running sums with a leading 0: the sum over [a, b) is sums[b] − sums[a]."""
    return np.concatenate(([0.0], np.cumsum(values, dtype=float)))


# Notation with a grammar of its own looks like salad to measures of prose: chess, music, chemistry,
# keys, dumps.
#
# Each entry of `PIECES` is the grammar of one piece between blanks, of which `LEAST` in a row are
# notation, bars, commas and line breaks between them or not. Each of `WHOLE` is a pattern that is
# notation wherever it stands. What no entry knows is told by its shape: a row of pieces with digits
# that have few shapes between them (`a0a0 a0a0`), or all one length.

LEAST = 6
_NUMBER = r"-?(?:\d++(?:\.\d*+)?|\.\d++)"

PIECES = {
    "chess moves": (
        r"(?:\d+\.(?:\.\.)?)?(?:[KQRBN]?[a-h]?[1-8]?x?[a-h][1-8](?:=?[QRBN])?|[O0]-[O0](?:-[O0])?)[+#]?[!?]{0,2}"
        r"|\d+\.(?:\.\.)?|1-0|0-1|1/2-1/2|\*|\$\d+|\{[^{}]{0,40}\}"
    ),
    "shogi moves": r"\d+\.|\+?[PLNSGBRK][-x*]?[1-9][a-i][+=]?",
    "coordinate moves": r"[a-h][1-8][a-h][1-8][qrbn]?",
    "cube turns": r"[RLUDFBMESrludfbxyz]w?[2']{0,2}|\([RLUDFB][2']?|[RLUDFB][2']?\)\d?",
    "chords": (
        r"[A-G][#b♯♭]?(?:m|maj|min|dim|aug|sus|add|M|°|ø)?\d{0,2}(?:sus\d|add\d|b5|#5)?(?:/[A-G][#b]?)?|%|\[?[A-Z][a-z]+\]?:"
    ),
    "note names": r"[a-gr](?:is|es|s)?[',]*\d*\.{0,2}[~()]?|\\[a-z]+|[A-G][#b]?\d",
    "tune": (
        r"[|:\[\]]*+[({]?\d?+(?:(?:\{[A-Ga-g,']{1,8}\}|[~.])?[_^=]*+[A-Ga-gzx][,']*+\d*+(?:/\d*+)?[<>-]?[)\]}]?){1,60}+(?:[|:\]]+(?=\s|\Z))?|\|[:|\]\d]*|:\|:?"
    ),
    "stitches": (
        r"\*?(?:k|p|sl|inc|dec|ch|sc|dc|tr|hdc|yo|ssk|psso|m1[lr]?|st)s?\d*(?:tog)?(?:\(\d+\))?[*:.]?"
    ),
    "machine code": rf"[GMTN]\d+(?:\.\d)?|[XYZEFSIJKRPABC]{_NUMBER}",
    "cards": r"(?:[2-9TJQKA]|10)[shdcSHDC♠♥♦♣]",
    "morse": r"[.·•\-–−]{1,6}|/",
    "formulas": (
        r"\d*(?:[A-Z][a-z]?\d*|\((?:[A-Z][a-z]?\d*)+\)\d*)+(?:\^?\d?[+-])?(?:\((?:aq|s|l|g)\))?|\+|[-=]+>|→|⇌|<=>|↔"
    ),
    "bytes": r"(?:0x)?[0-9a-fA-F]{2}|#[0-9a-fA-F]{3,8}",
    "letters": r"[^\W\d_]|\.",
    "codes": r"[A-Z]{1,4}-?\d{1,6}[A-Z]?(?:[-./]\d+)?",
}
_ATOMS = r"(?:\[[^\]\s]{1,14}\]|Br|Cl|[BCNOPSFIbcnops]|[=#$:/\\.~-]|%\d\d|\d|[()])"
_WORDY = r"[A-Za-z]{0,24}[a-z]{2}[A-Za-z]{0,24}\d{0,3}"
_PART = rf"(?:\d{{1,4}}(?:\.\d+)?[A-Za-z]{{0,2}}(?![A-Za-z0-9])|[A-Z]{{1,4}}\d{{0,3}}(?![A-Za-z0-9])|{_WORDY})"
"""Parts of the name of a model or a package: words with a number behind them, sizes and capitals.
"""
_FOREIGN = r"[^\W\d_\x00-\u024f]{1,40}"
_LANGUAGE = r"(?:Chinese|Mandarin|Japanese|Korean|Russian|Ukrainian|Arabic|Persian|Urdu|Greek|Hebrew|Hindi|Bengali|Tamil|Thai|Georgian|Armenian)"
WHOLE = {
    "translation": (
        rf"{_FOREIGN}(?: \([^()\n]{{1,40}}\))? in {_LANGUAGE}|{_LANGUAGE}\W{{1,6}}{_FOREIGN}(?:"
        rf" {_FOREIGN}){{0,3}}"
    ),
    "field": r"(?:(?<=[\s{\[,:(='])|^)\\{0,4}\"[^\"\\\s]{1,80}\\{0,4}\"(?=\s*[:,}\]])[\s:,}\]{\[]*",
    "resource": r"\barn:[\w-]*(?::[\w./*@${}-]*){4,}",
    "grammar": (
        r"^ *[\w-]+ *(?:::?=|[:=]) *(?=(?:[^\n]{0,200}\n["
        r" \t])?[^\n]{0,200}'[^'\n]{1,12}')[^\n]+(?:\n[ \t|][^\n]+)*"
    ),
    "argument": r"(?<=[(,\s\"])[A-Za-z_]\w{1,40}=[\w.'\"{}\[\]:/+-]{1,80}(?:\(\w*\))?(?=[,)\s\"])",
    "placeholder": r"\{\{[^{}\n]{0,200}\}\}|\{%[^{}\n]{0,200}%\}|<[CASMD]-[^<>\s]{1,12}>",
    "sum": (
        r"(?<![\w.-])\d+(?:\.\d+)?(?: [-+*/×÷^=−] \d+(?:\.\d+)?|[+*×÷^=]\d+(?:\.\d+)?)+(?![\w-])"
    ),
    "tree of files": r"^[│├└─ \t]*[├└]─+ [^\n]{1,80}$",
    "abstraction": r"λ\w{1,3}\.",
    "declaration": r"(?<![\w-])[a-z-]{3,30}:[^\s;{}][^;{}\n]{0,60}[;}]",
    "variant": r"(?<!\w)(?:[A-Z]{2}_\d+(?:\.\d+)?:)?[cgmnpr]\.[(]?[\w*>+-]{3,40}[)]?",
    "stack machine": (
        r"\((?:module|func|type|param|result|local|global|memory|export|import)\b[^()\n]{0,80}\)?"
        r"|\b(?:local|global|memory|[if](?:32|64))\.\w+(?: \$?\w+)?"
    ),
    "position": (
        r"(?:[pnbrqkPNBRQK1-8]{1,8}/){7}[pnbrqkPNBRQK1-8]{1,8}(?: [wb] (?:-|[KQkq]{1,4})"
        r" (?:-|[a-h][36])(?: \d+ \d+)?)?"
    ),
    "molecule": (
        rf"(?<![^\s|\"'`:,(])(?=\S{{0,60}}[()=#\[\]])(?=\S{{0,60}}[CcNnO])(?=\S{{5}}){_ATOMS}{{5,}}+(?![^\s|\"'`,;:)])"
    ),
    "chain": r"(?<![^\s|\"'`:,(])(?:Br|Cl|[CNOPSF]){4,}(?![^\s|\"'`,;:)])",
    "identifier of a molecule": r"InChI=1S?/\S+|(?<!\w)[A-Z]{14}-[A-Z]{10}-[A-Z]\b",
    "token": r"(?<![\w.-])[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}(?![\w-])",
    "hash": r"\$\w{1,10}\$[\w./$=,+-]{20,}|(?:sha\d+|md5|SHA256)[:-][A-Za-z0-9+/=]{20,}",
    "digest": (
        r"(?<!\w)(?:[0-9a-f]{32,}|[0-9A-F]{32,}|(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,12})(?!\w)"
    ),
    "key": r"ssh-(?:rsa|ed25519|dss) [A-Za-z0-9+/=]{40,}|data:[\w/+.-]+;base64,[A-Za-z0-9+/=]+",
    "sequence": r"(?<!\w)[ACDEFGHIKLMNPQRSTVWYBXZ]{24,}\*?(?!\w)",
    "game record": r"(?:;?\b[A-Z]{1,2}(?:\[[^\]\n]{0,60}\])+\s*){4,}",
    "program of marks": r"[-+<>\[\].,]{24,}",
    "drawing": (
        rf"(?<![\w.])[Mm] ?{_NUMBER}[ ,]{_NUMBER}(?:[ ,]*+[MLHVCSQTAZmlhvcsqtaz]?["
        rf" ,]*+{_NUMBER}){{4,}}(?:[ ,]*[Zz])?"
    ),
    "tablature": r"^[eBGDAE]?\|[-0-9hpbrvx/\\~|() ]{8,}$",
    "escapes": r"(?:%[0-9A-Fa-f]{2}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}){4,}",
    "address": r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:{1,2}){3,7}[0-9a-fA-F]{1,4}(?![\w:])",
    "residues": r"\b(?:[A-Z][a-z]{2}-){4,}[A-Z][a-z]{2}\b",
    "uuencoding": r"^M[ -`]{60}$",
    "tag of a game": r"^\[[A-Z]\w+ \"[^\"\n]*\"\]$",
    "sound": r"[/\[][^/\]\s]{0,24}[\u0250-\u02af\u02c8\u02cc\u02d0][^/\]\s]{0,24}[/\]]",
    "pattern": (
        r"(?<!\S)(?=\S{0,80}(?:\(\?[:=!<]|\[\^?(?:a-z|A-Z|0-9)|\\[dwsbDWSB][+*?{\])]|\{\d+,\d*\}))\S+"
    ),
    "formula": (
        r"\\begin\{(?:align|equation|gather|cases|array|[pbv]?matrix)\*?\}[^\0]{0,2000}?\\end\{\w+\*?\}|\$\$[^$]{1,800}\$\$"
        r"|\\\[[^\0]{1,800}?\\\]"
    ),
    "special tokens": (
        r"<\|[^|\n]{1,40}\|>|<｜[^｜\n]{1,40}｜>|<(?:start|end)_of_\w+>|<\|?\w{2,20}\|?>|</?s>|\[/?INST\]"
    ),
    "proof": r"^(?:theorem|lemma|Theorem|Lemma)\b[^\n]*(?:\n(?:[ \t|·][^\n]*|Proof\.|Qed\.))*",
    "symbols": r"(?<![^\W\d_])[\u0370-\u03ff\u2100-\u214f\u2190-\u22ff][₀-₉⁰-⁹]*(?![^\W\d_])",
    "gloss": r"[(（][^()（）\x00-\u024f]{1,24}[)）]",
    "commit": (
        r"\\?\[?\[`[0-9a-f]{6,40}`\]\([^()\s]{1,400}\)\\?\]?(?: - (?:\*\*[^*\n]{1,60}\*\*:? ?)+)?"
    ),
    "web address": (
        r"\b(?:https?|ftp|git\+https?)://[^\s<>\"'`|\u0100-\U0010ffff]{4,}"
        r"|(?<!\S)[\w.:/-]{4,80}\?(?:[\w.-]{1,40}=[^\s&\"'<>]{0,120}&){2,}[^\s\"'<>]*"
    ),
    "link": (
        r"\[(?=[^\[\]\n]{1,200}\]\([^()\s]{1,400}\))|\]\([^()\s]{1,400}(?:\([^()\s]*\)[^()\s]*)?(?:"
        r" \"[^\"\n]{0,80}\")?\)"
    ),
    "reference": (
        r"\[[\^@][\w.:-]{1,40}\]|\(?#\d+\)?|\|[A-Za-z][\w-]{1,40}\|_{0,2}|:[a-z]+: |^ *:[a-z-]+:"
        r" [^\n]+$"
    ),
    "element": r"</?[a-z][a-z0-9]{0,12}(?:\s[^<>]{1,600})?/?>",
    "code": r"``[^`\n]{1,80}``|`[^`\n]{1,80}`",
    "option": r"(?<![\w-])--[a-z][\w-]{2,40}(?:=[^\s`]{1,60})?",
    "version": r"(?<![\w.])v?\d+(?:\.\d+){2,}[\w.+-]*",
    "interval": r"[\[(][−+-]?\d[\d.,]*+ ?%?(?:,| to|–|\.\.) ?[−+-]?\d[\d.,]*+ ?%?[\])]",
    "quantity": r"(?<![\w.,])[−+-]?\d[\d.,]*+ ?(?:×|%|‰|[kKMGT]i?B\b|[kMB]\b|ms\b|µs\b|ns\b)",
    "path": r"(?<![^\s\"'`([|=,;:<])(?=\S{6})[\w.~@+%:=-]{0,80}[/\\\\][\w./\\\\~@+%:=-]*\w",
    "handle": r"(?<![^\s(,])@[A-Za-z][\w-]{1,38}(?![\w@])",
    "name": rf"(?<![\w.-])(?=[\w.-]{{0,60}}\d){_WORDY}(?:[-._]{_PART}){{1,6}}(?![\w-])",
    "product of symbols": r"(?<!\w)(?=\w{0,7}[⁰-₎ᵀ²³¹])[A-Za-z\u0370-\u03ff⁰-₎ᵀ²³¹]{1,8}(?!\w)",
}
_END = r"(?=[\s|,;)\]}`\"'.]|\Z)"
_ROWS = re.compile(
    "|".join(
        rf"(?<![^\s|(\[{{`\"'])(?>(?:{p}){_END})(?:[\s|,;]++(?:\d{{1,3}}[\s|]++)?(?>(?:{p}){_END})){{{LEAST - 1},}}+"
        for p in PIECES.values()
    )
)
_WHOLE = re.compile("|".join(f"(?:{p})" for p in WHOLE.values()), re.MULTILINE)
_NAME = re.compile(
    r"(?<![\w.-])(?=[\w.-]{0,60}\d)(?=[A-Za-z]*[a-z]{2})[A-Za-z0-9]+(?:[-._][A-Za-z0-9]+)*(?![\w-])"
)
"""A name with a number in it, such as that of a model; one that comes twice is a name, and no glued
digits.
"""
_HEX_DUMP = re.compile(r"^[0-9a-fA-F]{4,16}:?[ \t]+(?:[0-9a-fA-F]{2,4}[ \t]+){4,}.*$", re.MULTILINE)
_BLOCK = re.compile(r"(?<![^\s\"'=:,(|])[A-Za-z0-9+/_=-]{24,}(?![^\s\"',.;:)|])")
_TABLE = re.compile(
    r"^\|[^\n]+\|[ \t]*\n\|[ :|-]+\|[ \t]*\n(?:\|[^\n]+\|[ \t]*(?:\n|\Z))+", re.MULTILINE
)
_CELL_EDGE = re.compile(r"(?<!\\)\|")
_CODE_SPAN = re.compile(r"`[^`\n]+`")
FIGURES = 0.12
"""Share of a cell's visible characters that are digits, from which on it is a cell of figures."""
_CODE = re.compile(r"(?<!\S)(?=\S{0,40}\d)[^\s|,;]{2,40}(?=[\s|,;]|\Z)")
LEAST_CODES, SHAPES = 10, 0.3
"""Pieces with digits in a row, and how many shapes there may be for each of them, unless all are of
one length.
"""
DISTINCT, LONG = 0.5, 4
"""Of pieces so long on average so many are different in a list of codes: the same few again are a
loop.
"""
LEAST_LENGTH = 5
LETTERS, DIFFERENT = 8, 5
"""Single letters in a row, and different ones, of which a board, an alphabet or a word that is
spelled consists.
"""
_SHAPE = str.maketrans(
    {
        **dict.fromkeys("0123456789", "0"),
        **{chr(97 + i): "a" for i in range(26)},
        **{chr(65 + i): "A" for i in range(26)},
    }
)


def notation_spans(text: str) -> Iterator[tuple[int, int]]:
    """Spans of notation, in no order; some overlap."""
    for match in _ROWS.finditer(text):
        if _is_no_sentence(match.group()) and not _same_again(match.group().split()):
            yield match.span()
    yield from (m.span() for m in _WHOLE.finditer(text))
    names = list(_NAME.finditer(text))
    often = Counter(m.group() for m in names)
    yield from (m.span() for m in names if often[m.group()] > 1)
    yield from _like_shapes(text)
    yield from _figures_of_tables(text)


def encoded_spans(text: str) -> Iterator[tuple[int, int]]:
    """Spans of base64, digests and other long blocks of letters and digits, and of hex dumps."""
    yield from (m.span() for m in _HEX_DUMP.finditer(text))
    for match in _BLOCK.finditer(text):
        block = match.group()
        if any(c.isdigit() for c in block) or "/" in block or "+" in block:
            yield match.span()


def _is_no_sentence(piece: str) -> bool:
    """Single letters and short words stand in sentences too: there must be something that no
    sentence has.
    """
    parts = re.findall(r"[^\s|,;]+", piece)
    letters = {part for part in parts if part.isalpha()}
    if letters and all(len(part) == 1 for part in parts):
        return len(parts) >= LETTERS and len(letters) >= DIFFERENT
    return (
        any(c.isdigit() or not (c.isalpha() or c.isspace() or c in ".,;:'") for c in piece)
        or piece.isupper()
    )


def _same_again(pieces: Sequence[str]) -> bool:
    return len(set(pieces)) < DISTINCT * len(pieces) and sum(map(len, pieces)) >= LONG * len(pieces)


def _figures_of_tables(text: str) -> Iterator[tuple[int, int]]:
    """Cells of Markdown tables with figures or code in them, where every row has as many cells as
    the rule below the head.
    """
    for table in _TABLE.finditer(text):
        rows = table.group().rstrip("\n").split("\n")
        cells = {len(_CELL_EDGE.split(row.strip())) for row in rows}
        at = table.start()
        for row in rows if len(cells) == 1 else ():
            for cell in re.finditer(r"[^|]+", row):
                digits = sum(map(str.isdigit, cell.group()))
                if digits >= FIGURES * len("".join(cell.group().split())) or _CODE_SPAN.search(
                    cell.group()
                ):
                    yield at + cell.start(), at + cell.end()
            at += len(row) + 1


def _like_shapes(text: str) -> Iterator[tuple[int, int]]:
    row: list[re.Match[str]] = []
    for match in _CODE.finditer(text):
        between = text[row[-1].end() : match.start()].strip(" \t\n|,;") if row else ""
        if between and len(between) != len(row[-1].group()):  # one piece may be of letters alone
            yield from _row(row)
            row = []
        row.append(match)
    yield from _row(row)


def _row(row: list[re.Match[str]]) -> Iterator[tuple[int, int]]:
    pieces = [m.group() for m in row]
    if len(row) < LEAST_CODES or sum(any(map(str.isalpha, p)) for p in pieces) < len(row) / 2:
        return
    if _same_again(pieces):
        return
    lengths = Counter(map(len, pieces))
    shapes = {p.translate(_SHAPE) for p in pieces}
    like = len(shapes) <= max(2, SHAPES * len(row))
    if like or (max(lengths) >= LEAST_LENGTH and lengths.most_common(1)[0][1] >= 0.9 * len(row)):
        yield row[0].start(), row[-1].end()


# Measure a text in overlapping windows of tokens: how strange are its characters, letters, words
# and their order?
#
# Every measure is an average over the tokens or characters of a window of what `token_measures`
# says of each token.

MIN_CHARS, MIN_WORDS, MIN_TOKENS = 100, 8, 16
"""A text with fewer characters, words or tokens (marks counted) is too short to say anything."""

FEATURES = (
    "shape",
    "letters",
    "odd_words",
    "known",
    "function",
    "syntax",
    "script_jumps",
    "case_jumps",
    "digit_jumps",
    "loose_marks",
    "marks",
    "repeats",
    "lines",
    "word_length",
    "singles",
    "known_pairs",
    "known_joints",
    "odd_shapes",
    "bad_syntax",
    "unmatched",
    "low_starts",
    "inner_capitals",
    "stubs",
    "latin",
    "known_grams",
)


@dataclass(frozen=True)
class Windows:
    """Measures of all windows, shape (windows, len(FEATURES)), with their spans in tokens and code
    points.
    """

    values: NDArray[np.float64]
    first_token: NDArray[np.int64]
    end_token: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]


def running_sums(
    view: TextView, notation: Iterable[tuple[int, int]] = ()
) -> Mapping[str, NDArray[np.float64]] | None:
    """Running sums of all measures over the tokens, or None if there are too few to say anything."""
    if (
        len(view.text) < MIN_CHARS
        or len(view.is_word) < MIN_TOKENS
        or int(view.is_word.sum()) < MIN_WORDS
    ):
        return None
    sums = {name: running_sum(values) for name, values in token_measures(view, notation).items()}
    return sums if sums["prose"][-1] >= MIN_TOKENS else None


def measure(
    view: TextView, sums: Mapping[str, NDArray[np.float64]], window: int, stride: int
) -> Windows:
    """All windows of `window` tokens, one every `stride`; a shorter text is one window."""
    total = len(view.words)
    first = np.arange(0, max(total - window, 0) + stride, stride, dtype=np.int64)
    first = np.unique(np.minimum(first, max(total - window, 0)))
    end = np.minimum(first + window, total)
    start_char, end_char = view.tokens.starts[first], view.tokens.ends[end - 1]

    def mean(name: str, weight: str) -> NDArray[np.float64]:
        top = sums[name][end] - sums[name][first]
        bottom = sums[weight][end] - sums[weight][first]
        return np.where(bottom >= 0.5, top / np.maximum(bottom, 0.5), 0.0)

    words = sums["is_word"][end] - sums["is_word"][first]
    tokens = sums["one"][end] - sums["one"][first]
    columns = {
        "shape": mean("shape_bits", "chars"),
        "letters": mean("letter_bits", "letters"),
        "odd_words": mean("odd", "latin_word"),
        "known": mean("known", "latin_word"),
        "function": mean("function", "latin_word"),
        "syntax": mean("pair_bits", "pairs"),
        "script_jumps": mean("script_jump", "one"),
        "case_jumps": mean("case_jump", "one"),
        "digit_jumps": mean("digit_jump", "one"),
        "loose_marks": mean("loose_mark", "one"),
        "marks": 1 - words / np.maximum(tokens, 1e-9),
        "repeats": mean("seen_before", "one"),
        "lines": mean("breaks", "one"),
        "word_length": mean("letters", "latin_word"),
        "singles": mean("single", "one"),
        "known_pairs": mean("known_pair", "word_pairs"),
        "known_joints": mean("known_joint", "joints"),
        "odd_shapes": mean("odd_shape", "chars"),
        "bad_syntax": mean("bad_pair", "pairs"),
        "unmatched": _unmatched(sums, first, end) / np.maximum(tokens, 1e-9),
        "low_starts": mean("low_start", "starts"),
        "inner_capitals": mean("inner_capital", "word_pairs"),
        "stubs": mean("stub", "latin_word"),
        "latin": mean("latin_word", "one"),
        "known_grams": mean("known_gram", "grams"),
    }
    values = np.stack([columns[name] for name in FEATURES], axis=1)
    return Windows(values, first, end, start_char, end_char)


def _unmatched(
    sums: Mapping[str, NDArray[np.float64]], first: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Brackets of each window that have no partner in it, counted by kind and not by order."""
    kinds = [
        np.abs(sums[f"open_{mark}"][end] - sums[f"open_{mark}"][first]) for mark, _ in BRACKETS
    ]
    total: NDArray[np.float64] = np.sum(kinds, axis=0)
    return total


MODEL = "salad_trees.npz"
COARSE, FINE = (64, 16), (24, 8)
SCALES = (COARSE, FINE)
"""Window and stride in tokens: the long window sees grammar, the short one a salad between good
sentences.
"""
ROWS = 128
"""Windows that go through the trees together."""
STRETCHES = ((20, 1.2), (10, 2.2))
"""Fine windows in a row, and the mean log-odds above which they are a salad."""
FEW, FEW_MORE = 6, 1.3
"""Where notation leaves fewer windows than this, they need so much more."""
FOREIGN_WORDS, FOREIGN_KNOWN, FOREIGN_MORE = 0.6, 0.5, 1.0
"""A text that is mostly of Latin words, and of which fewer are English than this, is of a language
that the tables do not know, and needs so much more."""
LEAST_WEIGHT = 0.5
"""Share of the tokens of a window that are no notation."""
NESTED_PAIRS, NESTED_CHARS, NESTED_LIMIT = 3, 80, 6.5
"""Brackets that close in their order, so many of them, one for so many code points, are code below
this mean.
"""
_CLOSING = {closing: opening for opening, closing in BRACKETS}
PATIENCE, STEP = 64, 0.25
"""The more windows, the more strange ones by chance: every doubling past so many asks for so much
more.
"""


@dataclass(frozen=True)
class Trees:
    """Boosted regression trees, nodes of all trees in one table; a leaf is its own child."""

    roots: NDArray[np.int64]
    feature: NDArray[np.int64]
    threshold: NDArray[np.float64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    value: NDArray[np.float64]
    baseline: float
    depth: int


@cache
def trees(window: int) -> Trees:
    """The shipped trees for windows of so many tokens."""
    with (
        resources.files("assay.coherence.detectors").joinpath(MODEL).open("rb") as file,
        np.load(file) as stored,
    ):
        names = ("roots", "feature", "threshold", "left", "right", "value")
        table = {name: stored[f"{name}_{window}"] for name in names}
        return Trees(
            **table,
            baseline=float(stored[f"baseline_{window}"]),
            depth=int(stored[f"depth_{window}"]),
        )


def scores(values: NDArray[np.float64], model: Trees) -> NDArray[np.float64]:
    """Log-odds of salad for every window: the sum of the leaves that its measures (windows,
    features) lead to.
    """
    # Flat arrays and few rows at a time: everything stays in the cache, which makes this several
    # times faster.
    children = np.stack([model.left, model.right], axis=1).ravel()
    parts = []
    for first in range(0, len(values), ROWS):
        rows = np.ascontiguousarray(values[first : first + ROWS])
        flat, row = (rows.ravel(), (np.arange(len(rows), dtype=np.int32) * rows.shape[1])[:, None])
        node = np.broadcast_to(model.roots, (len(rows), len(model.roots)))
        for _ in range(model.depth):
            goes_right = flat.take(row + model.feature.take(node)) > model.threshold.take(node)
            node = children.take(2 * node + goes_right)
        parts.append(model.baseline + model.value.take(node).sum(axis=1))
    return np.concatenate(parts) if parts else np.zeros(0)


def detect(view: TextView) -> Detection | None:
    """The first stretch of salad. What looks like one is looked at again without its notation."""
    found = _detect(view, running_sums(view))
    found = found and _detect(view, running_sums(view, notation_spans(view.text)))
    if (
        found
        and found.evidence["mean_log_odds"] < NESTED_LIMIT
        and _nested(view.text[found.onset_char : found.end])
    ):
        return None
    return found


def _nested(text: str) -> bool:
    """Whether brackets stand close and each closes in its order, as in dense code: salads open and
    close them at random.
    """
    opened: list[str] = []
    pairs = 0
    for mark in text:
        if mark in _CLOSING:
            if not opened or opened.pop() != _CLOSING[mark]:
                return False
            pairs += 1
        elif mark in _CLOSING.values():
            opened.append(mark)
    return not opened and pairs >= NESTED_PAIRS and len(text) <= NESTED_CHARS * pairs


def _detect(view: TextView, sums: Mapping[str, NDArray[np.float64]] | None) -> Detection | None:
    if sums is None:
        return None
    every = measure(view, sums, *FINE)
    fine = _weighty(every, sums["prose"])
    if not len(fine.start):
        return None
    coarse = measure(view, sums, *COARSE)
    # Every fine window is seen together with the coarse one that begins at or before it.
    around = np.searchsorted(coarse.first_token, fine.first_token, side="right") - 1
    score = (
        scores(fine.values, trees(FINE[0])) + scores(coarse.values, trees(COARSE[0]))[around]
    ) / 2
    more = STEP * max(0.0, float(np.log2(len(score) / PATIENCE)))
    if len(fine.start) < min(FEW, len(every.start)):
        more += FEW_MORE
    mean = dict(zip(FEATURES, fine.values.mean(axis=0).tolist(), strict=True))
    if mean["latin"] > FOREIGN_WORDS and mean["known"] < FOREIGN_KNOWN:
        more += FOREIGN_MORE
    found = [s for length, limit in STRETCHES if (s := _stretch(score, length, limit + more))]
    return _detection(fine, score, *min(found)) if found else None


def _weighty(windows: Windows, weight: NDArray[np.float64]) -> Windows:
    """The windows that are not mostly notation."""
    tokens = windows.end_token - windows.first_token
    kept = weight[windows.end_token] - weight[windows.first_token] >= LEAST_WEIGHT * tokens
    return Windows(*(values[kept] for values in vars(windows).values()))


def _stretch(score: NDArray[np.float64], length: int, limit: float) -> tuple[int, int] | None:
    """First and end of the windows of the first stretches whose mean is above the limit; a shorter
    text is one.
    """
    length = min(length, len(score))
    sums = np.concatenate(([0.0], np.cumsum(score)))
    starts, ends = true_stretches((sums[length:] - sums[:-length]) / length > limit)
    return (int(starts[0]), int(ends[0]) + length - 1) if len(starts) else None


def _detection(fine: Windows, score: NDArray[np.float64], first: int, end: int) -> Detection:
    """The salad in the windows [first, end), without the sane ones at its beginning."""
    # Where the sum of what follows is largest, salad became the likelier.
    before = np.concatenate(([0.0], np.cumsum(score[first:end])))[:-1]
    first += int(np.argmin(before))
    while first > 0 and score[first - 1] > 0:
        first -= 1
    worst = first + int(np.argmax(score[first:end]))
    measures = dict(zip(FEATURES, fine.values[worst].round(3).tolist(), strict=True))
    evidence = {
        "log_odds": round(float(score[worst]), 2),
        "mean_log_odds": round(float(score[first:end].mean()), 2),
        "windows": end - first,
    }
    # The first windows overlap what came before: the salad begins about where the first one is half
    # full.
    onset = int(fine.start[0]) if first == 0 else int(fine.start[first] + fine.end[first]) // 2
    return Detection(
        kind_of(measures), onset, int(fine.end[end - 1]), evidence | _telling(measures)
    )


def kind_of(measures: dict[str, float]) -> str:
    """The name of a salad, from what stands out in its worst window."""
    if measures["script_jumps"] > 0.08:
        return "mixed_scripts"
    if measures["digit_jumps"] > 0.08:
        return "digit_salad"
    if measures["function"] > 0.45 and measures["syntax"] < 0.2:
        return "function_word_salad"
    if measures["odd_words"] > 0.25 or measures["case_jumps"] > 0.04:
        return "subword_salad"
    if measures["repeats"] > 0.75:
        return "few_words"
    return "token_soup" if measures["marks"] > 0.3 else "word_salad"


def _telling(measures: dict[str, float]) -> dict[str, float]:
    names = (
        "shape",
        "letters",
        "odd_words",
        "known",
        "known_pairs",
        "known_grams",
        "function",
        "syntax",
        "repeats",
    )
    return {name: measures[name] for name in names}
