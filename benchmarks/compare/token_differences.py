"""Real per-token differences of SmolLM2 candidates, the material of stats_coverage.py.

Scores the first windows of Python's topics (511 tokens each, prefill) with SmolLM2-135M-Instruct in
float32 and with each candidate, and keeps d = NLL_candidate − NLL_reference, KL and top-1 agreement
of every token:

    python benchmarks/compare/token_differences.py [--windows 64] [--device cuda]    # writes
    benchmarks/compare/results/token_differences.npz

With `--text FILE --sums OUT.npz` all windows of a text are scored and their sums kept in the order
of the text, so that stats_coverage.py can see how alike neighbours are.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

import numpy as np

from assay.demo.models import build_smollm2
from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import ScoreJob
from assay.fidelity.metrics.token_statistics import window_statistics
from assay.fidelity.text.sources import read_text
from assay.fidelity.windows import Cut, cut_windows, places_of

RESULT = Path(__file__).parent / "results" / "token_differences.npz"
CANDIDATES = {"bf16": "dtype=bfloat16", "4 bit": "dtype=float32&weights=polar(bits=4)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--text", nargs="*", default=())
    parser.add_argument("--sums", type=Path)
    parser.add_argument("--batch", type=int, default=4)
    given = parser.parse_args()
    if given.sums:
        keep_sums(given)
        return
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
        arrays[f"{name}/d"] = np.stack(
            [(s.nll_cand - s.nll_ref).cpu().numpy() for s in seen]
        ).astype(np.float16)
        arrays[f"{name}/kl"] = np.stack([s.kl.cpu().numpy() for s in seen]).astype(np.float16)
        arrays[f"{name}/top1"] = np.stack([s.top1.cpu().numpy() for s in seen])
        candidate.close()
        np.savez_compressed(given.out, **arrays)
        print(
            name,
            *(
                f"{key} {arrays[key].mean(dtype=np.float64):.5f}"
                for key in arrays
                if key.startswith(name)
            ),
        )


def keep_sums(given: argparse.Namespace) -> None:
    """Sums of d, KL and equal top-1 of every window of the text, in its order: arrays NAME/d,
    NAME/kl, NAME/top1.
    """
    model = build_smollm2()
    with closing(HfScorer.load(f"hf:{model}?dtype=float32&device={given.device}")) as reference:
        ids = reference.tokenizer.encode(read_text(given.text).text)
        cut = Cut(length=512)
        windows = cut_windows(ids, cut, None)
        order = np.argsort(places_of(len(ids), cut, None))
        job = ScoreJob(batch=given.batch)
        arrays: dict[str, np.ndarray] = {}
        for name, options in CANDIDATES.items():
            with closing(HfScorer.load(f"hf:{model}?{options}&device={given.device}")) as candidate:
                rows = [
                    (float((s.nll_cand - s.nll_ref).sum()), float(s.kl.sum()), float(s.top1.sum()))
                    for ref, cand in zip(
                        reference.score_windows(windows, job),
                        candidate.score_windows(windows, job),
                        strict=True,
                    )
                    for s in [window_statistics(ref, cand)]
                ]
            for column, values in zip(("d", "kl", "top1"), np.array(rows)[order].T, strict=True):
                arrays[f"{name}/{column}"] = values
            np.savez_compressed(given.sums, **arrays)
            print(
                name,
                len(rows),
                "windows",
                *(f"{v.sum() / 511 / len(rows):.5f}" for v in np.array(rows).T[:, None]),
            )


if __name__ == "__main__":
    main()
