"""What the compressed cache of transformers costs: bytes that stay, and time a token, with and
without prediction.

    python kv_resident.py [--tokens 1024] [--steps 8] [--codec SPEC …]

SmolLM2-135M in bf16. Calibrated on source of Python's standard library, prompted with other modules
of it. The prompt goes in at once, which encodes it; then every token decodes all streams of its
layer, one layer at a time. Codecs take turns at every token, so that what else the machine does
meets all of them; times are the median over tokens and their range. `held_over_bytes` is the most
that layers hold for those that predict from them, beside the cache, while a token runs.
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
from assay.demo.models import build_smollm2
from assay.environment import describe
from assay.runs import cache_dir, write_atomically
from assay_lab.kv.calibrate import CalibrationPlan, run_calibrate
from assay_lab.kv.handover import Handover
from assay_lab.kv.resident import resident_cache

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
    parser.add_argument(
        "--codec", action="append", help="other codecs than the usual ones, '' for none"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    checkpoint = str(build_smollm2())
    table = cache_dir("kv-calibration") / "smollm2-source.safetensors"
    if not table.exists():
        text = table.with_suffix(".txt")
        write_atomically(text, kv_texts.other_source())
        run_calibrate(
            CalibrationPlan(
                checkpoint, table, text=(str(text),), windows=8, length=512, tokens=4080
            )
        )
    net = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    ids = AutoTokenizer.from_pretrained(checkpoint)(
        kv_texts.python_source()[: 8 * arguments.tokens]
    )["input_ids"]
    ids = torch.tensor([ids[: arguments.tokens + arguments.steps + 1]])
    runs = []
    for codec in arguments.codec or CODECS:
        runs.append(Run(net, codec, ids[:, : arguments.tokens], ids.shape[1], table))
    for at in range(arguments.tokens, ids.shape[1]):
        for run in runs:
            run.feed(ids[:, at : at + 1])
    rows = [run.row() for run in runs]
    for row in rows:
        print(json.dumps(row))
    document = {
        "tokens": arguments.tokens,
        "steps": arguments.steps,
        "rows": rows,
        "environment": describe(),
    }
    write_atomically(arguments.out, json.dumps(document, indent=1) + "\n")


class Run:
    """A model with its own cache, which has taken the prompt."""

    def __init__(
        self, net: Any, codec: str, prompt: torch.Tensor, length: int, table: Path
    ) -> None:
        self.net, self.codec, self.took = net, codec, []
        if codec:
            self.cache = resident_cache(net, codec, length=length, calibration=table)
            # What is built on first use is built before anything is timed.
            self._timed(prompt)
            self.cache.reset()
        else:
            self.cache = DynamicCache(config=net.config)
        self.peak = Peak(self.cache)
        self.prompt_s = self._timed(prompt)

    def feed(self, token: torch.Tensor) -> None:
        """One token."""
        self.took.append(1000 * self._timed(token))

    def row(self) -> dict[str, Any]:
        """Bytes, seconds of the prompt and milliseconds of a later token; the first of them warms
        up.
        """
        layers = self.cache.layers
        exact = sum(
            t.nbytes for layer in layers for t in (layer.keys, layer.values) if t is not None
        )
        times = self.took[1:]
        return {
            "codec": self.codec or "none",
            "resident_bytes": self.cache.resident_bytes if self.codec else exact,
            "exact_bytes": self.cache.exact_bytes if self.codec else exact,
            "table_bytes": self.cache.table_bytes if self.codec else 0,
            "held_over_bytes": self.peak.most,
            "prompt_s": self.prompt_s,
            "ms_a_token": {
                "median": statistics.median(times),
                "min": min(times),
                "max": max(times),
            },
        }

    def _timed(self, ids: torch.Tensor) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            self.net(input_ids=ids, past_key_values=self.cache)
        return time.perf_counter() - began


class Peak:
    """The most bytes that the layers of a cache hand over at one time: looked at after each
    stream's update.
    """

    def __init__(self, cache: Any) -> None:
        self.most = 0
        self._all: list[Handover] = [
            h for layer in cache.layers for h in getattr(layer, "assay_done", ())
        ]
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
