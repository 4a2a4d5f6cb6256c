"""What a comparison is: everything that can change its numbers, in one object that can be written and hashed."""

from __future__ import annotations

import glob
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from assay.engines.scoring import ScoreJob, ScoringPath, Window
from assay.engines.server.endpoint import without_credentials
from assay.errors import AssayError, UsageError

# -----------------------------------------------------------------------------
# Token ids cut into windows, the unit that is scored and resampled.
#
# Two protocols, both without overlap:
#
# `all`          A window of length L is the tokenizer's start token, where it puts one before a text, and the next
#                L − 1 tokens (L without one). Every token but the first is scored.
# `second-half`  llama.cpp's: the next L tokens, the first of them replaced by the start token; tokens L/2 + 1 … L − 1
#                are scored, so that every one has at least half a window of context.
#
# Neighbouring windows are alike (the KL of one tells that of the next). So `all` takes its windows from all over the text,
# in an order of which any first part is spread evenly: an interrupted run has seen the whole text, and a longer run keeps
# the windows of a shorter one. `second-half` takes them from the start, as llama.cpp does.

ScoredPart = Literal["all", "second-half"]


@dataclass(frozen=True)
class Cut:
    """How windows are cut. `stride` is in tokens of the text; None: one window begins where the last ended.

    `skip` windows of the order are passed over first, so that text for calibration and for evaluation can be kept apart.
    """

    length: int = 1024
    protocol: ScoredPart = "all"
    stride: int | None = None
    skip: int = 0

    def __post_init__(self) -> None:
        if self.length < 2:
            raise _usage(f"a window needs at least 2 tokens, got {self.length}", "use a larger --length")
        if self.skip < 0:
            raise _usage(f"cannot skip {self.skip} windows", "skip 0 or more")

    @property
    def scored_from(self) -> int:
        """Index of the first token of a window that is scored."""
        return 1 if self.protocol == "all" else self.length // 2 + 1

    def text_tokens(self, bos_id: int | None) -> int:
        """Tokens of the text that one window takes."""
        return self.length - 1 if self.protocol == "all" and bos_id is not None else self.length

    def step(self, bos_id: int | None) -> int:
        """Tokens of the text from the start of one window to the next; UsageError where windows would overlap."""
        taken = self.text_tokens(bos_id)
        if self.stride is None:
            return taken
        if self.stride < taken:
            raise _usage(
                f"a stride of {self.stride} lets windows of {taken} tokens overlap",
                f"use {taken} or more: tokens that are counted twice are no new evidence",
            )
        return self.stride


