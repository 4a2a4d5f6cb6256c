"""Which server answers, and what it can do, found out with tiny requests whose answers are checked.

Its kind and version, the models that it lists, its Prometheus metrics; then its capabilities.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from assay.engines import Capability, CapabilityReport, Message, Reply, Request
from assay.engines.server.http import (
    BadScores,
    Failing,
    InvalidStream,
    ModelUnknown,
    NotFound,
    NotJson,
    NotStreamed,
    Redirected,
    RequestRefused,
    ServerInconclusive,
    StreamCut,
    TooLarge,
    Transport,
    Unreachable,
    error_message,
    one_line,
)
from assay.engines.server.messages import (
    CHAT,
    COMPLETIONS,
    STREAM_OPTIONS,
    Dialect,
    Route,
    as_count,
    as_name,
    as_object,
    body_of,
    stream_reply,
    whole_reply,
)
from assay.engines.server.scoring import (
    PromptRoute,
    by_echo,
    by_prompt_logprobs,
    by_sglang,
    score_prompts,
)
from assay.errors import AssayError


@dataclass(frozen=True)
class Identity:
    """The kind of a server (`vllm`, `llama.cpp`, `sglang`, `tensorrt-llm`, `ollama`,
    `transformers`, `unknown`).
    """

    kind: str = "unknown"
    version: str | None = None
    max_model_len: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


_KIND_BY_OWNER = {
    "vllm": "vllm",
    "llamacpp": "llama.cpp",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt-llm",
    "library": "ollama",
}


def identify(transport: Transport, owned_by: str | None) -> Identity:
    """The kind that the model's owner names, else the first whose own pages answer."""
    kind = _KIND_BY_OWNER.get(owned_by or "")
    if kind in ("vllm", "tensorrt-llm"):
        # Many servers have a page /version, so it says nothing about the kind.
        return Identity(kind, as_name(_page(transport, "/version").get("version")))
    order = ([kind] if kind else []) + [other for other in _PAGES if other != kind]
    for candidate in order:
        found = _PAGES[candidate](transport)
        if found is not None:
            return found
    return Identity(kind or "unknown")


def _page(transport: Transport, path: str) -> Mapping[str, Any]:
    """A JSON page under the root; empty if the server has none."""
    try:
        return as_object(transport.get_json(transport.endpoint.root + path, retry=False))
    except (Unreachable, ServerInconclusive):
        raise
    except AssayError:
        return {}


def _llama_cpp(transport: Transport) -> Identity | None:
    props = _page(transport, "/props")
    settings = as_object(props.get("default_generation_settings"))
    if not settings:
        return None
    return Identity("llama.cpp", as_name(props.get("build_info")), as_count(settings.get("n_ctx")))


def _sglang(transport: Transport) -> Identity | None:
    info = _page(transport, "/server_info") or _page(transport, "/get_server_info")
    version = as_name(info.get("version"))
    if version is None or "model_path" not in info:
        return None
    facts = {
        k: info[k] for k in ("kv_cache_dtype", "quantization", "dtype") if as_name(info.get(k))
    }
    return Identity("sglang", version, as_count(info.get("context_length")), facts)


def _ollama(transport: Transport) -> Identity | None:
    version = as_name(_page(transport, "/api/version").get("version"))
    return None if version is None else Identity("ollama", version)


def _transformers(transport: Transport) -> Identity | None:
    paths = as_object(_page(transport, "/openapi.json").get("paths"))
    return (
        Identity("transformers")
        if "/load_model" in paths and "/v1/chat/completions" in paths
        else None
    )


_PAGES: Mapping[str, Callable[[Transport], Identity | None]] = {
    "llama.cpp": _llama_cpp,
    "sglang": _sglang,
    "ollama": _ollama,
    "transformers": _transformers,
}


@dataclass(frozen=True)
class ModelCard:
    """One entry of `/v1/models`."""

    id: str
    root: str | None = None
    owned_by: str | None = None
    max_model_len: int | None = None
    vocab_size: int | None = None
    aliases: tuple[str, ...] = ()


def list_models(transport: Transport) -> tuple[ModelCard, ...] | None:
    """The models of the server; None if it has no such page."""
    url = transport.endpoint.api + "/models"
    try:
        answer = transport.get_json(url)
    except NotFound:
        return None
    except StreamCut as exc:
        # The first request of all: nothing there has spoken HTTP yet.
        raise Unreachable(exc.message, evidence=exc.evidence) from exc
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list):
        said = one_line(error_message(answer)) or "no list of models"
        raise NotJson(f"{url} answered JSON that is no list of models: {said}")
    return tuple(card for card in map(_card, data) if card is not None)


def _card(entry: Any) -> ModelCard | None:
    card = as_object(entry)
    name = as_name(card.get("id"))
    if not name:
        return None
    aliases = card.get("aliases")
    return ModelCard(
        id=name,
        root=as_name(card.get("root")),
        owned_by=as_name(card.get("owned_by")),
        max_model_len=as_count(card.get("max_model_len")),
        vocab_size=as_count(as_object(card.get("meta")).get("n_vocab")),
        aliases=(
            tuple(a for a in aliases if isinstance(a, str)) if isinstance(aliases, list) else ()
        ),
    )


