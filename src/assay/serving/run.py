"""A doctor from a command line to its report, alone on its machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from assay.errors import UsageError
from assay.options import DoctorOptions
from assay.progress import NO_PROGRESS, Progress
from assay.serving.command import read_command
from assay.serving.lint import run_lint
from assay.verdict import Report

if TYPE_CHECKING:  # reading a command needs nothing that asks a server
    from assay.serving.doctor import Doctor


@contextmanager
def _interruptible() -> Iterator[None]:
    """A request to end is an interrupt, so that servers are stopped (the command line sets this by
    itself).
    """
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

    `watch` opens what shows the doctor while it runs. Raises AssayError where nothing can be
    launched.
    """
    command = read_command(words, options.command_template)
    if options.lint:
        return run_lint(command, options.engine_version)
    # What asks a server is not needed to read a command.
    from assay.serving.bundle import write_bundle
    from assay.serving.doctor import Doctor
    from assay.serving.launch import alone, require_program
    from assay.serving.report import build_report

    if options.bundle is not None and not options.bundle.expanduser().absolute().parent.is_dir():
        raise UsageError(
            f"--bundle {options.bundle}: its folder does not exist", remedy="make it first"
        )
    require_program(command)
    doctor = Doctor(command, options, progress)
    doctor.starts.require_room()
    with ExitStack() as stack:
        stack.enter_context(_interruptible())
        stack.enter_context(alone(30 * options.budget, doctor.starts.say))
        if options.ray:
            from assay.serving.ray_starts import RayStarts

            doctor.starts.cluster = stack.enter_context(
                RayStarts(options.ray, options.workers, progress, command, options.api_key_env)
            )
        with watch(doctor):
            diagnosis = doctor.run()
        report = build_report(diagnosis)
        if doctor.starts.cluster:
            environment = {**report.environment, "cluster": doctor.starts.cluster.facts()}
            report = replace(
                report,
                environment=environment,
                findings=(*report.findings, *doctor.starts.cluster.findings()),
            )
    if options.bundle is not None:
        written = write_bundle(options.bundle, report, diagnosis)
        doctor.starts.say(f"evidence written to {written}")
    return report
