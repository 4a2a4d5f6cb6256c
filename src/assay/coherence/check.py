"""`assay check`: measure a running server stage by stage, compare it with a reference where there
is one, and judge.

Stages come in the order of what decides most per second, and each is measured on both sides before
it is judged. Once the verdict is certain nothing more is asked; where it is unclear after the whole
plan, further texts are, until it is clear, the looks are used up, or the budget is spent.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from assay.coherence import identity
from assay.coherence.diagnosis import Judgement, judge
from assay.coherence.measure import (
    EVIDENCE_SECONDS,
    LEAST_EXTENSION,
    LOOKS,
    QUICK_SECONDS,
    QUICK_SECONDS_SLOW,
    SLOW,
    Measurement,
    Pace,
    Plan,
    Stage,
    extension,
    fit,
    stages_of,
)
from assay.coherence.record import CheckRecord, Reference
from assay.coherence.report import build_report, record_json
from assay.engines import full_spec
from assay.engines.server.engine import ServerEngine
from assay.environment import VERSION
from assay.errors import AssayError, UsageError
from assay.options import option
from assay.progress import NO_PROGRESS, Progress, span
from assay.runs import cache_dir, write_atomically
from assay.stats.equivalence import confidence_of_look
from assay.verdict import Block, Finding, Metric, Report, Severity, Verdict, worst

EARLY = 0.9999
"""Confidence of the intervals that may end a run before its plan is done: so many looks more cost
next to no error.
"""
REFERENCE_CUT = Stage(
    "reference", "texts", "how the reference answers all that the server was asked"
)
DECIDED_BY_TEXTS = frozenset({"hard_texts", "degenerate_rate", "stutter", "tool_form"})
"""Rules that further texts make clear."""


def asks_for_texts(judgement: Judgement) -> bool:
    """Whether further texts may change a judgement: some rule is unclear, and all that count
    against it rest on texts.
    """
    unclear = {r.rule for r in judgement.rulings if r.state == "unclear"}
    bad = {r.rule for r in judgement.rulings if r.state == "bad"}
    return bool(unclear) and unclear | bad <= DECIDED_BY_TEXTS


@dataclass(frozen=True)
class CheckOptions(Plan):
    """A plan, how to reach the server, and what to compare it with."""

    model: str | None = option(
        None, "Model to ask; default: the first the server lists.", apart=True
    )
    reference: Path | None = option(
        None, "Result of an earlier healthy run (its --json) to compare with.", apart=True
    )
    reference_engine: str | None = option(
        None,
        "Trusted model to run here on the same prompts: hf:PATH.",
        metavar="ENGINE",
        apart=True,
    )
    api_key_env: str | None = option(
        None, "Environment variable that holds the API key.", metavar="NAME", apart=True
    )
    timeout: float = option(300.0, "Seconds that one answer may take.", lo=1, hi=86_400, apart=True)
    identity: Path | None = option(
        None,
        "Ask only whether it is the model of this reference (from --identity-out).",
        apart=True,
    )
    identity_out: Path | None = option(
        None, "Write a reference of this server for --identity, and ask nothing else.", apart=True
    )
    determinism: bool = option(
        False,
        "Ask only whether the same request gives the same answer, alone and in batches.",
        apart=True,
    )

    @property
    def exact(self) -> bool:
        """Whether tokens and probabilities are asked for, instead of texts."""
        return bool(self.identity or self.identity_out or self.determinism)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exact and (
            self.reference or self.reference_engine or self.only or self.suite != "text"
        ):
            raise self.usage(
                "--identity, --identity-out and --determinism ask no texts: they go with no"
                " reference, probe or suite",
                "run two commands",
            )
        if self.only and self.suite != "text":
            raise self.usage(
                "--suite tools asks its own cases, and no --probe", "leave one of them out"
            )
        if self.reference is not None and self.reference_engine is not None:
            raise self.usage(
                "give --reference or --reference-engine, not both", "leave one of them out"
            )


def run_check(
    url: str, options: CheckOptions | None = None, progress: Progress = NO_PROGRESS
) -> Report:
    """Check the OpenAI-compatible server at `url` (its root or its /v1).

    Raises AssayError where the server cannot be examined at all. Once something is measured, an
    interrupt or a dying server ends the run, and the report holds what there is.
    """
    options = options or CheckOptions()
    if options.quick:
        options = replace(options, samples=1, repeats=min(3, options.repeats))
    if options.exact:
        return _run_exact(url, options, progress)
    # A reference that cannot be read should not cost the minutes of a run.
    kept = read_reference(options.reference) if options.reference else None
    folder = reference_folder(options.reference_engine) if options.reference_engine else None
    with ServerEngine.connect(
        url, options.model, api_key_env=options.api_key_env, timeout=options.timeout
    ) as engine:
        subject = engine.describe()
        with suppress(AssayError):
            cache = engine.metrics().labels("vllm:cache_config_info")
            subject["server"] |= {name: cache[name] for name in _CACHE_FACTS if name in cache}
        check = Check(
            options,
            Measurement(engine, options, engine.max_model_len, progress),
            progress,
            kept=kept,
        )
        if folder and options.reference_engine:
            check.engine = EngineReference(
                options.reference_engine, folder, options, engine.max_model_len, progress
            )
        before = engine.corrupted_requests()
        try:
            check.run()
        except (AssayError, KeyboardInterrupt) as error:
            if isinstance(error, AssayError) and not check.record.samples:
                raise
            check.ended = error
        finally:
            if check.engine:
                check.engine.close()
        after = engine.corrupted_requests() if check.ended is None else None
        if before is not None and after is not None:
            check.server.record = replace(
                check.record, counters={"corrupted_requests": after - before}
            )
    return check.report(subject)


def _run_exact(url: str, options: CheckOptions, progress: Progress) -> Report:
    """The report of `--identity`, `--identity-out` and `--determinism`, which ask for tokens and
    not for texts.
    """
    reference = identity.read_print(options.identity) if options.identity else None
    if options.identity_out and not options.identity_out.parent.is_dir():
        raise options.usage(
            f"--identity-out {options.identity_out}: its folder does not exist", "make it first"
        )
    verdicts, findings, headline, blocks = (
        [Verdict.PASS],
        list[Finding](),
        list[Metric](),
        list[Block](),
    )
    results: dict[str, Any] = {"probes": [], "throughput": {"valid": False, "samples": 0}}
    summary = "the same requests give the same answers, up to rounding."
    with ServerEngine.connect(
        url, options.model, api_key_env=options.api_key_env, timeout=options.timeout
    ) as engine:
        subject = engine.describe()
        if reference or options.identity_out:
            found = identity.take(engine, progress, noise=options.identity_out is not None)
            if options.identity_out:
                identity.write_print(found, options.identity_out)
                items, listed, scores = identity.kept_facts(found)
                summary = (
                    f"the reference holds {items} tokens, {listed} with probabilities, and {scores}"
                    " scores."
                )
                results["identity_reference"] = {
                    "items": items,
                    "with_probabilities": listed,
                    "scores": scores,
                }
            if reference:
                answer = identity.compare_prints(reference, found)
                results["identity"] = answer.to_json()
                verdicts.append(identity.VERDICTS[answer.decision])
                findings.append(identity.finding_of(answer))
                headline.append(identity.identity_metric(answer))
                blocks.append(identity.identity_table(answer))
                summary = findings[-1].title + "."
        if options.determinism:
            levels = identity.measure_determinism(engine, progress)
            results["determinism"] = levels.to_json()
            verdicts.append(levels.verdict)
            findings += identity.findings_of(levels)
            headline.append(identity.determinism_metric(levels))
            blocks.append(identity.determinism_table(levels))
    verdict = worst(verdicts)
    return Report(
        command="check",
        verdict=verdict,
        subject=subject,
        findings=tuple(findings),
        results=results,
        headline=tuple(headline),
        blocks=tuple(blocks),
        summary=summary if verdict is Verdict.PASS else "",
    )


_CACHE_FACTS = ("block_size", "enable_prefix_caching", "sliding_window")


@dataclass
class Check:
    """One run: both sides, the time, and what was left out of the plan."""

    options: CheckOptions
    server: Measurement
    progress: Progress = NO_PROGRESS
    kept: Reference | None = None
    engine: EngineReference | None = None
    ended: AssayError | KeyboardInterrupt | None = None
    """What ended the run early."""
    pending: list[Stage] = field(default_factory=list)
    """Stages that the reference has not answered yet."""
    look: int = 1
    stopped: str = ""
    """Why the run ended before its plan was done."""
    left_out: list[tuple[Stage, str]] = field(default_factory=list)
    """Stages that were not measured or only in part, and why."""
    expected: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.budget = None if self.options.budget is None else 60 * self.options.budget
        self.pace = Pace(
            reference=1.0 if self.options.reference_engine else 0.0, parallel=self.options.parallel
        )

    @property
    def record(self) -> CheckRecord:
        """What was measured of the server so far."""
        return self.server.record

    @property
    def reference(self) -> CheckRecord | None:
        """What is known of the reference, of the same texts as of the server."""
        if self.engine is not None:
            return self.engine.record
        return self.kept.record.like(self.record) if self.kept else None

    def judge(self, confidence: float) -> Judgement:
        """The verdict on what was measured so far."""
        return judge(self.record, self.reference, confidence)

    def run(self) -> None:
        """Measure the plan, and what its unclear rules ask for beyond it."""
        rest = stages_of(self.options, self.server.probes, self.server.max_model_len)
        while rest:
            stage, *later = rest
            chosen, dropped = fit(rest, self.pace, self._left(), self._has_kept)
            rest = later
            if stage in dropped:
                self.left_out.append((stage, "the budget is spent"))
                continue
            self._measure(chosen[0])
            if chosen[0] is not stage:
                self.left_out.append((stage, "shortened to fit the budget"))
            fatal = self.server.fatal
            if fatal is not None and not self.record.samples and stage.kind == "texts":
                raise fatal
            if not self.options.all and rest and self._is_certain():
                self._show_evidence(rest)
                return
            slowed = self.pace.slower is not None and self.pace.slower[0] == stage.name
            if (not self.expected or slowed) and self.pace.write:
                self._say_plan(rest)
        self._catch_up()
        if not self.options.only and self.options.suite == "text":
            self._extend()

    def _is_certain(self) -> bool:
        """Whether what was measured fails beyond doubt. The reference's texts are asked for only
        where the server's are bad.
        """
        if self.engine is None:
            return self.judge(EARLY).verdict is Verdict.FAIL
        scores = replace(self.record, probes=(), timed=())
        if judge(scores, self.engine.record, EARLY).verdict is Verdict.FAIL:
            return True
        if judge(self.record, None, EARLY).verdict is not Verdict.FAIL:
            return False
        self._catch_up()
        return self.judge(EARLY).verdict is Verdict.FAIL

    def _show_evidence(self, rest: list[Stage]) -> None:
        """End the run with a certain verdict; texts of the probes that were not asked are added if
        they cost next to nothing.
        """
        seconds = time.monotonic() - self.began
        self.stopped = f"the verdict was certain after {span(seconds)}"
        for stage in rest:
            if seconds <= EVIDENCE_SECONDS and stage.name in ("short texts", "long texts"):
                self._measure(stage)
            else:
                self.left_out.append((stage, self.stopped))

    def _extend(self) -> None:
        """Ask for further texts of both sides while the verdict is unclear by rules that they can
        decide.
        """
        while self.look < LOOKS:
            if not asks_for_texts(self.judge(confidence_of_look(self.look))):
                return
            stage = extension(self.options, self.server.probes, self.look + 1)
            chosen, _ = fit([stage], self.pace, self._left(), self._has_kept)
            if not chosen or len(chosen[0].tasks) < LEAST_EXTENSION:
                self.left_out.append((stage, "the budget is spent"))
                return
            self._measure(chosen[0])
            self._catch_up()
            self.look += 1

    def _measure(self, stage: Stage) -> None:
        """Measure a stage of the server. The reference scores its fixed texts at once and writes
        its texts later.
        """
        reserve = self.pace.reference * sum(self.pace.took[other.name] for other in self.pending)
        begun, written = time.monotonic(), self.record.written_tokens
        self.server.run(stage, stage.name + self._eta(stage), begun + self._left() - reserve)
        self.pace.learn(stage, time.monotonic() - begun, self.record.written_tokens - written)
        if self.options.quick and self.budget is None and self.pace.write:
            self.budget = QUICK_SECONDS if self.pace.write >= SLOW else QUICK_SECONDS_SLOW
        if self.engine is not None:
            self.pending.append(stage)
            if stage.kind in ("scores", "tools"):
                self._catch_up((stage,))

    def _catch_up(self, only: tuple[Stage, ...] = ()) -> None:
        """Measure the reference's side of the stages that wait for it; all texts as one batch,
        which is much faster.
        """
        stages = only or tuple(self.pending)
        self.pending = [stage for stage in self.pending if stage not in stages]
        if self.engine is None or not stages:
            return
        tasks = tuple(task for stage in stages for task in stage.tasks)
        together = [Stage("texts", "texts", "", tasks)] if tasks else []
        together += [stage for stage in stages if not stage.tasks]
        took = 0.0
        try:
            for stage in together:
                self.engine.prepare(stage)
                begun = time.monotonic()
                self.engine.run(stage, self.record, begun + self._left())
                took += time.monotonic() - begun
                if self._left() < 0:
                    self.left_out.append(
                        (REFERENCE_CUT, "the budget was spent while the reference answered")
                    )
        except (
            AssayError
        ) as error:  # what the server has shown stays, and the server can be asked on
            self.ended, self.engine = error, None
        self.pace.learn_reference(took, sum(self.pace.took[stage.name] for stage in stages))

    def _left(self) -> float:
        return float("inf") if self.budget is None else self.began + self.budget - time.monotonic()

    def _has_kept(self, stage: Stage) -> bool:
        return self.engine is None or self.engine.has_kept(stage)

    def _say_plan(self, rest: list[Stage]) -> None:
        """Tell the expected time of each stage and in all."""
        chosen, dropped = fit(rest, self.pace, self._left(), self._has_kept)
        self.expected = {
            stage.name: self.pace.seconds(stage, self._has_kept) or 0.0 for stage in chosen
        }
        told = ", ".join(f"{name} {span(seconds)}" for name, seconds in self.expected.items())
        total = sum(self.expected.values()) + time.monotonic() - self.began
        cut = {"shortened": [s for s in chosen if s not in rest], "left out": dropped}
        without = "".join(
            f"; {how}: {', '.join(s.name for s in some)}" for how, some in cut.items() if some
        )
        why = ""
        if self.pace.slower:
            name, before, now = self.pace.slower
            why = f"the server has slowed down ({name}: {now:.3g} tokens/s, {before:.3g} before); "
        with self.progress(f"{why}expected: about {span(total)} in all ({told}){without}", 0):
            pass

    def _eta(self, stage: Stage) -> str:
        """How long it will be until the end, as far as that is known."""
        names = list(self.expected)
        if stage.name not in names:
            return ""
        left = sum(list(self.expected.values())[names.index(stage.name) :])
        return f" (about {span(min(left, self._left()))} left)"

    def report(self, subject: Mapping[str, Any]) -> Report:
        """The report of what there is."""
        self._name_skipped()
        confidence = confidence_of_look(self.look)
        reference = None
        if self.kept is not None:
            reference = replace(self.kept, record=self.kept.record.like(self.record))
        elif self.engine is not None:
            known = self.engine.record
            if known.samples or known.tools or known.passages:
                reference = Reference(known, self.engine.origin)
        judgement = self.judge(confidence)
        changed: tuple[Finding, ...] = ()
        if reference is not None and reference.settings:
            changed = changed_settings(
                settings_of(subject, self.options.facts()), reference.settings
            )
        times = self._times(confidence)
        report = build_report(
            subject, self.options, self.record, reference, judgement, times, changed
        )
        if isinstance(self.ended, AssayError):
            verdict = worst((report.verdict, self.ended.verdict))
            report = replace(
                report, verdict=verdict, findings=(*report.findings, self.ended.to_finding())
            )
        interrupted = isinstance(self.ended, KeyboardInterrupt)
        if interrupted and report.verdict is Verdict.PASS:
            # Half a run cannot acquit.
            report = replace(
                report, verdict=Verdict.INCONCLUSIVE, summary="what was measured holds so far"
            )
        return replace(report, interrupted=interrupted)

    def _name_skipped(self) -> None:
        """Probes that were never asked are skipped, with the reason."""
        reason = self.stopped or (
            "the run was interrupted" if self.ended else "the budget was spent before"
        )
        self.server.record = replace(
            self.record,
            probes=tuple(
                (
                    probe
                    if probe.samples or probe.skipped or probe.failed
                    else replace(probe, skipped=reason)
                )
                for probe in self.record.probes
            ),
        )

    def _times(self, confidence: float) -> dict[str, Any]:
        """What the run took, and what it left out."""
        return {
            "seconds": time.monotonic() - self.began,
            "budget_s": self.budget,
            "expected_s": self.expected,
            "stages_s": self.pace.took,
            "looks": self.look,
            "confidence": confidence,
            "stopped": self.stopped or None,
            "slower": (
                self.pace.slower
                and dict(
                    zip(
                        ("stage", "tokens_per_s_before", "tokens_per_s"),
                        self.pace.slower,
                        strict=True,
                    )
                )
            ),
            "left_out": [
                {"stage": stage.name, "why": why, "unknown": stage.without}
                for stage, why in self.left_out
            ],
        }


# The other side of a check: an earlier healthy run, or a trusted model that is run here on the same
# texts.


_REMEDY = "give the JSON of an earlier run of a healthy server: assay check URL --json > run.json"


def read_reference(path: Path) -> Reference:
    """Read the result of an earlier run; AssayError where it is none, or where that run failed
    itself.
    """
    name = path.name  # a report may be shown to others, so no folder of this machine
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unusable(f"cannot read the reference {name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _unusable(f"the reference {name} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("command") != "check":
        raise _unusable(f"the reference {name} is not a result of `assay check --json`")
    if document.get("verdict") in ("fail", "error"):
        raise _unusable(f"the reference {name} is a run with the verdict {document['verdict']}")
    try:
        record = CheckRecord.from_json(document["results"])
    except (KeyError, TypeError, AttributeError) as error:
        raise _unusable(f"the reference {name} lacks what a check result holds: {error}") from error
    if not record.samples and not record.tools:
        raise _unusable(f"the reference {name} holds no graded text")
    subject = document.get("subject") or {}
    plan = document["results"].get("plan") or {}
    origin = {"source": "run", "model": subject.get("model"), "verdict": document.get("verdict")}
    return Reference(record, origin, settings_of(subject, plan))


def _unusable(message: str, remedy: str = _REMEDY) -> AssayError:
    return AssayError(message, finding_id="coherence.reference", remedy=remedy)


_GIVE = "give the folder of a checkpoint: --reference-engine hf:PATH"


def reference_folder(spec: str) -> Path:
    """The folder of the checkpoint in `hf:FOLDER?option=value`; AssayError where there is none to
    read, or nothing to run it.

    Costs nothing, so it can be asked before a server is measured for minutes.
    """
    spec = full_spec(spec)
    if not spec.startswith("hf:"):
        raise UsageError(
            f"--reference-engine {spec!r} is not an engine that can be a reference here",
            remedy="write hf:PATH, with the folder of a trusted checkpoint",
            finding_id="coherence.usage",
        )
    from assay.engines.specs import parse_spec, require_packages

    folder = Path(parse_spec(spec).model)
    if not folder.is_dir():
        raise _unusable(
            f"the reference model {folder.name} is not a folder that can be read", _GIVE
        )
    if not (folder / "config.json").is_file():
        raise _unusable(
            f"the reference model {folder.name} is no checkpoint: the folder holds no config.json",
            _GIVE,
        )
    require_packages(f"hf:{folder.name}")
    return folder


class EngineReference:
    """A trusted model in this process, measured stage by stage after the server.

    What it gave for a stage is kept by model files, stage and version of assay, so that a second
    check against the same reference costs nothing; the model is loaded when the first stage is not
    there.
    """

    def __init__(
        self,
        spec: str,
        folder: Path,
        plan: Plan,
        max_model_len: int | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        self.record = CheckRecord()
        self._spec, self._folder, self._max_model_len = full_spec(spec), folder, max_model_len
        self._plan = replace(plan, run_code=False)
        self._progress = progress
        self._side: Measurement | None = None
        self._loaded = False

    @property
    def origin(self) -> dict[str, Any]:
        """Where its answers come from."""
        return {
            "source": "engine",
            "engine": "hf",
            "model": self._folder.name,
            "cached": not self._loaded,
        }

    def has_kept(self, stage: Stage) -> bool:
        """Whether its answers to a stage are there already."""
        return self._place(stage).exists() or (stage.kind == "tools" and bool(self.record.tools))

    def prepare(self, stage: Stage) -> None:
        """Load the model where it will be needed for a stage, so that the stage's own time can be
        told.
        """
        if not self.has_kept(stage):
            self._measurement()

    def run(self, stage: Stage, server: CheckRecord, deadline: float = float("inf")) -> None:
        """Answer a stage: the probes that the server answered in `server`, the tools suite once for
        all concurrencies.
        """
        if stage.kind == "tools" and (self.record.tools or not server.tools):
            return
        answered = {probe.name for probe in server.probes if probe.samples}
        stage = replace(
            stage, tasks=tuple(task for task in stage.tasks if task.probe.name in answered)
        )
        if (stage.kind == "texts" and not stage.tasks) or (
            stage.kind == "scores" and not server.passages
        ):
            return
        place = self._place(stage)
        if place.exists():
            self.record = self.record.with_(
                CheckRecord.from_json(json.loads(place.read_text("utf-8")))
            )
            return
        side = self._measurement()
        able = tuple(task for task in stage.tasks if side.skip_reason(task.probe) is None)
        before = self.record
        side.record = CheckRecord()
        try:
            side.run(replace(stage, tasks=able), f"reference: {stage.name}", deadline, untimed=True)
        finally:
            self.record = before.with_(side.record)
        if (
            time.monotonic() <= deadline
        ):  # a stage that was cut would stand for a whole one in later checks
            write_atomically(place, json.dumps(record_json(side.record)))

    def close(self) -> None:
        """Give back the memory of the model."""
        if self._side is not None:
            self._side.engine.close()

    def _measurement(self) -> Measurement:
        if self._side is None:
            from assay.engines.hf.engine import HfEngine

            with self._progress("reference: loading the model", 1) as advance:
                engine = HfEngine.load(self._spec)
                advance()
            self._side = Measurement(engine, self._plan, self._max_model_len, self._progress)
            self._loaded = True
        return self._side

    def _place(self, stage: Stage) -> Path:
        """The file of a stage: named by all that decides it, the model's files (name, size, time)
        among them.
        """
        try:
            files = sorted(
                (f.name, f.stat().st_size, f.stat().st_mtime_ns)
                for f in self._folder.iterdir()
                if f.is_file()
            )
        except OSError as error:
            message = f"cannot read the reference model {self._folder.name}: {error.strerror}"
            raise _unusable(message, _GIVE) from error
        plan = self._plan
        tasks = [(task.probe.name, task.variant, asdict(task.sampling)) for task in stage.tasks]
        asked = (
            stage.kind,
            tasks,
            stage.texts,
            stage.context,
            stage.repeats,
            plan.seed,
            plan.concurrency,
            plan.token_budget,
        )
        parts = [
            VERSION,
            self._spec.partition("?")[2],
            files,
            asked,
            plan.thinking,
            self._max_model_len,
        ]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
        return cache_dir("references") / f"{digest}.json"


# What a setting may do when it differs from the run that is the reference: severity, and the words
# of the finding.
_SETTINGS: Mapping[str, tuple[Severity, str]] = {
    "model": (
        Severity.WARNING,
        "another model, or another name for it: what is compared may not be the same weights",
    ),
    "server": (
        Severity.INFO,
        "another engine has other kernels: numbers differ in rounding, and speed in all",
    ),
    "version": (Severity.INFO, "kernels, defaults and parsers change between versions"),
    "dtype": (Severity.WARNING, "weights in another number format change every output a little"),
    "quantization": (
        Severity.WARNING,
        "weights with fewer bits lose accuracy, first in exact answers and rare words",
    ),
    "kv_cache_dtype": (
        Severity.WARNING,
        (
            "a KV cache with fewer bits loses accuracy that prose hides: look at tool calls,"
            " doubled words and long contexts, and measure it with `assay kv eval`"
        ),
    ),
    "max_model_len": (
        Severity.INFO,
        "other lengths of needles and depths are asked, and longer texts may be cut",
    ),
    "block_size": (Severity.INFO, "another layout of the KV cache takes other kernels"),
    "enable_prefix_caching": (
        Severity.INFO,
        "later turns read what earlier requests left in the cache",
    ),
    "sliding_window": (Severity.WARNING, "tokens before the window are not seen"),
    "sampling": (
        Severity.WARNING,
        "other sampling fields reach the model: texts are drawn from another distribution",
    ),
    "thinking": (Severity.WARNING, "the chat template asks for reasoning on one side only"),
    "token_budget": (Severity.INFO, "answers are cut at other lengths"),
}


def settings_of(subject: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that may change its texts, as the server reports them and the plan
    asked for them.
    """
    server = subject.get("server") or {}
    root = subject.get("model_root") or subject.get("model")
    sent = subject.get("sent") or {}
    found = {
        "model": str(root).rstrip("/").rpartition("/")[2] if root else None,
        "server": server.get("kind"),
        "max_model_len": subject.get("max_model_len"),
        "sampling": {route: fields.get("neutral") for route, fields in sent.items()} or None,
        **{
            name: server.get(name)
            for name in ("version", "dtype", "quantization", "kv_cache_dtype")
        },
        **{
            name: server.get(name)
            for name in ("block_size", "enable_prefix_caching", "sliding_window")
        },
        **{name: plan.get(name) for name in ("thinking", "token_budget")},
    }
    return {name: value for name, value in found.items() if value is not None}


def changed_settings(now: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[Finding, ...]:
    """A finding for every setting that both runs report and that differs."""
    return tuple(
        Finding(
            id="server.setting_changed",
            severity=severity,
            title=(
                f"{name} is {_shown(now[name])} and was {_shown(before[name])} in the reference:"
                f" {effect}"
            ),
            evidence={"setting": name, "now": now[name], "reference": before[name]},
        )
        for name, (severity, effect) in _SETTINGS.items()
        if name in now and name in before and now[name] != before[name]
    )


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
