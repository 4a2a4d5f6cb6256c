"""Options of the verbs. Each is declared once, as a field of the verb's frozen dataclass.

The command line (`assay.cli.verb`) and the API (`assay.check(url, samples=1)`) are both made from
these fields: types, defaults, help, bounds. This module imports neither typer nor an engine.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from assay.errors import UsageError
from assay.verdict import jsonable


@dataclass(frozen=True)
class Declared:
    """An option as its field declares it. `flag` is its name on the command line, without the
    leading dashes.
    """

    help: str
    flag: str = ""
    metavar: str = ""
    panel: str = ""
    lo: float | None = None
    hi: float | None = None
    choices: tuple[str, ...] = ()
    form: str = ""
    """How one text holds the value: `fraction` (1%), `numbers` (0,2-3), `sizes` (0.01,0.1) or
    `auto` (a number, 0 written as auto).
    """
    apart: bool = False
    """It changes how a run goes or what is printed, not what is measured: `Options.facts` leaves it
    out.
    """
    short: str = ""
    """A one-letter name, such as `-v`."""
    listed: bool = False
    """Whether it is an option of the command line."""
    name: str = ""
    kind: type = str
    many: bool = False
    optional: bool = False
    default: Any = None
    required: bool = False

    @property
    def inverted(self) -> bool:
        """Whether the flag switches something off that is on by default, as
        `--no-throughput` does.
        """
        return self.kind is bool and self.default is True

    @property
    def shown_default(self) -> Any:
        """The default as the command line takes it; None where there is none to show."""
        if self.form and self.default not in (None, ()):
            return _WRITTEN[self.form](self.default)
        return None if self.many else self.default


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    flag: str = "",
    metavar: str = "",
    panel: str = "",
    lo: float | None = None,
    hi: float | None = None,
    choices: Iterable[str] = (),
    form: str = "",
    apart: bool = False,
    short: str = "",
    listed: bool = True,
) -> Any:
    """A dataclass field that is an option; without a default it is required. See `Declared` for the
    rest.
    """
    declared = Declared(
        help, flag, metavar, panel, lo, hi, tuple(map(str, choices)), form, apart, short, listed
    )
    return dataclasses.field(default=default, metadata={"option": declared})


class Options:
    """Base of the frozen dataclass of a verb's options; its fields are checked when it is made."""

    VERB: ClassVar[str] = "assay"
    AREA: ClassVar[str] = "server"
    """Area of the finding that reports a wrong use."""

    def __post_init__(self) -> None:
        for declared in declared_options(type(self)).values():
            value = getattr(self, declared.name)
            for one in value if declared.many else (value,):
                if one is not None:
                    self._check(declared, one)

    @classmethod
    def usage(cls, message: str, remedy: str = "") -> UsageError:
        """The error for a value that makes no sense."""
        return UsageError(message, remedy=remedy, finding_id=f"{cls.AREA}.usage")

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str = "") -> Self:
        """The options with the values that were given, under the names of fields or of flags
        (`no_throughput`).

        Raises UsageError for an unknown name, naming the nearest one, and for a value of the wrong
        type. `where` says what names them, such as a file.
        """
        values = cls.read(given, where)
        known = declared_options(cls)
        if missing := [d.flag for d in known.values() if d.required and d.name not in values]:
            raise cls.usage(f"{where or cls.VERB} needs {' and '.join(missing)}")
        return cls(**values)

    @classmethod
    def read(cls, given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
        """The values that were given, by field and of the field's type."""
        known = declared_options(cls)
        names = {d.flag.replace("-", "_"): d for d in known.values()} | known
        values = {}
        for name, value in given.items():
            declared = names.get(name.replace("-", "_"))
            if declared is None:
                near = get_close_matches(name, names, n=1, cutoff=0.5)
                raise cls.usage(
                    f"{where or cls.VERB}: unknown option {name!r}"
                    + (f", the nearest is {near[0]!r}" if near else ""),
                    f"options are {', '.join(known)}",
                )
            inverted = declared.inverted and name != declared.name
            found = cls._typed(declared, value, where)
            values[declared.name] = not found if inverted else found
        return values

    def facts(self) -> dict[str, Any]:
        """What decides the numbers, as plain JSON types: every field but those that are `apart`."""
        apart = {d.name for d in declared_options(type(self)).values() if d.apart}
        own: Any = self
        return {
            f.name: jsonable(getattr(self, f.name))
            for f in dataclasses.fields(own)
            if f.name not in apart
        }

    @classmethod
    def _typed(cls, declared: Declared, value: Any, where: str) -> Any:
        try:
            return typed(declared, value)
        except ValueError as error:
            place = f"{where}: " if where else ""
            raise cls.usage(
                f"{place}{declared.flag} = {_brief(value)}: {error}", declared.help
            ) from error

    def _check(self, declared: Declared, value: Any) -> None:
        name = declared.flag
        if declared.choices and value not in declared.choices:
            raise self.usage(f"unknown {name} {value!r}", f"one of {', '.join(declared.choices)}")
        if declared.lo is not None and not value >= declared.lo:
            raise self.usage(f"{name} must be at least {declared.lo:g}, got {_shown(value)}")
        if declared.hi is not None and not value <= declared.hi:
            raise self.usage(f"{name} must be at most {declared.hi:,}, got {_shown(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.usage(f"{name} must be a finite number, got {value:g}")
        if isinstance(value, int) and abs(value) >= _ENDLESS:
            raise self.usage(f"{name} is too large: {_shown(value)}")
        if isinstance(value, str | os.PathLike) and "\0" in os.fspath(value):
            raise self.usage(f"{name} holds the character NUL: {os.fspath(value)!r}")


@dataclass(frozen=True)
class RunTime(Options):
    """How long a run may take."""

    _: KW_ONLY
    budget: float | None = option(
        None,
        "Time that the run may take; it says what it leaves out.",
        lo=0.01,
        metavar="MINUTES",
        apart=True,
    )
    quick: bool = option(False, "A first answer: --budget 3.", apart=True)


_ENDLESS = 1 << 63
"""No option counts so far; numpy and files hold no such number."""


def _brief(value: Any) -> str:
    """A value as it was written, a long one in short."""
    if isinstance(value, int) and abs(value) >= _ENDLESS:
        return _shown(value)
    text = repr(value)
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF]}…"


