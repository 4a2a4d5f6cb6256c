"""One engine of `kv_vllm_overhead.py`, in a process of its own: starts it and measures
configurations that it can run.

Reads a job from standard input and prints a line of JSON for the engine, then one for each
configuration. A codec is measured in turns with the engine without it. Ends after an error that may
have left the engine broken.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from assay.errors import AssayError
from kv_vllm_child import PREFIX


def tell(found: dict[str, Any]) -> None:
    """A line for the caller."""
    print("\n" + PREFIX + json.dumps(found) + "}", flush=True)


def start(job: dict[str, Any]) -> Any:
    """The engine, in this process."""
    given, engine = job["settings"], job["engine"]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(engine["runner"] == "2")),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM

    if engine["kv_cache_dtype"].startswith("turboquant") and engine["runner"] == "1":
        from assay.engines.vllm.cache_names import name_caches

        name_caches(engine["kv_cache_dtype"])
    longest = max(given["length"], given["prompt"] + given["new"]) + 16
    # Prefill is compiled either way; graphs of the batches that decode has are what counts.
    graphs = {"compilation_config": {"cudagraph_capture_sizes": sizes(given["requests"])}}
    return LLM(
        model=job["model"],
        dtype="bfloat16",
        kv_cache_dtype=engine["kv_cache_dtype"],
        kv_cache_memory_bytes=int(given["cache_gib"] * 2**30),
        gpu_memory_utilization=0.4,
        max_model_len=longest,
        max_num_batched_tokens=max(given["step_tokens"], longest),
        max_num_seqs=max(given["windows"], given["requests"]),
        enforce_eager=engine["eager"],
        enable_prefix_caching=False,
        async_scheduling=False,
        disable_log_stats=True,
        seed=0,
        **({} if engine["eager"] or given["device"] == "cpu" else graphs),
    )


def sizes(requests: int) -> list[int]:
    """Powers of two below the number of requests, and it."""
    return [2**i for i in range(requests.bit_length()) if 2**i < requests] + [requests]


class Bench:
    """An engine and what it is asked to do."""

    def __init__(self, llm: Any, job: dict[str, Any]) -> None:
        self.llm, self.job, self.given = llm, job, job["settings"]
        self.core = llm.llm_engine.engine_core.engine_core
        self.vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()

    def cache_facts(self) -> dict[str, Any]:
        """Tokens that the cache holds, and the bytes that it takes, as the scheduler has them."""
        config = self.core.scheduler.kv_cache_config
        groups = config.kv_cache_groups
        block = groups[0].kv_cache_spec.block_size
        cache = self.llm.llm_engine.vllm_config.cache_config
        return {
            # Groups take their blocks from one pool.
            "cache_tokens": config.num_blocks // len(groups) * block,
            "cache_bytes": sum(tensor.size for tensor in config.kv_cache_tensors),
            "block_size": block,
            "groups": len(groups),
            "skipped_layers": list(getattr(cache, "kv_cache_dtype_skip_layers", None) or ()),
        }

    def generate(self, prompts: range, length: int, new: int, *, named: bool = False) -> float:
        """Seconds for these prompts of `length` tokens and `new` tokens each; `named` ones are
        known again when they come twice.
        """
        from vllm import SamplingParams

        from assay.engines.vllm.steps import WINDOW

        size = self.vocabulary
        # Any tokens do: nothing is scored. 17 is no common factor of it, so that windows differ.
        tokens = [
            {"prompt_token_ids": [(i * 7919 + j * 17) % (size - 100) + 50 for j in range(length)]}
            for i in prompts
        ]
        plain = {"max_tokens": new, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        asked = [
            SamplingParams(**plain, extra_args={WINDOW: i} if named else None) for i in prompts
        ]
        begin = time.perf_counter()
        self.llm.generate(tokens, asked, use_tqdm=False)
        return time.perf_counter() - begin

    @property
    def in_a_step(self) -> int:
        """Windows that a step of prefill takes."""
        return min(self.given["windows"], max(1, self.given["step_tokens"] // self.given["length"]))

    def prefill(self, windows: int, hooks: Any = None) -> float:
        """Seconds for so many windows; where a hook wants several passes, those of a step through
        all, then the next.
        """
        length = self.given["length"]
        if hooks is None or hooks.passes == 1:
            return self.generate(range(windows), length, 1)
        taken = 0.0
        for lo in range(0, windows, self.in_a_step):
            some = range(lo, min(lo + self.in_a_step, windows))
            for index in range(hooks.passes):
                hooks.start_pass(index)
                taken += self.generate(some, length, 1, named=True)
            hooks.commit()
        return taken

    def decode(self, new: int) -> float:
        """Seconds for the new tokens of all requests after their first."""
        requests = range(self.given["requests"])
        first = self.generate(requests, self.given["prompt"], 1)
        return self.generate(requests, self.given["prompt"], new + 1) - first

    def hooked(self, row: dict[str, Any]) -> Any:
        """The codec in the engine's layers: as a server has it, in snapshot as windows are
        scored.
        """
        from assay.engines.scoring import HookSpec
        from assay.engines.vllm.kv_hooks import KvHooks
        from assay.engines.vllm.steps import Steps
        from assay_lab.kv.hook_plan import hook_spec

        runner = self.core.model_executor.driver_worker.model_runner
        spec = hook_spec(
            "vllm:",
            codec=row["codec"],
            mode=row["mode"],
            length=self.given["length"],
            measure_windows=0,
        )
        if row["fitted"]:
            spec = HookSpec("kv_vllm_fitted:hook", {**spec.config, "fitted": row["fitted"]})
        steps = Steps(runner, self.given["length"] if row.get("mode") == "snapshot" else None)
        return KvHooks(spec, runner.get_model(), eager=self.job["engine"]["eager"], steps=steps)

    def measure(self, row: dict[str, Any]) -> dict[str, Any]:
        """The rates of a configuration; with a codec also what they are without, in turn with
        it.
        """
        given = self.given
        turns = Turns(self, row)
        turns.once(lambda hooks: self.prefill(self.in_a_step, hooks))
        windows, new = given["windows"], given["new"]
        found = turns.rates(
            "prefill_tok_s", lambda hooks: self.prefill(windows, hooks), windows * given["length"]
        )
        if row.get("mode") == "snapshot":
            found["decode_tok_s"] = None  # every window is run twice: that is no decoding
        else:
            turns.once(lambda hooks: self.decode(4))
            found |= turns.rates(
                "decode_tok_s", lambda hooks: self.decode(new), given["requests"] * new
            )
        if row.get("mode"):
            found |= {"codec": row["codec"], "mode": row["mode"]}
            found |= {"coder_calls": turns.fires, "layers_coded": turns.layers}
            if not turns.fires:
                raise RuntimeError("no coder was called")
        return found | hardware()


class Turns:
    """Repeats of one configuration: the codec put in, timed, and taken off again, after the engine
    without it was.
    """

    def __init__(self, bench: Bench, row: dict[str, Any]) -> None:
        self.bench, self.row = bench, row
        self.fires = self.layers = 0

    def rates(self, name: str, run: Callable[[Any], float], tokens: int) -> dict[str, Any]:
        """Tokens a second; fewer repeats than asked for where they take longer than the limit
        together.
        """
        bare: list[float] = []
        own: list[float] = []
        begin, limit_s = time.perf_counter(), self.bench.job["limit"]
        while len(own) < self.bench.given["repeats"] and (
            not own or time.perf_counter() - begin < limit_s
        ):
            if self.row.get("mode"):
                bare.append(tokens / run(None))
            own.append(tokens / self.once(run))
        found = {name: spread(own)}
        if bare:
            found[f"without_{name}"] = spread(bare)
            found[f"change_{name}"] = spread(
                [100 * (x / y - 1) for x, y in zip(own, bare, strict=True)]
            )
        return found

    def once(self, run: Callable[[Any], float]) -> float:
        """Seconds of one run, with the codec where the configuration has one."""
        if not self.row.get("mode"):
            return run(None)
        hooks = self.bench.hooked(self.row)
        try:
            taken = run(hooks)
            counted = hooks.engagement()
            self.fires, self.layers = self.fires + counted.fires, len(counted.per_layer)
        finally:
            hooks.remove()
        return taken


def spread(values: list[float]) -> dict[str, Any]:
    """Median and all values."""
    return {
        "median": statistics.median(values),
        "n": len(values),
        "all": [round(v, 2) for v in values],
    }


def hardware() -> dict[str, Any]:
    """The device, by the name it gives itself."""
    import torch

    return {
        "torch": torch.__version__,
        "hardware": (
            torch.cuda.get_device_name()
            if torch.cuda.is_available()
            else f"{os.cpu_count()} CPU cores"
        ),
        "load_average": [round(x, 1) for x in os.getloadavg()],
    }


def kernels(bench: Bench, row: dict[str, Any]) -> list[list[Any]]:
    """The twelve kernels that take the most time of a step of prefill: name, calls,
    milliseconds.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    hooks = bench.hooked(row)
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            bench.prefill(bench.in_a_step, hooks)
            torch.cuda.synchronize()
    finally:
        hooks.remove()
    events = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:12]
    return [[e.key[:80], e.count, round(e.self_device_time_total / 1000, 2)] for e in events]


