"""What a KV codec costs in vLLM, in tokens a second, against no hook and against the engine's own compressed caches.

Run it with a Python that has vLLM and assay in its path:

    python benchmarks/kv_vllm_overhead.py ./model --minutes 4 --out FILE.jsonl

Each configuration runs in a process of its own, one after the other, so that one that fails loses nothing; its row is
written as soon as it is there, and a file with rows of the same settings is gone on with. All run with `enforce_eager`
but `bf16-graphs`, which shows what that costs. Every one has the same bytes of memory for its cache; `cache_tokens` is
what the engine says it holds. Times are of whole `LLM.generate` calls after one to warm up:

- *prefill*: `windows` prompts of `length` tokens, one new token each, in prompt tokens a second;
- *decode*: `requests` prompts of `prompt` tokens, `new` + 1 tokens each, less the same with one token each, in new tokens a
  second.

vLLM 0.25's TurboQuant presets run on its model runner V2 only: V1 asks their backend for the cache of the type `auto`, as
the layers' caches name no quantisation (V2 makes an exception for them). They are tried on V2, then on V1 with
that name put right in memory (`assay.engines.vllm.turboquant`); what both say is kept where neither runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SETTINGS = ("windows", "length", "requests", "prompt", "new", "repeats", "cache_gib", "step_tokens", "device")


@dataclass(frozen=True)
class Configuration:
    """One engine. `mode` puts the codec in; `runner` is vLLM's model runner; `hand_over` names TurboQuant's cache on V1."""

    kv_cache_dtype: str = "auto"
    mode: str = ""
    eager: bool = True
    runner: str = "1"
    hand_over: bool = False
    plain: bool = False
    """Without the fused kernel."""


CONFIGURATIONS = {
    "bf16": Configuration(),
    "hadamard-inforward": Configuration(mode="inforward"),
    "fp8": Configuration("fp8"),
    "turboquant_4bit_nc": Configuration("turboquant_4bit_nc", runner="2"),
    "turboquant_k8v4": Configuration("turboquant_k8v4", runner="2"),
    "bf16-v2": Configuration(runner="2"),
    "hadamard-decode": Configuration(mode="decode"),
    "hadamard-inforward-plain": Configuration(mode="inforward", plain=True),
    "bf16-graphs": Configuration(eager=False),
    "turboquant_k3v4_nc": Configuration("turboquant_k3v4_nc", runner="2"),
    "turboquant_3bit_nc": Configuration("turboquant_3bit_nc", runner="2"),
}
"""By name, the most telling first."""


def attempts(configuration: Configuration) -> list[Configuration]:
    """Ways to run it, in turn."""
    if not configuration.kv_cache_dtype.startswith("turboquant"):
        return [configuration]
    return [configuration, replace(configuration, runner="1", hand_over=True)]


def start(configuration: Configuration, args: argparse.Namespace) -> Any:
    """The engine, in this process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(configuration.runner == "2")),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if configuration.plain:
        os.environ["ASSAY_NO_TRITON"] = "1"
    from vllm import LLM

    if configuration.hand_over:
        from assay.engines.vllm.turboquant import name_caches

        name_caches(configuration.kv_cache_dtype)
    longest = max(args.length, args.prompt + args.new) + 16
    return LLM(
        model=args.model,
        dtype="bfloat16",
        kv_cache_dtype=configuration.kv_cache_dtype,
        kv_cache_memory_bytes=int(args.cache_gib * 2**30),
        gpu_memory_utilization=0.4,
        max_model_len=longest,
        max_num_batched_tokens=max(args.step_tokens, longest),
        max_num_seqs=max(args.windows, args.requests),
        enforce_eager=configuration.eager,
        enable_prefix_caching=False,
        async_scheduling=False,
        disable_log_stats=True,
        seed=0,
    )


def hooked(llm: Any, configuration: Configuration, args: argparse.Namespace) -> Any:
    """The codec in the engine's layers, as a server has it."""
    from assay.engines.vllm.kv_hook import KvHooks
    from assay.engines.vllm.steps import Steps
    from assay.kv.hooks import hook_spec

    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    spec = hook_spec(
        "vllm:", codec=args.codec, mode=configuration.mode, length=args.length, measure_windows=0
    )
    return KvHooks(spec, runner.get_model(), eager=True, steps=Steps(runner, prefix=None))


