"""A `vllm serve` command line against the checkpoint it is to serve."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from assay.checkpoint import found, plural, warned
from assay.checkpoint.declared import Declared
from assay.checkpoint.documents import CONFIG, Document, clean
from assay.checkpoint.draft import draft_kind
from assay.checkpoint.mtp import MtpReport
from assay.checkpoint.quantization import KvCache
from assay.checkpoint.serve_args import TABLED, KvChoice, ServeArgs, Version, choice, lint_kv
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding

# Combinations of model and flag that people found broken: warnings, each with where it was
# reported.


@dataclass(frozen=True)
class Case:
    """What is known about one command line and checkpoint."""

    model_type: str
    method: str | None
    kv: str
    dtype: str | None
    hidden: int
    experts: int = 0
    connector: bool = False
    marlin_input: str | None = None


@dataclass(frozen=True)
class Report:
    """One combination: when it applies, what was seen, where."""

    name: str
    applies: Callable[[Case], bool]
    symptom: str
    reference: str
    finding: str = "kv_dtype_conflict"


_MODELOPT = frozenset({"modelopt", "modelopt_fp4"})
_INTEGERS = frozenset({"auto-round", "gptq", "awq", "compressed-tensors"})
_VLLM = "https://github.com/vllm-project/vllm/issues/"

REPORTS = (
    Report(
        "Qwen2-7B family with an fp8 KV cache",
        lambda c: c.model_type == "qwen2" and c.kv.startswith("fp8") and c.hidden in {3584, 4096},
        "repeats itself, then nonsense; auto cures it",
        "https://github.com/QwenLM/Qwen3/issues/840",
    ),
    Report(
        "Qwen2-VL or Qwen2.5-VL with an fp8_e5m2 KV cache",
        lambda c: c.model_type.startswith(("qwen2_vl", "qwen2_5_vl")) and c.kv == "fp8_e5m2",
        "silent corruption",
        f"{_VLLM}41343",
    ),
    Report(
        "GLM-4.7-Flash (MLA) with an fp8 KV cache",
        lambda c: c.model_type == "glm4_moe_lite" and c.kv.startswith("fp8"),
        "fine on the first turn, a flood of ! on later ones",
        f"{_VLLM}38652",
    ),
    Report(
        "GLM-5 FP8 with a bfloat16 KV cache",
        lambda c: c.model_type == "glm_moe_dsa" and c.method == "fp8" and c.kv == "bfloat16",
        "nonsense; an fp8 KV cache cures it",
        f"{_VLLM}44550",
    ),
    Report(
        "Qwen3.5 in NVFP4 with an fp8 KV cache that a connector moves to another server",
        lambda c: (
            c.model_type.startswith("qwen3_5")
            and c.method in _MODELOPT
            and c.kv.startswith("fp8")
            and c.connector
        ),
        "corrupt answers, though each server alone is right",
        f"{_VLLM}42179",
    ),
    Report(
        "an INT4 mixture of experts with VLLM_MARLIN_INPUT_DTYPE=fp8",
        lambda c: c.marlin_input == "fp8" and c.experts > 0 and c.method in _INTEGERS,
        "endless </think> at temperature 0, a little faster than before",
        f"{_VLLM}49546",
        "config_conflict",
    ),
    Report(
        "a bfloat16 model of the Qwen family, GPTQ or AWQ, served in float16",
        lambda c: (
            c.model_type.startswith("qwen")
            and c.method in {"gptq", "awq"}
            and c.dtype in {"float16", "half"}
        ),
        "overflow to inf and NaN, printed as a flood of !",
        f"{_VLLM}14126",
        "config_conflict",
    ),
)


def lint_known_bad(
    checkpoint: Checkpoint, declared: Declared | None, args: ServeArgs, kv: KvChoice
) -> Iterator[Finding]:
    """A warning for every reported combination that this command line repeats."""
    sizes = (
        checkpoint.dims(key) or 0
        for key in ("num_experts", "n_routed_experts", "num_local_experts")
    )
    case = Case(
        checkpoint.model_type,
        declared.method if declared else None,
        kv.dtype,
        args.get("--dtype"),
        checkpoint.dims("hidden_size") or 0,
        max(sizes),
        args.structure("--kv-transfer-config") is not None,
        args.environment.get("VLLM_MARLIN_INPUT_DTYPE"),
    )
    for report in REPORTS:
        if report.applies(case):
            title = f"reported as broken: {report.name} ({report.symptom})"
            remedies = ["check the running server with assay check before trusting it"]
            yield warned(report.finding, title, remedies=remedies, references=[report.reference])


# What vLLM makes of `--quantization` for each kind of checkpoint.
#
# The rules below were read off vLLM 0.32's own `ModelConfig._verify_quantization`. Older versions
# differ where `resolve` says so.

METHODS = frozenset(
    {
        "awq",
        "auto_awq",
        "fp8",
        "fbgemm_fp8",
        "fp_quant",
        "modelopt",
        "modelopt_fp4",
        "modelopt_mxfp8",
        "modelopt_mixed",
        "auto_gptq",
        "gptq",
        "gptq_marlin",
        "awq_marlin",
        "humming",
        "compressed-tensors",
        "experts_int8",
        "quark",
        "moe_wna16",
        "torchao",
        "inc",
        "mxfp4",
        "gpt_oss_mxfp4",
        "deepseek_v4_fp8",
        "online",
        "fp8_per_tensor",
        "fp8_per_block",
        "fp8_per_channel",
        "int8_per_channel_weight_only",
        "nvfp4_per_token",
        "mxfp8",
    }
)
DEPRECATED = frozenset({"fbgemm_fp8", "fp_quant"})
ONLINE = frozenset(
    {
        "fp8",
        "fp8_per_tensor",
        "fp8_per_block",
        "fp8_per_channel",
        "mxfp8",
        "mxfp4",
        "int8_per_channel_weight_only",
        "nvfp4_per_token",
        "online",
        "experts_int8",
        "humming",
    }
)
"""Methods that quantise a plain checkpoint while it loads; the others need quantised tensors."""

_SYNONYMS = {
    "awq": ("auto_awq", frozenset({"awq", "awq_marlin", "auto_awq", "marlin"})),
    "gptq": ("auto_gptq", frozenset({"gptq", "gptq_marlin", "auto_gptq", "marlin"})),
}
_DEEPSEEK_V4 = frozenset({"deepseek_v4", "deepseek_v4_text", "deepseek_v41", "deepseek_v41_text"})
_PLUGINS = {"bitsandbytes": "vllm-bnb-plugin", "gguf": "vllm-gguf-plugin"}
_LAST_WITH_BNB = Version((0, 27, 1))
_FIRST_INC = Version((0, 15, 0))


@dataclass(frozen=True)
class Outcome:
    """`method` is what the engine will use; `status` what became of the flag."""

    status: Literal["accepted", "ignored", "rejected", "plugin"]
    method: str | None
    reason: str = ""


def modelopt_method(algorithm: str | None) -> str:
    """vLLM's name for a ModelOpt checkpoint by its `quant_algo`."""
    name = (algorithm or "").upper()
    if "MIXED" in name:
        return "modelopt_mixed"
    if "NVFP4" in name:
        return "modelopt_fp4"
    return "modelopt_mxfp8" if "MXFP8" in name else "modelopt"


