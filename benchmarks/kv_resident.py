"""What the compressed cache of transformers costs: bytes that stay, and time a token, with and without prediction.

    python benchmarks/kv_resident.py [--tokens 1024] [--steps 8] [--codec SPEC …]

SmolLM2-135M in bf16. Calibrated on source of Python's standard library, prompted with other modules of it. The prompt goes
in at once, which encodes it; then every token decodes all streams of its layer, one layer at a time. Times are the median
of the steps and their range, one codec after the other in one process; `held over` is the most that the layers hold for those that
predict from them, beside the cache, while a token runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kv_texts
from assay.cache import cache_dir, write_atomically
from assay.demo.models import build_smollm2
from assay.environment import describe
from assay.kv.calibrate import CalibrationPlan, run_calibrate
from assay.kv.handover import Handover
from assay.kv.resident import resident_cache

AROUND = "prerope+sinks(n=4)+"
CODECS = (
    "",
    f"{AROUND}hadamard(bits=4)",
    *(f"{AROUND}pca(bits=2.2{more})" for more in ("", ", predict=all")),
    *(f"{AROUND}pca(bits=3, coding=fixed{more})" for more in ("", ", predict=all")),
)
OUT = Path(__file__).parent / "results" / "kv_resident.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--codec", action="append", help="other codecs than the usual ones, '' for none")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    checkpoint = str(build_smollm2())
    table = cache_dir("kv-calibration") / "smollm2-source.safetensors"
    if not table.exists():
        text = table.with_suffix(".txt")
        write_atomically(text, kv_texts.other_source())
        run_calibrate(CalibrationPlan(checkpoint, (str(text),), windows=16, length=512, tokens=8160), table)
    net = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    ids = AutoTokenizer.from_pretrained(checkpoint)(kv_texts.python_source()[: 8 * arguments.tokens])[
        "input_ids"
    ]
    ids = torch.tensor([ids[: arguments.tokens + arguments.steps + 1]])
    rows = []
    for codec in arguments.codec or CODECS:
        rows.append({"codec": codec or "none", **measured(net, codec, ids, arguments.tokens, table)})
        print(json.dumps(rows[-1]), flush=True)
    document = {"tokens": arguments.tokens, "steps": arguments.steps, "rows": rows, "environment": describe()}
    write_atomically(arguments.out, json.dumps(document, indent=1) + "\n")


def measured(net: Any, codec: str, ids: torch.Tensor, tokens: int, table: Path) -> dict[str, Any]:
    """Bytes after the prompt, seconds of the prompt and milliseconds of each later token."""
    length = ids.shape[1]
    cache = (
        resident_cache(net, codec, length=length, calibration=table)
        if codec
        else DynamicCache(config=net.config)
    )
    peak = Peak(cache)
    took = []
    with torch.inference_mode():
        began = time.perf_counter()
        net(input_ids=ids[:, :tokens], past_key_values=cache)
        prompt = time.perf_counter() - began
        for at in range(tokens, length):
            began = time.perf_counter()
            net(input_ids=ids[:, at : at + 1], past_key_values=cache)
            took.append(1000 * (time.perf_counter() - began))
    took = took[1:]  # the first one warms up
    exact = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values) if t is not None)
    return {
        "resident_bytes": cache.resident_bytes if codec else exact,
        "exact_bytes": cache.exact_bytes if codec else exact,
        "table_bytes": cache.table_bytes if codec else 0,
        "held_over_bytes": peak.most,
        "prompt_s": prompt,
        "ms_a_token": {"median": statistics.median(took), "min": min(took), "max": max(took)},
    }


class Peak:
    """The most bytes that the layers of a cache hand over at one time: looked at after each stream's update."""

    def __init__(self, cache: Any) -> None:
        self.most = 0
        self._all: list[Handover] = [h for layer in cache.layers for h in getattr(layer, "assay_done", ())]
        if self._all:
            for layer in cache.layers:
                for stream in layer.assay_streams:
                    self._watch(stream)

    def _watch(self, stream: Any) -> None:
        real = stream.update

        def update(new: torch.Tensor) -> torch.Tensor:
            seen: torch.Tensor = real(new)
            held = {
                states.untyped_storage().data_ptr(): states.untyped_storage().nbytes()
                for handover in self._all
                for _, states in handover._pieces
            }
            self.most = max(self.most, sum(held.values()))
            return seen

        stream.update = update


if __name__ == "__main__":
    main()
