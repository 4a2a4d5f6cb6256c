"""`assay gate`: run every section of a contract, judge its limits, say what changed since the last
good run.

A section that cannot be run is an error of the gate, one whose evidence is too thin leaves it
inconclusive: nothing passes that was not examined.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.bounded_json import loads
from assay.checkpoint.verify import verify
from assay.coherence.check import run_check
from assay.deadline import settled
from assay.engines.device import out_of_memory
from assay.engines.server.engine import ServerEngine
from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.extras import not_installed
from assay.fidelity.names import printable
from assay.files import MOST_JSON_BYTES, read_bounded
from assay.gates.contract import DEFAULT, SECTIONS, Contract, read_contract
from assay.gates.figures import Figure, figures, short
from assay.gates.limits import SHARES, Ruled, rule
from assay.options import Options, option
from assay.progress import NO_PROGRESS, Progress
from assay.report import markdown
from assay.report.text import one_line, sentence
from assay.speculation.spec import examine
from assay.verdict import SCHEMA, Block, Finding, Quote, Report, Severity, Table, Verdict, worst

AREA = {
    "verify": "checkpoint",
    "spec": "speculation",
    "check": "throughput",
    "tools": "coherence",
    "identity": "coherence",
    "determinism": "coherence",
    "compare": "fidelity",
}
"""Area of a section's own findings."""


@dataclass(frozen=True)
class GateOptions(Options):
    """Which contract, and what to hold its figures against."""

    VERB = "gate"

    contract: Path = option(DEFAULT, "The contract.", metavar="FILE")
    server: str | None = option(
        None, "Server to examine in place of the contract's.", metavar="URL"
    )
    api_key_env: str | None = option(
        None, "Environment variable with the server's API key; it needs --server.", metavar="NAME"
    )
    baseline: Path | None = option(
        None, "Result of the last good run (its --json): say what changed."
    )
    summary: Path | None = option(
        None, "Append a short Markdown summary to this file, such as $GITHUB_STEP_SUMMARY."
    )
    lint: bool = option(False, "Only read the contract; examine nothing.")


