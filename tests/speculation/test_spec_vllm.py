from __future__ import annotations

import pytest
import spec_lines as lines
from hypothesis import given
from hypothesis import strategies as st

from assay.speculation.rounding import exact_counts, infer_drafts, position_counts


@pytest.mark.parametrize("wording", ["0.8.5", "0.11", "0.28"])
def test_every_wording_with_positions(wording: str) -> None:
    record = lines.read(lines.vllm_v1([90, 61, 33], 120, wording=wording)).record
    assert (record.counts.accepted, record.counts.drafted, record.counts.drafts) == (184, 360, 120)
    assert record.positions == ((90, 120), (61, 120), (33, 120))
    assert record.num_speculative_tokens == 3
    assert record.mean_acceptance_length == pytest.approx(1 + 184 / 120)


@pytest.mark.parametrize("wording", ["0.8.2", "0.8.3"])
def test_wordings_without_positions_know_no_drafts(wording: str) -> None:
    record = lines.read(lines.vllm_v1([40, 20], 50, wording=wording)).record
    assert (record.counts.accepted, record.counts.drafted, record.counts.drafts) == (60, 100, None)
    assert record.acceptance_rate == pytest.approx(0.6)
    assert record.mean_acceptance_length is None


def test_windows_are_summed_by_counts_not_by_rates() -> None:
    # 86 % in a busy last window, 9 % in a long first one: the mean of the printed rates would be 47 %.  # noqa: E501
    record = lines.read(lines.vllm_v1([90], 1000), lines.vllm_v1([86], 100)).record
    assert record.acceptance_rate == pytest.approx(176 / 1100)
    assert record.windows == 2


def test_nan_windows_are_empty() -> None:
    evidence = lines.read(
        lines.vllm_v1([0, 0], 0, wording="0.8.3"), lines.vllm_v1([0, 0], 0, wording="0.11")
    )
    assert evidence.record.windows == 0
    assert evidence.record.nothing_drafted
    mixed = lines.read(lines.vllm_v1([0, 0], 0), lines.vllm_v1([30, 10], 50)).record
    assert (mixed.windows, mixed.counts.drafts) == (1, 50)


def test_the_engine_number_stands_on_the_line_before() -> None:
    evidence = lines.read(
        lines.vllm_engine(0),
        lines.vllm_v1([80, 60], 100),
        lines.vllm_engine(1),
        lines.vllm_v1([0, 0], 100),
    )
    assert {name: r.counts.accepted for name, r in evidence.per_engine.items()} == {
        "0": 140,
        "1": 0,
    }
    assert evidence.record.counts.drafted == 400


def test_engine_numbers_of_several_api_servers_do_not_mix() -> None:
    a, b = "(APIServer_0 pid=11) ", "(APIServer_1 pid=12) "
    evidence = lines.read(
        lines.vllm_engine(0, prefix=a), lines.vllm_engine(1, prefix=b),
        lines.vllm_v1([9], 10, prefix=a), lines.vllm_v1([1], 10, prefix=b),
    )  # fmt: skip
    assert {name: r.counts.accepted for name, r in evidence.per_engine.items()} == {"0": 9, "1": 1}


def test_engine_core_prefix_names_the_replica() -> None:
    core = "\x1b[0;36m(EngineCore_DP{} pid=30{})\x1b[0;0m "
    evidence = lines.read(*(lines.vllm_v1([n], 10, prefix=core.format(n, n)) for n in (0, 1, 2)))
    assert {name: r.counts.accepted for name, r in evidence.per_engine.items()} == {
        "DP0": 0,
        "DP1": 1,
        "DP2": 2,
    }


def test_speed_of_the_window_is_kept() -> None:
    record = lines.read(lines.vllm_engine(0, speed=61.5), lines.vllm_v1([8], 10)).record
    assert record.generation_throughput == 61.5


@given(
    st.integers(1, 4000).flatmap(
        lambda drafts: st.tuples(
            st.just(drafts),
            st.lists(st.integers(0, drafts), min_size=1, max_size=8).map(
                lambda p: sorted(p, reverse=True)
            ),
        )
    )
)
def test_counts_survive_printing(case: tuple[int, list[int]]) -> None:
    """Whatever full-length drafts vLLM prints, accepted, drafted and drafts come back exactly."""
    drafts, per_position = case
    record = lines.read(lines.vllm_v1(per_position, drafts)).record
    assert (record.counts.drafts, record.counts.accepted) == (drafts, sum(per_position))
    assert record.positions is not None
    for (found, _), true in zip(record.positions, per_position, strict=True):
        # Three decimals cannot tell counts apart over thousands of drafts.
        assert abs(found - true) <= 1 + drafts // 1000
    assert sum(a for a, _ in record.positions) == sum(per_position)


