from __future__ import annotations

from typing import Any

import pytest
import spec_lines as lines

from assay.speculation.health import Health, assess
from assay.speculation.parsers.sglang import infer_depth


class TestSglang:
    def test_lengths_are_weighted_by_running_requests(self) -> None:
        record = lines.read(lines.sglang(3.0, running=3), lines.sglang(2.0, running=1)).record
        assert record.mean_acceptance_length == pytest.approx(2.75)
        assert not record.counted

    def test_old_rate_is_not_an_acceptance_rate(self) -> None:
        # 0.25 = 1 token / 4 draft tokens: nothing was accepted.
        record = lines.read(lines.sglang(1.0, 0.25)).record
        assert record.acceptance_rate == 0.0
        assert record.printed.reported_rate == 0.25
        assert record.num_speculative_tokens == 3

    def test_new_rate(self) -> None:
        record = lines.read(lines.sglang(2.80, 0.60), lines.sglang(2.29, 0.43)).record
        assert record.num_speculative_tokens == 3
        assert record.acceptance_rate == pytest.approx((1.80 + 1.29) / 2 / 3)

    @pytest.mark.parametrize(
        ("pairs", "depth"),
        [
            ([(2.80, 0.70)], 3),  # old: 2.80 / 4
            ([(2.80, 0.60)], 3),  # new: 1.80 / 3
            ([(1.00, 0.00)], None),
            ([(3.35, 0.84), (1.0, 0.25)], 3),
            ([(2.0, None)], None),
            ([(2.0, 0.9)], None),  # no whole number fits
        ],
    )
    def test_depth_from_length_and_rate(
        self, pairs: list[tuple[float | None, float | None]], depth: int | None
    ) -> None:
        assert infer_depth(pairs) == depth

    def test_server_arguments_fix_the_depth(self) -> None:
        arguments = (
            "server_args=ServerArgs(speculative_algorithm='EAGLE', speculative_num_steps=5,"
            " tp_size=1)"
        )
        record = lines.read(arguments, lines.sglang(3.5)).record
        assert record.num_speculative_tokens == 5
        assert record.acceptance_rate == pytest.approx(0.5)

    def test_nothing_accepted_becomes_counts(self) -> None:
        record = lines.read(*(lines.sglang(1.0, 0.0, tokens=500 + 40 * i) for i in range(4))).record
        assert (record.counts.accepted, record.counts.drafts, record.counts.drafted) == (
            0,
            160,
            480,
        )
        assert record.counts.estimated

    def test_lengths_of_one_without_steady_growth_stay_values(self) -> None:
        record = lines.read(
            lines.sglang(1.0, 0.0, tokens=500), lines.sglang(1.0, 0.0, tokens=7)
        ).record
        assert record.counts.drafts is None

    def test_ranks_are_engines(self) -> None:
        evidence = lines.read(
            lines.sglang(2.5, rank="DP0 TP0", stop="."), lines.sglang(1.0, rank="DP1 TP1")
        )
        assert set(evidence.per_engine) == {"DP0", "DP1"}
        assert assess(evidence).health is Health.DEGRADED

    def test_request(self) -> None:
        meta = {"completion_tokens": 30, "spec_verify_ct": 12, "spec_num_correct_drafts": 18}
        meta |= {"spec_num_proposed_drafts": 36, "spec_correct_drafts_histogram": [3, 3, 3, 3]}
        record = lines.read_document({"text": "x", "meta_info": meta}).record
        assert (record.counts.accepted, record.counts.drafted, record.counts.drafts) == (18, 36, 12)
        assert record.positions == ((9, 12), (6, 12), (3, 12))

    def test_usage_beside_meta_info_does_not_count_twice(self) -> None:
        usage = {
            "completion_tokens_details": {
                "accepted_prediction_tokens": 18,
                "rejected_prediction_tokens": 18,
            }
        }
        both = {
            "meta_info": {
                "spec_verify_ct": 12,
                "spec_num_correct_drafts": 18,
                "spec_num_proposed_drafts": 36,
            }
        }
        assert lines.read_document(both | {"usage": usage}).record.counts.drafted == 36
        assert lines.read_document({"usage": usage}).record.counts.drafted == 36

    def test_draft_gauges_are_left_out(self) -> None:
        page = "\n".join(
            f'sglang:spec_accept_length{{engine_type="{kind}",tp_rank="{rank}"}} {value}'
            for kind, rank, value in (
                ("unified", "0", 2.4),
                ("draft", "0", 0.0),
                ("unified", "1", 2.4),
            )
        )
        record = lines.read_metrics(page).record
        assert (record.mean_acceptance_length, record.windows) == (2.4, 1)


