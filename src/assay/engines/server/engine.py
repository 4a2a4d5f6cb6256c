"""An OpenAI-compatible server as an engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from threading import Lock
from types import TracebackType
from typing import Any

from assay.bounded_json import join_halves
from assay.engines import Capability, CapabilityReport, OnText, Reply, Request, TokenScores
from assay.engines.scoring import GreedyStep
from assay.engines.server.bodies import CHAT, Route, body_of, route_of
from assay.engines.server.endpoint import Endpoint, parse_url
from assay.engines.server.errors import (
    BadScores,
    Failing,
    ModelUnknown,
    NotFound,
    NotJson,
    RequestRefused,
)
from assay.engines.server.fields import as_object, first_choice
from assay.engines.server.greedy import greedy_request, read_greedy
from assay.engines.server.http import Limits, Transport
from assay.engines.server.kind import Identity, identify
from assay.engines.server.metrics import Metrics, corrupted_requests, kv_cache_dtype, parse_metrics
from assay.engines.server.models import ModelCard, choose_model, list_models
from assay.engines.server.probing import Probed, probe_capabilities
from assay.engines.server.prompt_scores import by_steps, score_prompts
from assay.engines.server.stream_reply import stream_reply
from assay.engines.server.tokenize import detokenize
from assay.engines.server.top_tokens import TopToken, read_top
from assay.engines.server.topk import TopkLogprobs, TopkRoute, topk_logprobs, topk_routes
from assay.engines.server.trace import StreamTrace, trace_stream
from assay.engines.server.whole_reply import whole_reply
from assay.errors import AssayError, UsageError
from assay.secrets import register_secret

_ANSWERS_TO_UNLISTED = frozenset({"transformers"})
"""Kinds that list a cache of models and serve another one that was named when they were started."""


def default_limits(timeout: float = 300.0) -> Limits:
    """Limits for answers that may take `timeout` seconds in all; a silence may last half of it, or
    two minutes.
    """
    if not timeout > 0:
        raise UsageError(f"a timeout of {timeout:g} s is not positive")
    return Limits(
        connect_s=min(10.0, timeout),
        silence_s=min(timeout, max(120.0, timeout / 2)),
        total_s=timeout,
    )


class ServerEngine:
    """One model behind an OpenAI-compatible server. Safe to use from many threads.

    `connect` finds the model and the kind of server; capabilities are probed when they are first
    asked for.
    """

    def __init__(
        self,
        transport: Transport,
        card: ModelCard,
        *,
        chosen: str,
        listed: tuple[str, ...],
        identity: Identity,
    ) -> None:
        self._transport = transport
        self._card = card
        self._chosen = chosen
        self._listed = listed
        self._lock = Lock()
        self._probed: Probed | None = None
        self._topk_routes: tuple[TopkRoute, ...] = ()
        self._text_of = lru_cache(maxsize=256)(lambda token: self.detokenize((token,)))
        self.identity = identity

    @classmethod
    def connect(
        cls,
        url: str,
        model: str | None = None,
        *,
        api_key_env: str | None = None,
        timeout: float = 300.0,
        limits: Limits | None = None,
    ) -> ServerEngine:
        """Connect to the server at `url`, its root or its /v1.

        `model` is one of the server's names, by default the first it lists. `api_key_env` names the
        environment variable that holds the key. `timeout` bounds each request in seconds; `limits`
        says it in more detail.
        """
        endpoint = parse_url(url)
        key = read_key(api_key_env)
        transport = Transport(endpoint, key=key, limits=limits or default_limits(timeout))
        try:
            return cls._find(transport, endpoint, model)
        except BaseException:
            transport.close()
            raise

    @classmethod
    def _find(cls, transport: Transport, endpoint: Endpoint, model: str | None) -> ServerEngine:
        try:
            cards = list_models(transport)
        except Failing:
            # Without a list a named model can still be asked; whether it answers is seen when it is
            # probed.
            if model is None:
                raise
            cards = None
        identity = identify(transport, cards[0].owned_by if cards else None)
        card, chosen = choose_model(
            cards, model, endpoint.api, list_is_complete=identity.kind not in _ANSWERS_TO_UNLISTED
        )
        return cls(
            transport,
            card,
            chosen=chosen,
            listed=tuple(c.id for c in cards or ()),
            identity=identity,
        )

    @property
    def url(self) -> str:
        """The API root, without credentials."""
        return self._transport.endpoint.api

    @property
    def model(self) -> str:
        """The name of the model in requests."""
        return self._card.id

    @property
    def max_model_len(self) -> int | None:
        """The longest context in tokens, where the server says it."""
        return self._card.max_model_len or self.identity.max_model_len

    @property
    def vocab_size(self) -> int | None:
        """Entries of the vocabulary, where the list of models says so."""
        return self._card.vocab_size

    @property
    def capabilities(self) -> CapabilityReport:
        """What the server can do; the first call sends about a dozen tiny requests."""
        return self._probe().report

    def _probe(self) -> Probed:
        with self._lock:
            if self._probed is None:
                try:
                    self._probed = probe_capabilities(
                        self._transport, self.model, self.identity.kind
                    )
                except ModelUnknown as exc:
                    raise self._unknown(exc) from exc
                except RequestRefused as exc:
                    # Neither route takes the plainest request. If it names the model, the name is
                    # the reason.
                    if self.model in str(exc.evidence.get("said")):
                        raise self._unknown(exc) from exc
                    raise
            return self._probed

    def _unknown(self, exc: AssayError) -> ModelUnknown:
        names = f"; it has {', '.join(self._listed)}" if self._listed else ""
        return ModelUnknown(exc.message + names, available=self._listed)

    def describe(self) -> dict[str, Any]:
        """What answers: server, model, capabilities, and the sampling fields that every request
        carries.
        """
        probed = self._probe()
        facts: dict[str, Any] = dict(self.identity.facts)
        if probed.metrics is not None:
            facts["kv_cache_dtype"] = kv_cache_dtype(probed.metrics) or facts.get("kv_cache_dtype")
        return {
            "engine": "server",
            "url": self.url,
            "server": {"kind": self.identity.kind, "version": self.identity.version, **facts},
            "model": self.model,
            "model_root": self._card.root,
            "model_owned_by": self._card.owned_by,
            "model_choice": self._chosen,
            "max_model_len": self.max_model_len,
            "capabilities": probed.report.to_json(),
            "sent": {route: dialect.to_json() for route, dialect in probed.dialects.items()},
        }

    def generate(self, request: Request) -> Reply:
        """Answer in one piece, without timing."""
        url, body = self._body(request, stream=False)
        return whole_reply(self._transport.post_json(url, body), url)

    def generate_with_top(self, request: Request, width: int) -> tuple[Reply, tuple[TopToken, ...]]:
        """Answer in one piece, with the `width` likeliest tokens of each step where the server
        gives them, else none.
        """
        if Capability.LOGPROBS in self.capabilities:
            chat = request.messages is not None
            fields = {"logprobs": True, "top_logprobs": width} if chat else {"logprobs": width}
            request = replace(request, extra={**request.extra, **fields})
        url, body = self._body(request, stream=False)
        answer = self._transport.post_json(url, body)
        return whole_reply(answer, url), read_top(first_choice(as_object(answer)) or {})

    def stream(self, request: Request, on_text: OnText | None = None) -> Reply:
        """Answer piece by piece, with timing; `on_text` is called with every piece."""
        self.capabilities.require(Capability.STREAM, "timing")
        url, body = self._body(request, stream=True)
        reply, assembler = stream_reply(self._transport, url, body, on_text)
        timing = reply.timing
        tokenizer = self._probe().tokenizer
        if timing is None or timing.first_chunk_source == "usage" or tokenizer is None:
            return reply
        try:
            count = len(tokenizer(self._transport, self.model, join_halves(assembler.first_text)))
        except AssayError:
            return reply
        counted = replace(timing, first_chunk_tokens=max(1, count), first_chunk_source="tokenize")
        return replace(reply, timing=counted)

    def trace(self, request: Request, deadline: float = float("inf")) -> StreamTrace:
        """Answer piece by piece; every event is recorded, and a stream that fails is a result."""
        url, body = self._body(request, stream=True)
        return trace_stream(self._transport, url, body, deadline)

    def _body(self, request: Request, *, stream: bool) -> tuple[str, dict[str, Any]]:
        probed = self._probe()
        route: Route = route_of(request)
        probed.report.require(
            Capability.CHAT if route == CHAT else Capability.COMPLETIONS,
            "messages" if route == CHAT else "a raw prompt",
        )
        if isinstance(request.prompt, tuple):
            probed.report.require(Capability.TOKEN_IDS_PROMPT, "a prompt of token ids")
        if request.tools:
            probed.report.require(Capability.TOOLS, "a request with tools")
        if request.ignore_eos:
            probed.report.require(Capability.IGNORE_EOS, "a fixed number of tokens")
        body = body_of(request, self.model, probed.dialects[route], stream=stream)
        return f"{self.url}/{route}", body

    def score(self, source: str | tuple[int, ...]) -> TokenScores:
        """Log-probabilities of the tokens of a text (special tokens as the server adds them) or of
        token ids.
        """
        return self.score_many([source])[0]

    def score_many(self, sources: Sequence[str | tuple[int, ...]]) -> list[TokenScores]:
        """Those of several texts or rows of ids, short ones together in one request where the
        server takes that.
        """
        probed = self._probe()
        probed.report.require(Capability.SCORE, "scoring a given text")
        if any(isinstance(source, tuple) for source in sources):
            probed.report.require(Capability.TOKEN_IDS_PROMPT, "scoring token ids")
        if probed.score is None:
            raise UsageError("the server scores by no route")
        found: list[TokenScores] = []
        while len(found) < len(sources):
            part = _together(sources[len(found) :])
            scored = score_prompts(self._transport, self.model, part, probed.score)
            found += [self._with_bytes(*pair) for pair in zip(part, scored, strict=True)]
        return found

    def score_by_steps(self, text: str) -> tuple[float, ...]:
        """Log-probabilities of the tokens of a text after its first, token by token: for
        llama.cpp's server only.

        It takes as long as to write the text. BadScores where the server does not say what it is
        asked for.
        """
        return tuple(by_steps(self._transport, self.tokenize(text)))

    def _with_bytes(self, source: str | tuple[int, ...], scores: TokenScores) -> TokenScores:
        if isinstance(source, tuple) or scores.token_ids is None or self._probe().tokenizer is None:
            return scores
        # The first token has no score. Unless it is a special token before the text, its bytes are
        # not scored either.
        first = self._text_of(scores.token_ids[0])
        unscored = len(first.encode()) if first and source.startswith(first) else 0
        return replace(scores, bytes=len(source.encode("utf-8", "replace")) - unscored)

    def topk_logprobs(
        self, tokens: Sequence[int], topk: Sequence[Sequence[int]], first: int = 1
    ) -> TopkLogprobs:
        """Log-probabilities of given ids at the tokens `first` … of a prompt: those of row i at
        token `first + i`.

        Where the server cannot score given ids, its own likeliest ones stand in for them, as many
        as the longest row; the result says whose they are. Refused where the server scores no
        prompt of token ids at all.
        """
        report = self._probe().report
        report.require(Capability.SCORE, "log-probabilities of a given text")
        report.require(Capability.TOKEN_IDS_PROMPT, "scoring token ids")
        known = self._topk_routes
        routes = known or topk_routes(self.identity.kind)
        try:
            scores, route = topk_logprobs(self._transport, self.model, tokens, topk, first, routes)
        except BadScores:
            if not known:
                raise
            # vLLM answers without scores where it had to preempt the request: once more, when it
            # has room again.
            scores, route = topk_logprobs(self._transport, self.model, tokens, topk, first, routes)
        self._topk_routes = (route,)
        return scores

    def generate_greedy(self, prefix: tuple[int, ...], count: int) -> list[GreedyStep]:
        """`count` greedy tokens after a prefix, with the two likeliest at each; BadScores where it
        does not say.
        """
        url, body = self._body(greedy_request(prefix, count), stream=False)
        return read_greedy(
            first_choice(as_object(self._transport.post_json(url, body))) or {}, count
        )

    def detokenize(self, ids: tuple[int, ...]) -> str:
        """The text of token ids; empty where the server cannot tell."""
        try:
            return detokenize(self._transport, self.model, ids) or ""
        except AssayError:
            return ""

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`, without special tokens."""
        probed = self._probe()
        probed.report.require(Capability.TOKENIZE, "counting tokens")
        if probed.tokenizer is None:
            raise UsageError("the server tokenizes by no route")
        return probed.tokenizer(self._transport, self.model, text)

    def page(self, path: str) -> str:
        """What the server answers to a GET of `path` under its root, as text; asked once."""
        return self._transport.get(self._transport.endpoint.root + path, retry=False).decode(
            "utf-8", "replace"
        )

    def cards(self) -> tuple[ModelCard, ...]:
        """The models that it lists now; empty where it has no list."""
        return list_models(self._transport) or ()

    def listed(self) -> tuple[str, ...]:
        """The names of the models that it lists now; empty where it has no list."""
        return tuple(card.id for card in self.cards())

    def metrics(self) -> Metrics:
        """The server's Prometheus metrics as they are now."""
        url = self._transport.endpoint.root + "/metrics"
        page = self._transport.get(url)
        try:
            return parse_metrics(page.decode("utf-8", "replace"))
        except ValueError as exc:
            raise NotJson(
                f"{url}: {exc}", remedy="check that this is the server's metrics page"
            ) from exc

    def corrupted_requests(self) -> float | None:
        """How many requests had NaN in their logits, where the server counts them."""
        try:
            return corrupted_requests(self.metrics())
        except (NotFound, NotJson):
            return None

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> ServerEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


TOKENS_AT_ONCE = 2048
"""Tokens that one request scores; a single text may be longer. Each request has its time limit."""


def _together(sources: Sequence[str | tuple[int, ...]]) -> Sequence[str | tuple[int, ...]]:
    """The first of `sources` that go into one request: four characters of text count as a token."""
    sizes = list(
        accumulate(len(source) // (4 if isinstance(source, str) else 1) for source in sources)
    )
    return sources[: max(1, sum(size <= TOKENS_AT_ONCE for size in sizes))]


def read_key(name: str | None) -> str | None:
    """The API key in the environment variable `name`; its value appears in no error."""
    if name is None:
        return None
    value = os.environ.get(name, "").strip()
    if not value:
        raise UsageError(
            f"the environment variable {name!r} is not set or empty",
            remedy="export it with the API key, and name it with --api-key-env",
        )
    if not value.isascii() or not value.isprintable():
        raise UsageError(
            f"the environment variable {name} holds characters that an HTTP header cannot carry",
            remedy="check that it holds the key and nothing else",
        )
    register_secret(value)
    return value
