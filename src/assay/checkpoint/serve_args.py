"""A `vllm serve` command line as the engine's own parser reads it, and what it then does with the
KV cache.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import resources
from typing import Any, Literal

from assay.checkpoint import found, warned
from assay.checkpoint.declared import Declared
from assay.checkpoint.quantization import KvCache
from assay.checkpoint.structure import Dims
from assay.checkpoint.subject import Checkpoint
from assay.errors import UsageError
from assay.verdict import Finding

_ALIASES = {
    "-q": "--quantization", "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size", "-sc": "--speculative-config", "-ep": "--enable-expert-parallel",
    "-ac": "--attention-config", "-cc": "--compilation-config", "-O": "--optimization-level",
}  # fmt: skip

_SERVER = "vllm.entrypoints.openai.api_server"


@cache
def known_options() -> Mapping[str, str]:
    """Options of `vllm serve` 0.32 and what they take: `switch`, `value`, `optional` or `many`."""
    text = (
        resources.files("assay.checkpoint").joinpath("vllm_0_32.flags").read_text(encoding="utf-8")
    )
    lines = (line.partition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: kind for name, _, kind in lines}


@dataclass(frozen=True)
class ServeArgs:
    """A parsed command line: values by canonical option (None for a switch), and options nobody
    knows.
    """

    options: dict[str, str | None] = field(default_factory=dict)
    unknown: dict[str, str | None] = field(default_factory=dict)
    """Unknown options with the closest known one, if any is close."""
    model: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Variables set in front of the command (`VLLM_X=1 vllm serve …`)."""

    def get(self, name: str) -> str | None:
        """The value of an option."""
        return self.options.get(name)

    def structure(self, name: str) -> dict[str, Any] | None:
        """A JSON value such as --speculative-config's, with dotted parts
        (`--speculative-config.method mtp`) merged.

        None if the option was not given. Raises UsageError if it is not a JSON object.
        """
        found: dict[str, Any] = {}
        given = False
        if (text := self.options.get(name)) is not None:
            given = True
            try:
                value = json.loads(text)
            except ValueError as error:
                raise UsageError(f"{name} is not JSON: {str(error)[:80]}") from error
            if not isinstance(value, dict):
                raise UsageError(f"{name} is not a JSON object")
            found.update(value)
        for option, text in self.options.items():
            if option.startswith(name + ".") and text is not None:
                given = True
                found[option.removeprefix(name + ".").replace("-", "_")] = _scalar(text)
        return found if given else None


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse(command: str) -> ServeArgs:
    """Read the text given to --serve-args, with or without `vllm serve MODEL` in front."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(
            f"cannot read --serve-args: {error}", remedy="balance its quotes"
        ) from error
    environment: dict[str, str] = {}
    while words and (assigned := re.fullmatch(r"([A-Z_][A-Z0-9_]*)=(.*)", words[0])):
        environment[assigned[1]] = assigned[2]
        words = words[1:]
    for start in (["vllm", "serve"], ["python", "-m", _SERVER], ["python3", "-m", _SERVER]):
        if words[: len(start)] == start:
            words = words[len(start) :]
    options: dict[str, str | None] = {}
    unknown: dict[str, str | None] = {}
    model: str | None = None
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not re.match(r"-{1,2}[A-Za-z]", word):
            model = model or word
            continue
        flag, equals, value = word.partition("=")
        if level := re.fullmatch(r"-O=?(\d)", word):
            options["--optimization-level"] = level[1]
            continue
        name = _canonical(flag)
        if name is None:
            close = difflib.get_close_matches(
                flag.replace("_", "-"), known_options(), n=1, cutoff=0.75
            )
            unknown[flag] = close[0] if close else None
            if not equals and position < len(words) and not words[position].startswith("-"):
                position += 1
            continue
        kind = known_options().get(name.split(".")[0], "value")
        if equals:
            options[name] = value
        elif kind == "switch" and "." not in name:
            options[name] = None
        elif position < len(words) and not words[position].startswith("--"):
            options[name] = words[position]
            position += 1
            while kind == "many" and position < len(words) and not words[position].startswith("-"):
                position += 1
        else:
            options[name] = None
    return ServeArgs(options, unknown, model or options.get("--model"), environment)


def _canonical(flag: str) -> str | None:
    """The option that the engine takes `flag` for: aliases, underscores, unambiguous abbreviations,
    dotted parts.
    """
    known = known_options()
    if flag in _ALIASES:
        return _ALIASES[flag]
    base, dot, rest = flag.partition(".")
    base = "--" + base[2:].replace("_", "-") if base.startswith("--") else _ALIASES.get(base, base)
    if base in known:
        return f"{base}.{rest}" if dot else base
    if base.startswith("--"):
        longer = [option for option in known if option.startswith(base)]
        if len(longer) == 1:
            return f"{longer[0]}.{rest}" if dot else longer[0]
    return None


# Engine versions as tables are keyed by them.


@dataclass(frozen=True, order=True)
class Version:
    """A release number; suffixes such as `.dev3` or `rc1` are dropped."""

    parts: tuple[int, int, int]

    @staticmethod
    def parse(text: str) -> Version:
        """`0.32`, `v0.32.0`, `0.32.0rc1+cpu`. Raises UsageError for anything else."""
        found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
        if not found:
            raise UsageError(
                f"cannot read the engine version {text!r}", remedy="write it as vllm==0.32.0"
            )
        return Version((int(found[1]), int(found[2]), int(found[3] or 0)))

    def __str__(self) -> str:
        return ".".join(map(str, self.parts))


TABLED = Version((0, 32, 0))
"""The version whose own code the tables were checked against."""


def engine_version(text: str | None) -> Version | None:
    """The version of `vllm==X`; None if nothing was said. Raises UsageError for another engine."""
    if text is None:
        return None
    name, _, number = text.partition("==")
    if not number or name.strip().lower() != "vllm":
        raise UsageError(
            f"--engine-version {text!r} is not understood", remedy="write it as vllm==0.32.0"
        )
    return Version.parse(number)


# Which attention backend takes which KV-cache dtype, and on which GPU (vLLM 0.32).


KV_DTYPES = frozenset(
    {
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp8_inc",
        "fp8_ds_mla",
        "nvfp4_ds_mla",
        "turboquant_k8v4",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "turboquant_3bit_nc",
        "ultraquant_4bit",
        "int4_per_token_head",
        "int8_per_token_head",
        "fp8_per_token_head",
        "nvfp4",
        "nvfp4_4over6",
    }
)
"""Values of --kv-cache-dtype. `fp8` means e4m3."""

Attention = Literal["ordinary", "latent", "sparse"]
"""What a model needs: keys and values per head, one latent vector (MLA), or the latter with an
indexer.
"""

_FULL = frozenset({"auto", "float16", "bfloat16"})
_E4M3 = frozenset({"fp8", "fp8_e4m3"})
_E5M2 = frozenset({"fp8_e5m2"})
_PER_HEAD = frozenset({"int4_per_token_head", "int8_per_token_head", "fp8_per_token_head"})
_TURBO = frozenset(d for d in KV_DTYPES if d.startswith("turboquant"))


@dataclass(frozen=True)
class Backend:
    """KV dtypes of one backend; `heads` are the head sizes it takes (None: any).

    `capability` is the lowest and highest CUDA compute capability, None where CUDA is not what it
    runs on.
    """

    dtypes: frozenset[str]
    heads: frozenset[int] | None = None
    attention: Attention = "ordinary"
    capability: tuple[float, float] | None = (0.0, 99.9)


_HOPPER, _BLACKWELL, _CONSUMER = (9.0, 9.9), (10.0, 10.9), (12.0, 12.9)

BACKENDS: Mapping[str, Backend] = {
    "FLASH_ATTN": Backend(_FULL | _E4M3, capability=(8.0, 99.9)),
    "FLASHINFER": Backend(
        _FULL | _E4M3 | _E5M2 | {"nvfp4", "nvfp4_4over6"},
        frozenset({64, 128, 256, 512}),
        capability=(8.0, 12.1),
    ),
    "TRITON_ATTN": Backend(_FULL | _E4M3 | _E5M2 | _PER_HEAD),
    "FLEX_ATTENTION": Backend(_FULL),
    "TURBOQUANT": Backend(_TURBO),
    "ULTRAQUANT": Backend(frozenset({"ultraquant_4bit"}), capability=None),
    "HPC_ATTN": Backend(
        frozenset({"auto", "bfloat16", "fp8_e4m3"}), frozenset({128}), capability=(9.0, 9.0)
    ),
    "B12X": Backend(
        frozenset({"auto", "bfloat16"}) | _E4M3,
        frozenset({64, 128, 192, 256}),
        capability=(12.0, 12.1),
    ),
    "CPU_ATTN": Backend(
        frozenset({"auto"}) | _E4M3 | _E5M2,
        frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}),
        capability=None,
    ),
    "ROCM_ATTN": Backend(
        _FULL | _E4M3 | _E5M2, frozenset({32, 64, 80, 96, 128, 160, 192, 224, 256}), capability=None
    ),
    "ROCM_SEGMENTED_ATTN": Backend(_FULL | _E4M3, frozenset({64, 128, 256}), capability=None),
    "ROCM_AITER_FA": Backend(_FULL | _E4M3 | _E5M2, frozenset({64, 128, 256}), capability=None),
    "ROCM_AITER_UNIFIED_ATTN": Backend(_FULL | _E4M3 | _E5M2, capability=None),
    "FLASHMLA": Backend(_FULL | _E4M3, attention="latent", capability=(9.0, 10.9)),
    "CUTLASS_MLA": Backend(_FULL | _E4M3, attention="latent", capability=_BLACKWELL),
    "FLASHINFER_MLA": Backend(_FULL | _E4M3, attention="latent", capability=_BLACKWELL),
    "TOKENSPEED_MLA": Backend(_E4M3, attention="latent", capability=_BLACKWELL),
    "TRITON_MLA": Backend(_FULL | _E4M3, attention="latent"),
    "FLASH_ATTN_MLA": Backend(_FULL, attention="latent", capability=_HOPPER),
    "ROCM_AITER_MLA": Backend(_FULL | _E4M3 | _E5M2, attention="latent", capability=None),
    "CPU_MLA": Backend(frozenset({"auto"}), attention="latent", capability=None),
    "FLASHMLA_SPARSE": Backend(
        frozenset({"auto", "bfloat16", "fp8_ds_mla", "fp8", "nvfp4_ds_mla"}),
        attention="sparse",
        capability=(9.0, 10.9),
    ),
    "FLASHINFER_MLA_SPARSE": Backend(_FULL | _E4M3, attention="sparse", capability=_BLACKWELL),
    "FLASHINFER_MLA_SPARSE_SM90": Backend(
        frozenset({"auto", "bfloat16"}) | _E4M3, attention="sparse", capability=_HOPPER
    ),
    "FLASHINFER_MLA_SPARSE_SM120": Backend(
        frozenset({"auto", "fp8_ds_mla"}) | _E4M3, attention="sparse", capability=_CONSUMER
    ),
    "FLASH_ATTN_MLA_SPARSE": Backend(_FULL, attention="sparse", capability=_HOPPER),
    "ROCM_AITER_MLA_SPARSE": Backend(_FULL | _E4M3, attention="sparse", capability=None),
    "XPU_MLA_SPARSE": Backend(_FULL, attention="sparse", capability=None),
}

OTHER_NAMES = frozenset(
    {
        "FLASH_ATTN_DIFFKV",
        "TRITON_ATTN_DIFFKV",
        "TRITON_FLASH_ATTN",
        "ROCM_AITER_TRITON_MLA",
        "TORCH_SDPA",
        "TRITON_FLASHINFER",
        "FLASHMLA_SPARSE_DSV4",
        "FLASHINFER_MLA_SPARSE_DSV4",
        "ROCM_FLASHMLA_SPARSE_DSV4",
        "FLASHMLA_SPARSE_DSV41",
        "FLASHINFER_MLA_SPARSE_DSV41",
        "FLASHMLA_MEGA_ATTN_DSV41",
        "MINIMAX_M3_SPARSE",
        "CUTLASS_MSA",
        "TRITON_MSA",
        "NO_ATTENTION",
        "AMX_MLA",
        "CUSTOM",
    }
)
"""Backends that exist and are chosen by single models; nothing is said about them."""

_ORDINARY = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT")


def preference(attention: Attention, capability: float) -> tuple[str, ...]:
    """The backends that vLLM tries on a CUDA GPU of this compute capability, in its order."""
    major = int(capability)
    if attention == "ordinary":
        return ("FLASHINFER", "FLASH_ATTN", *_ORDINARY[2:]) if major == 10 else _ORDINARY
    if attention == "latent":
        if major == 10:
            return ("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "FLASHMLA", "TRITON_MLA")
        return ("TRITON_MLA",) if major == 12 else ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")
    if major == 12:
        return ("FLASHINFER_MLA_SPARSE_SM120",)
    if major == 10:
        return ("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE")
    return ("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90")


def chosen(attention: Attention, dtype: str, capability: float, head: int | None) -> str | None:
    """The backend that vLLM picks when none is named, or None if none of them holds this KV dtype."""
    for name in preference(attention, capability):
        backend = BACKENDS[name]
        fits = attention != "ordinary" or not (backend.heads and head) or head in backend.heads
        if (
            dtype in backend.dtypes
            and fits
            and selection_problem(name, dtype, capability, head) is None
        ):
            return name
    return None


def is_fp8(dtype: str) -> bool:
    """Whether a KV dtype is one of the eight-bit floats."""
    return dtype.startswith("fp8")


def selection_problem(
    name: str, dtype: str, capability: float, head: int | None = None
) -> str | None:
    """Why vLLM does not select a backend for this KV dtype on a GPU of this compute capability, or
    None.
    """
    backend = BACKENDS[name]
    if backend.capability is None:
        return f"{name} does not run on CUDA"
    low, high = backend.capability
    if not low <= capability <= high:
        span = f"{low}" if low == high else f"{low} and above" if high > 99 else f"{low} to {high}"
        return f"{name} runs on compute capability {span}"
    if name == "FLASH_ATTN" and dtype in _E4M3 and not 9.0 <= capability < 11.0:
        return "FlashAttention holds fp8 KV only on compute capability 9.0 (FA3) and 10.x (FA4)"
    if name == "FLASHINFER" and dtype.startswith("nvfp4"):
        return _nvfp4_problem(dtype, int(capability), head)
    return None


def _nvfp4_problem(dtype: str, major: int, head: int | None) -> str | None:
    if major == 11:
        return "FlashInfer holds no nvfp4 KV on compute capability 11"
    if major != 10 and dtype != "nvfp4":
        return f"FlashInfer holds {dtype} KV only on compute capability 10"
    if major != 10 and head == 64:
        return "FlashInfer misreads nvfp4 KV at a head size of 64 there"
    return None


def construction_problem(name: str, dtype: str, capability: float) -> str | None:
    """What a backend that was selected then raises when it is built."""
    if name != "TRITON_ATTN":
        return None
    if is_fp8(dtype) and capability < 8.9:
        return "Triton attention raises for any fp8 KV cache below compute capability 8.9"
    if dtype == "bfloat16" and capability < 8.0:
        return "Triton attention raises for a bfloat16 KV cache below compute capability 8.0"
    return None


# --kv-cache-dtype against checkpoint, backend and GPU.

_SCALES = "https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/"
_BACKENDS = "https://docs.vllm.ai/en/v0.32.0/design/attention_backends/"


@dataclass(frozen=True)
class KvChoice:
    """What the command line and the checkpoint decide together."""

    dtype: str
    backend: str | None
    capability: float | None


def choice(args: ServeArgs, capability: float | None) -> KvChoice:
    """The KV dtype and backend of a command line."""
    backend = args.get("--attention-backend")
    if backend is None:
        attention = args.structure("--attention-config") or {}
        named = attention.get("backend")
        backend = named if isinstance(named, str) else None
    dtype = (args.get("--kv-cache-dtype") or "auto").lower()
    return KvChoice(dtype, backend.upper() if backend else None, capability)


def lint_kv(
    checkpoint: Checkpoint, declared: Declared | None, cache: KvCache, kv: KvChoice
) -> Iterator[Finding]:
    """Combinations that the engine rejects, stores otherwise than it says, or runs without scales."""
    if kv.dtype not in KV_DTYPES:
        title = f"--kv-cache-dtype {kv.dtype} is not a KV-cache dtype of vLLM 0.32"
        yield found(
            "flag_rejected",
            title,
            flag="--kv-cache-dtype",
            value=kv.dtype,
            allowed=sorted(KV_DTYPES),
        )
        return
    attention = attention_of(checkpoint)
    head = None if attention != "ordinary" else Dims(checkpoint.text_config).head_dim or None
    backend = kv.backend
    if backend is not None:
        yield from _backend(kv, backend, attention, head)
    elif kv.capability is not None:
        backend = chosen(attention, kv.dtype, kv.capability, head)
        yield from _automatic(kv, backend, kv.capability, attention)
    yield from _e5m2(declared, cache, kv, attention, backend)
    yield from _scales(cache, kv)


def attention_of(checkpoint: Checkpoint) -> Attention:
    """Which kind of attention the config asks for."""
    if not checkpoint.dims("kv_lora_rank"):
        return "ordinary"
    return "sparse" if checkpoint.dims("index_topk") else "latent"


def _e5m2(
    declared: Declared | None,
    cache: KvCache,
    kv: KvChoice,
    attention: Attention,
    backend: str | None,
) -> Iterator[Finding]:
    if kv.dtype != "fp8_e5m2":
        return
    if declared is not None and _holds_kv_scales(declared, cache):
        title = (
            f"--kv-cache-dtype fp8_e5m2 is refused for a {declared.method} checkpoint, which has"
            " k/v scales of its own"
        )
        yield found("kv_dtype_conflict", title, remedies=["use fp8 (e4m3) or auto"], flag=kv.dtype)
    elif attention != "ordinary":
        title = "no CUDA backend for latent attention (MLA) holds fp8_e5m2"
        remedies = ["use fp8 or auto"]
        yield found(
            "kv_dtype_conflict", title, remedies=remedies, references=[_BACKENDS], flag=kv.dtype
        )
    elif backend == "TRITON_ATTN" and (kv.capability is None or kv.capability >= 8.9):
        title = "Triton attention stores fp8_e5m2 as e4m3: the label does not say what is stored"
        yield warned("kv_dtype_conflict", title, flag=kv.dtype, backend=backend)


def _holds_kv_scales(declared: Declared, cache: KvCache) -> bool:
    """Weight-only compressed-tensors checkpoints may take e5m2; those that declare a KV scheme may
    not.
    """
    if declared.method == "compressed-tensors":
        return cache.declared is not None
    return declared.method in {
        "fp8",
        "fbgemm_fp8",
        "modelopt",
        "modelopt_fp4",
        "modelopt_mixed",
        "quark",
    }


def _scales(cache: KvCache, kv: KvChoice) -> Iterator[Finding]:
    if kv.dtype in {"fp8", "fp8_e4m3"} and not cache.layers and not cache.dynamic:
        title = (
            f"--kv-cache-dtype {kv.dtype} on a checkpoint without k/v scales: the engine uses a"
            " scale of 1.0"
        )
        remedies = [
            "measure what it costs (assay compare, assay check), calibrate scales, or use auto"
        ]
        yield warned(
            "kv_dtype_conflict", title, remedies=remedies, references=[_SCALES], flag=kv.dtype
        )
    plain = kv.dtype in {"auto", "float16", "bfloat16"}
    if cache.declared and not plain and not _same(cache.declared, kv.dtype):
        title = (
            f"the checkpoint's KV scales are for {cache.declared}, the command line asks for"
            f" {kv.dtype}"
        )
        yield found(
            "kv_dtype_conflict",
            title,
            remedies=["use auto"],
            declared=cache.declared,
            flag=kv.dtype,
        )


def _same(declared: str, dtype: str) -> bool:
    return (declared.startswith("fp8") and is_fp8(dtype)) or (
        declared.startswith("nvfp4") and "nvfp4" in dtype
    )


def _automatic(
    kv: KvChoice, backend: str | None, capability: float, attention: Attention
) -> Iterator[Finding]:
    """No backend was named: is there one, and can it be built?"""
    evidence: dict[str, Any] = {
        "flag": kv.dtype,
        "compute_capability": capability,
        "chosen": backend,
    }
    if backend is None:
        kind = {
            "ordinary": "",
            "latent": " for latent attention",
            "sparse": " for sparse latent attention",
        }
        title = (
            f"no attention backend{kind[attention]} holds a {kv.dtype} KV cache on compute"
            f" capability {capability}"
        )
        yield found("kv_dtype_conflict", title, references=[_BACKENDS], **evidence)
    elif problem := construction_problem(backend, kv.dtype, capability):
        title = f"{problem}, and the engine would choose it here"
        yield found("kv_dtype_conflict", title, references=[_BACKENDS], **evidence)


def _backend(
    kv: KvChoice, backend: str, attention: Attention, head: int | None
) -> Iterator[Finding]:
    known = BACKENDS.get(backend)
    if known is None:
        if backend not in OTHER_NAMES:
            closest = get_close_matches(backend, sorted({*BACKENDS, *OTHER_NAMES}), n=1)
            title = f"{backend} is no attention backend of vLLM 0.32" + (
                f"; did you mean {closest[0]}?" if closest else ""
            )
            yield found("flag_rejected", title, flag="--attention-backend", references=[_BACKENDS])
        return
    if known.attention != attention:
        need = {"ordinary": "ordinary attention", "latent": "latent attention (MLA)",
                "sparse": "sparse latent attention"}  # fmt: skip
        title = (
            f"the backend {backend} is for {need[known.attention]}, this model uses"
            f" {need[attention]}"
        )
        yield found("flag_rejected", title, flag=backend)
        return
    if kv.dtype not in known.dtypes:
        title = f"the attention backend {backend} does not hold a {kv.dtype} KV cache"
        remedies = ["leave --attention-backend out, or choose another KV dtype"]
        evidence: dict[str, Any] = {
            "backend": backend,
            "flag": kv.dtype,
            "allowed": sorted(known.dtypes),
        }
        yield found(
            "kv_dtype_conflict", title, remedies=remedies, references=[_BACKENDS], **evidence
        )
    elif kv.capability is not None:
        problem = selection_problem(backend, kv.dtype, kv.capability, head)
        problem = problem or construction_problem(backend, kv.dtype, kv.capability)
        if problem:
            gpu: dict[str, Any] = {
                "backend": backend,
                "flag": kv.dtype,
                "compute_capability": kv.capability,
            }
            yield found("kv_dtype_conflict", problem, references=[_BACKENDS], **gpu)
    if known.heads is not None and head and head not in known.heads:
        title = f"the backend {backend} takes heads of {sorted(known.heads)}, this model has {head}"
        yield found("flag_rejected", title, backend=backend, head_dim=head)
