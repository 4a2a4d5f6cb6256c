from __future__ import annotations

import shlex

import pytest
from check_records import record, sample, samples

from assay.coherence.diagnosis import Subject, diagnose, next_steps, rollback_command
from assay.coherence.judge import judge
from assay.coherence.record import CheckRecord, GradedReply, ProbeResult
from assay.verdict import Finding, Severity


def findings(measured: CheckRecord, **subject: object) -> tuple[Finding, ...]:
    return diagnose(judge(measured), measured, Subject(model="org/name", **subject))  # type: ignore[arg-type]


def causes_of(measured: CheckRecord, **subject: object) -> tuple[str, ...]:
    """The causes of the failing finding about degenerate texts."""
    return next(
        tuple(f.causes)
        for f in findings(measured, **subject)
        if f.id == "coherence.degenerate" and f.severity is Severity.ERROR
    )


def bad(kind: str, onset: int, **fields: object) -> list[GradedReply]:
    return [sample("degenerate", kind, onset_char=onset, **fields)] * 41


@pytest.mark.parametrize(
    ("kind", "onset", "subject", "first"),
    [
        ("single_char_flood", 0, {}, "NaN"),
        ("token_soup", 0, {}, "weights are not what the model was"),
        ("word_salad", 900, {"kv_cache_dtype": "fp8_e5m2"}, "the KV cache or the positions"),
        ("special_token_leak", 0, {}, "chat template"),
        ("sentence_loop", 100, {}, "the model itself"),
    ],
)
def test_the_likeliest_cause_comes_first(
    kind: str, onset: int, subject: dict[str, str], first: str
) -> None:
    assert causes_of(record(bad(kind, onset)), **subject)[0].startswith(first)


def test_a_detector_of_another_package_says_what_its_kind_comes_from() -> None:
    told = bad("placeholder", 0, family="unfilled", causes=("a template with open slots",))
    first = causes_of(record(told))[0]
    assert first.startswith("a template with open slots (100% of the bad texts")
    loops = record(bad("refrain", 0, family="loop"))
    assert causes_of(loops)[0].startswith("the model itself")


def test_every_cause_carries_its_evidence() -> None:
    causes = causes_of(record(bad("word_salad", 900)), kv_cache_dtype="fp8_e4m3")
    assert "100% of the bad texts began well" in causes[0]
    assert "kv_cache_dtype fp8_e4m3" in causes[0]
    assert all(cause.endswith(")") and "(" in cause for cause in causes)


def test_a_plain_cache_type_is_no_evidence() -> None:
    late = record(bad("word_salad", 900))
    assert causes_of(late, kv_cache_dtype="auto")[0].startswith("weights")
    assert causes_of(late, kv_cache_dtype="fp8")[0].startswith("the KV cache")


def test_a_counter_of_the_server_speaks_for_nan() -> None:
    measured = record(bad("sentence_loop", 0), counters={"corrupted_requests": 3.0})
    text = next(c for c in causes_of(measured) if c.startswith("NaN"))
    assert "corrupted_requests +3" in text


def test_billed_and_never_received_points_to_a_parser() -> None:
    empty = sample("empty", "no_text", text_chars=0, completion_tokens=200, finish_reason="length")
    assert any("parser" in cause for cause in causes_of(record([empty] * 41)))


@pytest.mark.parametrize(
    ("name", "cause"), [("burst", "batching"), ("second_turn", "prefix cache")]
)
def test_one_probe_alone_points_to_what_only_it_does(name: str, cause: str) -> None:
    measured = CheckRecord(
        probes=(
            ProbeResult("story", "story", tuple(samples(ok=20))),
            ProbeResult(name, name, tuple(samples(floods=20))),
        )
    )
    assert causes_of(measured)[0].startswith(cause)
    everywhere = CheckRecord(
        probes=(
            ProbeResult("story", "story", tuple(samples(floods=20))),
            ProbeResult(name, name, tuple(samples(floods=20))),
        )
    )
    assert not any(c.startswith(cause) for c in causes_of(everywhere))


def test_a_warning_is_left_as_it_is() -> None:
    measured = record(samples(ok=36, loops=5))
    assert findings(measured) == judge(measured).findings


def test_a_finding_that_knows_its_causes_keeps_them() -> None:
    measured = record(samples(ok=41), counters={"corrupted_requests": 1.0})
    (found,) = findings(measured)
    assert found.causes == judge(measured).findings[0].causes


def test_a_failing_finding_says_what_to_run_next() -> None:
    (found,) = [f for f in findings(record(samples(floods=41))) if f.id == "coherence.degenerate"][
        :1
    ]
    assert any(r.startswith("assay verify") for r in found.remedies)
    assert rollback_command(Subject(model="org/name")) in found.remedies
    assert found.evidence["finish_reasons"] == {"stop": 41}


@pytest.mark.parametrize(
    ("model", "context", "expected"),
    [
        ("org/name", None, "org/name --tensor-parallel-size 1"),
        ("org/name", 2048, "--max-model-len 2048"),
        ("org/name", 131072, "--max-model-len 8000"),
        ("a model; rm -rf", None, "'a model; rm -rf'"),
    ],
)
def test_the_rollback_is_one_exact_command(model: str, context: int | None, expected: str) -> None:
    command = rollback_command(Subject(model=model, max_model_len=context))
    assert expected in command
    words = shlex.split(command)
    assert words[:3] == ["vllm", "serve", model]
    assert words[-5:-1] == ["--kv-cache-dtype", "auto", "--enforce-eager", "--max-model-len"]


@pytest.mark.parametrize("model", ["/home/me/model", "~/model", "./model", "C:\\models\\m"])
def test_a_folder_of_this_machine_is_not_named(model: str) -> None:
    steps = " ".join(next_steps(Subject(model=model)))
    assert model not in steps
    assert "vllm serve CHECKPOINT " in steps
