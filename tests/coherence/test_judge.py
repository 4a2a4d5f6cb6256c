from __future__ import annotations

from dataclasses import replace

import pytest
from check_records import answered, passages, record, sample, samples, timed
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.coherence.judge import judge
from assay.coherence.options import Plan
from assay.coherence.record import CheckRecord, ProbeResult, Reference
from assay.coherence.replies import grade_reply
from assay.coherence.report import build_report
from assay.coherence.results import record_json
from assay.coherence.run import asks_for_texts
from assay.engines import Reply
from assay.verdict import Severity, Verdict, jsonable


def ids(record_: CheckRecord, reference: CheckRecord | None = None) -> set[str]:
    return {f.id for f in judge(record_, reference).findings if f.severity is Severity.ERROR}


class TestWithoutReference:
    def test_sane_texts_pass_and_the_speed_counts(self) -> None:
        judgement = judge(record(samples(ok=40), passages()))
        assert judgement.verdict is Verdict.PASS
        assert judgement.throughput_valid
        assert judgement.findings == ()

    def test_a_weak_model_that_loops_now_and_then_passes_with_a_warning(self) -> None:
        judgement = judge(record(samples(ok=36, loops=5)))
        assert judgement.verdict is Verdict.PASS
        assert [f.severity for f in judgement.findings] == [Severity.WARNING]

    def test_many_loops_are_unclear_and_the_finding_says_how_to_get_a_reference(self) -> None:
        judgement = judge(record(samples(ok=26, loops=15)))
        assert judgement.verdict is Verdict.INCONCLUSIVE
        assert any(
            "--reference-engine" in remedy for f in judgement.findings for remedy in f.remedies
        )

    def test_mostly_loops_fail(self) -> None:
        assert ids(record(samples(ok=4, loops=37))) == {"coherence.degenerate"}

    def test_floods_fail_at_a_rate_that_loops_may_have(self) -> None:
        assert judge(record(samples(ok=33, floods=8))).verdict is Verdict.FAIL
        assert judge(record(samples(ok=36, loops=5))).verdict is Verdict.PASS

    def test_one_flood_does_not_fail(self) -> None:
        assert judge(record(samples(ok=40, floods=1))).verdict is Verdict.PASS

    def test_tokens_billed_without_text_fail(self) -> None:
        judgement = judge(record(samples(empty=41), timed_texts=(timed("empty"),) * 3))
        assert judgement.verdict is Verdict.FAIL
        assert not judgement.throughput_valid
        assert "coherence.empty" in ids(record(samples(empty=41)))

    def test_no_texts_is_no_pass(self) -> None:
        judgement = judge(CheckRecord())
        assert judgement.verdict is Verdict.INCONCLUSIVE
        assert "no text was graded" in judgement.findings[0].title

    @pytest.mark.parametrize("texts", range(1, 12))
    def test_an_open_verdict_says_why(self, texts: int) -> None:
        judgement = judge(record(samples(ok=texts)))
        assert judgement.verdict is (Verdict.INCONCLUSIVE if texts < 12 else Verdict.PASS)
        assert [f.id for f in judgement.findings] == ["coherence.unclear"]

    def test_bits_that_no_language_model_needs_fail(self) -> None:
        assert ids(record(samples(ok=41), passages(base=3.0))) == {"coherence.bits_per_byte"}

    def test_getting_lost_at_depth_fails(self) -> None:
        assert ids(record(samples(ok=41), passages(deep_loss=0.4))) == {"coherence.lost_at_depth"}
        assert ids(record(samples(ok=41), passages(deep_loss=-0.05))) == set()

    def test_a_counter_of_corrupted_requests_that_moved_fails(self) -> None:
        moved = record(samples(ok=41), counters={"corrupted_requests": 2.0})
        assert ids(moved) == {"coherence.corrupted_requests"}
        assert (
            judge(record(samples(ok=41), counters={"corrupted_requests": 0.0})).verdict
            is Verdict.PASS
        )

    def test_truncated_reasoning_is_inconclusive_not_degenerate(self) -> None:
        cut = [sample("truncated_reasoning", "reasoning_cut")] * 20
        judgement = judge(record([*samples(ok=21), *cut]))
        assert judgement.verdict is Verdict.INCONCLUSIVE
        assert {f.id for f in judgement.findings} == {"coherence.truncated_reasoning"}

    def test_a_probe_that_could_not_be_finished_is_inconclusive(self) -> None:
        whole = record(samples(ok=41))
        cut = replace(
            whole, probes=(*whole.probes, ProbeResult("needle", "needle", failed="read timeout"))
        )
        assert judge(cut).verdict is Verdict.INCONCLUSIVE

    def test_a_skipped_probe_does_not_enter_the_verdict(self) -> None:
        whole = record(samples(ok=41))
        skipped = replace(
            whole, probes=(*whole.probes, ProbeResult("tool_call", "tools", skipped="no tools"))
        )
        assert judge(skipped).verdict is Verdict.PASS

    def test_wrong_answers_only_warn(self) -> None:
        judgement = judge(record(answered(0, 40)))
        assert judgement.verdict is Verdict.PASS
        assert [f.severity for f in judgement.findings] == [Severity.WARNING]

    @pytest.mark.parametrize(("bad", "valid"), [(0, True), (1, True), (2, False), (3, False)])
    def test_the_speed_is_invalid_when_more_than_a_third_of_its_texts_degenerate(
        self, bad: int, valid: bool
    ) -> None:
        texts = (timed("degenerate"),) * bad + (timed(),) * (3 - bad)
        judgement = judge(record(samples(ok=41), timed_texts=texts))
        assert judgement.throughput_valid is valid
        assert (judgement.verdict is Verdict.PASS) is valid


