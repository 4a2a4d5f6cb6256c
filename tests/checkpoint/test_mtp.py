"""Draft heads: every status on every layout, from headers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from assay.checkpoint.flags.versions import Version
from assay.checkpoint.mtp import MtpReport, examine_checkpoint
from assay.checkpoint.mtp_families import FAMILIES
from assay.checkpoint.mtp_findings import TRACK, check_mtp, loudness
from assay.checkpoint.schemes.registry import parse
from checkpoint.head_samples import Shapes, checkpoint, family
from checkpoint_quantized import FAMILIES as LAYOUTS
from checkpoint_quantized import FP8_BLOCK, GPTQ, MODELOPT_NVFP4, W4A16

OWN_EMBEDDING = ("embed_tokens.weight", "shared_head.head.weight")
"""What heads of the layer layout may leave to the backbone."""
KEY = {"qwen3_5": "mtp_num_hidden_layers"}
NOW = Version((0, 32, 0))


def examined(config: dict[str, Any], *files: Shapes) -> MtpReport:
    subject = checkpoint(config, *files)
    return examine_checkpoint(subject, parse(subject))


def ids(report: MtpReport, quantized: bool = False) -> set[tuple[str, str]]:
    found = check_mtp(report, quantized, NOW)
    return {(f.id.removeprefix("checkpoint."), f.severity.value) for f in found}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_whole_head_is_ok(name: str) -> None:
    config, backbone, head = family(name)
    report = examined(config, backbone, head)
    assert (report.status, report.announced, report.present, report.complete) == (
        "ok",
        1,
        len(head),
        True,
    )
    assert report.quantized is None
    assert ids(report) == set()


def test_qwen35_has_fifteen_tensors() -> None:
    config, backbone, head = family("qwen3_5")
    assert len(head) == 15
    assert examined(config, backbone, head).expected == 15


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_announced_head_that_is_not_there(name: str) -> None:
    config, backbone, _ = family(name)
    report = examined(config, backbone)
    assert (report.status, report.present, report.complete) == ("absent", 0, False)
    assert ids(report) == {("mtp_missing", "error")}
    (finding,) = check_mtp(report, True, NOW)
    assert any(TRACK in remedy for remedy in finding.remedies)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_single_tensor_of_a_head_is_missed(name: str) -> None:
    config, backbone, head = family(name)
    for lost in head:
        report = examined(config, backbone, {n: t for n, t in head.items() if n != lost})
        if lost.endswith(OWN_EMBEDDING):
            assert report.status == "ok"
        else:
            assert (report.status, report.missing, report.complete) == ("partial", (lost,), False)
            assert ids(report) == {("mtp_partial", "error")}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_head_of_another_size_is_partial(name: str) -> None:
    config, backbone, head = family(name)
    entry = next(
        n for n in head if n.endswith(("fc.weight", "eh_proj.weight", "input_proj.weight"))
    )
    report = examined(config, backbone, head | {entry: ("BF16", (64, 64))})
    assert report.status == "partial"
    assert report.wrong_shape == {entry: ((64, 64), (64, 128))}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_head_that_nobody_announces(name: str) -> None:
    config, backbone, head = family(name)
    key = KEY.get(name, "num_nextn_predict_layers")
    report = examined(config | {key: 0}, backbone, head)
    assert (report.status, report.announced) == ("not_announced", 0)
    assert ids(report) == {("config_conflict", "warning")}
    assert examined(config | {key: 0}, backbone).status == "none"


def packed(head: Shapes) -> Shapes:
    """The projections of a head in compressed-tensors' packing."""
    result: Shapes = {}
    for name, (dtype, shape) in head.items():
        if (
            len(shape) == 2
            and "norm" not in name
            and ".gate." not in name
            and not name.endswith(OWN_EMBEDDING)
        ):
            module = name.removesuffix(".weight")
            result |= {
                f"{module}.weight_packed": ("I32", (shape[0], shape[1] // 8)),
                f"{module}.weight_scale": ("BF16", (shape[0], shape[1] // 32)),
                f"{module}.weight_shape": ("I64", (2,)),
            }
        else:
            result[name] = (dtype, shape)
    return result


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_packed_head_must_be_declared(name: str) -> None:
    config, backbone, head = family(name)
    report = examined(config, backbone, packed(head))
    assert report.status == "dtype_conflict"
    assert ids(report) == {("mtp_dtype", "error")}
    declared = examined(config | {"quantization_config": W4A16}, backbone, packed(head))
    assert (declared.status, declared.conflicts) == ("declared_quantized", {})
    assert ids(declared, True) == {("mtp_dtype", "info")}


def test_a_plain_head_in_a_quantised_checkpoint_must_be_excluded() -> None:
    config, backbone, head = family("qwen3_5")
    forgotten = examined(config | {"quantization_config": W4A16}, backbone, head)
    assert forgotten.status == "dtype_conflict"
    assert "mtp.fc" in forgotten.conflicts
    ignoring = W4A16 | {"ignore": ["lm_head", "re:.*mtp.*"]}
    assert examined(config | {"quantization_config": ignoring}, backbone, head).status == "ok"
    excluded = GPTQ | {"dynamic": {"-:.*mtp.*": {}}}
    assert examined(config | {"quantization_config": excluded}, backbone, head).status == "ok"
    assert (
        examined(config | {"quantization_config": GPTQ}, backbone, head).status == "dtype_conflict"
    )


def test_an_ignore_list_may_name_fused_matrices() -> None:
    config, backbone, head = family("qwen3_5")
    at = "mtp.layers.0"
    names = [
        f"{at}.self_attn.qkv_proj",
        f"{at}.self_attn.o_proj",
        f"{at}.mlp.gate_up_proj",
        f"{at}.mlp.down_proj",
    ]
    whole = W4A16 | {"ignore": ["lm_head", "mtp.fc", *names]}
    assert examined(config | {"quantization_config": whole}, backbone, head).status == "ok"


def test_modelopt_may_leave_the_entry_plain() -> None:
    config, backbone, head = family("qwen3_5")
    excluding = MODELOPT_NVFP4 | {"ignore": ["lm_head", "mtp.layers.*"]}
    assert examined(config | {"quantization_config": excluding}, backbone, head).status == "ok"


def test_fp8_without_a_scale_is_a_conflict_that_is_cast() -> None:
    config, backbone, head = family("qwen3_5")
    report = examined(config, backbone, head | {"mtp.fc.weight": ("F8_E4M3", (64, 128))})
    assert (report.status, report.cast) == ("dtype_conflict", ("mtp.fc",))
    assert "one warning" in loudness(report, False, NOW)
    plain = examined(config | {"quantization_config": FP8_BLOCK}, backbone, head)
    assert plain.cast
    assert set(plain.cast) == set(plain.conflicts)


def test_the_version_decides_what_the_engine_says() -> None:
    config, backbone, head = family("qwen3_5")
    absent, conflict = examined(config, backbone), examined(config, backbone, packed(head))
    assert "silent" in loudness(absent, True, NOW)
    assert "stops at load" in loudness(absent, False, NOW)
    assert "stops at load" in loudness(conflict, True, NOW)
    assert "not established" in loudness(conflict, True, Version((0, 20, 0)))
    config, backbone, head = family("deepseek_v3")
    absent, partial = (
        examined(config, backbone),
        examined(config, backbone, dict(list(head.items())[:3])),
    )
    assert "stops at load" in loudness(absent, True, NOW)
    assert "not established" in loudness(absent, True, Version((0, 12, 0)))
    assert "silent" in loudness(partial, True, NOW)


def test_the_text_config_may_announce() -> None:
    config, backbone, head = family("qwen3_5")
    nested = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": config,
    }
    moved = {n.replace("model.", "model.language_model.", 1): t for n, t in backbone.items()}
    assert examined(nested, moved, head).status == "ok"
    assert examined(nested, moved).status == "absent"


def test_a_head_by_default_is_only_a_warning() -> None:
    config, backbone, _ = family("qwen3_next")
    del config["num_nextn_predict_layers"]
    report = examined(config, backbone)
    assert (report.status, report.by_default) == ("absent", True)
    assert ids(report) == {("mtp_missing", "warning")}


def test_a_head_in_a_file_that_no_index_names() -> None:
    config, backbone, head = family("qwen3_5")
    subject = checkpoint(config, backbone, head)
    hidden = replace(subject, stray=frozenset({"part-1.safetensors"}))
    report = examine_checkpoint(hidden, None)
    assert (report.status, report.stray_file) == ("absent", "part-1.safetensors")
    (finding,) = check_mtp(report, False, NOW)
    assert "part-1.safetensors" in finding.causes[0]


def test_fused_experts_are_as_good_as_single_ones() -> None:
    config, backbone, head = family("qwen3_next")
    fused: Shapes = {n: t for n, t in head.items() if ".experts." not in n}
    fused |= {
        "mtp.layers.0.mlp.experts.gate_up_proj": ("BF16", (4, 64, 64)),
        "mtp.layers.0.mlp.experts.down_proj": ("BF16", (4, 64, 32)),
    }
    assert examined(config, backbone, fused).status == "ok"
    del fused["mtp.layers.0.mlp.experts.down_proj"]
    assert examined(config, backbone, fused).status == "partial"


def test_a_second_layer_is_owed_where_two_are_announced() -> None:
    config, backbone, head = family("deepseek_v3")
    report = examined(config | {"num_nextn_predict_layers": 2}, backbone, head)
    assert report.status == "partial"
    assert all(n.startswith("model.layers.5.") for n in report.missing)


def test_ordinary_layers_beyond_the_configured_ones_are_no_head() -> None:
    config, backbone, _ = family("deepseek_v3")
    fewer = config | {"num_hidden_layers": 3, "num_nextn_predict_layers": 0}
    assert examined(fewer, backbone).status == "none"


def test_the_published_families_are_known() -> None:
    published = {
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
        "qwen4_exp",
        "deepseek_v3",
        "deepseek_v32",
        "glm_moe_dsa",
        "deepseek_v4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_ocr",
        "mimo",
        "mimo_v2",
        "ernie4_5_moe",
        "nemotron_h",
        "exaone_moe",
        "exaone4_5",
        "longcat_flash",
        "step3p5",
        "step3p7",
        "bailing_hybrid",
        "hy_v3",
        "hy_v4",
        "pangu_ultra_moe",
        "kimi_k3",
        "glm5_next",
        "dots3_note",
        "minimax_m3",
        "inkling",
    }
    assert published <= set(FAMILIES)


@pytest.mark.engine
def test_vllm_builds_the_draft_classes_that_the_table_names() -> None:
    from assay.demo import vllm_python

    package = next((vllm_python().parents[1] / "lib").glob("python3*/site-packages/vllm"))
    source = (package / "config" / "speculative.py").read_text()
    registry = (package / "model_executor" / "models" / "registry.py").read_text()
    for model_type, known in FAMILIES.items():
        assert f'"{known.draft_class}"' in registry, model_type
    for key in {key.rpartition(".")[2] for known in FAMILIES.values() for key in known.keys}:
        if key != "num_mtp_layers":  # Inkling's own, read by its model
            assert key in source, key


# The entry projection is plain by design: vLLM builds it as a Linear of its own, and the official
# FP8 releases store it so.


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("plain", ["eh_proj", "none", "q_proj"])
def test_the_entry_projection_may_be_plain_in_a_quantised_head(name: str, plain: str) -> None:
    config, backbone, head = family(name)
    config |= {"quantization_config": FP8_BLOCK | {"weight_block_size": [32, 32]}}

    def pack(shapes: Shapes) -> Shapes:
        packed: Shapes = {}
        for tensor, (dtype, shape) in shapes.items():
            module = tensor.removesuffix(".weight")
            if len(shape) == 2 and "_proj" in module and not module.endswith(plain):
                packed[tensor] = ("F8_E4M3", shape)
                packed[f"{module}.weight_scale_inv"] = (
                    "F32",
                    (-(-shape[0] // 32), -(-shape[1] // 32)),
                )
            else:
                packed[tensor] = (dtype, shape)
        return packed

    report = examined(config, pack(backbone), pack(head))
    wanted = {
        "eh_proj": "declared_quantized",
        "none": "declared_quantized",
        "q_proj": "dtype_conflict",
    }[plain]
    if plain == "q_proj" and name == "deepseek_v3":  # which has none: q_a_proj and q_b_proj
        wanted = "declared_quantized"
    assert report.status == wanted, report.conflicts


# A head of unknown layout is a whole block: it owes attention and MLP, and what the backbone's
# layers share.

NEXTN = {"num_nextn_predict_layers": 1}


def other_family(model_type: str, **changes: Any) -> tuple[dict[str, Any], Shapes, Shapes]:
    """DeepSeek's layers and head under a model type whose layout is not known by heart."""
    config, backbone, head = family("deepseek_v3")
    return config | NEXTN | {"model_type": model_type} | changes, backbone, head


@pytest.mark.parametrize(
    "model_type", ["glm_moe_dsa", "deepseek_v32", "bailing_hybrid", "never_seen"]
)
def test_a_head_of_unknown_layout_is_a_whole_block(model_type: str) -> None:
    config, backbone, head = other_family(model_type)
    assert examined(config, backbone, head).status == "ok"
    for lost, says in (
        (".self_attn.", "(attention)"), (".mlp.", "(MLP)"), ("self_attn.o_proj", "self_attn.o_proj"),  # noqa: E501
        ("input_layernorm", "input_layernorm"),
    ):  # fmt: skip
        report = examined(config, backbone, {n: t for n, t in head.items() if lost not in n})
        assert report.status == "partial", lost
        assert any(says in name for name in report.missing)
        assert report.complete is False


@pytest.mark.parametrize("model_type", ["exaone_moe", "longcat_flash", "nemotron_h", "minimax_m3"])
@pytest.mark.parametrize("parts", ["both", "attention", "mlp"])
def test_a_head_in_a_place_of_its_own_owes_both_parts_too(model_type: str, parts: str) -> None:
    config, backbone, _ = family("qwen3_next")
    config |= {"model_type": model_type, "num_nextn_predict_layers": 1, "num_mtp_modules": 1}
    at = "model.mtp.layers.0" if model_type == "longcat_flash" else "mtp.layers.0"
    names = {"attention": "self_attn.q_proj", "mlp": "mlp.down_proj"}
    head: Shapes = {
        f"{at}.{n}.weight": ("BF16", (64, 64))
        for part, n in names.items()
        if parts in {part, "both"}
    }
    head[f"{at}.eh_proj.weight"] = ("BF16", (64, 128))
    assert examined(config, backbone, head).status == ("ok" if parts == "both" else "partial")


def test_a_second_layer_that_was_announced_and_is_not_there() -> None:
    config, backbone, head = other_family("glm_moe_dsa", num_nextn_predict_layers=2)
    report = examined(config, backbone, head)
    assert report.status == "partial"
    assert all(name.startswith("model.layers.5.") for name in report.missing)
