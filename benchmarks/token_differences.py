"""Real per-token differences of SmolLM2 candidates, the material of stats_coverage.py.

Scores the first windows of Python's topics (511 tokens each, prefill) with SmolLM2-135M-Instruct in float32 and with each candidate, and
keeps d = NLL_candidate − NLL_reference, KL and top-1 agreement of every token:

    python benchmarks/token_differences.py [--windows 64] [--device cuda]    # writes benchmarks/results/token_differences.npz
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from assay.demo.models import build_smollm2
from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import ScoreJob
from assay.fidelity.metrics import window_statistics
from assay.fidelity.plan import Cut, cut_windows
from assay.fidelity.text import read_text

RESULT = Path(__file__).parent / "results" / "token_differences.npz"
CANDIDATES = {"bf16": "dtype=bfloat16", "4 bit": "dtype=float32&weights=polar(bits=4)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    model = build_smollm2()
    reference = HfScorer.load(f"hf:{model}?dtype=float32&device={given.device}")
    ids = reference.tokenizer.encode(read_text().text)
    windows = cut_windows(ids, Cut(length=512), None, given.windows)
    job = ScoreJob(batch=4)
    held = list(reference.score_windows(windows, job))  # 512 × 576 states a window: 75 MB for 64
    arrays: dict[str, np.ndarray] = {}
    for name, options in CANDIDATES.items():
        candidate = HfScorer.load(f"hf:{model}?{options}&device={given.device}")
        seen = [
            window_statistics(ref, cand)
            for ref, cand in zip(held, candidate.score_windows(windows, job), strict=True)
        ]
        arrays[f"{name}/d"] = np.stack([(s.nll_cand - s.nll_ref).cpu().numpy() for s in seen]).astype(
            np.float16
        )
        arrays[f"{name}/kl"] = np.stack([s.kl.cpu().numpy() for s in seen]).astype(np.float16)
        arrays[f"{name}/top1"] = np.stack([s.top1.cpu().numpy() for s in seen])
        candidate.close()
        np.savez_compressed(given.out, **arrays)
        print(
            name,
            *(f"{key} {arrays[key].mean(dtype=np.float64):.5f}" for key in arrays if key.startswith(name)),
        )


if __name__ == "__main__":
    main()
