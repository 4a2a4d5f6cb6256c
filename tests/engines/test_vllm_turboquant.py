"""The name of TurboQuant's caches on model runner V1, and the layers that they leave alone."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from assay.engines.vllm.cache_names import SKIP, keep_boundary, name_caches, prepare

CONFIG = "vllm.model_executor.layers.quantization.turboquant.config"
MODULE = "vllm.v1.attention.backends.turboquant_attn"


def modules(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Empty modules of this name and of all packages that it lies in."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))


def vllm_with(monkeypatch: pytest.MonkeyPatch, backend: type | None) -> None:
    """A vLLM whose module of the backend holds this class."""
    modules(monkeypatch, MODULE)
    if backend is not None:
        sys.modules[MODULE].TurboQuantAttentionBackend = backend  # type: ignore[attr-defined]


def test_auto_is_the_preset_and_the_last_one_named_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        @staticmethod
        def get_kv_cache_shape(
            blocks: int, size: int, cache_dtype_str: str = "auto"
        ) -> tuple[Any, ...]:
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
    assert (
        Backend.get_kv_cache_shape(3, 16, cache_dtype_str="turboquant_3bit_nc")[2]
        == "turboquant_3bit_nc"
    )


def test_a_vllm_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later:
        pass

    vllm_with(monkeypatch, Later)
    name_caches("turboquant_k8v4")
    assert not hasattr(Later, "get_kv_cache_shape")
    vllm_with(monkeypatch, None)
    name_caches("turboquant_k8v4")


def test_a_list_of_skipped_layers_is_the_whole_list(monkeypatch: pytest.MonkeyPatch) -> None:
    class Config:
        @staticmethod
        def get_boundary_skip_layers(layers: int, n: int = 2) -> list[str]:
            return [str(i) for i in (*range(n), *range(layers - n, layers))]

    modules(monkeypatch, MODULE)
    modules(monkeypatch, CONFIG)
    sys.modules[CONFIG].TurboQuantConfig = Config  # type: ignore[attr-defined]
    for arguments, left_alone in (
        ({}, ["0", "1", "4", "5"]),
        ({SKIP: []}, []),
        ({}, ["0", "1", "4", "5"]),
    ):
        prepare("turboquant_4bit_nc", arguments)
        assert Config.get_boundary_skip_layers(6) == left_alone
    assert Config.get_boundary_skip_layers(6, n=1) == ["0", "5"]


def test_a_vllm_that_leaves_no_layers_alone_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later:
        pass

    modules(monkeypatch, CONFIG)
    keep_boundary(False)
    sys.modules[CONFIG].TurboQuantConfig = Later  # type: ignore[attr-defined]
    keep_boundary(False)
    assert not hasattr(Later, "get_boundary_skip_layers")
