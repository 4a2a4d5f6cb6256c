"""The text that windows are cut from: files, JSON lines, data sets, Python's documentation."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import parse_qsl

from assay.bounded_json import loads
from assay.errors import AssayError, UsageError
from assay.files import bytes_of

DEFAULT = "pydoc"


SELF = "self"


_JOINT = "\n\n"


@dataclass(frozen=True)
class Text:
    """A text and the names of its sources (file names, no folders)."""

    sources: tuple[str, ...]
    text: str

    @cached_property
    def sha256(self) -> str:
        """Hash of the text in UTF-8."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def is_latin(self) -> bool:
        """Whether most of its characters are ASCII letters and blanks, as in English prose and in
        code.
        """
        plain = sum(c.isascii() and (c.isalpha() or c.isspace()) for c in self.text[:100_000])
        return plain > min(len(self.text), 100_000) / 2

    def describe(self) -> dict[str, object]:
        """What a result says of its text."""
        return {"sources": list(self.sources), "sha256": self.sha256, "characters": len(self.text)}


def read_text(sources: Sequence[str] = ()) -> Text:
    """The text of all `sources`, in the order given; the default text where there is none.

    AssayError names the source that is missing, unreadable, empty or given twice.
    """
    parts = [part for source in sources or (DEFAULT,) for part in _read(source)]
    seen: dict[str, str] = {}
    for name, text in parts:
        if not text.strip():
            raise _unusable(f"{name} holds no text", "give a file with text in it")
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if digest in seen:
            raise _unusable(
                f"{name} has the same text as {seen[digest]}",
                "give every text once: windows that repeat are no new evidence",
            )
        seen[digest] = name
    return Text(tuple(Path(name).name for name, _ in parts), _JOINT.join(text for _, text in parts))


def _read(source: str) -> Iterator[tuple[str, str]]:
    """(name, text) of everything that one source stands for."""
    if source == SELF:
        raise UsageError(
            "text sampled from the reference cannot be mixed with other text",
            remedy="give --text self alone",
            finding_id="fidelity.usage",
        )
    if source == DEFAULT:
        yield DEFAULT, _pydoc_topics()
    elif source.startswith("datasets:"):
        yield source, _data_set(source)
    else:
        pattern, field = _split_field(source)
        for path in _paths(pattern):
            yield str(path), _file_text(path, field)


def _pydoc_topics() -> str:
    from pydoc_data.topics import topics

    return _JOINT.join(topics.values())


def _split_field(source: str) -> tuple[str, str | None]:
    """`FILE?field=NAME` as (FILE, NAME). Any other question mark belongs to the file or glob."""
    match = re.fullmatch(r"(.+)\?field=([^?=&]+)", source)
    return (match[1], match[2]) if match else (source, None)


def _paths(pattern: str) -> list[Path]:
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [Path(pattern)]
    found = sorted(Path(name) for name in glob.glob(pattern, recursive=True))  # noqa: PTH207 - takes absolute patterns
    files = [path for path in found if path.is_file()]
    if not files:
        raise _unusable(f"no file matches {pattern}", "check the pattern")
    return files


def _file_text(path: Path, field: str | None) -> str:
    if path.is_dir():
        raise _unusable(f"{path} is a folder", f"name the files in it: '{path}/*.txt'")
    try:
        raw = bytes_of(path)
    except OSError as error:
        raise _unusable(f"cannot read {path}: {error.strerror}", "check the path") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unusable(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{raw[error.start]:02x}",
            "convert it to UTF-8",
        ) from error
    if path.suffix in (".jsonl", ".ndjson"):
        return _JOINT.join(_jsonl(path, text, field or "text"))
    if field is not None:
        raise UsageError(
            f"{path} has no fields: only .jsonl files do",
            remedy="leave out ?field=",
            finding_id="fidelity.usage",
        )
    return text


def _jsonl(path: Path, text: str, field: str) -> Iterator[str]:
    # Not splitlines(): U+2028 and its like may stand unescaped within a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = loads(line)
        except ValueError as error:
            raise _unusable(
                f"{path}, line {number} is not JSON: {getattr(error, 'msg', error)}",
                "give one object a line",
            ) from error
        value = record.get(field) if isinstance(record, dict) else None
        if not isinstance(value, str):
            names = (
                ", ".join(sorted(record)[:8])
                if isinstance(record, dict)
                else "none: it is no object"
            )
            raise _unusable(
                f"{path}, line {number} has no text in the field {field!r} (fields: {names})",
                f"name the field: {path.name}?field=NAME",
            )
        yield value


def _data_set(source: str) -> str:
    """`datasets:NAME?config=…&split=…&field=…`: the field of all rows, joined."""
    name, _, query = source.removeprefix("datasets:").partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - {"config", "split", "field"}):
        raise UsageError(
            f"{source}: unknown option {unknown[0]!r}",
            remedy="options are config, split and field",
            finding_id="fidelity.usage",
        )
    field = options.get("field", "text")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise _unusable(
            f"{source} needs the package datasets, which is not installed",
            "pip install datasets, or give a file",
        ) from error
    try:
        rows = load_dataset(name, options.get("config"), split=options.get("split", "test"))
        return _JOINT.join(str(value) for value in rows[field] if str(value).strip())
    except Exception as error:  # anything may go wrong in a data set's own code
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _unusable(
            f"{source} cannot be loaded: {reason}", "check name, config, split and field"
        ) from error


def _unusable(message: str, remedy: str) -> AssayError:
    return AssayError(message, finding_id="fidelity.text_unusable", remedy=remedy)