def called(parsed: int = 0, unread: int = 0, broken: int = 0) -> CheckRecord:
    """Answers to a question for which a tool was offered."""
    forms = ["parsed"] * parsed + ["unread"] * unread + ["remains"] * broken
    texts = [sample(tool_form=form, tool_text='< "arguments": {') for form in forms]
    return record(texts + samples(ok=0), probe="tool_call")


class TestToolForm:
    def test_parts_of_calls_fail_alone_and_against_a_reference_that_writes_none(self) -> None:
        for reference in (None, called(parsed=20)):
            judgement = judge(called(parsed=17, broken=3), reference)
            (finding,) = [f for f in judgement.findings if f.id == "coherence.tool_form"]
            assert finding.severity is Severity.ERROR and finding.detail == '< "arguments": {'
            assert judgement.verdict is Verdict.FAIL

    def test_a_model_that_breaks_its_calls_itself_is_only_named(self) -> None:
        own = called(parsed=17, broken=3)
        assert [f.severity for f in judge(own, own).findings if f.id == "coherence.tool_form"] == [
            Severity.WARNING
        ]

    def test_one_broken_call_is_no_rate(self) -> None:
        assert "coherence.tool_form" not in ids(called(parsed=19, broken=1))
        assert "coherence.tool_form" in ids(called(broken=2))
        judgement = judge(called(broken=1))  # more of them are asked for
        assert judgement.verdict is Verdict.INCONCLUSIVE and asks_for_texts(judgement)

    def test_whole_calls_that_the_parser_does_not_read_are_named_and_fail_nothing(self) -> None:
        judgement = judge(called(unread=20))
        assert judgement.verdict is Verdict.PASS
        assert [f.id for f in judgement.findings] == ["coherence.tool_form"]

    def test_parsed_calls_are_good(self) -> None:
        assert judge(called(parsed=20)).findings == ()


def said(stuttering: int, of: int = 40, kind: str | None = None) -> CheckRecord:
    """Texts of 150 words, of which some say three of them twice."""
    label = "ok" if kind is None else "degenerate"
    twice = sample(label, kind, words=150, stutters=3, stutter_text="control control")
    return record([twice] * stuttering + [sample(words=150)] * (of - stuttering))


class TestStutter:
    def test_doubled_words_in_many_texts_fail_alone(self) -> None:
        judgement = judge(said(15))
        (finding,) = [f for f in judgement.findings if f.id == "coherence.stutter"]
        assert judgement.verdict is Verdict.FAIL and finding.severity is Severity.ERROR
        assert "control control" in finding.detail and "45 of 6,000 words" in finding.title

    def test_a_few_are_what_healthy_models_write(self) -> None:
        assert judge(said(0)).verdict is Verdict.PASS
        assert judge(said(1)).verdict is Verdict.PASS

    def test_two_texts_of_a_short_run_leave_it_open_and_one_does_not(self) -> None:
        for texts, state in ((1, "good"), (2, "unclear")):
            found = {r.rule: r.state for r in judge(said(texts, of=4)).rulings}
            assert found["stutter"] == state

    def test_a_model_that_stutters_itself_is_served_faithfully(self) -> None:
        assert "coherence.stutter" in ids(said(15), said(1))
        assert "coherence.stutter" not in ids(said(15), said(14))

    def test_loops_are_no_stutter(self) -> None:
        assert "coherence.stutter" not in ids(said(15, kind="sentence_loop"))
        assert "coherence.stutter" in ids(said(15, kind="stutter"))

    def test_without_prose_it_was_not_examined(self) -> None:
        states = {r.rule: r.state for r in judge(record(samples(ok=30))).rulings}
        assert states["stutter"] == "not_examined"


