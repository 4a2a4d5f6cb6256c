"""Bits by sensitivity, against brute force, and the ledger of long runs."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import UsageError
from assay.lab.kv.accounting import cache_bytes
from assay.lab.kv.allocate import EXACT_BITS, AllocationPlan, allocate, bits_of, predicted_kl
from assay.lab.kv.attribute import AttributionPlan
from assay.lab.kv.lab import Ledger
from assay.lab.kv.spec import parse_spec


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=4), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_no_other_choice_of_the_same_bits_is_better(values: list[float], mean: int) -> None:
    sensitivity = {(i, "k"): (v, 4.0) for i, v in enumerate(values)}
    bits = allocate(sensitivity, mean, step=1.0, least=1.0, most=6.0)

    def cost(choice: dict[tuple[int, str], float]) -> float:
        return sum(predicted_kl(*sensitivity[k], b) for k, b in choice.items())

    total = sum(bits.values())
    assert total <= mean * len(values) + 1e-9
    best = min(
        cost(dict(zip(sensitivity, choice, strict=True)))
        for choice in product(range(1, 7), repeat=len(values))
        if sum(choice) <= mean * len(values)
    )
    if EXACT_BITS not in bits.values():
        assert cost(bits) == pytest.approx(best)


def test_what_hurts_most_gets_most() -> None:
    bits = allocate(
        {(0, "k"): (1.0, 4.0), (1, "k"): (0.01, 4.0), (1, "v"): (0.0001, 4.0)}, 4.0, 0.5, 1.0, 8.0
    )
    assert bits[0, "k"] > bits[1, "k"] > bits[1, "v"]


def test_a_part_far_worse_than_the_others_stays_exact() -> None:
    sensitivity = {(i, "k"): (1e-9, 4.0) for i in range(20)} | {(99, "k"): (50.0, 4.0)}
    assert allocate(sensitivity, 4.0, 1.0, 1.0, 8.0)[99, "k"] == EXACT_BITS


def test_a_ledger_measures_each_key_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    calls = []
    for _ in range(2):
        ledger = Ledger({"plan": 1})
        assert ledger.get("a", lambda: calls.append("a") or {"x": 1}) == {"x": 1}
    assert calls == ["a"]
    Ledger({"plan": 2}).get("a", lambda: calls.append("b") or 0)
    assert calls == ["a", "b"]
    Ledger({"plan": 1}).forget()
    Ledger({"plan": 1}).get("a", lambda: calls.append("c") or 0)
    assert calls[-1] == "c"


@pytest.mark.parametrize("ratio", [0.5, 1.0, 16.0])
def test_ratios_that_nothing_reaches_are_refused(ratio: float) -> None:
    with pytest.raises(UsageError, match="ratio"):
        AllocationPlan("m", "hadamard", ratio)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(UsageError, match="sideways"):
        AttributionPlan("m", "hadamard", mode="sideways")
    with pytest.raises(UsageError, match="head"):
        AttributionPlan("m", "hadamard", each="head")


def test_codecs_without_bits_of_their_own_are_refused() -> None:
    for spec, why in (
        ("fp8", "fp8 has no bits"),
        ("pca(step=0.002, weights=measured)", "its step sets its bits"),
        ("sinks+pca(step=0.1)", "its step sets its bits"),
    ):
        with pytest.raises(UsageError, match=why):
            bits_of(parse_spec(spec).of("k"))  # type: ignore[arg-type]
    assert bits_of(parse_spec("sinks+pca(bits=2.5)").of("k")) == 2.5  # type: ignore[arg-type]


def test_bytes_add_up_over_layers_and_count_the_tables_share() -> None:
    sizes = {(0, "k"): [100, 110], (0, "v"): [50, 60], (1, "k"): [200, 200], (1, "v"): [200, 200]}
    exact = {key: [400, 400] for key in sizes}
    found = cache_bytes(sizes, exact, tables=3200, tokens=1024, table_tokens=32_768)
    assert found.stored == 160 + 400 + 100
    assert found.bf16 == 1600
    assert found.ratio == pytest.approx(1600 / 660)
    assert found.by_layer[1] == 2.0
    with pytest.raises(ValueError, match="same windows"):
        cache_bytes({(0, "k"): [1], (0, "v"): []}, exact, 0, 1)
