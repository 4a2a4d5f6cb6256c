"""The verbs, one function each: what it says of itself, and the library function that does the
work.

Options come from the dataclass that is named beside it. Nothing is imported before a verb is asked
for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from assay.cli.verb import verb
from assay.errors import AssayError
from assay.progress import Progress
from assay.verdict import Report

BUNDLE_HELP = "Evidence of a doctor in one file: show it, or verify and judge it again offline."
_ENGINE = "hf:MODEL, vllm:MODEL or gguf:FILE, with options after '?'."


@verb(
    "check",
    "assay.coherence.options:CheckOptions",
    url="Root of an OpenAI-compatible server, or its /v1.",
)
def check(url: str, **given: Any) -> Report:
    """Probe a running server: is its text sane, and if so, how fast is it?

    Exit code 0 pass, 1 fail, 2 could not be examined, 3 inconclusive.
    """
    from assay.cli.progress import show
    from assay.coherence.check import run_check
    from assay.coherence.options import CheckOptions

    return run_check(url, CheckOptions.of(given), show)


@verb(
    "watch",
    "assay.monitor.options:WatchOptions",
    url="Root of an OpenAI-compatible server, or its /v1.",
)
def watch(url: str, **given: Any) -> Report:
    """Watch a running server: is it still the same model, and does it still write sane text?

    A light canary asks a round of tiny probes every minute, takes at most 1 % of one stream, and
    raises at most one false alarm of change a month. Serves Prometheus metrics and health pages.
    Ctrl-C ends it and prints a report. Exit code 0 nothing changed, 1 an alarm was raised, 2 it
    never answered, 3 its baseline is not learnt yet.
    """
    from assay.cli.progress import say
    from assay.monitor.options import WatchOptions
    from assay.monitor.watch import run_watch

    return run_watch(url, WatchOptions.of(given), say=say)


@verb("grade", files="FILE... :: Model outputs; `-` reads stdin.")
def grade(files: list[str]) -> Report:
    """Label finished model outputs: ok, degenerate, empty, truncated_reasoning or not_examined.

    A file holds raw text, or the body or stream of a server. Exit code 1 if any text is degenerate
    or empty, else 2 if a file cannot be read, else 3 if reasoning was cut off or an answer could
    not be examined.
    """
    from assay.coherence.grade_files import grade_files

    return grade_files(files)


@verb(
    "verify",
    "assay.checkpoint.options:VerifyOptions",
    checkpoint="Folder, Hub cache entry, .gguf or .safetensors file, or hub:ORG/NAME.",
)
def verify(checkpoint: str, **given: Any) -> Report:
    """Verify a checkpoint: digests, tensors, quantisation, draft head, tokenizer, and the flags to
    serve it with.

    Hashes the files and reads their headers; --values reads every number as well. Opens no pickle.
    Digests are kept, so a second run hashes only what changed. Exit code 0 pass, 1 fail, 2 could
    not be examined, 3 inconclusive: no digest to compare with, or an unknown format.
    """
    from assay.checkpoint.options import VerifyOptions
    from assay.checkpoint.verify import verify as verify_checkpoint
    from assay.cli.progress import show_bytes

    return verify_checkpoint(checkpoint, VerifyOptions.of(given), show_bytes)


@verb(
    "spec",
    "assay.speculation.options:SpecOptions",
    sources=(
        "SOURCE... :: Log files (plain, gzip, bz2, xz; rotated parts together), a /metrics text,"
        " JSON responses, a URL, or `-`."
    ),
)
def spec(sources: list[str], **given: Any) -> Report:
    """Judge speculative decoding by an engine's logs and metrics: healthy, degraded, broken, off,
    or too little to tell.

    Exit code 0 healthy, or degraded and still worth its cost; 1 broken, degraded, or it costs more
    than it earns; 3 off, unknown or insufficient; 2 if a source cannot be read.
    """
    from assay.speculation.options import SpecOptions
    from assay.speculation.spec import examine

    return examine(sources, SpecOptions.of(given))


@verb(
    "compare",
    "assay.fidelity.plan:Plan",
    engines=(
        "REFERENCE CANDIDATE... | PLAN.toml :: hf:MODEL, vllm:MODEL, gguf:FILE, run:DIR or a URL,"
        " with options after '?'."
    ),
)
def compare(engines: list[str], **given: Any) -> Report:
    """Score a reference and candidates on the same tokens; judge KL, Δppl and top-1 by their 95 %
    intervals.

    Exit code 0 ACCEPT, 1 MARGINAL, REJECT or no longer ACCEPT, 2 could not be compared, 3
    inconclusive.
    """
    from assay.cli.progress import say, show
    from assay.fidelity.compare import run_compare
    from assay.fidelity.plan_file import plan_from, read_plan

    if len(engines) == 1 and engines[0].endswith(".toml"):
        plan = read_plan(Path(engines[0]), given)
    else:
        reference, *candidates = engines
        named = {"reference": reference, "candidates": candidates}
        plan = plan_from(named, given, where="the command line")
    return run_compare(plan, show, say=say)


@verb("reference", "assay.fidelity.plan:ReferenceOptions", engine=_ENGINE)
def reference(engine: str, **given: Any) -> Report:
    """Score a reference and store its final states and its output head, so that `run:DIR` needs no
    reference model.

    Goes on where an interrupted run stopped. Exit code 0 stored, 2 could not be stored.
    """
    from assay.cli.progress import show
    from assay.fidelity.keep_reference import keep_reference
    from assay.fidelity.plan import ReferenceOptions

    options = ReferenceOptions.of({"engine": engine, **given})
    return keep_reference(
        options.plan, options.out, dtype=options.dtype, form=options.format, progress=show
    )


@verb(
    "reference pack",
    "assay.fidelity.pack.writer:PackOptions",
    source="DIR|FILE :: Stored reference to pack, or pack to check.",
)
def reference_pack(source: str, **given: Any) -> Report:
    """Put a stored reference into one file that others can check and compare against, or check such
    a file.

    Exit code 0 packed, or whole and signed with the key; 2 it was altered, or the key is another.
    """
    from assay.fidelity.pack.writer import PackOptions, write_pack

    return write_pack(PackOptions.of({"source": source, **given}))


@verb("rerun", "assay.fidelity.plan:RerunOptions", result="JSON that `assay compare --json` wrote.")
def rerun(result: Path, **given: Any) -> Report:
    """Run the comparison of an earlier result again, from the plan that it echoes.

    Exit codes as those of compare.
    """
    from assay.cli.progress import say, show
    from assay.fidelity.compare import run_compare
    from assay.fidelity.plan_file import plan_of_result

    return run_compare(plan_of_result(result, given), show, say=say)


@verb("gate", "assay.gates.gate:GateOptions")
def gate(**given: Any) -> Report:
    """Hold a deployment to its contract (assay.toml): run every section, judge its limits, say what
    changed.

    Exit code 0 all of it holds, 1 a part fails, 2 a part could not be examined, 3 a part is
    undecided.
    """
    from assay.cli.progress import show
    from assay.gates.gate import GateOptions, run_gate

    return run_gate(GateOptions.of(given), show)


@verb(
    "card",
    "assay.gates.card:CardOptions",
    reports="REPORT... :: JSON that other verbs wrote with --json.",
)
def card(reports: list[Path], **given: Any) -> Report:
    """Write a model-card section, results in the Hub's format and a badge from stored reports.

    Exit code 0 written, also if a report says fail; 2 a file is no report, or cannot be written.
    """
    from assay.gates.card import CardOptions, run_card

    return run_card(reports, CardOptions.of(given))


@verb(
    "table",
    "assay.fidelity.table.sums:TableOptions",
    rows="ROWS... :: Parquet rows, results of compare --json, or folders of them.",
)
def table(rows: list[str], **given: Any) -> Report:
    """Compare thousands of candidates in one table with intervals, from rows that may be larger
    than memory.

    Exit code 0 compared, 2 a file holds no rows, or a window occurs twice.
    """
    from assay.fidelity.table.sums import TableOptions
    from assay.fidelity.table.verb import run_table

    return run_table(TableOptions.of({"rows": tuple(rows), **given}))


@verb(
    "doctor",
    "assay.options:DoctorOptions",
    command=(
        "-- COMMAND... :: The serve command, such as `vllm serve ./model --kv-cache-dtype fp8`."
    ),
)
def doctor(command: list[str] | None = None, **given: Any) -> Report:
    """Find the setting that breaks a serve command: launch it, bisect its settings, prove the
    guilty set.

    Each configuration is launched as often as its noise demands. Servers are stopped at every exit,
    and a run that was cut off goes on from there. Exit code 0 the command is as good as its
    baseline, 1 a guilty set was found or the baseline itself fails, 2 nothing could be launched, 3
    undecided.
    """
    from assay.cli.progress import live_table, show
    from assay.options import DoctorOptions
    from assay.progress import NO_PROGRESS, is_terminal
    from assay.serving.run import run_doctor

    options = DoctorOptions.of(given)
    if is_terminal(sys.stderr):
        report = run_doctor(command or [], options, NO_PROGRESS, live_table)
    else:
        report = run_doctor(command or [], options, show)
    if options.issue and "issue" in report.results:
        print(report.results["issue"])
    return report


@verb("bundle show", bundle="FILE :: What `assay doctor --bundle` wrote.")
def bundle_show(bundle: Path) -> Report:
    """Show the verdict, the findings and the files of a bundle. Exit code that of the doctor."""
    from assay.serving.bundle_check import show_bundle

    return show_bundle(bundle)


@verb("bundle verify", bundle="FILE :: What `assay doctor --bundle` wrote.")
def bundle_verify(bundle: Path) -> Report:
    """Compare the files of a bundle with its manifest and judge its starts again. Exit code 0 both
    agree, 1 not.
    """
    from assay.serving.bundle_check import verify_bundle

    return verify_bundle(bundle)


@verb(
    "diff",
    before="A.json :: JSON that a verb wrote with --json.",
    after="B.json :: JSON that the same verb wrote later.",
)
def diff(before: Path, after: Path) -> Report:
    """Lay two reports of one verb side by side: what became worse, better or only other.

    Exit code 0 nothing is worse, 1 something is, 2 a file is no report or the verbs differ.
    """
    from assay.report.side_by_side import diff as compare_reports

    return compare_reports(before, after)


@verb("demo")
def demo() -> Report:
    """Serve a small model on this machine with vLLM, check it, damage a copy of it, and check that.

    The first run installs vLLM's CPU build into a private environment and builds the model (about 4
    GB in the cache).
    """
    from assay.cli.progress import show
    from assay.demo.run import run_demo
    from assay.report.console import side_by_side

    report, pair = run_demo(show)
    side_by_side(pair)
    return report


def prepare_demo() -> int:
    """Install and build what demo and tests need, so that neither waits for it later; returns the
    exit code.
    """
    from assay.demo.prepare import prepare

    return _made(prepare)


def prepare_vllm() -> int:
    """Install vLLM's environment, for which assay's core is enough; returns the exit code."""
    from assay.demo.vllm_environment import vllm_python

    return _made(vllm_python)


def _made(make: Callable[[Progress], object]) -> int:
    from assay.cli.progress import show

    try:
        make(show)
    except AssayError as error:
        print(f"assay: {error.message}\n  {error.remedy}", file=sys.stderr)
        return error.verdict.exit_code
    return 0
