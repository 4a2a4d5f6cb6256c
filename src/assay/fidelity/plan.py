"""What a comparison is: everything that can change its numbers, in one object that can be written and hashed."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from assay.engines.scoring import ScoreJob, ScoringPath
from assay.errors import UsageError
from assay.fidelity.identity import printable
from assay.fidelity.windows import Cut

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
        from assay.fidelity.store.settings import stored_settings

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
