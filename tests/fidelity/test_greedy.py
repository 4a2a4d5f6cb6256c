"""Greedy continuations: where two part, and what was near a tie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from assay.engines.scoring import GreedyStep, Window
from assay.errors import AssayError
from assay.fidelity.breakdown.greedy import compare_greedy, continue_greedily, prefixes_of
from assay.fidelity.report import greedy_blocks

WINDOWS = [Window(i, tuple(range(i, i + 20))) for i in range(10)]


def step(token: int, gap: float = 2.0) -> GreedyStep:
    return GreedyStep(token, token + 1, -0.1, -0.1 - gap)


class Engine:
    """Counts on from the last token; from `turn` on it says something else."""

    def __init__(self, turn: int = 99, gap: float = 2.0) -> None:
        self.turn, self.gap, self.calls = turn, gap, 0

    def generate_greedy(
        self, prefixes: Sequence[tuple[int, ...]], count: int
    ) -> list[list[GreedyStep]]:
        self.calls += 1
        return [
            [
                step(p[-1] + 1 + i + (100 if i >= self.turn + k else 0), self.gap)
                for i in range(count)
            ]
            for k, p in enumerate(prefixes)
        ]


class Broken:
    def generate_greedy(
        self, prefixes: Sequence[tuple[int, ...]], count: int
    ) -> list[list[GreedyStep]]:
        raise AssayError("it names no ids", finding_id="server.bad_scores")


def test_the_first_halves_of_eight_windows_are_continued() -> None:
    assert prefixes_of(WINDOWS) == [w.tokens[:10] for w in WINDOWS[:8]]


def test_where_they_part_and_what_was_near() -> None:
    reference, candidate = (
        continue_greedily(e, WINDOWS, 12, None) for e in (Engine(gap=0.1), Engine(turn=7))
    )
    found = compare_greedy(reference, candidate, WINDOWS, 12, texts=lambda token: f"<{token}>")
    assert [d.first for d in found.found] == [7, 8, 9, 10, 11, None, None, None]
    assert found.median_first == 10.5
    assert not any(d.near_tie for d in found.found)  # the candidate was sure
    body = found.to_json()
    assert (body["diverged"], body["prefixes"], body["prefix_tokens"], body["near_ties"]) == (
        5,
        8,
        10,
        0,
    )
    assert body["per_prefix"][0]["reference"]["text"] == "<17>"
    assert body["per_prefix"][0]["candidate"]["gap"] == pytest.approx(2.0)
    assert body["per_prefix"][7] == {
        "window": 7, "first": None, "near_tie": None, "reference": None, "candidate": None,
    }  # fmt: skip
    (table,) = greedy_blocks(found, "")
    assert [row[-1] for row in table.rows] == ["another choice"] * 5 + ["the same throughout"] * 3
    close = compare_greedy(
        reference, continue_greedily(Engine(turn=0, gap=0.2), WINDOWS, 12, None), WINDOWS, 12
    )
    assert close.to_json()["near_ties"] == 8
    assert close.median_first == 3.5


def test_no_median_where_half_of_them_agree() -> None:
    same = continue_greedily(Engine(), WINDOWS, 5, None)
    found = compare_greedy(same, continue_greedily(Engine(turn=1), WINDOWS, 5, None), WINDOWS, 5)
    assert len(found.diverged) == 4
    assert found.median_first is None


def test_what_is_kept_is_not_generated_again(tmp_path: Path) -> None:
    engine = Engine(turn=3)
    first = continue_greedily(engine, WINDOWS, 6, tmp_path / "greedy.json")
    again = continue_greedily(engine, WINDOWS, 6, tmp_path / "greedy.json")
    assert engine.calls == 1
    assert again.steps == first.steps


@pytest.mark.parametrize(
    ("engine", "said"), [(object(), "offers no greedy"), (Broken(), "names no ids")]
)
def test_an_engine_that_cannot_says_why(engine: object, said: str) -> None:
    none = continue_greedily(engine, WINDOWS, 6, None)
    found = compare_greedy(continue_greedily(Engine(), WINDOWS, 6, None), none, WINDOWS, 6)
    assert found.to_json()["available"] is False
    assert said in found.to_json()["reason"]
    assert said in greedy_blocks(found, "")[0].rows[0][0]


def test_the_two_likeliest_of_a_row() -> None:
    torch = pytest.importorskip("torch")
    from assay.engines.scoring import top_two

    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 4.5, 0.0]])
    tied, apart = top_two(logits)
    assert (tied.token, tied.runner_up, tied.gap) == (1, 2, 0.0)
    assert (apart.token, apart.runner_up) == (0, 2)
    assert apart.gap == pytest.approx(0.5)
    assert apart.logprob == pytest.approx(float(logits[1].double().log_softmax(-1)[0]), abs=1e-6)
