"""What the parts of the console output share: colours, and quiet lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assay.report.tone import Tone

if TYPE_CHECKING:
    from rich.text import Text

TONES: dict[Tone, str] = {
    "good": "green", "bad": "red", "warn": "yellow", "error": "magenta", "info": "cyan", "": "",
}  # fmt: skip


def dim(text: str) -> Text:
    """A line that says something about another one."""
    from rich.text import Text

    return Text(text, style="dim")
