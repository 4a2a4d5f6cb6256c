"""Stored blocks decoded on a GPU: kernels, the whole decoder, KL behind the tier, and time to first
token in vLLM.

    python kv_tier_gpu.py kernels LAYERSxHEADSxDIM --out FILE   # drawn tables: needs no
    model, a minute python kv_tier_gpu.py tables MODEL --calibrate WIKI_VALID   #
    calibrate and fit, kept in --tables python kv_tier_gpu.py codec MODEL --text FILE
    --out FILE    # ratio, entropy, GB/s by length python kv_tier_gpu.py kl MODEL --text
    FILE --out FILE       # a prefix from the tier against the exact one python
    kv_tier_gpu.py ttft MODEL --text FILE --out FILE     # vLLM: prefill, stored, a copy
    of bf16; memory and disk

Results are added to --out by stage and model. GB are those of bf16 keys and values. Times are
medians by CUDA events, or by the clock where the CPU has a part in it, with their range. `kl`
prefills windows with transformers, puts the prefix through encoder and decoder, and scores the text
behind it twice: from the exact cache and from what came back.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kv_tier import BLOCK, SPEC, drawn_blocks, drawn_tables, entropy, machine, note


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

    return machine() | {
        "gpu": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "torch": torch.__version__,
    }


def copies(size: int) -> dict[str, Any]:
    """GB/s of copies between pinned memory and the device, and of SHA-256 on a core."""
    import hashlib

    pinned, there = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    data = os.urandom(1 << 24)
    begin = time.perf_counter()
    hashlib.sha256(data).digest()
    hashed = len(data) / (time.perf_counter() - begin) / 1e9
    to, back = (
        on_gpu(partial(a.copy_, b, non_blocking=True))
        for a, b in ((there, pinned), (pinned, there))
    )
    return {
        "bytes": size,
        "to_device_gb_s": size / to["ms"] / 1e6,
        "from_device_gb_s": size / back["ms"] / 1e6,
        "sha256_gb_s_a_core": hashed,
    }


def exactly(cpu: Any, gpu: Any, data: list[bytes]) -> dict[str, Any]:
    """Whether coefficients on the GPU are those of the CPU in all bits, and how far tokens are
    apart.
    """
    import numpy as np

    one = gpu.decode(data)
    slot, wrong, count = gpu._slots[0], 0, 0
    heads = [cpu.check(d) for d in data]
    assert sum(h.tokens for h in heads) <= gpu.group
    found = slot.inputs.view(torch.int16).cpu().numpy().view(np.uint16)
    column = 0
    for d, head in zip(data, heads, strict=True):
        at = (
            head.exact_at + 2 * cpu.facts.layers * head.exact * cpu.facts.width * head.kind.itemsize
        )
        tokens = head.tokens - head.exact
        for i, (size, stream) in enumerate(zip(head.sizes, cpu._streams.values(), strict=True)):
            wanted = np.empty((stream.rank, tokens), np.uint16)
            place = [np.array([n]) for n in (at // 2, (at + size) // 2, tokens, 0)]
            cpu._read(stream, np.frombuffer(d, "<u2"), *place, wanted)
            at += size
            mine = found[gpu._rows[i] : gpu._rows[i] + stream.rank, column : column + tokens]
            wrong, count = wrong + int((wanted != mine).sum()), count + wanted.size
        column += (tokens + 3) // 4 * 4
    other = cpu.decode(data).float()
    gap = (one.cpu().float() - other).square().sum() / other.square().sum()
    return {
        "coefficients": count,
        "coefficients_that_differ": wrong,
        "relative_squared_gap_of_tokens": float(gap),
    }


def kernels(args: argparse.Namespace) -> None:
    from assay_lab.kv.block_errors import BlockRefused
    from assay_lab.kv.blocks import BlockCodec
    from assay_lab.kv.blocks_gpu import GpuBlockCodec
    from assay_lab.kv.tier.scheduler import keys_of

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
        data = list(
            pool.map(
                lambda i: cpu.encode(blocks[i % 16], first=BLOCK * i, key=keys[i]), range(many)
            )
        )
    gpu = GpuBlockCodec(tables, "cuda", min(16, os.cpu_count() or 1))
    found["exact"] = exactly(cpu, gpu, data[:16])
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
    for tokens in () if args.only_whole else (args.tokens, 512, 2048):
        some, size = data[: tokens // BLOCK], tokens * tables.facts.token_bytes
        gpu.group = tokens
        gpu._slots.clear()
        gpu.warm(BLOCK)
        # Each takes seconds to compile, once.
        for sections in (4, 2, 8, 1, 16, 32):
            gpu.settings = {"sections": sections, "num_warps": 1}
            calls, begin = recorded(gpu, some, keys), time.perf_counter()
            took = on_gpu(partial(gpu._coefficients, *calls[0]), 5)
            first = time.perf_counter() - begin
            rows.append(
                {
                    "tokens": tokens,
                    **gpu.settings,
                    **took,
                    "gb_s": size / took["ms"] / 1e6,
                    "all_s": first,
                }
            )
            note(args.out, "kernels", args.model, found)
        best = min((r for r in rows if r["tokens"] == tokens), key=lambda r: r["ms"])
        gpu.settings = {name: best[name] for name in ("sections", "num_warps")}
        products = on_gpu(partial(gpu._products, gpu._slots[0], tokens), 5)
        rows.append(
            {"tokens": tokens, "products": True, **products, "gb_s": size / products["ms"] / 1e6}
        )
        note(args.out, "kernels", args.model, found)
    if rows:
        gpu.settings = {name: rows[0][name] for name in ("sections", "num_warps")}  # the default
    whole = found["whole"] = []
    for tokens in (args.tokens,) if args.only_whole else (args.tokens, 512, 2048):
        some, size = data[: tokens // BLOCK], tokens * tables.facts.token_bytes
        for group in (8192, 4096, 2048, 512):
            if group > max(tokens, 512):
                continue
            gpu.group = group
            gpu._slots.clear()
            gpu.warm(BLOCK)
            row = {
                "tokens": tokens,
                "group": group,
                "settings": gpu.settings,
                "stored_bytes": sum(map(len, some)),
            }
            took = by_clock(partial(gpu.decode, some, keys[: len(some)]), 5)
            whole.append(
                {
                    **row,
                    **took,
                    "gb_s": size / took["ms"] / 1e6,
                    "into_pages": into_pages(gpu, some, keys),
                }
            )
            note(args.out, "kernels", args.model, found)


def recorded(gpu: Any, some: list[bytes], keys: list[bytes]) -> list[Any]:
    """What the first kernel is called with, by group."""
    calls: list[Any] = []
    real = gpu._coefficients
    gpu._coefficients = lambda *a: (calls.append(a), real(*a))[1]
    gpu.decode(some, keys[: len(some)])
    gpu._coefficients = real
    return calls


def into_pages(gpu: Any, some: list[bytes], keys: list[bytes]) -> dict[str, Any]:
    """Blocks into pages of 16 tokens as vLLM has them: by the clock, the CPU's part of it, and that
    of checks and copies into pinned memory.
    """
    import numpy as np

    from assay_lab.kv.blocks_gpu import Target

    facts, tokens, page = gpu.facts, len(some) * BLOCK, 16
    heads, dim = facts.kv_heads, facts.head_dim
    x = torch.empty(
        facts.layers, tokens // page, heads, page, 2 * dim, dtype=torch.bfloat16, device=gpu.device
    )
    layer, kv, slot, head = np.ogrid[: facts.layers, :2, :page, :heads]
    table = layer * x.stride(0) + head * x.stride(2) + slot * x.stride(3) + kv * dim
    target = Target(x, torch.from_numpy(table.reshape(-1, page, heads)).to(gpu.device), x.stride(1))
    slots, launched = np.random.default_rng(0).permutation(tokens), []

    def run() -> None:
        begin = time.perf_counter()
        decoding = gpu.decode_into(target, slots, some, keys[: len(some)])
        launched.append(1e3 * (time.perf_counter() - begin))
        assert decoding.wait()[0] == len(some)

    whole = by_clock(run, 7)
    count = min(len(some), gpu.group // BLOCK)
    stage = by_clock(
        partial(gpu._stage, gpu._slots[0].pinned.numpy(), some[:count], keys[:count]), 7
    )
    wanted, where = gpu.decode(some, keys[: len(some)]), torch.from_numpy(slots).to(gpu.device)
    pages = (
        x.permute(0, 1, 3, 2, 4)
        .reshape(facts.layers, tokens, heads, 2, dim)[:, where]
        .permute(0, 3, 1, 2, 4)
        .flatten(3)
    )
    return {
        **whole,
        "gb_s": tokens * facts.token_bytes / whole["ms"] / 1e6,
        "cpu_ms": statistics.median(launched[2:]),
        "check_and_copy_of_a_group_ms": stage["ms"],
        "as_the_tensor": bool(torch.equal(pages, wanted)),
    }


def spec_of(step: float) -> str:
    return SPEC.replace("0.0052", f"{step:g}")


def fitted(args: argparse.Namespace) -> Any:
    from assay_lab.kv.block_tables import tables_for

    return tables_for(args.model, spec_of(args.step), str(calibration(args)), args.tables)


def calibration(args: argparse.Namespace) -> Path:
    return args.tables / f"{Path(args.model).name}.safetensors"


def tables(args: argparse.Namespace) -> None:
    """Calibrate on text of several kinds and fit, both once."""
    from assay_lab.kv.calibrate import CalibrationPlan, run_calibrate

    sys.path.append(str(Path(__file__).parents[1] / "kv"))
    from kv_texts import mixed

    args.tables.mkdir(parents=True, exist_ok=True)
    if not calibration(args).exists():
        text = args.tables / f"mixed-{Path(args.model).name}.txt"
        text.write_text(mixed(args.calibrate.read_text(encoding="utf-8")), encoding="utf-8")
        plan = CalibrationPlan(
            f"hf:{args.model}?device={args.device}&dtype=bfloat16",
            calibration(args),
            text=(str(text),),
            windows=args.windows,
            length=args.length,
            batch=8,
            tokens=min(8192, args.windows * args.length),
            sensitivity=args.sensitivity,
        )
        run_calibrate(plan)
    if args.step:
        fitted(args)


def opened(args: argparse.Namespace) -> tuple[Any, list[int]]:
    """The model in bf16 and the text's tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
        .to(args.device)
        .eval()
    )
    return model, AutoTokenizer.from_pretrained(args.model)(
        args.text.read_text(encoding="utf-8")[: args.characters]
    ).input_ids


