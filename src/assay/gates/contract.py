"""The contract: a TOML file that says what a deployment promises. Each section that it has is run,
each limit is judged.

`[subject]` and `[reference]` say what is examined and against what. Every other section is a verb,
with the options of that verb by their own names and with limits on what it measures. An unknown
name is refused, naming the nearest.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from assay.checkpoint.options import VerifyOptions
from assay.coherence.options import CheckOptions
from assay.errors import AssayError, UsageError
from assay.fidelity.plan import Plan
from assay.fidelity.plan_file import plan_from
from assay.files import read_bounded
from assay.options import Declared, Options, declared_options, option
from assay.speculation.options import SpecOptions

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
    """What the subject is compared with; for `compare` an engine or a pack."""

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
    return f"{limit}{declared.help.rstrip('.')}{'' if declared.help.endswith('?') else '.'}{shown}".replace(  # noqa: E501
        "|", "\\|"
    )


# The numbers of a report by name, each with its interval and its sizes: for limits, for what
# changed, and for cards.
#
