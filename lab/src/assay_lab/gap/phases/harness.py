"""What the way of measuring changes, and what tables of the other engine change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.errors import AssayError
from assay_lab.gap.buckets import aligned, effect
from assay_lab.gap.configuration import Corners, with_placement
from assay_lab.gap.run_cache import RunCache
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.measured import Measured

_SKIPPED = ("fidelity.not_engaged", "kv.unsupported", "kv.usage")


def measure_harness(
    run_cache: RunCache, corners: Corners, engine: str, found: dict[str, Measured]
) -> dict[str, str]:
    """Every mode, an identity as the control, keys or values alone, and the prefix alone; returns
    why some were not.

    Each against the engine without codec on the same path.
    """
    plan = run_cache.plan
    # As the path has it, so that a mode which it has measured is not measured again.
    wanted = {
        mode.value: corners.with_codec(engine, mode.value, measured=plan.measured) for mode in Mode
    }
    wanted["identity"] = corners.with_codec(engine, codec="identity", calibration=None)
    wanted["k_only"] = corners.with_codec(engine, streams="k")
    wanted["v_only"] = corners.with_codec(engine, streams="v")
    # As many recent tokens as are scored stay exact: only what comes before them is coded.
    exact = plan.length - 1 - plan.length // 2
    wanted["prefix_only"] = corners.with_codec(
        engine, Mode.INFORWARD.value, codec=with_placement(plan.codec, f"recent(n={exact})")
    )
    skipped: dict[str, str] = {}
    for name, config in wanted.items():
        try:
            found[name] = run_cache.measure(config, config.plain)
        except AssayError as error:
            # A codec of one stream has nothing to do in the other; an engine may lack a mode.
            if error.finding_id not in _SKIPPED:
                raise
            skipped[name] = error.message
    return skipped


def measure_tables(
    run_cache: RunCache, corners: Corners, engine: str, found: dict[str, Measured]
) -> None:
    """The codec with each calibration, against the engine without codec."""
    tables = {
        "reference": run_cache.plan.calibration,
        "candidate": run_cache.plan.other_calibration,
    }
    for name, path in tables.items():
        config = corners.with_codec(engine, calibration=path)
        found[name] = run_cache.measure(config, config.plain)


def effects_json(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Effects by name, over the tokens that all of them scored."""
    return {
        name: {"name": name, **effect(sums).to_json()}
        for name, sums in aligned({name: m.seen for name, m in measured.items()}).items()
    }


def tables_json(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Effects of both calibrations, and their difference paired by window."""
    found = effects_json(measured)
    if len(measured) == 2:
        sums = aligned({name: m.seen for name, m in measured.items()})
        found["candidate_minus_reference"] = effect(sums["candidate"] - sums["reference"]).to_json()
    return found
