"""The contract: a TOML file that says what a deployment promises. Each section that it has is run,
each limit is judged.

`[subject]` and `[reference]` say what is examined and against what. Every other section is a verb,
with the options of that verb by their own names and with limits on what it measures. An unknown
name is refused, naming the nearest.
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

from assay.checkpoint.options import VerifyOptions
from assay.coherence.options import CheckOptions
from assay.errors import AssayError, UsageError
from assay.fidelity.plan import Plan
from assay.fidelity.plan_file import plan_from
from assay.files import read_bounded
from assay.options import Declared, Options, declared_options, option
from assay.speculation.options import SpecOptions
from assay.stats import Interval
from assay.verdict import Verdict

T = TypeVar("T")
DEFAULT = Path("assay.toml")
MOST_BYTES = 1 << 20
"""A contract is a page of text; a file of more than this is something else."""
LIMIT = "Limits"
"""Panel of the options that are limits on what is measured."""


# What is examined, and against what.


@dataclass(frozen=True)
class Subject(Options):
    """What is held to the contract. Name what the sections need; the rest may be left out."""

    name: str | None = option(None, "Name of the deployment in reports.")
    server: str | None = option(
        None, "Root of the OpenAI-compatible server, or its /v1.", metavar="URL"
    )
    model: str | None = option(None, "Model to ask; default: the first the server lists.")
    checkpoint: str | None = option(None, "Folder, file or hub:ORG/NAME that `verify` examines.")
    logs: tuple[str, ...] = option(
        (), "Engine logs that `spec` reads; default: the server's own counters."
    )
    engine: str | None = option(
        None, "What `compare` scores: hf:MODEL, gguf:FILE, …; default: the server."
    )
    api_key_env: str | None = option(
        None,
        "Only the command line names the API key (--api-key-env); here it can repeat the name.",
        metavar="NAME",
    )
    timeout: float = option(300.0, "Seconds that one answer may take.", lo=1, hi=86_400)


@dataclass(frozen=True)
class Against(Options):
    """What the subject is held against; for `compare` an engine or a pack."""

    engine: str | None = option(
        None, "hf:MODEL, vllm:MODEL, gguf:FILE or run:DIR, with options after '?'."
    )
    pack: Path | None = option(None, "Reference pack: a file of `assay reference pack`.")
    key: Path | None = option(
        None, "File with the secret, or the public Ed25519 key, that checks who signed the pack."
    )
    head: Path | None = option(
        None, "Checkpoint that has the pack's output head; default: the candidate's."
    )
    identity: Path | None = option(
        None, "What `[identity]` holds the server against: a file of `assay check --identity-out`."
    )


# The verbs. A limit is an option named `min_…` or `max_…`; `figures` gives the figure that it
# bounds.


def _limit(help: str, **how: Any) -> Any:
    return option(None, help, panel=LIMIT, apart=True, **how)


@dataclass(frozen=True)
class VerifySection(VerifyOptions):
    """The checkpoint on disk: digests, tensors, quantisation, draft head, flags."""


@dataclass(frozen=True)
class CheckSection(CheckOptions):
    """The running server: is its text sane, and how fast is it?"""

    min_tokens_per_s: float | None = _limit("Least coherent tokens a second of one stream.", lo=0)
    max_ttft_s: float | None = _limit("Longest time to first token, in seconds.", lo=0)


@dataclass(frozen=True)
class ToolsSection(CheckOptions):
    """Tool calls and JSON objects with one right answer each, at 1, 8 and 32 requests at once."""

    suite: str = option("tools", choices=("tools",), listed=False)
    min_schema_valid: float | None = _limit(
        "Least share that follows its schema, at the worst concurrency.",
        form="fraction",
        lo=0,
        hi=1,
    )
    min_right: float | None = _limit(
        "Least share of right answers, at the worst concurrency.", form="fraction", lo=0, hi=1
    )


@dataclass(frozen=True)
class SpecSection(SpecOptions):
    """Speculative decoding: is the draft head healthy?"""

    min_acceptance: float | None = _limit(
        "Least share of draft tokens that are accepted.", form="fraction", lo=0, hi=1
    )


@dataclass(frozen=True)
class Section:
    """A section that is run: the class of its options, and what it needs of the contract."""

    name: str
    options: type[Options]
    needs: tuple[str, ...]
    """Keys of `[subject]`, of which it needs one."""
    refused: tuple[str, ...] = ()
    """Options of the verb that make no sense in a contract, or that the gate gives."""
    shared: tuple[str, ...] = ()
    """Options of the verb that `[subject]` gives."""
    about: str = ""
    """Of a section that takes no keys: what it asks."""

    def declared(self) -> Iterator[Declared]:
        """Its options, the limits first."""
        if self.about:
            return
        taken = {*self.refused, *self.shared}
        listed = [
            d for d in declared_options(self.options).values() if d.listed and d.name not in taken
        ]
        yield from sorted(listed, key=lambda d: d.panel != LIMIT)


_ASKED = ("model", "api_key_env", "timeout")
_EXACT = ("identity", "identity_out", "determinism")
_NO_TOOLS = (
    *_EXACT,
    "suite",
    "only",
    "throughput",
    "repeats",
    "run_code",
    "run_code_unsafe",
    "longest_needle",
    "concurrency",
)
SECTIONS = {
    section.name: section
    for section in (
        Section("verify", VerifySection, ("checkpoint",), ("write_manifest",)),
        Section("spec", SpecSection, ("logs", "server"), ("follow", "seconds"), ("api_key_env",)),
        Section(
            "identity",
            CheckOptions,
            ("server",),
            (),
            _ASKED,
            "Is it the model of `[reference] identity`? No keys.",
        ),
        Section(
            "determinism",
            CheckOptions,
            ("server",),
            (),
            _ASKED,
            "Does the same request give the same answer, alone and in batches? No keys.",
        ),
        Section("check", CheckSection, ("server",), ("suite", "run_code_unsafe", *_EXACT), _ASKED),
        Section("tools", ToolsSection, ("server",), _NO_TOOLS, _ASKED),
        Section("compare", Plan, ("engine", "server"), ("keep",), ("reference", "candidates")),
    )
}
"""The sections in the order in which they run, the cheapest first."""


@dataclass(frozen=True)
class Contract:
    """A contract that was read: its sections hold the options of their verbs, checked."""

    subject: Subject
    against: Against
    sections: Mapping[str, Any]
    where: str = str(DEFAULT)
    sha256: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> str | None:
        """The engine that the subject is compared with."""
        against = self.against
        if against.pack is None:
            return against.engine
        more = [f"{name}={value}" for name in ("head", "key") if (value := getattr(against, name))]
        return f"pack:{against.pack}" + (f"?{'&'.join(more)}" if more else "")

    def limits(self, section: str) -> dict[str, float]:
        """The limits that a section sets, by name."""
        options = self.sections[section]
        named = (
            f.name for f in fields(options) if f.metadata.get("option", Declared("")).panel == LIMIT
        )
        return {name: value for name in named if (value := getattr(options, name)) is not None}


def read_contract(
    path: Path = DEFAULT, server: str | None = None, api_key_env: str | None = None
) -> Contract:
    """Read the contract in a file.

    Args:
        path: A TOML file.
        server: Stands for `[subject] server`.
        api_key_env: Environment variable with the API key. A contract may come with a pull request,
            so it names no secret, and a key is sent only to a server that the command names.

    Raises:
        UsageError: It says in one line what is wrong in the file.
    """
    try:
        raw = read_bounded(path, MOST_BYTES, what="a contract")
    except AssayError as error:
        raise _refused(
            f"cannot read the contract {error.message}",
            "name one with --contract, see docs/gate.md",
        ) from error
    try:
        data = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _refused(
            f"{path} is not TOML: {' '.join(str(error).split())}", "see docs/gate.md for an example"
        ) from error
    return contract_of(data, path.name, hashlib.sha256(raw).hexdigest(), server, api_key_env)


def contract_of(
    data: Mapping[str, Any],
    where: str = str(DEFAULT),
    sha256: str = "",
    server: str | None = None,
    api_key_env: str | None = None,
) -> Contract:
    """The contract that plain data holds, such as a parsed TOML file. Raises: UsageError."""
    known = ("subject", "reference", *SECTIONS)
    for name, value in data.items():
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            nearest = f", the nearest is [{near[0]}]" if near else ""
            raise _refused(
                f"{where}: unknown section [{name}]{nearest}", f"sections are {', '.join(known)}"
            )
        if not isinstance(value, Mapping):
            raise _refused(f"{where}: {name} must be a section, [{name}]")
    subject = Subject.of(
        data.get("subject", {}) | ({"server": server} if server else {}), f"{where} [subject]"
    )
    subject = replace(subject, api_key_env=_key_of(subject, where, server, api_key_env))
    against = Against.of(data.get("reference", {}), f"{where} [reference]")
    rest = {**data, "subject": {**data.get("subject", {}), "server": ""}}
    for text in _texts(rest):
        _refuse_powers(where, text, subject)
    if against.engine and against.pack:
        raise _refused(f"{where} [reference] names an engine and a pack", "leave one of them out")
    if (against.key or against.head) and not against.pack:
        raise _refused(
            f"{where} [reference]: key and head belong to a pack", "name it: pack = FILE"
        )
    asked = [section for name, section in SECTIONS.items() if name in data]
    if not asked:
        raise _refused(
            f"{where} asks for nothing: it has no section of a verb",
            f"add one of {', '.join(SECTIONS)}",
        )
    contract = Contract(subject, against, {}, where, sha256, data)
    return Contract(
        subject,
        against,
        {s.name: _options(s, contract, data[s.name]) for s in asked},
        where,
        sha256,
        data,
    )


def _key_of(
    subject: Subject, where: str, server: str | None, api_key_env: str | None
) -> str | None:
    """The variable of the key that the command line names. UsageError where the contract names
    another, or where the key would go to a server that the contract names.
    """
    if subject.api_key_env and subject.api_key_env != api_key_env:
        raise _refused(
            f"{where} [subject]: api_key_env: a contract names no secret, since a pull request can"
            " change it",
            f"leave it out, and give --api-key-env {subject.api_key_env} --server URL",
        )
    if api_key_env and not server:
        raise _refused(
            f"--api-key-env {api_key_env}: the key is sent to no server that only {where} names",
            "name the server on the command line too: --server URL",
        )
    return api_key_env


def _texts(value: Any) -> Iterator[str]:
    """Every text in plain data, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _refuse_powers(where: str, text: str, subject: Subject) -> None:
    """UsageError for a text by which a file of a pull request could take a secret or run a program:
    an option of an engine, or another server than the one that the key is for.
    """
    names = {part.partition("=")[0] for part in text.partition("?")[2].split("&")}
    for name, why in (("api_key_env", "name a secret"), ("python", "choose a program to run")):
        if name in names:
            raise _refused(
                f"{where}: {text}: ?{name}= is not for a contract: it could {why}",
                "run that engine with assay compare, or name it in the environment",
            )
    if subject.api_key_env and re.search(r"(?i)\bhttps?:", text):
        raise _refused(
            f"{where}: {text}: with --api-key-env a contract names no other server",
            "leave it out, or run that section by its own verb",
        )