def cache_facts(llm: Any) -> dict[str, Any]:
    """Tokens that the cache holds, and the bytes that it takes, as the scheduler has them."""
    core = llm.llm_engine.engine_core.engine_core
    config = core.scheduler.kv_cache_config
    groups = config.kv_cache_groups
    block = groups[0].kv_cache_spec.block_size
    cache = llm.llm_engine.vllm_config.cache_config
    return {
        # Groups take their blocks from one pool.
        "cache_tokens": config.num_blocks // len(groups) * block,
        "cache_bytes": sum(tensor.size for tensor in config.kv_cache_tensors),
        "block_size": block,
        "groups": len(groups),
        "skipped_layers": list(getattr(cache, "kv_cache_dtype_skip_layers", None) or ()),
    }


def generate(llm: Any, prompts: int, length: int, new: int) -> float:
    """Seconds for `prompts` prompts of `length` tokens and `new` tokens each."""
    from vllm import SamplingParams

    size = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    # Any tokens do: nothing is scored. 17 is no common factor of it, so that windows differ.
    tokens = [
        {"prompt_token_ids": [(i * 7919 + j * 17) % (size - 100) + 50 for j in range(length)]}
        for i in range(prompts)
    ]
    asked = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    llm.generate(tokens, asked, use_tqdm=False)
    return time.perf_counter() - begin


def repeated(run: Callable[[], float], repeats: int, limit_s: float) -> list[float]:
    """Values of `run` after one to warm up: `repeats` of them, fewer where they take longer than `limit_s` together."""
    run()
    values: list[float] = []
    begin = time.perf_counter()
    while len(values) < repeats and (not values or time.perf_counter() - begin < limit_s):
        values.append(run())
    return values


def measure(configuration: Configuration, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one configuration."""
    import vllm

    begin = time.perf_counter()
    llm = start(configuration, args)
    found: dict[str, Any] = {
        "vllm": vllm.__version__,
        "start_s": round(time.perf_counter() - begin, 1),
        "runner": configuration.runner,
        "name_handed_over": configuration.hand_over,
        "eager": configuration.eager,
        **cache_facts(llm),
    }
    hooks = hooked(llm, configuration, args) if configuration.mode else None
    seconds = repeated(lambda: generate(llm, args.windows, args.length, 1), args.repeats, args.limit)
    found["prefill_tok_s"] = rates([args.windows * args.length / s for s in seconds])

    def decode() -> float:
        first = generate(llm, args.requests, args.prompt, 1)
        return generate(llm, args.requests, args.prompt, args.new + 1) - first

    seconds = repeated(decode, args.repeats, args.limit)
    found["decode_tok_s"] = rates([args.requests * args.new / s for s in seconds])
    if hooks is not None:
        fires = hooks.engagement()
        found["coder_calls"], found["layers_coded"] = fires.fires, len(fires.per_layer)
        if not fires.fires:
            raise RuntimeError("no coder was called")
        from assay.kv.codecs.hadamard import fused_kernels

        found["fused"] = fused_kernels()
    found |= hardware()
    if configuration.mode and args.device == "cuda":
        try:
            found["kernels"] = kernels(llm, args)
        except (
            RuntimeError,
            AttributeError,
        ) as error:  # a profiler needs rights that not every machine gives
            found["kernels"] = str(error)[:200]
    return found


def rates(values: list[float]) -> dict[str, Any]:
    """Median and all values."""
    return {"median": statistics.median(values), "n": len(values), "all": [round(v, 1) for v in values]}


def hardware() -> dict[str, Any]:
    """The device, by the name it gives itself."""
    import torch

    return {
        "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{os.cpu_count()} CPU cores",
        "load_average": [round(x, 1) for x in os.getloadavg()],
    }


def kernels(llm: Any, args: argparse.Namespace) -> list[list[Any]]:
    """The twelve kernels that take the most time of one prefill: name, calls, milliseconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        generate(llm, min(32, args.windows), args.length, 1)
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:12]
    return [[e.key[:80], e.count, round(e.self_device_time_total / 1000, 2)] for e in events]


