"""Who announces a multi-token-prediction head, where, and which tensors it then owes.

One `Family` per layout. `tensors` gives names and shapes for one head of `depth` layers; families whose inner layout
differs from config to config give only `prefix`, and their head is then judged by presence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from assay.checkpoint import blocks
from assay.checkpoint.blocks import Dims, Piece

Layout = Callable[[Dims, int], Iterator[Piece]]
"""(dimensions, depth) to (full tensor name, shape)."""


@dataclass(frozen=True)
class Family:
    """One way to ship a head.

    `keys` announce its depth, at the top level or in the text config; `default` holds where no key is given.
    `prefixes(depth, layers)` are the beginnings of its tensor names. `checked_since` is the vLLM version from which
    the loader refuses a missing head for this family, None where no version does.
    """

    name: str
    keys: tuple[str, ...]
    prefixes: Callable[[int, int], tuple[str, ...]]
    layout: Layout | None = None
    default: int = 0
    forced: int | None = None
    checked_since: str | None = None
    draft_class: str = ""


_NEXTN = ("num_nextn_predict_layers", "num_mtp_layers")


def _under(*prefixes: str) -> Callable[[int, int], tuple[str, ...]]:
    return lambda depth, layers: prefixes


def _after_layers(depth: int, layers: int) -> tuple[str, ...]:
    """Layers counted on after the backbone's last; without an announced depth, one is looked for."""
    return tuple(f"model.layers.{layers + i}." for i in range(max(depth, 1)))


def _below(parent: str, pieces: Iterator[Piece]) -> Iterator[Piece]:
    return ((f"{parent}.{name}", shape) for name, shape in pieces)


_PRE_POST = ("input_layernorm", "post_attention_layernorm")


