"""How fast KV codecs encode and decode on one CPU core, against a copy of the same memory and
against prefill.

    python kv_codec_speed.py results/kv_codec_speed.json [--rounds 8]

One stream of one layer shaped like SmolLM2's (3 KV heads of 64, bf16), made-up values with channels
of different spread. One thread; seconds of the processor, the best of some runs, because other
programs share the cores. Speeds count the bytes of the bf16 tensor. `share_of_prefill`: encoding
and decoding all 60 streams of SmolLM2-135M over the time of its forward pass, in bf16 and in
float32, of one prompt of so many tokens. Of 1,024 tokens only: that of 8,192 takes minutes.
`reconstruct` is the round trip without the bytes, what a model's forward pass rides on in `assay kv
eval`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from assay.demo.models import build_smollm2
from assay.environment import describe
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.spec import parse_recipe

SPECS = [
    "bf16",
    "fp8",
    "int(residual=0)",
    "hadamard(bits=4)",
    "mean+hadamard(bits=4)",
    "pca(bits=3)",
    "pca(bits=3, trellis=8)",
    "pca(bits=3, classes=1, rdo=0)",
    "pca(bits=4, coding=fixed)",
    "lattice",
    "kakeya",
]
SITE = LayerStream("k", 0, 30, 3, 64)
LENGTHS = (1024, 8192)
PROMPT = 1024


def values(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)
    spread = torch.exp(0.7 * torch.randn(SITE.width, generator=fixed))
    mixing = torch.randn(SITE.width, 16, generator=fixed) / 3
    x = torch.randn(count, SITE.width, generator=generator) * spread
    x = x + torch.randn(count, 16, generator=generator) @ mixing.T
    return x.reshape(count, SITE.heads, SITE.head_dim).transpose(0, 1).contiguous().bfloat16()


def seconds(call: Callable[[], object], rounds: int = 5) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def prefill_seconds(dtype: torch.dtype, rounds: int) -> float:
    """A forward pass of the whole model over one prompt, with the logits of its last token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(build_smollm2(), dtype=dtype).eval()
    ids = torch.randint(
        0, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(3)
    )
    with torch.inference_mode():
        return seconds(lambda: model(input_ids=ids, logits_to_keep=1), rounds)


def measure(
    spec: str, x: torch.Tensor, calibration: torch.Tensor, prefill: dict[str, float], rounds: int
) -> dict[str, Any]:
    codec = parse_recipe(spec).fit(Samples(SITE, calibration))
    stream = codec.encode(x)
    size = 2 * x.numel()
    spent = {
        "encode": seconds(lambda: codec.encode(x), rounds),
        "decode": seconds(lambda: codec.decode(stream), rounds),
        "reconstruct": seconds(lambda: codec.reconstruct(x), rounds),
    }
    both = spent["encode"] + spent["decode"]
    return {
        "spec": spec,
        "tokens": x.shape[1],
        "bits_per_value": 8 * len(stream) / x.numel(),
        "gb_per_s": {name: size / value / 1e9 for name, value in spent.items()},
        "encode_and_decode_gb_per_s": size / both / 1e9,
        "microseconds_per_token": 1e6 * both / x.shape[1],
        "share_of_prefill": {
            dtype: 2 * SITE.layers * both / forward for dtype, forward in prefill.items()
        }
        if x.shape[1] == PROMPT
        else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    rounds = arguments.rounds
    torch.set_num_threads(1)
    prefill = {
        name: prefill_seconds(getattr(torch, name), rounds) for name in ("bfloat16", "float32")
    }
    print(f"prefill of {PROMPT} tokens, seconds: {prefill}", flush=True)
    calibration = values(4096, 1).float()
    rows = []
    for length in LENGTHS:
        x = values(length, 2)
        copy = seconds(lambda x=x: x.clone(), 20 * rounds)
        rows.append(
            {"spec": "memory copy", "tokens": length, "gb_per_s": 2 * x.numel() / copy / 1e9}
        )
        for spec in SPECS:
            row = measure(spec, x, calibration, prefill, rounds)
            rows.append(row)
            print(length, spec, row["gb_per_s"], row["share_of_prefill"], flush=True)
    result = {
        "shape": {"heads": SITE.heads, "head_dim": SITE.head_dim, "dtype": "bfloat16"},
        "prefill": {"tokens": PROMPT, "seconds": prefill},
        "unit": "seconds of the processor, one thread",
        "environment": describe(),
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
