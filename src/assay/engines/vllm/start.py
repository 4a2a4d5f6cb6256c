"""Start vLLM in this process, set up so that a scorer can step it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from assay.engines.vllm.spec import VllmSpec
from assay.engines.vllm.turboquant import PREFIX, prepare
from assay.errors import AssayError

# Read when vLLM is imported: one process, V1 runner, nothing sent home, stdout left to the caller.
_SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
_DEFAULTS = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled on first use, and greedy sampling needs none
}
_FORCING = "assay.engines.vllm.forcing:TeacherForcing"
_EXTENSION = "assay.engines.vllm.extension.ScoringExtension"


def start_llm(spec: VllmSpec) -> Any:
    """A `vllm.LLM` whose engine runs in this process; AssayError with vLLM's own reason where that fails."""
    os.environ.update(_SETTINGS)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
        from vllm.platforms import current_platform

        if spec.kv_cache_dtype.startswith(PREFIX):
            prepare(spec.kv_cache_dtype, spec.args)
        cache = spec.kv_cache_gib or (1.0 if current_platform.is_cpu() else 0.0)
        arguments: dict[str, Any] = {
            "model": spec.model,
            "dtype": spec.dtype,
            "kv_cache_dtype": spec.kv_cache_dtype,
            "max_model_len": _context(spec),
            "max_num_batched_tokens": spec.batched_tokens,
            "max_num_seqs": min(spec.max_num_seqs, spec.batched_tokens),
            "gpu_memory_utilization": spec.gpu_memory_utilization,
            "enforce_eager": spec.enforce_eager,
            "seed": spec.seed,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
            "async_scheduling": False,
            "disable_log_stats": True,
            "logits_processors": [_FORCING],
            "worker_extension_cls": _EXTENSION,
            "logprobs_mode": "raw_logprobs",
            "max_logprobs": -1,
        }
        if spec.quantization:
            arguments["quantization"] = spec.quantization
        if spec.attention_backend:
            arguments["attention_backend"] = spec.attention_backend
        if cache:
            arguments["kv_cache_memory_bytes"] = int(cache * 2**30)
        _let_numba_be_looked_into()
        return LLM(**arguments | dict(spec.args))
    except (
        ImportError,
        OSError,
        ValueError,
        TypeError,
        RuntimeError,
        AssertionError,
        AttributeError,
        NotImplementedError,
    ) as error:
        raise AssayError(
            f"vLLM cannot load {Path(spec.model).name}: {reason_of(error)}",
            finding_id="fidelity.engine_load",
            remedy="give a checkpoint and options that this vLLM can serve: vllm:PATH?dtype=…&kv_cache_dtype=…",
        ) from error


def _let_numba_be_looked_into() -> None:
    """Keep vLLM 0.32's CPU build from stumbling over numba, where a codec has loaded it before the engine starts.

    vLLM asks all that any module holds for its `__dict__`, and llvmlite's library gives a function for any name.
    """
    library = getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None)
    if library is None or isinstance(getattr(library, "__dict__", {}), dict):
        return
    kind = type(library)
    function_of = kind.__getattr__

    def only_functions(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return function_of(self, name)

    kind.__getattr__ = only_functions


def _context(spec: VllmSpec) -> int:
    """What was asked for, or less where the model's config says that it has less."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(spec.model).get_text_config()
    except (OSError, ValueError, KeyError):  # vLLM knows more models, and says what is wrong with others
        return spec.max_model_len
    return min(spec.max_model_len, getattr(config, "max_position_embeddings", None) or spec.max_model_len)


def reason_of(error: BaseException) -> str:
    """The first line of an error that says something; pydantic puts it after a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        lines = (
            lines[1:] if not lines[1].startswith("Value error") else [lines[1].removeprefix("Value error, ")]
        )
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 400 else text[:400] + "…"
