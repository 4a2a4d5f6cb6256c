"""Interleaved rANS: the fast entropy coder of numbers whose distributions a calibration has chosen.

Range asymmetric numeral systems (Duda, arXiv:1311.2540) with four states that take turns (Giesen,
arXiv:1402.3392): 32-bit states, 16-bit words, probabilities in 1/4096. Two look-ups decode a
number: a slot of 4096 gives its symbol in a byte, and the symbol its frequency and first slot; so
the tables of the few distributions of a channel stay in the first cache. The distributions are
those of `codecs.pca_entropy`, cut into at most 253 buckets of 2^m numbers; the m lowest bits of a
number go into the same states as they are.

Numbers are coded channel by channel, tokens within. Before them comes the class of every token.
Token t belongs to state t mod 4. Import this only where numba is.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from assay_lab.kv.codecs.distributions import DISTRIBUTIONS, ESCAPE, RADIUS, _distributions

LANES = 4
BITS = 12
TOTAL = 1 << BITS
_HALF = 126
"""The largest bucket; 127 marks an escape."""
_OUT = 127
_FOUR = np.uint64(4)
_LOWEST = 1 << 16
"""States are between it and 2^32."""

Words: TypeAlias = "NDArray[np.uint16]"

compiled = njit(nogil=True, cache=True, error_model="numpy")


def frequencies(odds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers of at least 1 that sum to 4096, close to `odds`; those that lose least give up
    what is too much.
    """
    share = odds / odds.sum() * TOTAL
    found: NDArray[np.int64] = np.maximum(1, np.floor(share + 0.5)).astype(np.int64)
    while (excess := int(found.sum()) - TOTAL) != 0:
        # What one step costs in bits: share · log2 of the ratio of frequencies.
        step = -1 if excess > 0 else 1
        cost = share * np.log2(found / np.maximum(found + step, 0.5))
        cost[found + step < 1] = np.inf
        order = np.argsort(cost, kind="stable")
        count = min(abs(excess), max(1, int((found > 8).sum()) // 2))
        taken = order[:count]
        found[taken[found[taken] + step >= 1]] += step
    return found


@cache
def tables() -> tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint8]]:
    """Of every distribution: what each slot names [DISTRIBUTIONS, 4096], first slot << 16 |
    frequency of each name [DISTRIBUTIONS, 256], and its m.

    The name of a bucket is bucket + 128.
    """
    distributions, radius = _distributions()
    slots = np.empty((DISTRIBUTIONS, TOTAL), np.uint8)
    codes = np.zeros((DISTRIBUTIONS, 256), np.uint32)
    shifts = np.zeros(DISTRIBUTIONS, np.uint8)
    for distribution in range(DISTRIBUTIONS):
        r, m = int(radius[distribution]), 0
        while (r + (1 << m) - 1) >> m > _HALF:
            m += 1
        shifts[distribution] = m
        numbers = np.arange(-r, r + 1)
        buckets = numbers >> m
        odds = np.bincount(
            buckets - buckets[0], weights=distributions[distribution, RADIUS - r : RADIUS + r + 1]
        )
        symbols = np.append(np.arange(buckets[0], buckets[0] + odds.size), _OUT)
        slots[distribution], codes[distribution] = _tables_of(
            frequencies(np.append(odds, distributions[distribution, -1])), symbols
        )
    return slots, codes, shifts


