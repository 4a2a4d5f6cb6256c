"""What terminals, logs and chats put around a body: HTTP headers, commands, meters, fences,
prefixes.
"""

from __future__ import annotations

import re

from assay.coherence.python_reprs import literal

_HTTP_HEAD = re.compile(r"(?:HTTP/\d(?:\.\d)? \d{3}[^\n]*\n(?:[\w-]+:[^\n]*\n)*\r?\n)+")


def http_head(text: str) -> tuple[int, str]:
    """The status in the header lines that `curl -i` saves, 0 where there are none, and the text
    after them.
    """
    head = _HTTP_HEAD.match(text)
    status = int(re.findall(r"^HTTP/\S+ (\d{3})", head.group(), re.MULTILINE)[-1]) if head else 0
    body = text[head.end() if head else 0 :]
    if head and "chunked" in head.group().lower():
        body = _CHUNK.sub("", body)
    return status, body.strip(" \t\r\n\ufeff\0")


_CHUNK = re.compile(r"(?:^|(?<=\n))[0-9a-fA-F]{1,6}\r?\n")


def without_noise(text: str) -> str:
    """The text without what terminals, logs and chats put around a body: commands, meters, labels,
    fences, prefixes.
    """
    if fenced := _FENCED.match(text):
        text = fenced.group(1)
    if _COMMAND.match(text):
        text = _after_command(text)
    at = 0
    while noise := _NOISE.match(text, at):
        at = noise.end()
    text = text[at:]
    lines = text[:8000].splitlines()
    if 2 * sum(bool(_PRINTED_BYTES.match(line)) for line in lines) > len(lines):
        return _PRINTED_BYTES.sub(lambda m: literal(m.group(1), m.group()), text)
    if 2 * sum(bool(_LOGGED.match(line)) for line in lines) > len(
        [line for line in lines if line.strip()]
    ):
        text = _LOGGED.sub("", text)
    return text.strip()


_FENCED = re.compile(r"\A(?:[^\n]{0,80}\n+)?```\w*\n(.*)\n```\s*\Z", re.DOTALL)
_COMMAND = re.compile(r"(?:[\w@:~./-]*[$#>%] ?)?(?:curl|wget|http|xh|time curl) ")
_NOISE = re.compile(
    r"(?:\s*|[*<>] ?[^\n\"]*|[{}] \[[^\n]*|\s*% Total[^\n]*|\s*Dload  Upload[^\n]*|[ \d.kMG][\d:\-"
    r" .kMG]*+|[A-Z][\w ]{0,40}:\s*)\r?\n"
    r"|[A-Z][\w ]{0,40}: (?=[{\[])"
)
_PRINTED_BYTES = re.compile(r"^(b(?:'[^\n]*'|\"[^\n]*\"))[ \t]*$", re.MULTILINE)
_LOGGED = re.compile(r"^[^\n{}\"]{1,80}?(?=data: ?(?:[{\[]))", re.MULTILINE)


def _after_command(text: str) -> str:
    """What follows a shell command: it ends with its line, unless a quote is open or a backslash
    ends the line.
    """
    quote = ""
    for at, mark in enumerate(text[:20_000]):
        if quote:
            quote = "" if mark == quote and text[at - 1] != "\\" else quote
        elif mark in "'\"":
            quote = mark
        elif mark == "\n" and text[at - 1] not in "\\^":
            return text[at + 1 :]
    return text
