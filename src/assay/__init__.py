"""assay: prove that a fast LLM is still the same model.

Each verb of the command line is a function here, with the same options by the same names. Each
returns a `Report`: a subject that fails is a report whose verdict is `fail`. Where nothing could be
examined (an unreachable server, a missing file) AssayError is raised, and UsageError, which is one,
for an option that makes no sense. Nothing is imported before a function is called, torch only where
a model runs in this process.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assay.coherence.grading import Grade
    from assay.coherence.streaming import StreamingGrader
    from assay.environment import VERSION as __version__
    from assay.errors import AssayError, UsageError
    from assay.progress import Progress
    from assay.verdict import Finding, Report, Severity, Verdict

__all__ = [
    "AssayError",
    "Finding",
    "Grade",
    "Report",
    "Severity",
    "StreamingGrader",
    "UsageError",
    "Verdict",
    "__version__",
    "card",
    "check",
    "compare",
    "doctor",
    "gate",
    "grade",
    "reference",
    "spec",
    "table",
    "verify",
    "watch",
]

_HOMES = {
    "AssayError": "assay.errors:AssayError",
    "Finding": "assay.verdict:Finding",
    "Grade": "assay.coherence.grading:Grade",
    "Report": "assay.verdict:Report",
    "Severity": "assay.verdict:Severity",
    "StreamingGrader": "assay.coherence.streaming:StreamingGrader",
    "UsageError": "assay.errors:UsageError",
    "Verdict": "assay.verdict:Verdict",
    "__version__": "assay.environment:VERSION",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(module), attribute)


def check(url: str, *, progress: Progress | None = None, **options: Any) -> Report:
    """Probe the OpenAI-compatible server at `url`: is its text sane, and how fast is it? Options:
    `assay check --help`.

    `progress(what, steps)` opens a piece of work and gives a function to call after each step, here
    as everywhere.
    """
    from assay.coherence.check import CheckOptions, run_check
    from assay.environment import recorded
    from assay.progress import NO_PROGRESS

    return recorded(run_check(url, CheckOptions.of(options), progress or NO_PROGRESS))


def watch(url: str, **options: Any) -> Report:
    """Watch the server at `url` for `rounds` rounds, or until interrupted: is it still the same
    model? Options: `assay watch --help`.
    """
    from assay.environment import recorded
    from assay.monitor.watch import WatchOptions, run_watch

    return recorded(run_watch(url, WatchOptions.of(options)))


@overload
def grade(output: str | None, **options: Any) -> Grade: ...
@overload
def grade(output: Path, *more: Path) -> Report: ...
def grade(output: str | Path | None, *more: Path, **options: Any) -> Grade | Report:
    """Label a finished text, or files of them.

    A text gives a `Grade` with `.label`, `.kind` and `.onset_char`; its options are `reasoning`,
    `tool_calls` and `finish_reason`, as the server sent them. One or more `Path` give a `Report`.
    """
    if isinstance(output, Path):
        from assay.coherence.grade_files import grade_files
        from assay.environment import recorded

        return recorded(grade_files([str(path) for path in (output, *more)]))
    from assay.coherence.grading import grade as grade_text

    return grade_text(output, **options)


def verify(checkpoint: str | Path, **options: Any) -> Report:
    """Verify a checkpoint: a folder, a file, or `hub:ORG/NAME`. Options: `assay verify --help`."""
    from assay.checkpoint.options import VerifyOptions
    from assay.checkpoint.verify import verify as verify_checkpoint
    from assay.environment import recorded

    return recorded(verify_checkpoint(str(checkpoint), VerifyOptions.of(options)))


def doctor(
    command: str | Sequence[str], *, progress: Progress | None = None, **options: Any
) -> Report:
    """Launch a serve command and find the setting that breaks it. `command` is a text or its words;
    options: `assay doctor --help`.
    """
    import shlex

    from assay.environment import recorded
    from assay.options import DoctorOptions
    from assay.progress import NO_PROGRESS
    from assay.serving.run import run_doctor

    words = shlex.split(command) if isinstance(command, str) else list(command)
    return recorded(run_doctor(words, DoctorOptions.of(options), progress or NO_PROGRESS))


def spec(*sources: str | Path, **options: Any) -> Report:
    """Judge speculative decoding by what an engine leaves: logs, metrics, responses, a URL.
    Options: `assay spec --help`.
    """
    from assay.environment import recorded
    from assay.speculation.options import SpecOptions
    from assay.speculation.spec import examine

    return recorded(examine([str(source) for source in sources], SpecOptions.of(options)))


def compare(
    reference: str | Path, *candidates: str | Path, progress: Progress | None = None, **options: Any
) -> Report:
    """Score candidates and a reference on the same tokens. Engines are written as on the command
    line; options: `assay compare --help`.
    """
    from assay.environment import recorded
    from assay.fidelity.compare import run_compare
    from assay.fidelity.plan_file import plan_from
    from assay.progress import NO_PROGRESS

    engines = {
        "reference": str(reference),
        "candidates": [str(candidate) for candidate in candidates],
    }
    return recorded(
        run_compare(plan_from(engines, options, where="compare"), progress or NO_PROGRESS)
    )


def reference(
    engine: str | Path, *, out: str | Path, progress: Progress | None = None, **options: Any
) -> Report:
    """Score an engine once and store what `run:OUT` needs to stand for it. Options: `assay
    reference --help`.
    """
    from assay.environment import recorded
    from assay.fidelity.plan import ReferenceOptions
    from assay.fidelity.reference import keep_reference
    from assay.progress import NO_PROGRESS

    asked = ReferenceOptions.of({"engine": engine, "out": out, **options})
    return recorded(
        keep_reference(
            asked.plan,
            asked.out,
            dtype=asked.dtype,
            form=asked.format,
            progress=progress or NO_PROGRESS,
        )
    )


def gate(
    contract: str | Path = "assay.toml", *, progress: Progress | None = None, **options: Any
) -> Report:
    """Hold a deployment to the contract in a TOML file. Options: `assay gate --help`; the file:
    docs/gate.md.
    """
    from assay.gates.gate import GateOptions, run_gate
    from assay.progress import NO_PROGRESS

    return run_gate(GateOptions.of({"contract": contract, **options}), progress or NO_PROGRESS)


def card(*reports: str | Path | Report, **options: Any) -> Report:
    """Write a model-card section, results in the Hub's format and a badge. Options: `assay card
    --help`.
    """
    from assay.gates.card import CardOptions, run_card

    found = [Path(report) if isinstance(report, str) else report for report in reports]
    return run_card(found, CardOptions.of(options))


def table(*rows: str | Path, **options: Any) -> Report:
    """Compare the candidates of many runs, from Parquet rows or JSON results. Options: `assay table
    --help`.
    """
    from assay.fidelity.table.sums import TableOptions
    from assay.fidelity.table.verb import run_table

    return run_table(TableOptions.of({"rows": tuple(map(str, rows)), **options}))
