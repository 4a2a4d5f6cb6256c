"""`assay kv import`: second moments and levels of older tools as a calibration file of assay."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.engines.hf.spec import parse_spec
from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.kv.calibration import Calibration, write_calibration
from assay.kv.model import CacheShape, cache_shape
from assay.kv.older_files import read_levels, read_moments, read_sidecar
from assay.verdict import Finding, Metric, Report, Severity, Verdict

if TYPE_CHECKING:
    import torch


def run_import(
    model: str, out: Path, *, moments: Path | None, levels_k: Sequence[Path], levels_v: Sequence[Path]
) -> Report:
    """Read and check the files against the model's configuration, and write one calibration."""
    if moments is None and not levels_k and not levels_v:
        raise UsageError(
            "nothing to import",
            remedy="name files with --moments, --levels-k or --levels-v",
            finding_id="kv.usage",
        )
    shape = shape_of(model)
    tensors: dict[str, torch.Tensor] = {}
    made: dict[str, Any] = {}
    if moments is not None:
        made = read_sidecar(moments, shape)
        tensors |= {f"layer_{layer}_sigma": t for layer, t in read_moments(moments, shape).items()}
    tables = {}
    for stream, files in (("k", levels_k), ("v", levels_v)):
        for file in files:
            levels = read_levels(file)
            bits = levels.numel().bit_length() - 1
            if f"levels_{stream}_{bits}" in tensors:
                raise UsageError(
                    f"{file} is a second table of {bits} bits for {stream}",
                    remedy="give one for each number of bits",
                    finding_id="kv.usage",
                )
            tensors[f"levels_{stream}_{bits}"] = levels
            tables[f"{stream} {bits} bits"] = levels.tolist()
    files = [f for f in (moments, *levels_k, *levels_v) if f is not None]
    layers = sum(name.endswith("_sigma") for name in tensors)
    provenance = {
        "cache": shape.to_json(),
        "imported": {
            "files": {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files},
            "made": made,
        },
        "windows": [],
        "environment": describe(),
    }
    try:
        write_calibration(out, Calibration(tensors, provenance))
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error}", remedy="name another file with --out", finding_id="kv.usage"
        ) from error
    return Report(
        command="kv import",
        verdict=Verdict.PASS,
        subject={"model": model, "out": str(out)},
        findings=[_unknown_text()],
        results={**provenance, "layers_with_moments": layers, "levels": tables},
        environment=describe(),
        headline=[
            Metric("second moments", f"{layers} of {shape.layers} layers" if layers else "none"),
            Metric("tables of levels", ", ".join(tables) or "none"),
        ],
        summary=f"give it to codecs with --calibration {out}",
    )


def shape_of(model: str) -> CacheShape:
    """The cache of a model from its configuration alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = parse_spec(model).model
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise AssayError(
            f"cannot read the configuration of {path}: {str(error).splitlines()[0]}",
            finding_id="kv.usage",
            remedy="name the folder of the model that the files are of",
        ) from error
    return cache_shape(built)


def _unknown_text() -> Finding:
    return Finding(
        "kv.calibration_text_unknown",
        Severity.WARNING,
        "the files do not say which text they were made on",
        "A later evaluation cannot be refused for using the same text, as it is with a calibration of assay.",
        remedies=("make sure that it was other text than you evaluate on, or calibrate anew",),
    )
