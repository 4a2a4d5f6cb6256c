"""Rotary position settings: old key against new key, scaling factors against lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from assay.checkpoint.blocks import Dims
from assay.checkpoint.findings import found, warned
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding

_TYPES = frozenset({
    "default", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "mrope", "proportional", "deepseek_yarn",
    "dynamic_alpha", "deepseek_llama_scaling", "xdrope",
})  # fmt: skip
_NEEDS_FACTOR = frozenset({"linear", "dynamic", "yarn", "llama3", "deepseek_yarn"})
_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def check_rope(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Contradictions in rope_scaling, rope_parameters and rope_theta."""
    config = checkpoint.text_config
    named = (config.get("rope_scaling"), config.get("rope_parameters"))
    both: list[Mapping[str, Any]] = [settings for settings in named if isinstance(settings, Mapping)]
    if len(both) == 2:
        differing = sorted(k for k in both[0] if k in both[1] and both[0][k] != both[1][k])
        if differing:
            title = f"rope_scaling and rope_parameters disagree on {', '.join(differing)}"
            yield found("config_conflict", title, rope_scaling=both[0], rope_parameters=both[1])
    for settings in both:
        yield from _settings(settings, config)
    theta = config.get("rope_theta")
    for settings in both:
        inner = settings.get("rope_theta")
        if isinstance(theta, int | float) and isinstance(inner, int | float) and theta != inner:
            title = f"rope_theta is {theta:g} at the top and {inner:g} in the rope settings"
            yield found("config_conflict", title, top=theta, nested=inner)
    if isinstance(theta, int | float) and theta <= 0:
        yield found("config_conflict", f"rope_theta is {theta:g}", rope_theta=theta)


def _settings(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Finding]:
    if settings and all(isinstance(v, Mapping) for v in settings.values()):  # one entry per kind of attention
        for inner in settings.values():
            yield from _settings(inner, config)
        return
    old, new = settings.get("type"), settings.get("rope_type")
    kind = new or old
    if old and new and old != new and {old, new} != {"su", "longrope"} and "mrope" not in {old, new}:
        references = ["https://github.com/vllm-project/vllm/issues/10293"]
        title = f"rope_scaling has type {old!r} and rope_type {new!r}: versions read one or the other"
        yield found("config_conflict", title, references=references, type=old, rope_type=new)
    if not isinstance(kind, str):
        return
    if kind not in _TYPES:
        yield warned("config_conflict", f"rope type {kind!r} is not one that engines know", rope_type=kind)
    factor = settings.get("factor")
    if kind in _NEEDS_FACTOR and not (isinstance(factor, int | float) and factor >= 1):
        yield found(
            "config_conflict", f"rope type {kind} needs a factor of at least 1, not {factor!r}", factor=factor
        )
    if kind == "llama3":
        lacking = [k for k in _LLAMA3 if not isinstance(settings.get(k), int | float)]
        if lacking:
            yield found("config_conflict", f"rope type llama3 lacks {', '.join(lacking)}", missing=lacking)
    if kind in {"longrope", "su"}:
        yield from _longrope(settings, config)
    original, limit = settings.get("original_max_position_embeddings"), config.get("max_position_embeddings")
    if type(original) is int and type(limit) is int and original > limit:
        title = f"original_max_position_embeddings {original} is beyond max_position_embeddings {limit}"
        yield found("config_conflict", title, original=original, limit=limit)


def _longrope(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[Finding]:
    d = Dims(config)
    partial = config.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    rotary = d.int_or("qk_rope_head_dim") or int(
        d.head_dim * partial if isinstance(partial, int | float) else d.head_dim
    )
    for key in ("short_factor", "long_factor"):
        factors = settings.get(key)
        if not isinstance(factors, list):
            yield found("config_conflict", f"rope type longrope lacks {key}", missing=key)
        elif rotary and len(factors) != rotary // 2:
            title = f"{key} has {len(factors)} entries, {rotary} rotary dimensions need {rotary // 2}"
            yield found("config_conflict", title, key=key, entries=len(factors), needed=rotary // 2)