def resolve(
    method: str | None,
    flag: str | None,
    *,
    algorithm: str | None = None,
    model_type: str | None = None,
    version: Version | None = None,
    allow_deprecated: bool = False,
) -> Outcome:
    """What becomes of `--quantization flag` on a checkpoint whose `quant_method` is `method` (None:
    plain).
    """
    version = version or TABLED
    flag = flag.lower() if flag and flag.lower() != "none" else None
    forced = _forced(method, algorithm, model_type, version)
    if method == "fp8" and flag == "deepseek_v4_fp8":
        return Outcome("accepted", flag)
    if flag == "humming" and method is not None:
        if forced == "gpt_oss_mxfp4":
            return Outcome(
                "rejected", None, "for gpt-oss the engine wants --moe-backend humming instead"
            )
        return Outcome("accepted", "humming")
    if forced is not None:
        aliases = {None, forced, method, "inc" if forced == "inc" else forced}
        return Outcome("accepted" if flag in aliases else "ignored", forced)
    chosen = method
    if method in _SYNONYMS:
        name, synonyms = _SYNONYMS[method]
        if flag == "moe_wna16":
            return Outcome("accepted", "moe_wna16")
        if flag is None or flag in synonyms:
            return Outcome("accepted", name)
    if method is None:
        chosen = flag
    elif flag is not None and flag != method:
        return Outcome(
            "rejected", None, f"the checkpoint is {method}; the engine stops on the mismatch"
        )
    return _final(chosen, version, allow_deprecated)