def prefilled(model: Any, ids: list[int]) -> tuple[Any, torch.Tensor]:
    """The cache of tokens, and its keys and values [layers, 2, tokens, width]."""
    with torch.inference_mode():
        cache = model.model(
            torch.tensor([ids], device=model.device), use_cache=True
        ).past_key_values
        rows = [
            torch.stack([x[0].transpose(0, 1).flatten(1) for x in (layer.keys, layer.values)])
            for layer in cache.layers
        ]
    return cache, torch.stack(rows)


def coded(args: argparse.Namespace, found: Any) -> tuple[Any, Any]:
    """Encoder, and decoder on the device."""
    from assay_lab.kv.blocks import BlockCodec

    cpu = BlockCodec(found, 1)
    if args.device == "cpu":
        return cpu, cpu
    from assay_lab.kv.blocks_gpu import GpuBlockCodec

    return cpu, GpuBlockCodec(found, args.device, min(16, os.cpu_count() or 1))


def encoded(cpu: Any, x: torch.Tensor) -> tuple[list[bytes], list[bytes]]:
    """Blocks of [layers, 2, tokens, width] and their keys."""
    from concurrent.futures import ThreadPoolExecutor

    from assay_lab.kv.tier.scheduler import keys_of

    keys = keys_of(range(x.shape[2]), BLOCK, cpu.tables.digest)
    torch.set_num_threads(1)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return list(
            pool.map(
                lambda i: cpu.encode(
                    x[:, :, BLOCK * i : BLOCK * (i + 1)].cpu(), first=BLOCK * i, key=keys[i]
                ),
                range(len(keys)),
            )
        ), keys


