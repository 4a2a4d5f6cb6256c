"""Trellis-coded quantisation: the cheapest of all paths, the quantisers of numbers, and the error
that it saves.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from assay_lab.trellis import STATES, candidates, cheapest_path, quantisers, trellis, values


def walked(choices: tuple[int, ...], states: int) -> list[int] | None:
    """The quantisers of a path of parities, by walking it."""
    code, state, found = trellis(states), 0, []
    for parity in choices:
        found.append(int(code.quantiser[state]))
        state = ((state << 1) | int(code.parity[state, 0] != parity)) & (states - 1)
    return found


@pytest.mark.parametrize("states", STATES)
def test_the_cheapest_of_all_paths_is_found(states: int) -> None:
    torch.manual_seed(1)
    costs = torch.rand(5, 9, 2, 2)
    found = cheapest_path(costs, trellis(states)).long()
    for row, path in zip(costs.double(), found, strict=True):
        every = [
            sum(
                float(row[j, q, p])
                for j, (q, p) in enumerate(zip(walked(ps, states), ps, strict=True))
            )
            for ps in itertools.product((0, 1), repeat=9)
        ]
        taken = walked(tuple(int(x) & 1 for x in path), states)
        assert taken == [int(x) >> 1 for x in path]
        assert sum(
            float(row[j, int(x) >> 1, int(x) & 1]) for j, x in enumerate(path)
        ) == pytest.approx(min(every), abs=1e-5)


@pytest.mark.parametrize("states", STATES)
def test_quantisers_follow_from_parities_by_a_matrix(states: int) -> None:
    numbers = torch.from_numpy(np.random.default_rng(2).integers(-9, 10, (40, 70)))
    found = quantisers(numbers, trellis(states)).long().tolist()
    assert found == [walked(tuple(int(x) & 1 for x in row), states) for row in numbers]
    assert 0.3 < np.mean(found) < 0.7


@pytest.mark.parametrize("states", STATES)
def test_numbers_decide_the_quantiser_of_none_of_their_group(states: int) -> None:
    code = trellis(states)
    apart, selector = code.apart(), code.selector(40)
    assert apart >= 1
    for j in range(40):
        assert not selector[max(0, j - apart + 1) :, j].any()
        assert j < apart or selector[j - apart, j]


@pytest.mark.parametrize("quantiser", [0, 1])
def test_candidates_are_the_nearest_of_each_parity(quantiser: int) -> None:
    c = torch.linspace(-6.3, 6.3, 127)
    numbers = torch.arange(-20, 21)
    distance = (values(numbers, quantiser)[:, None] - c).abs()
    for parity, found in enumerate(candidates(c, torch.tensor(50), quantiser)):
        assert (found.long() & 1 == parity).all()
        best = distance[(numbers & 1) == parity].min(dim=0).values
        assert torch.allclose((values(found, quantiser) - c).abs(), best, atol=1e-6)


@pytest.mark.parametrize("quantiser", [0, 1])
def test_no_candidate_is_beyond_the_largest_number(quantiser: int) -> None:
    c = torch.tensor([0.0, 0.4, -3.7, 900.0, -900.0])
    most = torch.tensor([1, 1, 3, 7, 8])
    assert all((found.abs() <= most).all() for found in candidates(c, most, quantiser))


@pytest.mark.parametrize(("states", "least"), [(4, 0.9), (8, 1.0), (16, 1.05), (32, 1.1)])
def test_error_is_less_than_of_rounding_at_the_same_rate(states: int, least: float) -> None:
    """Of evenly spread values rounding has the error 1/12; dB below it, as Marcellin and Fischer
    give them.
    """
    torch.manual_seed(3)
    c = (torch.rand(400, 200) - 0.5) * 4000
    numbers = torch.stack([n for q in (0, 1) for n in candidates(c, torch.tensor(4000), q)], dim=-1)
    quantiser = torch.tensor([0, 0, 1, 1])
    costs = (values(numbers, quantiser) - c[..., None]).square().unflatten(-1, (2, 2))
    path = cheapest_path(costs, trellis(states)).long()
    taken = numbers.gather(-1, path[..., None])[..., 0].long()
    error = (values(taken, quantisers(taken, trellis(states))) - c).square().mean()
    assert 10 * np.log10(float((1 / 12) / error)) > least
