"""What was measured at every scored token of one window, and its file form."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from assay.engines.scoring import Window
    from assay.fidelity.metrics import RowStatistics


@dataclass(frozen=True)
class WindowObservation:
    """Statistics of the scored tokens `first` … of one window; every array is [n], in the order of the tokens.

    Names as in `RowStatistics`; tokens whose logits were not finite on either side hold NaN and are never averaged.
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

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Which tokens count: those whose logits were finite on both sides."""
        import numpy as np

        return ~np.isnan(self.nll_cand) & ~np.isnan(self.nll_ref)

    @property
    def dnll(self) -> NDArray[np.float64]:
        """NLL of the candidate minus NLL of the reference, in nats."""
        return self.nll_cand - self.nll_ref


@dataclass(frozen=True)
class BoundedObservation(WindowObservation):
    """A window of which the candidate is known at a few ids only; names as in `BoundedStatistics`.

    `kl` and `kl_rev` are lower bounds, `top1` holds where both certainly have the same likeliest token.
    """

    top1_possible: NDArray[np.bool_]
    tail_ref: NDArray[np.float64]
    tail_cand: NDArray[np.float64]
    kl_upper: NDArray[np.float64]
    tv_lo: NDArray[np.float64]
    tv_hi: NDArray[np.float64]


def observation(window: Window, first: int, statistics: RowStatistics) -> WindowObservation:
    """Put the statistics of one window into numpy arrays."""
    import numpy as np

    arrays = {f.name: getattr(statistics, f.name).numpy() for f in fields(statistics)}
    return _observed(arrays, index=window.index, first=first, tokens=np.asarray(window.tokens, np.int32))


def save(path: Path, seen: WindowObservation) -> None:
    """Write one window, whole or not at all."""
    import numpy as np

    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, **{f.name: np.asarray(getattr(seen, f.name)) for f in fields(seen)})  # type: ignore[arg-type]
    part.replace(path)


def load(path: Path) -> WindowObservation:
    """Read what `save` wrote."""
    import numpy as np

    with np.load(path, allow_pickle=False) as file:
        values = {name: file[name] for name in file.files}
    return _observed(values, index=int(values.pop("index")), first=int(values.pop("first")))


def load_kept(path: Path) -> WindowObservation | None:
    """The same; None where there is no such file, or a damaged one, which is to be scored again."""
    try:
        return load(path)
    except (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return None


def _observed(arrays: Mapping[str, Any], **facts: Any) -> WindowObservation:
    """The observation that these arrays make: a bounded one where they hold bounds."""
    kind = BoundedObservation if "tail_ref" in arrays else WindowObservation
    return kind(**facts, **arrays)


def pooled(seen: Sequence[WindowObservation], name: str) -> NDArray[np.float64]:
    """One statistic of all finite tokens of all windows, as one array."""
    import numpy as np

    return np.concatenate([np.asarray(getattr(w, name), np.float64)[w.finite] for w in seen])
