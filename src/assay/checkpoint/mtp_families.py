"""Who announces a multi-token-prediction head, where, and which tensors it then owes.

One `Family` per layout. `layout` gives names and shapes for a head of some depth; families with an
inner layout that differs from config to config give only `prefixes`, and their head owes what the
backbone's layers have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from assay.checkpoint.document_types import Document
from assay.checkpoint.families import FAMILIES as LAYERS
from assay.checkpoint.families import Layer, shared_expert_moe
from assay.checkpoint.pieces import Dims, Piece, attention, linear, norms

Layout = Callable[[Dims, int], Iterator[Piece]]
"""(dimensions, depth) to (full tensor name, shape)."""


@dataclass(frozen=True)
class Family:
    """One way to ship a head.

    `keys` announce its depth, at the top level or in the text config; `default` holds where no key
    is given. `prefixes(depth, layers)` are the beginnings of its tensor names. `checked_since` is
    the vLLM version from which the loader refuses a missing head for this family, None where no
    version does.
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
    """Layers counted on after the backbone's last; without an announced depth, one is looked
    for.
    """
    return tuple(f"model.layers.{layers + i}." for i in range(max(depth, 1)))


def _below(parent: str, pieces: Iterator[Piece]) -> Iterator[Piece]:
    return ((f"{parent}.{name}", shape) for name, shape in pieces)


