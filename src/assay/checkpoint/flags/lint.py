"""A `vllm serve` command line against the checkpoint that it is to serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from assay.checkpoint.declared import Declared
from assay.checkpoint.document_types import Document, clean
from assay.checkpoint.documents import CONFIG
from assay.checkpoint.findings import found, plural, unexamined, warned
from assay.checkpoint.flags.command import ServeArgs
from assay.checkpoint.flags.context import lint_context
from assay.checkpoint.flags.flag_values import lint_values
from assay.checkpoint.flags.known_bad import lint_known_bad
from assay.checkpoint.flags.kv_dtype import choice, lint_kv
from assay.checkpoint.flags.paths import lint_paths
from assay.checkpoint.flags.quantization import METHODS, MIN_CAPABILITY, ONLINE, Resolution, resolve
from assay.checkpoint.flags.switches import lint_switches
from assay.checkpoint.flags.versions import TABLED, Version
from assay.checkpoint.kv_cache import KvCache
from assay.checkpoint.mtp import MtpReport
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding, Severity

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
    if target.args.engine is not None:
        title = f"the command is one of {target.args.engine}: its flags were not examined"
        detail = "assay reads the options of `vllm serve`; it has no table of this engine's."
        yield unexamined(title, severity=Severity.WARNING, detail=detail, decisive=True)
        return
    yield from _unknown(target)
    yield from _values(target)
    yield from lint_switches(target.checkpoint, target.args)
    yield from lint_paths(target.checkpoint, target.args)
    yield from lint_context(target.checkpoint, target.args)
    yield from _quantization(target)
    kv = choice(target.args, target.capability)
    yield from lint_kv(target.checkpoint, target.declared, target.cache, kv)
    yield from lint_known_bad(target.checkpoint, target.declared, target.args, kv)
    yield from _speculation(target)
    yield from _shape(target)
    yield from _rope(target)


def _values(target: Target) -> Iterator[Finding]:
    """Values that the engine refuses; of a version without a table, a warning each."""
    exact = target.version is None or target.version == TABLED
    for finding in lint_values(target.args):
        yield finding if exact else replace(finding, severity=Severity.WARNING)


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
        method,
        flag,
        algorithm=declared.algorithm if declared else None,
        model_type=target.checkpoint.config.get("model_type"),
        version=target.version,
        allow_deprecated="--allow-deprecated-quantization" in args.options,
    )
    if method is None and outcome.status == "accepted" and outcome.method in METHODS - ONLINE:
        reason = (
            f"{outcome.method} reads quantised tensors and their settings, and no file declares any"
        )
        outcome = Resolution("rejected", None, reason)
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
    parallel = target.args.get("--tensor-parallel-size")
    heads = target.checkpoint.dims("num_attention_heads")
    if parallel and parallel.isdigit() and int(parallel) > 0 and heads and heads % int(parallel):
        title = f"--tensor-parallel-size {parallel} does not divide the {heads} attention heads"
        yield found("flag_rejected", title, flag="--tensor-parallel-size", heads=heads)
    stored = {t.dtype for t in target.checkpoint.tensors.values()}
    if (
        target.args.get("--dtype") in {"float16", "half"}
        and "BF16" in stored
        and "F16" not in stored
    ):
        title = "--dtype float16 on bfloat16 weights: values beyond 65504 overflow to inf"
        yield warned("config_conflict", title, remedies=["use --dtype auto"], flag="--dtype")


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
