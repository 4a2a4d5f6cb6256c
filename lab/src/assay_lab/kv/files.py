"""`assay kv encode` and `decode`: tensors in files, and streams."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.verdict import Metric, Report, Verdict
from assay_lab.kv.calibration import read_calibration
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.codecs.stream import from_bytes
from assay_lab.kv.kktv import read_kktv, write_kktv
from assay_lab.kv.spec import Recipe, parse_recipe
from assay_lab.kv.stream_coder import FittedCodec
from assay_lab.options import DecodePlan, EncodePlan, Place

if TYPE_CHECKING:
    import torch


SAFETENSORS = ".safetensors"


def run_encode(plan: EncodePlan) -> Report:
    """Encode a tensor [KV heads, tokens, head_dim] of a file; AssayError where file, shape or codec
    do not fit.
    """
    import torch

    source, out = plan.source, plan.out
    recipe = parse_recipe(plan.codec)
    x = read_tensor(source, plan.heads, plan.tensor)
    if not x.numel():
        raise _usage(
            f"{source.name} holds no values: its shape is {list(x.shape)}",
            "encode a tensor with tokens",
        )
    fitted = _fitted(str(recipe), plan, x.shape[0], x.shape[2])
    stream = fitted.encode(x)
    _write(out, stream)
    back = fitted.decode(stream)
    power = float(x.double().square().mean())
    error = float((back.double() - x.double()).square().mean()) / power if power else 0.0
    exact = x.numel() * torch.bfloat16.itemsize
    results = {
        "codec": str(recipe),
        "shape": list(x.shape),
        "bytes": {
            "stored": len(stream),
            "bf16": exact,
            "ratio": exact / len(stream),
            "bits_per_value": 8 * len(stream) / x.numel(),
            "tables": fitted.table_bytes,
        },
        "relative_squared_error": error,
    }
    return Report(
        command="kv encode",
        verdict=Verdict.PASS,
        subject={"source": str(source), "out": str(out)},
        results=results,
        environment=describe(),
        headline=[
            Metric(
                "stream", f"{len(stream):,} bytes, {exact / len(stream):.2f}× smaller than bf16"
            ),
            Metric("error", f"{error:.3g} of the power"),
        ],
        summary=f"{x.shape[1]:,} tokens by {recipe}",
    )


def run_decode(plan: DecodePlan) -> Report:
    """Decode a stream with the codec that its header names; AssayError where it is damaged or lacks
    its calibration.
    """
    source, out = plan.source, plan.out
    try:
        stream = source.read_bytes()
    except OSError as error:
        raise _unreadable(source, str(error.strerror)) from error
    parts = from_bytes(stream)
    x = _fitted(parts.spec, plan, parts.heads, parts.head_dim).decode(stream)
    write_tensor(out, x)
    return Report(
        command="kv decode",
        verdict=Verdict.PASS,
        subject={"source": str(source), "out": str(out)},
        results={"codec": parts.spec, "shape": list(x.shape), "stream_bytes": len(stream)},
        environment=describe(),
        headline=[
            Metric("tensor", f"{x.shape[0]} heads × {x.shape[1]:,} tokens × {x.shape[2]} channels")
        ],
        summary=f"decoded by {parts.spec}",
    )


def read_tensor(path: Path, heads: int, name: str | None) -> torch.Tensor:
    """[KV heads, tokens, head_dim] of a safetensors file, or of a KKTV file whose rows go token by
    token, head by head.
    """
    import torch

    if path.suffix != SAFETENSORS:
        rows = torch.from_numpy(read_kktv(path))
        if heads < 1 or rows.shape[0] % heads:
            raise _usage(
                f"{rows.shape[0]} vectors are no whole number of tokens of {heads} heads",
                "set --heads",
            )
        return rows.reshape(-1, heads, rows.shape[1]).transpose(0, 1).contiguous()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if name is None and len(names) != 1:
                raise _usage(
                    f"{path.name} holds {len(names)} tensors",
                    f"name one with --tensor: {', '.join(names[:6])}",
                )
            if name is not None and name not in names:
                raise _usage(
                    f"{path.name} has no tensor {name!r}", f"it has {', '.join(names[:6])}"
                )
            x = file.get_tensor(name or names[0])
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, str(error)) from error
    if x.ndim != 3:
        raise _usage(
            f"a tensor of shape {list(x.shape)} is not [KV heads, tokens, head_dim]", "reshape it"
        )
    return x


def write_tensor(path: Path, x: torch.Tensor) -> None:
    """Write [KV heads, tokens, head_dim] as safetensors (name `x`) or, by any other suffix, as
    KKTV.
    """
    if path.suffix == SAFETENSORS:
        from safetensors.torch import save

        _write(path, save({"x": x.contiguous()}))
    else:
        write_kktv(path, x.transpose(0, 1).reshape(-1, x.shape[2]).contiguous().numpy())


def _fitted(spec: str, place: Place, heads: int, head_dim: int) -> FittedCodec:
    recipe = parse_recipe(spec)
    if place.calibration is None:
        return recipe.fit(
            Samples(
                _alone(
                    recipe, LayerStream(place.stream, place.layer, place.layer + 1, heads, head_dim)
                )
            )
        )
    calibration = read_calibration(Path(place.calibration))
    cache = calibration.provenance["cache"]
    if (cache["kv_heads"], cache["head_dim"]) != (heads, head_dim) or not 0 <= place.layer < cache[
        "layers"
    ]:
        raise AssayError(
            f"the calibration is of {cache['layers']} layers with {cache['kv_heads']} KV heads of"
            f" {cache['head_dim']}, the tensor has {heads} of {head_dim} for layer {place.layer}",
            finding_id="kv.calibration_mismatch",
            remedy="give the calibration of the model that the tensor is from",
        )
    site = _alone(recipe, LayerStream(place.stream, place.layer, cache["layers"], heads, head_dim))
    if place.stream == "k" and not recipe.before_rope:
        raise _usage(
            f"{spec}: a calibration holds keys before RoPE, and no model is loaded here to rotate"
            " them",
            "put prerope before the codec and give keys before RoPE",
        )
    return recipe.fit(calibration.samples(site, before_rope=True, rotary=None))


def _alone(recipe: Recipe, site: LayerStream) -> LayerStream:
    """The site; AssayError where the codec predicts it from streams that are not in the file."""
    if predictor_keys := recipe.predictor_keys(site):
        raise AssayError(
            f"{recipe} predicts layer {site.layer}, stream {site.stream}, from layer"
            f" {predictor_keys[0][0]}, stream {predictor_keys[0][1]}, but a file holds one stream",
            finding_id="kv.side",
            remedy="use pca with predict=none here",
        )
    return site


def _write(path: Path, data: bytes) -> None:
    try:
        part = path.with_suffix(path.suffix + ".part")
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        raise AssayError(
            f"cannot write {path}: {error.strerror}",
            finding_id="kv.unwritable",
            remedy="check folder and rights",
        ) from error


def _unreadable(path: Path, why: str) -> AssayError:
    return AssayError(
        f"cannot read {path}: {why}", finding_id="kv.unreadable", remedy="check the path"
    )


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="kv.usage")
