"""Rows of server_faults.py: kept as they come, and brought together from several machines without
losing one.

    python benchmarks/check/server_faults_results.py NEW.json ...    # merges into
    results/server_faults.json

A row that is measured anew takes the place of the one before it, which stays under `earlier`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.environment import describe

RESULTS = Path(__file__).parent / "results" / "server_faults.json"
GROUPS = ("healthy", "damages")
Rows = dict[str, dict[str, Any]]


def load(path: Path) -> dict[str, Rows]:
    """The rows of a file, none where there is no file; each with the machine that it was measured
    on.
    """
    document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    machine = document.get("machine")
    return {
        group: {
            name: row if "machine" in row or machine is None else row | {"machine": machine}
            for name, row in document.get(group, {}).items()
        }
        for group in GROUPS
    }


def save(path: Path, results: Mapping[str, Rows]) -> None:
    """Write the rows, whole or not at all."""
    temporary = path.with_suffix(".part")
    temporary.write_text(
        json.dumps({group: results[group] for group in GROUPS}, indent=1) + "\n", encoding="utf-8"
    )
    temporary.replace(path)


def merged(old: Mapping[str, Rows], new: Mapping[str, Rows]) -> dict[str, Rows]:
    """All rows of both; where both have one, the new row, with what it replaces under `earlier`."""
    return {group: _merged_rows(old[group], new[group]) for group in GROUPS}


def _merged_rows(old: Rows, new: Rows) -> Rows:
    rows = dict(old)
    for name, row in new.items():
        rows[name] = _replaced(rows[name], row) if name in rows else row
    return rows


def _replaced(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new` with every other measurement of either under `earlier`, the latest first."""
    current = _alone(new)
    history = []
    for row in (*new.get("earlier", ()), _alone(old), *old.get("earlier", ())):
        if row != current and row not in history:
            history.append(row)
    return current | ({"earlier": history} if history else {})


def _alone(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "earlier"}


def machine(device: str, server: Mapping[str, Any]) -> dict[str, Any]:
    """Where a row is measured: this machine, its accelerator where one is used, and the server."""
    found = describe() | {"server": {name: server.get(name) for name in ("kind", "version")}}
    if device.startswith("cuda"):
        import torch

        found["accelerator"] = torch.cuda.get_device_name(device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("new", type=Path, nargs="+", help="results that were written elsewhere")
    parser.add_argument("--into", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    results = load(arguments.into)
    for path in arguments.new:
        if not path.exists():
            parser.error(f"there is no file {path}")
        results = merged(results, load(path))
    save(arguments.into, results)
    print({group: list(results[group]) for group in GROUPS})


if __name__ == "__main__":
    main()
