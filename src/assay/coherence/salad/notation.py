"""Notation with a grammar of its own, which looks like salad to measures of prose: chess, music, chemistry, keys, dumps.

Each entry of `PIECES` is the grammar of one piece between blanks, of which `LEAST` in a row are notation, bars, commas
and line breaks between them or not. Each of `WHOLE` is a pattern that is notation wherever it stands. What no entry
knows is told by its shape: a row of pieces that mix letters with digits and have few shapes between them (`a0a0 a0a0`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

LEAST = 6
_NUMBER = r"-?(?:\d++(?:\.\d*+)?|\.\d++)"

PIECES = {
    "chess moves": r"(?:\d+\.(?:\.\.)?)?(?:[KQRBN]?[a-h]?[1-8]?x?[a-h][1-8](?:=?[QRBN])?|[O0]-[O0](?:-[O0])?)[+#]?[!?]{0,2}"
    r"|\d+\.(?:\.\.)?|1-0|0-1|1/2-1/2|\*|\$\d+|\{[^{}]{0,40}\}",
    "shogi moves": r"\d+\.|\+?[PLNSGBRK][-x*]?[1-9][a-i][+=]?",
    "coordinate moves": r"[a-h][1-8][a-h][1-8][qrbn]?",
    "cube turns": r"[RLUDFBMESrludfbxyz]w?[2']{0,2}|\([RLUDFB][2']?|[RLUDFB][2']?\)\d?",
    "chords": r"[A-G][#b♯♭]?(?:m|maj|min|dim|aug|sus|add|M|°|ø)?\d{0,2}(?:sus\d|add\d|b5|#5)?(?:/[A-G][#b]?)?|%|\[?[A-Z][a-z]+\]?:",
    "note names": r"[a-gr](?:is|es|s)?[',]*\d*\.{0,2}[~()]?|\\[a-z]+|[A-G][#b]?\d",
    "tune": r"[|:\[\]]*+[({]?\d?+(?:[_^=]*+[A-Ga-gzx][,']*+\d*+(?:/\d*+)?[<>-]?[)\]}]?)++[|:\]]*+|\|[:|\]\d]*|:\|:?",
    "stitches": r"\*?(?:k|p|sl|inc|dec|ch|sc|dc|tr|hdc|yo|ssk|psso|m1[lr]?|st)s?\d*(?:tog)?(?:\(\d+\))?[*:.]?",
    "machine code": rf"[GMTN]\d+(?:\.\d)?|[XYZEFSIJKRPABC]{_NUMBER}",
    "cards": r"(?:[2-9TJQKA]|10)[shdcSHDC♠♥♦♣]",
    "morse": r"[.·•\-–−]{1,6}|/",
    "formulas": r"\d*(?:[A-Z][a-z]?\d*|\((?:[A-Z][a-z]?\d*)+\)\d*)+(?:\^?\d?[+-])?(?:\((?:aq|s|l|g)\))?|\+|[-=]+>|→|⇌|<=>|↔",
    "bytes": r"(?:0x)?[0-9a-fA-F]{2}|#[0-9a-fA-F]{3,8}",
    "codes": r"[A-Z]{1,4}-?\d{1,6}[A-Z]?(?:[-./]\d+)?",
}
_ATOMS = r"(?:\[[^\]\s]{1,14}\]|Br|Cl|[BCNOPSFIbcnops]|[=#$:/\\.~-]|%\d\d|\d|[()])"
WHOLE = {
    "position": r"(?:[pnbrqkPNBRQK1-8]{1,8}/){7}[pnbrqkPNBRQK1-8]{1,8}(?: [wb] (?:-|[KQkq]{1,4}) (?:-|[a-h][36])(?: \d+ \d+)?)?",
    "molecule": rf"(?<![^\s|\"'`:,(])(?=\S{{0,60}}[()=#\[\]])(?=\S{{0,60}}[CcNnO])(?=\S{{5}}){_ATOMS}{{5,}}+(?![^\s|\"'`,;:)])",
    "chain": r"(?<![^\s|\"'`:,(])(?:Br|Cl|[CNOPSF]){4,}(?![^\s|\"'`,;:)])",
    "identifier of a molecule": r"InChI=1S?/\S+|(?<!\w)[A-Z]{14}-[A-Z]{10}-[A-Z]\b",
    "token": r"(?<![\w.-])[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}(?![\w-])",
    "hash": r"\$\w{1,10}\$[\w./$=,+-]{20,}|(?:sha\d+|md5|SHA256)[:-][A-Za-z0-9+/=]{20,}",
    "digest": r"(?<!\w)(?:[0-9a-f]{32,}|[0-9A-F]{32,})(?!\w)",
    "key": r"ssh-(?:rsa|ed25519|dss) [A-Za-z0-9+/=]{40,}|data:[\w/+.-]+;base64,[A-Za-z0-9+/=]+",
    "sequence": r"(?<!\w)[ACDEFGHIKLMNPQRSTVWYBXZ]{24,}\*?(?!\w)",
    "game record": r"(?:;?\b[A-Z]{1,2}(?:\[[^\]\n]{0,60}\])+\s*){4,}",
    "program of marks": r"[-+<>\[\].,]{24,}",
    "drawing": rf"(?<![\w.])[Mm] ?{_NUMBER}[ ,]{_NUMBER}(?:[ ,]*+[MLHVCSQTAZmlhvcsqtaz]?[ ,]*+{_NUMBER}){{4,}}(?:[ ,]*[Zz])?",
    "tablature": r"^[eBGDAE]?\|[-0-9hpbrvx/\\~|() ]{8,}$",
    "escapes": r"(?:%[0-9A-Fa-f]{2}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}){4,}",
    "address": r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:{1,2}){3,7}[0-9a-fA-F]{1,4}(?![\w:])",
    "residues": r"\b(?:[A-Z][a-z]{2}-){4,}[A-Z][a-z]{2}\b",
    "uuencoding": r"^M[ -`]{60}$",
    "tag of a game": r"^\[[A-Z]\w+ \"[^\"\n]*\"\]$",
    "sound": r"[/\[][^/\]\s]{0,24}[\u0250-\u02af\u02c8\u02cc\u02d0][^/\]\s]{0,24}[/\]]",
    "pattern": r"(?<!\S)(?=\S{0,80}(?:\(\?[:=!<]|\[\^?(?:a-z|A-Z|0-9)|\\[dwsbDWSB][+*?{\])]|\{\d+,\d*\}))\S+",
    "formula": r"\\begin\{(?:align|equation|gather|cases|array|[pbv]?matrix)\*?\}[^\0]{0,2000}?\\end\{\w+\*?\}|\$\$[^$]{1,800}\$\$"
    r"|\\\[[^\0]{1,800}?\\\]",
    "special tokens": r"<\|[^|\n]{1,40}\|>",
    "symbols": r"(?<![^\W\d_])[\u0370-\u03ff\u2100-\u214f\u2190-\u22ff][₀-₉⁰-⁹]*(?![^\W\d_])",
    "gloss": r"[(（][^()（）\x00-\u024f]{1,24}[)）]",
}
_END = r"(?=[\s|,;)\]}`\"'.]|\Z)"
_ROWS = re.compile(
    "|".join(
        rf"(?<![^\s|(\[{{`\"'])(?>(?:{p}){_END})(?:[\s|,;]++(?:\d{{1,3}}[\s|]++)?(?>(?:{p}){_END})){{{LEAST - 1},}}+"
        for p in PIECES.values()
    )
)
_WHOLE = re.compile("|".join(f"(?:{p})" for p in WHOLE.values()), re.MULTILINE)
_HEX_DUMP = re.compile(r"^[0-9a-fA-F]{4,16}:?[ \t]+(?:[0-9a-fA-F]{2,4}[ \t]+){4,}.*$", re.MULTILINE)
_BLOCK = re.compile(r"(?<![^\s\"'=:,(])[A-Za-z0-9+/_=-]{24,}(?![^\s\"',.;:)])")
_CODE = re.compile(r"(?<!\S)(?=\S{0,40}\d)[^\s|,;]{2,40}(?=[\s|,;]|\Z)")
LEAST_CODES, SHAPES = 10, 0.3
"""Pieces with digits in a row, and how many shapes there may be for each of them, unless all are of one length."""
LEAST_LENGTH = 5
_SHAPE = str.maketrans(
    {
        **dict.fromkeys("0123456789", "0"),
        **{chr(97 + i): "a" for i in range(26)},
        **{chr(65 + i): "A" for i in range(26)},
    }
)


def notation_spans(text: str) -> Iterator[tuple[int, int]]:
    """Spans of notation, in no order; some overlap."""
    yield from (m.span() for m in _ROWS.finditer(text) if _is_no_sentence(m.group()))
    yield from (m.span() for m in _WHOLE.finditer(text))
    yield from _like_shapes(text)


def encoded_spans(text: str) -> Iterator[tuple[int, int]]:
    """Spans of base64, digests and other long blocks of letters and digits, and of hex dumps."""
    yield from (m.span() for m in _HEX_DUMP.finditer(text))
    for match in _BLOCK.finditer(text):
        block = match.group()
        if any(c.isdigit() for c in block) or "/" in block or "+" in block:
            yield match.span()


def _is_no_sentence(piece: str) -> bool:
    """Single letters and short words stand in sentences too: there must be something that no sentence has."""
    return (
        any(c.isdigit() or not (c.isalpha() or c.isspace() or c in ".,;:'") for c in piece) or piece.isupper()
    )


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
    lengths = Counter(map(len, pieces))
    shapes = {p.translate(_SHAPE) for p in pieces}
    like = len(shapes) <= max(2, SHAPES * len(row))
    if like or (max(lengths) >= LEAST_LENGTH and lengths.most_common(1)[0][1] >= 0.9 * len(row)):
        yield row[0].start(), row[-1].end()