@dataclass(frozen=True)
class Part:
    """A section that was run: its report, and its limits as they were judged."""

    name: str
    report: Report
    limits: tuple[Ruled, ...] = ()
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The worst of the report's verdict and of the limits'."""
        return worst((self.report.verdict, *(ruled.verdict for ruled in self.limits)))

    @property
    def figures(self) -> list[Figure]:
        """What was measured, by name."""
        return figures(self.name, self.report.results)

    def to_json(self) -> dict[str, Any]:
        """One of `results.parts`; `results` in it are those of the verb."""
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "exit_code": self.verdict.exit_code,
            "says": sentence(self.report),
            "seconds": self.seconds,
            "limits": self.limits,
            "figures": {f.key: f for f in self.figures},
            "findings": [f.id for f in self.findings()],
            "subject": self.report.subject,
            "results": self.report.results,
        }

    def findings(self) -> list[Finding]:
        """Those of the report, which say of what part they are, and one for each limit that is not
        known to hold.
        """
        own = [replace(f, evidence={"part": self.name, **f.evidence}) for f in self.report.findings]
        broken = [r for r in self.limits if r.verdict is not Verdict.PASS]
        if self.report.verdict is Verdict.ERROR:  # that nothing was measured is said already
            broken = [r for r in broken if r.figure]
        return own + [_broken(self, ruled) for ruled in broken]


def run_gate(options: GateOptions | None = None, progress: Progress = NO_PROGRESS) -> Report:
    """Hold a deployment to its contract. UsageError for a contract or a baseline that makes no
    sense, before anything is run.
    """
    options = options or GateOptions()
    contract = read_contract(options.contract, options.server, options.api_key_env)
    before = read_baseline(options.baseline) if options.baseline else None
    if options.lint:
        return _linted(contract)
    if options.summary and not options.summary.parent.is_dir():
        raise UsageError(
            f"--summary {options.summary}: its folder does not exist", remedy="make it first"
        )
    parts: list[Part] = []
    servers = Servers(contract)
    cut = False
    try:
        servers.look(LOOKS)
        for number, name in enumerate(contract.sections, 1):
            with progress(f"gate: {name} ({number} of {len(contract.sections)})", 0):
                pass
            parts.append(run_part(contract, name, progress))
            if cut := parts[-1].report.interrupted:
                break
            servers.look()
    except KeyboardInterrupt:
        cut = True
    report = gate_report(contract, parts, servers, before, interrupted=cut)
    if options.summary:
        try:
            with options.summary.open("a", encoding="utf-8") as file:
                file.write(summary(report))
        except OSError as error:
            raise UsageError(
                f"cannot write --summary {options.summary}: {error.strerror}"
            ) from error
    return report


# The parts.


def _compared(options: Any, progress: Progress) -> Report:
    from assay.fidelity.compare import run_compare  # needs torch, which a contract may not

    return run_compare(options, progress)


def _spec(contract: Contract, options: Any) -> Report:
    return examine(list(contract.subject.logs) or [str(contract.subject.server)], options)


_RUN: Mapping[str, Callable[[Contract, Any, Progress], Report]] = {
    "verify": lambda c, options, show: verify(str(c.subject.checkpoint), options),
    "spec": lambda c, options, show: _spec(c, options),
    **dict.fromkeys(
        ("identity", "determinism", "check", "tools"),
        lambda c, options, show: run_check(str(c.subject.server), options, show),
    ),
    "compare": lambda _, options, show: _compared(options, show),
}


def run_part(contract: Contract, name: str, progress: Progress = NO_PROGRESS) -> Part:
    """Run one section. What cannot be examined is a part with the verdict `error`, so that the
    others are still run.
    """
    begun = time.monotonic()
    try:
        report = settled(_RUN[name](contract, contract.sections[name], progress))
    except AssayError as error:
        report = Report(name, error.verdict, findings=(error.to_finding(),))
    except KeyboardInterrupt:
        report = Report(name, Verdict.INCONCLUSIVE, summary="it was interrupted", interrupted=True)
    except ImportError as error:
        missing = not_installed(f"[{name}]", error, f"{AREA[name]}.not_installed")
        if missing is None:
            raise
        report = Report(name, missing.verdict, findings=(missing.to_finding(),))
    except Exception as error:
        if not out_of_memory(error):
            raise
        found = Finding(f"{AREA[name]}.out_of_memory", Severity.ERROR, f"{name}: memory ran out")
        report = Report(name, Verdict.ERROR, findings=(found,))
    measured = figures(name, report.results)
    limits = tuple(rule(limit, bound, measured) for limit, bound in contract.limits(name).items())
    return Part(name, report, limits, time.monotonic() - begun)


def _broken(part: Part, ruled: Ruled) -> Finding:
    """The finding of a limit that does not hold, or of which that is not known."""
    figure, fails = ruled.figure, ruled.verdict is Verdict.FAIL
    if figure is None:
        title = (
            f"the contract sets {ruled.name}, and [{part.name}] measured no such figure that counts"
        )
        remedy = "read the other findings of this part; a speed of incoherent text does not count"
    else:
        says = "does not hold" if fails else "is undecided"
        title = f"the contract's {ruled.title} {says}: measured {figure.text()}, {figure.sizes}"
        remedy = "" if fails else _MORE[part.name]
    return Finding(
        ruled.finding_id,
        Severity.ERROR if fails else Severity.WARNING,
        title,
        evidence={"part": part.name, **ruled.to_json()},
        remedies=(remedy,) if remedy else (),
    )


_MORE = {
    "check": "time more rounds: `repeats = 15` in [check]",
    "tools": (
        "the suite has 48 questions, and even 48 right answers prove no more than 92.6 %: ask for"
        " less"
    ),
    "spec": "give a longer log, or more requests in [spec]",
    "compare": "score more windows",
}

# Which server answers: all parts must have examined the same one.

LOOKS = 3


class Servers:
    """Who answers at the address, seen before and after every part."""

    def __init__(self, contract: Contract) -> None:
        asked = {"identity", "determinism", "check", "tools"} & contract.sections.keys()
        asked |= {"spec"} & contract.sections.keys() if not contract.subject.logs else set()
        asked |= {"compare"} & contract.sections.keys() if not contract.subject.engine else set()
        self.subject = contract.subject
        self.url = contract.subject.server if asked else None
        self.seen: list[dict[str, Any]] = []

    def look(self, times: int = 1) -> None:
        """Ask who answers; without an answer the parts say so themselves."""
        for _ in range(times if self.url else 0):
            with (
                suppress(AssayError),
                ServerEngine.connect(
                    str(self.url),
                    self.subject.model,
                    api_key_env=self.subject.api_key_env,
                    timeout=min(30.0, self.subject.timeout),
                ) as engine,
            ):
                who = {
                    "kind": engine.identity.kind,
                    "version": engine.identity.version,
                    "model": engine.model,
                    "max_model_len": engine.max_model_len,
                    **engine.identity.facts,
                }
                if who not in self.seen:
                    self.seen.append(who)

    def findings(self) -> list[Finding]:
        """One where not the same server answered all the time."""
        if len(self.seen) < 2:
            return []
        differs = {
            name: [who.get(name) for who in self.seen]
            for name in self.seen[0]
            if len({str(who.get(name)) for who in self.seen}) > 1
        }
        return [
            Finding(
                "server.changed",
                Severity.WARNING,
                f"not one server answered at the address all the time: {_told(differs)}",
                "The parts did not examine the same deployment, so the whole is not judged.",
                evidence=differs,
                causes=(
                    "two servers behind one address",
                    "the server was restarted with another model or version",
                ),
                remedies=("run the gate against one server, by its own address",),
            )
        ]


def _told(differs: Mapping[str, Sequence[Any]]) -> str:
    return "; ".join(
        f"{name} {' then '.join(one_line(str(v)) for v in values)}"
        for name, values in differs.items()
    )


# The last good run, and what changed since.


@dataclass(frozen=True)
class Baseline:
    """An earlier result of the gate."""

    name: str
    verdict: str
    sha256: str | None
    parts: Mapping[str, Mapping[str, Any]]
    figures: Mapping[str, Mapping[str, Figure]]
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """Something that is not as it was; `direction` is better, worse, changed, or the same within
    the intervals.
    """

    part: str
    what: str
    before: str
    now: str
    direction: str


def read_baseline(path: Path) -> Baseline:
    """An earlier result of `assay gate --json`; UsageError where the file is none."""
    try:
        data = loads(read_bounded(path, MOST_JSON_BYTES, what="a baseline"))
        if data["schema"] != SCHEMA or data["command"] != "gate":
            raise ValueError("another kind of report")
        parts = {part["name"]: part for part in data["results"]["parts"]}
        for part in parts.values():
            part["verdict"], part["findings"] = (
                str(part["verdict"]),
                set(map(str, part["findings"])),
            )
            _files(part["results"]), part["subject"].keys()
        measured = {
            name: {f.key: f for f in figures(name, p["results"])} for name, p in parts.items()
        }
        contract = data["results"]["contract"]["sha256"]
        return Baseline(
            path.name, str(data["verdict"]), contract, parts, measured, dict(data["environment"])
        )
    except AssayError as error:
        raise UsageError(f"cannot read the baseline {error.message}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"the baseline {path} is no result of assay gate",
            remedy="give the file that `assay gate --json FILE` wrote on the last good run",
        ) from error


def changes(contract: Contract, parts: Iterable[Part], before: Baseline) -> Iterator[Change]:
    """What is not as it was, and every figure beside its old value."""
    if contract.sha256 != before.sha256:
        yield Change("", "the contract", str(before.sha256)[:12], contract.sha256[:12], "changed")
    yield from _differences(
        "", "package", before.environment.get("packages"), describe()["packages"]
    )
    seen = set()
    for part in parts:
        seen.add(part.name)
        old = before.parts.get(part.name)
        if old is None:
            yield Change(part.name, "part", "not examined", part.verdict.value, "changed")
            continue
        if old["verdict"] != part.verdict.value:
            ranks = [v.value for v in _WORST_LAST]
            worse = ranks.index(part.verdict.value) > _rank(old["verdict"], ranks)
            yield Change(
                part.name,
                "verdict",
                old["verdict"],
                part.verdict.value,
                "worse" if worse else "better",
            )
        yield from _subject_changes(part, old["subject"])
        yield from _differences(
            part.name, "file", _files(old["results"]), _files(part.report.results)
        )
        now = {f.id for f in part.findings()}
        yield from (
            Change(part.name, "finding", "", id_, "new") for id_ in sorted(now - old["findings"])
        )
        yield from (
            Change(part.name, "finding", id_, "", "gone") for id_ in sorted(old["findings"] - now)
        )
        same_plan = _asked(part.report.results) == _asked(old["results"])
        for figure in part.figures:
            if earlier := before.figures[part.name].get(figure.key):
                way = (
                    direction(earlier, figure)
                    if same_plan
                    else "not comparable: the contract changed"
                )
                yield Change(part.name, figure.title, earlier.text(), figure.text(), way)
    for name in before.parts.keys() - seen:
        yield Change(name, "part", before.parts[name]["verdict"], "not examined", "changed")


_WORST_LAST = (Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.ERROR, Verdict.FAIL)


def _rank(verdict: str, ranks: Sequence[str]) -> int:
    return ranks.index(verdict) if verdict in ranks else -1


def _files(results: Mapping[str, Any]) -> dict[str, str]:
    """The digests of a checkpoint's files, as far as they were hashed."""
    return {
        str(f["path"]): str(f["sha256"])[:12] for f in results.get("files") or () if f.get("sha256")
    }


