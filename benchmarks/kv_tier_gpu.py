"""Stored blocks decoded on a GPU: speed of its kernels, of the whole decoder, and of copies to hold them against.

    python benchmarks/kv_tier_gpu.py kernels LAYERSxHEADSxDIM --out FILE   # drawn tables: needs no model, a minute

Results are added to --out by stage and model. GB are those of bf16 keys and values. Times are medians by CUDA events, or by the clock
where the CPU has a part in it, with their range.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kv_tier import BLOCK, drawn_blocks, drawn_tables, machine, note


def on_gpu(run: Callable[[], object], rounds: int = 10) -> dict[str, float]:
    """Milliseconds between CUDA events around a run: median and range."""
    times = []
    for i in range(rounds + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if i > 1:
            times.append(start.elapsed_time(end))
    return {"ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times)}


def by_clock(run: Callable[[], object], rounds: int = 10) -> dict[str, float]:
    """Milliseconds until a run is done on the device: median and range."""
    times = []
    for i in range(rounds + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if i > 1:
            times.append(1e3 * (time.perf_counter() - start))
    return {"ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times)}


def gpu_machine() -> dict[str, Any]:
    import triton

    return machine() | {"gpu": torch.cuda.get_device_name(), "triton": triton.__version__, "torch": torch.__version__}


def copies(size: int) -> dict[str, Any]:
    """GB/s of copies between pinned memory and the device, and of BLAKE2b on a core."""
    import hashlib

    pinned, there = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    data = os.urandom(1 << 24)
    begin = time.perf_counter()
    hashlib.blake2b(data, digest_size=16).digest()
    hashed = len(data) / (time.perf_counter() - begin) / 1e9
    to, back = (on_gpu(partial(a.copy_, b, non_blocking=True)) for a, b in ((there, pinned), (pinned, there)))
    return {"bytes": size, "to_device_gb_s": size / to["ms"] / 1e6, "from_device_gb_s": size / back["ms"] / 1e6,
            "blake2b_gb_s_a_core": hashed}  # fmt: skip


def exactly(cpu: Any, gpu: Any, data: list[bytes]) -> dict[str, Any]:
    """Whether coefficients on the GPU are those of the CPU in all bits, and how far tokens are apart."""
    import numpy as np

    one = gpu.decode(data)
    slot, wrong, count = gpu._slots[0], 0, 0
    heads = [cpu.check(d) for d in data]
    assert sum(h.tokens for h in heads) <= gpu.group
    found = slot.inputs.view(torch.int16).cpu().numpy().view(np.uint16)
    column = 0
    for d, head in zip(data, heads, strict=True):
        at = head.exact_at + 2 * cpu.facts.layers * head.exact * cpu.facts.width * head.kind.itemsize
        tokens = head.tokens - head.exact
        for i, (size, stream) in enumerate(zip(head.sizes, cpu._streams.values(), strict=True)):
            wanted = np.empty((stream.rank, tokens), np.uint16)
            cpu._read(stream, memoryview(d)[at : at + size], tokens, wanted, 0)
            at += size
            mine = found[gpu._rows[i] : gpu._rows[i] + stream.rank, column : column + tokens]
            wrong, count = wrong + int((wanted != mine).sum()), count + wanted.size
        column += (tokens + 3) // 4 * 4
    other = cpu.decode(data).float()
    gap = (one.cpu().float() - other).square().sum() / other.square().sum()
    return {"coefficients": count, "coefficients_that_differ": wrong, "relative_squared_gap_of_tokens": float(gap)}


def kernels(args: argparse.Namespace) -> None:
    from assay.lab.kv.blocks import BlockCodec, BlockRefused
    from assay.lab.kv.blocks_gpu import GpuBlockCodec
    from assay.lab.kv.tier import keys_of

    layers, heads, dim = map(int, args.model.split("x"))
    found: dict[str, Any] = {"machine": gpu_machine(), "copies": copies(1 << 28)}
    tables = drawn_tables(layers, heads, dim, 0.6, True)
    cpu = BlockCodec(tables, min(16, os.cpu_count() or 1))
    blocks = drawn_blocks(cpu, 16)
    blocks[2][1, 0, 7] += 3000  # escapes
    many = args.tokens // BLOCK
    keys = keys_of(range(many * BLOCK), BLOCK, tables.digest)
    from concurrent.futures import ThreadPoolExecutor

    # The same sixteen blocks again and again, each at its own position.
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        data = list(pool.map(lambda i: cpu.encode(blocks[i % 16], first=BLOCK * i, key=keys[i]), range(many)))
    gpu = GpuBlockCodec(tables, "cuda", min(16, os.cpu_count() or 1))
    for merged in (True, False):
        gpu.settings["merged"] = merged
        found[f"exact, {'one look-up' if merged else 'two look-ups'}"] = exactly(cpu, gpu, data[:16])
        note(args.out, "kernels", args.model, found)
    forged = bytearray(data[3])
    forged[-1] ^= 1
    for what, why in ((bytes(forged), "checksum"), (data[3], "key")):
        try:
            gpu.decode([data[2], what], [keys[2], keys[3] if why == "checksum" else keys[4]])
            found[f"refused, {why}"] = False
        except BlockRefused:
            found[f"refused, {why}"] = True
    rows = found["settings"] = []
    for tokens in (512, 2048, args.tokens):
        some, size = data[: tokens // BLOCK], tokens * tables.facts.token_bytes
        gpu.group = tokens
        gpu._slots.clear()
        for merged in (True, False):
            for sections, warps in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (64, 2)):
                gpu.settings = {"sections": sections, "merged": merged, "num_warps": warps}
                calls: list[Any] = []
                real = gpu._coefficients
                gpu._coefficients = lambda *a, calls=calls, real=real: (calls.append(a), real(*a))[1]
                begin = time.perf_counter()
                gpu.decode(some, keys[: len(some)])
                first = time.perf_counter() - begin
                gpu._coefficients = real
                took = on_gpu(partial(gpu._coefficients, *calls[0]), 5)
                rows.append(
                    {"tokens": tokens, **gpu.settings, **took, "gb_s": size / took["ms"] / 1e6, "first_s": first}
                )
        best = min((r for r in rows if r["tokens"] == tokens), key=lambda r: r["ms"])
        gpu.settings = {name: best[name] for name in ("sections", "merged", "num_warps")}
        products = on_gpu(partial(gpu._products, gpu._slots[0], tokens), 5)
        rows.append({"tokens": tokens, "products": True, **products, "gb_s": size / products["ms"] / 1e6})
        note(args.out, "kernels", args.model, found)
    whole = found["whole"] = []
    for tokens in (512, 2048, args.tokens):
        some, size = data[: tokens // BLOCK], tokens * tables.facts.token_bytes
        for group in (512, 1024, 2048, 4096, 8192):
            if group > tokens:
                break
            gpu.group = group
            gpu._slots.clear()
            took = by_clock(partial(gpu.decode, some, keys[: len(some)]), 5)
            whole.append({"tokens": tokens, "group": group, "settings": gpu.settings, **took, "gb_s": size / took["ms"] / 1e6,
                          "stored_bytes": sum(map(len, some))})  # fmt: skip
    note(args.out, "kernels", args.model, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("kernels",))
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    {"kernels": kernels}[args.stage](args)


if __name__ == "__main__":
    sys.exit(main())