def qwen(d: Dims, depth: int) -> Iterator[Piece]:
    """Qwen3.5 and Qwen3-Next: fc over embedding and hidden state, then full-attention layers.
    Dense: 15 tensors.
    """
    yield from linear("mtp.fc", d.hidden, 2 * d.hidden)
    yield from _below("mtp", norms(d, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"))
    for i in range(depth):
        at = f"mtp.layers.{i}"
        yield from _below(at, attention(d, qk_norm="head", gated=True))
        yield from _below(at, shared_expert_moe(d, -1))
        yield from _below(at, norms(d, "input_layernorm", "post_attention_layernorm"))


def _whole_layer(layer: Layer) -> Layout:
    """DeepSeek V3 and GLM-4.5: a whole decoder layer after the last, with its own norms and entry
    projection.
    """

    def layout(d: Dims, depth: int) -> Iterator[Piece]:
        for index in range(d.layers, d.layers + depth):
            at = f"model.layers.{index}"
            yield from _below(at, norms(d, "enorm", "hnorm", "shared_head.norm"))
            yield from linear(f"{at}.eh_proj", d.hidden, 2 * d.hidden)
            yield from _below(at, layer(d, index))

    return layout


def mimo(d: Dims, depth: int) -> Iterator[Piece]:
    """MiMo-7B: Qwen2 layers below model.mtp_layers."""
    for i in range(depth):
        at = f"model.mtp_layers.{i}"
        yield from _below(at, norms(d, "token_layernorm", "hidden_layernorm", "final_layernorm"))
        yield from linear(f"{at}.input_proj", d.hidden, 2 * d.hidden)
        yield from _below(at, LAYERS["mimo"](d, i))


def ernie(d: Dims, depth: int) -> Iterator[Piece]:
    """ERNIE-4.5-MoE: a dense block without biases; glue in modules of its own."""
    for i in range(depth):
        yield from norms(d, f"model.mtp_emb_norm.{i}", f"model.mtp_hidden_norm.{i}")
        yield from linear(f"model.mtp_linear_proj.{i}", d.hidden, 2 * d.hidden)
        yield from _below(f"model.mtp_block.{i}", LAYERS["mistral"](d, i))


_MTP, _ANY_MTP = _under("mtp."), _under("mtp.", "model.mtp.")

_QWEN, _V32 = ("mtp_num_hidden_layers",), "0.32.0"

_ERNIE = _under(
    "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.", "model.mtp_block."
)

_DEEPSEEK, _GLM = (_whole_layer(LAYERS[name]) for name in ("deepseek_v3", "glm4_moe"))

_KINDS: tuple[tuple[str, Family], ...] = (
    (
        "qwen3_5 qwen3_5_text intern_s2_preview",
        Family("qwen3.5", _QWEN, _MTP, qwen, draft_class="Qwen3_5MTP"),
    ),
    (
        "qwen3_5_moe qwen3_5_moe_text",
        Family("qwen3.5-moe", _QWEN, _MTP, qwen, draft_class="Qwen3_5MoeMTP"),
    ),
    ("interns2_mobius", Family("intern-s2-mobius", _QWEN, _MTP, draft_class="InternS2MobiusMTP")),
    ("qwen3_next", Family("qwen3-next", _NEXTN, _MTP, qwen, 1, draft_class="Qwen3NextMTP")),
    (
        "qwen4_exp qwen4_exp_text",
        Family("qwen4-exp", (*_QWEN, *_NEXTN), _MTP, draft_class="Qwen4ExpMTP"),
    ),
    (
        "deepseek_v3",
        Family("deepseek-v3", _NEXTN, _after_layers, _DEEPSEEK, 0, None, _V32, "DeepSeekMTPModel"),
    ),
    (
        "deepseek_v32",
        Family("deepseek-v3.2", _NEXTN, _after_layers, None, 0, None, _V32, "DeepseekV32MTPModel"),
    ),
    (
        "glm_moe_dsa",
        Family("glm-moe-dsa", _NEXTN, _after_layers, None, 0, None, _V32, "DeepseekV32MTPModel"),
    ),
    (
        "deepseek_v4 deepseek_v41",
        Family("deepseek-v4", _NEXTN, _MTP, None, 0, None, _V32, "DeepSeekV4MTPModel"),
    ),
    ("glm4_moe", Family("glm-4.5", _NEXTN, _after_layers, _GLM, draft_class="Glm4MoeMTPModel")),
    (
        "glm4_moe_lite",
        Family("glm-4-lite", _NEXTN, _after_layers, draft_class="Glm4MoeLiteMTPModel"),
    ),
    ("glm_ocr", Family("glm-ocr", _NEXTN, _after_layers, draft_class="GlmOcrMTPModel")),
    ("mimo", Family("mimo", _NEXTN, _under("model.mtp_layers."), mimo, draft_class="MiMoMTPModel")),
    (
        "mimo_v2 mimo_v2_flash",
        Family("mimo-v2", _NEXTN, _under("model.mtp."), forced=1, draft_class="MiMoV2MTPModel"),
    ),
    ("ernie4_5_moe", Family("ernie-4.5", _NEXTN, _ERNIE, ernie, draft_class="ErnieMTPModel")),
    (
        "nemotron_h nemotron_h_puzzle",
        Family(
            "nemotron-h",
            _NEXTN,
            _under("mtp.", "language_model.mtp."),
            draft_class="NemotronHMTPModel",
        ),
    ),
    ("exaone_moe exaone4_5", Family("exaone", _NEXTN, _MTP, default=1, draft_class="ExaoneMoeMTP")),
    (
        "longcat_flash",
        Family(
            "longcat-flash",
            _NEXTN,
            _under("model.mtp."),
            default=1,
            draft_class="LongCatFlashMTPModel",
        ),
    ),
    (
        "step3p5 step3p7",
        Family("step3.5", _NEXTN, _after_layers, None, 1, None, _V32, "Step3p5MTP"),
    ),
    (
        "bailing_hybrid bailing_moe_v2_5 bailing_hybrid_v3",
        Family("bailing", _NEXTN, _after_layers, None, 0, None, _V32, "BailingMoeV25MTPModel"),
    ),
    ("hy_v3", Family("hy-v3", _NEXTN, _after_layers, draft_class="HYV3MTPModel")),
    (
        "pangu_ultra_moe",
        Family("openpangu", _NEXTN, _after_layers, draft_class="OpenPanguMTPModel"),
    ),
    ("kimi_k3", Family("kimi-k3", _NEXTN, _after_layers, None, 0, None, _V32, "KimiK3MTPModel")),
    ("hy_v4", Family("hy-v4", _NEXTN, _after_layers, None, 0, None, _V32, "HYV4MTPModel")),
    (
        "dots3_note",
        Family("dots3", _NEXTN, _after_layers, default=1, draft_class="Dots3NoteMTPModel"),
    ),
    (
        "glm5_next glm5_next_text",
        Family("glm5-next", _NEXTN, _after_layers, None, 0, None, _V32, "Glm5NextMTPModel"),
    ),
    (
        "minimax_m3 minimax_m3_vl minimax_m3_mtp",
        Family("minimax-m3", ("num_mtp_modules",), _ANY_MTP, None, 0, None, _V32, "MiniMaxM3MTP"),
    ),
    (
        "inkling inkling_mm_model inkling_model",
        Family(
            "inkling",
            ("num_mtp_layers", "mtp_config.num_nextn_predict_layers"),
            _ANY_MTP,
            None,
            0,
            None,
            _V32,
            "InklingMTPModel",
        ),
    ),
)

FAMILIES = {model_type: family for types, family in _KINDS for model_type in types.split()}
"""Families by `model_type`."""

GENERIC = Family(
    "unknown",
    ("mtp_num_hidden_layers", *_NEXTN, "num_mtp_modules"),
    lambda depth, layers: (
        "mtp.",
        "model.mtp.",
        "model.mtp_layers.",
        *_after_layers(depth, layers),
    ),
)
"""For a model type that is in no table: the usual keys, the usual places."""


def announced_depth(family: Family, *configs: Document) -> tuple[int | None, str | None]:
    """(depth, key) that the configs announce; depth None where no key says anything."""
    for config in configs:
        for key in family.keys:
            outer, _, inner = key.rpartition(".")
            value = ((config.get(outer) or {}) if outer else config).get(inner)
            if value is not None:
                return value, key
    return None, None
