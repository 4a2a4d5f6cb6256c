"""Trellis-coded quantisation: two quantisers that take turns, and which of them comes next hangs on
what came before.

Quantiser 0 has its values at k, quantiser 1 at k − sgn(k)/2. The parities of the numbers k drive a
convolutional code of 2^ν states whose state names the quantiser of the next number; of all ways
through it, the search (Viterbi) takes the cheapest. Neighbouring values of both quantisers together
are half a step apart, and yet a number costs no more bits than with one quantiser: 4 to 32 states
have 1.0 to 1.2 dB less error than rounding at the same rate, of the 1.53 dB that any quantiser
could have less (Marcellin and Fischer, IEEE Trans. Communications 38, 1990; codes of Ungerboeck,
IEEE Trans. Information Theory 28, 1982; values as in the dependent quantisation of VVC, Schwarz et
al., DCC 2019).

A path starts in state 0. What drives the state is linear over GF(2), so the quantiser of every
number follows from the parities by one matrix, and reading numbers back needs no loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assay.environment import gives_the_same

_CODES = {4: (0o5, 0o2), 8: (0o13, 0o04), 16: (0o23, 0o04), 32: (0o45, 0o10)}
"""Ungerboeck's parity checks (h0, h1) by number of states: of input bits u, h0 makes the parity of
the number, h1 names the quantiser."""
STATES = tuple(_CODES)


@dataclass(frozen=True)
class Trellis:
    """State s holds the last ν input bits, the newest lowest: input u leads from s to (2 s + u) mod
    2^ν.

    `quantiser` [states] of the number that leaves a state, `parity` [states, 2] of it by input.
    """

    states: int
    quantiser: NDArray[np.uint8]
    parity: NDArray[np.uint8]

    def selector(self, count: int) -> NDArray[np.uint8]:
        """0/1 matrix [count, count]: quantisers of `count` numbers = their parities times it, mod
        2.
        """
        return _selector(self.states, count)

    def takes_second(
        self, numbers: NDArray[np.int64], columns: slice | None = None
    ) -> NDArray[np.bool_]:
        """Where `columns` of whole paths are of quantiser 1; only numbers [rows, n] before them
        need be there.

        Without columns, all n of the numbers themselves.
        """
        count = numbers.shape[1]
        own = columns or slice(0, count)
        selector = self.selector(max(count, own.stop))[:count, own]
        found: NDArray[np.bool_] = (numbers & 1).astype(np.float32) @ selector.astype(
            np.float32
        ) % 2 > 0
        return found

    def apart(self) -> int:
        """How many numbers follow each other whose quantisers none of them decides."""
        _, quantiser = _CODES[self.states]
        return (quantiser & -quantiser).bit_length() - 1


@cache
def trellis(states: int) -> Trellis:
    """The code of 4, 8, 16 or 32 states; KeyError for another number."""
    h0, h1 = _CODES[states]
    state = np.arange(states)
    # Bits of s are the inputs 1, 2, … numbers ago; bit 0 of a check belongs to the input of now.
    before = np.array([(s << 1) & h0 for s in state]), np.array([(s << 1) & h1 for s in state])
    odd, quantiser = (np.array([int(x).bit_count() & 1 for x in row], np.uint8) for row in before)
    return Trellis(states, quantiser, np.stack([odd, odd ^ 1], axis=1))


@cache
def _selector(states: int, count: int) -> NDArray[np.uint8]:
    found = trellis(states)
    # What one odd number among even ones does to those after it, at any place.
    response, state = np.zeros(count, np.uint8), 0
    for j in range(count):
        response[j] = found.quantiser[state]
        state = ((state << 1) | int(found.parity[state, 0] ^ (j == 0))) & (states - 1)
    after = np.arange(count)[None, :] - np.arange(count)[:, None]
    return np.where(after >= 0, response[after], np.uint8(0))


@cache
def _selector_on(states: int, count: int, device: torch.device) -> torch.Tensor:
    """Copied to a device once: every token that is decoded needs it."""
    return torch.from_numpy(_selector(states, count)).to(device, torch.float32)


def quantisers(numbers: torch.Tensor, code: Trellis) -> torch.Tensor:
    """Which quantiser each number [..., n] was taken from, 0 or 1, float32."""
    selector = _selector_on(code.states, numbers.shape[-1], numbers.device)
    return ((numbers & 1).float() @ selector) % 2


def values(numbers: torch.Tensor, quantiser: torch.Tensor | int) -> torch.Tensor:
    """Values of numbers of a quantiser, float32."""
    return numbers.float() - 0.5 * quantiser * numbers.sign()


def candidates(
    c: torch.Tensor, most: torch.Tensor, quantiser: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest even and the nearest odd number to each of c [...] in a quantiser, float32; none
    is larger than `most`.

    `most` [...] is at least 1.
    """
    size = c.abs()
    below = torch.minimum((size + 0.5 * quantiser).floor(), most - 1)
    is_odd = below % 2 != 0
    even, odd = torch.where(is_odd, below + 1, below), torch.where(is_odd, below, below + 1)
    if quantiser:
        # Its values are 0, 1/2 and 3/2: up to 3/4 the even one is 0.
        even = torch.where(size <= 0.75, 0.0, even)
    return torch.copysign(even, c), torch.copysign(odd, c)


