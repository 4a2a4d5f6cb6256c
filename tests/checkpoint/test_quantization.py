"""The declaration against stored tensors, rule by rule, on headers of a small Llama."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from assay.checkpoint.quantization.check import check_kv, check_orphans, check_quantization, kv_cache
from assay.checkpoint.quantization.declared import Declared, listed
from assay.checkpoint.quantization.schemes import parse
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding
from checkpoint.head_samples import Shapes, checkpoint, rows
from checkpoint_quantized import AUTO_ROUND, AWQ, CT_FP8, FP8_BLOCK, GPTQ, MODELOPT_NVFP4, W4A16
from checkpoint_samples import ENDS, LINEARS, LLAMA_LAYER, config, layers

Raw = dict[str, Any]
Pack = Callable[[int, int], dict[str, tuple[str, tuple[int, ...]]]]
DOWN = "model.layers.1.mlp.down_proj"
QUERY = "model.layers.1.self_attn.q_proj"


def gptq(out: int, width: int, bits: int = 4, group: int = 32) -> Shapes:
    groups = width // group
    return {"qweight": ("I32", (width * bits // 32, out)), "qzeros": ("I32", (groups, out * bits // 32)),
            "scales": ("F16", (groups, out)), "g_idx": ("I32", (width,))}  # fmt: skip


def packed(out: int, width: int, bits: int = 4) -> Shapes:
    per_word = 32 // bits
    return {"weight_packed": ("I32", (out, -(-width // per_word))), "weight_scale": ("BF16", (out, width // 32)),
            "weight_shape": ("I64", (2,))}  # fmt: skip


def fp8(out: int, width: int) -> Shapes:
    return {"weight": ("F8_E4M3", (out, width)), "weight_scale": ("BF16", (out, 1))}


def one_scale(out: int, width: int) -> Shapes:
    return {"weight": ("F8_E4M3", (out, width)), "weight_scale": ("F32", (1,))}


def mxfp8(out: int, width: int) -> Shapes:
    return {"weight": ("F8_E4M3", (out, width)), "weight_scale": ("U8", (out, width // 32))}


def nvfp4(out: int, width: int) -> Shapes:
    return {"weight": ("U8", (out, width // 2)), "weight_scale": ("F8_E4M3", (out, width // 16)),
            "weight_scale_2": ("F32", ()), "input_scale": ("F32", ())}  # fmt: skip


def torchao(out: int, width: int) -> Shapes:
    return {"_weight_qdata": ("I8", (out, width)), "_weight_scale": ("BF16", (out, width // 32))}


def bnb(out: int, width: int) -> Shapes:
    return {"weight": ("U8", (out * width // 2, 1)), "weight.absmax": ("F32", (out * width // 64,)),
            "weight.quant_map": ("F32", (16,)), "weight.quant_state.bitsandbytes__nf4": ("U8", (80,))}  # fmt: skip


def llama(pack: Pack, *, plain: tuple[str, ...] = (), **special: Pack) -> Shapes:
    """A Llama whose Linears are packed, but for modules that end in `plain`; `special` packs one kind otherwise."""
    shapes: Shapes = {}
    for name, shape in rows(ENDS + layers(LLAMA_LAYER, 4)):
        module, last = name.removesuffix(".weight"), name.split(".")[-2]
        if last in LINEARS and not module.endswith(plain or "-"):
            use = special.get(last, pack)
            shapes |= {f"{module}.{part}": tensor for part, tensor in use(*shape).items()}
        else:
            shapes[name] = ("BF16", shape)
    return shapes


def subject(raw: Raw | None, shapes: Shapes, **rest: Any) -> Checkpoint:
    return checkpoint(config(**rest) | ({"quantization_config": raw} if raw else {}), shapes)


def found(raw: Raw | None, shapes: Shapes, **rest: Any) -> list[Finding]:
    made = subject(raw, shapes, **rest)
    return [*check_quantization(made, parse(made)), *check_orphans(made)]


def ids(findings: list[Finding]) -> set[str]:
    return {f.id.removeprefix("checkpoint.") for f in findings}


def declared(raw: Raw) -> Declared:
    made = parse(subject(raw, {"model.norm.weight": ("BF16", (64,))}))
    assert made is not None
    return made


TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": {
    "granularity": {"_type": "PerGroup", "_data": {"group_size": 32}}}}}}  # fmt: skip
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

WHOLE: dict[str, tuple[Raw, Pack]] = {
    "gptq": (GPTQ, gptq), "auto-round": (AUTO_ROUND, gptq), "w4a16": (W4A16, packed), "ct fp8": (CT_FP8, fp8),
    "fp8": (FP8, one_scale), "mxfp8": ({"quant_method": "mxfp8"}, mxfp8), "nvfp4": (MODELOPT_NVFP4, nvfp4),
    "torchao": (TORCHAO, torchao), "bitsandbytes": (BNB, bnb),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_whole_checkpoints_raise_nothing(name: str) -> None:
    raw, pack = WHOLE[name]
    assert [f.title for f in found(raw, llama(pack))] == []


def test_an_ignored_module_may_be_plain_under_any_of_its_names() -> None:
    plain = ("q_proj", "k_proj", "v_proj")
    for ignore in (["re:.*self_attn.*_proj$"], [f"model.layers.{i}.self_attn.qkv_proj" for i in range(4)]):
        raw = W4A16 | {"ignore": ["lm_head", *ignore]}
        shapes = llama(packed, plain=(*plain, "o_proj")) if "re:" in ignore[0] else llama(packed, plain=plain)
        assert found(raw, shapes) == []
    assert ids(found(W4A16, llama(packed, plain=plain))) == {"quantization_conflict"}


def test_lists_match_the_whole_or_all_its_parts() -> None:
    assert listed("a.qkv_proj", {"a.q_proj", "a.k_proj", "a.v_proj"}.__contains__)
    assert not listed("a.qkv_proj", {"a.q_proj", "a.k_proj"}.__contains__)
    assert listed("a.up_proj", {"a.gate_up_proj"}.__contains__)
    assert not listed("a.down_proj", {"a.gate_up_proj"}.__contains__)


def test_parts_of_a_fused_matrix_must_be_alike() -> None:
    findings = found(W4A16 | {"ignore": ["lm_head", "re:.*k_proj"]}, llama(packed, plain=("k_proj",)))
    assert any("fused group" in f.title for f in findings)
    eight = AUTO_ROUND | {"extra_config": {f"model.layers.{i}.mlp.up_proj": {"bits": 8} for i in range(4)}}
    findings = found(eight, llama(gptq, up_proj=lambda out, width: gptq(out, width, 8)))
    assert [f.title for f in findings if "fused group" not in f.title] == []
    assert any("fused group" in f.title for f in findings)


def test_modules_may_have_bits_of_their_own() -> None:
    def eight(out: int, width: int) -> Shapes:
        return gptq(out, width, 8)

    shapes = llama(gptq, down_proj=eight)
    own = {f"model.layers.{i}.mlp.down_proj": {"bits": 8} for i in range(4)}
    assert found(AUTO_ROUND | {"extra_config": own}, shapes) == []
    assert found(GPTQ | {"dynamic": {r"+:.*\.down_proj": {"bits": 8}}}, shapes) == []
    assert ids(found(GPTQ, shapes)) == {"quantization_conflict"}
    assert ids(found(GPTQ | {"dynamic": {r"-:.*\.down_proj": {}}}, shapes)) == {"quantization_conflict"}
    assert found(GPTQ | {"dynamic": {r"-:.*\.down_proj": {}}}, llama(gptq, plain=("down_proj",))) == []


def test_bits_that_only_the_config_can_refute() -> None:
    """One group for all inputs: at any width the packed shapes agree with each other."""
    raw = GPTQ | {"group_size": -1}

    def single(out: int, width: int) -> Shapes:
        module = gptq(out, width, group=width)
        del module["g_idx"]
        return module

    assert found(raw, llama(single)) == []
    (finding,) = found(raw | {"bits": 8}, llama(single))
    assert finding.id == "checkpoint.quantization_conflict"


def test_words_at_the_end_of_a_row_may_be_filled_up() -> None:
    groups = {"g": {"targets": ["Linear"], "weights": {"num_bits": 5, "type": "int", "strategy": "group",
                                                       "group_size": 32, "symmetric": True}}}  # fmt: skip
    raw = W4A16 | {"config_groups": groups}
    assert found(raw, llama(lambda out, width: packed(out, width, 5))) == []


def _with(raw: Raw, **weights: Any) -> Raw:
    group = raw["config_groups"]["group_0"]
    return raw | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


def test_zero_points_must_fit_the_symmetry() -> None:
    def with_zero(out: int, width: int) -> Shapes:
        return packed(out, width) | {"weight_zero_point": ("I32", (out // 8, width // 32))}

    asymmetric = _with(W4A16, symmetric=False)
    assert found(asymmetric, llama(with_zero)) == []
    assert ids(found(asymmetric, llama(packed))) == {"quantization_conflict"}
    assert ids(found(W4A16, llama(with_zero))) == {"orphan_scale"}


def test_scales_must_fit_the_strategy() -> None:
    assert ids(found(_with(CT_FP8, strategy="tensor"), llama(fp8))) == {"quantization_conflict"}
    assert found(_with(CT_FP8, strategy="tensor"), llama(one_scale)) == []
    assert ids(found(CT_FP8, llama(one_scale))) == {"quantization_conflict"}
    assert ids(found(FP8, llama(fp8))) == {"quantization_conflict"}
    assert ids(found(FP8_BLOCK, llama(one_scale))) == set()  # a scale for all is no grid that could be wrong


def test_static_activations_need_their_scale() -> None:
    def static(out: int, width: int) -> Shapes:
        return one_scale(out, width) | {"input_scale": ("F32", (1,))}

    raw = FP8 | {"activation_scheme": "static"}
    assert found(raw, llama(static)) == []
    (finding,) = found(raw, llama(one_scale))
    assert "input_scale" in finding.title

    def unscaled(out: int, width: int) -> Shapes:
        return {name: tensor for name, tensor in nvfp4(out, width).items() if name != "input_scale"}

    assert ids(found(MODELOPT_NVFP4, llama(unscaled))) == {"quantization_conflict"}
    weight_only = MODELOPT_NVFP4 | {"config_groups": {"group_0": {"input_activations": None, "weights": {}}}}
    assert found(weight_only, llama(unscaled)) == []


def test_modelopt_names_algorithms_per_layer() -> None:
    each = {f"model.layers.{i}.{part}": {"quant_algo": "FP8"} for i in range(4) for part in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}  # fmt: skip
    each |= {f"model.layers.{i}.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16} for i in range(4)}
    raw = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": each}

    def static(out: int, width: int) -> Shapes:
        return one_scale(out, width) | {"input_scale": ("F32", (1,))}

    mixed = {"q_proj": static, "k_proj": static, "v_proj": static, "down_proj": nvfp4}
    plain = ("o_proj", "gate_proj", "up_proj")
    assert found(raw, llama(nvfp4, plain=plain, **mixed)) == []
    assert ids(found(raw, llama(nvfp4, plain=plain, **mixed | {"down_proj": static}))) == {
        "quantization_conflict"
    }
    assert ids(found(raw, llama(nvfp4, plain=plain[1:], **mixed))) == {"quantization_conflict"}


@pytest.mark.parametrize(
    ("raw", "pack"),
    [
        (TORCHAO, lambda out, width: torchao(out, width) | {"_weight_scale": ("BF16", (out, 1))}),
        (BNB, lambda out, width: bnb(out, width) | {"weight.absmax": ("F32", (7,))}),
        (BNB | {"load_in_4bit": False, "load_in_8bit": True}, bnb),
    ],
)
def test_parts_that_do_not_fit(raw: Raw, pack: Pack) -> None:
    assert ids(found(raw, llama(pack))) == {"quantization_conflict"}


def test_a_quantised_router_is_a_warning() -> None:
    shapes = llama(packed) | {f"model.layers.1.mlp.gate.{part}": t for part, t in packed(8, 64).items()}
    findings = [f for f in found(W4A16, shapes) if "router" in f.title]
    assert [f.severity.value for f in findings] == ["warning"]


def test_a_lost_carrier_leaves_orphans() -> None:
    for carrier, (raw, pack) in {"qweight": WHOLE["gptq"], "weight_packed": WHOLE["w4a16"]}.items():
        shapes = llama(pack)
        del shapes[f"{DOWN}.{carrier}"]
        assert "orphan_scale" in ids(found(raw, shapes))


def test_methods_known_by_name_are_not_examined() -> None:
    (finding,) = found({"quant_method": "quark"}, llama(one_scale))
    assert (finding.id, finding.severity.value) == ("checkpoint.not_examined", "info")


def test_bad_patterns_and_types_do_no_harm() -> None:
    odd: list[Raw] = [
        W4A16 | {"ignore": ["re:(", 3]}, W4A16 | {"config_groups": {"a": None, "b": {"targets": 5}}},
        GPTQ | {"dynamic": {"-:(": {}, 5: None}}, AUTO_ROUND | {"extra_config": {"*": 4, "a": None}},
        MODELOPT_NVFP4 | {"quantized_layers": [1]}, TORCHAO | {"quant_type": "int8"}, FP8 | {"weight_block_size": [0]},
        AWQ | {"bits": True, "group_size": "all"},
    ]  # fmt: skip
    for raw in odd:
        found(raw, llama(packed))
        declared(raw).accepts(QUERY)


def test_kv_scales_must_be_in_every_layer() -> None:
    raw = CT_FP8 | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    scales: Shapes = {f"model.layers.{i}.self_attn.{x}_scale": ("F32", (1,)) for i in range(4) for x in "kv"}

    def kv(shapes: Shapes) -> list[tuple[str, str]]:
        made = subject(raw, llama(fp8) | shapes)
        return [(f.id, f.severity.value) for f in check_kv(made, kv_cache(made, parse(made)))]

    assert kv(scales) == []
    assert kv({}) == [("checkpoint.kv_dtype_conflict", "warning")]
    assert kv({n: t for n, t in scales.items() if ".2." not in n}) == [
        ("checkpoint.kv_dtype_conflict", "error")
    ]
