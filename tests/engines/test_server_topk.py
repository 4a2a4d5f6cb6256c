"""Log-probabilities of chosen ids: every route reads what servers of its kind answer, and takes no
nonsense.
"""

import base64
import io
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from assay.engines import MissingCapability
from assay.engines.server.engine import ServerEngine
from assay.engines.server.errors import BadScores
from assay.engines.server.http import Limits
from stub_server import Exchange, StubServer, healthy, text

COMPLETIONS = "POST /v1/completions"
TOKENS_IN = "POST /inference/v1/generate"
TOKENS = (7, 8, 9)
CHOSEN = ((8, 20), (21, 22))


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


@pytest.fixture
def engine(stub: StubServer) -> Iterator[ServerEngine]:
    with ServerEngine.connect(
        stub.url, limits=Limits(retries=1, first_backoff_s=0.01)
    ) as connected:
        _ = connected.capabilities
        yield connected


def npy(values: list[list[float]]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values, np.float32))
    return base64.b64encode(buffer.getvalue()).decode()


def test_given_ids_come_from_the_tokens_in_route(stub: StubServer, engine: ServerEngine) -> None:
    values = [[-1.0, -2.0, -math.inf], [-0.5, -3.0, -math.inf]]
    stub.on(TOKENS_IN, text(json.dumps({"prompt_token_id_logprobs": npy(values)})))
    scores = engine.topk_logprobs(TOKENS, CHOSEN)
    assert scores.chosen_by == "reference"
    assert scores.target == (-1.0, -0.5)
    assert scores.rows == ({8: -1.0, 20: -2.0}, {9: -0.5, 21: -3.0, 22: -math.inf})
    sent = stub.bodies(TOKENS_IN)[-1]
    assert sent["token_ids"] == [7, 8, 9]
    assert sent["sampling_params"]["prompt_logprob_token_ids"] == [[8, 20, -1], [9, 21, 22]]
    assert sent["sampling_params"]["prompt_logprob_start"] == 0


def test_an_answer_without_scores_is_asked_for_again(
    stub: StubServer, engine: ServerEngine
) -> None:
    """vLLM drops the scores of a request that it had to preempt."""
    whole = text(
        json.dumps({"prompt_token_id_logprobs": npy([[-1.0, -2.0, -9.0], [-0.5, -3.0, -1.5]])})
    )
    without = text(json.dumps({"prompt_token_id_logprobs": None}))
    answers = iter([whole, without, whole])
    stub.on(TOKENS_IN, lambda e: next(answers)(e))
    first = engine.topk_logprobs(TOKENS, CHOSEN)
    assert engine.topk_logprobs(TOKENS, CHOSEN) == first
    assert len(stub.bodies(TOKENS_IN)) == 3
    stub.on(TOKENS_IN, without)
    with pytest.raises(BadScores, match="holds no scores"):
        engine.topk_logprobs(TOKENS, CHOSEN)


def test_the_servers_own_likely_ids_stand_in_where_given_ones_are_not_known(
    stub: StubServer, engine: ServerEngine
) -> None:
    rows = [
        None,
        {"8": {"logprob": -1.0}, "5": {"logprob": -0.9}},
        {"9": {"logprob": -9999.0}, "4": {"logprob": -0.1}},
    ]
    stub.on(COMPLETIONS, text(json.dumps({"choices": [{"text": "x", "prompt_logprobs": rows}]})))
    scores = engine.topk_logprobs(TOKENS, CHOSEN)
    assert scores.chosen_by == "candidate"
    assert scores.target == (-1.0, -math.inf)
    assert scores.rows[1] == {9: -math.inf, 4: -0.1}
    assert stub.bodies(COMPLETIONS)[-1]["prompt_logprobs"] == 2
    engine.topk_logprobs(TOKENS, CHOSEN)
    assert len(stub.bodies(TOKENS_IN)) == 1, (
        "a route that the server does not have is asked for once"
    )


