"""Start vLLM in this process, set up so that a scorer can step it."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from assay.engines import read_options
from assay.errors import AssayError, UsageError
from assay.plugins import get
from assay.signals import handlers_kept

# How a model of vLLM is written: `vllm:MODEL?kv_cache_dtype=fp8&max_model_len=2048`.


@dataclass(frozen=True)
class VllmSpec:
    """One model for vLLM: a folder (or a name on the hub) and the arguments of the engine that may
    change numbers.
    """

    model: str
    dtype: str = "auto"
    quantization: str = ""
    kv_cache_dtype: str = "auto"
    attention_backend: str = ""
    max_model_len: int = 4096
    """Longest window in tokens; no more than the model has is used."""
    max_num_batched_tokens: int = 0
    """Tokens of one step; 0: the larger of 8,192 and `max_model_len`."""
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.7
    """Share of the GPU's memory for weights and cache; states and logits of the scored rows need
    the rest.
    """
    kv_cache_gib: float = 0.0
    """Size of the KV cache in GiB; 0: what is left of the share on a GPU, 1 GiB on a CPU."""
    enforce_eager: bool = True
    """False compiles the model and uses CUDA graphs, as a server does by default."""
    seed: int = 0
    tensor_parallel: int = 1
    """GPUs that share every layer; each holds its rows of the output head and its heads of the
    cache.
    """
    pipeline_parallel: int = 1
    """Stages of layers, one after the other on `tensor_parallel` GPUs each; the last one scores."""
    kv_pages: str = ""
    """A calibration file: keys and values lie in packed pages with its tables; the laboratory has
    them.
    """
    args: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `vllm.LLM`, written as a JSON object."""
    python: str = ""
    """A Python that has vLLM; empty: see `assay.engines.vllm.scorer`."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, read back by `VllmSpec(**…)`."""
        return asdict(self)

    @property
    def ranks(self) -> int:
        """Processes, and GPUs, of the engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def batched_tokens(self) -> int:
        """Tokens that one step may hold."""
        return self.max_num_batched_tokens or max(8192, self.max_model_len)


def parse_spec(spec: str) -> VllmSpec:
    """Read `vllm:MODEL?option=value&…`; UsageError on an unknown option or a value that makes no
    sense.
    """
    known = {f.name: f for f in fields(VllmSpec)[1:]}
    model, given = read_options(
        spec, "vllm:", list(known), example="vllm:PATH, such as vllm:./model?kv_cache_dtype=fp8"
    )
    options: dict[str, Any] = {}
    for name, text in given:
        try:
            options[name] = _READ[str(known[name].type)](text)
        except ValueError as error:
            raise _usage(
                f"{spec!r}: {name}={text} {error}", "look at the options in docs/engines.md"
            ) from error
    parsed = VllmSpec(model, **options)
    _check_args(spec, parsed.args)
    _check_ranks(spec, parsed)
    if (
        parsed.max_model_len < 2
        or parsed.max_num_seqs < 1
        or not 0 < parsed.gpu_memory_utilization <= 1
    ):
        raise _usage(
            f"{spec!r}: max_model_len must be at least 2, max_num_seqs at least 1, and "
            "gpu_memory_utilization above 0 and at most 1",
            "correct the option",
        )
    return parsed


def _check_ranks(spec: str, parsed: VllmSpec) -> None:
    """UsageError for a number of ranks that the model's heads and layers cannot be shared by."""
    tensor, stages = parsed.tensor_parallel, parsed.pipeline_parallel
    if min(tensor, stages) < 1:
        raise _usage(
            f"{spec!r}: tensor_parallel and pipeline_parallel must be at least 1",
            "correct the option",
        )
    if parsed.ranks == 1:
        return
    many = f"tensor_parallel={tensor}" if tensor > 1 else f"pipeline_parallel={stages}"
    if parsed.kv_pages or parsed.kv_cache_dtype.startswith(PREFIX):
        what = "packed pages" if parsed.kv_pages else f"kv_cache_dtype={parsed.kv_cache_dtype}"
        raise _usage(
            f"{spec!r}: {what} are read by one GPU alone, not with {many}", f"leave out {many}"
        )
    try:
        config = json.loads((Path(parsed.model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a name on the hub: vLLM says what is wrong with it
        return
    config = (config.get("text_config") or config) if isinstance(config, dict) else {}
    names = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    # What is no number (or a number for every layer) is left to vLLM too.
    sizes = [config.get(n) if isinstance(config, dict) else None for n in names]
    heads, cached, layers = (size if isinstance(size, int) else None for size in sizes)
    cached = cached or heads
    if heads and cached and (heads % tensor or cached % tensor):
        what = f"{heads} attention heads cannot be shared evenly by {tensor} ranks"
        if not heads % tensor:
            why = (
                "ranks would hold copies of them"
                if tensor > cached
                else "they cannot be shared evenly"
            )
            what = f"{cached} KV head{'s' * (cached > 1)} for {tensor} ranks: {why}"
        fitting = ", ".join(str(n) for n in range(1, cached + 1) if heads % n == cached % n == 0)
        raise _usage(
            f"{spec!r}: {what}",
            f"use tensor_parallel of {fitting}, and pipeline_parallel for more GPUs",
        )
    if layers and layers < stages:
        raise _usage(
            f"{spec!r}: {layers} layers are fewer than {stages} pipeline stages",
            f"use at most {layers} stages",
        )


_FIXED: Mapping[str, str] = {
    "tensor_parallel_size": "write tensor_parallel=… as an option",
    "pipeline_parallel_size": "write pipeline_parallel=… as an option",
    "distributed_executor_backend": "assay reads the ranks' states where vLLM's own processes run",
    "data_parallel_size": "assay scores with one engine",
    "enable_prefix_caching": (
        "a token that comes out of the cache gives no state, and no codec sees it"
    ),
    "enable_chunked_prefill": "assay says itself what a step holds",
    "async_scheduling": "tokens of a step that is not done yet cannot be told apart",
    "speculative_config": (
        "drafted tokens that are rejected would pass through codecs and the cache"
    ),
    "logits_processors": "assay forces the window's tokens by its own",
    "worker_extension_cls": "assay reads states by its own",
    "compilation_config": "write enforce_eager=false as an option",
    "trust_remote_code": "assay runs no code of a checkpoint",
}
"""Arguments of `vllm.LLM` that are not the caller's to choose, and why."""


def _check_args(spec: str, args: Mapping[str, Any]) -> None:
    """UsageError for an argument that would undo what the scorer needs, or that an option of the
    spec stands for.
    """
    for name in args:
        if name in _FIXED:
            raise _usage(
                f"{spec!r}: args must not have {name}: {_FIXED[name]}", f"leave {name} out of args"
            )
        if name in {f.name for f in fields(VllmSpec)} - {"args"}:
            raise _usage(
                f"{spec!r}: {name} in args is an option of its own", f"write {name}=… without args"
            )


def _truth(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in words:
        raise ValueError("is neither true nor false")
    return words[text.lower()]


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def _number(kind: Callable[[str], Any], words: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"is not {words}") from None

    return read


_READ: Mapping[str, Callable[[str], Any]] = {
    "str": str,
    "int": _number(int, "a whole number"),
    "float": _number(float, "a number"),
    "bool": _truth,
    "Mapping[str, Any]": _object,
}


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="fidelity.usage")


# vLLM's TurboQuant caches on model runner V1, the one whose steps assay follows.
#
# vLLM 0.25's V1 asks a layer's backend for its cache as of type `auto` unless the layer's cache
# names a quantisation, which
# TurboQuant's does not; its backend then stops with "Unknown TurboQuant cache dtype: 'auto'". Runner V2 makes an
# exception for these caches; here the backend takes `auto` for the preset of the engine. Layers
# that the preset leaves alone have another backend.
#
# Whatever `kv_cache_dtype_skip_layers` says, vLLM leaves the first two and the last two layers
# alone as well; here a list that is given is the whole list.

PREFIX = "turboquant_"
SKIP = "kv_cache_dtype_skip_layers"
"""vLLM's argument for the layers that keep the model's own type."""


def prepare(kv_cache_dtype: str, arguments: Mapping[str, Any]) -> None:
    """Get this process ready for an engine with this preset and these arguments of `vllm.LLM`."""
    name_caches(kv_cache_dtype)
    keep_boundary(SKIP not in arguments)


def name_caches(kv_cache_dtype: str) -> None:
    """Have TurboQuant's backend take `auto` for this preset, in this process; nothing where vLLM
    has no such backend.
    """
    try:
        from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend as Backend
    except ImportError:  # an older vLLM, or one for CPUs: it says itself what it lacks
        return
    shape = getattr(Backend, "get_kv_cache_shape", None)
    if shape is None:  # later releases have another way to it
        return
    inner = getattr(shape, "assay_inner", shape)

    def get_kv_cache_shape(*args: Any, cache_dtype_str: str = "auto", **kwargs: Any) -> Any:
        named = kv_cache_dtype if cache_dtype_str == "auto" else cache_dtype_str
        return inner(*args, cache_dtype_str=named, **kwargs)

    get_kv_cache_shape.assay_inner = inner  # type: ignore[attr-defined]
    Backend.get_kv_cache_shape = staticmethod(get_kv_cache_shape)


def keep_boundary(kept: bool) -> None:
    """Whether vLLM adds the first and the last layers to those that are left alone, in this
    process.
    """
    try:
        from vllm.model_executor.layers.quantization.turboquant.config import (
            TurboQuantConfig as Config,
        )
    except ImportError:
        return
    boundary = getattr(Config, "get_boundary_skip_layers", None)
    if boundary is None:
        return
    inner = getattr(boundary, "assay_inner", boundary)

    def get_boundary_skip_layers(*args: Any, **kwargs: Any) -> list[str]:
        return list(inner(*args, **kwargs)) if kept else []

    get_boundary_skip_layers.assay_inner = inner  # type: ignore[attr-defined]
    Config.get_boundary_skip_layers = staticmethod(get_boundary_skip_layers)


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
_EXTENSION = "assay.engines.vllm.ranks.ScoringExtension"
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
