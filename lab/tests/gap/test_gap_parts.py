"""Rules of repeatability, layers, noise curves, residuals, proposals and the comparison of
set-ups.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from synthetic import configurations, observed

from assay.engines import setup_differences, setup_facts
from assay.engines.scoring import Engagement
from assay_lab.gap import checks
from assay_lab.gap.buckets import Amount, effect
from assay_lab.gap.configuration import Corners
from assay_lab.gap.floors import Floors, Place, place, repeated, repeated_nll
from assay_lab.gap.phases.layers import attribute, group_name
from assay_lab.gap.phases.noise import curve, kl_at, noise_codec, sigmas_of
from assay_lab.gap.phases.residuals import relative_error, residuals
from assay_lab.gap.plan import GapPlan
from assay_lab.gap.proposals import hot_layers, proposals, with_more_bits
from assay_lab.gap.result import judged
from assay_lab.kv.measured import Measured


def an(value: float, half: float) -> Amount:
    return Amount(value, value - half, value + half, 0.5)


def test_a_small_rest_is_repeated_and_a_large_or_vague_one_is_not() -> None:
    total = an(0.2, 0.05)
    assert repeated(an(0.005, 0.01), total, 0.0).shown
    small = repeated(an(0.005, 0.03), total, 0.0)  # 2.5 % of the total, its interval up to 17 %
    assert small.ok and not small.shown and small.bound == pytest.approx(0.02)
    assert not repeated(an(0.021, 0.001), total, 0.0).ok
    assert not repeated(an(0.0, 0.06), total, 0.0).ok  # vaguer than the total
    assert repeated(an(0.021, 0.001), total, 0.03).ok  # below the noise floor
    assert repeated(an(0.0, 0.0), an(0.0, 0.0), 0.0).ok


def test_the_noisy_currency_is_repeated_where_zero_is_inside() -> None:
    assert repeated_nll(an(0.001, 0.004), an(0.002, 0.002), 0.0).ok
    assert not repeated_nll(an(0.006, 0.004), an(0.002, 0.02), 0.0).ok


def test_the_total_is_placed_by_its_interval() -> None:
    assert place(an(0.01, 0.01), 0.03, 32) == Place.INSIDE
    assert place(an(0.03, 0.01), 0.03, 32) == Place.UNDECIDED
    assert place(an(0.3, 0.1), 0.03, 32) == Place.OUTSIDE
    assert place(an(0.0, 0.0), 0.03, 7) == Place.UNDECIDED
    assert place(an(0.0, 0.0), 0.03, 7, same=True) == Place.INSIDE
    # The bounds are those of perplexity: ln 0.97 … ln 1.03.
    assert place(an(math.log(1.0299), 0.0), 0.03, 8) == Place.INSIDE
    assert place(an(math.log(1.0301), 0.0), 0.03, 8) == Place.OUTSIDE


def measured(name: str, scale: float, windows: int = 8, **kept: object) -> Measured:
    found, reference, gold = configurations([name], windows=windows)
    moved = [(1 - scale) * r + scale * q for r, q in zip(reference, found[name], strict=True)]
    moved = [m - np.log(np.exp(m).sum(-1, keepdims=True)) for m in moved]
    seen = [observed(i, *w) for i, w in enumerate(zip(reference, moved, gold, strict=True))]
    return Measured(seen, Engagement(), **kept)


def test_layers_that_add_up_have_additivity_one() -> None:
    alone = {group_name(g): measured("a", 0.5) for g in [(0, 1), (2, 3)]}
    single = effect(attribute(4, 2, alone, measured("a", 0.5)).parts[0].sums).kl.value
    found = attribute(4, 2, alone, measured("a", 0.5))
    assert found.additivity is not None and found.additivity.value == pytest.approx(0.5)
    assert found.joint.kl.value == pytest.approx(single)
    assert [p.name for p in found.parts] == ["codec.layers.00-01", "codec.layers.02-03"]
    assert group_name((7,)) == "codec.layer.07"


def test_a_linear_answer_has_slope_two_and_its_range_is_found() -> None:
    runs = {s: measured("a", s) for s in (0.05, 0.1, 0.2, 0.4)}
    found = curve(runs, floor=0.0)
    assert found.growth.slope is not None and found.growth.slope.value == pytest.approx(2, abs=0.1)
    assert found.linear == pytest.approx((0.05, 0.4))
    assert kl_at(found, 0.14) == pytest.approx(
        curve({0.14: measured("a", 0.14)}, 0.0).effects[0].kl.value, rel=0.05
    )
    assert kl_at(found, 0.5) is None
    assert kl_at(found, 0.05) == pytest.approx(found.effects[0].kl.value)
    # What drowns in the floor says nothing of a slope.
    high = curve(runs, floor=found.effects[1].kl.value / 1.9)
    assert high.linear == pytest.approx((0.2, 0.4))
    assert curve(runs, floor=10.0).growth.slope is None


def test_noise_stands_where_the_codec_stands() -> None:
    assert (
        noise_codec("prerope+sinks(n=4)+hadamard(bits=4)", 0.01, 3)
        == "k:prerope+noise(sigma=0.01,seed=3);v:noise(sigma=0.01,seed=3)"
    )
    assert noise_codec("v:fp8", 0.5, 0) == "v:noise(sigma=0.5,seed=0)"
    assert sigmas_of(0.1, (2.0, 0.5)) == (0.05, 0.2)
    assert sigmas_of(0.0, (1.0,)) == (0.02,)


def facts(power: float, error: float, sha256: str = "s") -> dict[str, object]:
    return {"stored": 10, "exact": 40, "power": power, "error": error, "sha256": sha256}


def noted(streams: dict[str, list[dict[str, object]]], windows: tuple[int, ...]) -> Measured:
    return Measured([], Engagement(notes={"kv": {"streams": streams, "tables": 0}}), None, windows)


def test_residuals_are_paired_by_window() -> None:
    a = noted(
        {"0.k": [facts(1.0, 0.01), facts(2.0, 0.02)], "1.k": [facts(1.0, 0.0, "")] * 2}, (0, 1)
    )
    b = noted(
        {"0.k": [facts(2.0, 0.04, "t"), facts(3.0, 0.5)], "1.k": [facts(1.0, 0.0, "")] * 2}, (1, 2)
    )
    (only,) = residuals(a, b)
    assert (only.layer, only.stream, only.windows, only.equal_streams) == (0, "k", 1, 0)
    assert only.power_ratio is not None and only.power_ratio.value == pytest.approx(1.0)
    assert only.error_ratio is not None and only.error_ratio.value == pytest.approx(2.0)
    assert only.relative_reference == pytest.approx(0.1)
    assert relative_error(a) == pytest.approx(0.1)
    (same,) = residuals(a, a)
    assert same.equal_streams == 2
    assert residuals(a, noted({}, (5,))) == []


def test_the_hottest_layers_are_proposed_exact_and_with_more_bits() -> None:
    sizes = [0.1, 0.9, 0.2, 0.8, *([0.01] * 10)]
    alone = {group_name((i,)): measured("a", size) for i, size in enumerate(sizes)}
    joint = measured("a", 1.0)
    assert hot_layers(attribute(14, 0, alone, joint), 14) == (1, 3)
    plan = GapPlan("hf:m", "vllm:m", codec="sinks(n=4)+hadamard(bits=4)")  # 4 sinks are the default
    offered = {p.action: p.config for p in proposals(Corners(plan), alone, joint, 14)}
    assert offered["keep layers 1,3 exact"].skip_layers == (1, 3)
    assert offered["one bit more in layers 1,3"].layer_codecs == (
        (1, "sinks+hadamard(bits=5)"), (3, "sinks+hadamard(bits=5)"),
    )  # fmt: skip
    assert offered["one bit more everywhere"].codec == "sinks+hadamard(bits=5)"
    assert all(c.engine == "vllm:m" for c in offered.values())
    other = proposals(Corners(GapPlan("hf:m", "hf:m", codec="fp8")), {}, joint, 14)
    assert "fp8 instead" not in {p.action for p in other}


def test_bits_grow_where_there_are_any() -> None:
    assert with_more_bits("k:int(bits=4);v:fp8") is not None
    assert with_more_bits("fp8") is None
    assert with_more_bits("int(bits=8)") is None  # it has no more


def test_a_proposal_is_judged_by_its_saving_on_the_same_windows() -> None:
    plan = GapPlan("hf:m", "hf:m", codec="hadamard(bits=4)")
    offered = [
        p
        for p in proposals(Corners(plan), {}, measured("a", 0.6), 30)
        if p.action == "one bit more everywhere"
    ]
    size = SimpleNamespace(stored=100.0, ratio=4.0)
    runs = {
        "as it is": measured("a", 0.6, bytes=size),
        "one bit more everywhere": measured(
            "a", 0.3, bytes=SimpleNamespace(stored=125.0, ratio=3.2)
        ),
    }
    (entry,) = judged(offered, runs)
    assert entry["helps"] and entry["saving_kld"]["lo"] > 0
    assert (entry["bytes_ratio"], entry["bytes_ratio_before"], entry["bytes_more"]) == (
        3.2,
        4.0,
        25.0,
    )
    assert entry["windows"] == 8


def test_set_ups_are_compared_in_one_form() -> None:
    old = SimpleNamespace(
        rope_theta=10000, rope_scaling=None, sliding_window=4096, use_sliding_window=False
    )
    new = SimpleNamespace(
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        layer_types=["full_attention"] * 3,
    )
    assert setup_differences(setup_facts(old), setup_facts(new)) == {}
    other = SimpleNamespace(rope_parameters={"rope_theta": 5000.0}, final_logit_softcapping=30.0)
    assert setup_differences(setup_facts(new), setup_facts(other)) == {
        "rope": ({"rope_theta": 10000.0}, {"rope_theta": 5000.0})
    }


@pytest.mark.parametrize(
    ("engine", "codec", "holds"),
    [(0.05, 0.05, True), (0.05, 0.068, True), (0.05, 0.075, False), (0.05, 0.25, False)],
)
def test_effects_measured_alone_add_up_to_a_fifth_of_what_both_do_on_other_text(
    monkeypatch: pytest.MonkeyPatch, engine: float, codec: float, holds: bool
) -> None:
    monkeypatch.setattr(checks, "own_effect", lambda fresh: SimpleNamespace(kl=an(0.1, 0.001)))
    buckets = [
        SimpleNamespace(name=name, effect=SimpleNamespace(kl=an(value, 0.001)))
        for name, value in (("engine", engine), ("codec", codec), ("harness", 9.0))
    ]
    decomposition: Any = SimpleNamespace(buckets=buckets)
    found = checks.check_sum(decomposition, [], Floors(None, None, None))
    assert found.holds is holds
    assert found.bound == pytest.approx(0.02)
    assert found.difference.value == pytest.approx(0.1 - engine - codec)


def test_a_sum_below_the_noise_floor_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "own_effect", lambda fresh: SimpleNamespace(kl=an(0.0001, 1e-6)))
    buckets = [SimpleNamespace(name="engine", effect=SimpleNamespace(kl=an(0.0005, 1e-6)))]
    decomposition: Any = SimpleNamespace(buckets=buckets)
    noisy: Any = SimpleNamespace(repeat_kl=0.001)
    assert checks.check_sum(decomposition, [], noisy).holds
    quiet: Any = SimpleNamespace(repeat_kl=0.0001)
    assert not checks.check_sum(decomposition, [], quiet).holds
