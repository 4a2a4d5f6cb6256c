"""Synthetic decompositions with known effects: distributions over a small vocabulary, clustered by
window.
"""

from __future__ import annotations

import numpy as np

from assay.fidelity.observation import WindowObservation
from assay_lab.gap.buckets import WindowSums


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def observed(index: int, ref: np.ndarray, cand: np.ndarray, gold: np.ndarray) -> WindowObservation:
    """What `observe` would see of one window: log-probabilities [n, V] of both sides, ids [n]."""
    p, q, rows = np.exp(ref), np.exp(cand), np.arange(len(gold))
    return WindowObservation(
        index=index,
        first=1,
        tokens=np.concatenate([[0], gold]).astype(np.int32),
        nll_ref=-ref[rows, gold],
        nll_cand=-cand[rows, gold],
        kl=(p * (ref - cand)).sum(-1),
        kl_rev=(q * (cand - ref)).sum(-1),
        top1=ref.argmax(-1) == cand.argmax(-1),
        p_ref=p[rows, gold],
        p_cand=q[rows, gold],
        conf=p.max(-1),
        tv=np.abs(p - q).sum(-1) / 2,
        beyond=ref.argmax(-1) != cand.argmax(-1),
    )


def configurations(
    names: list[str], windows: int = 10, tokens: int = 20, vocabulary: int = 12, seed: int = 0
) -> tuple[dict[str, list[np.ndarray]], list[np.ndarray], list[np.ndarray]]:
    """Log-probabilities of each configuration by window, those of the reference, and the tokens
    that came.
    """
    rng = np.random.default_rng(seed)
    reference, gold, found = [], [], {name: [] for name in names}
    for _ in range(windows):
        logits = rng.normal(size=(tokens, vocabulary)) + rng.normal(size=vocabulary)
        reference.append(log_softmax(logits))
        gold.append(rng.integers(vocabulary, size=tokens))
        for k, name in enumerate(names):
            change = rng.normal(scale=0.1 * (k + 1), size=logits.shape)
            found[name].append(log_softmax(logits + change))
    return found, reference, gold


def sums(dnll: np.ndarray, kl: np.ndarray, tokens: int = 100) -> WindowSums:
    """From means a token of each window."""
    return WindowSums(dnll * tokens, kl * tokens, np.full(len(dnll), float(tokens)))
