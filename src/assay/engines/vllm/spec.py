"""`vllm:MODEL?…`: a model that vLLM runs, as it is written on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from assay.engines import read_options
from assay.engines.vllm.cache_names import PREFIX
from assay.errors import UsageError


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


def parse_vllm(spec: str) -> VllmSpec:
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
            raise usage_error(
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
        raise usage_error(
            f"{spec!r}: max_model_len must be at least 2, max_num_seqs at least 1, and "
            "gpu_memory_utilization above 0 and at most 1",
            "correct the option",
        )
    return parsed


def _check_ranks(spec: str, parsed: VllmSpec) -> None:
    """UsageError for a number of ranks that the model's heads and layers cannot be shared by."""
    tensor, stages = parsed.tensor_parallel, parsed.pipeline_parallel
    if min(tensor, stages) < 1:
        raise usage_error(
            f"{spec!r}: tensor_parallel and pipeline_parallel must be at least 1",
            "correct the option",
        )
    if parsed.ranks == 1:
        return
    many = f"tensor_parallel={tensor}" if tensor > 1 else f"pipeline_parallel={stages}"
    if parsed.kv_pages or parsed.kv_cache_dtype.startswith(PREFIX):
        what = "packed pages" if parsed.kv_pages else f"kv_cache_dtype={parsed.kv_cache_dtype}"
        raise usage_error(
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
        raise usage_error(
            f"{spec!r}: {what}",
            f"use tensor_parallel of {fitting}, and pipeline_parallel for more GPUs",
        )
    if layers and layers < stages:
        raise usage_error(
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
            raise usage_error(
                f"{spec!r}: args must not have {name}: {_FIXED[name]}", f"leave {name} out of args"
            )
        if name in {f.name for f in fields(VllmSpec)} - {"args"}:
            raise usage_error(
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


def usage_error(message: str, remedy: str) -> UsageError:
    """The error for a wrong `vllm:` on the command line."""
    return UsageError(message, remedy=remedy, finding_id="fidelity.usage")
