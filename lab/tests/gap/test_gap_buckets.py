"""Buckets sum to the total, and their intervals are those of the windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats
from synthetic import configurations, observed, sums

from assay.errors import AssayError
from assay_lab.gap.buckets import WindowSums, aligned, amount, decompose, effect, ratio, zero_like

values = hnp.arrays(np.float64, 6, elements=st.floats(-5, 5, width=32))
window_sums = st.builds(lambda d, k: sums(d, np.abs(k)), values, values)


@settings(max_examples=30)
@given(window_sums, window_sums, window_sums, window_sums, window_sums, window_sums)
def test_buckets_and_repeatability_sum_to_the_total_whatever_the_numbers(
    half, cand, codec, both, asked, total
) -> None:
    found = decompose(
        [("engine.rounding", half), ("engine.kernels", cand)], codec, both, total, asked
    )
    for pick in (lambda e: e.dnll.value, lambda e: e.kl.value):
        parts = sum(pick(b.effect) for b in found.buckets)
        assert parts + pick(found.repeatability) == pytest.approx(pick(found.total), abs=1e-9)
        assert parts == pytest.approx(pick(found.by_path), abs=1e-9)
        engine = found.bucket("engine")
        assert sum(pick(p.effect) for p in engine.parts) == pytest.approx(
            pick(engine.effect), abs=1e-9
        )


@settings(max_examples=30)
@given(window_sums, window_sums, window_sums, window_sums)
def test_parts_of_the_codec_sum_to_it(one, two, codec, both) -> None:
    layers = [("codec.layer.00", one), ("codec.layer.01", two)]
    found = decompose([("engine.none", codec)], codec, both, both, layers=layers).bucket("codec")
    assert [p.name for p in found.parts] == ["codec.layer.00", "codec.layer.01", "codec.together"]
    assert sum(p.effect.kl.value for p in found.parts) == pytest.approx(
        found.effect.kl.value, abs=1e-9
    )


@settings(max_examples=30)
@given(window_sums, window_sums, window_sums)
def test_both_orders_end_at_the_same_place_and_shapley_lies_between(engine, codec, both) -> None:
    found = decompose([("engine.kernels", engine)], codec, both, both).orders
    for order in found.values():
        whole = order["engine"].kl.value + order["codec"].kl.value
        assert whole == pytest.approx(effect(both).kl.value, abs=1e-9)
    shares = sorted(found[o]["codec"].dnll.value for o in ("engine_first", "codec_first"))
    assert shares[0] - 1e-9 <= found["shapley"]["codec"].dnll.value <= shares[1] + 1e-9


def test_interaction_is_the_difference_of_two_engines_differences() -> None:
    rng = np.random.default_rng(1)
    a, b, c = (sums(rng.normal(size=12), rng.random(12)) for _ in range(3))
    found = decompose([("engine.kernels", a)], b, c, c).bucket("interaction").effect
    by_hand = [(z - x) - y for x, y, z in zip(a.dnll, b.dnll, c.dnll, strict=True)]
    assert found.dnll.value == pytest.approx(np.sum(by_hand) / 1200)


def test_kl_telescopes_exactly_to_the_last_distribution() -> None:
    names = ["step 1", "step 2", "step 3"]
    found, reference, gold = configurations(names)
    seen = {
        name: [observed(i, *w) for i, w in enumerate(zip(reference, rows, gold, strict=True))]
        for name, rows in found.items()
    }
    by_name = aligned(seen)
    steps = [(name, by_name[name]) for name in names]
    bucket = decompose(steps, by_name["step 3"], by_name["step 3"], by_name["step 3"]).bucket(
        "engine"
    )
    # Each step by its own definition: E over p_ref of log p(k−1) − log p(k).
    before = reference
    for part, name in zip(bucket.parts, names, strict=True):
        direct = np.mean(
            [
                (np.exp(r) * (b - q)).sum(-1)
                for r, b, q in zip(reference, before, found[name], strict=True)
            ]
        )
        assert part.effect.kl.value == pytest.approx(direct, abs=1e-12)
        before = found[name]
    whole = np.mean(
        [(np.exp(r) * (r - q)).sum(-1) for r, q in zip(reference, found["step 3"], strict=True)]
    )
    assert sum(p.effect.kl.value for p in bucket.parts) == pytest.approx(whole, abs=1e-12)


def test_amounts_are_those_of_a_regression_with_clustered_errors() -> None:
    """CR1 for a mean with equal clusters is the t interval of the cluster means."""
    rng = np.random.default_rng(3)
    means = rng.normal(0.3, 0.2, size=15)
    found = amount(means * 40, np.full(15, 40.0))
    lo, hi = stats.t.interval(0.95, 14, loc=means.mean(), scale=stats.sem(means))
    assert (found.value, found.lo, found.hi) == pytest.approx((means.mean(), lo, hi))
    assert found.p == pytest.approx(stats.ttest_1samp(means, 0).pvalue)


def test_known_effects_are_found_at_their_size_and_nothing_else_is_called_a_cause() -> None:
    """400 decompositions with engine 0.1, codec 0.3, interaction 0: intervals cover, Holm keeps the
    false causes.
    """
    rng = np.random.default_rng(5)
    covered, false = [], 0
    for _ in range(400):
        shared = rng.normal(0, 0.5, size=16)  # a hard window is hard for every configuration
        noise = [rng.normal(0, 0.02, size=16) for _ in range(4)]
        engine, codec = 0.1 + noise[0], 0.3 + noise[1]
        both = engine + codec + noise[2]
        flat = np.zeros(16)
        e, c, b, t = (sums(x, x + 0 * shared) for x in (engine, codec, both, both + noise[3]))
        found = decompose([("engine.kernels", e)], c, b, t)
        covered.append(0.3 in found.bucket("codec").effect.dnll.interval)
        false += found.bucket("interaction").separated
        assert found.bucket("codec").separated
        assert not found.bucket("harness").separated
        assert found.bucket("harness").effect.kl.value == 0 == flat.sum()
    assert 0.92 < np.mean(covered) < 0.98
    assert false / 400 < 0.07


def test_unequal_windows_count_by_their_tokens() -> None:
    tokens = np.array([10.0, 30.0])
    found = effect(WindowSums(np.array([10.0, 0.0]), np.array([0.0, 60.0]), tokens))
    assert (found.dnll.value, found.kl.value) == (0.25, 1.5)


def test_a_token_that_one_configuration_cannot_score_is_left_out_of_all() -> None:
    found, reference, gold = configurations(["a", "b"], windows=2, tokens=5)
    seen = {
        name: [observed(i, *w) for i, w in enumerate(zip(reference, rows, gold, strict=True))]
        for name, rows in found.items()
    }
    seen["b"][1].nll_cand[2] = np.nan
    seen["a"][0].kl[0] = np.inf
    by_name = aligned(seen)
    assert by_name["a"].tokens.tolist() == by_name["b"].tokens.tolist() == [4.0, 4.0]
    assert by_name["a"].kl[0] == pytest.approx(seen["a"][0].kl[1:].sum())
    assert by_name["a"].dnll[1] == pytest.approx(np.delete(seen["a"][1].dnll, 2).sum())


def test_other_windows_and_no_tokens_are_refused() -> None:
    found, reference, gold = configurations(["a"], windows=2, tokens=5)
    seen = [observed(i, *w) for i, w in enumerate(zip(reference, found["a"], gold, strict=True))]
    with pytest.raises(ValueError, match="other windows"):
        aligned({"a": seen, "b": seen[:1]})
    for window in seen:
        window.nll_ref[:] = np.nan
    with pytest.raises(AssayError, match="finite"):
        aligned({"a": seen})


def test_ratios_have_the_delta_methods_interval() -> None:
    rng = np.random.default_rng(8)
    below = rng.uniform(1, 2, size=40)
    above = 1.5 * below + rng.normal(0, 0.1, size=40)
    found = ratio(above, below)
    assert found is not None and found.lo < 1.5 < found.hi
    residual = above - found.value * below
    se = np.sqrt(40 / 39 * (residual @ residual)) / below.sum()
    assert found.hi - found.value == pytest.approx(stats.t.ppf(0.975, 39) * se)
    assert ratio(above, np.zeros(40)) is None


def test_nothing_differs_from_itself() -> None:
    flat = zero_like(sums(np.ones(9), np.ones(9)))
    found = decompose([("engine.none", flat)], flat, flat, flat)
    assert all(
        b.effect.kl.value == 0 and not b.separated and b.share is None for b in found.buckets
    )