def cheapest_path(costs: torch.Tensor, code: Trellis) -> torch.Tensor:
    """Of costs [rows, n, 2 quantisers, 2 parities], float32: what the cheapest path of each row
    takes.

    uint8 [rows, n], 2 · quantiser + parity. Costs add up in float32 in the order of the numbers; of
    two equally cheap ways into a state the one from the lower state is taken, and of equally cheap
    last states the lowest. On a CPU a compiled loop searches, on a GPU a kernel, each once it found
    what torch finds there.
    """
    quick = {"cpu": _in_loops, "cuda": _by_kernel}.get(costs.device.type)
    if quick and costs.dtype == torch.float32 and _finds_the_same(quick, costs, code):
        return quick(costs, code)
    return by_torch(costs, code)


def by_torch(costs: torch.Tensor, code: Trellis) -> torch.Tensor:
    """`cheapest_path` by torch on any device: what the others are compared with."""
    rows, count = costs.shape[:2]
    sources, choices = (torch.from_numpy(t).to(costs.device) for t in _ways(code))
    total = costs.new_full((rows, code.states), _FAR)
    total[:, 0] = 0
    steps = costs.flatten(2).unbind(1)
    came = []
    for step in steps:
        low, high = (total[:, sources[i]] + step[:, choices[i]] for i in (0, 1))
        from_high = high < low
        came.append(from_high)
        total = torch.where(from_high, high, low)
    state = total.argmin(dim=1)
    result = torch.empty(rows, count, dtype=torch.uint8, device=costs.device)
    for j in range(count - 1, -1, -1):
        way = came[j].gather(1, state[:, None])[:, 0].long()
        result[:, j] = choices[way, state].to(torch.uint8)
        state = sources[way, state]
    return result


def _in_loops(costs: torch.Tensor, code: Trellis) -> torch.Tensor:
    from assay_lab.trellis_loops import search

    return search(costs, code, far=_FAR)


def _by_kernel(costs: torch.Tensor, code: Trellis) -> torch.Tensor:
    from assay_lab.trellis_kernel import search

    with torch.cuda.device_of(costs):  # Triton launches on the current GPU
        return search(costs, code, far=_FAR)


_Search = Callable[[torch.Tensor, Trellis], torch.Tensor]
_SAME: dict[tuple[torch.device, int, int], bool] = {}


def _finds_the_same(search: _Search, costs: torch.Tensor, code: Trellis) -> bool:
    """Whether a search may be used for such costs: it is compared with torch's once. A warning says
    why not.
    """
    # The kernel is another one for numbers that make other blocks.
    key = (costs.device, code.states, math.gcd(costs.shape[1], 8))
    if key not in _SAME:
        tried = _trial(3 * key[2]).to(costs.device)
        _SAME[key] = gives_the_same(
            f"the compiled search of a trellis of {code.states} states",
            lambda: bool(torch.equal(search(tried, code), by_torch(tried, code))),
        )
    return _SAME[key]


def _trial(count: int) -> torch.Tensor:
    """Costs of 40 rows of many sizes, with equally cheap paths, and rows with what is no number."""
    drawn = torch.arange(1, 1 + 40 * count * 4).mul_(48271).remainder_(2147483647).mul_(16807)
    costs = drawn.remainder_(2147483647).float().reshape(40, count, 2, 2)
    costs *= 10.0 ** (torch.arange(40) % 9 - 12.0)[:, None, None, None]
    costs[20:] = (costs[20:] * 4 / costs[20:].amax(dim=(1, 2, 3), keepdim=True)).floor()
    costs[37, count // 2, 1, 0], costs[38, 0], costs[39, -1] = math.nan, math.inf, math.nan
    return costs


_FAR = 1e30
"""Of a state that no path has reached: more than any path costs, and it stays a number when costs
are added.
"""


def _ways(code: Trellis) -> tuple[NDArray[Any], NDArray[Any]]:
    """The two states that lead to each state, the lower first, and the choice on the way: both [2,
    states], int64.
    """
    to = np.arange(code.states)
    sources = np.stack([to >> 1, (to >> 1) | (code.states >> 1)])
    choices = 2 * code.quantiser[sources] + code.parity[sources, to & 1]
    return sources, choices.astype(np.int64)
