"""Turns whose marks were stripped: `analysis…assistantfinal`, a role glued to a sentence, roles
alone.
"""

from __future__ import annotations

import re
from itertools import pairwise

from assay.coherence.detection import Detection
from assay.coherence.detectors.token_mentions import ABOUT, detection_of, quoted_spans
from assay.coherence.text import TextView

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


def find_roles(view: TextView) -> Detection | None:
    """Turns whose marks were stripped: `analysis…assistantfinal`, a role glued to a sentence, lines
    of roles alone.
    """
    text = view.text
    words = (
        "assistant",
        "analysis",
        "commentary",
        "user",
        "User:",
        "Human:",
        "USER:",
        "functions",
        "### ",
    )
    if not any(word in text for word in words):
        return None
    if turns := _labelled_turns(view) or _headed_turns(view):
        return detection_of("template_leak", turns)
    marks, lines = (
        [*_HARMONY.finditer(text), *_GLUED_ROLE.finditer(text)],
        list(_ROLE_LINE.finditer(text)),
    )
    if not marks and len(lines) < MIN_ROLE_LINES:
        return None
    quoted = quoted_spans(view)
    marks = [m for m in marks if m.start() not in quoted and not _in_code(view, m)]
    if marks:
        return detection_of("template_leak", marks)
    lines = [m for m in lines if m.start() not in quoted]
    # A list of role names has nothing between them; turns have, and take turns.
    turns = [
        m for i, m in enumerate(lines) if i == 0 or text[lines[i - 1].end() : m.start()].strip()
    ]
    if len(turns) >= MIN_ROLE_LINES and {"user"} < {m.group(1) for m in turns}:
        return detection_of("template_leak", turns)
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
    return [] if marks[0].start() in quoted_spans(view) else marks


_HEADER = re.compile(
    r"^(?:###|\*\*) ?(?:(Instruction|Input|Human|User|Question)|(Response|Output|Assistant|Answer))"
    r":?(?:\*\*)?:?[ \t]*$",
    re.MULTILINE,
)


def _headed_turns(view: TextView) -> list[re.Match[str]]:
    """Headers of a prompt (`### Instruction:`, `### Response:`) in turns, run on after an answer
    that is none of them.
    """
    marks = list(_HEADER.finditer(view.text)) if "### " in view.text else []
    if (
        len(marks) < MIN_ROLE_LINES
        or not marks[0].group(1)
        or any(bool(a.group(1)) == bool(b.group(1)) for a, b in pairwise(marks))
    ):
        return []
    before = view.text[: marks[0].start()].rstrip()
    if not before or before[-1] not in ".!?)\"'”" or _DIALOGUE.search(before[-2 * ABOUT :]):
        return []
    return [] if marks[0].start() in quoted_spans(view) else marks


def _in_code(view: TextView, mark: re.Match[str]) -> bool:
    """Whether a role stands at the end of a line of code, as in `return self.user`."""
    line = view.text[view.line_at(mark.start())[0] : mark.start()]
    return mark.re is _GLUED_ROLE and _CODE_LINE.search(line) is not None
