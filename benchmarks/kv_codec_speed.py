"""How fast KV codecs encode and decode on 2 CPU cores, against a copy of the same memory.

    python benchmarks/kv_codec_speed.py benchmarks/results/kv_codec_speed.json

One stream of one layer shaped like SmolLM2's (3 KV heads of 64, bf16), made-up values with channels of different
spread. Speeds count the bytes of the bf16 tensor; the best of five runs, because other programs share the cores.
`reconstruct` is the round trip without the bytes, what a model's forward pass rides on in the tests of `assay kv eval`.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from assay.kv.codec import Samples, Site
from assay.kv.spec import parse_recipe

SPECS = [
    "bf16",
    "fp8",
    "int(residual=0)",
    "hadamard(bits=4)",
    "mean+hadamard(bits=4)",
    "pca(bits=3)",
    "pca(bits=3, classes=1, rdo=0)",
    "pca(bits=4, coding=fixed)",
    "lattice",
    "kakeya",
]
SITE = Site("k", 0, 30, 3, 64)
LENGTHS = (1024, 8192)


def values(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)
    spread = torch.exp(0.7 * torch.randn(SITE.width, generator=fixed))
    mixing = torch.randn(SITE.width, 16, generator=fixed) / 3
    x = torch.randn(count, SITE.width, generator=generator) * spread
    x = x + torch.randn(count, 16, generator=generator) @ mixing.T
    return x.reshape(count, SITE.heads, SITE.head_dim).transpose(0, 1).contiguous().bfloat16()


def seconds(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure(spec: str, x: torch.Tensor, calibration: torch.Tensor) -> dict[str, Any]:
    codec = parse_recipe(spec).fit(Samples(SITE, calibration))
    stream = codec.encode(x)
    size = 2 * x.numel()
    spent = {
        "encode": seconds(lambda: codec.encode(x)),
        "decode": seconds(lambda: codec.decode(stream)),
        "reconstruct": seconds(lambda: codec.reconstruct(x)),
    }
    both = spent["encode"] + spent["decode"]
    return {
        "spec": spec,
        "tokens": x.shape[1],
        "bits_per_value": 8 * len(stream) / x.numel(),
        "gb_per_s": {name: size / value / 1e9 for name, value in spent.items()},
        "encode_and_decode_gb_per_s": size / both / 1e9,
        "microseconds_per_token": 1e6 * both / x.shape[1],
    }


def main(out: str) -> None:
    torch.set_num_threads(2)
    calibration = values(4096, 1).float()
    rows = []
    for length in LENGTHS:
        x = values(length, 2)
        copy = seconds(lambda x=x: x.clone())
        rows.append({"spec": "memory copy", "tokens": length, "gb_per_s": 2 * x.numel() / copy / 1e9})
        rows += [measure(spec, x, calibration) for spec in SPECS]
        for row in rows[-len(SPECS) :]:
            print(row["tokens"], row["spec"], row["gb_per_s"], flush=True)
    result = {
        "shape": {"heads": SITE.heads, "head_dim": SITE.head_dim, "dtype": "bfloat16"},
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": 2,
            "torch": torch.__version__,
        },
        "rows": rows,
    }
    Path(out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