def _forced(
    method: str | None, algorithm: str | None, model_type: str | None, version: Version
) -> str | None:
    """The method that these checkpoints get whatever the flag says."""
    if method in {"auto-round", "inc"}:
        return "inc" if version >= _FIRST_INC else None
    if method in {"modelopt", "modelopt_fp4", "modelopt_mixed"}:
        return method if method != "modelopt" else modelopt_method(algorithm)
    if method == "fp8" and model_type in _DEEPSEEK_V4:
        return "deepseek_v4_fp8"
    return "gpt_oss_mxfp4" if method == "mxfp4" and model_type == "gpt_oss" else None


def _final(method: str | None, version: Version, allow_deprecated: bool) -> Outcome:
    if method is None:
        return Outcome("accepted", None)
    if method == "bitsandbytes" and version <= _LAST_WITH_BNB:
        return Outcome("accepted", method)
    if method == "auto-round" and version < _FIRST_INC:
        return Outcome("accepted", method)
    if method in _PLUGINS:
        plugin = _PLUGINS[method]
        return Outcome(
            "plugin",
            None,
            f"vLLM {version} loads {method} only with {plugin}; without it the name is unknown",
        )
    if method not in METHODS:
        return Outcome("rejected", None, f"vLLM {version} knows no quantisation method {method!r}")
    if method in DEPRECATED and not allow_deprecated:
        return Outcome("rejected", None, f"{method} needs --allow-deprecated-quantization")
    return Outcome("accepted", method)


MIN_CAPABILITY: dict[str, float] = {
    "auto_gptq": 6.0,
    "inc": 6.0,
    "compressed-tensors": 7.0,
    "quark": 7.0,
    "moe_wna16": 7.0,
    "auto_awq": 7.5,
    "fp8": 7.5,
    "torchao": 7.5,
    "modelopt_fp4": 7.5,
    "humming": 7.5,
    "online": 7.5,
    "modelopt": 8.0,
    "mxfp8": 8.0,
    "mxfp4": 8.0,
    "gpt_oss_mxfp4": 8.0,
    "modelopt_mxfp8": 8.0,
    "experts_int8": 8.0,
    "fbgemm_fp8": 8.0,
    "fp_quant": 10.0,
}
"""Lowest CUDA compute capability by resolved method (class minima of 0.32)."""


_DOCS = "https://docs.vllm.ai/en/v0.32.0/features/quantization/"


@dataclass(frozen=True)
class Target:
    """Everything that a lint of the command line looks at."""

    checkpoint: Checkpoint
    declared: Declared | None
    cache: KvCache
    mtp: MtpReport
    args: ServeArgs
    version: Version | None
    capability: float | None = None


def lint(target: Target) -> Iterator[Finding]:
    """All findings on a command line."""
    yield from _unknown(target)
    yield from _quantization(target)
    kv = choice(target.args, target.capability)
    yield from lint_kv(target.checkpoint, target.declared, target.cache, kv)
    yield from lint_known_bad(target.checkpoint, target.declared, target.args, kv)
    yield from _speculation(target)
    yield from _shape(target)
    yield from _rope(target)


def _unknown(target: Target) -> Iterator[Finding]:
    exact = target.version is None or target.version == TABLED
    for flag, close in target.args.unknown.items():
        engine = (
            f"vLLM {TABLED}"
            if exact
            else f"vLLM {TABLED} (the version {target.version} has no table)"
        )
        title = f"{flag} is no option of {engine}" + (f"; did you mean {close}?" if close else "")
        write = found if exact else warned
        detail = "vLLM refuses to start with an option that it does not know."
        yield write("flag_unknown", title, detail=detail, flag=flag, closest=close)


