"""The name of TurboQuant's caches on model runner V1."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from assay.engines.vllm.turboquant import name_caches

MODULE = "vllm.v1.attention.backends.turboquant_attn"


def vllm_with(monkeypatch: pytest.MonkeyPatch, backend: type | None) -> None:
    """A vLLM whose module of the backend holds this class."""
    parts = MODULE.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
    if backend is not None:
        sys.modules[MODULE].TurboQuantAttentionBackend = backend  # type: ignore[attr-defined]


def test_auto_is_the_preset_and_the_last_one_named_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        @staticmethod
        def get_kv_cache_shape(blocks: int, size: int, cache_dtype_str: str = "auto") -> tuple[Any, ...]:
            return blocks, size, cache_dtype_str

        @classmethod
        def block_dim(cls) -> tuple[Any, ...]:
            return cls.get_kv_cache_shape(1, 2, cache_dtype_str="auto")

    vllm_with(monkeypatch, Backend)
    for preset in ("turboquant_k8v4", "turboquant_4bit_nc"):
        name_caches(preset)
        assert Backend.get_kv_cache_shape(3, 16, cache_dtype_str="auto") == (3, 16, preset)
        assert Backend.get_kv_cache_shape(3, size=16) == (3, 16, preset)
        assert Backend.block_dim() == (1, 2, preset)
    assert Backend.get_kv_cache_shape(3, 16, cache_dtype_str="turboquant_3bit_nc")[2] == "turboquant_3bit_nc"


def test_a_vllm_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later:
        pass

    vllm_with(monkeypatch, Later)
    name_caches("turboquant_k8v4")
    assert not hasattr(Later, "get_kv_cache_shape")
    vllm_with(monkeypatch, None)
    name_caches("turboquant_k8v4")