_BRIEF = 120


def _shown(value: float) -> str:
    """A number for a message, a long one in short."""
    if isinstance(value, float):
        return f"{value:g}"
    if abs(value) < _ENDLESS:
        return f"{value:,}"
    return f"a number of {int(abs(value).bit_length() * 0.30103) + 1} digits"


def declared_options(cls: Any) -> dict[str, Declared]:
    """All fields of a dataclass as options, by name and in their order; those without metadata are
    not `listed`.
    """
    return _declared(cls)


@cache
def _declared(cls: Any) -> dict[str, Declared]:
    hints = get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        kind, many, optional = _kind_of(hints[field.name])
        declared = dataclasses.replace(
            field.metadata.get("option", Declared("")),
            name=field.name,
            kind=kind,
            many=many,
            optional=optional,
            default=None if field.default is MISSING else field.default,
            required=field.default is MISSING and field.default_factory is MISSING,
        )
        flag = declared.flag or ("no_" if declared.inverted else "") + field.name
        found[field.name] = dataclasses.replace(declared, flag=flag.replace("_", "-"))
    return found


def _kind_of(hint: Any) -> tuple[type, bool, bool]:
    """(type of one value, whether there are several, whether there may be none) of `tuple[str,
    ...]`, `int | None`, …
    """
    args = get_args(hint)
    if type(None) in args:
        kind, many, _ = _kind_of(next(a for a in args if a is not type(None)))
        return kind, many, True
    if get_origin(hint) in (tuple, frozenset):
        return args[0], True, False
    return hint, False, False


