"""Calibrations as older tools wrote them, read with everything checked that they do not say of
themselves.

Second moments: safetensors `layer_{l}_sigma`, `layer_{l}_chol`, `layer_{l}_inv_chol`, each [KV
heads, d, d], for some layers; Σ + λ I = L Lᵀ with a ridge λ for each head, L⁻¹ beside it. A file
may have Σ, L, or both. Beside it may lie a `.json` of the same stem. Levels: `.f32`, 2^b
little-endian float32 in rising order, without a header.

    python kv_import.py MODEL --moments OLD.safetensors --levels-k K.f32 --out
    calibration.safetensors

The files do not say which text they were made on: make sure that it was other text than you
evaluate on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.engines.hf.spec import parse_hf
from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay_lab.kv.cache_shape import CacheShape, cache_shape
from assay_lab.kv.calibration import Calibration, write_calibration

_NAME = re.compile(r"layer_(\d+)_(sigma|chol|inv_chol)")
_KEPT = ("ctx_len", "ridge", "n_passages_used", "split")
_CLOSE = 1e-2
MOST_BITS = 8


def read_moments(path: Path, shape: CacheShape) -> dict[int, torch.Tensor]:
    """Σ of each layer in a file, float32; AssayError where tensors do not fit the model or each
    other.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _wrong(path, f"cannot be read: {error}") from error
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if not match:
            raise _wrong(path, f"holds {name!r}, which is no tensor of second moments")
        layer = int(match[1])
        _check_shape(path, name, tensor, layer, shape)
        found.setdefault(layer, {})[match[2]] = tensor.double()
    if not found:
        raise _wrong(path, "holds no second moments (layer_0_sigma, layer_0_chol, …)")
    return {layer: _moment(path, layer, parts).float() for layer, parts in sorted(found.items())}


def read_sidecar(path: Path, shape: CacheShape) -> dict[str, Any]:
    """What the `.json` beside a file says of how it was made; nothing where there is none."""
    beside = path.with_suffix(".json")
    if not beside.exists():
        return {}
    try:
        document = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(beside, f"cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise _wrong(beside, "is no JSON object")
    due = {
        "head_dim": shape.head_dim,
        "num_kv_heads": shape.kv_heads,
        "num_q_heads": shape.query_heads,
        "num_layers": shape.layers,
    }
    for name, value in due.items():
        if name in document and document[name] != value:
            raise _mismatch(beside, f"says {name} {document[name]}, the model has {value}")
    return {name: document[name] for name in _KEPT if name in document}


def read_levels(path: Path) -> torch.Tensor:
    """2^b rising levels, float32; AssayError where their number or order is another."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from error
    count = len(data) // 4
    if len(data) % 4 or count not in [2**b for b in range(1, MOST_BITS + 1)]:
        raise _wrong(
            path, f"has {len(data)} bytes, which are no 2, 4, … or {2**MOST_BITS} levels of float32"
        )
    levels = np.frombuffer(data, dtype="<f4").astype(np.float32)
    if not np.isfinite(levels).all() or (np.diff(levels) <= 0).any():
        raise _wrong(path, "holds levels that do not rise from each to the next")
    return torch.from_numpy(levels)


def _check_shape(
    path: Path, name: str, tensor: torch.Tensor, layer: int, shape: CacheShape
) -> None:
    due = (shape.kv_heads, shape.head_dim, shape.head_dim)
    if layer >= shape.layers:
        raise _mismatch(path, f"holds {name}, the model has layers 0 to {shape.layers - 1}")
    if tuple(tensor.shape) != due:
        raise _mismatch(
            path, f"has {name} of shape {list(tensor.shape)}, the model needs {list(due)}"
        )
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
        raise _wrong(path, f"has values in {name} that are no finite numbers")


def _moment(path: Path, layer: int, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Σ, after a check of L and L⁻¹ against it."""
    lower = parts.get("chol")
    if lower is None and "sigma" not in parts:
        raise _wrong(path, f"has neither Σ nor L of layer {layer}")
    product = None if lower is None else lower @ lower.mT
    if lower is not None and "inv_chol" in parts:
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype)
        if float((lower @ parts["inv_chol"] - eye).abs().max()) > _CLOSE:
            raise _wrong(path, f"has an inverse of L in layer {layer} that is not its inverse")
    sigma = parts.get("sigma", product)
    if sigma is None:
        raise _wrong(path, f"has no Σ of layer {layer}")
    scale = sigma.diagonal(dim1=1, dim2=2).abs().mean(dim=1)[:, None, None].clamp_min(1e-30)
    if float(((sigma - sigma.mT).abs() / scale).max()) > _CLOSE:
        raise _wrong(path, f"has a Σ of layer {layer} that is not symmetric")
    sigma = (sigma + sigma.mT) / 2
    if float((torch.linalg.eigvalsh(sigma).min(dim=1).values / scale[:, 0, 0]).min()) < -_CLOSE:
        raise _wrong(path, f"has a Σ of layer {layer} with negative eigenvalues")
    if product is not None:
        ridge = product - sigma
        level = ridge.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
        off = ridge - level * torch.eye(sigma.shape[-1], dtype=sigma.dtype)
        if float((off.abs() / scale).max()) > _CLOSE or float((level / scale).min()) < -_CLOSE:
            raise _wrong(path, f"has an L in layer {layer} that is not of its Σ and a ridge")
    return sigma


