from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from assay.errors import AssayError
from assay.speculation.lossless import measure, permutation_p
from assay.speculation.partings import Tokens, noise_of, part
from assay.verdict import Verdict
from stub_server import Exchange, StubServer


def text(*tokens: tuple[str, float], others: dict[int, dict[str, float]] | None = None) -> Tokens:
    """Tokens with their log-probabilities; `others` are alternatives by place."""
    top = tuple({t: p, **(others or {}).get(i, {})} for i, (t, p) in enumerate(tokens))
    return Tokens(tuple(t for t, _ in tokens), tuple(p for _, p in tokens), top)


OFF = text(("a", -0.1), ("b", -0.6931), ("c", -0.2), others={1: {"x": -0.6935, "y": -4.0}})


def test_equal_texts() -> None:
    assert part(OFF, OFF, 0.0).at is None


def test_a_near_tie_is_a_tie() -> None:
    found = part(text(("a", -0.1), ("x", -0.6935)), OFF, noise=0.001)
    assert (found.at, found.real) == (1, False)
    assert found.gap == pytest.approx(0.0004)


def test_a_token_far_behind_is_real() -> None:
    assert part(text(("a", -0.1), ("y", -4.0)), OFF, noise=0.001).real
    assert part(text(("a", -0.1), ("zzz", -0.1)), OFF, noise=0.001).real, (
        "not even among the alternatives"
    )
    assert not part(text(("a", -0.1), ("y", -4.0)), OFF, noise=1.0).real, (
        "unless the engine is that noisy"
    )


def test_noise_is_measured_where_texts_agree() -> None:
    a = text(("a", -0.10), ("b", -0.70), ("q", -9.0))
    b = text(("a", -0.11), ("b", -0.73), ("r", -0.1))
    assert noise_of([(a, b)]) == pytest.approx(0.03)
    assert noise_of([]) == 0.0


def test_a_response_without_logprobs_is_refused() -> None:
    with pytest.raises(AssayError, match="log-probabilities"):
        Tokens.from_completion({"choices": [{"text": "x"}]})


def draw(rng: np.random.Generator, count: int, bias: float) -> list[tuple[str, ...]]:
    return [tuple("ab"[int(rng.random() < bias)] for _ in range(6)) for _ in range(count)]


def test_permutation_finds_another_distribution() -> None:
    rng = np.random.default_rng(2)
    assert permutation_p(draw(rng, 60, 0.5), draw(rng, 60, 0.85), rounds=500) < 0.01


def test_permutation_is_valid_under_the_null() -> None:
    """p < 0.1 in about a tenth of the cases when nothing differs, also with dependent tokens."""
    rng = np.random.default_rng(4)

    def sample() -> list[tuple[str, ...]]:
        return [("ab"[int(first)],) * 5 for first in rng.random(24) < 0.5]

    hits = sum(permutation_p(sample(), sample(), rounds=99, seed=i) <= 0.1 for i in range(150))
    assert 4 <= hits <= 28


class Model:
    """A stub completion endpoint: a fixed greedy text, or tokens drawn with a bias."""

    def __init__(
        self, greedy: list[tuple[str, float]], bias: float, alternatives: dict[str, float]
    ) -> None:
        self.greedy, self.bias, self.alternatives = greedy, bias, alternatives

    def __call__(self, e: Exchange) -> None:
        if e.body["temperature"] == 0:
            tokens = self.greedy
        else:
            rng = np.random.default_rng(e.body["seed"])
            tokens = [
                ("xy"[int(rng.random() < self.bias)], math.log(0.5))
                for _ in range(e.body["max_tokens"])
            ]
        top = [{t: p, **self.alternatives} for t, p in tokens]
        logprobs = {
            "tokens": [t for t, _ in tokens],
            "token_logprobs": [p for _, p in tokens],
            "top_logprobs": top,
        }
        e.json({"choices": [{"text": "", "logprobs": logprobs}], "usage": {}})


def compare(on: Model, off: Model) -> Any:
    with StubServer() as a, StubServer() as b:
        a.on("POST /v1/completions", on)
        b.on("POST /v1/completions", off)
        return measure(a.url, b.url, prompts=3, samples=40)


SAME = Model([("the", -0.1), ("cat", -0.69)], 0.5, {"dog": -0.6904})


def test_same_server_passes() -> None:
    found = compare(SAME, SAME)
    assert found.verdict is Verdict.PASS
    assert found.p_value is not None and found.p_value > 0.01


def test_a_tie_is_inconclusive() -> None:
    found = compare(Model([("the", -0.1), ("dog", -0.69)], 0.5, {}), SAME)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert not found.real


def test_a_real_difference_fails() -> None:
    found = compare(Model([("the", -0.1), ("cow", -0.1)], 0.5, {}), SAME)
    assert found.verdict is Verdict.FAIL
    assert len(found.real) == 3


def test_equal_greedy_texts_do_not_hide_another_distribution() -> None:
    found = compare(Model(SAME.greedy, 0.95, SAME.alternatives), SAME)
    assert not found.real
    assert found.verdict is Verdict.FAIL
