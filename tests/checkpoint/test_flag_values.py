"""Values, paths and switches of a command line that vLLM refuses at start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from assay.checkpoint.flags.command import parse
from assay.checkpoint.flags.context import positions
from assay.checkpoint.flags.flag_values import lint_values, number_of
from assay.checkpoint.flags.lint import Target, lint
from assay.checkpoint.flags.table import known_options, options, registered
from assay.checkpoint.kv_cache import KvCache
from assay.checkpoint.state import NO_HEAD
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Severity

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
    "max_position_embeddings": 4096,
}  # fmt: skip


def subject(**changes: Any) -> Checkpoint:
    text = json.dumps({**CONFIG, **changes}).encode()
    return Checkpoint("folder", {"config.json": len(text)}, lambda name: text)


def said(command: str, checkpoint: Checkpoint | None = None) -> list[tuple[str, str]]:
    """(severity, title) of every finding on a command."""
    made = checkpoint or subject()
    target = Target(made, None, KvCache(None, False, frozenset()), NO_HEAD, parse(command), None)
    return [(f.severity.value, f.title) for f in lint(target)]


REFUSED = (
    ("--tool-call-parser nosuch --enable-auto-tool-choice", "not registered"),
    ("--reasoning-parser nosuch", "not registered"),
    ("--enable-auto-tool-choice", "needs --tool-call-parser"),
    ("--enable-log-outputs", "needs --enable-log-requests"),
    ("--gpu-memory-utilization 1.7", "not at most 1"),
    ("--gpu-memory-utilization 0", "not above 0"),
    ("--gpu-memory-utilization most", "not a number"),
    ("--chat-template nosuch.jinja", "cannot be read"),
    ("--chat-template '{% for m in messages %}'", "does not parse"),
    (
        '--speculative-config \'{"model": "/no/such/draft", "num_speculative_tokens": 3}\'',
        "no such",
    ),
    ('--speculative-config \'{"method": "ngram", "num_speculative_tokens": 0}\'', "above 0"),
    ("--dtype int8", "not one of"),
    ("--load-format nosuch", "not registered"),
    ("--load-format gguf", "vllm-gguf-plugin"),
    ("--max-num-seqs 0", "not at least 1"),
    ("--max-num-seqs many", "not a whole number"),
    ("--port 99999", "not at most 65535"),
    ("--block-size 7", "not a multiple of 16"),
    ("--tokenizer /no/such/folder", "no such folder"),
    ("--tokenizer-mode nosuch", "not registered"),
    ("--max-model-len 4.5K", "not a whole number, or one with k"),
    ("--max-model-len 8192", "beyond the model's 4096 positions"),
    ("--runner nosuch", "not one of"),
    ("--eplb-config {oops", "not JSON"),
    ("--served-model-name", None),
    ("--lora-modules nosuch --enable-lora", "not NAME=PATH"),
    ("--log-config-file /no/such/file.json", "no such file"),
    ("--spec-tokens 0", "not at least 1"),
    ("--pipeline-parallel-size 0", "not at least 1"),
)


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_what_the_engine_refuses(flags: str, words: str | None) -> None:
    errors = [title for severity, title in said(f"vllm serve m {flags}") if severity == "error"]
    assert (len(errors) == 1 and words in errors[0]) if words else errors == [], errors


@pytest.mark.parametrize(
    "flags",
    [
        "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3",
        "--tool-call-parser mine --tool-parser-plugin ./mine.py --enable-auto-tool-choice",
        "--gpu-memory-utilization 1 --max-num-seqs 1 --port 0 --block-size 32",
        "--max-model-len auto --max-num-batched-tokens 8k --dtype half --load-format dummy",
        "--chat-template '{{ messages[0].content }}'",
        "--chat-template template_chatml.jinja",
        "--tokenizer m",
        "--enable-lora --lora-modules a=/some/where",
        "--tokenizer some/repository",
        '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
        "--api-key a b -tp 2 -pp 1",
        "--hf-overrides '{\"max_position_embeddings\": 9000}' --max-model-len 9000",
    ],
)
def test_what_the_engine_takes(flags: str) -> None:
    assert said(f"vllm serve m {flags}") == []


def test_a_parser_without_its_switch_and_of_another_family() -> None:
    (silent,) = said("vllm serve m --tool-call-parser hermes")
    assert silent[0] == "warning"
    assert "does nothing without --enable-auto-tool-choice" in silent[1]
    (other,) = said("vllm serve m --tool-call-parser llama3_json --enable-auto-tool-choice")
    assert other == (
        "warning",
        "--tool-call-parser llama3_json reads the tool calls of llama models, this model is qwen2",
    )


@pytest.mark.parametrize(
    "command",
    [
        "python -m sglang.launch_server --model-path m --tp 2",
        "CUDA_VISIBLE_DEVICES=0 llama-server -m model.gguf -c 4096",
        "/opt/bin/llama-server -m model.gguf",
        "trtllm-serve m --tp_size 2",
        "text-generation-launcher --model-id m",
        "lmdeploy serve api_server m",
        "ollama serve",
    ],
)
def test_the_command_of_another_engine_is_named(command: str) -> None:
    ((severity, title),) = said(command)
    assert (severity, "its flags were not examined" in title) == ("warning", True)


@pytest.mark.parametrize("command", ["vllm serve ollama --port 8000", "--port 8000", "serve m"])
def test_a_model_is_not_taken_for_an_engine(command: str) -> None:
    assert parse(command).engine is None


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "linear", "factor": 4}, 16384),
        ({"type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "llama3", "factor": 8}, 4096),
        ({"rope_type": "longrope", "factor": 8}, 4096),
        ({"rope_type": "default"}, 4096),
        ({"type": "mrope", "mrope_section": [1, 1, 2]}, 4096),
        ({"full_attention": {"rope_type": "linear", "factor": 8}}, 32768),
    ],
)
def test_positions_under_every_rope_type(rope: dict[str, Any], length: int) -> None:
    made = subject(rope_scaling=rope)
    assert positions(made, parse("vllm serve m")) == length
    command = f"vllm serve m --max-model-len {length + 1}"
    assert any("beyond the model's" in title for _, title in said(command, made))
    assert not any("beyond" in title for _, title in said(command.replace("1", "0", 0)[:-1], made))
    allowed = said(f"VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 {command}", made)
    assert [severity for severity, title in allowed if "beyond" in title] == ["warning"]


def test_the_tokenizer_of_another_model(tmp_path: Path) -> None:
    own = {f"t{i}": i for i in range(100)}
    other = {f"t{i}": 99 - i for i in range(100)}
    for name, ids in (("same", own), ("other", other), ("larger", {**own, "more": 999})):
        (tmp_path / name).mkdir()
        document = {"model": {"type": "BPE", "vocab": ids, "merges": []}}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(document))
    texts = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": (tmp_path / "same" / "tokenizer.json").read_bytes(),
    }
    made = Checkpoint("folder", {n: len(t) for n, t in texts.items()}, texts.__getitem__)
    assert said(f"vllm serve m --tokenizer {tmp_path / 'same'}", made) == []
    ((severity, title),) = said(f"vllm serve m --tokenizer {tmp_path / 'other'}", made)
    assert (severity, "another model's" in title) == ("error", True)


def test_an_older_version_gets_warnings() -> None:
    from assay.checkpoint.flags.versions import Version

    args = parse("vllm serve m --dtype int8")
    version = Version.parse("0.20.0")
    target = Target(subject(), None, KvCache(None, False, frozenset()), NO_HEAD, args, version)
    assert [f.severity for f in lint(target)] == [Severity.WARNING]


def test_the_table_is_that_of_the_parser() -> None:
    assert known_options()["--enforce-eager"] == "switch"
    assert options()["--gpu-memory-utilization"].bounds == (("gt", 0), ("le", 1))
    assert {"hermes", "mistral"} <= (registered("--tool-call-parser") or frozenset())
    assert registered("--dtype") is None
    assert list(lint_values(parse("vllm serve m --kv-cache-dtype int3"))) == []  # another rule's


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [("8k", "size", 8000), ("8K", "size", 8192), ("1.5k", "size", 1500), ("1.5K", "size", None),
     ("auto", "size or auto", -1), ("auto", "size", None), ("0x10", "int", None), ("1e3", "float", 1000)],  # noqa: E501
)  # fmt: skip
def test_numbers(text: str, kind: str, value: float | None) -> None:
    assert number_of(text, kind) == value
