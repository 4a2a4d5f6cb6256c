"""Parts of tool calls and of their results, left in the text where a parser should have taken them.

Half an envelope is the surest sign: a closing tag without its opening one, a function tag of a
family whose parser is off, a JSON message glued into a sentence, a result that the model invents
itself. A whole call between its tags may be what a server without a parser sends, and is left to
`assay check`.
"""

from __future__ import annotations

import re

from assay.coherence.arrays import Spans
from assay.coherence.detection import Detection, Family, quote
from assay.coherence.detectors.token_mentions import is_named, quoted_spans
from assay.coherence.text import Ending, TextView

_TAGS = ("tool_call", "tool_calls", "function_call", "function_calls", "invoke", "toolcall")
_TAG = re.compile(rf"<(/?)((?:antml:)?(?:{'|'.join(_TAGS)}))\b[^<>\n]{{0,120}}>", re.IGNORECASE)
_FUNCTION = re.compile(
    r"<function=[\w.-]{1,80}>\s*<parameter=|<parameter=[\w.-]{1,80}>\s*[^<]{0,2000}</parameter>"
    r"\s*</function>"
)
_RESULT = re.compile(
    r"<(tool_result|tool_response|function_results?|tool_output|tool_exchange)\b[^<>\n]{0,200}>"
    r"[^\0]{0,2000}?</\1>"
)
_MESSAGE = re.compile(
    r"(?<=[\w.!?)\"'])\{\s*\"(?:role|content|tool_calls|tool_call_id|name|type|id)\"\s*:[^\n]{0,400}?"
    r"\"(?:tool_calls|tool_call_id|tool_name|arguments|parameters)\"\s*:"
)
MOST_TAGS = 200
"""Tags that are looked at one by one."""
REACH = 200
"""Code points before and after a tag in which a text names what it shows."""
_ABOUT_TAGS = re.compile(r"\btags?\b|\bXML\b|\bparser?|\bschema|\bformat|\btemplate|\bsyntax", re.I)


def detect_call_envelopes(view: TextView) -> Detection | None:
    """Find the first part of a tool call, or of a result, that no parser took away."""
    text = view.text
    if "<" not in text and '"tool' not in text and '"arguments"' not in text:
        return None
    found = [m for pattern in (_FUNCTION, _RESULT, _MESSAGE) if (m := pattern.search(text))]
    half = _half(view)
    found += [half] if half else []
    if not found:
        return None
    quoted = quoted_spans(view)
    for match in sorted(found, key=lambda m: m.start()):
        if not _shown(text, match, quoted):
            evidence = {"call": quote(match.group())}
            return Detection("call_leak", match.start(), match.end(), evidence, Family.LEAK, _WHY)
    return None


_WHY = (
    "the server's tool parser is off or does not fit the model",
    "a chat template that does not close the tool's turn",
)


def _half(view: TextView) -> re.Match[str] | None:
    """The first closing tag that nothing opened; an opening one that nothing closes in a text that
    came to its end.
    """
    opened: list[re.Match[str]] = []
    for number, tag in enumerate(_TAG.finditer(view.text)):
        if number >= MOST_TAGS:
            return None
        if not tag.group(1):
            opened.append(tag)
        elif opened and opened[-1].group(2).lower() == tag.group(2).lower():
            opened.pop()
        else:
            return tag
    if not opened or view.ending is not Ending.STOPPED:
        return None
    after = view.text[opened[0].end() :].lstrip()[:1]
    return opened[0] if after in ("{", "[", "<") and after else None


def _shown(text: str, match: re.Match[str], quoted: Spans) -> bool:
    """Whether the text shows the tag and does not use it: in code, in quotes, or as its subject."""
    if match.start() in quoted or is_named(text, match):
        return True
    around = text[max(0, match.start() - REACH) : match.start()]
    return _ABOUT_TAGS.search(around) is not None
