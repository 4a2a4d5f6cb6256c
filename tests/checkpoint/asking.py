"""Short ways to read a report of `assay verify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Ask = Callable[..., tuple[int, dict[str, Any]]]


def finding(report: dict[str, Any], name: str) -> dict[str, Any]:
    """The one finding `checkpoint.NAME` (the first, if there are several)."""
    matches = [f for f in report["findings"] if f["id"] == f"checkpoint.{name}"]
    assert matches, [(f["id"], f["title"]) for f in report["findings"]]
    return matches[0]


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {f["path"]: f["status"] for f in report["results"]["files"]}
