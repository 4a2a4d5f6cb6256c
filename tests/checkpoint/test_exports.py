"""Real quantised checkpoints of SmolLM2, as names, types and shapes: silent when whole, found out
when damaged.

The fixtures were written by `benchmarks/verify/quantised_checkpoints.py --fixtures` from files that
the real libraries made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.checkpoint.flags import command as arguments
from assay.checkpoint.flags import lint
from assay.checkpoint.kv_cache import kv_cache
from assay.checkpoint.lists import choose_list
from assay.checkpoint.orphans import check_orphans
from assay.checkpoint.quantization import check_quantization
from assay.checkpoint.safetensors import Header
from assay.checkpoint.schemes.registry import parse
from assay.checkpoint.structure import check_structure
from assay.checkpoint.subject import Checkpoint
from assay.checkpoint.tensors import DTYPE_BITS, Tensor
from assay.verdict import Finding
from checkpoint.export_faults import EXPORT_FAULTS, Config, ExportFault

EXPORTS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "exports").glob("*.json"))
}


def tensors(export: dict[str, Any]) -> Iterator[Tensor]:
    at = 0
    for entry in export["tensors"]:
        bits = DTYPE_BITS[entry["dtype"]]
        for dimension in entry["shape"]:
            bits *= dimension
        layers = [i for low, high in entry.get("layers", []) for i in range(low, high + 1)]
        for name in [entry["name"].replace("*", str(i)) for i in layers] or [entry["name"]]:
            yield Tensor(
                name, entry["dtype"], tuple(entry["shape"]), "model.safetensors", at, at + bits // 8
            )
            at += bits // 8


def checkpoint(config: Config, listed: list[Tensor]) -> Checkpoint:
    text = json.dumps(config).encode()
    header = Header("model.safetensors", listed[-1].end, 0, tuple(listed))
    files = {"config.json": len(text), "model.safetensors": header.size}
    return Checkpoint("folder", files, lambda name: text, {"model.safetensors": header})


def findings(subject: Checkpoint, serve_args: str | None = None) -> list[Finding]:
    declared = parse(subject)
    found = [
        *check_structure(subject, choose_list(subject, ())),
        *check_quantization(subject, declared),
        *check_orphans(subject),
    ]
    if serve_args is not None:
        from assay.checkpoint.mtp import examine_checkpoint

        target = lint.Target(
            subject, declared, kv_cache(subject, declared), examine_checkpoint(subject, declared),
            arguments.parse(serve_args), None,
        )  # fmt: skip
        found.extend(lint.lint(target))
    return found


@pytest.mark.parametrize("kind", EXPORTS)
def test_a_real_export_raises_nothing(kind: str) -> None:
    export = EXPORTS[kind]
    subject = checkpoint(export["config"], list(tensors(export)))
    raised = [(f.id, f.severity.value) for f in findings(subject)]
    if (
        kind == "hqq"
    ):  # the library declares nothing in config.json, which other engines stumble over
        assert raised == [("checkpoint.quantization_conflict", "warning")]
    else:
        assert parse(subject) is not None
        assert raised == []


@pytest.mark.parametrize("fault", EXPORT_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_in_every_export_that_can_have_it(fault: ExportFault) -> None:
    tried = 0
    for kind, export in EXPORTS.items():
        listed = list(tensors(export))
        edit = fault.edit(export["config"], {t.name for t in listed})
        if edit is None:
            continue
        tried += 1
        renamed = [
            Tensor(edit.renamed.get(t.name, t.name), t.dtype, t.shape, t.file, t.start, t.end)
            for t in listed
        ]
        raised = findings(checkpoint(edit.config, renamed), fault.serve_args)
        wanted = (f"checkpoint.{fault.finding}", fault.severity)
        assert wanted in {(f.id, f.severity.value) for f in raised}, (
            kind,
            [f.title for f in raised],
        )
    assert tried >= 2


def test_the_libraries_are_all_there() -> None:
    assert "hqq" in EXPORTS
    methods = {
        e["config"]["quantization_config"]["quant_method"]
        for name, e in EXPORTS.items()
        if name != "hqq"
    }
    assert {"auto-round", "gptq", "awq", "torchao", "bitsandbytes", "compressed-tensors"} <= methods
