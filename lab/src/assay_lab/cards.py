"""The command that repeats a report of `assay kv eval`: an entry of the group `assay.cards`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.gates.card import flags_of, public
from assay_lab.options import EvalPlan


def kv_eval(subject: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """The words of the command, without folders of this machine."""
    plan = subject["plan"]
    model = public(str(plan["model"]))
    return [
        "assay",
        "kv",
        "eval",
        model,
        "--codec",
        str(results["codec"]),
        *flags_of(EvalPlan, plan),
    ]
