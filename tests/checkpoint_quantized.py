"""Quantised forms of the small Llama, packed as the formats prescribe, and checkpoints with draft
heads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint_samples import (
    ENDS,
    LINEARS,
    LLAMA_LAYER,
    QWEN3_NORMS,
    SIZES,
    Arrays,
    bf16,
    config,
    fill,
    layers,
    llama,
    rewrite,
    write_shards,
    write_small_files,
)

GROUP = 32
RNG = np.random.default_rng(7)


def words(*shape: int) -> np.ndarray:
    return RNG.integers(1, 2**31 - 1, shape, dtype=np.int64).astype("<i4")


def scales(*shape: int) -> np.ndarray:
    return RNG.uniform(0.001, 0.01, shape)


def gptq_module(
    out: int, width: int, bits: int = 4, group: int = GROUP, g_idx: bool = True
) -> Arrays:
    groups = width // group
    module: Arrays = {
        "qweight": ("I32", words(width * bits // 32, out)),
        "qzeros": ("I32", np.full((groups, out * bits // 32), 0x77777777, "<i4")),
        "scales": ("F16", scales(groups, out)),
    }
    if g_idx:
        module["g_idx"] = ("I32", np.arange(width) // group)
    return module


def awq_module(out: int, width: int, bits: int = 4, group: int = GROUP) -> Arrays:
    groups = width // group
    return {
        "qweight": ("I32", words(width, out * bits // 32)),
        "qzeros": ("I32", words(groups, out * bits // 32)),
        "scales": ("F16", scales(groups, out)),
    }


def packed_module(out: int, width: int, bits: int = 4, group: int = GROUP) -> Arrays:
    return {
        "weight_packed": ("I32", words(out, width * bits // 32)),
        "weight_scale": ("BF16", bf16(scales(out, width // group))),
        "weight_shape": ("I64", np.array([out, width])),
    }


def fp8_values(*shape: int) -> np.ndarray:
    return RNG.integers(1, 0x70, shape).astype("u1") | (RNG.integers(0, 2, shape) << 7).astype("u1")


def fp8_module(out: int, width: int, block: int | None = None) -> Arrays:
    if block:
        scale = scales(-(-out // block), -(-width // block))
        return {"weight": ("F8_E4M3", fp8_values(out, width)), "weight_scale_inv": ("F32", scale)}
    return {
        "weight": ("F8_E4M3", fp8_values(out, width)),
        "weight_scale": ("BF16", bf16(scales(out, 1))),
    }


def nvfp4_module(out: int, width: int, modelopt: bool = True) -> Arrays:
    weight, second = (
        ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
    )
    rest = {"input_scale": ("F32", np.array(0.002))} if modelopt else {}
    return rest | {
        weight: ("U8", RNG.integers(1, 255, (out, width // 2))),
        "weight_scale": ("F8_E4M3", RNG.integers(0x20, 0x60, (out, width // 16))),
        second: ("F32", np.array([0.01])),
    }


def bnb4_module(out: int, width: int) -> Arrays:
    return {
        "weight": ("U8", RNG.integers(1, 255, (out * width // 2, 1))),
        "weight.absmax": ("F32", scales(out * width // 64)),
        "weight.quant_map": ("F32", np.linspace(-1, 1, 16)),
        "weight.quant_state.bitsandbytes__nf4": ("U8", RNG.integers(1, 255, (90,))),
    }


Pack = Callable[[int, int], Arrays]


def quantize(
    tensors: Arrays, pack: Pack, only: Callable[[str], bool] = lambda module: True
) -> Arrays:
    """Replace the Linear weights of the decoder layers by what `pack(out, in)` gives."""
    result: Arrays = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if ".layers." in name and module.rpartition(".")[2] in LINEARS and only(module):
            out, width = value[1].shape
            result |= {f"{module}.{part}": tensor for part, tensor in pack(out, width).items()}
        else:
            result[name] = value
    return result


def quantized_llama(folder: Path, declaration: dict[str, Any], pack: Pack, **rest: Any) -> Path:
    only = rest.pop("only", lambda module: True)
    llama(folder, quantization_config=declaration, **rest)
    rewrite(folder, lambda tensors: quantize(tensors, pack, only))
    return folder


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
}  # fmt: skip
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "group_size": GROUP,
                "strategy": "group",
                "symmetric": True,
            },
        }
    },
}
CT_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
        }
    },
}
FP8_BLOCK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
}
MODELOPT_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head"],
}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

GATED_ATTENTION = """
{at}.self_attn.q_proj.weight 2*A H
{at}.self_attn.k_proj.weight K H
{at}.self_attn.v_proj.weight K H
{at}.self_attn.o_proj.weight H A
{at}.self_attn.q_norm.weight D
{at}.self_attn.k_norm.weight D
{at}.input_layernorm.weight H
{at}.post_attention_layernorm.weight H
"""
DENSE = """
{at}.mlp.gate_proj.weight I H
{at}.mlp.up_proj.weight I H
{at}.mlp.down_proj.weight H I
"""
SHARED_MOE = """
{at}.mlp.gate.weight E H
{at}.mlp.shared_expert.gate_proj.weight M H
{at}.mlp.shared_expert.up_proj.weight M H
{at}.mlp.shared_expert.down_proj.weight H M
{at}.mlp.shared_expert_gate.weight 1 H
""" + "".join(
    f"{{at}}.mlp.experts.{e}.gate_proj.weight M H\n{{at}}.mlp.experts.{e}.up_proj.weight M H\n"
    f"{{at}}.mlp.experts.{e}.down_proj.weight H M\n"
    for e in range(4)
)
GROUPED_MOE = """
{at}.mlp.gate.weight E H
{at}.mlp.gate.e_score_correction_bias E
{at}.mlp.shared_experts.gate_proj.weight M H
{at}.mlp.shared_experts.up_proj.weight M H
{at}.mlp.shared_experts.down_proj.weight H M
""" + SHARED_MOE.partition("shared_expert_gate.weight 1 H\n")[2]
QWEN_ENTRY = """
mtp.fc.weight H 2*H
mtp.norm.weight H
mtp.pre_fc_norm_embedding.weight H
mtp.pre_fc_norm_hidden.weight H
"""
DELTA_QWEN35 = """
{at}.linear_attn.in_proj_qkv.weight 3*A H
{at}.linear_attn.in_proj_z.weight A H
{at}.linear_attn.in_proj_b.weight 4 H
{at}.linear_attn.in_proj_a.weight 4 H
{at}.linear_attn.conv1d.weight 3*A 1 4
{at}.linear_attn.dt_bias 4
{at}.linear_attn.A_log 4
{at}.linear_attn.norm.weight D
{at}.linear_attn.out_proj.weight H A
{at}.input_layernorm.weight H
{at}.post_attention_layernorm.weight H
"""
DELTA_NEXT = """
{at}.linear_attn.in_proj_qkvz.weight 4*A H
{at}.linear_attn.in_proj_ba.weight 8 H
""" + DELTA_QWEN35.partition("in_proj_a.weight 4 H\n")[2]
LATENT = """
{at}.self_attn.q_a_proj.weight 32 H
{at}.self_attn.q_a_layernorm.weight 32
{at}.self_attn.q_b_proj.weight 4*24 32
{at}.self_attn.kv_a_proj_with_mqa.weight 40 H
{at}.self_attn.kv_a_layernorm.weight 32
{at}.self_attn.kv_b_proj.weight 4*32 32
{at}.self_attn.o_proj.weight H 4*16
{at}.input_layernorm.weight H
{at}.post_attention_layernorm.weight H
"""
GLUE = """
{at}.enorm.weight H
{at}.hnorm.weight H
{at}.eh_proj.weight H 2*H
{at}.shared_head.norm.weight H
{at}.shared_head.head.weight V H
{at}.embed_tokens.weight V H
"""
QK_BIASES = (
    "{at}.self_attn.q_proj.bias A\n{at}.self_attn.k_proj.bias K\n{at}.self_attn.v_proj.bias K\n"
)
GQA = """
{at}.self_attn.q_proj.weight A H
{at}.self_attn.k_proj.weight K H
{at}.self_attn.v_proj.weight K H
{at}.self_attn.o_proj.weight H A
{at}.input_layernorm.weight H
{at}.post_attention_layernorm.weight H
"""
MIMO_ENTRY = """
model.mtp_layers.0.token_layernorm.weight H
model.mtp_layers.0.hidden_layernorm.weight H
model.mtp_layers.0.final_layernorm.weight H
model.mtp_layers.0.input_proj.weight H 2*H
"""

MTP_SIZES = SIZES | {"E": 4, "M": 32}
_HYBRID = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_GROUPED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


def at(table: str, *places: str) -> str:
    return "\n".join(table.strip().replace("{at}", place) for place in places)


def mtp_family(name: str) -> tuple[dict[str, Any], str, str]:
    """(config, table of the backbone, table of the head) of one family."""
    every = [f"model.layers.{i}" for i in range(4)]
    if name in {"qwen3_5", "qwen3_next"}:
        delta = DELTA_QWEN35 if name == "qwen3_5" else DELTA_NEXT
        mlp = DENSE if name == "qwen3_5" else SHARED_MOE
        body = at(delta, *every[:3]) + "\n" + at(GATED_ATTENTION, every[3]) + "\n" + at(mlp, *every)
        head = QWEN_ENTRY + at(GATED_ATTENTION + mlp, "mtp.layers.0")
        extra = {"mtp_num_hidden_layers": 1} if name == "qwen3_5" else {
            "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
            "num_nextn_predict_layers": 1,
        }  # fmt: skip
        kind = "qwen3_5_text" if name == "qwen3_5" else name
        arch = "Qwen3_5ForCausalLM" if name == "qwen3_5" else "Qwen3NextForCausalLM"
        return config(model_type=kind, architectures=[arch], **_HYBRID, **extra), body, head
    if name == "deepseek_v3":
        body = at(LATENT, *every) + "\n" + at(DENSE, every[0]) + "\n" + at(GROUPED_MOE, *every[1:])
        head = at(GLUE + LATENT + GROUPED_MOE, "model.layers.4")
        extra = _GROUPED | {
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_nextn_predict_layers": 1,
        }
        return config(model_type=name, architectures=["DeepseekV3ForCausalLM"], **extra), body, head
    if name == "glm4_moe":
        attention = GQA + QK_BIASES
        body = (
            at(attention, *every) + "\n" + at(DENSE, every[0]) + "\n" + at(GROUPED_MOE, *every[1:])
        )
        head = at(GLUE + attention + GROUPED_MOE, "model.layers.4")
        extra = _GROUPED | {"num_nextn_predict_layers": 1, "use_qk_norm": False}
        return (
            config(
                model_type=name,
                architectures=["Glm4MoeForCausalLM"],
                **extra | {"attention_bias": True},
            ),
            body,
            head,
        )
    attention = GQA + QK_BIASES + DENSE
    head = MIMO_ENTRY + at(attention, "model.mtp_layers.0")
    settings = config(
        model_type="mimo", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1
    )
    return settings, at(attention, *every), head


FAMILIES = ("qwen3_5", "qwen3_next", "deepseek_v3", "glm4_moe", "mimo")


def centred_norms(tensors: Arrays) -> Arrays:
    """The norms of Qwen3.5 and Qwen3-Next are stored as w of 1 + w."""
    from checkpoint_samples import normal

    rng = np.random.default_rng(5)
    return {
        n: normal(t[1].shape, rng, 0.05) if "norm.weight" in n and "linear_attn" not in n else t
        for n, t in tensors.items()
    }


def mtp_checkpoint(folder: Path, family: str, *, head: bool = True, **changes: Any) -> Path:
    settings, body, extra = mtp_family(family)
    write_small_files(folder, settings | changes)
    tensors = fill(
        ENDS + body + ("\n" + extra if head else ""), MTP_SIZES, np.random.default_rng(3)
    )
    if family.startswith("qwen"):
        tensors = centred_norms(tensors)
    write_shards(folder, tensors)
    return folder


def qwen3(folder: Path) -> Path:
    write_small_files(folder, config(model_type="qwen3", architectures=["Qwen3ForCausalLM"]))
    write_shards(
        folder,
        fill(ENDS + layers(LLAMA_LAYER + QWEN3_NORMS.lstrip(), 4), SIZES, np.random.default_rng(2)),
    )
    return folder


def eagle3(folder: Path, fc_width: int = 192, draft_vocab: int = 96) -> Path:
    write_small_files(folder, config(
        architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=draft_vocab,
        target_hidden_size=64,
    ))  # fmt: skip
    rng = np.random.default_rng(4)
    table = f"fc.weight H {fc_width}\nnorm.weight H\nlm_head.weight 96 H\n" + at(
        "{at}.self_attn.q_proj.weight A 2*H\n{at}.self_attn.k_proj.weight K"
        " 2*H\n{at}.self_attn.v_proj.weight K 2*H\n{at}.self_attn.o_proj.weight H"
        " A\n{at}.hidden_norm.weight H\n{at}.input_layernorm.weight"
        " H\n{at}.post_attention_layernorm.weight H\n" + DENSE.strip(),
        "midlayer",
    )
    tensors = fill(table, SIZES, rng)
    tensors["d2t"] = ("I64", np.arange(96))
    tensors["t2d"] = ("BOOL", (np.arange(320) < 96).astype("u1"))
    write_shards(folder, tensors, 1)
    return folder
