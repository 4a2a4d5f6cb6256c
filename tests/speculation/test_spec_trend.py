from __future__ import annotations

import random

import spec_lines as lines

from assay.speculation.collapse import all_or_nothing, find_collapse, zero_windows
from assay.speculation.health import Health, assess


def windows(*rates: float, drafts: int = 100, seed: int | None = None) -> list[str]:
    """Windows of two positions with about these rates at position 0."""
    rng = random.Random(seed)
    found = []
    for rate in rates:
        first = (
            round(rate * drafts)
            if seed is None
            else sum(rng.random() < rate for _ in range(drafts))
        )
        found.append(lines.vllm_v1([first, round(first * 0.7)], drafts))
    return found


def test_switch_is_found_where_it_happened() -> None:
    evidence = lines.read(*windows(0.8, 0.82, 0.79, 0, 0, 0, 0))
    found = find_collapse(evidence.windows)
    assert found is not None and (found.at, found.zero) == (3, True)


def test_drift_to_a_few_per_cent() -> None:
    found = find_collapse(lines.read(*windows(0.9, 0.88, 0.3, 0.09, 0.02)).windows)
    assert found is not None and not found.zero
    assert found.before.value > 2 * found.after.value


def test_a_good_pool_with_a_dead_end_is_degraded() -> None:
    found = assess(lines.read(*windows(*[0.85] * 20, 0, 0)))
    assert found.health is Health.DEGRADED
    assert "fell to" in found.reason


def test_noise_alone_is_never_a_collapse() -> None:
    for seed in range(40):
        assert find_collapse(lines.read(*windows(*[0.6] * 12, seed=seed)).windows) is None


def test_prose_after_code_is_no_collapse() -> None:
    assert find_collapse(lines.read(*windows(0.85, 0.86, 0.84, 0.62, 0.6, 0.61)).windows) is None


def test_a_rise_is_no_collapse() -> None:
    assert find_collapse(lines.read(*windows(0.02, 0.01, 0.8, 0.8)).windows) is None


def test_thin_windows_say_nothing() -> None:
    assert find_collapse(lines.read(*windows(0.8, 0.8, 0, 0, drafts=20)).windows) is None


def test_engines_do_not_fake_a_trend() -> None:
    rows = []
    for _ in range(6):
        rows += [
            lines.vllm_engine(0),
            lines.vllm_v1([90, 70], 100),
            lines.vllm_engine(1),
            lines.vllm_v1([0, 0], 100),
        ]
    evidence = lines.read(*rows)
    assert find_collapse(evidence.windows) is None
    assert assess(evidence).dead_engines == ["1"]


def test_windows_of_zero_between_good_ones() -> None:
    evidence = lines.read(*windows(0.8, 0, 0.8, 0.81, 0, 0.8))
    assert len(zero_windows(evidence.windows, find_collapse(evidence.windows))) == 2
    assert zero_windows(lines.read(*windows(0.8, 0.7)).windows, None) == []


def test_all_or_nothing() -> None:
    assert (
        all_or_nothing(lines.read(*windows(1.0), lines.vllm_v1([0, 0], 100)).windows) is False
    )  # 70 % at position 1
    both = lines.read(lines.vllm_v1([100, 100], 100), lines.vllm_v1([0, 0], 100))
    assert all_or_nothing(both.windows)
    assert assess(both).health is Health.BROKEN
    assert not all_or_nothing(lines.read(lines.vllm_v1([100, 100], 100)).windows), (
        "perfect is not suspicious alone"
    )
    small = lines.read(lines.vllm_v1([1, 1], 1), lines.vllm_v1([0, 0], 1))
    assert not all_or_nothing(small.windows), "one draft is always all or nothing"
