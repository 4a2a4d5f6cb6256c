"""The ends of a chunk's words, read as unsigned and as signed integers: all that an ordinary chunk has to tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assay.checkpoint.values.formats import FloatFormat

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Extremes:
    """`lowest` and `highest` in the words' own type; `under` and `over` with the other signedness, if asked for."""

    lowest: int
    highest: int
    under: int
    over: int
    bits: int

    def magnitudes(self, form: FloatFormat) -> tuple[int, int]:
        """(smallest, largest) pattern without its sign, for unsigned words that hold sign and magnitude.

        Among unsigned words the non-negative floats come first and order upwards, the negative ones follow and order
        by magnitude; among signed words the negative ones come first, again by magnitude. So each group shows its two
        ends in one of the readings.
        """
        top = 1 << (self.bits - 1)
        if form.magnitude >= top:  # a type without a sign
            return self.lowest, self.highest
        ends: list[int] = []
        if self.lowest < top:  # some are not negative
            ends += [self.lowest, self.over]
        if self.highest >= top:  # some are negative
            ends += [self.under + top, self.highest - top]
        return min(ends), max(ends)


def extremes(words: np.ndarray[Any, Any], both: bool) -> Extremes:
    """The ends of an array of integers that is not empty, with `both` read as signed and as unsigned.

    Minimum and maximum run several times as fast as any operation that writes a result.
    """
    lowest, highest, bits = int(words.min()), int(words.max()), 8 * words.itemsize
    if not both:
        return Extremes(lowest, highest, lowest, highest, bits)
    other = words.view(f"<i{words.itemsize}")
    return Extremes(lowest, highest, int(other.min()), int(other.max()), bits)
