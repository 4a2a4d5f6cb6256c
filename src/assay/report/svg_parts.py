"""The elements of which SVG charts are made. Everything written goes through `tag` or `text`, which escape."""

from __future__ import annotations

from html import escape

from assay.report.text import one_line, shorten

WIDTH = 760
PALETTE = 6
CHAR = 6.7
"""Average width of a character at the font size of the labels."""


def tag(element: str, content: str = "", **attributes: str | float) -> str:
    """One element; `css` is its class, underscores in names become hyphens, numbers get one decimal."""
    written = "".join(f' {_attribute(key)}="{_value(value)}"' for key, value in attributes.items())
    return f"<{element}{written}>{content}</{element}>" if content else f"<{element}{written}/>"


def _attribute(key: str) -> str:
    return "class" if key == "css" else key.replace("_", "-")


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def label(content: str, limit: int = 120) -> str:
    """Any text as element content: visible, on one line, short, escaped."""
    return escape(shorten(one_line(content), limit)) or " "


def text(content: str, x: float, y: float, css: str, anchor: str = "start", limit: int = 120) -> str:
    """A line of text at a place."""
    return tag("text", label(content, limit), css=css, x=x, y=y, text_anchor=anchor)


def mark(series: int, x: float, y: float, size: float = 5) -> str:
    """The mark of a series: a circle, square, diamond or triangle in its colour."""
    css = colour(series)
    match series % 4:
        case 1:
            return tag("rect", css=css, x=x - size, y=y - size, width=2 * size, height=2 * size)
        case 2:
            return tag(
                "path", css=css, d=f"M{x:.1f} {y - size:.1f}l{size} {size}l-{size} {size}l-{size} -{size}z"
            )
        case 3:
            return tag("path", css=css, d=f"M{x:.1f} {y - size:.1f}l{size} {1.7 * size:.1f}h-{2 * size}z")
    return tag("circle", css=css, cx=x, cy=y, r=size)


def colour(series: int) -> str:
    """The class that colours a series."""
    return f"s{series % PALETTE}"
