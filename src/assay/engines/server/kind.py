"""Which kind of server answers, told by the model's owner or by the server's own pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.engines.server.errors import ServerInconclusive, Unreachable
from assay.engines.server.fields import as_count, as_name, as_object
from assay.engines.server.http import Transport
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
