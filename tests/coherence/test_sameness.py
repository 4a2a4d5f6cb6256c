from __future__ import annotations

from check_records import TEXT, sample
from hypothesis import given
from hypothesis import strategies as st

from assay.coherence.judge import judge
from assay.coherence.record import CheckRecord, ProbeResult
from assay.coherence.rules.rule import Ruling, Rulings
from assay.coherence.rules.same_answers import same_answers
from assay.verdict import Severity, Verdict


def asked(*answers: str, label: str = "ok") -> CheckRecord:
    """One probe with two samples for each answer."""
    return CheckRecord(
        probes=tuple(
            ProbeResult(
                f"q{i}", f"q{i}", (sample(label, text_head=text, text_chars=len(text)),) * 2
            )
            for i, text in enumerate(answers)
        )
    )


def one(found: Rulings) -> Ruling:
    assert isinstance(found, Ruling)
    return found


DIFFERENT = asked(*(f"{TEXT} {i}" for i in range(6)))
SAME = asked(*[TEXT] * 5, f"{TEXT} 5")


def test_one_answer_to_most_questions_is_a_warning_alone() -> None:
    ruling = one(same_answers(SAME, None))
    assert (ruling.state, ruling.findings[0].severity) == ("good", Severity.WARNING)
    assert ruling.says.startswith("5 of 6 different questions")
    assert ruling.findings[0].detail == TEXT


def test_it_fails_against_a_reference_that_told_the_questions_apart() -> None:
    judgement = judge(SAME, DIFFERENT)
    assert judgement.verdict is Verdict.FAIL
    assert "coherence.same_answer" in {f.id for f in judgement.findings}
    ruling = one(same_answers(SAME, SAME))
    assert ruling.state == "good"


def test_different_answers_and_few_or_short_ones_are_left_alone() -> None:
    assert not same_answers(DIFFERENT, None)
    assert not same_answers(asked(*[TEXT] * 3), None)
    assert not same_answers(asked(*[TEXT] * 4, *(f"{TEXT} {i}" for i in range(4))), None)
    assert not same_answers(asked(*["Yes."] * 9), None)
    assert not same_answers(asked(*[TEXT] * 9, label="degenerate"), None)


def test_the_same_answer_to_the_same_question_is_no_sign() -> None:
    one = CheckRecord(probes=(ProbeResult("story", "story", (sample(text_head=TEXT),) * 9),))
    assert not same_answers(one, None)


@given(st.lists(st.sampled_from("abcdefghijkl"), max_size=12))
def test_the_count_is_that_of_the_most_frequent_answer(letters: list[str]) -> None:
    rulings = same_answers(asked(*(TEXT + letter for letter in letters)), None)
    most = max((letters.count(letter) for letter in letters), default=0)
    assert bool(rulings) == (most >= 4 and most > len(letters) / 2)
