"""The routes on which servers turn text into token ids and back."""

from __future__ import annotations

from collections.abc import Callable

from assay.engines.server.errors import NotJson
from assay.engines.server.fields import as_count, as_name, as_object
from assay.engines.server.http import Transport

Tokenizer = Callable[[Transport, str, str], tuple[int, ...]]


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
