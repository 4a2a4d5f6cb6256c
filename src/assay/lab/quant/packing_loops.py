"""`pack` and `unpack` of up to 8 bits for a CPU: eight values are the bytes of one word, closed up in three steps.

Import it only where numba is.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_BYTES = np.uint64(0x00FF00FF00FF00FF)
_PAIRS = np.uint64(0x0000FFFF0000FFFF)
_FOURS = np.uint64(0x00000000FFFFFFFF)

_compiled = njit(nogil=True, cache=True, error_model="numpy")


@_compiled
def pack_words(words, width, out):  # type: ignore[no-untyped-def]
    """Eight values in the bytes of each word, lowest first → `width` bytes of `out`; higher bits are ignored."""
    mask = np.uint64(0x0101010101010101) * np.uint64((1 << width) - 1)
    by1, by2, by4 = np.uint64(8 - width), np.uint64(16 - 2 * width), np.uint64(32 - 4 * width)
    for i in range(words.shape[0]):
        word = words[i] & mask
        word = (word & _BYTES) | ((word & ~_BYTES) >> by1)
        word = (word & _PAIRS) | ((word & ~_PAIRS) >> by2)
        word = (word & _FOURS) | ((word & ~_FOURS) >> by4)
        target = out[i * width : (i + 1) * width]
        for k in range(width):
            target[k] = np.uint8(word >> np.uint64(8 * k))


@_compiled
def unpack_words(data, width, words):  # type: ignore[no-untyped-def]
    """`width` bytes of `data` → eight values in the bytes of each word."""
    mask = np.uint64(0x0101010101010101) * np.uint64((1 << width) - 1)
    by1, by2, by4 = np.uint64(8 - width), np.uint64(16 - 2 * width), np.uint64(32 - 4 * width)
    fours = np.uint64((1 << (4 * width)) - 1)
    pairs = np.uint64((1 << (2 * width)) - 1) * np.uint64(0x0000000100000001)
    for i in range(words.shape[0]):
        source = data[i * width : (i + 1) * width]
        word = np.uint64(0)
        for k in range(width):
            word |= np.uint64(source[k]) << np.uint64(8 * k)
        word = (word & fours) | ((word & ~fours) << by4)
        word = (word & pairs) | ((word & ~pairs) << by2)
        ones = word & (mask & _BYTES)
        words[i] = ones | (((word ^ ones) << by1) & mask)


@_compiled
def pack_nibbles(pairs, out):  # type: ignore[no-untyped-def]
    """Two values of 4 bits in the bytes of each word of 16 → one byte of `out`; higher bits are ignored."""
    for i in range(out.shape[0]):
        pair = pairs[i] & np.uint16(0x0F0F)
        out[i] = np.uint8(pair | (pair >> np.uint16(4)))


@_compiled
def unpack_nibbles(data, pairs):  # type: ignore[no-untyped-def]
    """One byte of `data` → two values of 4 bits in the bytes of a word of 16."""
    for i in range(data.shape[0]):
        both = np.uint16(data[i])
        pairs[i] = (both | (both << np.uint16(4))) & np.uint16(0x0F0F)
