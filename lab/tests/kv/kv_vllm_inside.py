"""Run by a Python that has vLLM: codecs in its cache, with a real model; prints what was measured
as JSON.

Usage: python kv_vllm_inside.py CHECKPOINT TENSORS OUT CALIBRATION; TENSORS is a safetensors file
for `streams_of`, OUT gets what a calibration captures, CALIBRATION is one for the codec that
predicts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from assay.engines.scoring import Engagement, HookSpec, ScoreJob, Window
from assay.engines.vllm.scorer import VllmScorer
from assay.engines.vllm.steps import Rewrite
from assay.fidelity.metrics.token_statistics import window_statistics
from assay_lab.kv.cache_bytes import measured_bytes, stream_facts
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.hook_plan import HookPlan, hook_spec, path_of
from assay_lab.kv.spec import parse_recipe
from assay_lab.kv.vllm.capture import capture_in_vllm
from assay_lab.kv.vllm.hook import VllmCodecHook

LENGTH, FROM, COUNT = 64, 49, 6
HADAMARD = "hadamard(bits=4)"
PREDICT, PREDICTED = "prerope+pca(step=0.6, classes=1, predict=all)", (10, 11)
"""Coded in these layers only, so that the first of them predicts from exact streams."""
SPECS = (
    "hadamard(bits=4)",
    "hadamard(bits=3.5)",
    "int(bits=4)",
    "fp8",
    "lattice",
    "kakeya",
    "sinks(n=4)+mean+hadamard",
    "outliers(n=2)+recent(n=5)+int(bits=3)",
    "pca(bits=3, coding=fixed)",
    "pca(step=0.05)",
)


def streams_of(path: Path) -> dict[str, list[float]]:
    """Of what each codec makes of the keys in a file, fitted to the samples in it: bytes, mean and
    mean square.
    """
    given = load_file(path)
    site = LayerStream("k", 3, 30, *given["x"].shape[::2])
    samples = Samples(site, given["samples"], given["positions"], given["metric"])
    known = replace(samples, predictors=given["side_samples"], predictor_keys=((2, "k"),))
    found = {}
    for spec in (*SPECS, PREDICT):
        predictors = given["side"] if spec == PREDICT else None
        coder = parse_recipe(spec).fit(samples if predictors is None else known)
        stream = coder.encode(given["x"], predictors)
        back = coder.decode(stream, predictors=predictors)
        found[spec] = [
            len(stream),
            float(back.double().mean()),
            float(back.double().square().mean()),
        ]
    return found


def job(engine: str, mode: str, codec: str | None, calibration: str | None = None) -> ScoreJob:
    """How windows are scored with a codec, None for the exact cache; one with a calibration in
    `PREDICTED` only.
    """
    hook = None
    if codec:
        where = {"calibration": calibration, "layers": PREDICTED} if calibration else {}
        hook = hook_spec(engine, codec=codec, mode=mode, length=LENGTH, measure_windows=1, **where)
    if mode == "decode":
        return ScoreJob(path_of(mode), scored_from=FROM, batch=COUNT, hook=hook)
    return ScoreJob(path_of(mode), batch=COUNT - 2, hook=hook)


def kl(reference: list[Any], candidate: list[Any]) -> dict[str, float]:
    """Mean and largest KL."""
    values = torch.cat(
        [window_statistics(a, b).kl for a, b in zip(reference, candidate, strict=True)]
    )
    return {"mean": float(values.mean()), "max": float(values.max())}


class Peek(VllmCodecHook):
    """Holds the paged cache of a layer against what the codec makes of the keys and values that
    came.
    """

    found: dict[str, Any]

    def on_kv(self, layer: int, k: Any, v: Any, positions: Any) -> tuple[Any, Any]:
        out = super().on_kv(layer, k, v, positions)
        requests = self._context.steps.requests or ()
        if layer == 7 and requests and requests[0].start == LENGTH - 2:
            attention = self._context.attentions[layer].attn
            real = attention.kv_cache.clone()
            for name, coded in (("coded", True), ("exact", False)):
                changes = []
                for request in requests:
                    pair = []
                    for stream in ("k", "v"):
                        x = (
                            self._lanes[layer, stream]
                            .histories[request.key]
                            .track.exact[0, :, : request.start]
                        )
                        x = self._coders[layer, stream].reconstruct(x).to(x.dtype) if coded else x
                        pair.append(x.transpose(0, 1))
                    changes.append(Rewrite(request, 0, *pair))
                self._context.rewrite(layer, changes, rotate=self.placement_of(layer) == "pre_rope")
                Peek.found[name] = bool(torch.equal(real, attention.kv_cache))
            attention.kv_cache.copy_(real)
        return out


def peek(**config: Any) -> Peek:
    Peek.found = {}
    return Peek(HookPlan.from_config(config))


def predicted(taken: Engagement) -> dict[str, float]:
    """Times that the coded streams of the first window are smaller than bf16."""
    facts = stream_facts(taken)
    return {
        f"{n}.{s}": facts[n, s][0].exact / facts[n, s][0].stored for n in PREDICTED for s in "kv"
    }


def measure(checkpoint: str, out: Path, calibration: str) -> dict[str, Any]:
    """Everything, with one engine."""
    options = f"max_model_len=128&max_num_batched_tokens={COUNT * LENGTH}&kv_cache_gib=0.1"
    engine = VllmScorer.load(f"vllm:{checkpoint}?{options}")
    ids = engine.tokenizer.encode("\n".join(topics[name] for name in ("class", "assert", "import")))
    windows = [Window(i, tuple(ids[i * LENGTH : (i + 1) * LENGTH])) for i in range(COUNT)]
    found: dict[str, Any] = {"windows": [w.tokens for w in windows]}
    plain = {
        mode: list(engine.score_windows(windows, job("vllm", mode, None)))
        for mode in ("decode", "inforward")
    }
    plain["snapshot"] = plain["inforward"]
    for mode, codec in (
        *(("inforward", c) for c in ("identity", "prerope+identity", HADAMARD, "int(bits=4)")),
        *(("snapshot", c) for c in ("identity", HADAMARD)),
        *(("decode", c) for c in ("prerope+recent(n=3)+identity", HADAMARD)),
    ):
        rows = list(engine.score_windows(windows, job("vllm", mode, codec)))
        taken = engine.engagement()
        found[f"{mode} {codec}"] = kl(plain[mode], rows) | {
            "layers": len(taken.per_layer),
            "fires": sorted(set(taken.per_layer.values())),
            "ratio": measured_bytes(taken, LENGTH - 1).ratio,
        }
    for mode in plain:
        rows = list(engine.score_windows(windows, job("vllm", mode, PREDICT, calibration)))
        found[f"{mode} predicted"] = kl(plain[mode], rows) | predicted(engine.engagement())
    for codec in (HADAMARD, f"prerope+{HADAMARD}"):
        asked = job("vllm", "decode", codec)
        hook = HookSpec(f"{__name__}:peek", asked.hook.config if asked.hook else {})
        list(
            engine.score_windows(
                windows[:2], ScoreJob(asked.path, asked.scored_from, batch=2, hook=hook)
            )
        )
        found[f"cache {codec}"] = dict(Peek.found)
    captured, cache = capture_in_vllm(engine, windows, tokens=COUNT * 20, batch=COUNT)
    save_file({name: t.contiguous() for name, t in captured.items()}, out)
    found["cache"] = cache
    engine.close()
    return found


if __name__ == "__main__":
    streams = streams_of(Path(sys.argv[2]))
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[3]), sys.argv[4]) | {"streams": streams}))
