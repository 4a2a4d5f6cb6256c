"""Run a doctor from a command line to its report: what it needs is there, it is alone, and it can be interrupted."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from assay.errors import AssayError, UsageError
from assay.options import DoctorOptions
from assay.progress import NO_PROGRESS, Progress
from assay.serving.command import ServeCommand, read_command, table_notice
from assay.verdict import Finding, Report, Severity, Table, Verdict

if TYPE_CHECKING:
    from assay.serving.doctor import Doctor


@contextmanager
def _interruptible() -> Iterator[None]:
    """A request to end is an interrupt, so that servers are stopped (the command line sets this by itself)."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_doctor(
    words: Sequence[str],
    options: DoctorOptions,
    progress: Progress = NO_PROGRESS,
    watch: Callable[[Doctor], AbstractContextManager[object]] = nullcontext,
) -> Report:
    """Find the guilty settings of a serve command; with `lint`, read it only.

    `watch` opens what shows the doctor while it runs. Raises AssayError where nothing can be launched.
    """
    command = read_command(words, options.command_template)
    if options.lint:
        return run_lint(command, options.engine_version)
    # What asks a server is not needed to read a command.
    from assay.serving.bundle import write_bundle
    from assay.serving.doctor import Doctor
    from assay.serving.launch import alone, require_disk, require_program
    from assay.serving.report import build_report

    if options.bundle is not None and not options.bundle.expanduser().absolute().parent.is_dir():
        raise UsageError(f"--bundle {options.bundle}: its folder does not exist", remedy="make it first")
    require_program(command)
    doctor = Doctor(command, options, progress)
    require_disk(doctor.folder)
    with ExitStack() as stack:
        stack.enter_context(_interruptible())
        stack.enter_context(alone(30 * options.budget, doctor.say))
        if options.ray:
            from assay.engines.ray_starts import Starts

            doctor.cluster = stack.enter_context(
                Starts(options.ray, options.workers, progress, command, options.api_key_env)
            )
        with watch(doctor):
            diagnosis = doctor.run()
        report = build_report(diagnosis)
        if doctor.cluster:
            environment = {**report.environment, "cluster": doctor.cluster.facts()}
            report = replace(report, environment=environment, findings=(*report.findings, *doctor.cluster.findings()))
    if options.bundle is not None:
        written = write_bundle(options.bundle, report, diagnosis)
        doctor.say(f"evidence written to {written}")
    return report


# -----------------------------------------------------------------------------
# `assay doctor --lint`: what is known to break about a command line and its checkpoint, without a launch.


def serve_arguments(command: ServeCommand) -> str:
    """The options of a `vllm serve` command as `assay verify --serve-args` takes them."""
    words = [*command.fixed, *(w for s in command.settings for w in s.words)]
    variables = [f"{n}={shlex.quote(v)}" for n, v in command.variables([s.name for s in command.settings]).items()]
    return " ".join([*variables, shlex.join(words)])


def serving_rules(command: ServeCommand, version: str | None) -> list[Finding]:
    """What verify's serving rules say of the command; nothing for other engines, or where the model is not here."""
    model = Path(command.model).expanduser() if command.model else None
    if command.engine != "vllm" or model is None or not model.exists():
        return []
    from assay.checkpoint.files import VerifyOptions
    from assay.checkpoint.verify import verify

    options = VerifyOptions(
        hashing="none", serve_args=serve_arguments(command), engine_version=version, allow_unverified=True
    )
    return [f for f in verify(str(model), options).findings if f.severity is not Severity.INFO]


def run_lint(command: ServeCommand, version: str | None) -> Report:
    """The report of `--lint`: pass, or fail where the rules find an error; inconclusive where there is no table."""
    number = version.partition("==")[2] if version else None
    notice = table_notice(command, number)
    findings: list[Finding] = []
    try:
        findings += serving_rules(command, version)
    except AssayError as error:
        findings.append(error.to_finding())
    if notice:
        findings.append(Finding("server.no_table", Severity.WARNING, notice))
    model = Path(command.model).expanduser() if command.model else None
    if command.engine == "vllm" and (model is None or not model.exists()):
        findings.append(
            Finding(
                "server.not_examined", Severity.INFO, f"the checkpoint {command.model or ''} is not a folder here: only the command was read",
                remedies=("name a folder, or run assay verify hub:ORG/NAME --serve-args '…'",),
            )
        )  # fmt: skip
    rows = [(s.name, s.value or "", s.safe_value, s.safe.reason) for s in command.settings]
    examined = command.engine == "vllm" and model is not None and model.exists()
    bad = any(f.severity is Severity.ERROR for f in findings)
    verdict = Verdict.FAIL if bad else Verdict.PASS if examined else Verdict.INCONCLUSIVE
    settings = [
        {"name": s.name, "value": s.value, "safe_value": s.safe_value, "role": "undecided", "engaged": None, "evidence": s.safe.reason}
        for s in command.settings
    ]  # fmt: skip
    return Report(
        command="doctor", verdict=verdict, subject={"command": command.text(frozenset(s.name for s in command.settings))},
        findings=findings,
        results={
            "lint": True, "engine": command.engine, "settings": settings, "guilty": [], "launches": 0, "minutes": 0.0,
            "baseline": {"command": command.text(frozenset()), "verdict": None},
            "given": {"command": command.text(frozenset(s.name for s in command.settings)), "verdict": None}, "best": None,
        },
        blocks=(Table("Settings that differ from the baseline", ("setting", "value", "baseline", "why"), rows),),
        summary="" if bad or not examined else "No rule knows a fault of this command with this checkpoint.",
    )  # fmt: skip
