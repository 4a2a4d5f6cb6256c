"""The declaration against stored tensors, rule by rule, on headers of a small Llama."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from assay.checkpoint.declared import Declared
from assay.checkpoint.kv_cache import check_kv, kv_cache
from assay.checkpoint.matching import listed
from assay.checkpoint.orphans import check_orphans
from assay.checkpoint.quantization import check_quantization
from assay.checkpoint.schemes.registry import parse
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
    return {
        "qweight": ("I32", (width * bits // 32, out)),
        "qzeros": ("I32", (groups, out * bits // 32)),
        "scales": ("F16", (groups, out)),
        "g_idx": ("I32", (width,)),
    }


def packed(out: int, width: int, bits: int = 4) -> Shapes:
    per_word = 32 // bits
    return {
        "weight_packed": ("I32", (out, -(-width // per_word))),
        "weight_scale": ("BF16", (out, width // 32)),
        "weight_shape": ("I64", (2,)),
    }


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
    return {
        "weight": ("U8", (out * width // 2, 1)),
        "weight.absmax": ("F32", (out * width // 64,)),
        "weight.quant_map": ("F32", (16,)),
        "weight.quant_state.bitsandbytes__nf4": ("U8", (80,)),
    }


def llama(pack: Pack, *, plain: tuple[str, ...] = (), **special: Pack) -> Shapes:
    """A Llama whose Linears are packed, but for modules that end in `plain`; `special` packs one
    kind otherwise.
    """
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


TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {
        "default": {
            "_type": "IntxWeightOnlyConfig",
            "_data": {"granularity": {"_type": "PerGroup", "_data": {"group_size": 32}}},
        }
    },
}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

WHOLE: dict[str, tuple[Raw, Pack]] = {
    "gptq": (GPTQ, gptq),
    "auto-round": (AUTO_ROUND, gptq),
    "w4a16": (W4A16, packed),
    "ct fp8": (CT_FP8, fp8),
    "fp8": (FP8, one_scale),
    "mxfp8": ({"quant_method": "mxfp8"}, mxfp8),
    "nvfp4": (MODELOPT_NVFP4, nvfp4),
    "torchao": (TORCHAO, torchao),
    "bitsandbytes": (BNB, bnb),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_checkpoints_raise_nothing(name: str) -> None:
    raw, pack = WHOLE[name]
    assert [f.title for f in found(raw, llama(pack))] == []


def test_an_ignored_module_may_be_plain_under_any_of_its_names() -> None:
    plain = ("q_proj", "k_proj", "v_proj")
    for ignore in (
        ["re:.*self_attn.*_proj$"],
        [f"model.layers.{i}.self_attn.qkv_proj" for i in range(4)],
    ):
        raw = W4A16 | {"ignore": ["lm_head", *ignore]}
        shapes = (
            llama(packed, plain=(*plain, "o_proj"))
            if "re:" in ignore[0]
            else llama(packed, plain=plain)
        )
        assert found(raw, shapes) == []
    assert ids(found(W4A16, llama(packed, plain=plain))) == {"quantization_conflict"}


def test_lists_match_the_whole_or_all_its_parts() -> None:
    assert listed("a.qkv_proj", {"a.q_proj", "a.k_proj", "a.v_proj"}.__contains__)
    assert not listed("a.qkv_proj", {"a.q_proj", "a.k_proj"}.__contains__)
    assert listed("a.up_proj", {"a.gate_up_proj"}.__contains__)
    assert not listed("a.down_proj", {"a.gate_up_proj"}.__contains__)


def test_parts_of_a_fused_matrix_must_be_alike() -> None:
    findings = found(
        W4A16 | {"ignore": ["lm_head", "re:.*k_proj"]}, llama(packed, plain=("k_proj",))
    )
    assert any("fused group" in f.title for f in findings)
    eight = AUTO_ROUND | {
        "extra_config": {f"model.layers.{i}.mlp.up_proj": {"bits": 8} for i in range(4)}
    }
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
    assert ids(found(GPTQ | {"dynamic": {r"-:.*\.down_proj": {}}}, shapes)) == {
        "quantization_conflict"
    }
    assert (
        found(GPTQ | {"dynamic": {r"-:.*\.down_proj": {}}}, llama(gptq, plain=("down_proj",))) == []
    )


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
    groups = {
        "g": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 5,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
            },
        }
    }
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
    assert (
        ids(found(FP8_BLOCK, llama(one_scale))) == set()
    )  # a scale for all is no grid that could be wrong


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
    weight_only = MODELOPT_NVFP4 | {
        "config_groups": {"group_0": {"input_activations": None, "weights": {}}}
    }
    assert found(weight_only, llama(unscaled)) == []


def test_modelopt_names_algorithms_per_layer() -> None:
    each = {f"model.layers.{i}.{part}": {"quant_algo": "FP8"} for i in range(4) for part in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}  # fmt: skip
    each |= {
        f"model.layers.{i}.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}
        for i in range(4)
    }
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
    shapes = llama(packed) | {
        f"model.layers.1.mlp.gate.{part}": t for part, t in packed(8, 64).items()
    }
    findings = [f for f in found(W4A16, shapes) if "router" in f.title]
    assert [f.severity.value for f in findings] == ["warning"]


def test_a_lost_carrier_leaves_orphans() -> None:
    for carrier, (raw, pack) in {"qweight": WHOLE["gptq"], "weight_packed": WHOLE["w4a16"]}.items():
        shapes = llama(pack)
        del shapes[f"{DOWN}.{carrier}"]
        assert "orphan_scale" in ids(found(raw, shapes))


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ({"quant_method": "quark"}, "quark is known by name only"),
        ({"quant_method": "tomorrow"}, "tomorrow is not known"),
        (W4A16 | {"format": "spiral-packed"}, "format spiral-packed"),
        (MODELOPT_NVFP4 | {"quant_algo": "INT3_SPIRAL"}, "algorithm INT3_SPIRAL"),
        (AUTO_ROUND | {"packing_format": "auto_round:spiral"}, "format auto_round:spiral"),
        (GPTQ | {"bits": 5}, "gptq with 5 bits"),
    ],
)
def test_forms_that_assay_does_not_know_are_named_and_not_examined(raw: Raw, name: str) -> None:
    (finding,) = [f for f in found(raw, llama(one_scale)) if f.id == "checkpoint.not_examined"]
    assert finding.severity.value == "info"
    assert name in finding.title
    assert finding.evidence["unexamined"]


# MLX: words of 32 bits with scales and biases; mlx-lm names no method.


def mlx(out: int, width: int, bits: int = 4, group: int = 32) -> Shapes:
    scales = dict.fromkeys(("scales", "biases"), ("BF16", (out, width // group)))
    return {"weight": ("U32", (out, width * bits // 32)), **scales}


def mlx_config(**own: Any) -> Raw:
    return {"group_size": 32, "bits": 4} | own


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(
    "keys", [("quantization", "quantization_config"), ("quantization",), ("quantization_config",)]
)
def test_mlx_is_known_by_its_packing(bits: int, keys: tuple[str, ...]) -> None:
    settings = {key: mlx_config(bits=bits) for key in keys}
    made = subject(None, llama(lambda out, width: mlx(out, width, bits)), **settings)
    findings = [*check_quantization(made, parse(made)), *check_orphans(made)]
    assert [(f.id, f.severity.value) for f in findings] == [("checkpoint.not_examined", "info")]
    assert "mlx" in findings[0].title


def test_a_module_of_mlx_may_have_bits_of_its_own() -> None:
    shapes = llama(
        mlx,
        down_proj=lambda out, width: mlx(out, width, 8, 64),
        o_proj=lambda o, w: {"weight": ("BF16", (o, w))},
    )
    downs = {f"model.layers.{i}.mlp.down_proj": {"bits": 8, "group_size": 64} for i in range(4)}
    assert ids(found(mlx_config(**downs), shapes)) == {"not_examined"}
    lost = found(mlx_config(**dict(list(downs.items())[1:])), shapes)
    assert ids(lost) == {"not_examined", "quantization_conflict"}
    assert any("model.layers.0.mlp.down_proj" in f.title for f in lost)


def test_gptq_without_a_method_is_still_gptq() -> None:
    raw = {k: v for k, v in GPTQ.items() if k != "quant_method"}
    assert declared(raw).method == "gptq"
    assert found(raw, llama(gptq)) == []


# MXFP8: one power of two for 32 values. DeepSeek's tiles may have powers of two as well.


def mx(name: str, kind: str) -> Pack:
    return lambda out, width: {
        "weight": ("F8_E4M3", (out, width)),
        name: (kind, (out, width // 32)),
    }


def tiles(kind: str, tile: int = 32) -> Pack:
    return lambda out, width: {
        "weight": ("F8_E4M3", (out, width)),
        "weight_scale_inv": (kind, (-(-out // tile), -(-width // tile))),
    }


@pytest.mark.parametrize("kind", ["U8", "F8_E8M0"])
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("method", ["mxfp8", "fp8"])
def test_blocks_of_one_by_32_are_mxfp8(kind: str, name: str, method: str) -> None:
    raw = {"quant_method": method, "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]}
    assert found(raw, llama(mx(name, kind))) == []
    assert found({"quant_method": "mxfp8"}, llama(mx(name, kind))) == []
    half = llama(lambda out, width: mx(name, kind)(out, width) | {name: (kind, (out, width // 64))})
    assert ids(found(raw, half)) == {"quantization_conflict"}
    assert ids(found(raw, llama(tiles(kind)))) == {"quantization_conflict"}


@pytest.mark.parametrize("kind", ["F32", "F8_E8M0"])
def test_tiles_stay_fp8_whatever_their_scales_are(kind: str) -> None:
    raw = FP8 | {"weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    assert found(raw, llama(tiles(kind))) == []
    assert ids(found(raw, llama(tiles(kind, 16)))) == {"quantization_conflict"}
    assert ids(found(raw, llama(mx("weight_scale_inv", "U8")))) == {"quantization_conflict"}


# Modules that engines build in full precision, whatever is declared.

SPARSE_FP8 = FP8 | {"weight_block_size": [32, 32]}


def indexer(weights: Shapes) -> Shapes:
    """A sparse indexer as DeepSeek V3.2 and GLM-5 ship it: wk and wq_b in fp8,
    weights_proj plain.
    """
    at = "model.layers.1.self_attn.indexer"
    packed_part = {
        f"{at}.{m}.{p}": t for m in ("wk", "wq_b") for p, t in tiles("F32")(64, 64).items()
    }
    return packed_part | {
        f"{at}.k_norm.weight": ("BF16", (64,)),
        **{f"{at}.weights_proj.{p}": t for p, t in weights.items()},
    }


@pytest.mark.parametrize("raw", [SPARSE_FP8, SPARSE_FP8 | {"modules_to_not_convert": ["lm_head"]}])
def test_the_weighting_of_an_indexer_is_plain_by_design(raw: Raw) -> None:
    plain: Shapes = {"weight": ("BF16", (4, 64))}
    assert found(raw, llama(tiles("F32")) | indexer(plain)) == []
    assert ids(
        found(
            raw,
            llama(tiles("F32"), plain=("layers.1.mlp.up_proj", "layers.1.mlp.gate_proj"))
            | indexer(plain),
        )
    ) == {"quantization_conflict"}
    packed_one = found(raw, llama(tiles("F32")) | indexer(tiles("F32")(32, 64)))
    assert [f.severity.value for f in packed_one] == ["warning"]  # no engine has a scale for it


def test_a_buffer_of_the_quantiser_is_a_warning() -> None:
    shapes = llama(nvfp4) | {f"{QUERY}.weight_quantizer._double_scale": ("F32", ())}
    assert [(f.id, f.severity.value) for f in found(MODELOPT_NVFP4, shapes)] == [
        ("checkpoint.orphan_scale", "warning")
    ]


def test_patterns_that_could_take_for_ever_are_left_out() -> None:
    raw = W4A16 | {"ignore": ["re:(a+)+$", "re:" + "(.*)" * 9 + "x", "re:((x*)*)*y"]}
    shapes = {("a" * 60 + "!." + n if "up_proj" in n else n): t for n, t in llama(packed).items()}
    found(raw, shapes)


def test_bad_patterns_and_types_do_no_harm() -> None:
    odd: list[Raw] = [
        W4A16 | {"ignore": ["re:(", 3]},
        W4A16 | {"config_groups": {"a": None, "b": {"targets": 5}}},
        GPTQ | {"dynamic": {"-:(": {}, 5: None}},
        AUTO_ROUND | {"extra_config": {"*": 4, "a": None}},
        MODELOPT_NVFP4 | {"quantized_layers": [1]},
        TORCHAO | {"quant_type": "int8"},
        FP8 | {"weight_block_size": [0]},
        AWQ | {"bits": True, "group_size": "all"},
    ]
    for raw in odd:
        found(raw, llama(packed))
        declared(raw).accepts(QUERY)


def test_kv_scales_must_be_in_every_layer() -> None:
    raw = CT_FP8 | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    scales: Shapes = {
        f"model.layers.{i}.self_attn.{x}_scale": ("F32", (1,)) for i in range(4) for x in "kv"
    }

    def kv(shapes: Shapes) -> list[tuple[str, str]]:
        made = subject(raw, llama(fp8) | shapes)
        return [(f.id, f.severity.value) for f in check_kv(made, kv_cache(made, parse(made)))]

    assert kv(scales) == []
    assert kv({}) == [("checkpoint.kv_dtype_conflict", "warning")]
    assert kv({n: t for n, t in scales.items() if ".2." not in n}) == [
        ("checkpoint.kv_dtype_conflict", "error")
    ]
