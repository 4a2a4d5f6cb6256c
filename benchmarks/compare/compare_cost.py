"""What a comparison of two models in transformers costs: time against their bare forward passes,
memory, stored bytes.

    python benchmarks/compare/compare_cost.py [--windows 8] [--repeats 5] [--device cpu]

Time: scoring reference and candidate and every statistic over the whole vocabulary, against the
same two models' plain `model(ids).logits` of the same windows in the same batches, alternating. On
a CPU it is processor time of all threads, which other programs disturb less than the clock does; on
a GPU wall time. Memory: the peak of a process that compares `--few` windows, and of one that
compares `--many`. Stored bytes: a reference of the same windows on disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from assay.cli.progress import show
from assay.demo.models import build_smollm2
from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import Window
from assay.environment import describe
from assay.fidelity.compare import run_compare
from assay.fidelity.keep_reference import keep_reference
from assay.fidelity.plan import Plan
from assay.fidelity.reference import plan_windows
from assay.fidelity.score import LiveRows, observe

RESULTS = Path(__file__).parent / "results"
CANDIDATE = "weights=int(bits=8,group=128)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--few", type=int, default=4)
    parser.add_argument("--many", type=int, default=32)
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "compare_cost.json")
    arguments = parser.parse_args()
    if arguments.peak_of:
        print(peak_of(arguments.peak_of, arguments))
        return
    document: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct",
        "candidate": CANDIDATE,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "length": arguments.length,
        "batch": arguments.batch,
        "environment": describe(),
        "time": times(arguments),
        "peak_mib": {str(n): peak_in_another_process(n) for n in (arguments.few, arguments.many)},
        "store": stored(arguments),
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1))


def plan_of(arguments: argparse.Namespace, windows: int) -> Plan:
    base = f"hf:{build_smollm2()}?device={arguments.device}&dtype={arguments.dtype}"
    return Plan(
        base,
        (f"{base}&{CANDIDATE}",),
        windows=windows,
        length=arguments.length,
        batch=arguments.batch,
        floors=False,
    )


def times(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each repeat, and the ratio of each pair."""
    plan = plan_of(arguments, arguments.windows)
    reference, candidate = HfScorer.load(plan.reference), HfScorer.load(plan.candidates[0])
    windows, _ = plan_windows(plan, reference.tokenizer)
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    forwards, scorings = [], []
    bare([reference, candidate], windows[: plan.batch], plan.batch)  # first calls allocate
    for _ in range(arguments.repeats):
        began = clock()
        bare([reference, candidate], windows, plan.batch)
        middle = clock()
        observe(LiveRows(reference, plan.job), candidate, windows, plan.job)
        forwards.append(middle - began)
        scorings.append(clock() - middle)
    ratios = sorted(s / f for s, f in zip(scorings, forwards, strict=True))
    return {
        "clock": clock.__name__,
        "windows": len(windows),
        "forwards_s": forwards,
        "scoring_s": scorings,
        "ratio": {
            "median": statistics.median(ratios),
            "min": ratios[0],
            "max": ratios[-1],
            "n": len(ratios),
        },
    }


def bare(engines: list[HfScorer], windows: list[Window], batch: int) -> None:
    """Plain forward passes with logits of every token."""
    import torch

    for lo in range(0, len(windows), batch):
        ids = torch.tensor([w.tokens for w in windows[lo : lo + batch]])
        for engine in engines:
            model = engine.engine.model
            with torch.inference_mode():
                logits = model(ids.to(model.device), use_cache=False).logits
                if logits.is_cuda:
                    torch.cuda.synchronize()


def peak_of(windows: int, arguments: argparse.Namespace) -> float:
    """Peak resident MiB of this process after a whole comparison.

    From /proc: what `getrusage` gives is inherited from the process that started this one.
    """
    run_compare(plan_of(arguments, windows), show)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def peak_in_another_process(windows: int) -> float:
    command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", str(windows)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def stored(arguments: argparse.Namespace) -> dict[str, Any]:
    """Bytes of a stored reference in bf16, against the 2 · V + 8 a token of a file of
    log-probabilities.
    """
    plan = plan_of(arguments, arguments.few)
    with tempfile.TemporaryDirectory() as folder:
        report = keep_reference(
            plan, Path(folder) / "kept", dtype="bfloat16", form="assay", progress=show
        )
    kept = ("tokens", "states_bytes", "bytes_per_token", "head_bytes", "dtype")
    return {name: report.results[name] for name in kept} | {
        "log_probabilities_bytes_per_token": 2 * 49_152 + 8
    }


if __name__ == "__main__":
    main()
