"""The page of the speed agreement says what its numbers say."""

from __future__ import annotations

from typing import Any

import pytest

from speed_agreement_table import compared, markdown, summarised


def request(tpot: float, ttft: float = 0.1, clock: float = 1.0, **fields: Any) -> dict[str, Any]:
    """One request: the server took `tpot`, the client saw `clock` times that."""
    return {
        "tpot_s": tpot * clock,
        "ttft_s": ttft,
        "chunk_s": 2 * tpot,
        "tokens": 90,
        "chunks": 45,
        "loadavg_before": 2.0,
        "metrics": {"tpot_s": tpot, "ttft_s": ttft - 0.002, "tokens": 90},
        **fields,
    }


def results(bench_speed: float = 1.0, clock: float = 1.0, ngram: bool = True) -> dict[str, Any]:
    """Five runs on a machine that becomes slower from run to run."""
    speeds = [0.05 * 1.1**run for run in range(5)]
    plain = [
        {
            "assay": [request(s, clock=clock)] * 2,
            "bench": [request(s * bench_speed)] * 2,
            "same_texts": [True, False],
        }
        for s in speeds
    ]
    result: dict[str, Any] = {
        "machine": {"vllm": "0", "cpu": "x", "cpu_count": 2, "platform": "p", "python": "3"},
        "settings": {
            "model": "m",
            "requests": 2,
            "tokens": 90,
            "temperature": 0.7,
            "top_p": 0.9,
            "seed": 1,
        },
        "plain": plain,
        "ngram": [{"assay": run["assay"]} for run in plain] if ngram else [],
    }
    result["summary"] = summarised(result)
    return result


def test_clocks_that_agree_hold_on_a_machine_that_drifts() -> None:
    found = results()["summary"]
    assert found["all_hold"]
    assert len(found["comparisons"]) == 6
    assert found["figures"]["plain"]["assay"]["tpot_s"]["median"] == pytest.approx(0.05 * 1.21)
    assert (found["same_texts"], found["texts"]) == (5, 10)


def test_a_clock_that_is_off_does_not_hold_and_the_page_says_so() -> None:
    result = results(clock=1.03)
    page = markdown(result)
    assert not result["summary"]["all_hold"]
    assert "do not hold in 3 of 6 comparisons" in page
    assert "(+3.00%)" in page
    assert result["summary"]["server_moved"]["median"] == pytest.approx(0.0)


def test_a_slower_server_in_one_turn_is_told_from_a_clock_that_is_off() -> None:
    result = results(bench_speed=0.97)
    found = result["summary"]
    assert not found["all_hold"]
    assert found["server_moved"]["median"] == pytest.approx(1 / 0.97 - 1)
    assert found["clocks"]["tpot_s"]["assay"]["median"] == pytest.approx(0.0)


def test_a_first_run_alone_makes_a_page() -> None:
    page = markdown(results(ngram=False))
    assert "n-gram" not in page
    assert "hold in every comparison" in page


def test_a_short_first_token_is_allowed_five_milliseconds() -> None:
    assert compared([0.104], [0.1], "ttft_s")["holds"]
    assert not compared([0.106], [0.1], "ttft_s")["holds"]
    assert compared([1.015], [1.0], "ttft_s")["holds"]
