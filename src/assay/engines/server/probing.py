"""What a server can do, found out with tiny requests.

A capability counts only if the answer shows it: a field that is accepted and ignored is absent, and
the reason is the server's own word where it gave one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from assay.engines import Capability, CapabilityReport, Message, Reply, Request
from assay.engines.server.bodies import CHAT, COMPLETIONS, STREAM_OPTIONS, Dialect, Route, body_of
from assay.engines.server.errors import (
    BadScores,
    Failing,
    InvalidStream,
    NotFound,
    NotJson,
    NotStreamed,
    Redirected,
    RequestRefused,
    ServerInconclusive,
    TooLarge,
)
from assay.engines.server.http import Transport
from assay.engines.server.metrics import Metrics, parse_metrics
from assay.engines.server.prompt_scores import (
    PromptRoute,
    by_echo,
    by_prompt_logprobs,
    by_sglang,
    score_prompts,
)
from assay.engines.server.stream_reply import stream_reply
from assay.engines.server.tokenize import Tokenizer, by_content, by_prompt
from assay.engines.server.whole_reply import whole_reply
from assay.errors import AssayError

Result = TypeVar("Result")


_BAD_FIELDS = frozenset({400, 422})


_UNABLE = (
    RequestRefused,
    NotFound,
    NotJson,
    Failing,
    InvalidStream,
    TooLarge,
    Redirected,
    BadScores,
)
"""Errors that mean this server does not do that; all others end the probing."""


_DECLINES_TO_STREAM = (RequestRefused, NotFound, NotStreamed)
"""Every OpenAI-compatible server should stream, so only a plain no means that it cannot: garbage is
a fault.
"""


_TEXT = "The capital of France is"


_ASK = (Message("user", "Name the capital of France."),)


_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


_HONOURS_IGNORE_EOS = frozenset({"vllm", "sglang", "llama.cpp"})


def negotiate(send: Callable[[Dialect], Result], dialect: Dialect) -> tuple[Result, Dialect]:
    """Send with ever fewer optional fields until the server accepts; the result, and what it
    accepted.

    Fields that a refusal names are left out. If it names none, all are; if that is refused too, the
    fields are not the reason, and the refusal is raised; else those that it takes one by one are
    put back.
    """
    while True:
        try:
            return send(dialect), dialect
        except RequestRefused as refusal:
            if refusal.status not in _BAD_FIELDS or not dialect.optional:
                raise
            said = str(refusal.evidence.get("said", ""))
            unnamed = [name for name in dialect.optional if not re.search(rf"\b{name}\b", said)]
        if len(unnamed) == len(dialect.optional):
            return _one_by_one(send, dialect)
        dialect = dialect.keeping(unnamed)


def _one_by_one(send: Callable[[Dialect], Result], dialect: Dialect) -> tuple[Result, Dialect]:
    result = send(dialect.keeping(()))
    accepted = []
    for name in dialect.optional:
        try:
            send(dialect.keeping((name,)))
        except RequestRefused:
            continue
        accepted.append(name)
    return result, dialect.keeping(accepted)


@dataclass(frozen=True)
class Probed:
    """The result of probing: the report, and how to speak to the server."""

    report: CapabilityReport
    dialects: Mapping[Route, Dialect]
    score: PromptRoute | None
    tokenizer: Tokenizer | None
    metrics: Metrics | None


@dataclass
class _Prober:
    transport: Transport
    model: str
    kind: str
    present: set[Capability] = field(default_factory=set)
    absent: dict[Capability, str] = field(default_factory=dict)
    unfinished: set[Capability] = field(default_factory=set)
    dialects: dict[Route, Dialect] = field(default_factory=dict)
    prompt_tokens: int | None = None
    score: PromptRoute | None = None
    tokenizer: Tokenizer | None = None
    metrics: Metrics | None = None

    def has(self, capability: Capability) -> None:
        self.present.add(capability)
        self.absent.pop(capability, None)

    def lacks(self, capability: Capability, why: str) -> None:
        if capability not in self.present:
            self.absent[capability] = why

    def ask(self, route: Route, dialect: Dialect, **fields: Any) -> Reply:
        """One token over `route`."""
        request = _request(route, **fields)
        body = body_of(request, self.model, dialect, stream=False)
        url = f"{self.transport.endpoint.api}/{route}"
        return whole_reply(self.transport.post_json(url, body), url)

    def attempt(
        self,
        capability: Capability,
        probe: Callable[[], str | None],
        unable: tuple[type[AssayError], ...] = _UNABLE,
    ) -> None:
        """Run a probe of something optional: it returns why the server cannot, or None if it can.

        Of all errors, those in `unable` say so too; the others leave open whether it can.
        """
        try:
            why = probe()
        except unable as exc:
            why = reason(exc)
        except (*_UNABLE, ServerInconclusive) as exc:
            why = f"its probe did not finish: {exc.message}"
            self.unfinished.add(capability)
        if why is None:
            self.has(capability)
        else:
            self.lacks(capability, why)

    def routes(self) -> None:
        """Chat and completions: at least one must work."""
        failures: list[AssayError] = []
        for route, capability in ((CHAT, Capability.CHAT), (COMPLETIONS, Capability.COMPLETIONS)):
            try:
                reply, self.dialects[route] = negotiate(partial(self.ask, route), Dialect())
            except _UNABLE as exc:
                failures.append(exc)
                self.lacks(capability, reason(exc))
                continue
            self.has(capability)
            if route == CHAT:
                self.prompt_tokens = reply.prompt_tokens
        if not self.dialects:
            raise next((f for f in failures if not isinstance(f, NotFound)), failures[0])
        self.has(Capability.GENERATE)

    @property
    def main(self) -> Route:
        return CHAT if CHAT in self.dialects else COMPLETIONS

    def streaming(self) -> None:
        for route in tuple(self.dialects):
            if route == self.main:
                self.attempt(Capability.STREAM, partial(self.stream, route), _DECLINES_TO_STREAM)
            else:
                # Its own dialect for streams; whether it streams is asked of the main route only.
                with suppress(*_UNABLE, ServerInconclusive):
                    self.stream(route)
        if Capability.STREAM not in self.present:
            why = f"it does not stream: {self.absent[Capability.STREAM]}"
            self.lacks(Capability.STREAM_USAGE, why)
            self.lacks(Capability.CONTINUOUS_USAGE, why)

    def stream(self, route: Route) -> str | None:
        """Stream a few tokens with ever fewer options; says why none is accepted."""
        refusal = ""
        for options in (STREAM_OPTIONS, {"include_usage": True}, {}):
            dialect = replace(self.dialects[route], stream_options=options)
            body = body_of(_request(route, max_tokens=4), self.model, dialect, stream=True)
            try:
                reply, assembler = stream_reply(
                    self.transport, f"{self.transport.endpoint.api}/{route}", body
                )
            except RequestRefused as exc:
                refusal = reason(exc)
                continue
            self.dialects[route] = dialect
            if route == self.main:
                self._counts(reply, assembler.running_counts, refusal)
            return None
        return refusal

    def _counts(self, reply: Reply, running: bool, refusal: str) -> None:
        if reply.completion_tokens is None:
            self.lacks(Capability.STREAM_USAGE, refusal or "its stream ends without usage")
        else:
            self.has(Capability.STREAM_USAGE)
        if running:
            self.has(Capability.CONTINUOUS_USAGE)
        else:
            self.lacks(
                Capability.CONTINUOUS_USAGE,
                refusal or "it sends no usage with the chunks of a stream",
            )

    def logprobs(self) -> None:
        def probe() -> str | None:
            chat = self.main == CHAT
            fields = {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
            reply = self.ask(self.main, self.dialects[self.main], extra=fields)
            return None if reply.token_logprobs else "it takes logprobs and sends none"

        self.attempt(Capability.LOGPROBS, probe)

    def tokenize(self) -> None:
        def probe() -> str | None:
            why = ""
            for tokenizer in (
                (by_content, by_prompt) if self.kind == "llama.cpp" else (by_prompt, by_content)
            ):
                try:
                    ids = tokenizer(self.transport, self.model, _TEXT)
                except _UNABLE as exc:
                    why = why or reason(exc)
                    if isinstance(exc, NotFound):
                        return why
                    continue
                if ids:
                    self.tokenizer = tokenizer
                    return None
                why = why or "it answers no tokens"
            return why

        self.attempt(Capability.TOKENIZE, probe)

    def token_ids(self) -> None:
        def probe() -> str | None:
            ids = (
                self.tokenizer(self.transport, self.model, _TEXT)
                if self.tokenizer
                else (40, 41, 42, 43, 44)
            )
            reply = self.ask(COMPLETIONS, self.dialects[COMPLETIONS], prompt=ids)
            if reply.prompt_tokens is None:
                return (
                    "it takes token ids, but does not count them, so that it may have ignored them"
                )
            if reply.prompt_tokens != len(ids):
                return f"it was sent {len(ids)} token ids and counted {reply.prompt_tokens}"
            return None

        self.attempt(Capability.TOKEN_IDS_PROMPT, probe)

    def scoring(self) -> None:
        routes: list[tuple[Capability, PromptRoute]] = [
            (
                Capability.PROMPT_LOGPROBS,
                by_sglang if self.kind == "sglang" else by_prompt_logprobs,
            ),
            (Capability.ECHO, by_echo),
        ]
        for capability, route in routes:
            self.attempt(capability, partial(self.try_score, route))
        if self.score is not None:
            self.has(Capability.SCORE)
        else:
            self.lacks(
                Capability.SCORE,
                f"prompt_logprobs: {self.absent[Capability.PROMPT_LOGPROBS]}; echo:"
                f" {self.absent[Capability.ECHO]}",
            )

    def try_score(self, route: PromptRoute) -> None:
        score_prompts(self.transport, self.model, [_TEXT], route)
        self.score = self.score or route

    def tools(self) -> None:
        def probe() -> str | None:
            reply = self.ask(CHAT, self.dialects[CHAT], tools=(_TOOL,))
            if self.prompt_tokens is None or reply.prompt_tokens is None:
                return None
            if reply.prompt_tokens <= self.prompt_tokens:
                return (
                    "its chat template ignores tools: the prompt is no longer with a tool than"
                    " without"
                )
            return None

        self.attempt(Capability.TOOLS, probe)

    def ignore_eos(self) -> None:
        def probe() -> str | None:
            if self.kind not in _HONOURS_IGNORE_EOS:
                return f"not known to be honoured by this kind of server ({self.kind})"
            self.ask(self.main, self.dialects[self.main], ignore_eos=True)
            return None

        self.attempt(Capability.IGNORE_EOS, probe)

    def metrics_page(self) -> None:
        def probe() -> str | None:
            page = self.transport.get(self.transport.endpoint.root + "/metrics", retry=False)
            try:
                self.metrics = parse_metrics(page.decode("utf-8", "replace"))
            except ValueError as exc:
                return str(exc)
            return None if self.metrics.families else "its page of metrics is empty"

        self.attempt(Capability.METRICS, probe)


def probe_capabilities(transport: Transport, model: str, kind: str) -> Probed:
    """Probe a server of the given kind; raises if it can generate by no route."""
    prober = _Prober(transport, model, kind)
    prober.routes()
    prober.streaming()
    prober.logprobs()
    prober.tokenize()
    prober.metrics_page()
    prober.ignore_eos()
    without = "it needs {}, which is absent: {}"
    if COMPLETIONS in prober.dialects:
        prober.token_ids()
    else:
        why = without.format("completions", prober.absent[Capability.COMPLETIONS])
        prober.lacks(Capability.TOKEN_IDS_PROMPT, why)
    prober.scoring()
    if CHAT in prober.dialects:
        prober.tools()
    else:
        prober.lacks(Capability.TOOLS, without.format("chat", prober.absent[Capability.CHAT]))
    report = CapabilityReport(
        present=frozenset(prober.present),
        absent=prober.absent,
        where=f"{transport.endpoint.api} ({model})",
        unfinished=frozenset(prober.unfinished),
    )
    return Probed(report, prober.dialects, prober.score, prober.tokenizer, prober.metrics)


def _request(route: Route, **fields: Any) -> Request:
    subject: dict[str, Any] = {"messages": _ASK} if route == CHAT else {"prompt": _TEXT}
    return Request(**{"max_tokens": 1, "seed": 0, **subject, **fields})


def reason(exc: AssayError) -> str:
    """Why a probe failed, in the words of the server where it gave any."""
    said, status = exc.evidence.get("said"), exc.evidence.get("status")
    return f"{status}: {said}" if said and status else exc.message
