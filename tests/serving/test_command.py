"""Reading serve commands, and making them again."""

from __future__ import annotations

import shlex

import pytest

from assay.errors import UsageError
from assay.serving.command import read_command, table_notice

VLLM = (
    "VLLM_X=1 vllm serve ./m --kv-cache-dtype fp8 -tp 2 --port 8000 --enable-prefix-caching"
    " --max-model-len 32768 --seed 3"
)


def names(text: str) -> list[str]:
    return [s.name for s in read_command(shlex.split(text)).settings]


def test_a_vllm_command_is_read_and_made_back() -> None:
    command = read_command(shlex.split(VLLM))
    assert [s.name for s in command.settings] == [
        "--kv-cache-dtype",
        "--tensor-parallel-size",
        "--enable-prefix-caching",
        "--max-model-len",
        "VLLM_X",
        "--no-enforce-eager",
    ]
    everything = frozenset(s.name for s in command.settings)
    words = command.words(everything, 5)
    assert (
        words[:3] == ["vllm", "serve", "./m"]
        and "8000" not in words
        and words[-2:] == ["--port", "5"]
    )
    assert command.variables(everything)["VLLM_X"] == "1" and "VLLM_X" not in command.variables(
        frozenset()
    )
    base = command.text(frozenset())
    assert (
        base
        == "vllm serve ./m --seed 3 --no-enable-prefix-caching --max-model-len 8000 --enforce-eager"
    )
    assert "--kv-cache-dtype fp8" in command.text(everything)


def test_the_module_form_of_vllm_is_vllm_too() -> None:
    text = (
        "python3 -m vllm.entrypoints.openai.api_server --model /m --kv-cache-dtype fp8"
        " --enforce-eager --no-enable-prefix-caching"
    )
    command = read_command(shlex.split(text))
    assert (command.engine, command.model, names(text)) == ("vllm", "/m", ["--kv-cache-dtype"])


def test_dotted_parts_of_one_setting_belong_together() -> None:
    text = (
        "vllm serve m --speculative-config.method ngram --speculative-config.num_speculative_tokens"
        " 4 --enforce-eager"
    )
    command = read_command(shlex.split(text))
    setting = command.settings[0]
    assert setting.name == "--speculative-config" and len(setting.words) == 4


def test_llama_server_with_its_short_names() -> None:
    command = read_command(
        shlex.split(
            "/x/llama-server -m a.gguf -ctk q4_0 -fa on -c 4096 -np 4 --jinja --rope-freq-base 99"
        )
    )
    assert command.engine == "llama.cpp" and command.model == "a.gguf"
    assert [s.name for s in command.settings] == [
        "--cache-type-k",
        "--flash-attn",
        "--parallel",
        "--rope-freq-base",
    ]
    assert "--parallel 1" in command.text(frozenset()) and "-ctk" not in command.text(frozenset())


def test_values_that_are_safe_already_are_no_settings() -> None:
    assert (
        names(
            "vllm serve m --kv-cache-dtype auto -tp 1 --enforce-eager --no-enable-prefix-caching"
            " --max-model-len 4096"
        )
        == []
    )


def test_any_command_by_a_template() -> None:
    command = read_command(["--a", "1", "--b", "--c=2"], "serve --port {port} {settings} --end")
    assert [(s.name, s.value) for s in command.settings] == [
        ("--a", "1"),
        ("--b", None),
        ("--c", "2"),
    ]
    assert command.words({"--c"}, 7) == ["serve", "--port", "7", "--c=2", "--end"]
    assert table_notice(command, None)
    with pytest.raises(UsageError, match=r"\{port\}"):
        read_command([], "serve {settings}")


def test_nothing_to_read() -> None:
    with pytest.raises(UsageError, match="no command"):
        read_command([])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bash -c 'vllm serve m'", "hidden in a text"),
        ("vllm serve m --kv-cache-dtype fp8 > log", "only a shell understands"),
        ("vllm serve --config file.yaml", "cannot be left out one by one"),
    ],
)
def test_settings_that_cannot_be_taken_apart_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_command(shlex.split(text))


def test_the_model_of_an_unknown_engine_stays_in_the_baseline() -> None:
    command = read_command(
        shlex.split("A=1 env B_KEY=2 python -m other.launch --model-path x --fast 1")
    )
    assert command.text(()) == "B_KEY=SECRET python -m other.launch --model-path x"
    assert [s.name for s in command.settings] == ["--fast", "A"]


def test_no_secret_is_in_the_text_of_a_command() -> None:
    command = read_command(
        shlex.split(
            "HF_TOKEN=hf_abcdefgh1234 vllm serve m --api-key sk-verysecret1 --enforce-eager"
        )
    )
    text = command.text(frozenset(s.name for s in command.settings))
    assert "hf_abc" not in text and "verysecret" not in text
    assert (
        "sk-verysecret1" in command.words(frozenset(), 1)
        and command.variables(())["HF_TOKEN"] == "hf_abcdefgh1234"
    )


def test_the_bundle_takes_secrets_out_and_leaves_prose_alone() -> None:
    from assay.serving.scrub import Scrubber

    scrub = Scrubber(("vllm", "--api-key", "opensesame99"))
    dirty = (
        "key opensesame99, Authorization: Bearer abcdef123456, hf_abcdefghijkl, /home/ann/models,"
        " HF_TOKEN=zzzzyyyy"
    )
    clean = scrub.text(dirty)
    for secret in ("opensesame99", "abcdef123456", "hf_abcdefghijkl", "/home/ann", "zzzzyyyy"):
        assert secret not in clean
    prose = '{"completion_tokens": 24, "text": "each token predicts the next; max_tokens=160"}'
    assert scrub.text(prose) == prose


def test_options_that_mean_nothing_alone_are_one_setting_and_an_adapter_is_asked_by_its_name() -> (
    None
):
    lora = read_command(
        shlex.split(
            "vllm serve m --enforce-eager --no-enable-prefix-caching --enable-lora --lora-modules"
            " a=/x b=/y"
        )
    )
    assert [s.name for s in lora.settings] == ["--lora-modules"]
    assert lora.settings[0].words == ("--lora-modules", "a=/x", "b=/y", "--enable-lora")
    assert (lora.asked({"--lora-modules"}), lora.asked(())) == ("a", None)
    draft = read_command(
        shlex.split(
            "llama-server -m a.gguf -md b.gguf --spec-type draft-simple --spec-draft-n-max 8"
        )
    )
    assert [s.name for s in draft.settings] == ["--model-draft"] and draft.text(
        ()
    ) == "llama-server -m a.gguf"


def test_a_program_in_front_of_the_engine_belongs_to_its_start() -> None:
    pinned = read_command(
        shlex.split("taskset -c 0-3 /x/llama-server -m a.gguf -fa on --metrics -c 4096")
    )
    assert (pinned.engine, pinned.start) == (
        "llama.cpp",
        ("taskset", "-c", "0-3", "/x/llama-server"),
    )
    assert (
        pinned.text({"--flash-attn"}) == "taskset -c 0-3 /x/llama-server -m a.gguf -c 4096 -fa on"
    )
    numa = read_command(
        shlex.split("numactl -N 0 vllm serve m --enforce-eager --no-enable-prefix-caching")
    )
    assert (numa.engine, numa.model) == ("vllm", "m")