def typed(declared: Declared, value: Any) -> Any:
    """`value` as the option's field holds it; ValueError says what it should be."""
    if value is None and declared.optional:
        return None
    if declared.form and isinstance(value, str):
        return _READ[declared.form](value)
    if not declared.many:
        return _one(declared.kind, value)
    items = (
        [value]
        if isinstance(value, str | os.PathLike) or not isinstance(value, Collection)
        else value
    )
    return tuple(_one(declared.kind, item) for item in items)


def _one(kind: type, value: Any) -> Any:
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    if kind in (str, Path) and isinstance(value, str | os.PathLike):
        return kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("too large for a number") from None
    raise ValueError(f"not {_KINDS.get(kind, kind.__name__)}")


_KINDS = {
    str: "a text",
    Path: "a path",
    float: "a number",
    int: "a whole number",
    bool: "true or false",
}


# Values that one text holds.


def fraction(text: str) -> float:
    """`1%` or `0.01` as a fraction."""
    try:
        found = float(text.rstrip("% ")) / 100 if text.rstrip().endswith("%") else float(text)
        if math.isfinite(found):
            return found
        raise ValueError
    except ValueError:
        raise ValueError("neither a percentage nor a fraction, such as 1% or 0.01") from None


def numbers(text: str) -> tuple[int, ...]:
    """`0,1,28-29` as whole numbers, each once, in the order written."""
    found: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        lo, dash, hi = (side.strip() for side in part.partition("-"))
        last = hi if dash else lo
        if not (_is_number(lo) and _is_number(last)) or not int(lo) <= int(last) <= _MOST:
            raise ValueError(f"{part!r} is no number or range, such as 0,1,28-29")
        found += range(int(lo), int(last) + 1)
    return tuple(dict.fromkeys(found))


_MOST = 9999
"""No model has so many layers; a slip such as 0-1000000000 should not fill the memory."""


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9


def sizes(text: str) -> tuple[float, ...]:
    """`0.003,0.01` as numbers."""
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
        if all(map(math.isfinite, found)):
            return found
        raise ValueError
    except ValueError:
        raise ValueError("no list of numbers, such as 0.003,0.01") from None


def automatic(text: str) -> int:
    """`8` as a whole number, `auto` as 0."""
    if text != "auto" and not _is_number(text):
        raise ValueError("neither a whole number nor auto")
    return 0 if text == "auto" else int(text)


_READ: Mapping[str, Callable[[str], Any]] = {
    "fraction": fraction,
    "numbers": numbers,
    "sizes": sizes,
    "auto": automatic,
}
_WRITTEN: Mapping[str, Callable[[Any], str]] = {
    "fraction": lambda value: f"{100 * value:g}%",
    "numbers": lambda value: ",".join(map(str, value)),
    "sizes": lambda value: ",".join(f"{v:g}" for v in value),
    "auto": lambda value: str(value or "auto"),
}