def main() -> None:
    job = json.loads(sys.stdin.read())
    begin = time.perf_counter()
    llm = start(job)
    import vllm

    bench = Bench(llm, job)
    engine = {
        "vllm": vllm.__version__,
        "start_s": round(time.perf_counter() - begin, 1),
        **job["engine"],
    }
    tell({"engine": engine | bench.cache_facts()})
    for row in job["rows"]:
        name, begin = row["name"], time.perf_counter()
        try:
            found: dict[str, Any] = {"status": "measured", **bench.measure(row)}
            if row.get("mode") in ("inforward", "decode") and bench.given["device"] == "cuda":
                try:
                    found["kernels"] = kernels(bench, row)
                except (RuntimeError, AttributeError) as error:
                    # A profiler needs rights that not every machine gives.
                    found["kernels"] = str(error)[:200]
        except AssayError as error:
            found = {"status": "refused", "reasons": [f"{error.message}: {error.remedy}"]}
        except Exception as error:  # a row must not take the others with it
            traceback.print_exc()
            text = next(iter(str(error).splitlines()), "")[:400]
            tell(
                {
                    "row": name,
                    "status": "unavailable",
                    "reasons": [f"{type(error).__name__}: {text}"],
                }
            )
            break
        tell({"row": name, "measured_s": round(time.perf_counter() - begin, 1), **found})
    sys.stderr.flush()
    # The engine's own tear-down of its process group is not what is measured.
    os._exit(0)


if __name__ == "__main__":
    main()