def _qwen_head(d: Dims, depth: int, moe: bool) -> Iterator[Piece]:
    """Qwen3.5 and Qwen3-Next: fc over embedding and hidden state, then full-attention layers. Dense: 15 tensors."""
    yield from blocks.linear("mtp.fc", d.hidden, 2 * d.hidden)
    yield from _below("mtp", blocks.norms(d, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"))
    for i in range(depth):
        at = f"mtp.layers.{i}"
        yield from _below(at, blocks.attention(d, qk_norm="head", gated=True))
        if moe:
            yield from _below(at, blocks.shared_expert_moe(d))
        else:
            yield from _below(at, blocks.gated_mlp(d, d.int_or("intermediate_size")))
        yield from _below(at, blocks.norms(d, *_PRE_POST))


def qwen_dense(d: Dims, depth: int) -> Iterator[Piece]:
    """Qwen3.5 dense."""
    return _qwen_head(d, depth, moe=False)


def qwen_moe(d: Dims, depth: int) -> Iterator[Piece]:
    """Qwen3-Next and Qwen3.5 MoE."""
    return _qwen_head(d, depth, moe=bool(d.int_or("num_experts")))


def _glue(d: Dims, at: str) -> Iterator[Piece]:
    yield from _below(at, blocks.norms(d, "enorm", "hnorm", "shared_head.norm"))
    yield from blocks.linear(f"{at}.eh_proj", d.hidden, 2 * d.hidden)


def deepseek(d: Dims, depth: int) -> Iterator[Piece]:
    """DeepSeek V3: a whole MoE layer after the last, with its own norms and entry projection."""
    for i in range(depth):
        at = f"model.layers.{d.layers + i}"
        yield from _glue(d, at)
        yield from _below(at, blocks.latent_attention(d))
        yield from _below(at, blocks.grouped_moe(d))
        yield from _below(at, blocks.norms(d, *_PRE_POST))


def glm(d: Dims, depth: int) -> Iterator[Piece]:
    """GLM-4.5: DeepSeek's layout around grouped-query attention."""
    qk_norm = "head" if d.flag("use_qk_norm") else ""
    for i in range(depth):
        at = f"model.layers.{d.layers + i}"
        yield from _glue(d, at)
        yield from _below(at, blocks.attention(d, qkv_bias=d.flag("attention_bias"), qk_norm=qk_norm))
        yield from _below(at, blocks.grouped_moe(d))
        yield from _below(at, blocks.norms(d, *_PRE_POST))


def mimo(d: Dims, depth: int) -> Iterator[Piece]:
    """MiMo-7B: Qwen2 layers below model.mtp_layers."""
    for i in range(depth):
        at = f"model.mtp_layers.{i}"
        yield from _below(at, blocks.norms(d, "token_layernorm", "hidden_layernorm", "final_layernorm"))
        yield from blocks.linear(f"{at}.input_proj", d.hidden, 2 * d.hidden)
        yield from _below(at, blocks.attention(d, qkv_bias=True))
        yield from _below(at, blocks.gated_mlp(d, d.int_or("intermediate_size")))
        yield from _below(at, blocks.norms(d, *_PRE_POST))


def ernie(d: Dims, depth: int) -> Iterator[Piece]:
    """ERNIE-4.5-MoE: a dense Llama block; glue in modules of its own."""
    for i in range(depth):
        yield from blocks.norms(d, f"model.mtp_emb_norm.{i}", f"model.mtp_hidden_norm.{i}")
        yield from blocks.linear(f"model.mtp_linear_proj.{i}", d.hidden, 2 * d.hidden)
        at = f"model.mtp_block.{i}"
        yield from _below(at, blocks.attention(d))
        yield from _below(at, blocks.gated_mlp(d, d.int_or("intermediate_size")))
        yield from _below(at, blocks.norms(d, *_PRE_POST))


_QWEN35 = Family("qwen3.5", ("mtp_num_hidden_layers",), _under("mtp."), qwen_dense, draft_class="Qwen3_5MTP")
_QWEN35_MOE = Family(
    "qwen3.5-moe", ("mtp_num_hidden_layers",), _under("mtp."), qwen_moe, draft_class="Qwen3_5MoeMTP"
)
_DEEPSEEK = Family(
    "deepseek-v3", _NEXTN, _after_layers, deepseek, checked_since="0.32.0", draft_class="DeepSeekMTPModel"
)
_STEP = Family("step3.5", _NEXTN, _after_layers, checked_since="0.32.0", default=1, draft_class="Step3p5MTP")
_BAILING = Family(
    "bailing", _NEXTN, _after_layers, checked_since="0.32.0", draft_class="BailingMoeV25MTPModel"
)
_MIMO_V2 = Family("mimo-v2", _NEXTN, _under("model.mtp."), forced=1, draft_class="MiMoV2MTPModel")
_NEMOTRON = Family(
    "nemotron-h", _NEXTN, _under("mtp.", "language_model.mtp."), draft_class="NemotronHMTPModel"
)
_EXAONE = Family("exaone", _NEXTN, _under("mtp."), default=1, draft_class="ExaoneMoeMTP")

_QWEN4 = Family("qwen4-exp", ("mtp_num_hidden_layers", *_NEXTN), _under("mtp."), draft_class="Qwen4ExpMTP")
_DEEPSEEK_V4 = Family(
    "deepseek-v4", _NEXTN, _under("mtp."), checked_since="0.32.0", draft_class="DeepSeekV4MTPModel"
)
_GLM5_NEXT = Family(
    "glm5-next", _NEXTN, _after_layers, checked_since="0.32.0", draft_class="Glm5NextMTPModel"
)
_MINIMAX = Family(
    "minimax-m3", ("num_mtp_modules",), _under("mtp.", "model.mtp."), checked_since="0.32.0",
    draft_class="MiniMaxM3MTP",
)  # fmt: skip
_INKLING = Family(
    "inkling", ("num_mtp_layers", "mtp_config.num_nextn_predict_layers"), _under("mtp.", "model.mtp."),
    checked_since="0.32.0", draft_class="InklingMTPModel",
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "qwen3_5": _QWEN35, "qwen3_5_text": _QWEN35, "qwen3_5_moe": _QWEN35_MOE, "qwen3_5_moe_text": _QWEN35_MOE,
    "intern_s2_preview": _QWEN35, "interns2_mobius": Family(
        "intern-s2-mobius", ("mtp_num_hidden_layers",), _under("mtp."), draft_class="InternS2MobiusMTP"
    ),
    "qwen3_next": Family("qwen3-next", _NEXTN, _under("mtp."), qwen_moe, default=1, draft_class="Qwen3NextMTP"),
    "qwen4_exp": _QWEN4, "qwen4_exp_text": _QWEN4,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": Family(
        "deepseek-v3.2", _NEXTN, _after_layers, checked_since="0.32.0", draft_class="DeepseekV32MTPModel"
    ),
    "glm_moe_dsa": Family(
        "glm-moe-dsa", _NEXTN, _after_layers, checked_since="0.32.0", draft_class="DeepseekV32MTPModel"
    ),
    "deepseek_v4": _DEEPSEEK_V4, "deepseek_v41": _DEEPSEEK_V4,
    "glm4_moe": Family("glm-4.5", _NEXTN, _after_layers, glm, draft_class="Glm4MoeMTPModel"),
    "glm4_moe_lite": Family("glm-4-lite", _NEXTN, _after_layers, draft_class="Glm4MoeLiteMTPModel"),
    "glm_ocr": Family("glm-ocr", _NEXTN, _after_layers, draft_class="GlmOcrMTPModel"),
    "mimo": Family("mimo", _NEXTN, _under("model.mtp_layers."), mimo, draft_class="MiMoMTPModel"),
    "mimo_v2": _MIMO_V2, "mimo_v2_flash": _MIMO_V2,
    "ernie4_5_moe": Family(
        "ernie-4.5", _NEXTN,
        _under("model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.", "model.mtp_block."),
        ernie, draft_class="ErnieMTPModel",
    ),
    "nemotron_h": _NEMOTRON, "nemotron_h_puzzle": _NEMOTRON,
    "exaone_moe": _EXAONE, "exaone4_5": _EXAONE,
    "longcat_flash": Family(
        "longcat-flash", _NEXTN, _under("model.mtp."), default=1, draft_class="LongCatFlashMTPModel"
    ),
    "step3p5": _STEP, "step3p7": _STEP,
    "bailing_hybrid": _BAILING, "bailing_moe_v2_5": _BAILING, "bailing_hybrid_v3": _BAILING,
    "hy_v3": Family("hy-v3", _NEXTN, _after_layers, draft_class="HYV3MTPModel"),
    "pangu_ultra_moe": Family("openpangu", _NEXTN, _after_layers, draft_class="OpenPanguMTPModel"),
    "kimi_k3": Family("kimi-k3", _NEXTN, _after_layers, checked_since="0.32.0", draft_class="KimiK3MTPModel"),
    "hy_v4": Family("hy-v4", _NEXTN, _after_layers, checked_since="0.32.0", draft_class="HYV4MTPModel"),
    "dots3_note": Family("dots3", _NEXTN, _after_layers, default=1, draft_class="Dots3NoteMTPModel"),
    "glm5_next": _GLM5_NEXT, "glm5_next_text": _GLM5_NEXT,
    "minimax_m3": _MINIMAX, "minimax_m3_vl": _MINIMAX, "minimax_m3_mtp": _MINIMAX,
    "inkling": _INKLING, "inkling_mm_model": _INKLING, "inkling_model": _INKLING,
}  # fmt: skip
"""Families by `model_type`."""

GENERIC = Family(
    "unknown", ("mtp_num_hidden_layers", *_NEXTN, "num_mtp_modules"),
    lambda depth, layers: ("mtp.", "model.mtp.", "model.mtp_layers.", *_after_layers(depth, layers)),
)  # fmt: skip
"""For a model type that is in no table: the usual keys, the usual places."""


def announced_depth(family: Family, *configs: dict[str, Any]) -> tuple[int | None, str | None]:
    """(depth, key) that the configs announce; depth None where no key says anything."""
    for config in configs:
        for key in family.keys:
            value: Any = config
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if type(value) is int and value >= 0:
                return value, key
    return None, None
