"""Where text comes from: files, globs, JSONL, an installed data set, the model itself, or Python's
documentation.

A source is written as on the command line:

    FILE                 plain text (UTF-8) GLOB                 all files that match, in the order
    of their names FILE.jsonl           one JSON object a line, its field `text`, or another:
    FILE.jsonl?field=content datasets:NAME        a data set of the package `datasets`, as in
    datasets:wikitext?config=…&split=test&field=text pydoc                the topics of Python's
    documentation, which every Python carries (the default)

Documents are joined by an empty line. The same sources give the same text, whose SHA-256 goes into
every result.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import parse_qsl

from assay.engines import Capability, Engine, Reply, Request
from assay.engines.scoring import Sampler, ScoringEngine, Window
from assay.engines.server.engine import ServerCandidate
from assay.errors import AssayError, UsageError
from assay.fidelity.plan import Plan, label_of
from assay.progress import Advance, Progress
from assay.runs import write_atomically

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
    try:
        raw = path.read_bytes()
    except IsADirectoryError as error:
        raise _unusable(f"{path} is a folder", f"name the files in it: '{path}/*.txt'") from error
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
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise _unusable(
                f"{path}, line {number} is not JSON: {error.msg}", "give one object a line"
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


# Text that the reference wrote itself: on it, fidelity is measured where the model really is when
# it serves.

_ROUND = 16
"""Texts that are asked for at once."""


@runtime_checkable
class _Batched(Protocol):
    def generate_batch(self, requests: Sequence[Request]) -> list[Reply]: ...


def generate_text(
    engine: Engine,
    *,
    start: tuple[int, ...],
    tokens: int,
    per_text: int = 1024,
    seed: int = 0,
    advance: Advance = lambda: None,
) -> Text:
    """At least `tokens` tokens sampled at temperature 1 from `engine`, in texts of `per_text`
    tokens.

    `start` are the ids that every text continues: the start token, or whatever separates documents
    for the model. Text i has the seed `seed` + i, and goes on past the end-of-text token. `advance`
    is called after each text. AssayError where the engine writes nothing.
    """
    for needed in (Capability.TOKEN_IDS_PROMPT, Capability.IGNORE_EOS):
        engine.capabilities.require(needed, "text sampled from the reference")
    texts: list[str] = []
    written = 0
    while written < tokens:
        wanted = min(_ROUND, -(-(tokens - written) // per_text))
        replies = _generate(
            engine, [_request(start, per_text, seed + len(texts) + i) for i in range(wanted)]
        )
        new = sum(reply.completion_tokens or 0 for reply in replies)
        if new == 0:
            raise AssayError(
                "the reference wrote no text of its own",
                finding_id="fidelity.text_unusable",
                remedy="give a file with --text",
            )
        written += new
        texts += [reply.content for reply in replies]
        for _ in replies:
            advance()
    return Text((SELF,), "\n\n".join(texts))


def _request(start: tuple[int, ...], max_tokens: int, seed: int) -> Request:
    return Request(prompt=start, max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)


def _generate(engine: Engine, requests: list[Request]) -> list[Reply]:
    if isinstance(engine, _Batched):
        return engine.generate_batch(requests)
    return [engine.generate(request) for request in requests]


# `--text self`: the reference writes the text that it and its candidates are then scored on.

_SPARE = 1.05
"""Sampled ids that become text and ids again may be fewer, so a little more is written."""


@dataclass(frozen=True)
class OwnText:
    """Text of the reference's own, and what a result says of how it was sampled."""

    text: Text
    origin: Mapping[str, Any]


