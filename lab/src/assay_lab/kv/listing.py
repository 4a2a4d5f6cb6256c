"""`assay kv list`: the codecs, the wrappers, their parameters."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from assay.plugins import load
from assay.verdict import Report, Table, Verdict
from assay_lab.kv.spec import CODECS, WRAPPERS, codec_type, wrapper_type


def run_list() -> Report:
    """Everything that a SPEC can be made of."""
    codecs = [_entry(codec_type(name)) for name in (*CODECS, *load("assay.codecs"))]
    wrappers = [_entry(wrapper_type(name)) for name in WRAPPERS]
    return Report(
        command="kv list",
        verdict=Verdict.PASS,
        results={"codecs": codecs, "wrappers": wrappers},
        blocks=[
            _table("Codecs", codecs),
            _table("Wrappers, written before a codec with +", wrappers),
        ],
        summary="a SPEC is WRAPPER+CODEC(parameter=value); k:SPEC;v:SPEC for keys and values apart",
    )


def _entry(kind: Any) -> dict[str, Any]:
    return {
        "name": kind.name,
        "summary": kind.summary,
        "parameters": {f.name: None if f.default is MISSING else f.default for f in fields(kind)},
    }


def _table(title: str, entries: list[dict[str, Any]]) -> Table:
    rows = [
        [e["name"], ", ".join(f"{k}={v}" for k, v in e["parameters"].items()) or "–", e["summary"]]
        for e in entries
    ]
    return Table(title, ("name", "parameters", "what it does"), rows)