def reason(text: str) -> str:
    """What a failed process says: its last error, and what follows where that is only a heading."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [i for i, line in enumerate(lines) if "Error" in line and "During handling" not in line]
    if not errors:
        return lines[-1][-400:] if lines else "it said nothing"
    last = errors[-1]
    heading = next((i for i in errors if "validation error" in lines[i]), None)
    found = lines[last] if heading is None else " ".join(lines[heading : heading + 2])
    return found[:400]


def row_of(name: str, args: argparse.Namespace, limit_s: float) -> dict[str, Any] | None:
    """Run a configuration in its own process, each way that it has, until one works; None where time ran out."""
    failures = []
    for number in range(len(attempts(CONFIGURATIONS[name]))):
        command = [sys.executable, __file__, args.model, "--one", name, "--attempt", str(number)]
        for option in (*SETTINGS, "codec", "limit"):
            command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
        begin = time.perf_counter()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(20.0, limit_s))
        except subprocess.TimeoutExpired:
            return None
        limit_s -= time.perf_counter() - begin
        rows = [line for line in done.stdout.splitlines() if line.startswith('{"measured"')]
        if done.returncode == 0 and rows:
            measured: dict[str, Any] = json.loads(rows[-1])["measured"]
            return {"status": "measured", **measured, "earlier_failures": failures}
        failures.append(reason(done.stderr))
        print(f"{name}, attempt {number + 1}: {failures[-1]}", file=sys.stderr)
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
            (args.logs / f"{name}-{number + 1}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    return {"status": "unavailable", "reasons": failures}


def read_rows(path: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of the same settings by configuration, the last of each."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {row["configuration"]: row for row in rows if row["settings"] == settings}


def line_of(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    """A row in words, against the exact cache on the same model runner."""
    name = row["configuration"]
    if row["status"] != "measured":
        return f"{name:20} unavailable: {row['reasons'][0]}"
    base = rows.get("bf16-v2" if row["runner"] == "2" else "bf16")
    parts = [f"{name:20}"]
    for what in ("prefill_tok_s", "decode_tok_s"):
        rate = row[what]["median"]
        part = f"{what.partition('_')[0]} {rate:>9,.0f} tok/s"
        if base and base["status"] == "measured":
            part += f" ({rate / base[what]['median'] - 1:+.1%})"
        parts.append(part)
    parts.append(f"{row['cache_tokens']:,} tokens of cache")
    exact = rows.get("bf16")
    if exact and exact["status"] == "measured":
        parts.append(f"({row['cache_tokens'] / exact['cache_tokens']:.2f}x)")
    return "  ".join(parts)


def run_all(args: argparse.Namespace) -> None:
    """Every configuration that is not in the file yet, while there is time."""
    begin = time.perf_counter()
    settings: dict[str, Any] = {name: getattr(args, name) for name in SETTINGS} | {"codec": args.codec}
    settings["model"] = Path(args.model).name
    rows = read_rows(args.out, settings)
    longest = 0.0
    for name in args.configurations.split(","):
        left = args.minutes * 60 - (time.perf_counter() - begin)
        if name in rows:
            continue
        if left < longest:
            print(f"out of time before {name}", file=sys.stderr)
            break
        started = time.perf_counter()
        found = row_of(name, args, left)
        if found is None:
            print(f"out of time in {name}", file=sys.stderr)
            break
        row = {"configuration": name, "settings": settings, **found}
        took = time.perf_counter() - started
        longest = max(longest, min(took, 40.0))
        row["took_s"] = round(took, 1)
        rows[name] = row
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(line_of(row, rows), flush=True)
    print("\n".join(["", *(line_of(row, rows) for row in rows.values())]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--codec", default="hadamard(bits=4)")
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS))
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=8.0, help="seconds for the repeats of one measurement")
    parser.add_argument("--cache-gib", type=float, default=6.0)
    parser.add_argument("--step-tokens", type=int, default=32768)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--logs", type=Path, help="folder for what failed processes said")
    parser.add_argument("--out", type=Path, default=Path("kv_vllm_overhead.jsonl"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--attempt", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        row = measure(attempts(CONFIGURATIONS[args.one])[args.attempt], args)
        print("\n" + json.dumps({"measured": row}), flush=True)
        # The engine's own tear-down of its process group is not what is measured.
        os._exit(0)
    unknown = set(args.configurations.split(",")) - set(CONFIGURATIONS)
    if unknown:
        parser.error(f"unknown configurations {sorted(unknown)}; known: {', '.join(CONFIGURATIONS)}")
    run_all(args)


if __name__ == "__main__":
    main()
