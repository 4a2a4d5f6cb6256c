"""What the client finds out about a server, and how it speaks to it then."""

from collections.abc import Iterator

import pytest

from assay.engines import Capability, Engine, Message, MissingCapability, Request
from assay.engines.server.engine import ServerEngine
from assay.engines.server.http import Limits
from stub_server import (
    METRICS,
    MODEL,
    Exchange,
    StubServer,
    events,
    healthy,
    models,
    sse,
    status,
    text,
)

PATIENT = Limits(retries=1, first_backoff_s=0.01)
CHAT, COMPLETIONS = "POST /v1/chat/completions", "POST /v1/completions"
NEUTRAL = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "top_k": -1,
}
ASK = Request(messages=(Message("user", "hi"),), max_tokens=7, temperature=0.7, top_p=0.9, seed=3)


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as server:
        yield server


def connect(stub: StubServer) -> ServerEngine:
    return ServerEngine.connect(stub.url, limits=PATIENT)


def why_not(stub: StubServer, capability: Capability) -> str:
    with connect(stub) as engine:
        assert capability not in engine.capabilities
        return engine.capabilities.reason(capability) or ""


def test_a_server_that_can_do_everything(stub: StubServer) -> None:
    with connect(stub) as engine:
        assert isinstance(engine, Engine)
        assert engine.capabilities.absent == {}
        assert engine.capabilities.present == frozenset(Capability)
        described = engine.describe()
    assert described["server"] == {"kind": "vllm", "version": "0.32.0", "kv_cache_dtype": "auto"}
    assert described["max_model_len"] == 2048
    assert described["sent"]["chat/completions"]["neutral"] == NEUTRAL


def test_probing_is_done_once_and_only_when_asked_for(stub: StubServer) -> None:
    with connect(stub) as engine:
        assert stub.bodies(CHAT) == []
        assert engine.capabilities is engine.capabilities
        seen = len(stub.exchanges)
        engine.describe()
        assert len(stub.exchanges) == seen
        assert seen < 25
        assert all(b["max_tokens"] <= 4 for b in stub.bodies(CHAT) + stub.bodies(COMPLETIONS))


def test_every_request_carries_neutral_penalties(stub: StubServer) -> None:
    with connect(stub) as engine:
        engine.stream(ASK)
        sent = stub.bodies(CHAT)[-1]
    assert sent == {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 7,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **NEUTRAL,
    }