def write_own_text(
    plan: Plan, engine: ScoringEngine, progress: Progress, folder: Path | None = None
) -> OwnText | None:
    """What `engine` writes where the plan asks for that, None where it names other text.

    It is kept in `folder`, so that an interrupted run goes on with the same. AssayError where the
    engine cannot sample.
    """
    if plan.text != (SELF,):
        return None
    label = label_of(plan.reference)
    if not isinstance(engine, Sampler):
        raise AssayError(
            f"{label} cannot write the text of --text {SELF}: only hf: engines sample",
            finding_id="fidelity.text_unusable",
            remedy=(
                "give a file with --text, or let hf:MODEL write one and store it: assay reference"
                " --text self"
            ),
        )
    writer, start = engine.sampler()
    origin = {
        "sampled_from": label,
        "temperature": 1.0,
        "seed": plan.seed,
        "start_ids": list(start),
        "tokens_per_text": plan.length,
    }
    kept = folder / "self-text.json" if folder else None
    if kept and kept.exists():
        return OwnText(Text((SELF,), json.loads(kept.read_text(encoding="utf-8"))), origin)
    wanted = int(_SPARE * plan.windows * plan.length) + plan.length
    with progress(f"sampling text from {label}", -(-wanted // plan.length)) as advance:
        text = generate_text(
            writer,
            start=start,
            tokens=wanted,
            per_text=plan.length,
            seed=plan.seed,
            advance=advance,
        )
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(text.text))
    return OwnText(text, origin)


# Does a server cut text into the same ids as the reference? Its vocabulary cannot be hashed from
# outside.
#
# A probe text goes through both: words of many scripts, code, numbers, runs of spaces and line
# ends, characters that fall apart into bytes, and the names of special tokens as text. Equal ids
# throughout, and no id of the windows past the server's vocabulary where it says its size, is what
# can be shown.

PROBE = (
    "The lighthouse keeper's notebook, page 1,024: it isn't 3.14159 × 10⁻⁷, he'd said; \"perhaps\""
    " (not).\n\tdef f(x: dict[str, int]) -> None:\n\t\treturn x['a'] ** 2 != 0xFF  # TODO\r\n\n\n  "
    "  four spaces,  two,     five\u00a0one that does not break\u200b, trailing   \nÜnïcödé façade"
    " naïve Straße ŁÓDŹ İstanbul ﬁne Ⅻ ½ ∑ ∞ ≠ → 𝔘𝔫𝔦 🜁 🦙👩‍👩‍👧‍👦🏳️‍🌈"
    " \U0001f1eb\U0001f1f7\nБыстрая лиса, 敏捷的棕色狐狸跳过懒狗。日本語のテキスト、한국어 문장,"
    " النص العربي, עברית, हिन्दी, ไทย, ქართული\n1234567890 00012 1e-5 2026-11-28T08:46:16Z"
    " https://example.org/a?b=c&d=%20 user@example.org C:\\Temp\\x\nSELECT * FROM t WHERE"
    " a<>'b';{\"k\":[1,null,true]}<div class='x'>&amp;</div> $\\frac{a}{b}$"
    " camelCaseHTTPServer\ne\u0301 o\u0308 \ufffd \u2028 ~~~~~~~~ -------- ======== ........ !!!???"
    " aaaaaaaaaaaaaaaa supercalifragilistic\n"
)


@dataclass(frozen=True)
class Proof:
    """What was shown: how many ids of the probe text agreed, and the server's own word on its
    vocabulary.
    """

    probe_tokens: int
    vocab_size: int | None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"probe_tokens": self.probe_tokens, "vocab_size": self.vocab_size}


def probe_ids(encode: Callable[[str], Sequence[int]]) -> list[int]:
    """The reference's ids of the probe text."""
    return [int(i) for i in encode(PROBE)]


def prove_tokenizer(
    server: ServerCandidate, expected: Sequence[int] | None, windows: Sequence[Window], label: str
) -> Proof:
    """Show that the server cuts text as the reference does; AssayError where it does not, or cannot
    show it.
    """
    if not expected:
        raise AssayError(
            f"the tokenizer of {label} cannot be held against the reference's: nothing of that was"
            " stored",
            finding_id="fidelity.tokenizer_unproven",
            remedy=(
                "compare with the reference's model itself (hf:MODEL …), or store it again with"
                " assay reference"
            ),
        )
    try:
        found = [int(i) for i in server.tokenize(PROBE)]
    except AssayError as error:
        raise AssayError(
            f"{label} cannot show that its tokenizer is the reference's: {error.message}",
            finding_id="fidelity.tokenizer_unproven",
            remedy=(
                "serve it with its page /tokenize (vLLM, SGLang), or run the engine in process"
                " (vllm:MODEL)"
            ),
        ) from error
    first = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if first is not None or len(found) != len(expected):
        at = min(len(found), len(expected)) if first is None else first
        raise AssayError(
            f"{label} has another tokenizer than the reference: a probe text of {len(expected)} ids"
            f" has {len(found)} there, and differs from id {at} on",
            finding_id="fidelity.tokenizer_mismatch",
            remedy="distributions over different tokens cannot be compared; serve the same model",
            evidence={
                "position": at,
                "reference": list(expected[at : at + 4]),
                "server": found[at : at + 4],
            },
        )
    largest = max(max(w.tokens) for w in windows)
    if server.vocab_size is not None and largest >= server.vocab_size:
        raise AssayError(
            f"{label} has a vocabulary of {server.vocab_size:,} entries, the text has the id"
            f" {largest:,}",
            finding_id="fidelity.tokenizer_mismatch",
            remedy="distributions over different tokens cannot be compared; serve the same model",
        )
    return Proof(len(expected), server.vocab_size)
