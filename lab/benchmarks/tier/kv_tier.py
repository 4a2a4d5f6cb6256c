"""Stored blocks on a CPU: their size and entropy, how fast they are coded, and a stored prefix
against prefill in vLLM.

    python kv_tier.py speed LAYERSxHEADSxDIM --out FILE      # drawn tables: needs no
    model, 20 s of CPU python kv_tier.py codec MODEL --calibration FILE --text FILE --out
    FILE   # ratio, GB/s, entropy python kv_tier.py serve MODEL --calibration FILE --text
    FILE --out FILE   # time to first token, in vLLM

Results are added to --out by stage and model. `bf16 equivalent` is what the same tokens take in
bf16: 4 · layers · KV heads · head_dim bytes a token. Times are medians of rounds that take turns,
with their range; the best is what a quiet machine gives.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SPEC = "prerope+sinks(n=4)+pca(step=0.0052, predict=all, weights=measured)"
BLOCK = 128


def note(out: Path, stage: str, name: str, found: dict[str, Any]) -> None:
    kept = json.loads(out.read_text()) if out.exists() else {}
    kept.setdefault(stage, {})[name] = found
    out.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps({name: found}, indent=1))


def machine() -> dict[str, Any]:
    import torch

    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        "",
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def timed(rounds: int, *runs: Callable[[], object]) -> list[list[tuple[float, float]]]:
    """Seconds of the wall and of all cores together, of runs that take turns."""
    found: list[list[tuple[float, float]]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, times in zip(runs, found, strict=True):
            start = time.perf_counter(), time.process_time()
            run()
            times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return found


def rate(size: int, times: list[tuple[float, float]]) -> dict[str, float]:
    """GB a second of the wall, and GB a second that a core worked."""
    wall, work = zip(*times, strict=True)
    return {
        "median": size / statistics.median(wall) / 1e9,
        "slowest": size / max(wall) / 1e9,
        "best": size / min(wall) / 1e9,
        "a_core": size / statistics.median(work) / 1e9,
        "a_core_best": size / min(work) / 1e9,
    }


def cached_kv(model: str, text: str, tokens: int) -> Any:
    """[layers, 2, tokens, width] in bf16: keys after RoPE and values, as transformers computes
    them.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids[:, :tokens]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with torch.inference_mode():
        cache = loaded.model(ids, use_cache=True).past_key_values
    rows = [
        torch.stack([x[0].transpose(0, 1).flatten(1) for x in (layer.keys, layer.values)])
        for layer in cache.layers
    ]
    return torch.stack(rows)


def drawn_tables(layers: int, heads: int, dim: int, rank: float, predict: bool) -> Any:
    """Tables as a calibration makes them, drawn: bases of `rank` · width, laws of falling scale,
    sides as predict=all has them.
    """
    from assay_lab.kv.block_tables import BlockTables, Facts

    rng, width = np.random.default_rng(0), heads * dim
    count = round(rank * width)
    tensors: dict[str, Any] = {"inv_freq": 10000.0 ** (-np.arange(0, dim, 2) / dim)}
    deviation = 6 * np.exp(-np.linspace(0, 3.4, count))
    classes = [
        72 + np.clip(np.round(6 * (np.log2(deviation * f) + 4)), 0, 71)
        for f in (0.6, 0.85, 1.1, 1.6)
    ]
    for layer in range(layers):
        for stream in "kv":
            basis = np.linalg.qr(rng.normal(size=(width, width)))[0][:count]
            top = np.abs(basis).max(axis=1, keepdims=True)
            sides = [[layer - 1, 0], [layer - 1, 1]] if layer else []
            sides = (sides + [[layer, 0]] * (stream == "v")) if predict else []
            own = {
                "mean": rng.normal(size=width).astype(np.float32),
                "synthesis": np.round(basis / top * 127).astype(np.int8),
                "synthesis_scale": (0.3 * top[:, 0] / 127).astype(np.float32),
                "analysis": np.ascontiguousarray(basis.T / 0.3, np.float32),
                "inner.laws": np.stack(classes).astype(np.uint8),
                "inner.odds": np.full(4, 0.25, np.float32),
                "inner.shrink": np.full((2, count), 12, np.int8),
                "sides": np.array(sides, np.int32).reshape(-1, 2),
            }
            if sides:
                own["predictor"] = rng.integers(-20, 20, (width * len(sides), width)).astype(
                    np.int8
                )
                own["predictor_scale"] = np.full(width, 5e-4, np.float16)
            tensors |= {f"{layer}.{stream}.{name}": table for name, table in own.items()}
    spec = f"prerope+sinks(n=4)+pca(bits=2, predict={'all' if predict else 'none'})"
    return BlockTables(Facts(spec, "drawn", "drawn", layers, heads, dim, 4, True, 1.0), tensors)


