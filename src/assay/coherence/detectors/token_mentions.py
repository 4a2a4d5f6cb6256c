"""What special tokens look like, and where a text mentions them: quoted, or named as a noun would
be.

Quoted is what stands in code, quotations, indented blocks, and blocks that a line about tokens
introduces. Named is a token in a noun's place, in a text about tokens.
"""

from __future__ import annotations

import re

from assay.coherence.arrays import Spans
from assay.coherence.detection import TOKENIZER, Detection, Family
from assay.coherence.text import TextView

SPECIAL = re.compile(
    # <|im_start|>, <|turn>, <turn|>
    r"<\|[A-Za-z][\w./ -]{0,40}\|>|<\|[a-z_]{2,30}>|<[a-z_]{2,30}\|>"
    r"|<｜[^｜\n]{1,40}｜>"  # DeepSeek's full-width bars
    r"|\[(?:PAD|UNK|CLS|SEP|MASK|BOS|EOS|/?INST|/?THINK|/?(?:TOOL_(?:CALLS|RESULTS)|AVAILABLE_TOOLS))\]"
    # after a word it is an index
    r"|(?<![\w\])])\[(?:unused|control|reserved|special|SPECIAL|CONTROL)_?\d+\]"
    r"|\[(?:unused|control|reserved|special|SPECIAL|CONTROL)_\d\d+\]|\[\|[a-z]+\|\]"
    r"|<(?:unused|reserved|control|special|SPECIAL|extra_id|placeholder|TOKENS_UNUSED)_?\d+>"
    r"|<(?:pad|PAD|unk|UNK|bos|eos|mask|(?:start|end|begin)_of_[a-z]+|seed:[a-z_]+)>"
    r"|</?(?:s|SYS|think|tool_call|tool_response)>|<</?SYS>>|\[[gs]MASK\]|<[se]op>"
    r"|<0x[0-9A-F]{2}>|\]~!?b[\[\]]|\[e~\["  # bytes; MiniMax
    r"|\u2047"
)


_CODE_SPAN = re.compile(r"`[^`\n]*`|\"[^\"\n]{0,40}\"|'[^'\n]{0,40}'|“[^”\n]{0,40}”|«[^»\n]{0,40}»")

# Named, not leaked: where a noun stands, in a text that speaks of tokens.
_NOUN_BEFORE = re.compile(
    r"(?:(?:[^\W_]|[,;:–—-]|``)[ \t]+(?:and |or )?|[(/|=\u3000-\u9fff][ \t]*|^["
    r" \t]*(?:(?:[-*•|>]|\d+[.)])[ \t]*)?)\Z"
)
_NOUN_AFTER = re.compile(
    r"(?:user|assistant|system|model)?["
    r" \t]+(?:[a-zà-ÿ0-9(=|–—-]|[^\x00-\u02ff])|[,;:)/\u3000-\u9fff]|[.!?](?:\s|\Z)|'s\b|["
    r" \t]*\|[ \t]"
)
_GLUED = re.compile(
    rf"(?:{SPECIAL.pattern})(?:(?:analysis|commentary|final|user|assistant|system|model|tool)?(?:{SPECIAL.pattern}))+"
)
"""Tokens that are shown as they follow one another: `<|channel|>analysis<|message|>`."""
_LISTED = re.compile(
    rf"(?:{SPECIAL.pattern})(?:, (?:and |or )?| (?:and|or|und|et|y|i|&) )(?:{SPECIAL.pattern})"
)
"""Tokens in an enumeration are the subject by themselves."""
_ENDS_LINE = re.compile(r"[ \t]*(?:\n|\Z)")
_ANNOUNCED = re.compile(r"(?:[:=|(]|\b(?:is|are|by|token|called|with|or|and|ist|est|es))[ \t]*\Z")
_SUBJECT = re.compile(
    r"token|vocab|template|marker|marks?\b(?:"
    r" |ed)|delimiter|placeholder|separator|padding|tag\b|tags\b|special|reserved|embedding|BERT|EOS|BOS"  # noqa: E501
    r"|chatml|prompt|harmony|jeton|marcador|marqueur|токен|词元|标记|令牌|トークン|토큰",
    re.IGNORECASE,
)
ABOUT = 300
"""Code points before and after a token in which the text says that it speaks of tokens."""


_INDENTED = re.compile(
    r"^(?![ \t])[^\n]+\n(?:[ \t]*\n)+((?:(?: {4,}|\t)[^\n]*(?:\n|\Z)|[ \t]*\n)+)|((?:^>"
    r" ?[^\n]*(?:\n|\Z))+)",
    re.M,
)
_INTRODUCED = re.compile(r"^([^\n]{1,400}):[ \t]*\n+([<\[][^\n]+(?:\n[^\n]+)*)", re.MULTILINE)


def is_named(text: str, mark: re.Match[str]) -> bool:
    """Whether a sentence, a list or a table names the token: a noun's place, in a text about
    tokens.
    """
    line = text.rfind("\n", max(0, mark.start() - ABOUT), mark.start()) + 1
    rows = _GLUED.finditer(text, max(line, mark.start() - ABOUT), mark.end() + ABOUT)
    start, end = next((m.span() for m in rows if m.start() <= mark.start() < m.end()), mark.span())
    before = text[max(line, start - ABOUT) : start]
    announced = _ENDS_LINE.match(text, end) and _ANNOUNCED.search(before)
    if not announced and not (_NOUN_BEFORE.search(before) and _NOUN_AFTER.match(text, end)):
        return False
    around = text[max(0, start - ABOUT) : start] + text[end : end + ABOUT]
    listed = _LISTED.search(text, max(0, start - ABOUT), end + ABOUT)
    return listed is not None or _SUBJECT.search(SPECIAL.sub("", around)) is not None


def in_sentence(text: str, mark: re.Match[str]) -> bool:
    """Whether words stand before the token on its line: there a token that the text has named is
    shown in its place.
    """
    line = SPECIAL.sub("", text[text.rfind("\n", 0, mark.start()) + 1 : mark.start()])
    return len(re.findall(r"\w+", line)) >= 2


_CAUSES = {
    "special_token_leak": (TOKENIZER, "special tokens that the server does not skip"),
    "think_tag_leak": (
        "the template opens the reasoning and the server's reasoning parser is off or does not fit",
    ),
}


def quoted_spans(view: TextView) -> Spans:
    """What a text shows and does not say: code, quotations, indented blocks, and those that a line
    about tokens introduces.
    """
    text = view.text
    spans = [*view.fences, *(m.span() for m in _CODE_SPAN.finditer(text))]
    spans += [m.span(1) if m.group(1) else m.span(2) for m in _INDENTED.finditer(text)]
    introduced = (
        m for m in _INTRODUCED.finditer(text) if _SUBJECT.search(SPECIAL.sub("", m.group(1)))
    )
    return Spans([*spans, *(m.span(2) for m in introduced)])


def detection_of(kind: str, marks: list[re.Match[str]]) -> Detection:
    """A leak of several tokens: it begins at the first of them."""
    evidence = {"token": marks[0].group().strip(), "count": len(marks)}
    family = Family.TOKEN_FLOOD if kind == "special_token_flood" else Family.LEAK
    span = marks[0].start(), marks[-1].end()
    return Detection(kind, *span, evidence, family, _CAUSES.get(kind, ()))
