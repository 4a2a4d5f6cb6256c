from __future__ import annotations

import pytest
import spec_lines as lines
from hypothesis import given
from hypothesis import strategies as st

from assay.speculation.health import Health, assess, judge
from assay.speculation.observation import Printed
from assay.speculation.record import Record


def health(per_position: list[int], drafts: int) -> Health:
    return assess(lines.read(lines.vllm_v1(per_position, drafts))).health


@pytest.mark.parametrize(
    ("per_position", "drafts", "expected"),
    [
        ([0, 0], 100, Health.BROKEN),
        ([0, 0], 60, Health.BROKEN),
        ([4, 0], 100, Health.BROKEN),  # 4 % [1.6, 9.8]
        ([4, 0], 80, Health.DEGRADED),  # 5 % is not under 5 %
        ([3, 0], 70, Health.DEGRADED),  # 4.3 %, but up to 11.9 %
        ([0, 0], 20, Health.DEGRADED),  # up to 16 %: broken is not certain, helpful is excluded
        ([0, 0], 9, Health.INSUFFICIENT),  # 18 draft tokens
        ([200, 100], 1000, Health.DEGRADED),
        ([400, 300], 1000, Health.DEGRADED),
        ([9, 8], 20, Health.INSUFFICIENT),  # 45 % [26, 66]
        ([14, 9], 20, Health.INSUFFICIENT),  # 70 % [48, 86]
        ([140, 90], 200, Health.HEALTHY),
        ([550], 1000, Health.DEGRADED),  # position 0 is good, but one token is too few: 1.55 a step
        ([650], 1000, Health.HEALTHY),
        ([900, 20, 0, 0], 1000, Health.HEALTHY),  # a wasteful tail is no fault of the head
    ],
)
def test_bands(per_position: list[int], drafts: int, expected: Health) -> None:
    assert health(per_position, drafts) is expected


@given(
    st.integers(1, 3000).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n).map(lambda x: x))
    )
)
def test_more_acceptance_is_never_worse(case: tuple[int, int, int]) -> None:
    drafts, first, other = case
    low, high = sorted((first, other))
    order = [Health.BROKEN, Health.DEGRADED, Health.INSUFFICIENT, Health.HEALTHY]
    assert order.index(health([low, low // 2], drafts)) <= order.index(
        health([high, high // 2], drafts)
    )


def test_one_dead_engine_of_two_is_degraded_although_the_pool_looks_fine() -> None:
    evidence = lines.read_metrics(lines.vllm_page({"0": (3000, [2900, 2800]), "1": (300, [0, 0])}))
    assert judge(evidence.record).health is Health.HEALTHY
    found = assess(evidence)
    assert (found.health, found.dead_engines) == (Health.DEGRADED, ["1"])


def test_all_engines_dead_is_broken() -> None:
    assert (
        assess(lines.read_metrics(lines.vllm_page({"0": (300, [0]), "1": (300, [2])}))).health
        is Health.BROKEN
    )


def test_windows_that_disagree_widen_the_interval() -> None:
    steady = lines.read(*(lines.vllm_v1([60, 40], 100) for _ in range(8)))
    uneven = lines.read(
        *(lines.vllm_v1([n, n // 2 + 10], 100) for n in (98, 20, 95, 25, 97, 22, 96, 27))
    )
    a, b = assess(steady), assess(uneven)
    assert a.rate and b.rate and a.rate.value == b.rate.value == pytest.approx(0.6)
    assert a.design_effect == 1.0 and b.design_effect > 30
    assert b.rate.hi - b.rate.lo > 4 * (a.rate.hi - a.rate.lo)
    assert (a.health, b.health) == (Health.HEALTHY, Health.INSUFFICIENT)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"acceptance_rate": 0.02}, Health.BROKEN),
        ({"acceptance_rate": 0.3}, Health.DEGRADED),
        ({"acceptance_rate": 0.62}, Health.HEALTHY),
        ({"acceptance_rate": 0.62, "tokens_per_step": 1.3}, Health.DEGRADED),
        ({"acceptance_rate": 0.3, "tokens_per_step": 2.5}, Health.HEALTHY),
        ({"tokens_per_step": 1.0}, Health.BROKEN),
        ({"tokens_per_step": 1.3}, Health.DEGRADED),
        ({"printed": Printed(multiplier=1.4)}, Health.INSUFFICIENT),
        ({"per_position": (0.03, 0.0), "acceptance_rate": 0.015}, Health.BROKEN),
        ({"per_position": (0.4,), "acceptance_rate": 0.4}, Health.DEGRADED),
    ],
)
def test_printed_values(values: dict[str, object], expected: Health) -> None:
    assert judge(Record(engine="x", windows=1, **values)).health is expected  # type: ignore[arg-type]


def test_off_and_idle() -> None:
    assert assess(lines.read()).health is Health.OFF
    assert assess(lines.read_metrics(lines.vllm_page({"0": (0, [0, 0])}))).health is Health.OFF
    assert assess(lines.read(lines.sglang(0.0))).health is Health.OFF


@pytest.mark.parametrize(
    ("accepted", "drafted", "generated", "expected"),
    [
        (600, 1000, 800, Health.HEALTHY),
        (200, 1000, 1000, Health.DEGRADED),  # 1.25 tokens a step
        (10, 1000, 900, Health.BROKEN),
        (5, 10, 8, Health.INSUFFICIENT),
    ],
)
def test_without_positions(accepted: int, drafted: int, generated: int, expected: Health) -> None:
    body = {"predicted_n": generated, "draft_n": drafted, "draft_n_accepted": accepted}
    assert assess(lines.read_document(body)).health is expected


def test_counters_that_do_not_fit_together_are_not_judged() -> None:
    page = (
        "vllm:spec_decode_num_drafts_total 100\nvllm:spec_decode_num_draft_tokens_total 300\n"
        "vllm:spec_decode_num_accepted_tokens_total {}\n"
    )
    judged = assess(lines.read_metrics(page.format(900)))
    assert (
        judged.health is Health.INSUFFICIENT
        and "more tokens were accepted than drafted" in judged.reason
    )
    # A page is not read at one instant: a few hits too many are no contradiction.
    assert assess(lines.read_metrics(page.format(303))).health is Health.HEALTHY


def test_a_length_over_enough_steps_is_judged_without_the_number_of_drafts() -> None:
    reply = {"meta_info": {"completion_tokens": 120, "spec_verify_ct": 50}}
    assert assess(lines.read_document(reply)).health is Health.HEALTHY
    dead = {"meta_info": {"completion_tokens": 51, "spec_verify_ct": 50}}
    assert assess(lines.read_document(dead)).health is Health.BROKEN
    few = {"meta_info": {"completion_tokens": 12, "spec_verify_ct": 5}}
    assert assess(lines.read_document(few)).health is Health.INSUFFICIENT
