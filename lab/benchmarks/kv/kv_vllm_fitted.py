"""Coders fitted ahead, in a process of their own: those that predict take a minute, which no timed
engine waits for.

    python kv_vllm_fitted.py ./model 'prerope+pca(step=0.003, weights=measured)'
    CALIBRATION

`file_of` says where they are kept, and `hook` is a factory of hooks of vLLM that takes them from
there.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from assay.runs import cache_dir
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.hook_plan import HookPlan, read
from assay_lab.kv.layer_coders import CoderSet, LayerCoders
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.spec import parse_spec
from assay_lab.kv.vllm.hook import VllmCodecHook

LENGTH = 8192
"""Positions of the rotary tables that put a calibration's keys behind RoPE."""


def file_of(model: str, codec: str, calibration: Path) -> Path:
    """Where the coders of a codec are, for this state of the calibration and of what they are made
    of.
    """
    import assay

    state, root = calibration.stat(), Path(assay.__file__).parent
    sources = (path for area in ("kv", "quant") for path in sorted((root / area).rglob("*.py")))
    code = [path.read_bytes() for path in sources]
    named = repr(
        (Path(model).name, str(parse_spec(codec)), state.st_mtime_ns, state.st_size)
    ).encode()
    return (
        cache_dir("kv-fitted") / f"{hashlib.sha256(named + b''.join(code)).hexdigest()[:24]}.pickle"
    )


def fit(model: str, codec: str, calibration: Path) -> Path:
    """Fit the coders of all layers, on the CPU, unless they are there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = file_of(model, codec, calibration)
    if path.exists():
        return path
    torch.set_num_threads(max(1, min(4, (os.cpu_count() or 1) // 4)))  # engines are timed meanwhile
    with torch.device("meta"):  # its shape is all that is asked of it
        known = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    shape = cache_shape(known)
    found = read(str(calibration), calibration.stat().st_mtime_ns)
    found.check_model(shape)
    layer_coders = LayerCoders(shape, Rotary.of_config(known.config, LENGTH), found)
    spec = parse_spec(codec)
    coders = layer_coders.fit_all(lambda _, stream: spec.of(stream))
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(dict(coders.by_stream)))
    part.replace(path)  # whole or not at all
    return path


class FittedPlan(HookPlan):
    """A plan whose coders are in a file."""

    fitted = ""

    def coders(self, layer_coders: LayerCoders) -> CoderSet:
        """Those of the file; no layer_coders is needed."""
        return CoderSet(_coders(self.fitted))


def hook(fitted: str, **config: Any) -> VllmCodecHook:
    """Factory of a `HookSpec` whose config says in which file the coders are."""
    own = type("OwnPlan", (FittedPlan,), {"fitted": fitted})
    return VllmCodecHook(own.from_config(config))


@lru_cache(maxsize=4)
def _coders(path: str) -> dict[Any, Any]:
    found: dict[Any, Any] = pickle.loads(Path(path).read_bytes())
    return found


if __name__ == "__main__":
    os.nice(5)
    begin = time.perf_counter()
    print(fit(sys.argv[1], sys.argv[2], Path(sys.argv[3])), f"{time.perf_counter() - begin:.1f} s")
