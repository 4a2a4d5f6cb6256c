"""Bits by sensitivity, against brute force, and what a cache takes in bytes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.engines.scoring import Engagement
from assay.errors import UsageError
from assay_lab.kv.allocate import allocate, bits_of, placed, predicted_kl
from assay_lab.kv.cache_bytes import NOTE, measured_bytes
from assay_lab.kv.spec import parse_spec
from assay_lab.options import EXACT_BITS, AllocationPlan, AttributionPlan


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


def engagement(sizes: dict[str, list[int]], tables: int, windows: list[int | None]) -> Engagement:
    streams = {
        name: [
            {"stored": size, "exact": 400, "power": 1.0, "error": 0.0, "sha256": ""}
            for size in found
        ]
        for name, found in sizes.items()
    }
    note = {
        "streams": streams,
        "tables": tables,
        "encoder_tables": 7,
        "cache": {"windows": windows},
    }
    return Engagement(notes={NOTE: note})


def test_bytes_add_up_over_layers_and_count_the_tables_share() -> None:
    sizes = {"0.k": [100, 110], "0.v": [50, 60], "1.k": [200, 200], "1.v": [200, 200]}
    found = measured_bytes(engagement(sizes, 3200, [None, None]), 1024, 32_768)
    assert found.stored == 160 + 400 + 100
    assert found.bf16 == 1600
    assert found.ratio == pytest.approx(1600 / 660)
    body = found.to_json()
    assert body["ratio_by_layer"]["1"] == 2.0
    assert (body["tables"], body["tables_decoder"], body["tables_encoder"]) == (3200, 3200, 7)
    with pytest.raises(ValueError, match="same windows"):
        measured_bytes(engagement({"0.k": [1], "0.v": []}, 0, [None]), 1)


def test_one_sequence_pays_for_its_tables() -> None:
    # 1.5625 bytes a token in bf16, 0.546875 in the streams: tables of 3,200 bytes are worth 3,151
    # tokens.
    found = measured_bytes(engagement({"0.k": [140], "0.v": [140]}, 3200, [None]), 512, 512)
    assert found.sharing == 1
    assert found.ratio_at(512) == pytest.approx(800 / (280 + 3200)) == pytest.approx(found.ratio)
    assert found.ratio_at(5120) == pytest.approx(8000 / (2800 + 3200))
    even = found.break_even_tokens
    assert even is not None and found.ratio_at(even - 1) <= 1 < found.ratio_at(even)
    assert even == 3151


def test_a_sliding_layer_does_not_grow_with_the_sequence() -> None:
    found = measured_bytes(engagement({"0.k": [100], "1.k": [200]}, 1000, [17, None]), 32, 32)
    assert found.saved(32) == 300 + 200
    assert found.saved(64) == 300 + 400  # the first layer holds 16 tokens for ever
    assert found.saved(8) == 150 + 50
    slides = measured_bytes(engagement({"0.k": [100]}, 1000, [17]), 32, 32)
    assert slides.break_even_tokens is None
    larger = measured_bytes(engagement({"0.k": [500]}, 0, [None]), 32, 32)
    assert larger.break_even_tokens is None and larger.ratio < 1


def test_a_choice_is_placed_as_codecs_of_layers() -> None:
    spec = parse_spec("k:sinks(n=2)+hadamard(bits=4);v:hadamard(bits=4)")
    bits = {
        (0, "k"): 5.0,
        (0, "v"): 16.0,
        (1, "k"): 16.0,
        (1, "v"): 16.0,
        (3, "k"): 2.0,
        (3, "v"): 3.0,
    }
    found = placed(spec, bits)
    assert found["layers"] == (0, 3)
    assert found["layer_codecs"] == {
        0: "k:sinks(n=2)+hadamard(bits=5)",
        3: "k:sinks(n=2)+hadamard(bits=2);v:hadamard(bits=3)",
    }
