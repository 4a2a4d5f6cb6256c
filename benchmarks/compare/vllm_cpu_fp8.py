"""How vLLM's CPU build rounds what it writes to an fp8 KV cache: its own operation on random
values, no model.

    PYTHONPATH=src PYTHON_OF_VLLM benchmarks/compare/vllm_cpu_fp8.py

The kernel may lay the values of a block out as it likes (AMX does), so that what is compared is all
of them, sorted: with the nearest 8-bit floats (`assay.engines.hf.cache.cast`), and with those that
are cut off toward zero.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from assay.engines.hf.cache import Format, cast, fp8_dtype

OUT = Path(__file__).parent / "results" / "vllm_cpu_fp8.json"
TOKENS, WIDTH = 32, 64
"""One block of one head."""
NAMES: dict[str, Format] = {"fp8": "e4m3", "fp8_e5m2": "e5m2"}


def main() -> None:
    current_platform.import_kernels()
    torch.manual_seed(0)
    rows = [
        measure(name, dtype, isa)
        for name in NAMES
        for dtype in (torch.float32, torch.bfloat16)
        for isa in ("vec", "amx")
    ]
    document = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "values": TOKENS * WIDTH,
        "rows": rows,
    }
    OUT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1))


def measure(name: str, dtype: torch.dtype, isa: str) -> dict[str, Any]:
    """One format, type of the model and instruction set; keys and values alike are written."""
    spread = torch.exp(2 * torch.randn(TOKENS, 1, WIDTH))
    x = (torch.randn(TOKENS, 1, WIDTH) * spread).to(dtype)
    cache = torch.zeros(1, 1, 2 * TOKENS, WIDTH, dtype=torch.uint8)
    keys, values = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        x, x.clone(), keys, values, torch.arange(TOKENS), isa, 1.0, 1.0, name
    )
    kind = fp8_dtype(NAMES[name])
    near, cut = cast(x, kind).float(), cut_off(x, kind)
    held = [part.reshape(-1).view(kind).float() for part in (keys, values)]
    return {
        "kv_cache_dtype": name,
        "model": str(dtype).removeprefix("torch."),
        "isa": isa,
        "nearest": all(alike(part, near) for part in held),
        "cut_off_toward_zero": all(alike(part, cut) for part in held),
        "share_where_these_differ": float((near != cut).float().mean()),
    }


def cut_off(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The largest 8-bit float that is no larger in magnitude."""
    info = torch.finfo(kind)
    x = x.float().clamp(info.min, info.max)
    lowest = float(torch.tensor(info.tiny).log2())
    step = torch.exp2(x.abs().clamp_min(info.tiny).log2().floor().clamp_min(lowest)) * info.eps
    return torch.trunc(x / step) * step


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both hold the same values in any order; −0 is 0."""
    return torch.equal(*(part.reshape(-1).sort().values + 0.0 for part in (a, b)))


if __name__ == "__main__":
    main()
