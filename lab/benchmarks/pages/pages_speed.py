"""Packed pages in vLLM on a GPU: cache tokens, decode and prefill beside bf16 and fp8, with CUDA
graphs; and the kernel alone.

    python pages_speed.py engine MODEL --kind pages --calibration FILE --out FILE.jsonl
    python pages_speed.py kernel --out FILE.jsonl
    python pages_speed.py table --out FILE.jsonl

Run it with a Python that has vLLM, torch and assay in its path. *engine* starts one vLLM as its
server does by default (compiled, CUDA graphs) and times batches of random prompts of one length:
*prefill* until every request has its first token, in prompt tokens a second; *decode* from there to
the end, while all requests run, in new tokens a second. Each case is repeated and the best and the
median are kept. *kernel* times one layer's decode attention over random pages beside FlashAttention
over bf16 ones, and says what share of the HBM's bandwidth the bytes read are;
`pages_check.py` says whether it is right.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

HBM = 4.8e12
"""Bytes a second of an H200, as its maker states them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("engine", "kernel", "table"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("--kind", default="bf16", help="bf16, fp8 or pages")
    parser.add_argument("--calibration")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--contexts", default="4096,16384")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--memory", type=float, default=40.0, help="GiB of KV cache; 0: what vLLM finds"
    )
    parser.add_argument(
        "--share", type=float, default=0.35, help="share of the GPU that must be free"
    )
    parser.add_argument("--eager", action="store_true")
    parser.add_argument(
        "--tune", action="store_true", help="kernel: try tile sizes, warps and stages"
    )
    parser.add_argument(
        "--settings",
        default="{}",
        help="JSON or its file: what launch.DECODE shall be by head_dim, PREPARE, …",
    )
    parser.add_argument(
        "--parts", action="store_true", help="kernel: what is beside attention, alone"
    )
    parser.add_argument("--head-dim", type=int, default=0, help="kernel: 64 or 128 alone")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--out", type=Path, default=Path("pages_speed.jsonl"))
    arguments = parser.parse_args()
    arguments.ends = time.monotonic() + arguments.seconds
    {"engine": engine, "kernel": kernel, "table": table}[arguments.what](arguments)