def choose_model(
    cards: tuple[ModelCard, ...] | None, wanted: str | None, where: str, *, list_is_complete: bool
) -> tuple[ModelCard, str]:
    """The model to use, and a note on how it was chosen.

    `list_is_complete` is False for a server that also answers to names which it does not list.
    """
    names = tuple(card.id for card in cards or ())
    if wanted is not None:
        for card in cards or ():
            if wanted == card.id or wanted in card.aliases:
                return card, "named by the caller"
        if names and list_is_complete:
            raise ModelUnknown(
                f"{where} has no model {one_line(wanted)!r}; it has {_listed(names)}",
                available=names,
            )
        return ModelCard(id=wanted), "named by the caller, not listed by the server"
    if not names:
        what = "lists no model" if cards is not None else "has no list of models"
        raise ModelUnknown(
            f"{where} {what}", remedy="name the model with --model, or load one on the server"
        )
    card = (cards or ())[0]
    return card, (
        "the only one" if len(names) == 1 else f"the first of {len(names)}: {_listed(names)}"
    )


def _listed(names: tuple[str, ...], limit: int = 8) -> str:
    shown = ", ".join(one_line(name, 80) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


@dataclass(frozen=True)
class Sample:
    """One line of a metrics page. A counter keeps its `_total`, a histogram its `_bucket`, `_sum`
    and `_count`.
    """

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Family:
    """The samples of one metric and its type (`counter`, `gauge`, `histogram`, `summary`,
    `unknown`).
    """

    name: str
    type: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Metrics:
    """One scrape of a metrics page."""

    families: Mapping[str, Family] = field(default_factory=dict)

    def samples(self, name: str, **labels: str) -> tuple[Sample, ...]:
        """All samples with that exact name whose labels include `labels`."""
        return tuple(
            sample
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items())
        )

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all label sets (several engines, several models); None if there is no finite
        sample.
        """
        values = [s.value for s in self.samples(name, **labels) if math.isfinite(s.value)]
        return math.fsum(values) if values else None

    def labels(self, name: str) -> Mapping[str, str]:
        """The labels of the first sample with that name: how info gauges carry their facts."""
        found = self.samples(name)
        return dict(found[0].labels) if found else {}


MAX_SERIES = 50_000
"""Lines of a metrics page that are read; large deployments show a few thousand."""
_MAX_LINE = 1 << 16


def parse_metrics(text: str) -> Metrics:
    """Read a page of the Prometheus text format.

    Raises:
        ValueError: It is not one, or it is larger than any server's.
    """
    from prometheus_client.parser import text_string_to_metric_families

    lines = text.count("\n")
    if lines > MAX_SERIES:
        raise ValueError(f"a page of metrics of {lines:,} lines; the limit is {MAX_SERIES:,}")
    if len(text) > _MAX_LINE and max(map(len, text.split("\n"))) > _MAX_LINE:
        raise ValueError(f"a page of metrics with a line of more than {_MAX_LINE:,} characters")
    families: dict[str, Family] = {}
    try:
        for parsed in text_string_to_metric_families(text):
            samples = tuple(Sample(s.name, dict(s.labels), float(s.value)) for s in parsed.samples)
            known = families.get(parsed.name)
            families[parsed.name] = Family(
                parsed.name, parsed.type, (known.samples if known else ()) + samples
            )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
        raise ValueError(f"not a page of Prometheus metrics: {exc}") from exc
    return Metrics(families)


def kv_cache_dtype(metrics: Metrics) -> str | None:
    """The KV-cache dtype that vLLM or SGLang runs with, where it says so."""
    for name in ("vllm:cache_config_info", "sglang:cache_config_info"):
        dtype = metrics.labels(name).get("cache_dtype")
        if dtype:
            return dtype
    return None


def corrupted_requests(metrics: Metrics) -> float | None:
    """Requests with NaN in their logits, as vLLM counts them when told to
    (`VLLM_COMPUTE_NANS_IN_LOGITS=1`).
    """
    return metrics.total("vllm:corrupted_requests_total")


# What a server can do.
#
# A capability counts only if the answer shows it: a field that is accepted and ignored is absent,
# and the reason is the server's own word where it gave one.


Result = TypeVar("Result")
Tokenizer = Callable[[Transport, str, str], tuple[int, ...]]

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


def by_prompt(transport: Transport, model: str, text: str) -> tuple[int, ...]:
    """vLLM and SGLang: the text as `prompt`."""
    return _tokens(transport, text, {"model": model, "prompt": text, "add_special_tokens": False})


def by_content(transport: Transport, model: str, text: str) -> tuple[int, ...]:
    """llama.cpp: the text as `content`."""
    return _tokens(transport, text, {"content": text, "add_special": False})


def detokenize(transport: Transport, model: str, ids: tuple[int, ...]) -> str | None:
    """The text of token ids; None if the answer holds none."""
    answer = as_object(
        transport.post_json(
            transport.endpoint.root + "/detokenize", {"model": model, "tokens": list(ids)}
        )
    )
    return as_name(answer.get("prompt", answer.get("content", answer.get("text"))))


_AROUND = 16
"""Tokens that a server may put around a text, such as its begin and end."""


def _tokens(transport: Transport, text: str, body: dict[str, object]) -> tuple[int, ...]:
    """The ids that a server answers for `text`; no token of a text is shorter than a byte."""
    most = len(text.encode("utf-8", "replace")) + _AROUND
    url = transport.endpoint.root + "/tokenize"
    tokens = as_object(transport.post_json(url, body)).get("tokens")
    if isinstance(tokens, list) and len(tokens) > most:
        raise NotJson(f"{url} answered {len(tokens):,} tokens for a text that has at most {most:,}")
    ids = [as_count(t) for t in tokens] if isinstance(tokens, list) else [None]
    if None in ids:
        raise NotJson(f"{url} answered no list of token ids")
    return tuple(i for i in ids if i is not None)


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