def available_windows(token_count: int, cut: Cut, bos_id: int | None) -> int:
    """How many windows `token_count` tokens give, those that are skipped not counted."""
    taken = cut.text_tokens(bos_id)
    if token_count < taken:
        return 0
    return max(0, 1 + (token_count - taken) // cut.step(bos_id) - cut.skip)


def places_of(token_count: int, cut: Cut, bos_id: int | None, count: int | None = None) -> list[int]:
    """Where in the text the first `count` windows of the order lie, in steps from its start."""
    available = available_windows(token_count, cut, bos_id)
    total = available + cut.skip if available else 0
    order = list(range(total))
    if cut.protocol == "all":
        # The cells whose multiple of the golden ratio has the smallest fraction: any first part of them is spread evenly
        # (the three-distance theorem: Sos, Ann. Univ. Sci. Budapest Eotvos 1 (1958) 127).
        order.sort(key=lambda cell: (cell * _GOLDEN) % 1.0)
    return order[cut.skip : cut.skip + (available if count is None else min(count, available))]


_GOLDEN = (5**0.5 - 1) / 2


def blocks_of(places: Sequence[int]) -> list[int]:
    """The cluster that each window belongs to, given where the windows lie: neighbours share what they are about.

    A cluster is up to four windows wide; less where that would leave fewer than eight clusters of as many windows.
    """
    width = min(4, max(1, len(places) // 8))
    return [place // width for place in places]


def cut_windows(
    token_ids: Sequence[int], cut: Cut, bos_id: int | None, count: int | None = None
) -> list[Window]:
    """`count` windows (all of them by default, fewer where there are fewer), numbered from 0; see `places_of`.

    AssayError where the text is too short for one.
    """
    taken, step = cut.text_tokens(bos_id), cut.step(bos_id)
    available = available_windows(len(token_ids), cut, bos_id)
    if available == 0:
        raise _too_short(len(token_ids), taken, cut)
    windows = []
    for index, place in enumerate(places_of(len(token_ids), cut, bos_id, count)):
        start = place * step
        ids = [int(i) for i in token_ids[start : start + taken]]
        if bos_id is not None:
            ids = [bos_id, *(ids if cut.protocol == "all" else ids[1:])]
        windows.append(Window(index, tuple(ids)))
    return windows


def _too_short(token_count: int, taken: int, cut: Cut) -> AssayError:
    needed = f"one window of {cut.length:,} needs {taken:,}"
    if cut.skip:
        needed += f" after the {cut.skip} that are skipped"
    return AssayError(
        f"the text has {token_count:,} tokens, {needed}",
        finding_id="fidelity.text_too_short",
        remedy="give more text or a smaller --length",
        evidence={"tokens": token_count, "window": cut.length, "skipped_windows": cut.skip},
    )


# -----------------------------------------------------------------------------
# What an engine or a text on the command line stands for: how it is named, and whether it has changed.

_PREFIXES = ("hf:", "vllm:", "gguf:", "run:", "jsonl:", "datasets:")


def label_of(spec: str, among: Sequence[str] = ()) -> str:
    """A short name without folders: `hf:model?dtype=float32`. Where two would be equal, their number is added."""
    label = _short(spec)
    same = [other for other in among if _short(other) == label]
    return label if len(same) < 2 else f"{label} #{same.index(spec) + 1}"


def _short(spec: str) -> str:
    if "://" in spec:
        return printable(spec)
    head, mark, options = spec.partition("?")
    prefix = next((p for p in _PREFIXES if head.startswith(p)), "")
    kept = "&".join(_without_folders(option) for option in options.split("&"))
    return f"{prefix}{Path(head.removeprefix(prefix)).name}{mark}{kept}"


def _without_folders(option: str) -> str:
    """`python=/a/b/python` as `python=python`: a folder of this machine has no place in a result."""
    name, mark, value = option.partition("=")
    return f"{name}={Path(value).name}" if mark and Path(value).is_absolute() else option


def printable(spec: str) -> str:
    """A spec without a user and a password, which the URL of a server may hold."""
    head, mark, options = spec.partition("?")
    return f"{without_credentials(head)}{mark}{options}" if "://" in head else spec


def fingerprint(spec: str) -> str:
    """Hash of a spec and of name, size and time of the files it names; of the spec alone where it names none.

    Two ways to write one path, or the same options in another order, have the same fingerprint.
    """
    head, mark, options = spec.partition("?")
    prefix = next((p for p in _PREFIXES if head.startswith(p)), "")
    head = head.removeprefix(prefix)
    head = str(Path(head).expanduser()) if head.startswith("~") else head
    whole = Path(head).exists()
    canonical = (
        f"{prefix}{Path(head).resolve()}{mark}{'&'.join(sorted(options.split('&')))}" if whole else spec
    )
    digest = hashlib.sha256(canonical.encode())
    paths = [Path(head)] if whole else [Path(p) for p in sorted(glob.glob(head))]  # noqa: PTH207 - takes absolute patterns
    for path in paths:
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
        for file in files:
            facts = file.stat()
            digest.update(f"{file.name}\t{facts.st_size}\t{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


# -----------------------------------------------------------------------------

PROTOCOLS = ("all", "second-half")
"""`all`: every token but the first is scored. `second-half`: only the second half of each window (llama.cpp)."""


@dataclass(frozen=True)
class Plan:
    """A comparison of candidates with a reference. Margins are fractions: 0.01 is 1 %."""

    reference: str
    candidates: tuple[str, ...]
    text: tuple[str, ...] = ()
    """Sources of text; empty: the English of Python's own documentation."""
    windows: int = 64
    length: int = 1024
    path: str = ScoringPath.PREFILL.value
    scored: str = "all"
    chunk: int = 128
    batch: int = 4
    margin_ppl: float = 0.01
    margin_top1: float = 0.95
    marginal_ppl: float = 0.03
    marginal_top1: float = 0.85
    margin_kl: float = 0.010
    """In nats: ACCEPT needs the upper end of the interval of the mean KL at or below it."""
    marginal_kl: float = 0.030
    seed: int = 0
    """Of the bootstrap and of the noise floor."""
    draws: int = 10_000
    floors: bool = True
    greedy: int = 0
    """Tokens that reference and candidates generate greedily after a few prefixes; 0: none."""

    def __post_init__(self) -> None:
        if not self.candidates:
            raise _usage("a comparison needs at least one candidate", "name one after the reference")
        if self.path not in list(ScoringPath):
            raise _usage(f"unknown path {self.path!r}", f"one of {', '.join(ScoringPath)}")
        if self.scored not in PROTOCOLS:
            raise _usage(f"unknown protocol {self.scored!r}", f"one of {', '.join(PROTOCOLS)}")
        for name, least in (
            ("windows", 1),
            ("length", 8),
            ("chunk", 1),
            ("batch", 1),
            ("draws", 100),
            ("greedy", 0),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise _usage(f"{name} must be at least {least}, got {getattr(self, name)}", "")
        if self.seed >= 2**63:
            raise _usage(f"seed must be below 2^63, got {self.seed}", "give a smaller one")
        if twice := next((c for c in self.candidates if self.candidates.count(c) > 1), None):
            raise _usage(f"the candidate {printable(twice)} is given twice", "name every candidate once")
        if not 0 < self.margin_ppl <= self.marginal_ppl < 1:
            raise _usage(
                "margins of perplexity must satisfy 0 < ACCEPT ≤ MARGINAL < 100 %, "
                f"got {self.margin_ppl:.3%} and {self.marginal_ppl:.3%}",
                "give --margin-ppl and --marginal-ppl together",
            )
        if not 0 < self.marginal_top1 <= self.margin_top1 <= 1:
            raise _usage(
                "top-1 margins must satisfy 0 < MARGINAL ≤ ACCEPT ≤ 100 %, "
                f"got {self.marginal_top1:.3%} and {self.margin_top1:.3%}",
                "give --margin-top1 and --marginal-top1 together",
            )
        if not 0 < self.margin_kl <= self.marginal_kl:
            raise _usage(
                f"margins of KL must satisfy 0 < ACCEPT ≤ MARGINAL, got {self.margin_kl:g} and {self.marginal_kl:g} nats",
                "give --margin-kl and --marginal-kl together",
            )

    @property
    def job(self) -> ScoreJob:
        """How windows are scored."""
        return ScoreJob(
            ScoringPath(self.path), scored_from=self.cut.scored_from, chunk=self.chunk, batch=self.batch
        )

    @property
    def cut(self) -> Cut:
        """How the text is cut into windows."""
        return Cut(self.length, "all" if self.scored == "all" else "second-half")

    def normalised(self) -> dict[str, Any]:
        """Plain JSON types, every field, so that equal plans are written equally."""
        data = asdict(self)
        data["candidates"], data["text"] = list(self.candidates), list(self.text)
        return data

    @property
    def sha256(self) -> str:
        """Hash of the normalised plan."""
        return hashlib.sha256(json.dumps(self.normalised(), sort_keys=True).encode()).hexdigest()


def read_plan(path: Path, overrides: Mapping[str, Any]) -> Plan:
    """The plan in a TOML file, with what the command line says on top; UsageError names what is wrong in it."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _usage(f"cannot read the plan {path}: {error.strerror}", "give a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _usage(f"{path} is not TOML: {error}", "see docs/compare.md for an example") from error
    return plan_from(data, overrides, where=str(path))


def plan_from(data: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> Plan:
    """A plan from plain data, such as a TOML file or the plan echoed in a result."""
    defaults = Plan(reference="-", candidates=("-",))
    known = {f.name: type(getattr(defaults, f.name)) for f in fields(Plan)}
    values: dict[str, Any] = {}
    for name, value in {**data, **overrides}.items():
        key = name.replace("-", "_")
        if key not in known:
            raise _usage(f"{where}: unknown entry {name!r}", f"entries are {', '.join(known)}")
        values[key] = _coerce(key, value, known[key], where)
    missing = [name for name in ("reference", "candidates") if not values.get(name)]
    if missing:
        raise _usage(
            f"{where} names no {' and no '.join(n.rstrip('s') for n in missing)}",
            "name the engines that are compared: REFERENCE CANDIDATE…",
        )
    if values["reference"].startswith("run:"):
        from assay.fidelity.store import stored_settings

        values = stored_settings(values["reference"]) | values
    return replace(defaults, **values)


def _coerce(name: str, value: Any, kind: type, where: str) -> Any:
    if kind is tuple:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
            return tuple(items)
    elif kind is float:
        if isinstance(value, str):
            return fraction(value, name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise _usage(f"{where}: {name} = {value!r} is not {_KINDS[kind]}", "see docs/compare.md")


_KINDS = {
    tuple: "a text or a list of texts",
    float: "a fraction or a percentage",
    int: "a whole number",
    bool: "true or false",
    str: "a text",
}


def fraction(text: str, name: str) -> float:
    """`1%` or `0.01` as a fraction; UsageError where it is neither."""
    try:
        return float(text.rstrip("% ")) / 100 if text.rstrip().endswith("%") else float(text)
    except ValueError:
        raise _usage(f"{name}: {text!r} is neither a percentage nor a fraction", "write 1% or 0.01") from None


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="fidelity.usage")
