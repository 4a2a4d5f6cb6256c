"""Command lines: read as the engine reads them, held against checkpoints, and advised."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.checkpoint.flags.advice import advise
from assay.checkpoint.flags.command import parse
from assay.checkpoint.flags.known_bad import REPORTS
from assay.checkpoint.flags.lint import Target, lint
from assay.checkpoint.flags.table import known_options
from assay.checkpoint.flags.versions import Version, engine_version
from assay.checkpoint.kv_cache import kv_cache
from assay.checkpoint.mtp import examine_checkpoint
from assay.checkpoint.schemes.registry import parse as declared_in
from assay.checkpoint.subject import Checkpoint
from assay.errors import UsageError
from assay.verdict import Finding
from checkpoint.head_samples import checkpoint, family
from checkpoint.test_draft import eagle, eagle3
from checkpoint_quantized import AUTO_ROUND, FP8_BLOCK, GPTQ, MODELOPT_NVFP4
from vllm_cpu import said_by_vllm

PLAIN = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vllm serve ORG/M --quantization fp8", {"--quantization": "fp8"}),
        ("-q awq -tp 2", {"--quantization": "awq", "--tensor-parallel-size": "2"}),
        ("--kv_cache_dtype=fp8", {"--kv-cache-dtype": "fp8"}),
        ("--max-model-l 8192", {"--max-model-len": "8192"}),  # an unambiguous beginning
        ("--enforce-eager --seed 3", {"--enforce-eager": None, "--seed": "3"}),
        ("-O3 --seed 3", {"--optimization-level": "3", "--seed": "3"}),
        ("-O=2", {"--optimization-level": "2"}),
        ("-O 1", {"--optimization-level": "1"}),
        ("--dtype --seed 3", {"--dtype": None, "--seed": "3"}),
        ("--served-model-name a b c --seed 3", {"--served-model-name": "a", "--seed": "3"}),
        ("python -m vllm.entrypoints.openai.api_server --model M", {"--model": "M"}),
    ],
)
def test_options_are_read_as_the_engine_does(command: str, expected: dict[str, str | None]) -> None:
    assert parse(command).options == expected
    assert parse(command).unknown == {}


def test_the_model_and_the_environment_are_read() -> None:
    read = parse("VLLM_MARLIN_INPUT_DTYPE=fp8 HF_HUB_OFFLINE=1 vllm serve ORG/M --seed 3")
    assert read.model == "ORG/M"
    assert read.environment == {"VLLM_MARLIN_INPUT_DTYPE": "fp8", "HF_HUB_OFFLINE": "1"}
    assert parse("vllm serve --model M").model == "M"


def test_json_and_dotted_parts_are_one() -> None:
    read = parse(
        """--speculative-config '{"method": "mtp"}' --speculative-config.num_speculative_tokens 2"""
    )
    assert read.structure("--speculative-config") == {"method": "mtp", "num_speculative_tokens": 2}
    assert parse("").structure("--speculative-config") is None


@pytest.mark.parametrize("text", ["--speculative-config '{'", "--speculative-config '[1]'"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text).structure("--speculative-config")


def test_unbalanced_quotes_are_refused() -> None:
    with pytest.raises(UsageError, match="quotation"):
        parse("--dtype 'half")


@given(st.text(max_size=60))
def test_no_text_breaks_the_reader(text: str) -> None:
    with contextlib.suppress(UsageError):
        parse(text)


@pytest.mark.engine
def test_vllm_has_exactly_these_options() -> None:
    theirs = said_by_vllm(Path(__file__).with_name("vllm_options_probe.py"))
    short = {option for option in theirs if not option.startswith("--")}
    assert {o: kind for o, kind in theirs.items() if o not in short} == {
        o: kind for o, kind in known_options().items() if o.startswith("--")
    }
    assert all(not parse(f"{option} 1").unknown for option in short)


def findings(
    config: dict[str, Any],
    command: str,
    version: str | None = None,
    capability: float | None = None,
) -> list[Finding]:
    subject = checkpoint(config, {"model.norm.weight": ("BF16", (64,))})
    return linted(subject, command, version, capability)


def linted(
    subject: Checkpoint, command: str, version: str | None = None, capability: float | None = None
) -> list[Finding]:
    declared = declared_in(subject)
    target = Target(
        subject,
        declared,
        kv_cache(subject, declared),
        examine_checkpoint(subject, declared),
        parse(command),
        Version.parse(version) if version else None,
        capability,
    )
    return list(lint(target))


def ids(found: list[Finding]) -> set[tuple[str, str]]:
    return {(f.id.removeprefix("checkpoint."), f.severity.value) for f in found}


@pytest.mark.parametrize(
    ("raw", "command", "rest", "expected"),
    [
        (None, "", {}, set()),
        (None, "--quantization fp8", {}, set()),
        (None, "--quantization mxfp8", {}, set()),
        (None, "--quantization experts_int8", {}, set()),
        (None, "--quantization none", {}, set()),
        (None, "--quantization awq", {}, {("flag_rejected", "error")}),
        (None, "-q awq_marlin", {}, {("flag_rejected", "error")}),
        (None, "--quantization gptq_marlin", {}, {("flag_rejected", "error")}),
        (None, "--quantization compressed-tensors", {}, {("flag_rejected", "error")}),
        (None, "--quantization modelopt", {}, {("flag_rejected", "error")}),
        (None, "--quantization torchao", {}, {("flag_rejected", "error")}),
        (None, "--quantization bitsandbytes", {}, {("flag_rejected", "error")}),
        (None, "--quantization bitsandbytes", {"version": "0.27.1"}, set()),
        (None, "--turbo", {}, {("flag_unknown", "error")}),
        (None, "--turbo", {"version": "0.40.0"}, {("flag_unknown", "warning")}),
        (None, "-tp 3", {}, {("flag_rejected", "error")}),
        (None, "--max-model-len 1k", {}, {("flag_rejected", "error")}),
        (None, "--max-model-len 512", {}, set()),
        (None, "--dtype float16", {}, {("config_conflict", "warning")}),
        (GPTQ, "-q gptq_marlin", {}, set()),
        (GPTQ, "-q awq", {}, {("flag_rejected", "error")}),
        (GPTQ, "", {"capability": 5.2}, {("flag_rejected", "error")}),
        (AUTO_ROUND, "-q awq_marlin", {}, {("flag_ignored", "warning")}),
        (AUTO_ROUND, "-q awq_marlin", {"version": "0.14.0"}, {("flag_rejected", "error")}),
        (MODELOPT_NVFP4, "-q fp8", {}, {("flag_ignored", "warning")}),
        (FP8_BLOCK, "--kv-cache-dtype fp8_e5m2", {}, {("kv_dtype_conflict", "error")}),
    ],
)
def test_findings_on_a_command_line(
    raw: dict[str, Any] | None, command: str, rest: dict[str, Any], expected: set[tuple[str, str]]
) -> None:
    config = PLAIN | ({"quantization_config": raw} if raw else {})
    assert ids(findings(config, command, **rest)) == expected


def test_an_unknown_flag_is_answered_with_its_neighbour() -> None:
    (finding,) = findings(PLAIN, "--enable-prefix-cacheing")
    assert "--enable-prefix-caching" in finding.title


def test_rope_overrides_must_keep_theta() -> None:
    config = PLAIN | {"rope_theta": 1_000_000.0}
    override = """--hf-overrides '{"rope_scaling": {"rope_type": "yarn", "factor": 4, "rope_theta": 1000}}'"""  # noqa: E501
    assert ids(findings(config, override)) == {("config_conflict", "warning")}
    assert findings(config, override.replace("1000}", "1000000}")) == []


def test_speculation_with_a_head() -> None:
    config, backbone, head = family("qwen3_5")
    command = """--speculative-config '{"method": "mtp", "num_speculative_tokens": %d}'"""
    whole = checkpoint(config, backbone, head)
    assert linted(whole, command % 1) == []
    assert ids(linted(whole, command % 3)) == {("config_conflict", "warning")}
    assert ids(findings(PLAIN, command % 1)) == {("mtp_missing", "error")}


SIGHTINGS = {
    "Qwen2-7B": (PLAIN | {"model_type": "qwen2", "hidden_size": 3584}, "--kv-cache-dtype fp8"),
    "Qwen2-VL": (PLAIN | {"model_type": "qwen2_5_vl_text"}, "--kv-cache-dtype fp8_e5m2"),
    "GLM-4.7-Flash": (
        PLAIN | {"model_type": "glm4_moe_lite", "kv_lora_rank": 512},
        "--kv-cache-dtype fp8",
    ),
    "GLM-5": (
        PLAIN
        | {"model_type": "glm_moe_dsa", "kv_lora_rank": 512, "quantization_config": FP8_BLOCK},
        "--kv-cache-dtype bfloat16",
    ),
    "Qwen3.5 in NVFP4": (
        PLAIN | {"model_type": "qwen3_5_moe_text", "quantization_config": MODELOPT_NVFP4},
        """--kv-cache-dtype fp8 --kv-transfer-config '{"kv_connector": "NixlConnector"}'""",
    ),
    "VLLM_MARLIN": (
        PLAIN | {"model_type": "qwen3_moe", "num_experts": 8, "quantization_config": AUTO_ROUND},
        "VLLM_MARLIN_INPUT_DTYPE=fp8 vllm serve M",
    ),
    "served in float16": (
        PLAIN | {"model_type": "qwen2", "quantization_config": GPTQ},
        "--dtype half",
    ),
}


@pytest.mark.parametrize("name", SIGHTINGS)
def test_a_reported_combination_is_recognised_with_its_reference(name: str) -> None:
    config, command = SIGHTINGS[name]
    found = [f for f in findings(config, command) if f.title.startswith("reported as broken")]
    assert len(found) == 1
    assert name in found[0].title
    assert found[0].references[0].startswith("https://github.com/")
    assert [f for f in findings(config, "") if f.title.startswith("reported")] == []


def test_every_report_is_tried() -> None:
    assert len(REPORTS) == len(SIGHTINGS)


def advice(subject: Checkpoint) -> tuple[str, str]:
    declared = declared_in(subject)
    said = advise(
        subject,
        "ORG/M",
        declared,
        kv_cache(subject, declared),
        examine_checkpoint(subject, declared),
        None,
    )
    return str(said["command"]), " ".join(map(str, said["notes"]))  # type: ignore[call-overload]


def test_advice_names_flags_only_with_a_reason() -> None:
    assert advice(checkpoint(PLAIN)) == ("vllm serve ORG/M", "")


def test_advice_for_a_head() -> None:
    config, backbone, head = family("qwen3_5")
    command, notes = advice(checkpoint(config, backbone, head))
    assert '"method":"mtp","num_speculative_tokens":1' in command
    assert "enable_weights_track" not in command
    command, notes = advice(checkpoint(config | {"quantization_config": GPTQ}, backbone))
    assert "--speculative-config" not in command
    assert '{"enable_weights_track":true}' in command
    assert "uses auto_gptq" in notes
    assert "6.0" in notes


def test_advice_for_a_kv_cache() -> None:
    scheme = FP8_BLOCK | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    config = PLAIN | {"quantization_config": scheme}
    scale = {
        "model.layers.0.self_attn.k_scale": ("F32", (1,)),
        "model.layers.0.self_attn.v_scale": ("F32", (1,)),
    }
    assert "leave --kv-cache-dtype out" in advice(checkpoint(config, scale))[1]
    assert "--kv-cache-dtype bfloat16" in advice(checkpoint(config))[0]


def test_advice_for_a_draft_names_its_target() -> None:
    assert advice(eagle3())[0].startswith("vllm serve TARGET")
    assert '"method":"eagle3","model":"ORG/M"' in advice(eagle3())[0]
    assert '"method":"eagle"' in advice(eagle())[0]


def test_advice_for_a_plugin_says_so() -> None:
    config = PLAIN | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    assert "vllm-bnb-plugin" in advice(checkpoint(config))[1]


def test_engine_versions() -> None:
    assert engine_version("vllm==0.32.0rc1+cpu") == Version((0, 32, 0))
    assert engine_version(None) is None
    for wrong in ("sglang==0.5", "vllm", "vllm==new"):
        with pytest.raises(UsageError):
            engine_version(wrong)
