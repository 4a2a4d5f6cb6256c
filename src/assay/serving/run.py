"""Run a doctor from a command line to its report: what it needs is there, it is alone, and it can be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from assay.errors import UsageError
from assay.progress import NO_PROGRESS, Progress
from assay.serving.bundle import write_bundle
from assay.serving.command import read_command
from assay.serving.doctor import Doctor, DoctorOptions
from assay.serving.launch import alone, require_disk, require_program
from assay.serving.lint import run_lint
from assay.serving.report import build_report
from assay.verdict import Report


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
    if options.bundle is not None and not options.bundle.expanduser().absolute().parent.is_dir():
        raise UsageError(f"--bundle {options.bundle}: its folder does not exist", remedy="make it first")
    require_program(command)
    doctor = Doctor(command, options, progress)
    require_disk(doctor.folder)
    with _interruptible(), alone(30 * options.budget, doctor.say), watch(doctor):
        diagnosis = doctor.run()
    report = build_report(diagnosis)
    if options.bundle is not None:
        written = write_bundle(options.bundle, report, diagnosis)
        doctor.say(f"evidence written to {written}")
    return report