def test_fields_that_a_refusal_names_are_left_out(stub: StubServer) -> None:
    stub.on(CHAT, healthy(refuses=frozenset({"repetition_penalty", "min_p", "top_k"})))
    with connect(stub) as engine:
        engine.generate(ASK)
        sent = stub.bodies(CHAT)[-1]
        dialect = engine.describe()["sent"]["chat/completions"]
    assert dialect["neutral"] == {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert "min_p" not in sent
    assert sent["frequency_penalty"] == 0.0
    assert sent["seed"] == 3


def test_fields_that_are_refused_without_a_name_are_found(stub: StubServer) -> None:
    def strict(e: Exchange) -> None:
        if {"top_k", "seed"} & set(e.body):
            e.json({"error": "bad request"}, status=400)
        else:
            healthy()(e)

    stub.on(CHAT, strict)
    with connect(stub) as engine:
        assert engine.generate(ASK).content
        sent = stub.bodies(CHAT)[-1]
    assert set(NEUTRAL) - set(sent) == {"top_k"}
    assert "seed" not in sent


def test_a_refusal_for_another_reason_is_the_reason(stub: StubServer) -> None:
    no_template = "default chat template is no longer allowed, so you must provide a chat template"
    stub.on(CHAT, status(400, no_template))
    with connect(stub) as engine:
        assert engine.capabilities.reason(Capability.CHAT) == f"400: {no_template}"
        assert Capability.COMPLETIONS in engine.capabilities
        assert Capability.STREAM in engine.capabilities
        assert "it needs chat, which is absent" in (
            engine.capabilities.reason(Capability.TOOLS) or ""
        )
        reply = engine.stream(Request(prompt="The capital", max_tokens=5))
        assert reply.content == "Paris is the capital of France."
        with pytest.raises(MissingCapability, match="chat template") as caught:
            engine.generate(ASK)
    assert caught.value.capability is Capability.CHAT
    assert caught.value.finding_id == "server.missing_capability"


def test_a_server_with_chat_only(stub: StubServer) -> None:
    stub.off(COMPLETIONS)
    with connect(stub) as engine:
        absent = set(engine.capabilities.absent)
        with pytest.raises(MissingCapability):
            engine.score("some text")
    C = Capability
    assert absent == {C.COMPLETIONS, C.TOKEN_IDS_PROMPT, C.PROMPT_LOGPROBS, C.ECHO, C.SCORE}


@pytest.mark.parametrize("field", ["stream_options", "continuous_usage_stats"])
def test_stream_options_that_are_refused(stub: StubServer, field: str) -> None:
    def strict(e: Exchange) -> None:
        options = e.body.get("stream_options", {})
        if field in e.body or field in options:
            e.json({"detail": f"unknown field {field}"}, status=422)
        else:
            healthy()(e)

    stub.on(CHAT, strict)
    with connect(stub) as engine:
        engine.stream(ASK)
        sent = stub.bodies(CHAT)[-1]
        assert Capability.STREAM in engine.capabilities
        assert Capability.CONTINUOUS_USAGE not in engine.capabilities
        assert (Capability.STREAM_USAGE in engine.capabilities) is (
            field == "continuous_usage_stats"
        )
    assert sent.get("stream_options") == (
        None if field == "stream_options" else {"include_usage": True}
    )


def test_stream_options_that_are_ignored(stub: StubServer) -> None:
    stub.on(CHAT, healthy(usage=False))
    assert why_not(stub, Capability.STREAM_USAGE) == "its stream ends without usage"


def test_logprobs_that_are_ignored(stub: StubServer) -> None:
    stub.on(CHAT, text('{"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}'))
    assert why_not(stub, Capability.LOGPROBS) == "it takes logprobs and sends none"


def test_tools_that_the_template_ignores(stub: StubServer) -> None:
    class Deaf(healthy):
        def prompt_tokens(self, e: Exchange) -> int:
            return 12

    stub.on(CHAT, Deaf())
    assert "chat template ignores tools" in why_not(stub, Capability.TOOLS)


def test_tools_that_are_refused(stub: StubServer) -> None:
    message = (
        '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    )

    def strict(e: Exchange) -> None:
        if "tools" in e.body:
            e.json({"error": {"message": message}}, status=400)
        else:
            healthy()(e)

    stub.on(CHAT, strict)
    assert why_not(stub, Capability.TOOLS) == f"400: {message}"


def test_token_ids_that_are_taken_for_something_else(stub: StubServer) -> None:
    class Confused(healthy):
        def prompt_tokens(self, e: Exchange) -> int:
            return 23

    stub.on(COMPLETIONS, Confused())
    assert why_not(stub, Capability.TOKEN_IDS_PROMPT) == "it was sent 5 token ids and counted 23"


def test_a_server_without_pages_of_its_own(stub: StubServer) -> None:
    stub.off("GET /metrics", "POST /tokenize", "GET /version").on(
        "GET /v1/models", models(MODEL, owned_by="me")
    )
    with connect(stub) as engine:
        assert engine.identity.kind == "unknown"
        report = engine.capabilities
        with pytest.raises(MissingCapability, match="404"):
            engine.tokenize("x")
    assert report.reason(Capability.METRICS) == "404: Not Found"
    assert "not known" in (report.reason(Capability.IGNORE_EOS) or "")


@pytest.mark.parametrize("body", ["<html>", "a{b", "# nothing\n"])
def test_metrics_that_are_none(stub: StubServer, body: str) -> None:
    stub.on("GET /metrics", text(body, "text/plain"))
    assert why_not(stub, Capability.METRICS)


def test_llama_cpp_is_recognised_and_tokenizes_in_its_own_way(stub: StubServer) -> None:
    stub.off("GET /version").on(
        "GET /v1/models", models(MODEL, owned_by="llamacpp", max_model_len=None)
    )
    stub.on(
        "GET /props",
        text('{"build_info": "b7100-abc", "default_generation_settings": {"n_ctx": 4096}}'),
    )
    stub.on(
        "POST /tokenize", lambda e: e.json({"tokens": [1, 2, 3] if "content" in e.body else []})
    )
    with connect(stub) as engine:
        assert (engine.identity.kind, engine.identity.version) == ("llama.cpp", "b7100-abc")
        assert engine.max_model_len == 4096
        assert engine.tokenize("a b c") == (1, 2, 3)


def test_other_kinds(stub: StubServer) -> None:
    stub.off("GET /version").on("GET /v1/models", models(MODEL, owned_by="sglang"))
    stub.on(
        "GET /server_info",
        text('{"version": "0.5.9", "model_path": "x", "kv_cache_dtype": "fp8_e5m2"}'),
    )
    with connect(stub) as engine:
        assert (engine.identity.kind, engine.identity.version) == ("sglang", "0.5.9")
        assert engine.identity.facts["kv_cache_dtype"] == "fp8_e5m2"
    stub.off("GET /server_info").on("GET /v1/models", models("org/listed", owned_by="org"))
    stub.on("GET /openapi.json", text('{"paths": {"/load_model": {}, "/v1/chat/completions": {}}}'))
    with ServerEngine.connect(stub.url, "/a/local/model", limits=PATIENT) as engine:
        assert engine.identity.kind == "transformers"
        assert engine.model == "/a/local/model"


def test_metrics_of_a_running_server(stub: StubServer) -> None:
    with connect(stub) as engine:
        metrics = engine.metrics()
        assert metrics.total("vllm:time_to_first_token_seconds_count") == 4.0
        assert engine.corrupted_requests() == 0.0
        stub.on(
            "GET /metrics",
            text(
                METRICS.replace('total{engine="0",model_name="stub-model"} 0.0', "total{} 2"),
                "text/plain",
            ),
        )
        assert engine.corrupted_requests() == 2.0
        stub.off("GET /metrics")
        assert engine.corrupted_requests() is None


def test_first_tokens_are_counted_by_tokenizing_where_usage_does_not_tell(stub: StubServer) -> None:
    stub.on(
        CHAT,
        healthy(
            chunks=("one two three", " four"), per_chunk=1, continuous=False, seconds_per_chunk=0.02
        ),
    )
    with connect(stub) as engine:
        timing = engine.stream(ASK).timing
        assert timing is not None
        assert (timing.first_chunk_tokens, timing.first_chunk_source) == (3, "tokenize")
        stub.on("POST /tokenize", status(400))
        timing = engine.stream(ASK).timing
    assert timing is not None
    assert (timing.first_chunk_tokens, timing.first_chunk_source) == (1, "assumed")


def test_timing_is_that_of_the_server(stub: StubServer) -> None:
    """Ten chunks of four tokens, 20 ms apart: 36 tokens in 180 ms after the first chunk."""
    stub.on(CHAT, healthy(chunks=("w",) * 10, per_chunk=4, seconds_per_chunk=0.02))
    with connect(stub) as engine:
        reply = engine.stream(ASK)
    timing = reply.timing
    assert timing is not None
    assert (reply.completion_tokens, timing.first_chunk_tokens) == (40, 4)
    assert timing.ttft > 0.018
    speed = timing.decode_tokens_per_s(40)
    assert speed is not None
    # Sleeping takes at least as long as asked for; a busy machine makes it longer.
    assert 20 < speed <= 36 / (9 * 0.02) + 1e-6


def test_messages_tools_and_extras_reach_the_server(stub: StubServer) -> None:
    from assay.engines import ToolCall

    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    request = Request(
        messages=(
            Message("user", "weather?"),
            Message("assistant", None, tool_calls=(ToolCall("f", "{}", "c1"),)),
            Message("tool", "18 degrees", tool_call_id="c1", name="f"),
        ),
        max_tokens=3,
        tools=(tool,),
        stop=("\n",),
        ignore_eos=True,
        extra={"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}},
    )
    with connect(stub) as engine:
        engine.generate(request)
    sent = stub.bodies(CHAT)[-1]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert sent["messages"][1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert sent["messages"][2] == {
        "role": "tool",
        "content": "18 degrees",
        "tool_call_id": "c1",
        "name": "f",
    }
    assert sent["tools"] == [tool]
    assert (sent["stop"], sent["ignore_eos"], sent["top_k"]) == (["\n"], True, 5)
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert "seed" not in sent


def test_a_stream_of_tool_calls_over_the_wire(stub: StubServer) -> None:
    def part(finish: str | None = None, **function: str) -> bytes:
        calls = [{"index": 0, "id": "c", "function": function}]
        return sse(
            {"choices": [{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": finish}]}
        )

    with connect(stub) as engine:
        assert Capability.STREAM in engine.capabilities
        stub.on(
            CHAT,
            events(
                part(name="get_weather"),
                part(arguments='{"city"'),
                part("tool_calls", arguments=': "Oslo"}'),
            ),
        )
        reply = engine.stream(ASK)
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [
        ("get_weather", '{"city": "Oslo"}')
    ]
    assert reply.timing is not None