def _options(section: Section, contract: Contract, given: Mapping[str, Any]) -> Options:
    """The options of a section, with what `[subject]` and `[reference]` say; UsageError where
    something is missing.
    """
    place, subject = f"{contract.where} [{section.name}]", contract.subject
    for name in section.refused + section.shared:
        flag = declared_options(section.options)[name].flag.replace("-", "_")
        if any(key.replace("-", "_") in (name, flag) for key in given):
            home = (
                "the gate gives it" if name in section.shared else "it has no place in a contract"
            )
            raise _refused(f"{place}: {flag}: {home}", "see docs/gate.md for what a contract holds")
    if not any(getattr(subject, name) for name in section.needs):
        raise _refused(
            f"{place} has nothing to examine: [subject] names no {' and no '.join(section.needs)}",
            f"give {section.needs[0]} in [subject]"
            + (", or --server URL" if "server" in section.needs else ""),
        )
    if section.about and given:
        raise _refused(f"{place} takes no keys, and has {', '.join(given)}", section.about)
    if section.name == "identity" and contract.against.identity is None:
        raise _refused(f"{place} needs a reference", "give identity in [reference]")
    if section.options is Plan:
        if contract.reference is None:
            raise _refused(f"{place} needs a reference", "give engine or pack in [reference]")
        engines = {
            "reference": contract.reference,
            "candidates": [subject.engine or subject.server],
        }
        return _placed(
            lambda values, where: plan_from(values, {}, where), {**given, **engines}, place
        )
    shared = {
        name: value for name in section.shared if (value := getattr(subject, name)) is not None
    }
    if section.about:
        shared[section.name] = contract.against.identity if section.name == "identity" else True
    return _placed(section.options.of, {**given, **shared}, place)