def _quantization(target: Target) -> Iterator[Finding]:
    args, declared = target.args, target.declared
    flag, method = args.get("--quantization"), declared.method if declared else None
    outcome = resolve(
        method, flag, algorithm=declared.algorithm if declared else None,
        model_type=target.checkpoint.config.get("model_type"), version=target.version,
        allow_deprecated="--allow-deprecated-quantization" in args.options,
    )  # fmt: skip
    if method is None and outcome.status == "accepted" and outcome.method in METHODS - ONLINE:
        reason = (
            f"{outcome.method} reads quantised tensors and their settings, and no file declares any"
        )
        outcome = Outcome("rejected", None, reason)
    subject = f"a {method} checkpoint" if method else "a checkpoint that declares no quantisation"
    evidence: dict[str, Any] = {"flag": flag, "quant_method": method, "resolved": outcome.method}
    if outcome.status == "ignored":
        title = f"--quantization {flag} is ignored on {subject}: the engine uses {outcome.method}"
        yield warned(
            "flag_ignored", title, remedies=["leave the flag out"], references=[_DOCS], **evidence
        )
    elif outcome.status == "rejected":
        title = f"--quantization {flag} is rejected on {subject}: {outcome.reason}"
        if flag is None:
            title = f"vLLM rejects {subject}: {outcome.reason}"
        remedies = (
            ["leave the flag out; the engine reads the method from the checkpoint"] if flag else []
        )
        if method is None:
            remedies.append(
                "to quantise plain weights while they load: --quantization fp8_per_tensor"
            )
        yield found("flag_rejected", title, remedies=remedies, references=[_DOCS], **evidence)
    elif outcome.status == "plugin":
        remedies = ["install the plugin, or use another engine"]
        yield found("flag_rejected", outcome.reason, remedies=remedies, **evidence)
    lowest = MIN_CAPABILITY.get(outcome.method or "")
    if lowest and target.capability is not None and target.capability < lowest:
        title = (
            f"{outcome.method} needs compute capability {lowest}, the GPU has {target.capability}"
        )
        yield found("flag_rejected", title, **evidence)


def _speculation(target: Target) -> Iterator[Finding]:
    settings = target.args.structure("--speculative-config")
    if settings is None:
        return
    method, count = settings.get("method"), settings.get("num_speculative_tokens")
    own_head = method in {
        "mtp",
        "deepseek_mtp",
        "qwen3_next_mtp",
        "glm4_moe_mtp",
        "mimo_mtp",
        "ernie_mtp",
    }
    if own_head and "model" not in settings:
        if target.checkpoint.config.get("model_type") == "deepseek_v41":
            title = "method mtp is refused for DeepSeek V4.1: its checkpoint carries DSpark stages"
            yield found("flag_rejected", title, flag="--speculative-config")
        elif target.mtp.status == "none":
            title = "the command line speculates with the checkpoint's own head, and it has none"
            remedies = ["leave --speculative-config out, or name a draft model"]
            yield found("mtp_missing", title, remedies=remedies, flag="--speculative-config")
    if type(count) is int and own_head and target.mtp.announced and count > target.mtp.announced:
        title = (
            f"{count} speculative tokens from a head of {plural(target.mtp.announced, 'layer')}: it"
            " is run again"
        )
        detail = (
            "Later positions are accepted less often; measure with assay spec whether they pay."
        )
        yield warned("config_conflict", title, detail=detail, flag="num_speculative_tokens")


def _shape(target: Target) -> Iterator[Finding]:
    config = target.checkpoint.text_config
    parallel = target.args.get("--tensor-parallel-size")
    heads = target.checkpoint.dims("num_attention_heads")
    if parallel and parallel.isdigit() and int(parallel) > 0 and heads and heads % int(parallel):
        title = f"--tensor-parallel-size {parallel} does not divide the {heads} attention heads"
        yield found("flag_rejected", title, flag="--tensor-parallel-size", heads=heads)
    length, limit = (
        _number(target.args.get("--max-model-len")),
        target.checkpoint.dims("max_position_embeddings"),
    )
    scaled = config.get("rope_scaling") or "rope_scaling" in (
        target.args.get("--hf-overrides") or ""
    )
    if length and limit and length > limit and not scaled:
        title = f"--max-model-len {length} is beyond the model's {limit} positions"
        yield found(
            "flag_rejected", title, remedies=["lower it, or configure rope scaling"], limit=limit
        )
    stored = {t.dtype for t in target.checkpoint.tensors.values()}
    if (
        target.args.get("--dtype") in {"float16", "half"}
        and "BF16" in stored
        and "F16" not in stored
    ):
        title = "--dtype float16 on bfloat16 weights: values beyond 65504 overflow to inf"
        yield warned("config_conflict", title, remedies=["use --dtype auto"], flag="--dtype")


