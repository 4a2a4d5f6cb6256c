"""Phases 5 and 6: what the way of measuring changes, and what tables of the other engine change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.errors import AssayError
from assay.gap.amounts import effect
from assay.gap.baseline import Corners
from assay.gap.bench import Bench, Measured
from assay.gap.configuration import with_placement
from assay.gap.sums import aligned
from assay.kv.hook import Mode

_SKIPPED = ("fidelity.not_engaged", "kv.unsupported", "kv.usage")


def measure_harness(
    bench: Bench, corners: Corners, engine: str
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Every mode, an identity as the control, keys or values alone, and the prefix alone.

    Each against the engine without codec on the same path. The second object says why something was not measured.
    """
    plan = bench.plan
    # As the path has it, so that a mode which it has measured is not measured again.
    wanted = {mode.value: corners.with_codec(engine, mode.value, measured=plan.measured) for mode in Mode}
    wanted["identity"] = corners.with_codec(engine, codec="identity", calibration=None)
    wanted["k_only"] = corners.with_codec(engine, streams="k")
    wanted["v_only"] = corners.with_codec(engine, streams="v")
    # As many recent tokens as are scored stay exact: only what comes before them is coded.
    exact = plan.length - 1 - plan.length // 2
    wanted["prefix_only"] = corners.with_codec(
        engine, Mode.INFORWARD.value, codec=with_placement(plan.codec, f"recent(n={exact})")
    )
    found: dict[str, Measured] = {}
    skipped: dict[str, str] = {}
    for name, config in wanted.items():
        try:
            found[name] = bench.measure(config, config.plain)
        except AssayError as error:
            # A codec of one stream has nothing to do in the other; an engine may lack a mode.
            if error.finding_id not in _SKIPPED:
                raise
            skipped[name] = error.message
    return found, skipped


def measure_tables(bench: Bench, corners: Corners, engine: str) -> dict[str, Measured]:
    """The codec with each calibration, against the engine without codec."""
    anchor = corners.with_codec(engine).plain
    tables = {"reference": bench.plan.calibration, "candidate": bench.plan.other_calibration}
    return {
        name: bench.measure(corners.with_codec(engine, calibration=path), anchor)
        for name, path in tables.items()
        if path
    }


def effects_json(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Effects by name, over the tokens that all of them scored."""
    return {
        name: {"name": name, **effect(sums).to_json()}
        for name, sums in aligned({name: m.seen for name, m in measured.items()}).items()
    }


def difference_json(measured: Mapping[str, Measured], a: str, b: str) -> dict[str, Any]:
    """`b` minus `a`, paired by window."""
    sums = aligned({name: m.seen for name, m in measured.items()})
    return effect(sums[b] - sums[a]).to_json()
