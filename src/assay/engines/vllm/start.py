"""Start vLLM so that it scores: its settings, its ranks, what its errors mean."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from assay.engines.vllm.cache_names import PREFIX, prepare
from assay.engines.vllm.spec import VllmSpec
from assay.errors import AssayError
from assay.plugins import get
from assay.signals import handlers_kept

# Read when vLLM is imported: one process, V1 runner, nothing sent home, stdout left to the caller.
_SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}


_DEFAULTS = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # it is compiled on first use, and greedy sampling needs none
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


_FORCING = "assay.engines.vllm.forcing:TeacherForcing"


_EXTENSION = "assay.engines.vllm.worker.ScoringExtension"


REPORTS = "ASSAY_RANK_REPORTS"
"""Environment variable of the ranks: the folder into which one that fails writes why."""


_LOAD_ERRORS = (
    ImportError,
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
    AssertionError,
    AttributeError,
    NotImplementedError,
)


def start_llm(spec: VllmSpec) -> Any:
    """A `vllm.LLM` whose engine runs in this process; AssayError with vLLM's own reason where that
    fails.
    """
    os.environ.update(_SETTINGS)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
        from vllm.platforms import current_platform

        if spec.ranks > 1:
            _prepare_ranks(spec, current_platform)
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
            "trust_remote_code": False,
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
        if spec.kv_pages:
            arguments |= pages(spec.kv_pages, spec.model)
        if cache:
            arguments["kv_cache_memory_bytes"] = int(cache * 2**30 / spec.ranks)
        if spec.ranks > 1:
            arguments |= {
                "tensor_parallel_size": spec.tensor_parallel,
                "pipeline_parallel_size": spec.pipeline_parallel,
                "distributed_executor_backend": "mp",
            }
        let_numba_be_looked_into()
        with handlers_kept():
            return LLM(**arguments | dict(spec.args))
    except Exception as error:
        if spec.ranks > 1:
            forget_ranks()
        if isinstance(error, AssayError):
            raise
        # Of several ranks vLLM raises one that is nothing more.
        if spec.ranks == 1 and not isinstance(error, _LOAD_ERRORS):
            raise
        raise AssayError(
            f"vLLM cannot load {Path(spec.model).name}: {reason_of(error)}",
            finding_id="fidelity.engine_load",
            remedy=(
                "give a checkpoint and options that this vLLM can serve:"
                " vllm:PATH?dtype=…&kv_cache_dtype=…"
            ),
        ) from error


_BIND = "VLLM_CPU_OMP_THREADS_BIND"


_bound: dict[str, str] = {}
"""What this process has set of it: it is for one number of ranks."""


def forget_ranks() -> None:
    """Take back what `_prepare_ranks` left in this process: the next engine may have another number
    of ranks.
    """
    if folder := os.environ.pop(REPORTS, ""):
        shutil.rmtree(folder, ignore_errors=True)
    if _bound and os.environ.get(_BIND) == _bound.pop(_BIND):
        del os.environ[_BIND]


def _prepare_ranks(spec: VllmSpec, platform: Any) -> None:
    """Get this process ready for an engine of several ranks; AssayError where there are fewer GPUs
    than ranks.
    """
    import torch

    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.setdefault(
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "1800"
    )  # a step on a CPU may take minutes
    os.environ[REPORTS] = tempfile.mkdtemp(prefix="assay-ranks-")
    if platform.is_cpu():
        # vLLM's own choice is one NUMA node a rank.
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // spec.ranks
        parts = [",".join(map(str, cores[i * each : (i + 1) * each])) for i in range(spec.ranks)]
        if _BIND not in os.environ:
            os.environ[_BIND] = _bound[_BIND] = "|".join(parts) if each else "nobind"
        if not each:
            os.environ["OMP_NUM_THREADS"] = "1"
    elif (found := torch.cuda.device_count()) < spec.ranks:
        raise AssayError(
            f"tensor_parallel={spec.tensor_parallel} and pipeline_parallel={spec.pipeline_parallel}"
            f" need {spec.ranks} GPUs, this machine has {found}",
            finding_id="fidelity.engine_load",
            remedy="use fewer ranks, or a machine with more GPUs",
        )


def pages(calibration: str, model: str) -> dict[str, Any]:
    """Get this process ready for packed pages; AssayError where they do not fit. The arguments of
    `vllm.LLM` for them.
    """
    hook = get("assay.vllm_hooks", "pages")
    if hook is None:
        raise AssayError(
            "packed pages belong to the laboratory, which is not installed",
            finding_id="kv.not_installed",
            remedy="pip install 'llm-assay[lab]'",
        )
    arguments: dict[str, Any] = hook.prepare(calibration, model)
    return arguments


def let_numba_be_looked_into() -> None:
    """Keep vLLM 0.32's CPU build from stumbling over numba, where a codec has loaded it before the
    engine starts.

    vLLM asks all that any module holds for its `__dict__`, and llvmlite's library gives a function
    for any name.
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
        config = AutoConfig.from_pretrained(spec.model, trust_remote_code=False).get_text_config()
    except (
        OSError,
        ValueError,
        KeyError,
    ):  # vLLM knows more models, and says what is wrong with others
        return spec.max_model_len
    return min(
        spec.max_model_len, getattr(config, "max_position_embeddings", None) or spec.max_model_len
    )


def reason_of(error: BaseException) -> str:
    """The first line of an error that says something; pydantic puts it after a heading."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        lines = (
            lines[1:]
            if not lines[1].startswith("Value error")
            else [lines[1].removeprefix("Value error, ")]
        )
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 400 else text[:400] + "…"
