"""Raw completions with the alternatives of every token."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from assay.speculation.partings import Tokens

if TYPE_CHECKING:
    from assay.engines.server.http import Transport


TOP = 5
"""Alternatives a token; servers allow at least this many."""


class Completions:
    """`/v1/completions` of one server and its first model."""

    def __init__(self, transport: Transport, model: str) -> None:
        self._transport = transport
        self._model = model

    @classmethod
    def connect(
        cls, url: str, api_key_env: str | None = None, timeout: float = 120.0
    ) -> Completions:
        """Connect to the server at `url`; AssayError where it cannot be reached or lists
        no model.
        """
        from assay.engines.server.endpoint import parse_url
        from assay.engines.server.engine import default_limits, read_key
        from assay.engines.server.http import Transport
        from assay.engines.server.models import choose_model, list_models

        endpoint = parse_url(url)
        transport = Transport(endpoint, key=read_key(api_key_env), limits=default_limits(timeout))
        try:
            card, _ = choose_model(
                list_models(transport), None, endpoint.api, list_is_complete=True
            )
        except BaseException:
            transport.close()
            raise
        return cls(transport, card.id)

    def complete(self, prompt: str, max_tokens: int, temperature: float, seed: int) -> Tokens:
        """One completion, token by token."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "logprobs": TOP,
        }
        return Tokens.from_completion(
            self._transport.post_json(f"{self._transport.endpoint.api}/completions", body)
        )

    def __enter__(self) -> Completions:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._transport.close()
