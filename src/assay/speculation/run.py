"""A run as its sources show it, before it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.speculation.combine import Evidence, combine
from assay.speculation.measured import Measured, median
from assay.speculation.options import SpecOptions
from assay.speculation.plan import Plan
from assay.speculation.read import Reading
from assay.speculation.sources import open_source
from assay.verdict import Finding

ROUND_TRIP = 16
"""Requests sent to each server where a baseline is a server and --requests is not given."""


@dataclass(frozen=True)
class Run:
    """One run as it was read: its evidence, and what came with it. `race` is the speed against the
    baseline's.
    """

    reading: Reading
    evidence: Evidence
    extra: Sequence[Finding] = ()
    results: dict[str, Any] = field(default_factory=dict)
    race: Measured | None = None

    @property
    def speed(self) -> Measured | None:
        """Generation throughput, tokens per second: of the speculative windows, or of a run without
        any.
        """
        own = [
            w.load.generation_throughput
            for w in self.evidence.windows
            if w.load.generation_throughput
        ]
        return median(own or self.reading.speeds)


def read_run(plan: Plan, options: SpecOptions) -> Run:
    """Read what a plan names.

    Raises:
        AssayError: A source cannot be read, or the server cannot be reached.
    """
    if plan.url is None:
        reading = read_files(plan.files)
        return Run(reading, combine(reading.settled()))
    from assay.speculation.live import watch

    requests = options.requests or (ROUND_TRIP if plan.rival else 0)
    live = watch(
        plan.url, options.interval, requests, plan.rival, options.api_key_env, options.timeout
    )
    return Run(live.reading, live.evidence, live.findings, {"live": live.to_json()}, live.race)


def read_files(names: Sequence[str]) -> Reading:
    """Read files, or standard input, as one run."""
    reading = Reading()
    for name in names:
        reading.add(open_source(name))
    return reading