class TestLlamaCpp:
    def test_requests_are_summed_and_statistics_are_not_added(self) -> None:
        evidence = lines.read(
            lines.llama_request(30, 50), lines.llama_statistics("draft", 20, 90, 61),
            lines.llama_request(20, 50, "new"), lines.llama_statistics("draft", 40, 190, 121),
        )  # fmt: skip
        assert (
            evidence.record.counts.accepted,
            evidence.record.counts.drafted,
            evidence.record.counts.drafts,
        ) == (50, 100, None)
        assert evidence.record.to_json()["per_implementation"]["draft"] == {
            "accepted": 121,
            "drafted": 190,
            "drafts": 40,
        }

    def test_statistics_of_the_same_tokens_give_the_drafts(self) -> None:
        evidence = lines.read(
            lines.llama_request(30, 50), lines.llama_statistics("draft-mtp", 25, 50, 30),
            lines.llama_request(20, 30), lines.llama_statistics("draft-mtp", 40, 80, 50),
        )  # fmt: skip
        record = evidence.record
        assert (record.counts.drafts, record.num_speculative_tokens, record.counts.accepted) == (
            40,
            2,
            50,
        )
        assert record.mean_acceptance_length == pytest.approx(1 + 50 / 40)

    def test_tokens_per_step_from_the_eval_line(self) -> None:
        evidence = lines.read(
            "prompt eval time =  11.0 ms /  16 tokens (    0.7 ms per token,  1400.0 tokens per"
            " second)",
            "       eval time =  900.0 ms /  100 tokens (    9.0 ms per token,   111.1 tokens per"
            " second)",
            lines.llama_request(60, 100),
        )
        assert evidence.record.mean_acceptance_length is None
        assert evidence.record.tokens_per_step == pytest.approx(100 / 40)
        assert evidence.record.generation_throughput == 111.1

    def test_printed_mean_length(self) -> None:
        line = lines.llama_request(
            60, 100, "new", prefix="0.01.002.003 I slot print_timing: id  0 | task 4 | "
        )
        record = lines.read(line + ", mean len =  3.50").record
        assert record.mean_acceptance_length == pytest.approx(3.5)
        assert record.counts.drafts is None

    def test_command_line_tool(self) -> None:
        record = lines.read(
            "n_draft   = 8", "n_predict = 129", "n_drafted = 160", "n_accept  = 96"
        ).record
        assert (record.counts.drafted, record.counts.accepted, record.num_speculative_tokens) == (
            160,
            96,
            8,
        )
        assert record.tokens_per_step == pytest.approx(129 / 33)

    def test_timings(self) -> None:
        body = {"timings": {"predicted_n": 50, "draft_n": 40, "draft_n_accepted": 30}}
        record = lines.read_document(body).record
        assert (record.counts.drafted, record.counts.accepted) == (40, 30)
        assert record.tokens_per_step == pytest.approx(2.5)