def drawn_blocks(coder: Any, count: int) -> list[Any]:
    """Blocks whose coefficients have the tables' deviations, tokens of unequal loudness."""
    import torch

    facts, made = coder.facts, torch.Generator().manual_seed(0)
    x = torch.zeros(facts.layers, 2, count * BLOCK, facts.width)
    for (layer, name), stream in coder._streams.items():
        deviation = (
            6 * torch.exp(-torch.linspace(0, 3.4, stream.rank)) * torch.from_numpy(stream.scale)
        )
        loud = torch.exp(0.3 * torch.randn(count * BLOCK, 1, generator=made))
        c = torch.randn(count * BLOCK, stream.rank, generator=made) * deviation * loud
        x[layer, "kv".index(name)] = stream.mean + c @ stream.weight[:, : stream.rank].float().T
    return list(x.bfloat16().split(BLOCK, dim=2))


def speeds(
    tables: Any, blocks: list[Any], keys: list[bytes], rounds: int
) -> tuple[dict[str, Any], list[bytes]]:
    import torch

    from assay_lab.kv.blocks import BlockCodec

    one, two = BlockCodec(tables, 1), BlockCodec(tables, 2)

    def encoded(count: int) -> list[bytes]:
        return [one.encode(b, first=BLOCK * i, key=keys[i]) for i, b in enumerate(blocks[:count])]

    torch.set_num_threads(1)
    data = encoded(len(blocks))
    one.decode(data, keys)
    times = timed(
        rounds, lambda: one.decode(data, keys), lambda: two.decode(data, keys), lambda: encoded(2)
    )
    size = 2 * blocks[0].numel()
    sizes = (size * len(blocks), size * len(blocks), 2 * size)
    names = ("decode_gb_s_1", "decode_gb_s_2", "encode_gb_s_1")
    return {n: rate(of, t) for n, of, t in zip(names, sizes, times, strict=True)}, data


def speed(args: argparse.Namespace) -> None:
    from assay_lab.kv.blocks import BlockCodec
    from assay_lab.kv.tier.scheduler import keys_of

    layers, heads, dim = map(int, args.model.split("x"))
    for predict in (True, False):
        tables = drawn_tables(layers, heads, dim, 0.6, predict)
        blocks = drawn_blocks(BlockCodec(tables, 1), 8)
        keys = keys_of(range(8 * BLOCK), BLOCK, tables.digest)
        found, data = speeds(tables, blocks, keys, args.rounds)
        found |= {
            "machine": machine(),
            "codec": tables.facts.spec,
            "rank": 0.6,
            "bytes_per_token_bf16": tables.facts.token_bytes,
            "bits_per_value": 8 * len(data[1]) / blocks[1].numel(),
        }
        note(args.out, "speed", f"{args.model} predict={'all' if predict else 'none'}", found)


def entropy(coder: Any, data: bytes) -> tuple[float, int, int]:
    """Bits that the numbers of a block take under their laws, bits that the coder wrote, and
    escapes.
    """
    from assay_lab.kv import rans
    from assay_lab.kv.codecs import distributions

    head = coder.check(data)
    bits, words, escapes = 0.0, 0, 0
    at = (
        head.exact_at + 2 * coder.facts.layers * head.exact * coder.facts.width * head.kind.itemsize
    )
    for size, stream in zip(head.sizes, coder._streams.values(), strict=True):
        section = data[at : at + size]
        at += size
        count = int(np.frombuffer(section, "<u4", 1)[0])
        states = np.frombuffer(section, "<u4", 4, 4 + 4 * count)
        body = np.frombuffer(section, "<u2", -1, 20 + 4 * count)
        numbers, kinds = rans.decode_numbers(
            states, body, stream.laws, stream.classes, head.tokens - head.exact
        )
        law = stream.laws[kinds].T
        escapes += count
        bits += (
            float(
                distributions.code_lengths()[law, numbers.astype(int) + distributions.RADIUS].sum()
            )
            - 32 * count
        )
        bits += float(stream.kind_bits[kinds].sum())
        words += 16 * body.size + 128
    return bits, words, escapes