def tables_of_classes(
    odds: NDArray[np.floating[Any]],
) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Slots [4096] and codes [256] of token classes under their odds; empty where there is one
    class.
    """
    if odds.size < 2:
        return np.zeros(0, np.uint8), np.zeros(0, np.uint32)
    return _tables_of(frequencies(odds.astype(np.float64)), np.arange(odds.size))


def _tables_of(
    counts: NDArray[np.int64], symbols: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    codes = np.zeros(256, np.int64)
    codes[symbols + 128] = starts << 16 | counts
    return np.repeat(symbols + 128, counts).astype(np.uint8), codes.astype(np.uint32)


def encode(
    numbers: NDArray[np.int16],
    kinds: NDArray[np.uint8],
    distributions: NDArray[np.integer[Any]],
    class_codes: NDArray[np.uint32],
) -> tuple[NDArray[np.uint32], Words]:
    """Final states [4] and words of numbers [channels, tokens], of tokens' classes, `distributions`
    [classes, channels].
    """
    _, codes, shifts = tables()
    room = np.empty(2 * (numbers.size + kinds.size) + 8, np.uint16)
    states = np.full(LANES, _LOWEST, np.int64)
    first = _encode(
        numbers, kinds, distributions.astype(np.int64), codes, shifts, class_codes, room, states
    )
    return states.astype(np.uint32), room[first:]


def decode_numbers(
    states: NDArray[np.uint32],
    words: Words,
    distributions: NDArray[np.integer[Any]],
    class_tables: tuple[NDArray[np.uint8], NDArray[np.uint32]],
    tokens: int,
) -> tuple[NDArray[np.int16], NDArray[np.uint8]] | None:
    """What `encode` was given; None where states and words are no code of these tables."""
    channels = distributions.shape[1]
    numbers, kinds = np.empty((channels, tokens), np.int16), np.zeros(tokens, np.uint8)
    if not read(
        states, words, distributions.astype(np.int64), *tables(), *class_tables, numbers, kinds
    ):
        return None
    return numbers, kinds


@compiled
def _encode(numbers, kinds, distributions, codes, shifts, class_codes, room, states):  # type: ignore[no-untyped-def]
    """Everything backwards, as rANS must; words are written from the end of `room`. Returns where
    they begin.
    """
    channels, tokens = numbers.shape
    at = room.size
    for c in range(channels - 1, -1, -1):
        for t in range(tokens - 1, -1, -1):
            distribution = distributions[kinds[t], c]
            m = np.int64(shifts[distribution])
            k = np.int64(numbers[c, t])
            x = states[t & 3]
            bucket = np.int64(_OUT)
            if k != ESCAPE:
                bucket = k >> m
            if m > 0:  # the low bits, which an escape has too
                low = k & ((1 << m) - 1)
                if x >= np.int64(1) << (32 - m):
                    at -= 1
                    room[at] = x & 0xFFFF
                    x >>= 16
                x = (x << m) | low
            entry = np.int64(codes[distribution, bucket + 128])
            states[t & 3], at = _put(x, entry, room, at)
    if class_codes.size:
        for t in range(tokens - 1, -1, -1):
            entry = np.int64(class_codes[np.int64(kinds[t]) + 128])
            states[t & 3], at = _put(states[t & 3], entry, room, at)
    return at


@compiled
def _put(x, entry, room, at):  # type: ignore[no-untyped-def]
    count, first = entry & 0xFFFF, entry >> 16
    if x >= count << 20:
        at -= 1
        room[at] = x & 0xFFFF
        x >>= 16
    return ((x // count) << 12) + x % count + first, at


@compiled
def _take(x, code, words, at):  # type: ignore[no-untyped-def]
    """The state after a number of this code, and the place of the next word."""
    code = np.int64(code)
    return _refill((code & 0xFFFF) * (x >> 12) + (x & 4095) - (code >> 16), words, at)


@compiled
def _refill(x, words, at):  # type: ignore[no-untyped-def]
    more = (x << 16) | np.int64(words[np.uint64(at)])
    short = x < 65536
    return (more if short else x), at + (1 if short else 0)


@compiled
def read(  # type: ignore[no-untyped-def]
    states, words, distributions, slots, codes, shifts, class_slots, class_codes, numbers, kinds
):
    """Numbers and classes; whether states and words were used up as an encoder leaves them.

    `words` are read no further than they go.
    """
    channels, tokens = numbers.shape
    # Damage may ask for more words than there are: it finds zeros.
    padded = np.zeros(words.size + 2 * LANES, np.uint16)
    padded[: words.size] = words
    end = words.size
    s0, s1, s2, s3 = (
        np.int64(states[0]),
        np.int64(states[1]),
        np.int64(states[2]),
        np.int64(states[3]),
    )
    at = 0
    full = tokens & ~3
    if class_slots.size:
        for t in range(tokens):
            lane = t & 3
            x = s0 if lane == 0 else (s1 if lane == 1 else (s2 if lane == 2 else s3))
            n = class_slots[x & 4095]
            kinds[t] = n - 128
            x, at = _take(x, class_codes[n], padded, at)
            if lane == 0:
                s0 = x
            elif lane == 1:
                s1 = x
            elif lane == 2:
                s2 = x
            else:
                s3 = x
            if at > end or kinds[t] >= distributions.shape[0]:
                return False
    # Unsigned places, since numba looks whether others are negative.
    flat, symbols, starts = (
        slots.reshape(-1),
        codes.reshape(-1),
        np.empty(distributions.shape[0], np.uint64),
    )
    for c in range(channels):
        wide = False
        for i in range(distributions.shape[0]):
            wide |= shifts[distributions[i, c]] > 0
            starts[i] = distributions[i, c] << 12
        row = numbers[c]
        first = 0 if wide else full
        for t in range(0, 0 if wide else full, 4):
            l0, l1, l2, l3 = (
                starts[kinds[t]],
                starts[kinds[t + 1]],
                starts[kinds[t + 2]],
                starts[kinds[t + 3]],
            )
            n0 = flat[l0 + np.uint64(s0 & 4095)]
            n1 = flat[l1 + np.uint64(s1 & 4095)]
            n2 = flat[l2 + np.uint64(s2 & 4095)]
            n3 = flat[l3 + np.uint64(s3 & 4095)]
            s0, at = _take(s0, symbols[(l0 >> _FOUR) + np.uint64(n0)], padded, at)
            s1, at = _take(s1, symbols[(l1 >> _FOUR) + np.uint64(n1)], padded, at)
            s2, at = _take(s2, symbols[(l2 >> _FOUR) + np.uint64(n2)], padded, at)
            s3, at = _take(s3, symbols[(l3 >> _FOUR) + np.uint64(n3)], padded, at)
            row[t] = n0
            row[t + 1] = n1
            row[t + 2] = n2
            row[t + 3] = n3
            if at > end:
                return False
        for t in range(first):
            row[t] = ESCAPE if row[t] == 255 else row[t] - 128
        for t in range(
            first, tokens
        ):  # the last few, and all of a distribution whose numbers have low bits
            lane = t & 3
            x = s0 if lane == 0 else (s1 if lane == 1 else (s2 if lane == 2 else s3))
            distribution = distributions[kinds[t], c]
            m = np.int64(shifts[distribution])
            n = slots[distribution, x & 4095]
            x, at = _take(x, codes[distribution, n], padded, at)
            low = x & ((np.int64(1) << m) - 1)
            x, at = _refill(x >> m, padded, at)
            row[t] = ESCAPE if n == 255 else ((np.int64(n) - 128) << m) | low
            if lane == 0:
                s0 = x
            elif lane == 1:
                s1 = x
            elif lane == 2:
                s2 = x
            else:
                s3 = x
            if at > end:
                return False
    whole = s0 == _LOWEST and s1 == _LOWEST and s2 == _LOWEST and s3 == _LOWEST
    return whole and at == end


@compiled
def values(numbers, gaps, scale, escaped, out, column):  # type: ignore[no-untyped-def]
    """Values of numbers [channels, tokens], times `scale` [channels], into `out` from `column`
    on: bf16 as uint16.

    `gaps` [2, channels]: what |k| = 1 and larger ones are nearer to 0 by. `escaped` are the
    coefficients of escapes, in their order; False where there are more or fewer
    of them.
    """
    channels, tokens = numbers.shape
    found = np.empty(tokens, np.float32)
    bits = found.view(np.uint32)
    used = 0
    for c in range(channels):
        one, more, times = gaps[0, c], gaps[1, c], scale[c]
        row = numbers[c]
        top = np.int16(0)
        for t in range(tokens):
            k = np.float32(row[t])
            size = abs(k)
            gap = one if size == 1 else more
            value = k - gap if k > 0 else k + gap
            found[t] = np.float32(0) if size == 0 else value * times
            top = max(top, row[t])
        if top == ESCAPE:
            for t in range(tokens):
                if row[t] == ESCAPE:
                    if used == escaped.size:
                        return False
                    found[t] = escaped[used] * times
                    used += 1
        to = out[c]
        for t in range(tokens):
            b = bits[t]
            to[column + t] = np.uint16(
                (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            )
    return used == escaped.size


@compiled
def sections(raw, begins, ends, tokens, columns, distributions, tables, out):  # type: ignore[no-untyped-def]
    """The coefficients of one stream in several blocks into `out` [channels, ..], from `columns`
    on; bf16 as uint16.

    `raw` are the blocks in words of 16 bits; a section is from `begins` to `ends`: escapes and
    their float32, states, words. `tables` are slots, codes and shifts of distributions, slots and
    codes of classes, gaps, scale. Returns the block that is no code of these tables, −1 where all
    are.
    """
    slots, codes, shifts, class_slots, class_codes, gaps, scale = tables
    for i in range(begins.size):
        at, end = begins[i], ends[i]
        count = np.int64(1 << 40)
        if at + 2 <= end:
            count = np.int64(raw[at]) | np.int64(raw[at + 1]) << 16
        if at + 2 + 2 * count + 8 > end:
            return i
        held = np.empty(count + 4, np.uint32)
        for j in range(count + 4):
            held[j] = np.uint32(raw[at + 2 + 2 * j]) | np.uint32(raw[at + 3 + 2 * j]) << np.uint32(
                16
            )
        numbers, kinds = (
            np.empty((distributions.shape[1], tokens[i]), np.int16),
            np.zeros(tokens[i], np.uint8),
        )
        words = raw[at + 10 + 2 * count : end]
        if not read(
            held[count:],
            words,
            distributions,
            slots,
            codes,
            shifts,
            class_slots,
            class_codes,
            numbers,
            kinds,
        ):
            return i
        if not values(numbers, gaps, scale, held[:count].view(np.float32), out, columns[i]):
            return i
    return -1


@compiled
def choose(c, lengths, zero, radius, kind_bits, rdo, numbers, kinds):  # type: ignore[no-untyped-def]
    """Numbers [channels, tokens] and classes of coefficients [tokens, channels]:
    `RangeCoder.choose` in one pass.

    `lengths` flat code lengths; `zero` [classes, channels] the place of the number 0 in them;
    `radius` like it.
    """
    tokens, channels = c.shape
    classes = zero.shape[0]
    k = np.empty(channels, np.int64)
    for t in range(tokens):
        for i in range(channels):
            found = np.int64(np.rint(max(-1024.0, min(1024.0, c[t, i]))))
            k[i] = ESCAPE if found == -ESCAPE else found
        kind = _class_of(k, lengths, zero, kind_bits, classes)
        if rdo > 0:
            for i in range(channels):
                number = k[i]
                if number == 0 or number == ESCAPE:
                    continue
                nearer = number - 1 if number > 0 else number + 1
                saved = lengths[zero[kind, i] + number] - lengths[zero[kind, i] + nearer]
                far, near = c[t, i] - nearer, c[t, i] - number
                if saved * rdo > far * far - near * near:
                    k[i] = nearer
            kind = _class_of(k, lengths, zero, kind_bits, classes)
        kinds[t] = kind
        for i in range(channels):
            numbers[i, t] = ESCAPE if abs(k[i]) > radius[kind, i] else k[i]


@compiled
def _class_of(k, lengths, zero, kind_bits, classes):  # type: ignore[no-untyped-def]
    best, least = 0, np.float32(np.inf)
    for i in range(classes):
        total = kind_bits[i]
        for j in range(k.size):
            total += lengths[zero[i, j] + k[j]]
        if total < least:
            best, least = i, total
    return best


assert RADIUS < ESCAPE < 1 << 15
