"""A ledger of rows: which row of which step holds which token of which window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.errors import AssayError


@dataclass(frozen=True)
class Fed:
    """What one request had in one step: its window, the first position, the token ids that were
    fed.
    """

    window: int
    start: int
    tokens: Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Moves:
    """Rows `source` of a step's states go to rows `target` of the batch's buffer; both
    int64 [n].
    """

    source: NDArray[np.int64]
    target: NDArray[np.int64]


@dataclass
class RowLedger:
    """Books the rows of a batch of windows (all of one length). Row `first` … `length − 2` of each
    are wanted.

    The buffer of the batch has `rows` rows a window, in the order of `windows`: token ids by window
    key.
    """

    windows: Mapping[int, NDArray[np.int32]]
    first: int
    blocks: tuple[tuple[int, int], ...]
    _slots: dict[int, int] = field(init=False)
    _seen: NDArray[np.int32] = field(init=False)
    _steps: dict[int, list[tuple[int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self._slots = {key: slot for slot, key in enumerate(self.windows)}
        self._seen = np.zeros((len(self.windows), self.rows), np.int32)
        self._steps = {key: [] for key in self.windows}

    @property
    def rows(self) -> int:
        """Wanted rows of one window."""
        return self.blocks[-1][1] - self.first

    def book(self, step: Sequence[Fed]) -> Moves:
        """Book one step, its requests in the order of the batch; AssayError for what was not asked
        for.
        """
        source: list[NDArray[np.int64]] = []
        target: list[NDArray[np.int64]] = []
        offset = 0
        for fed in step:
            count = len(fed.tokens)
            if fed.window not in self.windows:
                raise wrong_rows(f"a request of another run was scheduled (window {fed.window})")
            own = self.windows[fed.window][fed.start : fed.start + count]
            if len(own) != count or not np.array_equal(own, np.asarray(fed.tokens)):
                raise wrong_rows(
                    f"window {fed.window} was fed other tokens than its own at position"
                    f" {fed.start}: the forced token was not taken"
                )
            self._steps[fed.window].append((fed.start, fed.start + count))
            lo = max(fed.start, self.first)
            hi = min(fed.start + count, self.first + self.rows)
            if lo < hi:
                slot = self._slots[fed.window]
                self._seen[slot, lo - self.first : hi - self.first] += 1
                source.append(np.arange(lo, hi) - fed.start + offset)
                target.append(np.arange(lo, hi) - self.first + slot * self.rows)
            offset += count
        empty = np.zeros(0, np.int64)
        return Moves(
            np.concatenate(source) if source else empty, np.concatenate(target) if target else empty
        )

    def check(self) -> None:
        """AssayError unless every wanted row came once, in exactly the planned steps."""
        for key, slot in self._slots.items():
            missing, doubled = int((self._seen[slot] == 0).sum()), int((self._seen[slot] > 1).sum())
            if missing or doubled:
                raise wrong_rows(
                    f"window {key}: {missing} rows are missing and {doubled} came more than once"
                )
            if tuple(self._steps[key]) != self.blocks:
                raise wrong_rows(
                    f"window {key} went through in {len(self._steps[key])} steps instead of"
                    f" {len(self.blocks)}, beginning with {self._steps[key][:3]} instead of"
                    f" {list(self.blocks[:3])}"
                )


def wrong_rows(what: str) -> AssayError:
    """The error for rows that are not those that were asked for."""
    return AssayError(
        f"vLLM did not run the windows as asked: {what}",
        finding_id="fidelity.engine_failed",
        remedy=(
            "use a smaller batch, so that the KV cache holds it, and no other requests in the same"
            " engine"
        ),
    )


PLAIN = frozenset({"UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"})
