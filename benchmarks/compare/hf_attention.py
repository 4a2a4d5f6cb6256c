"""What `hf:MODEL?attention=assay` differs by from transformers' own `sdpa`, and what it saves.

    python benchmarks/compare/hf_attention.py [--windows 8] [--length 512] [--repeats 3] [--random]
    [--out FILE]

SmolLM2-135M in bfloat16 (`--random`: its shape with random weights, where the model cannot be had;
numbers then tell the speed only). Each kind of attention scores the second half of the same windows
by the decode path, and goes on from prompts of unequal length in one batch (where there is a mask).
Kinds take turns; beside the wall time stands the process's own processor time, which other programs
on the machine change less. Differences are KL and top-1 against `sdpa` in the same type, with
`eager`, also transformers' own, as the yardstick.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from assay.engines import Request
from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import ScoreJob, ScoringPath, Window, WindowRows
from assay.environment import describe
from assay.fidelity.metrics.token_statistics import window_statistics

RESULTS = Path(__file__).parent / "results"
KINDS = ("sdpa", "assay", "eager")


def random_smollm2(folder: Path) -> Path:
    """SmolLM2-135M's shape with random weights, and a tokenizer of numbered words."""
    from tokenizers import Tokenizer, models

    config = transformers.LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{i}": i for i in range(49_152)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0"
    ).save_pretrained(folder)
    return folder


def timed(work: Callable[[], Any], device: str) -> tuple[Any, dict[str, float]]:
    wall, own = time.monotonic(), time.process_time()
    found = work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return found, {
        "seconds": time.monotonic() - wall,
        "processor_seconds": time.process_time() - own,
    }


def against(reference: list[WindowRows], rows: list[WindowRows]) -> dict[str, float]:
    seen = [window_statistics(a, b) for a, b in zip(reference, rows, strict=True)]
    kl, top1 = (
        np.concatenate([getattr(s, name).cpu().numpy() for s in seen]) for name in ("kl", "top1")
    )
    return {
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1_pct": 100 * float(top1.mean()),
    }


def source() -> str:
    """Modules of Python's library, one after the other."""
    library = Path(tempfile.__file__).parent
    return "\n\n".join(f.read_text(encoding="utf-8") for f in sorted(library.glob("*.py")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "hf_attention.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.random:
            model = random_smollm2(Path(folder))
            ids = np.random.default_rng(0).integers(1, 49_000, 40_000).tolist()
        else:
            from assay.demo.models import build_smollm2

            model = build_smollm2()
        engines = {kind: HfScorer.load(f"hf:{model}?attention={kind}") for kind in KINDS}
        if not arguments.random:
            ids = engines["sdpa"].engine.tokenize(source()[:120_000])
        length = arguments.length
        windows = [
            Window(i, tuple(ids[i * length : (i + 1) * length])) for i in range(arguments.windows)
        ]
        job = ScoreJob(ScoringPath.DECODE, scored_from=length // 2 + 1, batch=arguments.windows)
        requests = [
            Request(
                prompt=tuple(ids[900 * i : 900 * i + 400 + 37 * i]),
                max_tokens=arguments.tokens,
                ignore_eos=True,
            )
            for i in range(8)
        ]
        device = str(engines["sdpa"].engine.model.device)
        rows: list[dict[str, Any]] = []
        scored: dict[str, list[WindowRows]] = {}
        for repeat in range(arguments.repeats):
            for kind, engine in engines.items():
                for what, work in (
                    ("decode", lambda e=engine: list(e.score_windows(windows, job))),
                    ("generate", lambda e=engine: e.engine.generate_batch(requests)),
                ):
                    found, took = timed(work, device)
                    if what == "decode":
                        scored[kind] = found
                    rows.append(
                        {
                            "attention": kind,
                            "what": what,
                            "repeat": repeat,
                            "load": os.getloadavg()[0],
                            **took,
                        }
                    )
                    print(json.dumps(rows[-1]), flush=True)
        differences = {kind: against(scored["sdpa"], scored[kind]) for kind in KINDS[1:]}
        facts = engines["sdpa"].describe()
    result = {
        "model": "SmolLM2-135M" + (", random weights" if arguments.random else ""),
        "device": device,
        "dtype": facts["dtype"],
        "threads": facts["threads"],
        "windows": len(windows),
        "length": length,
        "differences": differences,
        "rows": rows,
        "environment": describe(),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(table(result))


def table(result: dict[str, Any]) -> str:
    lines = [
        (
            f"{result['model']}, {result['dtype']}, {result['device']}, {result['threads']}"
            f" threads: {result['windows']} windows of {result['length']} decoded side by side, and"
            " 8 prompts of unequal length continued."
        ),
        "",
        (
            "| attention | decode, s | of the process | generate, s | of the process | mean KL to"
            " sdpa | largest | same top-1 |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        cells = [kind]
        for what in ("decode", "generate"):
            own = [row for row in result["rows"] if (row["attention"], row["what"]) == (kind, what)]
            cells += [
                f"{median(r[name] for r in own):.1f}" for name in ("seconds", "processor_seconds")
            ]
        found = result["differences"].get(kind)
        cells += (
            [f"{found['kl_mean']:.2g}", f"{found['kl_max']:.2g}", f"{found['top1_pct']:.2f} %"]
            if found
            else ["0", "0", "100 %"]
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
