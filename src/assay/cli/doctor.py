"""`assay doctor` and `assay bundle`: which setting breaks a serve command, and the evidence in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from assay.cli.verb import verb
from assay.verdict import Report

HELP = "Evidence of a doctor in one file: show it, or verify and judge it again offline."


@verb(
    "doctor",
    "assay.serving.doctor:DoctorOptions",
    command="-- COMMAND... :: The serve command, such as `vllm serve ./model --kv-cache-dtype fp8`.",
)
def doctor(command: list[str] | None = None, **given: Any) -> Report:
    """Find the setting that breaks a serve command: launch it, bisect its settings, prove the guilty set.

    Each configuration is launched as often as its noise demands. Servers are stopped at every exit, and a
    run that was cut off goes on from there. Exit code 0 the command is as good as its baseline, 1 a guilty
    set was found or the baseline itself fails, 2 nothing could be launched, 3 undecided.
    """
    from assay.cli.progress import show
    from assay.serving.doctor import DoctorOptions
    from assay.serving.run import run_doctor

    options = DoctorOptions.of(given)
    report = run_doctor(command or [], options, show)
    if options.issue and "issue" in report.results:
        print(report.results["issue"])
    return report


@verb("bundle show", bundle="FILE :: What `assay doctor --bundle` wrote.")
def show(bundle: Path) -> Report:
    """Show the verdict, the findings and the files of a bundle. Exit code that of the doctor."""
    from assay.serving.bundle import show_bundle

    return show_bundle(bundle)


@verb("bundle verify", bundle="FILE :: What `assay doctor --bundle` wrote.")
def verify(bundle: Path) -> Report:
    """Hold the files of a bundle against its manifest and judge its starts again. Exit code 0 both hold, 1 not."""
    from assay.serving.bundle import verify_bundle

    return verify_bundle(bundle)