def test_echo_names_tokens_by_id(stub: StubServer, engine: ServerEngine) -> None:
    def echo(e: Exchange) -> None:
        if "echo" not in e.body:
            return e.json({"choices": [{"text": "x"}]})
        assert e.body["return_tokens_as_token_ids"] is True
        top = [None, {"token_id:8": -1.0, "token_id:3": -0.7}, {" a": -0.2}, {"token_id:1": -0.1}]
        held = {"token_logprobs": [None, -1.0, -2.0, -0.1], "top_logprobs": top}
        return e.json({"choices": [{"text": "x", "logprobs": held}]})

    stub.on(COMPLETIONS, echo)
    scores = engine.topk_logprobs(TOKENS, CHOSEN)
    assert scores.rows == ({8: -1.0, 3: -0.7}, {9: -2.0})


def test_only_later_tokens_where_asked(stub: StubServer, engine: ServerEngine) -> None:
    stub.on(TOKENS_IN, text(json.dumps({"prompt_token_id_logprobs": npy([[-0.5, -3.0]])})))
    scores = engine.topk_logprobs(TOKENS, ((21,),), first=2)
    assert (scores.first, scores.target) == (2, (-0.5,))
    assert stub.bodies(TOKENS_IN)[-1]["sampling_params"]["prompt_logprob_start"] == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({}, "ignores prompt_logprob_token_ids"),
        ({"prompt_token_id_logprobs": "!!"}, "cannot be read"),
        ({"prompt_token_id_logprobs": npy([[-1.0, -1.0, -2.0]])}, "came back"),
        ({"prompt_token_id_logprobs": npy([[0.5, 0.5, -2.0], [-0.5, -3.0, -1.0]])}, "more than 1"),
        (
            {"prompt_token_id_logprobs": npy([[-0.1, -0.1, -0.1], [-0.5, -3.0, -1.0]])},
            "more than 1",
        ),
        (
            {"prompt_token_id_logprobs": npy([[math.nan, -1.0, -2.0], [-0.5, -3.0, -1.0]])},
            "no log-probability",
        ),
    ],
)
def test_nonsense_is_refused(
    stub: StubServer, engine: ServerEngine, answer: dict[str, Any], said: str
) -> None:
    stub.on(TOKENS_IN, text(json.dumps(answer)))
    stub.on(COMPLETIONS, text(json.dumps({"choices": [{"text": "x"}]})))
    with pytest.raises(BadScores, match=said):
        engine.topk_logprobs(TOKENS, CHOSEN)


def test_a_server_that_scores_no_prompt_is_refused_with_the_reason(stub: StubServer) -> None:
    stub.on(COMPLETIONS, healthy(scores=False, echo=False))
    with (
        ServerEngine.connect(stub.url) as engine,
        pytest.raises(MissingCapability, match="ignores echo"),
    ):
        engine.topk_logprobs(TOKENS, CHOSEN)


def test_rows_must_fit_the_tokens(engine: ServerEngine) -> None:
    with pytest.raises(ValueError, match="need 2 rows"):
        engine.topk_logprobs(TOKENS, CHOSEN[:1])


def test_one_forbidden_route_leaves_the_others_and_all_forbidden_says_so() -> None:
    from assay.engines.server.errors import Unauthorized
    from assay.engines.server.topk import TopkLogprobs
    from assay.engines.server.topk import topk_logprobs as by_routes

    scores = TopkLogprobs(1, (-1.0,), ({5: -1.0},), "candidate")

    def forbidden(*_: object) -> TopkLogprobs:
        raise Unauthorized("http://server/inference answered 403: switched off")

    def open_to_all(*_: object) -> TopkLogprobs:
        return scores

    found, route = by_routes(None, "m", (4, 5), [[5]], 1, [forbidden, open_to_all])  # type: ignore[arg-type]
    assert (found, route) == (scores, open_to_all)
    with pytest.raises(Unauthorized, match="403"):
        by_routes(None, "m", (4, 5), [[5]], 1, [forbidden, forbidden])  # type: ignore[arg-type]
