"""The name under which a model of transformers takes its KV cache: `past_key_values`, from 5.24 on `cache`."""

from __future__ import annotations

from inspect import signature
from typing import Any


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """Keyword arguments that hand `cache` to `model`; models that still take it under the old name get that."""
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    return {name: cache}