def _placed(make: Callable[[Any, str], T], given: Mapping[str, Any], place: str) -> T:
    """What `make` makes of the keys of a section; a UsageError names the section."""
    try:
        return make(given, place)
    except UsageError as error:
        if place in error.message:
            raise
        raise UsageError(
            f"{place}: {error.message}", remedy=error.remedy, finding_id=error.finding_id
        ) from error


def _refused(message: str, remedy: str = "") -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="server.contract")


# The page of docs/gate.md that says what a contract may hold.


def contract_reference() -> str:
    """Every key of every section as Markdown tables."""
    parts = [_page("subject", Subject.__doc__, declared_options(Subject).values())]
    parts.append(_page("reference", Against.__doc__, declared_options(Against).values()))
    for name, section in SECTIONS.items():
        told = (
            "The options of `assay compare`."
            if section.options is Plan
            else section.options.__doc__
        )
        about = section.about or told
        parts.append(_page(name, about, section.declared()))
    return "\n\n".join(parts) + "\n"


def _page(name: str, about: str | None, declared: Any) -> str:
    rows = [f"| `{d.flag.replace('-', '_')}` | {_about(d)} |" for d in declared]
    table = "\n\n| key | meaning |\n|---|---|\n" + "\n".join(rows) if rows else ""
    return f"### `[{name}]`\n\n{about}{table}"