class TestWithReference:
    def test_a_weak_model_served_faithfully_passes(self) -> None:
        weak = record(samples(ok=34, loops=7), passages())
        judgement = judge(weak, record(samples(ok=33, loops=8), passages(loss=0.001)))
        assert judgement.verdict is Verdict.PASS

    def test_where_the_fixed_texts_are_equal_more_texts_decide_before_loops_fail(self) -> None:
        own, theirs = samples(ok=19, loops=22), samples(ok=32, loops=9)
        assert ids(record(own), record(theirs)) == {"coherence.degenerate"}
        assert ids(record(own, passages(0.03)), record(theirs, passages())) >= {
            "coherence.degenerate"
        }
        equal = judge(record(own, passages()), record(theirs, passages()))
        assert equal.verdict is Verdict.INCONCLUSIVE and asks_for_texts(equal)
        assert ids(record(own * 3, passages()), record(theirs * 3, passages())) == {
            "coherence.degenerate"
        }

    def test_more_loops_than_the_model_itself_fail(self) -> None:
        assert "coherence.degenerate" in ids(
            record(samples(ok=15, loops=26)), record(samples(ok=36, loops=5))
        )

    def test_a_small_loss_of_bits_fails_though_every_text_is_sane(self) -> None:
        judgement = judge(
            record(samples(ok=41), passages(loss=0.025)), record(samples(ok=41), passages())
        )
        assert {f.id for f in judgement.findings} == {"coherence.bits_per_byte"}
        assert judgement.verdict is Verdict.FAIL

    def test_noise_of_another_engine_passes(self) -> None:
        assert (
            judge(
                record(samples(ok=41), passages(loss=0.002)), record(samples(ok=41), passages())
            ).verdict
            is Verdict.PASS
        )

    def test_better_bits_than_the_reference_are_not_the_same_model(self) -> None:
        judgement = judge(
            record(samples(ok=41), passages(loss=-0.1)), record(samples(ok=41), passages())
        )
        assert judgement.verdict is Verdict.INCONCLUSIVE
        assert {f.id for f in judgement.findings} == {"coherence.other_model"}

    def test_answers_that_the_reference_knows_and_the_server_never_gives_fail(self) -> None:
        assert ids(record(answered(0, 4)), record(answered(4, 0))) == {"coherence.wrong_answer"}
        assert ids(record(answered(1, 3)), record(answered(4, 0))) == set()
        assert ids(record(answered(0, 4)), record(answered(3, 1))) == set()

    def test_other_prompts_from_the_same_messages_fail(self) -> None:
        def asked(tokens: int) -> CheckRecord:
            probes = tuple(
                ProbeResult(n, n, (sample(prompt_tokens=tokens),) * 10)
                for n in ("france", "story", "json_list")
            )
            return CheckRecord(probes=probes, timed=(timed(),) * 3)

        assert ids(asked(29), asked(30)) == {"coherence.prompt_mismatch"}
        assert ids(asked(30), asked(30)) == set()

    def test_timed_texts_may_degenerate_as_often_as_those_of_the_reference(self) -> None:
        texts = (timed("degenerate"),) * 2 + (timed(),)
        served = record(samples(ok=41), timed_texts=texts)
        assert judge(served, record(samples(ok=41), timed_texts=texts)).throughput_valid
        assert not judge(served, record(samples(ok=41))).throughput_valid


counts = st.integers(min_value=0, max_value=30)


@given(
    ok=counts,
    loops=counts,
    floods=counts,
    empty=counts,
    loss=st.floats(-1, 3),
    bad_timed=st.integers(0, 3),
)
@settings(max_examples=80, deadline=None)
def test_any_record_gets_a_verdict_and_more_floods_never_improve_it(
    ok: int, loops: int, floods: int, empty: int, loss: float, bad_timed: int
) -> None:
    order = [Verdict.PASS, Verdict.INCONCLUSIVE, Verdict.FAIL]
    texts = (timed("degenerate"),) * bad_timed + (timed(),) * (3 - bad_timed)
    judged = judge(record(samples(ok, loops, floods, empty), passages(loss=loss), texts))
    worse = judge(record(samples(ok, loops, floods + 30, empty), passages(loss=loss), texts))
    assert order.index(worse.verdict) >= order.index(judged.verdict)
    assert (judged.verdict is Verdict.FAIL) == any(
        f.severity is Severity.ERROR for f in judged.findings
    )
    if judged.verdict is Verdict.FAIL:
        assert not judged.throughput_valid


