"""Whether a quicker way gives what torch gives: asked once, answered by a comparison on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Callable


def gives_the_same(what: str, compare: Callable[[], bool]) -> bool:
    """What `compare` says of `what`; False where it fails. A warning says why `what` is not used."""
    try:
        same, why = compare(), "it gives other values than torch here"
    except Exception as error:  # compilers fail in their own ways, and torch can do the same
        same, why = False, f"{type(error).__name__}: {error}"[:300]
    if not same:
        warnings.warn(f"{what} is not used: {why}", RuntimeWarning, stacklevel=3)
    return same
