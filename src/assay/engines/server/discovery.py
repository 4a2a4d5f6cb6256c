"""Which server answers: its kind and version, the models that it lists, its Prometheus metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.engines.server.errors import (
    ModelUnknown,
    NotFound,
    NotJson,
    ServerInconclusive,
    StreamCut,
    Unreachable,
    error_message,
    one_line,
)
from assay.engines.server.http import Transport
from assay.engines.server.messages import as_count, as_name, as_object
from assay.errors import AssayError


@dataclass(frozen=True)
class Identity:
    """The kind of a server (`vllm`, `llama.cpp`, `sglang`, `tensorrt-llm`, `ollama`, `transformers`, `unknown`)."""

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
    facts = {k: info[k] for k in ("kv_cache_dtype", "quantization", "dtype") if as_name(info.get(k))}
    return Identity("sglang", version, as_count(info.get("context_length")), facts)


def _ollama(transport: Transport) -> Identity | None:
    version = as_name(_page(transport, "/api/version").get("version"))
    return None if version is None else Identity("ollama", version)


def _transformers(transport: Transport) -> Identity | None:
    paths = as_object(_page(transport, "/openapi.json").get("paths"))
    return Identity("transformers") if "/load_model" in paths and "/v1/chat/completions" in paths else None


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
        aliases=tuple(a for a in aliases if isinstance(a, str)) if isinstance(aliases, list) else (),
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
            raise ModelUnknown(f"{where} has no model {one_line(wanted)!r}; it has {_listed(names)}", available=names)
        return ModelCard(id=wanted), "named by the caller, not listed by the server"
    if not names:
        what = "lists no model" if cards is not None else "has no list of models"
        raise ModelUnknown(f"{where} {what}", remedy="name the model with --model, or load one on the server")
    card = (cards or ())[0]
    return card, "the only one" if len(names) == 1 else f"the first of {len(names)}: {_listed(names)}"


def _listed(names: tuple[str, ...], limit: int = 8) -> str:
    shown = ", ".join(one_line(name, 80) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


@dataclass(frozen=True)
class Sample:
    """One line of a metrics page. A counter keeps its `_total`, a histogram its `_bucket`, `_sum` and `_count`."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Family:
    """The samples of one metric and its type (`counter`, `gauge`, `histogram`, `summary`, `unknown`)."""

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
        """The sum over all label sets (several engines, several models); None if there is no finite sample."""
        values = [s.value for s in self.samples(name, **labels) if math.isfinite(s.value)]
        return math.fsum(values) if values else None

    def labels(self, name: str) -> Mapping[str, str]:
        """The labels of the first sample with that name: how info gauges carry their facts."""
        found = self.samples(name)
        return dict(found[0].labels) if found else {}


def parse_metrics(text: str) -> Metrics:
    """The families in a page of the Prometheus text format; `ValueError` if it is not one."""
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Family] = {}
    try:
        for parsed in text_string_to_metric_families(text):
            samples = tuple(Sample(s.name, dict(s.labels), float(s.value)) for s in parsed.samples)
            known = families.get(parsed.name)
            families[parsed.name] = Family(parsed.name, parsed.type, (known.samples if known else ()) + samples)
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
    """Requests with NaN in their logits, as vLLM counts them when told to (`VLLM_COMPUTE_NANS_IN_LOGITS=1`)."""
    return metrics.total("vllm:corrupted_requests_total")