def _about(declared: Declared) -> str:
    default = declared.shown_default
    text = f"{default:g}" if isinstance(default, float) else default
    shown = f" One of {', '.join(declared.choices)}." if declared.choices else ""
    shown += "" if text in (None, "") or isinstance(default, bool) else f" Default: {text}."
    limit = "**Limit.** " if declared.panel == LIMIT else ""
    return f"{limit}{declared.help.rstrip('.')}{'' if declared.help.endswith('?') else '.'}{shown}".replace(
        "|", "\\|"
    )


# The numbers of a report by name, each with its interval and its sizes: for limits, for what
# changed, and for cards.
#
# They are read from `results` of schema assay/1, so that a stored report and a fresh one give the
# same figures.


Better = Literal["higher", "lower", "zero"]


@dataclass(frozen=True)
class Figure:
    """One number with its interval; `lo` and `hi` are None where nothing is known of its error."""

    key: str
    title: str
    value: float
    lo: float | None
    hi: float | None
    unit: str = ""
    better: Better = "higher"
    sizes: str = ""
    """What it rests on: `64 windows, 65,472 tokens`."""
    level: str = "95 %"
    """Confidence of the interval; `95 % a side` where each bound has that by itself."""

    def text(self) -> str:
        """`+0.83 % [+0.50, +1.16]`, the numbers as exact as they are different."""
        sign = "+" if self.better == "zero" else ""
        shown = [short(x, sign) for x in (self.value, self.lo, self.hi) if x is not None]
        bounds = "" if self.lo is None or self.hi is None else f" [{shown[1]}, {shown[2]}]"
        return f"{shown[0]}{f' {self.unit}' if self.unit else ''}{bounds}"

    def to_json(self) -> dict[str, Any]:
        """The number, its interval and its sizes."""
        return {
            "value": self.value,
            "lo": self.lo,
            "hi": self.hi,
            "unit": self.unit,
            "title": self.title,
            "sizes": self.sizes,
            "level": self.level,
        }


def short(x: float | None, sign: str = "") -> str:
    """Three significant digits without an exponent where that is readable; nothing for None."""
    if x is None:
        return ""
    if x and not 1e-4 <= abs(x) < 1e6:
        return f"{x:{sign}.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(x)))) if x else 0
    text = f"{x:{sign}.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def figures(command: str, results: Mapping[str, Any]) -> list[Figure]:
    """The figures of one report by the verb that made it; those that were not measured, or do not
    count, are left out.
    """
    reader = _READERS.get(command)
    return [] if reader is None else [f for f in reader(results) if f is not None]


