"""Tokens that no reader should see: padding, reserved and turn markers, tags of reasoning, broken
bytes.

A text may speak of such tokens. What stands in code, in quotes or in an indented block does not
count, and neither does a token that a sentence or a list *names*: it stands where a noun would, in
a text about tokens. A single end-of-text marker at the very end is a setting of the server
(`skip_special_tokens`), not a broken model.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

from assay.coherence.text import Detection, Spans, TextView

_SPECIAL = re.compile(
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
_TURN = re.compile(
    r"im_start|start_header|start_of_turn|inst\]|sys>|user|assistant|model|<\|system|turn[|>]|\]~!?b|\[\||channel|<\|return"
    r"|<\|message|<\|call\|",
    re.IGNORECASE,
)
_FILLER = re.compile(
    r"pad|unk|unused|reserved|extra_id|mask|0x|control|special|placeholder|\u2047", re.IGNORECASE
)
_NUMBERED = re.compile(r"(?:unused|reserved|control|special|placeholder)", re.IGNORECASE)
"""Slots that nothing was trained on: one is enough, whereas `<unk>` may stand for a word."""
_PLAIN = re.compile(r"</?(?:s|think|tool_call|tool_response)>", re.IGNORECASE)
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
    rf"(?:{_SPECIAL.pattern})(?:(?:analysis|commentary|final|user|assistant|system|model|tool)?(?:{_SPECIAL.pattern}))+"
)
"""Tokens that are shown as they follow one another: `<|channel|>analysis<|message|>`."""
_LISTED = re.compile(
    rf"(?:{_SPECIAL.pattern})(?:, (?:and |or )?| (?:and|or|und|et|y|i|&) )(?:{_SPECIAL.pattern})"
)
"""Tokens in an enumeration are the subject by themselves."""
_ENDS_LINE = re.compile(r"[ \t]*(?:\n|\Z)")
_ANNOUNCED = re.compile(r"(?:[:=|(]|\b(?:is|are|by|token|called|with|or|and|ist|est|es))[ \t]*\Z")
_SUBJECT = re.compile(
    r"token|vocab|template|marker|marks?\b(?:"
    r" |ed)|delimiter|placeholder|separator|padding|tag\b|tags\b|special|reserved|embedding|BERT|EOS|BOS"
    r"|chatml|prompt|harmony|jeton|marcador|marqueur|токен|词元|标记|令牌|トークン|토큰",
    re.IGNORECASE,
)
ABOUT = 300
"""Code points before and after a token in which the text says that it speaks of tokens."""
OFTEN = 30
"""A token that comes so often is not named."""
_INDENTED = re.compile(
    r"^(?![ \t])[^\n]+\n(?:[ \t]*\n)+((?:(?: {4,}|\t)[^\n]*(?:\n|\Z)|[ \t]*\n)+)|((?:^>"
    r" ?[^\n]*(?:\n|\Z))+)",
    re.M,
)
_INTRODUCED = re.compile(r"^([^\n]{1,400}):[ \t]*\n+([<\[][^\n]+(?:\n[^\n]+)*)", re.MULTILINE)

_HARMONY = re.compile(
    r"\A\s*(?:analysis|commentary)(?=(?:We|The|User|I|Need|Okay|So|This|Let|It|They|Just|Simple|Question|You|He|There)\b)"
    r"|(?<=[^\s`\"'(_/-])assistant(?:final|analysis|commentary)|^assistant(?:final|analysis|commentary)(?=\S)"
    r"|(?:^|assistant|commentary|analysis)\s*to=(?:functions|python|browser|container)\b"
    r"|^functions\.\w{1,60}:\d{1,3}\s*\{|\Aassistant[ \t]*\n+(?=\S)",
    re.MULTILINE,
)
_GLUED_ROLE = re.compile(r"(?<=[.!?)\]}\"'`…。！？])(?:assistant|user|model)[ \t]*\n")
_CODE_LINE = re.compile(r"[=(){};_<>]|\breturn\b|\bimport\b|\A\S*\.\Z")
_ROLE_LINE = re.compile(r"^(user|assistant|model|system)[ \t]*$", re.MULTILINE)
MIN_ROLE_LINES = 3
_BYTE_LEVEL = re.compile(r"[A-Za-z][Ġ▁][A-Za-z]|Ċ")


def detect_special_tokens(view: TextView) -> Detection | None:
    """The first leak of special tokens, of turns without their marks, or of a tokenizer's internal
    marks.
    """
    found = [d for d in (_leak(view), _roles(view), _byte_level(view)) if d]
    return min(found, key=lambda d: d.onset_char, default=None)


def _leak(view: TextView) -> Detection | None:
    text = view.text
    if not any(mark in text for mark in "<[]\u2047"):
        return None
    marks = list(_SPECIAL.finditer(text))
    if not marks:
        return None
    quoted = _quoted(view)
    marks = [m for m in marks if m.start() not in quoted]
    flood = _longest_row(view, marks)
    if flood:
        return flood
    if tag := _closing_tag(view, marks):
        return tag
    alone = (
        marks
        and not _SPECIAL.sub("", text).strip()
        and marks[0].group() not in ("<think>", "</think>")
    )
    if alone or (marks and marks[0].group() == "<s>" and not text[: marks[0].start()].strip()):
        return _found("special_token_leak", marks)
    marks = [m for m in marks if not _PLAIN.fullmatch(m.group())]
    often = Counter(m.group() for m in marks)
    spoken = {m.group() for m in _SPECIAL.finditer(text) if m.start() in quoted or _named(text, m)}
    leaks = [
        m
        for m in marks
        if often[m.group()] > OFTEN
        or not (_named(text, m) or (m.group() in spoken and _in_sentence(text, m)))
    ]
    turns = [m for m in leaks if _TURN.search(m.group())]
    if turns:
        return _found("template_leak", turns)
    fillers = [m for m in leaks if _FILLER.search(m.group())]
    if len(fillers) >= 3 or any(_NUMBERED.search(m.group()) for m in fillers):
        return _found("special_token_leak", fillers)
    if fillers and len(text) < 40 * len(fillers):
        return _found("special_token_leak", fillers)
    ends = [m for m in leaks if m not in fillers]
    if len(ends) >= 2 or (
        ends and ends[0].end() < view.visible_end and text[ends[0].end() :].strip()
    ):
        return _found("special_token_leak", ends)
    return None


def _named(text: str, mark: re.Match[str]) -> bool:
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
    return listed is not None or _SUBJECT.search(_SPECIAL.sub("", around)) is not None


def _in_sentence(text: str, mark: re.Match[str]) -> bool:
    """Whether words stand before the token on its line: there a token that the text has named is
    shown in its place.
    """
    line = _SPECIAL.sub("", text[text.rfind("\n", 0, mark.start()) + 1 : mark.start()])
    return len(re.findall(r"\w+", line)) >= 2


def _quoted(view: TextView) -> Spans:
    """What a text shows and does not say: code, quotations, indented blocks, and those that a line
    about tokens introduces.
    """
    text = view.text
    spans = [*view.fences, *(m.span() for m in _CODE_SPAN.finditer(text))]
    spans += [m.span(1) if m.group(1) else m.span(2) for m in _INDENTED.finditer(text)]
    introduced = (
        m for m in _INTRODUCED.finditer(text) if _SUBJECT.search(_SPECIAL.sub("", m.group(1)))
    )
    return Spans([*spans, *(m.span(2) for m in introduced)])


def _closing_tag(view: TextView, marks: list[re.Match[str]]) -> Detection | None:
    """`</think>` that nothing opened: the reasoning before it was taken for the answer."""
    tags = [m for m in marks if m.group().lower() in ("<think>", "</think>")]
    if not tags or tags[0].group().lower() == "<think>" or _named(view.text, tags[0]):
        return None
    return _found("think_tag_leak", tags[:1])


def _longest_row(view: TextView, marks: list[re.Match[str]]) -> Detection | None:
    """Five special tokens in a row, blanks between them or not, or three equal ones without a
    blank.
    """
    row: list[re.Match[str]] = []
    for mark in marks:
        if row and view.text[row[-1].end() : mark.start()].strip():
            if len(row) >= 5:
                break
            row = []
        row.append(mark)
        last = row[-3:]
        if (
            len({m.group() for m in last}) == 1
            and len(last) == 3
            and last[2].end() - last[0].start() == 3 * len(mark.group())
        ):
            return _found("special_token_flood", row)
    return _found("special_token_flood", row) if len(row) >= 5 else None


def _roles(view: TextView) -> Detection | None:
    """Turns whose marks were stripped: `analysis…assistantfinal`, a role glued to a sentence, lines
    of roles alone.
    """
    text = view.text
    words = ("assistant", "analysis", "commentary", "user", "User:", "Human:", "USER:", "functions")
    if not any(word in text for word in words):
        return None
    if turns := _labelled_turns(view):
        return _found("template_leak", turns)
    marks, lines = (
        [*_HARMONY.finditer(text), *_GLUED_ROLE.finditer(text)],
        list(_ROLE_LINE.finditer(text)),
    )
    if not marks and len(lines) < MIN_ROLE_LINES:
        return None
    quoted = _quoted(view)
    marks = [m for m in marks if m.start() not in quoted and not _in_code(view, m)]
    if marks:
        return _found("template_leak", marks)
    lines = [m for m in lines if m.start() not in quoted]
    # A list of role names has nothing between them; turns have, and take turns.
    turns = [
        m for i, m in enumerate(lines) if i == 0 or text[lines[i - 1].end() : m.start()].strip()
    ]
    if len(turns) >= MIN_ROLE_LINES and {"user"} < {m.group(1) for m in turns}:
        return _found("template_leak", turns)
    return None


_LABEL = re.compile(
    r"^(?:### ?)?(?:(User|Human|USER)|(Assistant|AI|ASSISTANT|Bot)): ?(?=\S)", re.MULTILINE
)
_DIALOGUE = re.compile(
    r"dialog|convers|transcript|interview|example|script|chat|scene|exchange|role|prompt|log\b|sample",
    re.IGNORECASE,
)


def _labelled_turns(view: TextView) -> list[re.Match[str]]:
    """`User: …` and `Assistant: …` in turns after an answer that is none of them, and that
    announces no dialogue.
    """
    marks = list(_LABEL.finditer(view.text))
    if (
        len(marks) < MIN_ROLE_LINES
        or not marks[0].group(1)
        or any(bool(a.group(1)) == bool(b.group(1)) for a, b in pairwise(marks))
    ):
        return []
    before = view.text[: marks[0].start()].rstrip()
    if not before or before[-1] not in ".!?)\"'”" or _DIALOGUE.search(before[-2 * ABOUT :]):
        return []
    return [] if marks[0].start() in _quoted(view) else marks


def _in_code(view: TextView, mark: re.Match[str]) -> bool:
    """Whether a role stands at the end of a line of code, as in `return self.user`."""
    line = view.text[view.line_at(mark.start())[0] : mark.start()]
    return mark.re is _GLUED_ROLE and _CODE_LINE.search(line) is not None


def _byte_level(view: TextView) -> Detection | None:
    """`Ġ`, `▁` or `Ċ` between letters: ids were turned into text without the tokenizer's decoder."""
    marks = list(_BYTE_LEVEL.finditer(view.text))
    if len(marks) < 5 or len(marks) < len(view.text) / 60:
        return None
    return Detection("tokenizer_marks", marks[0].start(), marks[-1].end(), {"count": len(marks)})


def _found(kind: str, marks: list[re.Match[str]]) -> Detection:
    evidence = {"token": marks[0].group().strip(), "count": len(marks)}
    return Detection(kind, marks[0].start(), marks[-1].end(), evidence)


# Characters that stand for broken bytes name a decoding fault (the bytes of one character split
# over tokens or chunks), not always a broken model.
_BROKEN = re.compile("\ufffd+")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")
_LONE = re.compile("[\ud800-\udfff]")


def detect_replacement(view: TextView) -> Detection | None:
    """The first of enough replacement, control or lone surrogate characters."""
    n = len(view.text)
    for kind, pattern, share in (
        ("replacement_characters", _BROKEN, 0.002),
        ("replacement_characters", _LONE, 0.002),
        ("control_characters", _CONTROL, 0.01),
    ):
        runs = [m.span() for m in pattern.finditer(view.text)]
        count = sum(end - start for start, end in runs)
        if (count >= 3 and count >= share * n) or count >= 40:
            return Detection(kind, runs[0][0], runs[-1][1], {"count": count, "runs": len(runs)})
    return None