def keep(arguments: argparse.Namespace, row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
    with arguments.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _use(arguments: argparse.Namespace) -> None:
    """The settings of kernels that were asked for."""
    from assay_lab.kv.pages import launch

    text = arguments.settings
    for name, how in json.loads(Path(text).read_text() if text.endswith(".json") else text).items():
        if name.isdigit():
            launch.DECODE[int(name)].update(how)
        else:
            getattr(launch, name).update(how)


def engine(arguments: argparse.Namespace) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    from vllm import LLM

    batches = [int(b) for b in arguments.batches.split(",")]
    contexts = [int(c) for c in arguments.contexts.split(",")]
    more: dict[str, Any] = {"kv_cache_dtype": "fp8"} if arguments.kind == "fp8" else {}
    if arguments.kind == "pages":
        from assay.engines.vllm.start import pages

        _use(arguments)
        more = pages(arguments.calibration, arguments.model)
    longest = max(contexts) + arguments.new + max(batches) * max(contexts) // 8192 + 8
    if (
        longest
        > json.loads((Path(arguments.model) / "config.json").read_text())["max_position_embeddings"]
    ):
        more["hf_overrides"] = {
            "max_position_embeddings": 32768
        }  # for speed alone: such a text is beyond the model
    if arguments.memory:
        more["kv_cache_memory_bytes"] = int(arguments.memory * 2**30)
    began = time.monotonic()
    lock = os.environ.get("START_LOCK")  # engines that profile memory at one moment fail
    held = Path(lock).open("a") if lock else None  # noqa: SIM115 - held until the engine is ready
    if held:
        fcntl.flock(held, fcntl.LOCK_EX)
    llm = LLM(
        arguments.model,
        max_model_len=longest,
        max_num_seqs=max(batches),
        gpu_memory_utilization=arguments.share,
        enable_prefix_caching=False,
        enforce_eager=arguments.eager,
        disable_log_stats=True,
        seed=0,
        compilation_config=(
            None if arguments.eager else {"cudagraph_capture_sizes": sorted({1, 2, 4, 8, *batches})}
        ),
        **more,
    )
    if held:
        held.close()
    cache = llm.llm_engine.vllm_config.cache_config
    config = llm.llm_engine.vllm_config.model_config
    import torch
    import vllm

    facts = {
        "model": Path(arguments.model).name,
        "kind": arguments.kind,
        "start_s": round(time.monotonic() - began, 1),
        "cache_tokens": cache.num_gpu_blocks * cache.block_size,
        "cache_gib": arguments.memory,
        "block": cache.block_size,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0),
        "eager": arguments.eager,
        "weights": sum(f.stat().st_size for f in Path(arguments.model).glob("*.safetensors")),
    }
    keep(arguments, {"row": "start", **facts})
    words = config.get_vocab_size()
    _one(llm, words, 2, max(contexts), 4, 0)  # what is compiled at its first use
    turn = os.environ.get(
        "TURN_LOCK"
    )  # engines that share a GPU are timed one after the other, when all have started
    if turn:
        Path(f"{turn}.{os.getpid()}").touch()
        began = time.monotonic()
        while len(list(Path(turn).parent.glob(f"{Path(turn).name}.*"))) < int(
            os.environ.get("TURN_ENGINES", "1")
        ):
            if time.monotonic() > began + 150:
                break
            time.sleep(0.5)
        file = Path(turn).open("a")  # noqa: SIM115 - held to the end
        fcntl.flock(file, fcntl.LOCK_EX)
        _one(llm, words, 2, max(contexts), 4, 1)
    for context in contexts:
        for batch in sorted(batches, reverse=True):
            if (
                batch * (context + arguments.new) > facts["cache_tokens"]
                or time.monotonic() > arguments.ends
            ):
                continue
            repeats = arguments.repeats if batch * context < 500_000 else 1
            found = [_one(llm, words, batch, context, arguments.new, i) for i in range(repeats)]
            best = {name: max(f[name] for f in found) for name in found[0]}
            median = {
                f"{name}_median": statistics.median(f[name] for f in found) for name in found[0]
            }
            keep(
                arguments,
                {
                    "row": "speed",
                    **facts,
                    "batch": batch,
                    "context": context,
                    "new": arguments.new,
                    "repeats": repeats,
                    **best,
                    **median,
                },
            )


def _one(llm: Any, words: int, batch: int, context: int, new: int, number: int) -> dict[str, float]:
    """Prompt tokens a second until all have begun, and new tokens a second while all requests run,
    and milliseconds a step.
    """
    import numpy as np
    from vllm import SamplingParams

    drawn = np.random.default_rng(number)
    engine = llm.llm_engine
    counts: dict[str, int] = {}
    # The first requests are ahead of the last by what they generate while those are read.
    asked = SamplingParams(
        temperature=0.0, max_tokens=new + batch * context // 8192, ignore_eos=True, detokenize=False
    )
    for i in range(batch):
        prompt = {"prompt_token_ids": drawn.integers(100, min(words, 40_000), context).tolist()}
        engine.add_request(f"{number}-{batch}-{context}-{i}", prompt, asked)
    began = time.perf_counter()
    steps: list[tuple[float, int]] = []
    ended = False
    while engine.has_unfinished_requests():
        for output in engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)
            ended = ended or output.finished
        if len(counts) == batch and not ended:
            steps.append((time.perf_counter(), sum(counts.values())))
    (first, some), (last, all_of_them) = steps[0], steps[-1]
    return {
        "prefill": batch * context / (first - began),
        "decode": (all_of_them - some) / (last - first),
        "steps_per_s": (len(steps) - 1) / (last - first),
    }


SIZES = {128: (2, 6), 64: (3, 3)}
"""KV heads and query heads of each of Qwen2.5-Coder-1.5B and SmolLM2-135M, by head_dim."""
COLD = 192 * 2**20
"""Bytes of cache that are read in turn, so that none is in the GPU's own cache: that of an H200 has
50 MiB.
"""


