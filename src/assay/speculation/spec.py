"""`assay spec`: read the sources, judge them, and report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from assay.errors import UsageError
from assay.speculation.judge import Examined, SpecOptions, is_url, judge_run
from assay.speculation.read import Reading
from assay.speculation.record import combine
from assay.speculation.sources import in_time_order, open_source
from assay.verdict import Report


def examine(sources: Sequence[str], options: SpecOptions | None = None) -> Report:
    """Judge the run that the sources show. AssayError where a source cannot be read."""
    chosen = options or SpecOptions()
    if not sources:
        raise UsageError("no source given", finding_id="speculation.usage", remedy="assay spec LOG")
    _validate(chosen, sources)
    if chosen.follow:
        from assay.speculation.live import follow

        return follow(sources[0], chosen, chosen.seconds)
    run = _read(sources, chosen)
    base = _read(chosen.baseline, replace(chosen, requests=0)) if chosen.baseline else None
    report = judge_run(run, list(sources), chosen, base)
    if chosen.lossless:
        from assay.speculation.lossless import check_lossless

        report = check_lossless(report, next(filter(is_url, sources)), chosen)
    return report


def _validate(options: SpecOptions, sources: Sequence[str]) -> None:
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
    if options.seconds is not None and not (options.follow and 0 < options.seconds < float("inf")):
        raise refuse("--for takes the seconds that --follow lasts")
    if options.follow and (len(sources) != 1 or options.baseline or options.lossless):
        raise refuse("--follow takes one log and nothing to compare with")


def read_files(names: Sequence[str], reading: Reading | None = None) -> Reading:
    """Read files, or standard input, as one run."""
    result = reading or Reading()
    unique = {name if name == "-" else os.path.realpath(name): name for name in names}
    for name in in_time_order(list(unique.values())):
        result.add(open_source(name))
    return result


def _read(sources: Sequence[str], options: SpecOptions) -> Examined:
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
