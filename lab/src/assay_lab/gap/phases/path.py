"""The direct differences: each step of the path from one engine to the other, measured alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from assay_lab.gap.configuration import Configuration, Corners
from assay_lab.gap.engine_steps import Step, engine_steps
from assay_lab.gap.run_cache import RunCache
from assay_lab.kv.measured import Measured


def steps_of(run_cache: RunCache, corners: Corners) -> list[Step]:
    """The steps of the bucket `engine`, by what both engines say of themselves."""
    if corners.same_engine:
        return [Step("engine.none", run_cache.plan.candidate)]
    dtypes = [
        run_cache.facts.get(s, {}).get("dtype")
        for s in (run_cache.plan.reference, run_cache.plan.candidate)
    ]
    return engine_steps(run_cache.plan.reference, run_cache.plan.candidate, (dtypes[0], dtypes[1]))


def measure_direct(run_cache: RunCache, steps: Sequence[Step], found: dict[str, Measured]) -> None:
    """Each step but the first against the engine before it, in runs of their own; what is there is
    left alone.
    """
    mode = run_cache.plan.base
    for before, step in pairwise(steps):
        if step.name not in found:
            found[step.name] = run_cache.measure(
                Configuration(step.engine, mode), Configuration(before.engine, mode)
            )
