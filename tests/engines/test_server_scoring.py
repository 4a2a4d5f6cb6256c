"""Scores of given tokens: right ones are read, and none are made up where a server ignores the
request.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from assay.engines import Capability, MissingCapability, TokenScores, score_all
from assay.engines.server.engine import ServerEngine
from assay.engines.server.errors import BadScores
from assay.engines.server.http import Limits
from stub_server import MODEL, Exchange, StubServer, healthy, models, text

PATIENT = Limits(retries=1, first_backoff_s=0.01)
COMPLETIONS = "POST /v1/completions"


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


def connect(stub: StubServer) -> ServerEngine:
    return ServerEngine.connect(stub.url, limits=PATIENT)


def test_prompt_logprobs_of_ids_and_text(stub: StubServer) -> None:
    with connect(stub) as engine:
        by_ids = engine.score((7, 8, 9))
        assert by_ids == TokenScores((None, -1.25, -1.5), 3, None, (7, 8, 9))
        assert stub.bodies(COMPLETIONS)[-1]["prompt_logprobs"] == 0
        by_text = engine.score("The capital of")
    assert by_text.token_logprobs == (None, -1.25, -1.5)
    # "The" has no score, so that only the rest of the text counts.
    assert by_text.bytes == len(" capital of")
    assert by_text.nll == 2.75
    assert by_text.bits_per_byte == pytest.approx(2.75 / math.log(2) / 11)


SEVERAL = [f"text number {i}" for i in range(5)]


@pytest.mark.parametrize("echo", [False, True])
def test_short_texts_go_together_in_one_request(stub: StubServer, echo: bool) -> None:
    stub.on(COMPLETIONS, healthy(scores=not echo))
    with connect(stub) as engine:
        one_by_one = [engine.score(text_) for text_ in SEVERAL]
        before = len(stub.bodies(COMPLETIONS))
        assert engine.score_many(SEVERAL) == one_by_one
        assert len(stub.bodies(COMPLETIONS)) == before + 1
        body = stub.bodies(COMPLETIONS)[-1]
        assert (body["prompt"], body["max_tokens"]) == (SEVERAL, 1)
        assert body.get("prompt_logprobs") == (None if echo else 0)
        # A long text goes alone; rows of ids go together as texts do.
        engine.score_many(["a " * 6000, "b c", "d e"])
        assert [isinstance(b["prompt"], list) for b in stub.bodies(COMPLETIONS)[-2:]] == [
            False,
            True,
        ]
        assert engine.score_many([(7, 8, 9), (7, 8)])[1].token_logprobs == (None, -1.25)
        assert stub.bodies(COMPLETIONS)[-1]["prompt"] == [[7, 8, 9], [7, 8]]


def test_a_server_that_answers_one_of_several_is_asked_one_by_one(stub: StubServer) -> None:
    stub.on(COMPLETIONS, healthy(several=False))
    with connect(stub) as engine:
        assert Capability.SCORE in engine.capabilities
        before = len(stub.bodies(COMPLETIONS))
        assert [scores.scored for scores in engine.score_many(SEVERAL)] == [(-1.25, -1.5)] * 5
        assert len(stub.bodies(COMPLETIONS)) == before + 1 + 5
        assert score_all(engine, SEVERAL[:2]) == [engine.score(text_) for text_ in SEVERAL[:2]]


def test_a_special_token_before_the_text_costs_no_bytes(stub: StubServer) -> None:
    stub.on("POST /detokenize", lambda e: e.json({"prompt": "<s>"}))
    with connect(stub) as engine:
        assert engine.score("The capital of").bytes == len("The capital of")


def test_the_prompts_own_token_is_read_among_alternatives(stub: StubServer) -> None:
    entry = {"5": {"logprob": -0.1, "rank": 1}, "8": {"logprob": -3.0, "rank": 9}}
    answer = {"choices": [{"text": "x", "prompt_logprobs": [None, entry]}]}
    with connect(stub) as engine:
        assert Capability.SCORE in engine.capabilities
        stub.on(COMPLETIONS, text(json.dumps(answer)))
        assert engine.score((7, 8)).scored == (-3.0,)
        with pytest.raises(BadScores):
            engine.score((7, 9))
        with pytest.raises(BadScores, match="3 tokens, but 2"):
            engine.score((7, 8, 9))


def test_echo_serves_where_prompt_logprobs_are_ignored(stub: StubServer) -> None:
    stub.on(COMPLETIONS, healthy(scores=False))
    with connect(stub) as engine:
        assert "ignores prompt_logprobs" in (
            engine.capabilities.reason(Capability.PROMPT_LOGPROBS) or ""
        )
        assert engine.score("The capital of").token_logprobs == (None, -1.25, -1.5)
        assert engine.score((7, 8, 9)).token_logprobs == (None, -1.25, -1.5)


def test_a_server_that_ignores_both_cannot_score(stub: StubServer) -> None:
    stub.on(COMPLETIONS, healthy(scores=False, echo=False))
    with connect(stub) as engine:
        why = engine.capabilities.reason(Capability.SCORE) or ""
        assert "ignores prompt_logprobs" in why
        assert "ignores echo" in why
        with pytest.raises(MissingCapability):
            engine.score("The capital of")


def fixed(values: list[Any]) -> str:
    rows = [None] + [{str(100 + i): {"logprob": v}} for i, v in enumerate(values, 1)]
    return json.dumps(
        {
            "choices": [
                {
                    "text": "x",
                    "prompt_logprobs": rows,
                    "prompt_token_ids": [*range(100, 101 + len(values))],
                }
            ]
        }
    )


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([-1.0, None, -2.0], "1 of 3"),
        ([-1.0, float("nan")], "1 of 2"),
        ([-1.0, 0.7], "above 0"),
        ([0.0, 0.0, 0.0], "exactly 0"),
        (["-1"], "1 of 1"),
        ([], "two tokens"),
    ],
)
def test_what_cannot_be_log_probabilities_is_refused(
    stub: StubServer, values: list[Any], word: str
) -> None:
    with connect(stub) as engine:
        assert Capability.SCORE in engine.capabilities
        stub.on(COMPLETIONS, text(fixed(values)))
        with pytest.raises(BadScores, match=word) as caught:
            engine.score("some text")
    assert caught.value.finding_id == "server.bad_scores"


def test_echo_without_offsets_counts_the_one_generated_token_off(stub: StubServer) -> None:
    def echo(e: Exchange) -> None:
        if "echo" not in e.body:
            return healthy(scores=False)(e)
        values = [-1.0, -2.0, -3.0, -4.0]
        return e.json(
            {"choices": [{"text": e.body["prompt"] + " x", "logprobs": {"token_logprobs": values}}]}
        )

    stub.on(COMPLETIONS, echo)
    with connect(stub) as engine:
        assert engine.score("a b c").token_logprobs == (None, -2.0, -3.0)


def test_sglang_scores_by_its_own_route(stub: StubServer) -> None:
    stub.off("GET /version").on("GET /v1/models", models(MODEL, owned_by="sglang"))
    stub.on("GET /server_info", text('{"version": "0.5.9", "model_path": "x"}'))

    def generate(e: Exchange) -> None:
        ids = e.body.get("input_ids") or [100 + i for i in range(len(e.body["text"].split()))]
        rows = [[None if i == 0 else -float(i), t, None] for i, t in enumerate(ids)]
        assert e.body["logprob_start_len"] == 0
        e.json({"text": "x", "meta_info": {"input_token_logprobs": rows}})

    stub.on("POST /generate", generate)
    with connect(stub) as engine:
        assert Capability.PROMPT_LOGPROBS in engine.capabilities
        assert engine.score((5, 6, 7)).token_logprobs == (None, -1.0, -2.0)
        assert engine.score("a b c").token_ids == (100, 101, 102)
        stub.on(
            "POST /generate",
            text('{"meta_info": {"input_token_logprobs": [[null, 1], [-1.0, 2]]}}'),
        )
        with pytest.raises(BadScores, match="others"):
            engine.score((5, 6))