def _compare(results: Mapping[str, Any]) -> Iterator[Figure | None]:
    sizes = f"{results.get('windows')} windows, {results.get('tokens') or 0:,} tokens"
    kld, top1 = results.get("kld") or {}, results.get("top1_pct") or {}
    changed = (
        results.get("top1_beyond_rounding_pct") or {}
    )  # what the grade rests on: the share that differs
    bound = ", a lower bound" if kld.get("kind", "exact") != "exact" else ""
    yield _of("kld", f"mean KL{bound}", kld | {"value": kld.get("mean")}, "nats", "lower", sizes)
    yield _of(
        "control",
        "mean KL above the control's",
        _difference(results.get("control")),
        "nats",
        "lower",
        sizes,
    )
    yield _of("dppl_pct", "Δppl", results.get("dppl_pct"), "%", "zero", sizes)
    if None in (value := [_number(changed.get(name)) for name in ("value", "lo", "hi")]):
        yield _of("top1_pct", "top-1 agreement", top1, "%", "higher", sizes)
    else:
        point, lo, hi = (100 - x for x in value if x is not None)
        same = {"value": point, "lo": hi, "hi": lo}
        yield _of("top1_pct", "top-1 agreement up to rounding", same, "%", "higher", sizes)


def _difference(control: Any) -> Mapping[str, Any]:
    """The paired difference that `--control` measured."""
    return {**control, "value": control.get("difference")} if isinstance(control, Mapping) else {}


def _check(results: Mapping[str, Any]) -> Iterator[Figure | None]:
    yield from _speed(results)
    bits = results.get("bits_per_byte") or {}
    sizes = f"{sum(not p.get('depth') for p in bits.get('passages', ()))} fixed texts"
    yield _of(
        "bits_per_byte",
        "plain English",
        {"value": bits.get("mean")},
        "bits per byte",
        "lower",
        sizes,
    )
    yield from _tools(results)


def _speed(results: Mapping[str, Any]) -> Iterator[Figure | None]:
    """Speeds of coherent text only: those of a server that writes nonsense are no figures."""
    speed = results.get("throughput") or {}
    if not speed.get("valid"):
        return
    sizes = f"{speed.get('samples')} timed texts, {speed.get('concurrency')} at a time"
    figures: tuple[tuple[str, str, str, Better], ...] = (
        ("decode_tokens_per_s", "coherent tokens a second", "tok/s", "higher"),
        ("ttft_s", "time to first token", "s", "lower"),
    )
    for key, title, unit, better in figures:
        rounds: dict[
            Any, list[float]
        ] = {}  # texts that were timed together are one piece of evidence
        for text in speed.get("texts") or ():
            if (value := _number(text.get(key))) is not None:
                rounds.setdefault(text.get("round"), []).append(value)
        found = _of(key, title, _median([median(v) for v in rounds.values()]), unit, better, sizes)
        yield found and replace(found, level="95 % a side")


def _median(values: Sequence[float]) -> Mapping[str, float | None]:
    """The median and its distribution-free interval, each bound at 95 % one-sided confidence.

    The k-th smallest of n values exceeds the median with probability P(X < k), X binomial (n, ½); k
    is the largest for which that is at most 5 % (Conover, Practical Nonparametric Statistics, 3.2).
    Fewer than five values bound nothing.
    """
    n, ordered = len(values), sorted(values)
    if not n:
        return {}
    tail, k = 0.0, 0
    while k < n and (tail := tail + comb(n, k) / 2**n) <= 0.05:
        k += 1
    bounds = (ordered[k - 1], ordered[n - k]) if k else (None, None)
    return {"value": median(ordered), "lo": bounds[0], "hi": bounds[1]}


def _tools(results: Mapping[str, Any]) -> Iterator[Figure | None]:
    """Shares of the tools suite at the concurrency where they are worst."""
    levels = [level for level in results.get("tools") or () if level.get("asked")]
    for key, title in (
        ("schema_valid", "follow their schema"),
        ("right", "right tool calls and objects"),
    ):
        if not levels:
            return
        worst = min(levels, key=lambda level: level[key] / level["asked"])
        sizes = f"{worst['asked']} questions, {worst['concurrency']} at once"
        yield _of(key, title, _percent(worst[f"{key}_rate"]), "%", "higher", sizes)


