"""The calibration of the model that is served, and what packed pages and stored blocks refuse
before the engine starts.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from assay.engines import setup_differences, setup_facts
from assay.errors import AssayError
from assay.runs import cache_dir, write_atomically
from assay_lab.kv.cache_shape import CacheShape, cache_shape
from assay_lab.kv.calibration import Calibration, read_calibration
from assay_lab.kv.pages.layout import SPAN, StreamTables, fit_stream, trigonometry
from assay_lab.kv.rotary import Rotary

PAGES, BLOCKS = "packed pages", "stored blocks"
"""What a source is for."""
VERSION = 2
"""Of how tables are made: those of another are made anew."""
_HEAD_DIMS = (64, 128)
_STATIC = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose angles do not depend on how long a request is."""


@dataclass(frozen=True)
class Source:
    """A calibration of the model that is served; `inv_freq` [d / 2] and `scaling` are those of its
    RoPE.
    """

    calibration: Calibration
    shape: CacheShape
    rotary: Rotary
    inv_freq: torch.Tensor
    scaling: float
    key: str
    """Says which tables these are: of the calibration's bytes and the model's configuration."""

    def tables(self) -> list[dict[str, StreamTables]]:
        """Those of all layers by stream, on the CPU; kept in the cache, since making them takes
        long where CPUs are busy.
        """
        place = cache_dir("kv-tables") / f"pages-{VERSION}-{self.key}.safetensors"
        names = [f.name for f in fields(StreamTables)]
        layers = range(self.shape.layers)
        try:
            kept = load_file(place)
            return [
                {s: StreamTables(*(kept[f"{n}.{s}.{name}"] for name in names)) for s in "kv"}
                for n in layers
            ]
        except (OSError, SafetensorError, KeyError):
            pass
        before = torch.get_num_threads()
        # One thread a layer: matrices are small, and threads of a library that share busy CPUs wait
        # for each other.
        with ThreadPoolExecutor(8, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            found = list(
                pool.map(lambda n: {stream: self.fit(n, stream) for stream in "kv"}, layers)
            )
        torch.set_num_threads(before)
        write_atomically(
            place,
            save(
                {
                    f"{n}.{s}.{name}": getattr(t, name).contiguous()
                    for n, one in enumerate(found)
                    for s, t in one.items()
                    for name in names
                }
            ),
        )
        return found

    def fit(self, layer: int, stream: str) -> StreamTables:
        """The tables of one stream of a layer, on the CPU."""
        return fit_stream(self.calibration, self.shape, layer, stream, self.rotary)

    def trigonometry(self, positions: int) -> torch.Tensor:
        """Cosines and sines of positions 0 … `positions` − 1."""
        return trigonometry(self.inv_freq, self.scaling, positions)


def source_of(calibration: str, model: str, what: str = PAGES) -> Source:
    """Read a calibration for a checkpoint; AssayError where `what` cannot hold its cache, or it is
    of another model.
    """
    stamp = Path(calibration).stat().st_mtime_ns if Path(calibration).exists() else 0
    return _source(calibration, stamp, model, what)


@lru_cache(maxsize=2)
def _source(path: str, stamp: int, model: str, what: str) -> Source:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise AssayError(
            f"cannot read the configuration of {model}: {(str(error).splitlines() or ['?'])[0]}",
            finding_id="kv.engine_load",
            remedy="give the folder of a checkpoint of a kind that transformers knows",
        ) from error
    text = config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        raise _unfit(what, "the model has latent attention (MLA)")
    shape = shape_of(config)
    check_model(text, shape, what)
    found = read_calibration(Path(path))
    found.check_model(shape)
    other = setup_differences(
        found.provenance.get("engine", {}).get("setup", {}), setup_facts(config)
    )
    if other:
        raise AssayError(
            f"the calibration is of another model: it differs in {', '.join(sorted(other))}",
            finding_id="kv.calibration_mismatch",
            remedy="calibrate this model: assay kv calibrate MODEL --out FILE --text FILE",
            evidence={name: list(values) for name, values in other.items()},
        )
    if "layer_0_k" not in found.tensors:
        raise AssayError(
            f"{path} has no samples of keys and values, which {what} need",
            finding_id="kv.no_calibration",
            remedy="make one: assay kv calibrate MODEL --text FILE --out FILE",
        )
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    module = type(skeleton.get_decoder().rotary_emb)(config=text)
    rotary = Rotary.of_config(
        config, min(SPAN, int(getattr(text, "max_position_embeddings", SPAN)))
    )
    with Path(path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(config.to_json_string().encode())
    scaling = float(getattr(module, "attention_scaling", 1.0))
    return Source(found, shape, rotary, module.inv_freq.cpu(), scaling, digest.hexdigest()[:32])


def shape_of(config: Any) -> CacheShape:
    """The cache of a checkpoint by its configuration."""
    name = (getattr(config, "architectures", None) or ["?"])[0]
    return cache_shape(type(name, (), {"config": config})())


def check_model(config: Any, shape: CacheShape, what: str = PAGES) -> None:
    """AssayError where packed pages or stored blocks cannot hold the cache of a model with this
    (text) configuration.
    """
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    group, paged = shape.query_heads // shape.kv_heads, what == PAGES
    refused = (
        (getattr(config, "kv_lora_rank", None), "the model has latent attention (MLA)"),
        (
            any(shape.windows) or getattr(config, "use_sliding_window", False),
            "the model has sliding-window layers",
        ),
        (
            paged and shape.head_dim not in _HEAD_DIMS,
            f"its heads have {shape.head_dim} channels, not 64 or 128",
        ),
        (paged and group > 16, f"{group} query heads share a KV head, more than 16"),
        (kind not in _STATIC, f"its RoPE ({kind}) changes with the length of a request"),
        (
            float(getattr(config, "partial_rotary_factor", None) or 1.0) != 1.0,
            "RoPE turns a part of its channels only",
        ),
    )
    for there, why in refused:
        if there:
            raise _unfit(what, why)


def _unfit(what: str, why: str) -> AssayError:
    return AssayError(
        f"{what} do not fit: {why}",
        finding_id="kv.unsupported",
        remedy="serve it with vLLM's own cache, and measure codecs on it with hf:",
    )
