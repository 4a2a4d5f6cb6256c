"""Notation with a grammar of its own looks like salad to measures of prose: chess, music,
chemistry, keys, dumps.

Each entry of `PIECES` is the grammar of one piece between blanks, of which `LEAST` in a row are
notation, bars, commas and line breaks between them or not. Each of `WHOLE` is a pattern that is
notation wherever it stands. What no entry knows is told by its shape: a row of pieces with digits
that have few shapes between them (`a0a0 a0a0`), or all one length.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

LEAST = 6
_NUMBER = r"-?(?:\d++(?:\.\d*+)?|\.\d++)"

_SYLLABLE = (
    r"(?:[zcs]h|[bpmfdtnlgkhjqxzcsrywBPMFDTNLGKHJQXZCSRYW]|[ZCS]h)?[aeiouüAEO]{1,3}(?:ng?|r)?"
)
_PINYIN = rf"(?:{_SYLLABLE}[1-5]){{1,4}}(?:{_SYLLABLE}[1-5]?)?"

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
        r"\d*(?:[A-Z][a-z]?[\d₀-₉]*|\((?:[A-Z][a-z]?[\d₀-₉]*)+\)[\d₀-₉]*)+(?:\^?\d?[+-])?"
        r"(?:\((?:aq|s|l|g)\))?[↓↑]?|\+|[-=]+>|→|⇌|<=>|↔"
    ),
    "hashtags": r"#\w{2,60}",
    "tone numbers": rf"{_PINYIN}[.!?:]?",
    "bytes": r"(?:0x)?[0-9a-fA-F]{2}|#[0-9a-fA-F]{3,8}",
    "letters": r"[^\W\d_]|\.",
    "codes": r"[A-Z]{1,4}-?\d{1,6}[A-Z]?(?:[-./]\d+)?",
}
_ATOMS = r"(?:\[[^\]\s]{1,14}\]|Br|Cl|[BCNOPSFIbcnops]|[=#$:/\\.~-]|%\d\d|\d|[()])"
_WORDY = r"[A-Za-z]{0,24}[a-z]{2}[A-Za-z]{0,24}\d{0,3}"
_PART = rf"(?:\d{{1,4}}(?:\.\d+)?[A-Za-z]{{0,2}}(?![A-Za-z0-9])|[A-Z]{{1,4}}\d{{0,3}}(?![A-Za-z0-9])|{_WORDY})"  # noqa: E501
"""Parts of the name of a model or a package: words with a number behind them, sizes and capitals.
"""
_FOREIGN = r"[^\W\d_\x00-\u024f]{1,40}"
_LANGUAGE = r"(?:Chinese|Mandarin|Japanese|Korean|Russian|Ukrainian|Arabic|Persian|Urdu|Greek|Hebrew|Hindi|Bengali|Tamil|Thai|Georgian|Armenian)"  # noqa: E501
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
        rf"(?<![^\s|(\[{{`\"'])(?>(?:{p}){_END})(?:[\s|,;]++(?:\d{{1,3}}[\s|]++)?(?>(?:{p}){_END})){{{LEAST - 1},}}+"  # noqa: E501
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
    yield from _digits_as_letters(text)
    yield from _glossed_list(text)
    yield from _figures_of_tables(text)


_PARAGRAPH = re.compile(r"[^\n]+")
_DIGIT_WORD = re.compile(r"(?<!\w)(?=\w{0,20}[a-z])(?=\w{0,20}\d)[A-Za-z0-9']{2,20}(?!\w)")
LEAST_DIGIT_WORDS, MOST_ROWS = 6, 4000
"""Different words with digits in them on a line that is written so, and code points of it."""


def _digits_as_letters(text: str) -> Iterator[tuple[int, int]]:
    """Lines of a language written with digits for letters, as Arabic is with 2, 3, 5, 7 and 9."""
    for line in _PARAGRAPH.finditer(text):
        if line.end() - line.start() > MOST_ROWS:
            continue
        words = {m.group().lower() for m in _DIGIT_WORD.finditer(line.group())}
        digits = [c for word in words for c in word if c.isdigit()]
        if (
            len(words) >= LEAST_DIGIT_WORDS
            and not {"0", "1", "4"} & set(digits)
            and sum(d in "237" for d in digits) >= 0.6 * len(digits)
            and all(len(re.findall(r"\d+", w)) == len(re.findall(r"\d", w)) for w in words)
        ):
            yield line.span()


_GLOSSED = re.compile(
    r"^[ \t]*(?:\d{1,3}[.)]|[-*•])[ \t]+([^\n–—]{2,80}?) [–—-] [^\n]+$", re.MULTILINE
)
LEAST_GLOSSED = 4


def _glossed_list(text: str) -> Iterator[tuple[int, int]]:
    """Items of a list that give a phrase and, after a dash, what it means."""
    items = list(_GLOSSED.finditer(text))
    if len(items) >= LEAST_GLOSSED:
        yield from (m.span(1) for m in items)


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