def _number(text: str | None) -> int | None:
    """`8192`, `8k` (thousands) or `8K` (1024s), as vLLM reads them."""
    if not text:
        return None
    factor = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}.get(text[-1])
    digits = text[:-1] if factor else text
    try:
        return int(float(digits) * (factor or 1))
    except (ValueError, OverflowError):
        return None


def _rope(target: Target) -> Iterator[Finding]:
    overrides = target.args.structure("--hf-overrides")
    if not overrides:
        return
    own, given = _theta(target.checkpoint.text_config), _theta(clean(overrides, CONFIG)[0])
    if own and given and own != given:
        title = f"--hf-overrides sets rope_theta to {given:g}, the model was trained with {own:g}"
        references = ["https://github.com/vllm-project/vllm-ascend/issues/5201"]
        yield warned("config_conflict", title, references=references, trained=own, override=given)


def _theta(config: Document) -> float | None:
    nested = (
        (config.get(key) or {}).get("rope_theta") for key in ("rope_parameters", "rope_scaling")
    )
    value = next((v for v in (*nested, config.get("rope_theta")) if v is not None), None)
    return None if isinstance(value, list) else value


# The `vllm serve` flags that fit a checkpoint, as one command.


def advise(
    checkpoint: Checkpoint,
    model: str,
    declared: Declared | None,
    cache: KvCache,
    mtp: MtpReport,
    version: Version | None,
) -> dict[str, object]:
    """`{command, notes}`: flags are named only where the checkpoint gives a reason for them."""
    if draft_kind(checkpoint) is not None:
        return _draft(checkpoint, model)
    words = ["vllm", "serve", model]
    notes: list[str] = []
    if declared is not None:
        outcome = resolve(
            declared.method, None, algorithm=declared.algorithm,
            model_type=checkpoint.config.get("model_type"), version=version,
        )  # fmt: skip
        if outcome.status == "accepted":
            notes.append(
                f"leave --quantization out: the engine reads {declared.method} and uses"
                f" {outcome.method}"
            )
            if outcome.method in MIN_CAPABILITY:
                notes.append(
                    f"{outcome.method} needs a CUDA compute capability of"
                    f" {MIN_CAPABILITY[outcome.method]}"
                )
        else:
            notes.append(outcome.reason)
    if cache.declared and (cache.layers or cache.dynamic):
        notes.append(
            f"leave --kv-cache-dtype out: auto takes the {cache.declared} scheme of the checkpoint"
        )
    elif cache.declared:
        words += ["--kv-cache-dtype", "bfloat16"]
        notes.append(
            f"the {cache.declared} KV cache that is declared has no scales: auto would use 1.0 for"
            " them"
        )
    if mtp.status in {"ok", "declared_quantized"} and mtp.announced:
        settings = f'{{"method":"mtp","num_speculative_tokens":{max(mtp.announced, 1)}}}'
        words += ["--speculative-config", settings]
    if mtp.status in {"absent", "partial", "dtype_conflict"}:
        notes.append("no --speculative-config: the head would draft nothing that is accepted")
    if mtp.announced and declared is not None:
        words += ["--model-loader-extra-config", '{"enable_weights_track":true}']
        notes.append(
            "enable_weights_track makes a head that the checkpoint does not fill loud at load"
        )
    return {"command": shlex.join(words), "notes": notes}


def _draft(checkpoint: Checkpoint, model: str) -> dict[str, object]:
    """A draft is served beside its target."""
    settings = (
        f'{{"method":"{draft_kind(checkpoint)}","model":"{model}","num_speculative_tokens":3}}'
    )
    notes = [
        "a draft cannot be served alone: TARGET is the model that it was trained for",
        "hold the pair together first: assay verify TARGET --serve-args with this command",
    ]
    return {
        "command": shlex.join(["vllm", "serve", "TARGET", "--speculative-config", settings]),
        "notes": notes,
    }
