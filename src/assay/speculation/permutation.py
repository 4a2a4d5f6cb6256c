"""Do two samples of texts come from one distribution? A permutation test over token positions."""

from __future__ import annotations

from collections.abc import Sequence


def permutation_p(
    a: Sequence[Sequence[str]], b: Sequence[Sequence[str]], rounds: int = 2000, seed: int = 0
) -> float:
    """p-value for texts `a` and `b` having one distribution.

    Statistic: Σ over positions and tokens of (n_a / |a| − n_b / |b|)² / (n_a + n_b), a chi-square-like distance of
    the token counts at each position. Its null distribution comes from permuting which side a text is on, so texts,
    not tokens, are what is exchanged. (1 + at least as extreme) / (1 + rounds), Phipson and Smyth (2010).
    """
    import numpy as np

    texts = [*a, *b]
    width = max((len(t) for t in texts), default=0)
    columns = []
    for i in range(width):
        present = [t[i] if i < len(t) else None for t in texts]
        columns += [np.array([p == token for p in present], dtype=float) for token in dict.fromkeys(present)]
    if not columns:
        return 1.0
    counts = np.array(columns)  # (position · token, text)
    weight = 1 / counts.sum(axis=1)
    side = np.array([1 / len(a)] * len(a) + [-1 / len(b)] * len(b))

    def distance(order: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        return float((weight * (counts @ order) ** 2).sum())

    observed = distance(side)
    rng = np.random.default_rng(seed)
    extreme = sum(distance(rng.permutation(side)) >= observed - 1e-12 for _ in range(rounds))
    return (1 + extreme) / (1 + rounds)
