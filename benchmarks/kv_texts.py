"""Texts of the KV benchmarks that every CPython carries, and a calibration text of several kinds.

python    source of modules of the standard library, named here; never calibrated on
pydoc     topics of Python's documentation (assay's own source `pydoc`); never calibrated on
mixed     WikiText, source of other modules, and their docstrings with CPython's licence, in turn by 6,000 characters
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

# fmt: off
EVALUATED = (
    "argparse", "ast", "bdb", "calendar", "cgitb", "configparser", "csv", "dataclasses", "datetime", "_pydatetime",
    "_pydecimal", "difflib", "dis", "doctest", "enum", "fractions", "ftplib", "functools", "gettext", "heapq", "imaplib",
    "inspect", "ipaddress", "locale", "mailbox", "nntplib", "optparse", "os", "pathlib", "pdb", "pickle", "pickletools",
    "platform", "plistlib", "posixpath", "profile", "pydoc", "random", "shutil", "smtplib", "socket", "ssl",
    "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize", "traceback",
    "turtle", "typing", "uuid", "warnings", "weakref", "zipfile",
)
# fmt: on
CALIBRATED = (
    "asyncio",
    "email",
    "http",
    "json",
    "xml",
    "urllib",
    "multiprocessing",
    "importlib",
    "concurrent",
)
PIECE = 6000


def library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def python_source() -> str:
    """The evaluated modules, one after the other; those that this Python lacks are left out."""
    files = [library() / f"{name}.py" for name in EVALUATED]
    return "\n\n".join(f.read_text(encoding="utf-8") for f in files if f.exists())


def other_source() -> str:
    """Modules of other packages, which are calibrated on."""
    files = [f for package in CALIBRATED for f in sorted((library() / package).glob("*.py"))]
    return "\n\n".join(f.read_text(encoding="utf-8", errors="replace") for f in files)


def prose() -> str:
    """CPython's licence where it is installed, and the docstrings of modules that are not evaluated."""
    parts = [f.read_text(encoding="utf-8") for f in [library() / "LICENSE.txt"] if f.exists()]
    for file in sorted(library().glob("*.py")):
        if file.stem not in EVALUATED and "pydoc" not in file.stem:
            parts += _docstrings(file.read_text(encoding="utf-8", errors="replace"))
    return "\n\n".join(parts)


def mixed(wiki: str, pieces: int = 120) -> str:
    """Of every four pieces two of WikiText, spread over all of it, one of source, one of prose."""
    half, quarter = pieces // 2, pieces // 4
    encyclopedia = _spread(wiki, half)
    kinds = (
        encyclopedia[::2],
        _spread(other_source(), quarter),
        encyclopedia[1::2],
        _spread(prose(), quarter),
    )
    return "\n\n".join(piece for group in zip_longest(*kinds, fillvalue="") for piece in group if piece)


def _spread(text: str, pieces: int) -> list[str]:
    step = max(PIECE, len(text) // pieces)
    return [text[i : i + PIECE] for i in range(0, len(text) - PIECE + 1, step)][:pieces]


def _docstrings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) > 200:
                yield text
