"""A plan from plain data: a TOML file, or the plan that a result echoes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.fidelity.plan import Plan, usage_error
from assay.files import json_of


def read_plan(path: Path, overrides: Mapping[str, Any]) -> Plan:
    """The plan in a TOML file, with what the command line says on top; UsageError names what is
    wrong in it.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise usage_error(
            f"cannot read the plan {path}: {error.strerror}", "give a TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise usage_error(
            f"{path} is not TOML: {error}", "see docs/compare.md for an example"
        ) from error
    return plan_from(data, overrides, where=str(path))


def plan_from(data: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> Plan:
    """A plan from plain data, such as a TOML file or the plan echoed in a result;
    `overrides` win.
    """
    values = Plan.read(data, where) | Plan.read(overrides)
    missing = [name for name in ("reference", "candidates") if not values.get(name)]
    if missing:
        raise usage_error(
            f"{where} names no {' and no '.join(n.rstrip('s') for n in missing)}",
            "name the engines that are compared: REFERENCE CANDIDATE…",
        )
    if values["reference"].startswith("run:"):
        from assay.fidelity.store.settings import stored_settings

        values = stored_settings(values["reference"]) | values
    if values["reference"].startswith("pack:"):
        from assay.fidelity.pack.reader import pack_settings

        values = pack_settings(values["reference"]) | values
    return Plan(**values)


def plan_of_result(path: Path, overrides: Mapping[str, Any]) -> Plan:
    """The plan that a result of `assay compare --json` echoes; UsageError where it holds none."""
    try:
        plan = json_of(path)["subject"]["plan"]
        if not isinstance(plan, dict):
            raise TypeError
    except OSError as error:
        raise usage_error(f"cannot read {path}: {error.strerror}", "check the path") from error
    except (ValueError, KeyError, TypeError) as error:
        raise usage_error(
            f"{path} is no result of assay compare: it holds no plan",
            "give the JSON that assay compare --json wrote",
        ) from error
    return plan_from(plan, overrides, where=str(path))