def _wrong(path: Path, why: str) -> AssayError:
    return AssayError(
        f"{path} {why}",
        finding_id="kv.calibration_unreadable",
        remedy=(
            "give the file as its tool wrote it, or calibrate anew: assay kv calibrate MODEL --out"
            " FILE --text FILE"
        ),
    )


def _mismatch(path: Path, why: str) -> AssayError:
    return AssayError(
        f"{path} is of another model: it {why}",
        finding_id="kv.calibration_mismatch",
        remedy="import it for the model that it was made of",
    )


def convert(
    model: str,
    out: Path,
    moments: Path | None = None,
    levels_k: Sequence[Path] = (),
    levels_v: Sequence[Path] = (),
) -> dict[str, Any]:
    """Read and check the files against the model's configuration, write one calibration, and return
    its provenance.
    """
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
    for stream, of_stream in (("k", levels_k), ("v", levels_v)):
        for file in of_stream:
            levels = read_levels(file)
            bits = levels.numel().bit_length() - 1
            if f"levels_{stream}_{bits}" in tensors:
                raise UsageError(
                    f"{file} is a second table of {bits} bits for {stream}",
                    remedy="give one for each number of bits",
                    finding_id="kv.usage",
                )
            tensors[f"levels_{stream}_{bits}"] = levels
    files = [f for f in (moments, *levels_k, *levels_v) if f is not None]
    provenance = {
        "cache": shape.to_json(),
        "imported": {
            "files": {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files},
            "made": made,
        },
        "windows": [],
        "environment": describe(),
    }
    write_calibration(out, Calibration(tensors, provenance))
    return provenance | {"tensors": sorted(tensors)}


def shape_of(model: str) -> CacheShape:
    """The cache of a model from its configuration alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = parse_hf(model).model
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise AssayError(
            f"cannot read the configuration of {path}: {str(error).splitlines()[0]}",
            finding_id="kv.usage",
            remedy="name the folder of the model that the files are of",
        ) from error
    return cache_shape(built)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--moments", type=Path)
    parser.add_argument("--levels-k", type=Path, action="append", default=[])
    parser.add_argument("--levels-v", type=Path, action="append", default=[])
    try:
        print(json.dumps(convert(**vars(parser.parse_args())), indent=1))
    except AssayError as error:
        raise SystemExit(f"{error.message}. {error.remedy}") from error