def _spec(results: Mapping[str, Any]) -> Iterator[Figure | None]:
    record = results.get("record") or {}
    pooled = (results.get("evidence") or {}).get("acceptance")
    sizes = f"{record.get('drafted') or 0:,} draft tokens"
    yield _of("acceptance", "accepted draft tokens", _percent(pooled or {}), "%", "higher", sizes)
    length = {"value": record.get("mean_acceptance_length")}
    yield _of("mean_acceptance_length", "tokens per step", length, "", "higher", sizes)


def _kv(results: Mapping[str, Any]) -> Iterator[Figure | None]:
    yield from _compare(results)
    stored = results.get("bytes") or {}
    yield _of("kv_ratio", "KV cache compression", {"value": stored.get("ratio")}, "×", "higher", "")


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Figure | None]]] = {
    "compare": _compare,
    "rerun": _compare,
    "check": _check,
    "tools": _check,
    "spec": _spec,
    "kv eval": _kv,
}


def _of(
    key: str, title: str, found: Mapping[str, Any] | None, unit: str, better: Better, sizes: str
) -> Figure | None:
    value, lo, hi = (_number((found or {}).get(name)) for name in ("value", "lo", "hi"))
    if value is None:
        return None
    if lo is None or hi is None:
        lo = hi = None
    return Figure(key, title, value, lo, hi, unit, better, sizes)


def _percent(found: Mapping[str, Any]) -> Mapping[str, float | None]:
    values = {name: _number(found.get(name)) for name in ("value", "lo", "hi")}
    return {name: None if value is None else 100 * value for name, value in values.items()}


def _number(value: Any) -> float | None:
    real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if real else None


# A limit of a contract, judged on the interval of its figure.

BOUNDED = {
    "min_tokens_per_s": ("decode_tokens_per_s", "throughput.below_contract"),
    "max_ttft_s": ("ttft_s", "throughput.below_contract"),
    "min_schema_valid": ("schema_valid", "coherence.below_contract"),
    "min_right": ("right", "coherence.below_contract"),
    "min_acceptance": ("acceptance", "speculation.below_contract"),
}
"""The figure that a limit bounds, and the finding of one that does not hold."""
SHARES = ("min_schema_valid", "min_right", "min_acceptance")
"""Limits that a contract gives as a share, and a report shows in per cent."""


@dataclass(frozen=True)
class Ruled:
    """A limit and what became of it: pass, fail, or inconclusive where its figure is unknown or its
    interval holds the limit.
    """

    name: str
    limit: float
    figure: Figure | None
    verdict: Verdict
    finding_id: str

    @property
    def title(self) -> str:
        """`coherent tokens a second ≥ 30`."""
        figure = self.figure
        unit = figure.unit if figure else "%" if self.name in SHARES else ""
        shown = short(self.limit) + (f" {unit}" if unit else "")
        return (
            f"{figure.title if figure else self.name}"
            f" {'≥' if self.name.startswith('min_') else '≤'} {shown}"
        )

    def to_json(self) -> dict[str, Any]:
        """One of `limits` of a part."""
        figure = self.figure.to_json() if self.figure else None
        return {
            "name": self.name,
            "limit": self.limit,
            "verdict": self.verdict.value,
            "figure": figure,
        }


def rule(name: str, limit: float, measured: Iterable[Figure]) -> Ruled:
    """Judge a limit: it holds, or does not, only where the whole interval says so."""
    key, finding_id = BOUNDED[name]
    figure = next((f for f in measured if f.key == key), None)
    scaled = 100 * limit if name in SHARES else limit
    return Ruled(
        name, scaled, figure, _verdict(figure, scaled, name.startswith("min_")), finding_id
    )


def _verdict(figure: Figure | None, limit: float, least: bool) -> Verdict:
    if figure is None or figure.lo is None or figure.hi is None:
        return Verdict.INCONCLUSIVE
    interval = Interval(figure.value, figure.lo, figure.hi)
    lo, hi = (limit, math.inf) if least else (-math.inf, limit)
    if interval.within(lo, hi):
        return Verdict.PASS
    return Verdict.FAIL if interval.outside(lo, hi) else Verdict.INCONCLUSIVE
