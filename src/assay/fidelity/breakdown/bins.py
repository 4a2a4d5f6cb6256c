"""Differences in bins: by depth in the window, by the reference's confidence, by kind of token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from assay.fidelity.observation import WindowObservation
from assay.stats import ClusterEstimate, cluster_ratio

if TYPE_CHECKING:
    pass


CONFIDENCE_EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0 + 1e-9)


DEPTH_BINS = 8


@dataclass(frozen=True)
class Bin:
    """One part of the tokens: its name, how many they are, mean KL and mean ΔNLL by window, top-1
    share.
    """

    name: str
    tokens: int
    kl: ClusterEstimate
    dnll: ClusterEstimate
    top1: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "tokens": self.tokens,
            "kld": {"mean": self.kl.value, "lo": self.kl.interval.lo, "hi": self.kl.interval.hi},
            "dnll": {
                "value": self.dnll.value,
                "lo": self.dnll.interval.lo,
                "hi": self.dnll.interval.hi,
            },
            "top1": self.top1,
        }


def by_depth(seen: Sequence[WindowObservation]) -> list[Bin]:
    """Equal parts of the window, by how many tokens come before."""
    first, length = seen[0].first, seen[0].tokens.size
    edges = np.linspace(first, length, min(DEPTH_BINS, length - first) + 1).astype(int)
    return _bins(
        seen,
        [f"{lo}–{hi - 1}" for lo, hi in pairwise(edges)],
        lambda w: np.searchsorted(edges, np.arange(w.first, w.tokens.size), side="right") - 1,
    )


def by_confidence(seen: Sequence[WindowObservation]) -> list[Bin]:
    """By the reference's largest probability: how sure it was of what comes."""
    names = [f"{lo:.1f}–{min(hi, 1.0):.1f}" for lo, hi in pairwise(CONFIDENCE_EDGES)]
    return _bins(
        seen,
        names,
        lambda w: np.searchsorted(CONFIDENCE_EDGES, np.nan_to_num(w.conf), side="right") - 1,
    )


def by_class(seen: Sequence[WindowObservation], class_of: Callable[[int], str]) -> list[Bin]:
    """By the kind of target token; `class_of` names it from the id."""
    ids = np.unique(np.concatenate([w.tokens for w in seen]))
    classes = {int(i): class_of(int(i)) for i in ids}
    names = sorted(set(classes.values()))
    place = {name: k for k, name in enumerate(names)}
    table = np.array([place[classes[int(i)]] for i in ids])
    return _bins(seen, names, lambda w: table[np.searchsorted(ids, w.tokens[w.first :])])


def worst_tokens(
    seen: Sequence[WindowObservation],
    decode: Callable[[Sequence[int]], str],
    count: int = 10,
    context: int = 24,
) -> list[dict[str, Any]]:
    """The tokens of largest KL, each with the text before it."""
    rows = []
    for w in seen:
        kl = np.where(w.finite, w.kl, -np.inf)
        for i in np.argsort(kl)[::-1][:count]:
            if w.finite[i]:
                rows.append((float(kl[i]), w, int(i)))
    rows.sort(key=lambda row: -row[0])
    return [
        {
            "kld": kl,
            "window": w.index,
            "position": w.first + i,
            "token": decode([int(w.tokens[w.first + i])]),
            "before": decode(
                [int(t) for t in w.tokens[max(0, w.first + i - context) : w.first + i]]
            ),
            "p_reference": float(w.p_ref[i]),
            "p_candidate": float(w.p_cand[i]),
        }
        for kl, w, i in rows[:count]
    ]


def _bins(
    seen: Sequence[WindowObservation],
    names: Sequence[str],
    place: Callable[[WindowObservation], NDArray[np.int64]],
) -> list[Bin]:
    """Sums of each bin and window; bins without tokens are left out."""
    size = len(names)
    sums = {name: np.zeros((len(seen), size)) for name in ("n", "kl", "dnll", "top1")}
    for row, w in enumerate(seen):
        some = w.finite & np.isfinite(w.kl)
        where = place(w)[some]
        sums["n"][row] = np.bincount(where, minlength=size)
        for name in ("kl", "dnll", "top1"):
            values = np.asarray(getattr(w, name), np.float64)[some]
            sums[name][row] = np.bincount(where, weights=values, minlength=size)
    return [
        Bin(
            name,
            int(sums["n"][:, k].sum()),
            cluster_ratio(sums["kl"][:, k], sums["n"][:, k]),
            cluster_ratio(sums["dnll"][:, k], sums["n"][:, k]),
            float(sums["top1"][:, k].sum() / sums["n"][:, k].sum()),
        )
        for k, name in enumerate(names)
        if sums["n"][:, k].sum() > 0
    ]
