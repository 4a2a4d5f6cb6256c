"""`assay spec`: read the sources, judge them, and report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from assay.errors import UsageError
from assay.speculation.judge import Examined, Options, is_url, judge_run
from assay.speculation.read import Reading
from assay.speculation.record import combine
from assay.speculation.sources import in_time_order, open_source
from assay.verdict import Report

MAX_INTERVAL = 86_400.0
"""Longest time between two scrapes, in seconds."""


def examine(sources: Sequence[str], options: Options | None = None) -> Report:
    """Judge the run that the sources show. AssayError where a source cannot be read."""
    chosen = options or Options()
    if not sources:
        raise UsageError("no source given", finding_id="speculation.usage", remedy="assay spec LOG")
    _validate(chosen, sources)
    run = _read(sources, chosen)
    base = _read(chosen.baseline, replace(chosen, requests=0)) if chosen.baseline else None
    report = judge_run(run, list(sources), chosen, base)
    if chosen.lossless:
        from assay.speculation.lossless import check_lossless

        report = check_lossless(report, next(filter(is_url, sources)), chosen)
    return report


def _validate(options: Options, sources: Sequence[str]) -> None:
    """Refuse what makes no sense before anything is waited for."""
    urls = [s for s in sources if is_url(s)]

    def refuse(message: str, remedy: str = "") -> UsageError:
        return UsageError(message, finding_id="speculation.usage", remedy=remedy)

    if [*sources, *options.baseline].count("-") > 1:
        raise refuse(
            "standard input can be read once only, and it is named twice", "write one of them to a file"
        )
    if options.lossless and len(urls) != 1:
        raise refuse("--lossless compares two running servers", "assay spec URL --lossless OTHER_URL")
    if options.requests and not urls:
        raise refuse(
            "--requests are sent to a running server, and none is given", "assay spec URL --requests N"
        )
    if not 0 <= options.interval < MAX_INTERVAL or options.requests < 0:
        raise refuse(f"--interval takes 0 to {MAX_INTERVAL:g} seconds, --requests 0 or more")
    if options.prompts < 1 or options.samples < 0:
        raise refuse("--prompts must be at least 1, --samples at least 0")
    if options.cost_ratio is not None and not 0 <= options.cost_ratio < 100:
        raise refuse(
            f"--cost-ratio takes 0 to 100 target steps a draft token, got {options.cost_ratio:g}", "0.1"
        )


def read_files(names: Sequence[str], reading: Reading | None = None) -> Reading:
    """Read files, or standard input, as one run."""
    result = reading or Reading()
    unique = {name if name == "-" else os.path.realpath(name): name for name in names}
    for name in in_time_order(list(unique.values())):
        result.add(open_source(name))
    return result


def _read(sources: Sequence[str], options: Options) -> Examined:
    urls = [s for s in sources if is_url(s)]
    if not urls:
        reading = read_files(sources)
        return Examined(reading, combine(reading.settled()))
    if len(sources) > 1:
        raise UsageError(
            "a running server is examined by itself", finding_id="speculation.usage",
            remedy="give one URL, or only files",
        )  # fmt: skip
    from assay.speculation.live import watch

    live = watch(urls[0], options)
    return Examined(live.reading, live.evidence, live.findings, {"live": live.to_json()})