def _asked(results: Mapping[str, Any]) -> Any:
    """What the figures of a part rest on, of compare's text the digests and sizes, of check its
    plan.
    """
    return results.get("plan"), results.get("text")


def _subject_changes(part: Part, old: Mapping[str, Any]) -> Iterator[Change]:
    """Another server, model or engine; other files of a checkpoint."""
    new = part.report.subject
    names = ("model", "model_root", "max_model_len", "engine")
    yield from _differences(
        part.name, "", {n: old.get(n) for n in names}, {n: new.get(n) for n in names if n in new}
    )
    yield from _differences(part.name, "server", old.get("server"), new.get("server"))


def _differences(part: str, kind: str, old: Any, new: Any) -> Iterator[Change]:
    """Keys whose value is not what it was."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield Change(
                part,
                f"{kind} {name}".strip(),
                _cell(old.get(name)),
                _cell(new.get(name)),
                "changed",
            )


def _cell(value: Any) -> str:
    return "none" if value is None else one_line(str(value))[:80]


def direction(old: Figure, new: Figure) -> str:
    """Better or worse only where the intervals do not meet."""
    if None in (old.lo, old.hi, new.lo, new.hi):
        return "no interval" if old.value != new.value else "the same"
    assert old.lo is not None and old.hi is not None and new.lo is not None and new.hi is not None
    if new.lo <= old.hi and old.lo <= new.hi:
        return "the same within the intervals"
    higher = new.value > old.value
    if new.better == "zero":
        return "worse" if abs(new.value) > abs(old.value) else "better"
    return "better" if higher == (new.better == "higher") else "worse"


# The report.


def gate_report(
    contract: Contract,
    parts: Sequence[Part],
    servers: Servers,
    before: Baseline | None = None,
    *,
    interrupted: bool = False,
) -> Report:
    """The parts as one report, with what changed since the last good run."""
    changed = list(changes(contract, parts, before)) if before else []
    who = servers.findings()
    missing = [name for name in contract.sections if name not in {p.name for p in parts}]
    thin = bool(who or missing or interrupted or not parts)
    verdict = worst((*(p.verdict for p in parts), *([Verdict.INCONCLUSIVE] if thin else [])))
    findings = [f for part in parts for f in part.findings()] + who + list(_worse(changed, before))
    if before and (weaker := list(weakened(contract, before))):
        findings.append(_asks_less(weaker, before))
    subject = contract.subject
    return Report(
        command="gate",
        verdict=verdict,
        subject={
            "name": subject.name,
            "contract": contract.where,
            "server": printable(servers.url) if servers.url else None,
            "checkpoint": subject.checkpoint if "verify" in contract.sections else None,
            "reference": (
                printable(str(contract.reference)) if "compare" in contract.sections else None
            ),
        },
        findings=findings,
        results={
            "contract": {
                "file": contract.where,
                "sha256": contract.sha256,
                "sections": list(contract.sections),
            },
            "parts": [part.to_json() for part in parts],
            "not_run": missing,
            "servers": servers.seen,
            "baseline": (
                {"file": before.name, "verdict": before.verdict, "changes": changed}
                if before
                else None
            ),
        },
        environment=describe(),
        blocks=_blocks(parts, missing, changed, before),
        interrupted=interrupted,
        summary=_sentence(parts, missing, who),
    )


MARGINS = ("margin_ppl", "margin_kl", "marginal_ppl", "marginal_kl", "control_margin")
FLOORS = ("margin_top1", "marginal_top1")


def weakened(contract: Contract, before: Baseline) -> Iterator[str]:
    """What the contract of the last good run asked for and this one does not, one clause each."""
    for name, old in before.parts.items():
        if name not in contract.sections:
            yield f"[{name}] is gone"
            continue
        limits = contract.limits(name)
        for limit in old.get("limits") or ():
            bound, now = limit["limit"], limits.get(limit["name"])
            if now is None:
                yield f"[{name}] {limit['name']} is gone, it was {short(bound)}"
                continue
            now = 100 * now if limit["name"] in SHARES else now
            if now < bound if limit["name"].startswith("min_") else now > bound:
                yield f"[{name}] {limit['name']} is {short(now)}, it was {short(bound)}"
        plan = old["subject"].get("plan")
        if name == "compare" and isinstance(plan, Mapping):
            yield from _wider(contract.sections[name], plan)


def _wider(now: Any, old: Mapping[str, Any]) -> Iterator[str]:
    """Margins of a comparison that let more through than they did."""
    for margin in (*MARGINS, *FLOORS):
        was, is_ = old.get(margin), getattr(now, margin)
        if not isinstance(was, int | float) or not isinstance(is_, int | float):
            continue
        if is_ < was if margin in FLOORS else is_ > was:
            yield f"[compare] {margin} is {short(is_)}, it was {short(was)}"
    if now.allow_marginal and old.get("allow_marginal") is False:
        yield "[compare] allow_marginal is new"


def _asks_less(weaker: Sequence[str], before: Baseline) -> Finding:
    return Finding(
        "server.contract_weaker",
        Severity.WARNING,
        f"the contract asks for less than that of {before.name}: {'; '.join(weaker)}",
        evidence={"weaker": list(weaker)},
        remedies=(
            "see whether that was meant; in a pull request take the contract from the base branch",
        ),
    )


def _worse(changed: Iterable[Change], before: Baseline | None) -> Iterator[Finding]:
    if before and before.verdict != Verdict.PASS.value:
        yield Finding(
            "server.baseline",
            Severity.WARNING,
            f"the baseline {before.name} is no good run: its verdict is {one_line(before.verdict)}",
            remedies=("keep the JSON of a run that passed",),
        )
    for change in changed:
        if change.direction == "worse" and change.what != "verdict":
            yield Finding(
                f"{AREA[change.part]}.worse_than_baseline",
                Severity.WARNING,
                f"{change.part}: {change.what} is worse than on the last good run: "
                f"{change.now}, it was {change.before}",
                evidence={"part": change.part, "before": change.before, "now": change.now},
            )


def _sentence(parts: Sequence[Part], missing: Sequence[str], who: Sequence[Finding]) -> str:
    """What holds, what does not, and what the contract does not ask for."""
    words = []
    for verdict, says in (
        (Verdict.FAIL, "does not hold"),
        (Verdict.ERROR, "could not be examined"),
        (Verdict.INCONCLUSIVE, "is undecided"),
        (Verdict.PASS, "holds"),
    ):
        if names := [part.name for part in parts if part.verdict is verdict]:
            many = says.replace("does", "do").replace("is ", "are ").replace("holds", "hold")
            words.append(f"{_listed(names)} {says if len(names) == 1 else many}")
    if missing:
        words.append(f"{_listed(missing)} not run")
    if who:
        words.append("more than one server answered")
    left = [name for name in SECTIONS if name not in {*missing, *(part.name for part in parts)}]
    return "; ".join(words) + (f"; not in the contract: {', '.join(left)}." if left else ".")


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _blocks(
    parts: Sequence[Part],
    missing: Sequence[str],
    changed: Sequence[Change],
    before: Baseline | None,
) -> list[Block]:
    rows = []
    for part in parts:
        rows.append((part.name, part.verdict.value, _short(sentence(part.report))))
        rows += [(f"  {r.title}", r.verdict.value, _measured(r)) for r in part.limits]
        bounded = {r.figure.key for r in part.limits if r.figure}
        rows += [(f"  {f.title}", "", f.text()) for f in part.figures if f.key not in bounded]
    rows += [(name, Verdict.INCONCLUSIVE.value, "not run") for name in missing]
    took = ", ".join(f"{part.name} {part.seconds:.0f} s" for part in parts)
    found: list[Block] = [Table("The contract", ("part", "verdict", "measured"), rows, note=took)]
    if before:
        cells = [(c.part, c.what, c.before, c.now, c.direction) for c in changed]
        note = "" if cells else "nothing"
        found.append(
            Table(
                f"Since {before.name}",
                ("part", "what", "then", "now", "direction"),
                cells,
                note=note,
            )
        )
    for part in parts:
        for block in part.report.blocks:
            if isinstance(block, Quote) and part.report.verdict is Verdict.PASS:
                continue
            named = replace(block, title=f"{part.name}: {block.title}")
            found.append(replace(named, detail=True) if isinstance(named, Table) else named)
    return found


def _short(text: str) -> str:
    return text if len(text) <= _CELL else f"{text[: _CELL - 1]}…"


_CELL = 46


def _measured(ruled: Ruled) -> str:
    return ruled.figure.text() if ruled.figure else "not measured"


def summary(report: Report) -> str:
    """The gate in short, as Markdown for a pull request: the parts, what changed, what to do."""
    weighty = [f for f in report.findings if f.severity is not Severity.INFO]
    short = [replace(f, evidence={}, causes=(), references=()) for f in weighty]
    tables = [b for b in report.blocks if isinstance(b, Table) and not b.detail]
    return markdown.render(replace(report, findings=short, blocks=tables))


def _linted(contract: Contract) -> Report:
    limits = {name: contract.limits(name) for name in contract.sections}
    rows = [
        (name, ", ".join(f"{limit} = {value:g}" for limit, value in limits[name].items()) or "none")
        for name in contract.sections
    ]
    return Report(
        command="gate",
        verdict=Verdict.PASS,
        subject={"contract": contract.where},
        results={
            "contract": {
                "file": contract.where,
                "sha256": contract.sha256,
                "sections": list(contract.sections),
            },
            "parts": [],
            "not_run": list(contract.sections),
            "limits": limits,
        },
        blocks=(Table("Sections of the contract", ("section", "limits"), rows),),
        summary="The contract can be read; nothing was examined.",
    )
