"""Rotary position settings: old key against new key, scaling factors against lengths."""

from __future__ import annotations

from collections.abc import Iterator

from assay.checkpoint.document_types import Document
from assay.checkpoint.documents import ROPE
from assay.checkpoint.findings import found, warned
from assay.checkpoint.pieces import Dims
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding

_TYPES = frozenset(
    {
        "default",
        "linear",
        "dynamic",
        "yarn",
        "longrope",
        "su",
        "llama3",
        "mrope",
        "proportional",
        "deepseek_yarn",
        "dynamic_alpha",
        "deepseek_llama_scaling",
        "xdrope",
    }
)

_NEEDS_FACTOR = frozenset({"linear", "dynamic", "yarn", "llama3", "deepseek_yarn"})

_SCALING = frozenset(
    {"factor", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor"}
    | {"beta_fast", "beta_slow"}
)
"""Settings that mean nothing without a type."""
_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def check_rope(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Contradictions in rope_scaling, rope_parameters and rope_theta."""
    config = checkpoint.text_config
    both: list[Document] = [
        s for key in ("rope_scaling", "rope_parameters") if (s := config.get(key)) is not None
    ]
    if len(both) == 2:
        differing = sorted(k for k in both[0] if k in both[1] and both[0][k] != both[1][k])
        if differing:
            title = f"rope_scaling and rope_parameters disagree on {', '.join(differing)}"
            yield found("config_conflict", title, rope_scaling=both[0], rope_parameters=both[1])
    theta = config.get("rope_theta")
    for settings in both:
        yield from _settings(settings, config)
        inner = settings.get("rope_theta")
        if theta is not None and inner is not None and theta != inner:
            title = (
                f"rope_theta is {_shown(theta)} at the top and {_shown(inner)} in the rope settings"
            )
            yield found("config_conflict", title, top=theta, nested=inner)


def _shown(value: float | list[float]) -> str:
    return str(value)[:40] if isinstance(value, list) else f"{value:g}"


def _settings(settings: Document, config: Document) -> Iterator[Finding]:
    for key, inner in settings.items():
        if key not in ROPE and isinstance(inner, dict):  # one entry per kind of attention
            yield from _settings(inner, config)
    old, new = settings.get("type"), settings.get("rope_type")
    kind = new or old
    if (
        old
        and new
        and old != new
        and {old, new} != {"su", "longrope"}
        and "mrope" not in {old, new}
    ):
        references = ["https://github.com/vllm-project/vllm/issues/10293"]
        title = (
            f"rope_scaling has type {old!r} and rope_type {new!r}: versions read one or the other"
        )
        yield found("config_conflict", title, references=references, type=old, rope_type=new)
    if not kind:
        yield from _untyped(settings)
        return
    if kind not in _TYPES:
        yield warned(
            "config_conflict",
            f"rope type {kind[:40]!r} is not one that engines know",
            rope_type=kind[:40],
        )
    factor = settings.get("factor")
    if kind in _NEEDS_FACTOR and (factor is None or factor < 1):
        given = "gives none" if factor is None else f"gives {factor:g}"
        title = f"rope type {kind} needs a factor of at least 1, the config {given}"
        yield found("config_conflict", title, factor=factor)
    lacking = [k for k in _LLAMA3 if settings.get(k) is None] if kind == "llama3" else []
    if lacking:
        yield found(
            "config_conflict", f"rope type llama3 lacks {', '.join(lacking)}", missing=lacking
        )
    if kind in {"longrope", "su"}:
        yield from _longrope(settings, config)
    original, limit = (
        settings.get("original_max_position_embeddings"),
        config.get("max_position_embeddings"),
    )
    if original and limit and original > limit:
        title = (
            f"original_max_position_embeddings {original} is beyond max_position_embeddings {limit}"
        )
        yield found("config_conflict", title, original=original, limit=limit)


def _untyped(settings: Document) -> Iterator[Finding]:
    """Scaling without a type: some engines stop, others do not scale."""
    scaling = sorted(_SCALING & {k for k, v in settings.items() if v is not None})
    if scaling:
        title = f"the rope settings give {', '.join(scaling)} and no rope_type"
        detail = "Some engines refuse such settings, others take rope without scaling."
        remedies = ["add rope_type, as the original repository has it"]
        yield found("config_conflict", title, detail=detail, remedies=remedies, keys=scaling)


def _longrope(settings: Document, config: Document) -> Iterator[Finding]:
    d, partial = (
        Dims(config),
        config.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0,
    )
    rotary = d.get("qk_rope_head_dim") or int(d.head_dim * partial)
    for key in ("short_factor", "long_factor"):
        factors = settings.get(key)
        if factors is None:
            yield found("config_conflict", f"rope type longrope lacks {key}", missing=key)
        elif rotary and len(factors) != rotary // 2:
            title = (
                f"{key} has {len(factors)} entries, {rotary} rotary dimensions need {rotary // 2}"
            )
            yield found("config_conflict", title, key=key, entries=len(factors), needed=rotary // 2)