@given(ok=st.integers(20, 60), loops=st.integers(0, 8))
@settings(max_examples=30, deadline=None)
def test_a_record_is_at_least_as_good_as_itself(ok: int, loops: int) -> None:
    both = record(samples(ok=ok, loops=loops), passages())
    assert judge(both, both).verdict is not Verdict.FAIL


def test_a_record_survives_its_json_form() -> None:
    whole = record(
        [*samples(ok=3, loops=1), *answered(1, 1)], passages(), prefill_tokens_per_s=900.0
    )
    skipped = replace(
        whole, probes=(*whole.probes, ProbeResult("tool_call", "tools", skipped="no tools"))
    )
    back = CheckRecord.from_json(jsonable(record_json(skipped)))
    assert back.probes == skipped.probes
    assert back.passages == skipped.passages
    assert back.timed == skipped.timed


@pytest.mark.parametrize(
    "kind", ["sentence_loop", "phrase_loop", "near_loop", "the_the_the", "few_words"]
)
def test_loops_are_what_weak_models_write(kind: str) -> None:
    assert sample("degenerate", kind).is_loop
    assert sample("degenerate", "a_kind_of_others", family="loop").is_loop


@pytest.mark.parametrize(
    "kind",
    ["single_char_flood", "token_soup", "no_text", "newline_loop", "special_token_leak", None],
)
def test_floods_and_salads_are_not(kind: str | None) -> None:
    assert not sample("degenerate", kind).is_loop


def test_useful_speed_counts_the_tokens_before_the_onset() -> None:
    assert timed("degenerate").useful_tokens_per_s == pytest.approx(150 * 0.25 / 5.1)
    assert timed().useful_tokens_per_s == pytest.approx(150 / 5.1)


def test_reasoning_up_to_a_bare_tag_is_a_warning_and_the_answer_is_graded() -> None:
    whole = Reply(
        content="The user asks for a capital. That is Paris.\n</think>\n\nParis.",
        finish_reason="stop",
    )
    assert grade_reply(whole).label == "ok"
    looped = replace(whole, content="Hm, let me see. " * 60 + "</think>Paris.")
    assert (grade_reply(looped).label, grade_reply(looped).part) == ("degenerate", "reasoning")
    assert grade_reply(replace(whole, reasoning="Thought.")).kind == "think_tag_leak"
    judgement = judge(record([sample(think_tag=True) for _ in range(40)]))
    assert judgement.verdict is Verdict.PASS
    assert [(f.id, f.severity) for f in judgement.findings] == [
        ("coherence.think_tag", Severity.WARNING)
    ]


def test_fixed_texts_say_the_same_at_every_look_of_a_finished_plan() -> None:
    ours, theirs = record(samples(ok=40), passages(loss=0.011)), record(samples(ok=40), passages())
    states = [
        next(r.says for r in judge(ours, theirs, c).rulings if r.rule == "bits_per_byte")
        for c in (0.95, 0.99, 0.9975)
    ]
    assert len({says.partition("against")[0].rpartition("[")[2] for says in states}) == 1


def test_every_look_judges_the_fixed_texts_alike_and_a_run_that_may_end_early_more_strictly() -> (
    None
):
    from assay.coherence.rules.scores import BEYOND_ANALYSES
    from assay.coherence.run import EARLY
    from assay.coherence.stages import MAX_ANALYSES
    from assay.stats.multiplicity import confidence_of_analysis

    assert confidence_of_analysis(MAX_ANALYSES) < BEYOND_ANALYSES < EARLY


def test_a_reference_that_wrote_no_text_is_no_reference_for_texts() -> None:
    """A budget may end after its fixed texts: these were compared, and the report says that no more
    was.
    """
    ours, theirs = record(samples(ok=41), passages()), CheckRecord(passages=passages())
    times = {"seconds": 1.0, "expected_s": {}, "stages_s": {}, "left_out": [], "budget_s": None}
    report = build_report(
        {}, Plan(), ours, Reference(theirs, {"source": "engine"}), judge(ours, theirs), times
    )
    assert report.verdict is Verdict.PASS and "which wrote none" in report.summary
    assert report.results["reference"]["origin"] == {"source": "engine"}