def codec(args: argparse.Namespace) -> None:
    """Size, entropy and speed of real blocks."""
    model, ids = opened(args)
    tables_, longest = fitted(args), max(args.lengths)
    cpu, gpu = coded(args, tables_)
    _, x = prefilled(model, ids[:longest])
    del model
    data, keys, encoding = on_device(gpu, x)
    facts, (bits, words, escapes) = tables_.facts, entropy(cpu, data[1])
    values = x[:, :, :BLOCK].numel()
    back = gpu.decode(data, keys).float()
    spread = (x.float() - x.float().mean(dim=2, keepdim=True)).square().sum()
    found: dict[str, Any] = {
        "machine": gpu_machine(),
        "codec": facts.spec,
        "text": args.text.name,
        "tokens": longest,
        "bytes_per_token_bf16": facts.token_bytes,
        "ratio": 2 * x.numel() / sum(map(len, data)),
        "ratio_behind_the_first_block": 2 * values * (len(data) - 1) / sum(map(len, data[1:])),
        "ratio_with_tables_at_32768": 32768
        * facts.token_bytes
        / (
            len(data[0])
            + (32768 / BLOCK - 1) * sum(map(len, data[1:])) / (len(data) - 1)
            + tables_.decoder_bytes
        ),
        "table_bytes": tables_.decoder_bytes,
        "bits_per_value": 8 * len(data[1]) / values,
        "entropy_bits_per_value": bits / values,
        "coded_over_entropy": words / bits,
        "escapes_in_a_block": escapes,
        "encode": encoding,
        "relative_squared_error": float((back - x.float()).square().sum() / spread),
        "copies": copies(1 << 28),
        "exact": exactly(cpu, gpu, data[:4]),
        "speed": [],
    }
    del back
    note(args.out, "codec", f"{Path(args.model).name} step={args.step:g}", found)
    for group in args.groups:
        gpu.group = group
        gpu._slots.clear()
        gpu.warm(BLOCK)
        for tokens in args.lengths:
            some, size, count = (
                data[: tokens // BLOCK],
                tokens * facts.token_bytes,
                min(tokens, group),
            )
            whole = by_clock(partial(gpu.decode, some, keys[: len(some)]), 7)
            calls = recorded(gpu, data[: count // BLOCK], keys)
            kernel = on_gpu(partial(gpu._coefficients, *calls[0]), 5)
            products = on_gpu(partial(gpu._products, gpu._slots[0], count - 4), 5)
            pinned = torch.empty(size // 2, dtype=torch.bfloat16, pin_memory=True)
            copy = on_gpu(
                partial(
                    torch.empty_like(pinned, device=args.device).copy_, pinned, non_blocking=True
                ),
                5,
            )
            found["speed"].append(
                {
                    "tokens": tokens,
                    "group": group,
                    "stored_bytes": sum(map(len, some)),
                    "load": os.getloadavg()[0],
                    "decode": whole,
                    "gb_s": size / whole["ms"] / 1e6,
                    "best_gb_s": size / whole["least_ms"] / 1e6,
                    "kernel": kernel,
                    "kernel_gb_s": count * facts.token_bytes / kernel["ms"] / 1e6,
                    "products": products,
                    "products_gb_s": count * facts.token_bytes / products["ms"] / 1e6,
                    "into_pages": into_pages(gpu, some, keys),
                    "bf16_copy": copy,
                    "bf16_copy_gb_s": size / copy["ms"] / 1e6,
                }
            )
            note(args.out, "codec", f"{Path(args.model).name} step={args.step:g}", found)


def on_device(
    gpu: Any, x: torch.Tensor, *, timed: bool = True
) -> tuple[list[bytes], list[bytes], dict[str, Any]]:
    """Blocks of [layers, 2, tokens, width] by the GPU's encoder, their keys, and how fast 2,048
    tokens went.
    """
    from assay_lab.kv.encode_gpu import GpuEncoder
    from assay_lab.kv.tier.scheduler import keys_of

    keys, encoder, data = keys_of(range(x.shape[2]), BLOCK, gpu.tables.digest), GpuEncoder(gpu), []
    for at in range(0, len(keys), 16):
        own = keys[at : at + 16]
        some = x[:, :, BLOCK * at : BLOCK * (at + len(own))].contiguous()
        data += encoder.encode(some, [BLOCK * (at + i) for i in range(len(own))], own)
    if not timed:
        return data, keys, {}
    some = x[:, :, : 16 * BLOCK].contiguous()
    times = by_clock(
        partial(
            encoder.encode, some, [BLOCK * i for i in range(some.shape[2] // BLOCK)], keys[:16]
        ),
        5,
    )
    return (
        data,
        keys,
        times | {"tokens": some.shape[2], "gb_s": 2 * some.numel() / times["ms"] / 1e6},
    )


def kl(args: argparse.Namespace) -> None:
    """What a model says behind a prefix that went through the tier, against the exact one."""
    from transformers import DynamicCache

    from assay.stats import interval_json, mean_interval

    model, ids = opened(args)
    cpu, gpu = coded(args, fitted(args))
    facts, follow, rows = cpu.facts, args.follow, []
    stride = max(args.length + follow, (len(ids) - args.length - follow) // max(1, args.windows))

    def behind(x: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        cache = DynamicCache()
        for layer, kv in enumerate(x):
            k, v = (
                kv.to(model.dtype)
                .view(2, 1, x.shape[2], facts.kv_heads, facts.head_dim)
                .transpose(2, 3)
            )
            cache.update(k, v, layer)
        return model(rest, past_key_values=cache).logits[0].float().log_softmax(-1)

    for i in range(args.windows):
        own = ids[i * stride : i * stride + args.length + follow]
        if len(own) < args.length + follow:
            break
        _, x = prefilled(model, own[: args.length])
        data, keys = encoded(cpu, x) if args.device == "cpu" else on_device(gpu, x, timed=False)[:2]
        with torch.inference_mode():
            back, rest = (
                gpu.decode(data, keys).to(x.device),
                torch.tensor([own[args.length :]], device=x.device),
            )
            exact, stored = behind(x, rest), behind(back, rest)
            at_once = (
                model(torch.tensor([own], device=x.device))
                .logits[0, args.length :]
                .float()
                .log_softmax(-1)
            )
            target = rest[0, 1:, None]
            nll = [float(-p[:-1].gather(1, target).mean()) for p in (exact, stored)]
            rows.append(
                {
                    "kl": float((exact.exp() * (exact - stored)).sum(-1).mean()),
                    "kl_of_another_split": float(
                        (at_once.exp() * (at_once - exact)).sum(-1).mean()
                    ),
                    "top1": float((exact.argmax(-1) == stored.argmax(-1)).float().mean()),
                    "nll_exact": nll[0],
                    "nll_stored": nll[1],
                    "stored_bytes": sum(map(len, data)),
                    "ratio": 2 * x.numel() / sum(map(len, data)),
                }
            )
        found = {
            "machine": gpu_machine() if args.device != "cpu" else machine(),
            "codec": facts.spec,
            "text": args.text.name,
            "prefix": args.length,
            "follow": follow,
            "windows": rows,
        }
        if i:
            for name in ("kl", "kl_of_another_split", "top1", "ratio"):
                found[name] = interval_json(mean_interval([r[name] for r in rows]))
            found["dppl_pct"] = interval_json(
                mean_interval([100 * math.expm1(r["nll_stored"] - r["nll_exact"]) for r in rows])
            )
        note(args.out, "kl", f"{Path(args.model).name} step={args.step:g} {args.text.name}", found)


class Copied:
    """In the place of a codec: bf16 from pinned memory or from files, as a tier without a codec
    would have it.

    Groups are [layers, 2, tokens, width] in pinned memory; with `paths` they are read from there
    first, by eight threads.
    """

    def __init__(
        self, codec: Any, groups: list[torch.Tensor], paths: list[Path] | None = None
    ) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self.facts, self.device, self._groups, self._paths = (
            codec.facts,
            codec.device,
            groups,
            paths,
        )
        self._codec, self._pool = codec, ThreadPoolExecutor(8)

    def _read(self, job: tuple[Path, memoryview, int]) -> None:
        path, part, at = job
        with path.open("rb", buffering=0) as file:
            file.seek(at)
            assert file.readinto(part) == len(part)

    def _filled(self) -> Any:
        for i, group in enumerate(self._groups):
            if self._paths is not None:
                raw, step = (
                    memoryview(group.view(torch.uint8).numpy().reshape(-1)),
                    -(-group.numel() // 4),
                )
                list(
                    self._pool.map(
                        self._read,
                        [
                            (self._paths[i], raw[at : at + step], at)
                            for at in range(0, len(raw), step)
                        ],
                    )
                )
            yield group.to(self.device, non_blocking=True)

    def decode_groups(self, blocks: Any, keys: Any = None) -> Any:
        yield from self._filled()

    def decode_into(self, target: Any, slots: Any, blocks: Any, keys: Any) -> Any:
        at, width, order = 0, self.facts.width, self._codec._on_device["order"]
        none = self._codec._on_device["numbers"]
        for x in self._filled():
            own = (
                torch.from_numpy(slots[at : at + x.shape[2]])
                .int()
                .pin_memory()
                .to(self.device, non_blocking=True)
            )
            self._codec._place(
                x, order * (x.shape[2] * width), (1, width), own, none, none, target, False
            )
            at += x.shape[2]
        return self

    def wait(self) -> tuple[int, float]:
        return 1 << 30, 0.0


def cold(paths: list[Path]) -> None:
    """Let the operating system forget files."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ttft(args: argparse.Namespace) -> None:
    """Time to first token in vLLM of a prompt that is prefilled, that is stored, and whose bf16
    cache lies in pinned memory.
    """
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    from vllm import LLM, SamplingParams
    from vllm import __version__ as version
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    tables_, cuda = fitted(args), args.device != "cpu"
    extra = {"tables": str(tables_.write(args.tables)), "size": 20 * 10**9}
    more: dict[str, Any] = (
        {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": args.cache << 30}
        if cuda
        else {"block_size": 128}
    )
    if args.page:
        more["block_size"] = args.page
    if not args.eager:
        more["compilation_config"] = {
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 136, 264, 520]
        }
        if args.graphs:
            more["compilation_config"]["cudagraph_mode"] = args.graphs
    begin = time.perf_counter()
    llm = LLM(
        args.model,
        dtype="bfloat16",
        enforce_eager=args.eager,
        max_model_len=max(args.lengths) + 64,
        max_num_seqs=8,
        max_num_batched_tokens=max(args.lengths) + 64,
        **more,
        kv_transfer_config={
            "kv_connector": "AssayTier",
            "kv_connector_module_path": "assay_lab.kv.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        },
    )
    found: dict[str, Any] = {
        "machine": gpu_machine() if cuda else machine(),
        "vllm": version,
        "codec": tables_.facts.spec,
        "eager": args.eager,
        "cudagraph_mode": args.graphs or "default",
        "block_size": args.page or "default",
        "start_s": time.perf_counter() - begin,
        "prompts": {},
    }
    ids = llm.get_tokenizer()(args.text.read_text(encoding="utf-8")).input_ids
    core = llm.llm_engine.engine_core.engine_core
    planner, mover = core.scheduler.connector._planner, get_kv_transfer_group()._mover
    real = mover.codec
    match, step = planner.match, planner.step
    from assay_lab.kv.tier.store import BlockStore

    one = SamplingParams(temperature=0, max_tokens=1)
    store, folder = mover.store, Path(tempfile.mkdtemp(prefix="assay-kv-ttft-", dir=args.disk))
    on_disk = BlockStore(folder, 10**11)
    found["disk"] = os.popen(f"stat -f -c %T {folder}").read().strip()

    def ask(tokens: list[int], mode: str, how: Any = one) -> tuple[float, float, dict[int, float]]:
        """Seconds, the CPU's seconds of loading, and log-probabilities of the first token where
        they are asked for.
        """
        mover.store = planner.store = on_disk if mode == "disk" else store
        if mode == "disk":
            cold(list(folder.rglob("*.block")))
        elif mode == "disk copy":
            cold(paths)
        planner.match = (lambda *a, **k: 0) if mode == "prefill" else match
        planner.step = step if mode == "store" else lambda *a, **k: []
        mover.codec = copied.get(mode, real)
        llm.reset_prefix_cache()
        loading.clear()
        begin = time.perf_counter()
        (answer,) = llm.generate([{"prompt_token_ids": tokens}], how, use_tqdm=False)
        took = time.perf_counter() - begin
        if mode == "store":
            mover.flush()
        said = answer.outputs[0].logprobs
        return took, sum(loading), {t: p.logprob for t, p in said[0].items()} if said else {}

    copied: dict[str, Any] = {}
    paths: list[Path] = []
    loading: list[float] = []
    load = mover.load

    def timed_load(given: Any) -> list[int]:
        begin = time.perf_counter()
        failed: list[int] = load(given)
        loading.append(time.perf_counter() - begin)
        return failed

    mover.load = timed_load
    # What an engine takes for the eight tokens alone that every prompt has behind its prefix.
    least = [1e3 * ask(ids[-8:], "prefill")[0] for _ in range(args.rounds + 3)][3:]
    found["eight_tokens"] = {
        "ttft_ms": statistics.median(least),
        "least_ms": min(least),
        "most_ms": max(least),
    }
    for number, length in enumerate(args.lengths):
        prompt = ids[
            number * 50 : number * 50 + length + 8
        ]  # beginnings in different places share nothing
        ask(prompt, "prefill")
        begin = time.perf_counter()
        ask(prompt, "store")
        stored_in = time.perf_counter() - begin
        planner_keys = planner_blocks(planner, prompt)
        data = [store.get(key) for key in planner_keys]
        for key, block in zip(planner_keys, data, strict=True):
            on_disk.put(key, block)
        # Of 1,024 tokens each, so that one is sent while the next one is read.
        whole = torch.cat([x.cpu() for x in real.decode_groups(data, planner_keys)], dim=2)
        groups = [g.contiguous() for g in whole.split(1024, dim=2)]
        groups = [g.pin_memory() if cuda else g for g in groups]
        paths[:] = [folder / f"{i}.bf16" for i in range(len(groups))]
        for path, group in zip(paths, groups, strict=True):
            path.write_bytes(group.view(torch.uint8).numpy().tobytes())
        copied = {"copy": Copied(real, groups), "disk copy": Copied(real, groups, paths)}
        row: dict[str, Any] = {
            "tokens": length,
            "store_s": stored_in,
            "blocks": len(data),
            "stored_bytes": sum(map(len, data)),
            "ratio": length * tables_.facts.token_bytes / sum(map(len, data)),
        }
        modes = ("prefill", "load", "copy", "disk", "disk copy")
        times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
        said = {
            mode: ask(prompt, mode, SamplingParams(temperature=0, max_tokens=1, logprobs=20))[2]
            for mode in modes[:2]
        }
        # A mode is asked all its rounds in a row: another one leaves the caches of the device in
        # another state.
        for mode in modes:
            times[mode] = [ask(prompt, mode)[:2] for _ in range(args.rounds + 1)][1:]
        if cuda:
            row["into_pages_alone"] = into_pages(real, data, planner_keys)
        for mode in modes:
            all_, loading_ = zip(*times[mode], strict=True)
            row[mode] = {
                "ttft_ms": 1e3 * statistics.median(all_),
                "least_ms": 1e3 * min(all_),
                "most_ms": 1e3 * max(all_),
                "loading_ms": 1e3 * statistics.median(loading_),
            }
        both = said["prefill"].keys() & said["load"].keys()
        row["first_token_logprob_gap"] = max(
            abs(said["prefill"][t] - said["load"][t]) for t in both
        )
        row["times_faster_than_prefill"] = row["prefill"]["ttft_ms"] / row["load"]["ttft_ms"]
        for mode in modes[2:]:
            row[f"times_faster_than_{mode.replace(' ', '_')}"] = (
                row[mode]["ttft_ms"] / row["load"]["ttft_ms"]
            )
        row["times_faster_disk_than_disk_copy"] = (
            row["disk copy"]["ttft_ms"] / row["disk"]["ttft_ms"]
        )
        row["load_average"] = os.getloadavg()[0]
        found["prompts"][str(length)] = row
        found["tier"], found["tier_on_disk"] = store.counters.to_json(), on_disk.counters.to_json()
        note(args.out, "ttft", f"{Path(args.model).name} step={args.step:g}", found)
    llm.llm_engine.engine_core.shutdown()


def planner_blocks(planner: Any, prompt: list[int]) -> list[bytes]:
    """Keys of the whole blocks of a prompt."""
    from assay_lab.kv.tier.scheduler import keys_of

    return keys_of(prompt, planner.block, planner.seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("kernels", "tables", "codec", "kl", "ttft"))
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument(
        "--only-whole",
        action="store_true",
        help="kernels: the whole decoder at --tokens, nothing else",
    )
    parser.add_argument(
        "--step", type=float, default=0.0052, help="of the codec; tables: 0 calibrates alone"
    )
    parser.add_argument("--calibrate", type=Path)
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument(
        "--length",
        type=int,
        default=1024,
        help="tokens of a window that is calibrated on, or of kl's prefix",
    )
    parser.add_argument("--sensitivity", type=int, default=16)
    parser.add_argument(
        "--follow", type=int, default=512, help="tokens behind the prefix that kl scores"
    )
    parser.add_argument("--text", type=Path)
    parser.add_argument(
        "--tables", type=Path, default=Path(tempfile.gettempdir()) / "assay-kv-tables"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 8192]
    )
    parser.add_argument("--groups", type=int, nargs="+", default=[8192, 4096])
    parser.add_argument("--characters", type=int, default=400_000, help="of the text")
    parser.add_argument(
        "--disk", type=Path, help="folder on a disk, for ttft's blocks and bf16 files there"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=int, default=2, help="GiB of vLLM's cache")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument(
        "--page",
        type=int,
        default=0,
        help="tokens of vLLM's own blocks, which it hashes one by one",
    )
    parser.add_argument("--graphs", default="", help="vLLM's cudagraph_mode, as FULL")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(os.devnull))
    args = parser.parse_args()
    {"kernels": kernels, "tables": tables, "codec": codec, "kl": kl, "ttft": ttft}[args.stage](args)


if __name__ == "__main__":
    sys.exit(main())
