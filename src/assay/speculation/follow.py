"""Read a log as it grows, and tell each change of its health."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

from assay.speculation.combine import combine
from assay.speculation.growing import grow
from assay.speculation.health import assess, sampled_share
from assay.speculation.options import SpecOptions
from assay.speculation.read import Reading
from assay.speculation.run import Run

SAY_SECONDS = 10.0
"""A line is printed whenever the health changes, and otherwise at most this often."""


def follow(
    name: str,
    options: SpecOptions,
    seconds: float | None = None,
    say: Callable[[str], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Run, bool]:
    """Read `name` (a file, or `-`) as it grows, until interrupted, until its end (`-`), or for
    `seconds`.

    Returns:
        The run, and whether it was interrupted.
    """
    tell = say or (lambda text: print(text, file=sys.stderr, flush=True))
    reading, share = Reading(), sampled_share(options.temperature)
    interrupted = False
    health, told = None, -math.inf
    try:
        # What a file already holds is read first, at full speed.
        for batch in grow(
            name, reading.add, None if seconds is None else clock() + seconds, sleep, clock
        ):
            fresh = [o for raw in batch for o in reading.line(raw)]
            if not fresh:
                continue
            evidence = combine(reading.settled())
            now = assess(evidence, share)
            if now.health is not health or clock() - told >= SAY_SECONDS:
                health, told = now.health, clock()
                length = evidence.record.tokens_per_step
                tokens = "" if length is None else f", {length:.2f} tokens per step"
                when = fresh[-1].time or time.strftime("%H:%M:%S")
                tell(f"{when}  {now.health.value}: {now.reason}{tokens}")
    except KeyboardInterrupt:
        interrupted = True
    return Run(reading, combine(reading.settled())), interrupted