def test_short_drafts_are_not_taken_for_full_ones() -> None:
    # 100 drafts of up to 5 tokens, but only 300 drafted: n-gram drafts that were cut.
    line = lines.vllm_v1([70, 50, 30, 20, 10], 100, drafted=300)
    record = lines.read(line).record
    assert record.counts.drafts == 100
    assert record.positions is not None and record.positions[0] == (70, 100)


def test_v0_totals_are_not_summed() -> None:
    record = lines.read(lines.vllm_v0(50, 90, 70, 3), lines.vllm_v0(100, 180, 150, 3)).record
    assert (
        record.counts.accepted,
        record.counts.drafted,
        record.counts.drafts,
        record.counts.emitted,
    ) == (100, 180, 60, 150)
    assert record.mean_acceptance_length == pytest.approx(2.5)
    assert record.windows == 2


def test_v0_restart_adds_what_came_before() -> None:
    record = lines.read(lines.vllm_v0(100, 180, 150, 3), lines.vllm_v0(10, 30, 20, 3)).record
    assert (record.counts.drafted, record.counts.accepted) == (210, 110)


def test_v0_counts_hits_after_a_rejection_apart() -> None:
    record = lines.read(lines.vllm_v0(120, 180, 150, 3, words="tokens tokens")).record
    assert record.leading == 150 - 60
    assert record.counts.accepted == 120


def test_summary_of_bench_serve() -> None:
    block = [
        "----------------Speculative Decoding-----------------",
        "Acceptance rate (%):   50.00",
        "Acceptance length:     2.00",
        "Drafts:      1,000",
        "Draft tokens:     2000",
        "Accepted tokens:   1000",
        "Per-position acceptance (%):",
        "  Position 0:    70.00",
        "  Position 1:    30.00",
    ]
    record = lines.read(*block).record
    assert record.positions == ((700, 1000), (300, 1000))
    # The same run's windows, where they are there, speak for it; the summary would count twice.
    assert lines.read(lines.vllm_v1([7, 3], 10), *block).record.counts.drafts == 10


def test_quoted_rates_in_any_order() -> None:
    record = lines.read(
        "Spec decode metrics: system_efficiency=1.85, draft_acceptance_rate=0.62"
    ).record
    assert record.acceptance_rate == 0.62
    assert record.printed.multiplier == 1.85
    assert not record.counted


def test_request_histogram() -> None:
    body = {
        "mean_acceptance_length": 2.1,
        "acceptance_histogram": [3, 4, 2, 1],
        "num_spec_steps": 10,
    }
    body |= {"num_accepted_draft_tokens": 11, "num_draft_tokens": 30, "num_spec_tokens": 3}
    record = lines.read_document({"choices": [], "metrics": {"speculative_decoding": body}}).record
    assert record.positions == ((7, 10), (3, 10), (1, 10))
    sparse = body | {"acceptance_histogram": {"0": 3, "1": 4, "2": 2, "3": 1}}
    assert (
        lines.read_document([{"metrics": {"speculative_decoding": sparse}}]).record.positions
        == record.positions
    )


def test_page_of_two_engines_and_two_pages() -> None:
    first = lines.vllm_page({"0": (100, [80, 50]), "1": (100, [0, 0])})
    second = lines.vllm_page({"0": (150, [110, 70]), "1": (160, [0, 0])})
    one, both = lines.read_metrics(first), lines.read_metrics(first, second)
    assert set(one.per_engine) == {"0", "1"}
    assert both.record.counts.drafts == 310, "totals of one counter are not summed"
    assert both.per_engine["0"].positions == ((110, 150), (70, 150))


def test_a_page_with_missing_series_is_partial() -> None:
    page = lines.vllm_page({"0": (100, [80, 50])})
    cut = "\n".join(
        line
        for line in page.splitlines()
        if 'position="0"' not in line and "draft_tokens" not in line
    )
    record = lines.read_metrics(cut).record
    assert record.counts.partial
    assert (record.counts.drafts, record.counts.drafted, record.per_position) == (100, None, None)


@given(st.integers(1, 8), st.integers(1, 3000), st.data())
def test_the_short_way_to_counts_says_what_the_long_one_does(
    k: int, drafts: int, data: st.DataObject
) -> None:
    hits, left = [], drafts
    for _ in range(k):
        left = data.draw(st.integers(0, left))
        hits.append(left)
    drafted = drafts * k - data.draw(st.sampled_from([0, 0, 0, 1]))
    rates = tuple(round(h / drafts, 3) for h in hits)
    mean = round(1 + sum(hits) / drafts, 2)
    short = exact_counts(drafted, sum(hits), mean, rates)
    if short is not None:
        inferred = infer_drafts(drafted, sum(hits), k, mean, rates)
        assert inferred == short[0]
        assert position_counts(short[0], rates, sum(hits)) == short[1]
