"""The vocabulary that every verb answers in, and that `report/` draws.

A verb returns one `Report`: a verdict with findings, a machine-readable `results` object, and
blocks (tables, charts, quoted texts) that any report format can show. The JSON form is schema
`assay/1`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePath
from typing import Any, Literal

from assay.plugins import get
from assay.secrets import scrubbed

SCHEMA = "assay/1"

AREAS = frozenset(
    {
        "coherence",
        "throughput",
        "server",
        "checkpoint",
        "speculation",
        "fidelity",
        "kv",
        "gap",
        "diff",
    }
)


class Verdict(StrEnum):
    """The answer of a verb."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"

    @property
    def exit_code(self) -> int:
        """Process exit code: 0 pass, 1 fail, 2 error, 3 inconclusive."""
        return _EXIT_CODES[self]


_EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.ERROR: 2, Verdict.INCONCLUSIVE: 3}
_WORST_FIRST = (Verdict.FAIL, Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.PASS)

EXIT_BUG = 70
EXITS_INTERRUPTED = frozenset(128 + sign for sign in (1, 2, 13, 15))
"""Exit codes of runs that were cut short: by SIGHUP, Ctrl-C, a reader that left, SIGTERM."""


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of several verdicts, in the order fail, error, inconclusive, pass (pass if there
    are none).
    """
    present = set(verdicts)
    return next((v for v in _WORST_FIRST if v in present), Verdict.PASS)


class Severity(StrEnum):
    """How much a finding weighs: an `error` fails the subject, the others inform."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """One thing that was found, with the evidence for it and what to do about it.

    `id` is `area.name`, stable across releases; `causes` are in order of likelihood.
    """

    id: str
    severity: Severity
    title: str
    detail: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    causes: Sequence[str] = ()
    remedies: Sequence[str] = ()
    references: Sequence[str] = ()

    def __post_init__(self) -> None:
        area, _, name = self.id.partition(".")
        if area not in AREAS or not name:
            raise ValueError(f"finding id {self.id!r} is not area.name with a known area")

    def to_json(self) -> dict[str, Any]:
        """The finding as the JSON object of schema `assay/1`."""
        return fields_json(self)


@dataclass(frozen=True)
class Metric:
    """One headline figure, as text with its unit. An invalid one is printed struck out, with `note`
    saying why.
    """

    name: str
    text: str
    valid: bool = True
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings; numbers are formatted by whoever fills it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    """Indices of the columns that are right-aligned."""
    note: str = ""
    detail: bool = False
    """Whether it is left out of the first screen, of which the first table that is none is a part.
    """


@dataclass(frozen=True)
class Point:
    """One datum: `x` may be a number or a category; `lo` and `hi` bound its interval; a scatter
    plot writes `label`.
    """

    x: float | str
    y: float
    lo: float | None = None
    hi: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Named points of one chart."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Band:
    """A shaded range of the value axis: a margin, or a floor under which nothing can be
    resolved.
    """

    name: str
    lo: float
    hi: float


@dataclass(frozen=True)
class Chart:
    """A picture of numbers: bars or lines over `x`, or a forest of intervals, one row a point.

    In a waterfall the points of the first series are changes, each drawn from where the last one
    ended; those of a further series are levels, drawn from zero.
    """

    title: str
    kind: Literal["bar", "line", "scatter", "forest", "waterfall"]
    series: Sequence[Series]
    x_label: str = ""
    y_label: str = ""
    bands: Sequence[Band] = ()
    log_y: bool = False
    log_x: bool = False
    note: str = ""


@dataclass(frozen=True)
class Quote:
    """Text that a model wrote, shown as it is. `onset` (code points) marks where it went wrong."""

    title: str
    text: str
    status: str = ""
    onset: int | None = None
    note: str = ""


Block = Table | Chart | Quote


@dataclass(frozen=True)
class Report:
    """What a verb returns.

    `results` is the machine-readable answer in plain JSON types, made from the typed objects that
    it is given; `headline` has the few figures a person reads first, `blocks` the rest. Secrets of
    the run, such as an API key that a server repeats, are taken out of every text here, so that no
    writer and no caller of the API sees them.
    """

    command: str
    verdict: Verdict
    subject: Mapping[str, Any] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    results: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    headline: Sequence[Metric] = ()
    blocks: Sequence[Block] = ()
    interrupted: bool = False
    signal: int = 2
    """Number of the signal that interrupted it."""
    summary: str = ""
    """One sentence under the verdict. Left empty, the writers take the gravest finding's title."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", jsonable(self.results))
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, scrubbed(getattr(self, each.name)))
        if self.verdict is Verdict.FAIL and not any(
            f.severity is Severity.ERROR for f in self.findings
        ):
            raise ValueError("the verdict `fail` needs at least one finding of severity `error`")

    @property
    def exit_code(self) -> int:
        """Exit code of the process that prints this report."""
        return 128 + self.signal if self.interrupted else self.verdict.exit_code

    def to_html(self) -> str:
        """The report as a self-contained page."""
        return str(get("assay.reports", "html")(self))

    def to_json(self) -> dict[str, Any]:
        """The one JSON object that `--json` prints (schema `assay/1`)."""
        return {
            "schema": SCHEMA,
            "command": jsonable(self.command),
            "verdict": self.verdict.value,
            "exit_code": self.exit_code,
            "subject": jsonable(self.subject),
            "findings": jsonable(self.findings),
            "results": self.results,
            "environment": jsonable(self.environment),
        }


def fields_json(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as a JSON object."""
    return {f.name: jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}


def jsonable(value: Any) -> Any:
    """`value` as plain JSON types, the one way from typed results to JSON.

    Non-finite numbers become null, paths and enums strings, mappings and dataclasses objects; a
    class that is written in another form than by its fields says so in a method `to_json`.
    """
    if value is None or (isinstance(value, bool | int) and not isinstance(value, StrEnum)):
        return value
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, str):
        # A lone surrogate (half a broken UTF-8 stream) cannot be written as UTF-8.
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = getattr(value, "to_json", None)
        return fields_json(value) if own is None else jsonable(own())
    if isinstance(value, Mapping):
        return {jsonable(str(k)): jsonable(v) for k, v in value.items()}
    if isinstance(value, Iterable):
        return [jsonable(v) for v in value]
    if hasattr(value, "item"):  # numpy scalars
        return jsonable(value.item())
    raise TypeError(f"{type(value).__name__} has no JSON form")
