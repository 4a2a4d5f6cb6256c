"""What was measured at every scored token of one window, in memory and as arrays to be kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from assay.engines.scoring import Window
from assay.fidelity.metrics.token_statistics import RowStatistics

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class WindowObservation:
    """Statistics of the scored tokens `first` … of one window; every array is [n], in the order of
    the tokens.

    Names as in `RowStatistics`; tokens whose logits were not finite on either side hold NaN and are
    never averaged.
    """

    index: int
    first: int
    tokens: NDArray[np.int32]
    nll_ref: NDArray[np.float64]
    nll_cand: NDArray[np.float64]
    kl: NDArray[np.float64]
    kl_rev: NDArray[np.float64]
    top1: NDArray[np.bool_]
    p_ref: NDArray[np.float64]
    p_cand: NDArray[np.float64]
    conf: NDArray[np.float64]
    tv: NDArray[np.float64]
    beyond: NDArray[np.bool_]

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Which tokens count: those whose logits were finite on both sides."""
        return ~np.isnan(self.nll_cand) & ~np.isnan(self.nll_ref)

    @property
    def dnll(self) -> NDArray[np.float64]:
        """NLL of the candidate minus NLL of the reference, in nats."""
        return self.nll_cand - self.nll_ref


@dataclass(frozen=True)
class BoundedObservation(WindowObservation):
    """A window of which the candidate is known at a few ids only; names as in `BoundedStatistics`.

    `kl`, `kl_rev` and `tv` are lower bounds, `top1` holds where both certainly have the same
    likeliest token.
    """

    top1_possible: NDArray[np.bool_]
    tail_ref: NDArray[np.float64]
    tail_cand: NDArray[np.float64]
    kl_upper: NDArray[np.float64]
    tv_lo: NDArray[np.float64]
    tv_hi: NDArray[np.float64]


def observation(window: Window, first: int, statistics: RowStatistics) -> WindowObservation:
    """Put the statistics of one window into numpy arrays."""
    arrays = {f.name: getattr(statistics, f.name).numpy() for f in fields(statistics)}
    return _observed(
        arrays, index=window.index, first=first, tokens=np.asarray(window.tokens, np.int32)
    )


def to_arrays(seen: Sequence[WindowObservation]) -> dict[str, NDArray[Any]]:
    """Equally long windows as arrays [windows, …], to be kept; their numbers are not part of it."""
    names = [f.name for f in fields(seen[0]) if f.name != "index"]
    return {name: np.stack([np.asarray(getattr(w, name)) for w in seen]) for name in names}


def from_arrays(
    arrays: Mapping[str, NDArray[Any]], windows: Sequence[Window]
) -> list[WindowObservation]:
    """The observations of these windows, from what `to_arrays` made of them."""
    found = []
    for i, window in enumerate(windows):
        values = {name: array[i] for name, array in arrays.items()}
        found.append(_observed(values, index=window.index, first=int(values.pop("first"))))
    return found


def size_of(seen: Sequence[WindowObservation]) -> int:
    """Bytes of all arrays."""
    return sum(a.nbytes for w in seen for a in vars(w).values() if isinstance(a, np.ndarray))


def on_disk(seen: Sequence[WindowObservation], folder: Path) -> list[WindowObservation]:
    """The same observations of equally long windows, their arrays mapped from files that were in
    `folder`.

    The system drops what is mapped from memory where it needs room. The files have no name any
    more, so that they go with the process.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for name in (f.name for f in fields(seen[0]) if f.name not in ("index", "first")):
        file = folder / f"{name}.npy"
        np.save(file, np.stack([getattr(w, name) for w in seen]))
        arrays[name] = np.asarray(np.load(file, mmap_mode="r"))
        file.unlink()
    return [
        _observed({name: array[i] for name, array in arrays.items()}, index=w.index, first=w.first)
        for i, w in enumerate(seen)
    ]


def _observed(arrays: Mapping[str, Any], **facts: Any) -> WindowObservation:
    """The observation that these arrays make: a bounded one where they hold bounds."""
    kind = BoundedObservation if "tail_ref" in arrays else WindowObservation
    return kind(**facts, **arrays)


def pooled(seen: Sequence[WindowObservation], name: str) -> NDArray[np.float64]:
    """One statistic of all finite tokens of all windows, as one array."""
    return np.concatenate([np.asarray(getattr(w, name), np.float64)[w.finite] for w in seen])


def by_block(
    seen: Sequence[WindowObservation], blocks: Sequence[int] | None
) -> list[WindowObservation]:
    """Windows of one block as one observation, so that it is the unit whose errors count; None:
    every window by itself.

    `blocks[i]` is the block of the window with the index i.
    """
    if blocks is None or len(set(blocks)) == len(blocks):
        return list(seen)
    groups: dict[int, list[WindowObservation]] = {}
    for window in seen:
        groups.setdefault(blocks[window.index], []).append(window)
    return [group[0] if len(group) == 1 else _concatenated(group) for group in groups.values()]


def _concatenated(group: Sequence[WindowObservation]) -> WindowObservation:
    arrays = {
        f.name: np.concatenate([getattr(w, f.name) for w in group])
        for f in fields(group[0])
        if f.name not in ("index", "first")
    }
    return _observed(arrays, index=group[0].index, first=group[0].first)