@dataclass(frozen=True)
class RayOptions(Options):
    """Where the engines run. Changes how a run goes and not what it measures."""

    _: KW_ONLY
    ray: str = option(
        "",
        "Spread the engines over a Ray cluster (HOST:PORT, auto), or over workers on this machine"
        " (no ADDRESS).",
        metavar="[ADDRESS]",
        panel="Cluster",
        apart=True,
    )
    workers: int = option(
        0,
        "Engines on the cluster; auto: as many as its GPUs, or its CPUs and the threads of each"
        " allow.",
        lo=0,
        form="auto",
        panel="Cluster",
        apart=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers and not self.ray:
            raise self.usage("--workers is of a run on Ray", "add --ray, or leave it out")
        if self.ray.startswith("ray://"):
            raise self.usage(
                f"{self.ray} is Ray's client protocol, which this does not speak",
                "start the run on a node of the cluster: --ray HOST:PORT, or --ray auto",
            )
        if self.ray not in ("", "local", "auto") and not _ADDRESS.fullmatch(self.ray):
            raise self.usage(
                f"{self.ray!r} is no address of a Ray cluster", "write --ray HOST:PORT"
            )


_ADDRESS = re.compile(r"[\w.\-\[\]:]+:\d{1,5}")


def is_address(word: str) -> bool:
    """Whether the word after `--ray` on the command line is its address."""
    return word in ("local", "auto") or word.startswith("ray://") or bool(_ADDRESS.fullmatch(word))


# What `assay doctor` is asked for: its options, and the symptoms that it can look for. Reading a
# command needs no more.


SYMPTOMS: Mapping[str, frozenset[str]] = {
    "text": frozenset(
        {
            "prompts",
            "hard_texts",
            "degenerate_rate",
            "hidden_tokens",
            "same_answers",
            "answers",
            "server_counters",
            "died",
        }
    ),
    "stutter": frozenset({"stutter"}),
    "bits": frozenset({"bits_per_byte", "depth"}),
    "tools": frozenset({"tools", "tool_form"}),
    "speculation": frozenset({"speculation"}),
    "speed": frozenset({"slower", "throughput"}),
}
SLOWER = 0.15
"""Share of the baseline's tokens a second that must be lost, beyond the interval, before a setting
counts as slower.
"""


@dataclass(frozen=True)
class DoctorOptions(RayOptions):
    """What is looked for, and how long it may take."""

    VERB, AREA = "doctor", "server"

    symptom: tuple[str, ...] = option(
        (),
        "Look for this symptom only; may be given again. Default: what the first bad start shows.",
        choices=SYMPTOMS,
    )
    budget: float = option(
        60.0, "Time that the doctor may take.", lo=0.05, hi=100_000, metavar="MINUTES", apart=True
    )
    seconds: float = option(60.0, "Seconds of questions for each start.", lo=3, hi=3600)
    concurrency: int = option(24, "Requests at once in the burst.", lo=2, hi=512)
    fault_rate: float = option(
        1 / 3,
        "A fault that shows in this share of starts must be found; 1: it shows in every one, so one"
        " good start is enough.",
        lo=0.05,
        hi=1,
    )
    slower: float = option(
        0.15, "Loss of speed that counts as a fault.", lo=0.02, hi=0.9, form="fraction"
    )
    ladder: bool = option(True, "Do not measure the speed of each acquitted setting.")
    command_template: str | None = option(
        None, "Command of another engine, with {port} and {settings}.", metavar="TEXT"
    )
    reference_engine: str | None = option(
        None,
        "Trusted model to compare with where the baseline fails: hf:PATH.",
        metavar="ENGINE",
        apart=True,
    )
    api_key_env: str | None = option(
        None, "Environment variable that holds the API key.", metavar="NAME", apart=True
    )
    health: str = option(
        "/health", "Path that answers 200 once the server is ready.", metavar="PATH", apart=True
    )
    start_timeout: float = option(
        600.0, "Seconds that a start may take.", lo=1, hi=86_400, apart=True
    )
    start_lock: Path | None = option(
        None,
        "File to lock while a server starts or ends, where other servers use the device.",
        apart=True,
    )
    seed: int = option(0, "First seed.", lo=0, hi=2**31)
    tools: bool = option(True, "Do not ask tool calls under load.")
    lint: bool = option(
        False, "Read the command and the checkpoint only; launch nothing.", apart=True
    )
    engine_version: str | None = option(
        None,
        "Engine that the command runs, for --lint, e.g. vllm==0.32.0.",
        metavar="ENGINE==VERSION",
        apart=True,
    )
    bundle: Path | None = option(None, "Write the evidence to this file (.tar.zst).", apart=True)
    issue: bool = option(False, "Print a bug report with the minimal command.", apart=True)
    fresh: bool = option(False, "Forget what earlier doctors of this command measured.", apart=True)
