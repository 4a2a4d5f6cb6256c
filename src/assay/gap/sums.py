"""Sums by window of what was seen of several configurations, on the tokens that all of them scored.

The window is the unit of every interval, so a decomposition needs nothing finer: for every window the sum of
d = NLL_k − NLL_ref and of KL(p_ref‖p_k) over its tokens. Both are differences from one reference, so the step from
configuration k − 1 to k is their difference, and steps telescope exactly to the last configuration:

    Σ_k (d_k − d_{k−1}) = d_n,        Σ_k (KL_k − KL_{k−1}) = KL(p_ref‖p_n),

the second because KL_k − KL_{k−1} = E_{p_ref} [log p_{k−1} − log p_k].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.errors import AssayError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from assay.fidelity.observations import WindowObservation


@dataclass(frozen=True)
class WindowSums:
    """Sums of G windows, each array [G]: `dnll` and `kl` in nats, `tokens` how many were counted.

    Sums over the same tokens can be added, subtracted and scaled; that is how buckets are made.
    """

    dnll: NDArray[np.float64]
    kl: NDArray[np.float64]
    tokens: NDArray[np.float64]

    def __add__(self, other: WindowSums) -> WindowSums:
        return WindowSums(self.dnll + other.dnll, self.kl + other.kl, self.tokens)

    def __sub__(self, other: WindowSums) -> WindowSums:
        return WindowSums(self.dnll - other.dnll, self.kl - other.kl, self.tokens)

    def __mul__(self, factor: float) -> WindowSums:
        return WindowSums(self.dnll * factor, self.kl * factor, self.tokens)


def zero_like(sums: WindowSums) -> WindowSums:
    """No difference at all, on the same tokens: what the reference itself comes to."""
    return sums * 0.0


def aligned(seen: Mapping[str, Sequence[WindowObservation]]) -> dict[str, WindowSums]:
    """Sums of every configuration over the tokens that are finite in all of them.

    A token that one configuration cannot score is left out everywhere; otherwise differences would compare different
    tokens. AssayError where windows differ or nothing is left.
    """
    import numpy as np

    if not seen:
        return {}
    first = next(iter(seen.values()))
    for name, windows in seen.items():
        if [(w.index, w.first) for w in windows] != [(w.index, w.first) for w in first] or any(
            not np.array_equal(a.tokens, b.tokens) for a, b in zip(windows, first, strict=True)
        ):
            raise ValueError(f"{name} was scored on other windows than {next(iter(seen))}")
    masks = [
        np.logical_and.reduce([_usable(windows[i]) for windows in seen.values()]) for i in range(len(first))
    ]
    tokens = np.array([float(mask.sum()) for mask in masks])
    if not tokens.any():
        raise AssayError(
            "no token has finite logits in all configurations",
            finding_id="gap.nonfinite",
            remedy="look for NaN in the checkpoint (assay verify --values), or score in a wider type (?dtype=float32)",
        )
    return {
        name: WindowSums(
            np.array([float(w.dnll[mask].sum()) for w, mask in zip(windows, masks, strict=True)]),
            np.array([float(w.kl[mask].sum()) for w, mask in zip(windows, masks, strict=True)]),
            tokens,
        )
        for name, windows in seen.items()
    }


def _usable(window: WindowObservation) -> NDArray[np.bool_]:
    """Finite on both sides, and the candidate does not rule out what the reference allows (KL would be infinite)."""
    import numpy as np

    return window.finite & np.isfinite(window.kl) & np.isfinite(window.dnll)
