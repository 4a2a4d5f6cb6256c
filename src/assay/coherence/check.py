"""`assay check`: measure a running server, compare it with a reference where there is one, and judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.coherence.diagnosis import judge
from assay.coherence.measure import Measurement, Plan
from assay.coherence.record import CheckRecord, Reference
from assay.coherence.reference import measure_reference, read_reference, reference_folder
from assay.coherence.report import build_report
from assay.engines.server.engine import ServerEngine
from assay.errors import AssayError
from assay.options import option
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Report, Verdict, worst


@dataclass(frozen=True)
class CheckOptions(Plan):
    """A plan, how to reach the server, and what to compare it with."""

    model: str | None = option(None, "Model to ask; default: the first the server lists.", apart=True)
    reference: Path | None = option(
        None, "Result of an earlier healthy run (its --json) to compare with.", apart=True
    )
    reference_engine: str | None = option(
        None, "Trusted model to run here on the same prompts: hf:PATH.", metavar="ENGINE", apart=True
    )
    api_key_env: str | None = option(
        None, "Environment variable that holds the API key.", metavar="NAME", apart=True
    )
    timeout: float = option(300.0, "Seconds that one answer may take.", lo=1, hi=86_400, apart=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference is not None and self.reference_engine is not None:
            raise self.usage("give --reference or --reference-engine, not both", "leave one of them out")


def run_check(url: str, options: CheckOptions | None = None, progress: Progress = NO_PROGRESS) -> Report:
    """Check the OpenAI-compatible server at `url` (its root or its /v1).

    Raises AssayError where the server cannot be examined at all. Once something is measured, an interrupt or a dying
    server ends the run, and the report holds what there is.
    """
    options = options or CheckOptions()
    # A reference that cannot be read should not cost the minutes of a run.
    reference = read_reference(options.reference) if options.reference else None
    if options.reference_engine:
        reference_folder(options.reference_engine)
    with ServerEngine.connect(
        url, options.model, api_key_env=options.api_key_env, timeout=options.timeout
    ) as engine:
        subject = engine.describe()
        measurement = Measurement(engine, options, engine.max_model_len, progress)
        record, ended = _measure(engine, measurement)
    interrupted = isinstance(ended, KeyboardInterrupt)
    if options.reference_engine and not interrupted and record.samples:
        try:
            reference = measure_reference(options.reference_engine, options, record, subject, progress)
        except KeyboardInterrupt as interrupt:
            interrupted, ended = True, interrupt
        except AssayError as error:  # what the server has shown stays
            ended = error
    return _report(subject, options, record, reference, ended, interrupted)


def _measure(
    engine: ServerEngine, measurement: Measurement
) -> tuple[CheckRecord, AssayError | KeyboardInterrupt | None]:
    """The record and, where the run ended early, what ended it."""
    before = engine.corrupted_requests()
    ended: AssayError | KeyboardInterrupt | None = None
    try:
        measurement.run()
    except (AssayError, KeyboardInterrupt) as error:
        if isinstance(error, AssayError) and not measurement.record().samples:
            raise
        ended = error
    record = measurement.record()
    after = engine.corrupted_requests() if ended is None else None
    if before is not None and after is not None:
        record = replace(record, counters={"corrupted_requests": after - before})
    return record, ended


def _report(
    subject: Mapping[str, Any],
    options: CheckOptions,
    record: CheckRecord,
    reference: Reference | None,
    ended: AssayError | KeyboardInterrupt | None,
    interrupted: bool,
) -> Report:
    judgement = judge(record, reference.record if reference else None)
    report = build_report(subject, options, record, reference, judgement)
    if isinstance(ended, AssayError):
        report = replace(
            report,
            verdict=worst((report.verdict, ended.verdict)),
            findings=(*report.findings, ended.to_finding()),
        )
    if interrupted and report.verdict is Verdict.PASS:
        # Half a run cannot acquit.
        report = replace(report, verdict=Verdict.INCONCLUSIVE)
    return replace(report, interrupted=interrupted)
