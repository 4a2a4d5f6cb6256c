"""The verbs as functions, each with the options of the command line by the same names.

Nothing is imported before a function is called, torch only where a model runs in this process.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

if TYPE_CHECKING:
    from assay.coherence.grading import Grade
    from assay.option_types import (
        CardArgs,
        CheckArgs,
        CompareArgs,
        DoctorArgs,
        GateArgs,
        PackArgs,
        ReferenceArgs,
        RerunArgs,
        SpecArgs,
        TableArgs,
        VerifyArgs,
        WatchArgs,
    )
    from assay.progress import Progress
    from assay.verdict import Report

Place = str | PathLike[str]


def check(url: str, *, progress: Progress | None = None, **options: Unpack[CheckArgs]) -> Report:
    """Probe an OpenAI-compatible server: is its text sane, and how fast is it?

    Args:
        url: Root of the server, or its `/v1`.
        progress: `progress(what, steps)` opens a piece of work and gives a function to call after
            each step.
        **options: Those of `assay check --help`, with underscores.

    Returns:
        The report; a server that writes nonsense is a report whose verdict is `fail`.

    Raises:
        UsageError: An option that does not exist, or a value that makes no sense.
        AssayError: The server could not be examined.
    """
    from assay.coherence.check import run_check
    from assay.coherence.options import CheckOptions
    from assay.environment import recorded
    from assay.progress import NO_PROGRESS

    return recorded(run_check(url, CheckOptions.of(options), progress or NO_PROGRESS))


def watch(url: str, **options: Unpack[WatchArgs]) -> Report:
    """Watch a server for `rounds` rounds, or until interrupted: is it still the same model?

    Args:
        url: Root of the server, or its `/v1`.
        **options: Those of `assay watch --help`, with underscores.

    Returns:
        The report of what was seen; an alarm makes its verdict `fail`.

    Raises:
        UsageError: An option that does not exist, or a value that makes no sense.
        AssayError: The server never answered.
    """
    from assay.environment import recorded
    from assay.monitor.options import WatchOptions
    from assay.monitor.watch import run_watch

    return recorded(run_watch(url, WatchOptions.of(options)))


@overload
def grade(
    text: str | None,
    *,
    reasoning: str | None = None,
    tool_calls: Sequence[Any] = (),
    finish_reason: str | None = None,
) -> Grade: ...
@overload
def grade(text: Path, *more: Path) -> Report: ...
def grade(text: str | Path | None, *more: Path, **sent: Any) -> Grade | Report:
    """Label a finished text: is it sane, and if not, where does it go wrong?

    Args:
        text: The whole answer, None where the server sent none.
        *more: No longer for use: `grade_files` grades files.
        **sent: `reasoning`, `tool_calls` and `finish_reason` as the server sent them.

    Returns:
        The grade, with `.label`, `.kind` and `.onset_char` (code points).
    """
    if isinstance(text, Path):
        if sent:
            raise TypeError(f"grade() of a path takes no {', '.join(sent)}")
        warnings.warn(
            "assay.grade of a path is called assay.grade_files; the old form goes with 0.4",
            DeprecationWarning,
            stacklevel=2,
        )
        return grade_files(text, *more)
    if more:
        raise TypeError("grade() takes one text; assay.grade_files takes files")
    from assay.coherence.grading import grade as grade_text

    return grade_text(text, **sent)


def grade_files(*paths: Place) -> Report:
    """Label model outputs in files: raw text, or the body or stream of any API.

    Args:
        *paths: The files; a file that cannot be read is a finding of the report.

    Returns:
        The report; `results["files"]` has a row for each file.
    """
    from assay.coherence.grade_files import grade_files as graded
    from assay.environment import recorded

    return recorded(graded([fspath(path) for path in paths]))


def verify(checkpoint: Place, **options: Unpack[VerifyArgs]) -> Report:
    """Verify a checkpoint: digests, headers, tensors, quantisation, draft head, tokenizer, flags.

    Args:
        checkpoint: A folder, a file, or `hub:ORG/NAME`.
        **options: Those of `assay verify --help`, with underscores.

    Returns:
        The report; a damaged checkpoint is a report whose verdict is `fail`.

    Raises:
        UsageError: An option that does not exist, or a value that makes no sense.
        AssayError: There is no checkpoint, or it cannot be read.
    """
    from assay.checkpoint.options import VerifyOptions
    from assay.checkpoint.verify import verify as verify_checkpoint
    from assay.environment import recorded

    return recorded(verify_checkpoint(fspath(checkpoint), VerifyOptions.of(options)))


def doctor(
    command: str | Sequence[str], *, progress: Progress | None = None, **options: Unpack[DoctorArgs]
) -> Report:
    """Launch a serve command and find the setting that breaks it.

    Args:
        command: The command as a text, or its words.
        progress: As for `check`.
        **options: Those of `assay doctor --help`, with underscores.

    Returns:
        The report; a guilty setting makes its verdict `fail`.

    Raises:
        UsageError: The command or an option makes no sense.
        AssayError: Nothing could be launched.
    """
    import shlex

    from assay.environment import recorded
    from assay.options import DoctorOptions
    from assay.progress import NO_PROGRESS
    from assay.serving.run import run_doctor

    words = shlex.split(command) if isinstance(command, str) else list(command)
    return recorded(run_doctor(words, DoctorOptions.of(options), progress or NO_PROGRESS))


def bundle_show(bundle: Place) -> Report:
    """What a bundle of a doctor holds: verdict, findings, files.

    Args:
        bundle: What `assay doctor --bundle` wrote.

    Raises:
        AssayError: The file is no bundle.
    """
    from assay.serving.bundle_check import show_bundle

    return show_bundle(Path(bundle))


def bundle_verify(bundle: Place) -> Report:
    """Compare the files of a bundle with its manifest, and judge its starts again.

    Args:
        bundle: What `assay doctor --bundle` wrote.

    Returns:
        The report; it is inconclusive where the bundle holds no start.

    Raises:
        AssayError: The file is no bundle.
    """
    from assay.serving.bundle_check import verify_bundle

    return verify_bundle(Path(bundle))


def spec(*sources: Place, **options: Unpack[SpecArgs]) -> Report:
    """Judge speculative decoding by an engine's logs, metrics or responses.

    Args:
        *sources: Logs, metrics pages, responses as files, or the URL of a server.
        **options: Those of `assay spec --help`, with underscores.

    Returns:
        The report; `results["health"]` says how the speculation does.

    Raises:
        UsageError: An option that does not exist, or a value that makes no sense.
        AssayError: A source cannot be read.
    """
    from assay.environment import recorded
    from assay.speculation.options import SpecOptions
    from assay.speculation.spec import examine

    return recorded(examine([fspath(source) for source in sources], SpecOptions.of(options)))


def compare(
    reference: Place,
    *candidates: Place,
    progress: Progress | None = None,
    **options: Unpack[CompareArgs],
) -> Report:
    """Score candidates and a reference on the same tokens, and judge the difference.

    Args:
        reference: An engine as on the command line, such as `hf:./model`, or `run:DIR`.
        *candidates: Engines that are compared with it.
        progress: As for `check`.
        **options: Those of `assay compare --help`, with underscores.

    Returns:
        The report; `results["grade"]` is ACCEPT, MARGINAL, REJECT or INCONCLUSIVE.

    Raises:
        UsageError: An engine or an option makes no sense.
        AssayError: An engine could not be loaded, or cannot do what is asked.
    """
    from assay.environment import recorded
    from assay.fidelity.compare import run_compare
    from assay.fidelity.plan_file import plan_from
    from assay.progress import NO_PROGRESS

    engines = {"reference": fspath(reference), "candidates": [fspath(c) for c in candidates]}
    plan = plan_from(engines, dict(options), where="compare")
    return recorded(run_compare(plan, progress or NO_PROGRESS))


def rerun(
    result: Place, *, progress: Progress | None = None, **options: Unpack[RerunArgs]
) -> Report:
    """Run the comparison of an earlier result again, from the plan that it holds.

    Args:
        result: JSON that `assay compare --json` wrote.
        progress: As for `check`.
        **options: Those of `assay rerun --help`, with underscores.

    Raises:
        UsageError: The file holds no comparison, or an option makes no sense.
        AssayError: An engine could not be loaded, or cannot do what is asked.
    """
    from assay.environment import recorded
    from assay.fidelity.compare import run_compare
    from assay.fidelity.plan_file import plan_of_result
    from assay.progress import NO_PROGRESS

    plan = plan_of_result(Path(result), dict(options))
    return recorded(run_compare(plan, progress or NO_PROGRESS))


def reference(
    engine: Place, *, out: Place, progress: Progress | None = None, **options: Unpack[ReferenceArgs]
) -> Report:
    """Score an engine once and store what `run:OUT` needs to stand for it.

    Args:
        engine: An engine as on the command line, such as `hf:./model`.
        out: The folder to write.
        progress: As for `check`.
        **options: Those of `assay reference --help`, with underscores.

    Raises:
        UsageError: The engine or an option makes no sense.
        AssayError: The engine could not be loaded, or gives no states.
    """
    from assay.environment import recorded
    from assay.fidelity.keep_reference import keep_reference
    from assay.fidelity.plan import ReferenceOptions
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


def reference_pack(source: Place, **options: Unpack[PackArgs]) -> Report:
    """Put a stored reference into one file (`out`), or check such a file.

    Args:
        source: The folder of a stored reference, or a pack.
        **options: Those of `assay reference pack --help`, with underscores.

    Raises:
        UsageError: A key or an option makes no sense.
        AssayError: The pack is damaged, altered, or signed with another key.
    """
    from assay.environment import recorded
    from assay.fidelity.pack.writer import PackOptions, write_pack

    return recorded(write_pack(PackOptions.of({"source": fspath(source), **options})))


def gate(
    contract: Place = "assay.toml", *, progress: Progress | None = None, **options: Unpack[GateArgs]
) -> Report:
    """Hold a deployment to its contract: run every section, judge its limits, say what changed.

    Args:
        contract: The TOML file, see docs/gate.md.
        progress: As for `check`.
        **options: Those of `assay gate --help`, with underscores.

    Raises:
        UsageError: The contract, the baseline or an option makes no sense.
    """
    from assay.gates.gate import GateOptions, run_gate
    from assay.progress import NO_PROGRESS

    return run_gate(GateOptions.of({"contract": contract, **options}), progress or NO_PROGRESS)


def card(*reports: Place | Report, **options: Unpack[CardArgs]) -> Report:
    """Write a model-card section, results in the Hub's format and a badge.

    Args:
        *reports: Reports, or files with their JSON.
        **options: Those of `assay card --help`, with underscores.

    Raises:
        UsageError: A file holds no report, or an option makes no sense.
        AssayError: A file cannot be written.
    """
    from assay.gates.card import CardOptions, run_card

    found = [Path(r) if isinstance(r, str | PathLike) else r for r in reports]
    return run_card(found, CardOptions.of(options))


def diff(before: Place, after: Place) -> Report:
    """Lay two reports of one verb side by side: what became worse, better or only other.

    Args:
        before: JSON that a verb wrote with `--json`.
        after: JSON that the same verb wrote later, or of another deployment.

    Raises:
        AssayError: A file is no report of assay, or the verbs differ.
    """
    from assay.report.side_by_side import diff as lay_side_by_side

    return lay_side_by_side(before, after)


def table(*rows: Place, **options: Unpack[TableArgs]) -> Report:
    """Compare the candidates of many runs in one table, with intervals.

    Args:
        *rows: Parquet rows, results of `assay compare --json`, or folders of them.
        **options: Those of `assay table --help`, with underscores.

    Raises:
        UsageError: An option makes no sense.
        AssayError: A file holds no rows, or a window occurs twice.
    """
    from assay.fidelity.table.sums import TableOptions
    from assay.fidelity.table.verb import run_table

    return run_table(TableOptions.of({"rows": tuple(map(fspath, rows)), **options}))