def codec(args: argparse.Namespace) -> None:
    from assay_lab.kv.block_tables import tables_for
    from assay_lab.kv.blocks import BlockCodec
    from assay_lab.kv.tier.scheduler import keys_of

    start = time.perf_counter()
    tables = tables_for(args.model, args.codec, args.calibration, args.tables)
    fitted = time.perf_counter() - start
    x = cached_kv(args.model, Path(args.text).read_text(), args.tokens)
    facts, blocks = tables.facts, [x[:, :, i : i + BLOCK] for i in range(0, x.shape[2], BLOCK)]
    keys = keys_of(range(x.shape[2]), BLOCK, tables.digest)
    found: dict[str, Any] = {
        "machine": machine(),
        "codec": facts.spec,
        "tokens": x.shape[2],
        "fit_s": fitted,
        "bytes_per_token_bf16": facts.token_bytes,
        "table_bytes": tables.decoder_bytes,
    }
    exact = x.numel() * 2
    coder = BlockCodec(tables, 1)
    measured, data = speeds(tables, blocks, keys, args.rounds)
    found |= measured
    exact = x.numel() * 2
    stored = [len(d) for d in data]
    back = coder.decode(data, keys).float()
    spread = x.float() - x.float().mean(dim=2, keepdim=True)
    found["relative_squared_error"] = float(
        (back - x.float()).square().sum() / spread.square().sum()
    )
    bits, words, escapes = entropy(coder, data[1])
    values = x[:, :, :BLOCK].numel()
    found |= {
        "stored_bytes": sum(stored),
        "ratio": exact / sum(stored),
        "ratio_behind_the_first_block": (exact - 2 * values) / sum(stored[1:]),
        "ratio_with_tables_at_32768": 32768 * facts.token_bytes
        / ((sum(stored[1:]) / (x.shape[2] - BLOCK)) * 32768 + stored[0] + tables.decoder_bytes),
        "bits_per_value": 8 * len(data[1]) / values,
        "entropy_bits_per_value": bits / values,
        "coded_over_entropy": words / bits,
        "escapes_in_a_block": escapes,
    }  # fmt: skip
    note(args.out, "codec", Path(args.model).name, found)


def serve(args: argparse.Namespace) -> None:
    """A child a stage: an engine without a tier and one with it, the second one once more from the
    disk.
    """
    from assay.demo import vllm_python

    found: dict[str, Any] = {"machine": machine(), "codec": args.codec}
    with tempfile.TemporaryDirectory() as folder:
        for stage in ("without", "first", "again"):
            out = Path(folder) / f"{stage}.json"
            job = {
                "stage": stage,
                "model": args.model,
                "codec": args.codec,
                "calibration": args.calibration,
                "text": args.text,
                "tables": args.tables,
                "folder": str(Path(folder) / "tier"),
                "out": str(out),
                "lengths": args.lengths,
                "rounds": args.rounds,
            }
            python = [
                str(args.python or vllm_python()),
                str(Path(__file__).with_name("kv_tier_child.py")),
            ]
            subprocess.run([*python, json.dumps(job)], check=True)
            found[stage] = json.loads(out.read_text())
            note(args.out, "serve", Path(args.model).name, found)
    without, again = found["without"]["prompts"], found["again"]["prompts"]
    found["crossover"] = {
        n: {
            "prefill_s": without[n]["ttft_s"],
            "stored_s": again[n]["ttft_s"],
            "times": without[n]["ttft_s"] / again[n]["ttft_s"],
            "same_text": without[n]["text"] == again[n]["text"],
        }
        for n in without
    }
    note(args.out, "serve", Path(args.model).name, found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("speed", "codec", "serve"))
    parser.add_argument("model")
    parser.add_argument("--codec", default=SPEC)
    parser.add_argument("--calibration")
    parser.add_argument("--text")
    parser.add_argument(
        "--tables", type=Path, default=Path(tempfile.gettempdir()) / "assay-kv-tables"
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.tables = Path(args.tables)
    if args.stage == "serve":
        args.tables = str(args.tables)
    {"speed": speed, "codec": codec, "serve": serve}[args.stage](args)


if __name__ == "__main__":
    sys.exit(main())