class TestOthers:
    def test_mlx_rounds(self) -> None:
        record = lines.read_document(
            {"timings": {"draft_rounds": 20, "draft_n": 60, "draft_n_accepted": 45}}
        ).record
        assert record.engine == "mlx-vlm"
        assert (record.counts.drafts, record.mean_acceptance_length) == (20, pytest.approx(3.25))

    def test_mlc_slot_zero_is_the_targets_own(self) -> None:
        record = lines.read_document(
            {"draft_count": [200, 200, 180], "accept_count": [200, 150, 90]}
        ).record
        assert record.positions == ((150, 200), (90, 180))
        assert record.counts.drafted is None

    def test_tensorrt_iterations_are_summed(self) -> None:
        iterations = [
            {
                "specDecodingStats": {
                    "numDraftTokens": 12,
                    "numAcceptedTokens": n,
                    "numRequestsWithDraftTokens": 4,
                }
            }
            for n in (6, 10)
        ]
        record = lines.read_document(iterations).record
        assert (
            record.counts.drafted,
            record.counts.accepted,
            record.counts.drafts,
            record.num_speculative_tokens,
        ) == (24, 16, 8, 3)

    @pytest.mark.parametrize("wrap", ["choice", "perf_metrics"])
    def test_tensorrt_requests(self, wrap: str) -> None:
        """The block as responses carry it (with a histogram) and as `/perf_metrics` does
        (without).
        """
        own = {"acceptance_rate": 0.55, "total_accepted_draft_tokens": 33, "total_draft_tokens": 60}
        if wrap == "choice":
            own |= {
                "num_spec_steps": 20,
                "acceptance_histogram": [5, 2, 8, 5],
                "num_spec_tokens": 3,
            }
            body = {"choices": [{"avg_decoded_tokens_per_iter": 2.65, "speculative_decoding": own}]}
        else:
            body = {"phases": {"server": {"first_iter": 4, "speculative_decoding": own}}}
        record = lines.read_document([body, body]).record
        assert (record.engine, record.counts.accepted, record.counts.drafted) == (
            "tensorrt-llm",
            66,
            120,
        )
        if wrap == "choice":
            assert record.positions == ((30, 40), (26, 40), (10, 40))
            assert record.mean_acceptance_length == pytest.approx(2.65)
        else:
            assert (record.counts.drafts, record.mean_acceptance_length) == (None, None)

    def test_tensorrt_average_of_a_choice(self) -> None:
        def choice(length: float) -> dict[str, Any]:
            return {"choices": [{"index": 0, "avg_decoded_tokens_per_iter": length}]}

        assert assess(lines.read_document(choice(2.5))).health is Health.HEALTHY
        # 1.0 is what a server without speculation prints.
        assert assess(lines.read_document(choice(1.0))).health is Health.OFF

    def test_tensorrt_counters(self) -> None:
        def page(drafted: int, accepted: int) -> str:
            own = 'engine_type="trtllm",model_name="m"'
            return (
                f"trtllm_spec_decode_num_draft_tokens_total{{{own}}} {drafted}.0\n"
                f"trtllm_spec_decode_num_draft_tokens_created{{{own}}} 1.7e9\n"
                f"trtllm_spec_decode_num_accepted_tokens_total{{{own}}} {accepted}.0\n"
                f"trtllm_spec_decode_acceptance_length{{{own}}} 2.1\n"
            )

        evidence = lines.read_metrics(page(900, 30), page(1800, 660))
        assert (evidence.record.counts.drafted, evidence.record.counts.accepted) == (1800, 660)
        assert evidence.record.counts.drafts is None
        assert [(w.counts.drafted, w.counts.accepted) for w in evidence.windows] == [
            (900, 30),
            (900, 630),
        ]

    def test_tensorrt_lengths_without_weights_are_not_averaged(self) -> None:
        evidence = lines.read(
            "average acceptance length: 2.80 / 4", "average acceptance length: 2.40 / 4"
        )
        assert evidence.record.mean_acceptance_length is None
        assert assess(evidence).health is Health.HEALTHY

    def test_an_engine_without_a_parser_is_read_by_the_names_of_its_figures(self) -> None:
        evidence = lines.read(
            "spec-ngram: req 5 gave up (acceptance-poor: verifies=9 accepted=1/9 misses=8)"
        )
        assert (evidence.record.counts.drafts, evidence.record.counts.accepted) == (9, 1)
        assert assess(evidence).health is Health.INSUFFICIENT

    def test_engines_in_one_log_are_judged_apart(self) -> None:
        evidence = lines.read(lines.vllm_v1([90, 60], 100), lines.llama_request(2, 60))
        assert evidence.record.engine == "vllm"
        assert evidence.per_engine["llama.cpp"].counts.drafted == 60
        assert evidence.record.counts.drafted == 200


class TestTgi:
    PAGE = """# TYPE tgi_request_skipped_tokens histogram
tgi_request_skipped_tokens_bucket{le="0"} 40
tgi_request_skipped_tokens_bucket{le="1"} 90
tgi_request_skipped_tokens_bucket{le="2"} 200
tgi_request_skipped_tokens_bucket{le="+Inf"} 200
tgi_request_skipped_tokens_sum 270
tgi_request_skipped_tokens_count 200
"""

    def test_skipped_tokens_are_accepted_drafts(self) -> None:
        record = lines.read_metrics(self.PAGE).record
        assert (record.counts.drafts, record.counts.accepted) == (200, 270)
        assert record.positions == ((160, 200), (110, 200))
        assert record.tokens_per_step == pytest.approx(1 + 270 / 200)

    def test_nothing_skipped_is_not_called_off(self) -> None:
        page = self.PAGE.replace("_sum 270", "_sum 0")
        assert lines.read_metrics(page).record.engine is None