def kernel(arguments: argparse.Namespace) -> None:
    """One layer: what a decoded token takes, its parts, and with --tune which settings are the best
    for all cases together.
    """
    import torch
    from triton.testing import do_bench_cudagraph

    from assay_lab.kv.pages import launch
    from assay_lab.kv.pages.layout import layout_of, trigonometry

    _use(arguments)
    for d, (heads, group) in SIZES.items():
        if arguments.head_dim not in (0, d):
            continue
        layout = layout_of(heads, d, 64)
        drawn = torch.Generator().manual_seed(0)
        tables = [launch.drawn_tables(heads, d, drawn) for _ in "kv"]
        trig = trigonometry(10000.0 ** (-torch.arange(0, d, 2) / d), 1.0, 40_000).cuda()
        usual = dict(launch.DECODE[d])
        tries = [usual]
        if arguments.tune:
            shapes = [
                (1, 64, 3, 168),
                (1, 64, 4, 168),
                (1, 64, 5, 168),
                (1, 64, 4, 128),
                (1, 64, 4, 255),
                (2, 64, 3, 255),
                (2, 64, 4, 255),
                (2, 64, 4, 128),
                (4, 64, 3, 255),
                (4, 64, 4, 255),
                (1, 32, 5, 128),
            ]
            tries = [
                {"num_warps": w, "tile": tile, "num_stages": n, "registers": r, "waves": waves}
                for w, tile, n, r in shapes
                for waves in (4, 8, 16, 2)
            ]
            tries += [
                {
                    "num_warps": w,
                    "tile": 64,
                    "num_stages": 4,
                    "registers": r,
                    "waves": waves,
                    "most": most,
                }
                for w, r in ((1, 168), (2, 255))
                for waves, most in ((8, 128), (16, 128), (8, 32))
            ]
            tries = [{"most": 64, **one} for one in tries]
        cases = ((64, 16384), (8, 4096), (8, 16384), (64, 4096), (1, 16384), (1, 4096))
        for batch, context in () if arguments.parts else cases:
            count = batch * (-(-context // 64))
            layers = max(2, min(24, COLD // (count * heads * 64 * layout.slot)))
            # Codes and gains of ordinary size: bits drawn at random would be gains of all sizes,
            # and NaN.
            one = torch.randint(
                0, 256, (count, heads, 64 * layout.slot), dtype=torch.uint8, device="cuda"
            )
            gains = torch.full((2 * 64,), 1.0, dtype=torch.float16, device="cuda").view(torch.uint8)
            at = layout.offsets()["gk"]
            one[:, :, at : at + gains.numel()] = gains
            pages = [one.view(count, -1)] + [one.view(count, -1).clone() for _ in range(layers - 1)]
            table = torch.randperm(count, device="cuda").int().view(batch, -1)
            q = torch.randn(batch, heads * group, d, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.randn(batch, heads, d, device="cuda", dtype=torch.bfloat16) for _ in "kv")
            out = torch.empty_like(q)
            starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
            lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
            positions = lengths.long() - 1
            slots = table[:, -1].long() * 64 + 63
            held: dict[str, Any] = {}

            def write(
                pages=pages,
                q=q,
                k=k,
                v=v,
                positions=positions,
                slots=slots,
                starts=starts,
                held=held,
                batch=batch,
                d=d,
            ) -> None:
                for one in pages:
                    held["turned"] = launch.prepare(
                        q, k, v, positions, one, slots, starts, held["t"], d**-0.5, requests=batch
                    )

            def read(
                pages=pages,
                q=q,
                k=k,
                v=v,
                table=table,
                starts=starts,
                lengths=lengths,
                out=out,
                held=held,
                batch=batch,
                d=d,
            ) -> None:
                for one in pages:
                    launch.attend(
                        held["turned"],
                        q,
                        k,
                        v,
                        out,
                        one,
                        table,
                        starts,
                        lengths,
                        held["t"],
                        d**-0.5,
                        requests=batch,
                        longest=16384,
                    )

            def both(pages=pages, q=q, k=k, v=v, table=table, starts=starts, lengths=lengths, out=out, held=held, batch=batch, d=d,  # noqa: E501
                     positions=positions, slots=slots) -> None:  # fmt: skip
                for one in pages:
                    turned = launch.prepare(
                        q, k, v, positions, one, slots, starts, held["t"], d**-0.5, requests=batch
                    )
                    launch.attend(
                        turned,
                        q,
                        k,
                        v,
                        out,
                        one,
                        table,
                        starts,
                        lengths,
                        held["t"],
                        d**-0.5,
                        requests=batch,
                        longest=16384,
                    )

            flash = None if arguments.tune else _flash_time(batch, context, heads, group, d)
            best: dict[str, Any] = {}
            times: dict[str, float] = {}
            for settings in tries:
                if time.monotonic() > arguments.ends:
                    break
                launch.DECODE[d].update(settings)
                held["t"] = launch.LayerTables.of(layout, *(t.to("cuda") for t in tables), trig)
                try:
                    write()
                    read()
                    # graphs are recorded and played on a stream of their own
                    torch.cuda.synchronize()
                    ms = do_bench_cudagraph(read, rep=12) / layers
                except Exception as error:  # a setting that needs more shared memory than there is
                    print(settings, str(error)[:200], flush=True)
                    if "illegal" in str(error) or "CUDA error" in str(error):
                        raise
                    continue
                times[json.dumps(settings)] = ms
                if not best or ms < best["ms"]:
                    best = {"ms": ms, "settings": settings}
            if best:
                launch.DECODE[d].update(best["settings"])
                held["t"] = launch.LayerTables.of(layout, *(t.to("cuda") for t in tables), trig)
                bytes_read = batch * context * heads * layout.slot
                more = {"write_ms": do_bench_cudagraph(write) / layers}
                more["both_ms"] = do_bench_cudagraph(both) / layers
                keep(
                    arguments,
                    {
                        "row": "kernel",
                        "d": d,
                        "heads": heads,
                        "group": group,
                        "batch": batch,
                        "context": context,
                        **best,
                        **more,
                        "times": times,
                        "flash_ms": flash,
                        "share_of_hbm": bytes_read / (best["ms"] / 1e3) / HBM,
                        "flash_share": (
                            4 * d * heads * batch * context / (flash / 1e3) / HBM if flash else None
                        ),
                    },
                )
            launch.DECODE[d].update(usual)
        t = launch.LayerTables.of(layout, *(t.to("cuda") for t in tables), trig)
        k = torch.randn(8192, heads, d, device="cuda", dtype=torch.bfloat16)
        q = torch.randn(8192, heads * group, d, device="cuda", dtype=torch.bfloat16)
        pages = torch.zeros(256, heads * 64 * layout.slot, dtype=torch.uint8, device="cuda")
        starts = torch.arange(65, device="cuda", dtype=torch.int32)
        lengths = starts[:1] + 16384
        table = torch.arange(256, device="cuda", dtype=torch.int32)[None]
        found_k, found_v = (
            torch.empty(16384, heads, d, device="cuda", dtype=torch.bfloat16) for _ in "kv"
        )
        for name, tries in (
            ("PREPARE", [{"num_warps": w, "rows": 16} for w in (8, 4)]),
            (
                "PREFILL",
                [
                    {"num_warps": w, "rows": n}
                    for w, n in ((8, 16), (4, 16), (4, 32), (8, 32), (2, 16))
                ],
            ),
            ("COMBINE", [{"num_warps": w} for w in (4, 2, 8)]),
            (
                "UNPACK",
                [{"num_warps": w, "tile": n} for w, n in ((4, 32), (8, 32), (8, 64), (4, 64))],
            ),
        ):
            of = getattr(launch, name)
            usual = dict(of)
            for settings in tries if arguments.tune else [usual]:
                if time.monotonic() > arguments.ends:
                    break
                of.update(settings)
                row = {"row": name, "d": d, "settings": settings}
                try:
                    row |= _part(name, (q, k, pages, table, starts, lengths, t), (found_k, found_v))
                except Exception as error:  # a setting that needs more than the GPU has
                    row["raised"] = str(error)[:200]
                keep(arguments, row)
            of.update(usual)


def _part(name: str, given: tuple[Any, ...], found: tuple[Any, Any]) -> dict[str, float]:
    """Milliseconds of one kernel (COMBINE: with attention to 256 tokens), by the tokens or requests
    that it is given.
    """
    import torch
    from triton.testing import do_bench_cudagraph

    from assay_lab.kv.pages import launch

    q, k, pages, table, starts, lengths, t = given
    row: dict[str, float] = {}
    for n in {"PREPARE": (1, 8, 64), "PREFILL": (8192,), "COMBINE": (1, 8, 64), "UNPACK": (16384,)}[
        name
    ]:
        few, at, requests = (
            (q[:n], k[:n], k[:n]),
            torch.arange(n, device="cuda"),
            n if n <= 64 else 0,
        )
        ahead = partial(launch.prepare, *few, at, pages, at, starts, t, 1.0, requests=requests)
        if name == "UNPACK":
            ahead = partial(
                launch.unpack,
                *found,
                starts,
                pages,
                table,
                lengths,
                t,
                first=0,
                requests=1,
                longest=n,
            )
        elif name == "COMBINE":
            of = (
                table.expand(64, -1)[:n].contiguous(),
                starts,
                lengths.expand(64).contiguous() // 64,
                t,
            )
            ahead = partial(
                launch.attend,
                ahead(),
                *few,
                torch.empty_like(few[0]),
                pages,
                *of,
                1.0,
                requests=n,
                longest=16384,
            )
        torch.cuda.synchronize()  # graphs are recorded and played on a stream of their own
        row[str(n)] = do_bench_cudagraph(ahead)
    return row


def _flash_time(batch: int, context: int, heads: int, group: int, d: int) -> float | None:
    """Milliseconds of vLLM's FlashAttention over bf16 pages of 16 tokens."""
    import torch

    try:
        from triton.testing import do_bench_cudagraph
        from vllm.v1.attention.backends import fa_utils

        count = batch * context // 16
        layers = max(2, min(24, COLD // (count * 16 * heads * 4 * d)))
        caches = [
            torch.zeros(2, count, 16, heads, d, device="cuda", dtype=torch.bfloat16)
            for _ in range(layers)
        ]
        table = torch.randperm(count, device="cuda").int().view(batch, -1)
        q = torch.randn(batch, heads * group, d, device="cuda", dtype=torch.bfloat16)
        starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        version = fa_utils.get_flash_attn_version(head_size=d)

        def run() -> None:
            for cache in caches:
                fa_utils.flash_attn_varlen_func(
                    q=q,
                    k=cache[0],
                    v=cache[1],
                    cu_seqlens_q=starts,
                    max_seqlen_q=1,
                    seqused_k=lengths,
                    max_seqlen_k=context,
                    softmax_scale=d**-0.5,
                    causal=True,
                    block_table=table,
                    fa_version=version,
                )

        return float(do_bench_cudagraph(run)) / layers
    except Exception as error:
        print("flash:", str(error)[:200], flush=True)
        return None


def table(arguments: argparse.Namespace) -> None:
    """What was measured as Markdown: speeds over those of bf16, and bytes moved for a token over
    what the HBM gives.

    A decoded token moves the weights once a step, shared by the batch, and the cache of its
    request.
    """
    rows = [json.loads(line) for line in arguments.out.read_text(encoding="utf-8").splitlines()]
    found = {
        (r["model"], r["kind"], r["batch"], r["context"]): r for r in rows if r["row"] == "speed"
    }
    print(
        "| model | context | batch | cache | cache tokens | decode, tokens/s | over bf16 | bytes a"
        " token | of HBM | prefill, tokens/s | over bf16 |"
    )
    print("|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for (model, kind, batch, context), r in sorted(
        found.items(), key=lambda item: (item[0][0], item[0][3], item[0][2], item[0][1])
    ):
        base = found.get((model, "bf16", batch, context))
        moved = r["weights"] / batch + r["cache_gib"] * 2**30 / r["cache_tokens"] * (
            context + r["new"] / 2
        )
        over = [f"{r[name] / base[name]:.2f}×" if base else "–" for name in ("decode", "prefill")]
        print(
            f"| {model} | {context:,} | {batch} | {kind} | {r['cache_tokens']:,} |"
            f" {r['decode']:,.0f} | {over[0]} | {moved / 2**20:,.0f} MiB |"
            f" {100 * moved * r['decode'] / HBM:.0f} % | {r['prefill']:,.0f} | {over[1]} |"
        )


if __name__ == "__main__":
    main()
