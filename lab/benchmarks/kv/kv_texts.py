"""Texts of the KV benchmarks that every CPython carries, and a calibration text of several kinds.

python    source of modules of the standard library, named here; never calibrated on pydoc
topics of Python's documentation (assay's own source `pydoc`); never calibrated on mixed
WikiText, source of other modules, and their docstrings with CPython's licence, in turn by 6,000
characters

`python kv_texts.py FOLDER` packs four more kinds, of files that Debian's packages and
Python's bring; these are never calibrated on either:

chat      frequently asked questions (lsof, sed, net-snmp, Git, Perl) as turns of a user and an
assistant c         sources of numpy, numba and zlib's examples json      databases of country and
language codes (pycountry) chinese   manual pages in simplified Chinese, Vim's tutor
"""

from __future__ import annotations

import ast
import gzip
import lzma
import re
import sys
import sysconfig
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

# fmt: off
EVALUATED = (
    "argparse", "ast", "bdb", "calendar", "cgitb", "configparser", "csv", "dataclasses", "datetime", "_pydatetime",  # noqa: E501
    "_pydecimal", "difflib", "dis", "doctest", "enum", "fractions", "ftplib", "functools", "gettext", "heapq", "imaplib",  # noqa: E501
    "inspect", "ipaddress", "locale", "mailbox", "nntplib", "optparse", "os", "pathlib", "pdb", "pickle", "pickletools",  # noqa: E501
    "platform", "plistlib", "posixpath", "profile", "pydoc", "random", "shutil", "smtplib", "socket", "ssl",  # noqa: E501
    "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize", "traceback",  # noqa: E501
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
    """CPython's licence where it is installed, and the docstrings of modules that are not
    evaluated.
    """
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
    return "\n\n".join(
        piece for group in zip_longest(*kinds, fillvalue="") for piece in group if piece
    )


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


# Four more kinds, packed where the files are, so that a machine without them can score them.

MOST = 400_000
"""Characters of a packed text: 100 windows of 1,024 tokens."""


def pack(folder: Path, site_packages: Path) -> None:
    """Write NAME.txt.xz of each kind; `site_packages` has numpy, numba and pycountry."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("chat", chat()),
        ("c", _mixed_files(site_packages, ("numpy/**/*.c", "numba/**/*.c"), Path("/usr/share/doc"), ("zlib1g-dev/**/*.c",))),  # noqa: E501
        ("json", _mixed_files(site_packages, ("pycountry/databases/*.json",))),
        ("chinese", chinese()),
    ):  # fmt: skip
        (folder / f"{name}.txt.xz").write_bytes(lzma.compress(text[:MOST].encode(), preset=9))
        print(f"{name}: {len(text[:MOST]):,} characters")


def chat() -> str:
    """Questions end with a question mark, answers are what follows; both as the turns of a chat."""
    names = (
        "lsof/00FAQ.gz",
        "sed/sedfaq.txt.gz",
        "libsnmp-base/FAQ.gz",
        "xz-utils/faq.txt.gz",
        "valgrind/FAQ.txt.gz",
    )
    files = [Path("/usr/share/doc") / name for name in names] + [
        Path("/usr/share/man/man7/gitfaq.7.gz")
    ]
    files += sorted(Path("/usr/share/perl").glob("*/**/*FAQ.pod"))
    turns: list[str] = []
    for file in files:
        paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", _read(file))]
        answer: list[str] = []
        for paragraph in paragraphs:
            if paragraph.endswith("?") and len(paragraph) < 300:
                if answer:
                    turns += ["<|im_start|>assistant\n" + "\n\n".join(answer) + "<|im_end|>"]
                turns += [
                    "<|im_start|>user\n"
                    + re.sub(r"^[\d.()=\w]{1,6}\s", "", paragraph)
                    + "<|im_end|>"
                ]
                answer = []
            elif turns and len(paragraph) > 40 and sum(map(len, answer)) < 3000:
                answer.append(paragraph)
        if answer and turns:
            turns += ["<|im_start|>assistant\n" + "\n\n".join(answer) + "<|im_end|>"]
    return "\n".join(turns)


def chinese() -> str:
    """Manual pages without their macros."""
    pages = [_read(f) for f in sorted(Path("/usr/share/man/zh_CN").glob("*/*.gz"))]
    plain = [re.sub(r"\\f[BIRP]|\\-|\\&|^\.\S*[ ]?|^'.*$", "", page, flags=re.M) for page in pages]
    tutor = Path("/usr/share/vim/vim90/tutor/tutor.zh_cn.utf-8")
    return "\n\n".join([*([tutor.read_text(encoding="utf-8")] if tutor.exists() else []), *plain])


def _mixed_files(*sources: Path | tuple[str, ...]) -> str:
    files = [
        f
        for root, names in zip(sources[::2], sources[1::2], strict=True)
        for n in names
        for f in sorted(root.glob(n))
    ]  # type: ignore[union-attr]
    return "\n\n".join(_read(f)[: MOST // 4] for f in files)


def _read(file: Path) -> str:
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode(
        "utf-8", errors="replace"
    )


if __name__ == "__main__":
    pack(
        Path(sys.argv[1]),
        Path(sys.argv[2]) if len(sys.argv) > 2 else Path(sysconfig.get_path("purelib")),
    )
