"""A property of every character of a text, asked once for each different character."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def mapped(codes: NDArray[np.uint32], function: Callable[[str], int]) -> NDArray[Any]:
    """`function` of the character at every code point of `codes`, shape (len(codes),).

    A long text looks its characters up in a table over all code points up to its highest; sorting would cost more.
    """
    import numpy as np

    if len(codes) == 0:
        return np.zeros(0, dtype=np.int64)
    if int(codes.max()) > len(codes):
        known, inverse = np.unique(codes, return_inverse=True)
        return np.array([function(chr(c)) for c in known.tolist()], dtype=np.int64)[inverse]
    present = np.flatnonzero(np.bincount(codes))
    table = np.zeros(int(present[-1]) + 1, dtype=np.int64)
    table[present] = [function(chr(c)) for c in present.tolist()]
    return table[codes]
