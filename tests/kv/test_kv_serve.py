"""`assay kv serve`: the command that it makes, and what it refuses with words."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import assay
from assay.cli.main import invoke
from assay.engines.vllm.hooks import HOOK
from assay.errors import AssayError
from assay.lab.kv import serve
from assay.lab.kv.serve import (
    ServePlan,
    check_options,
    launch_of,
    needs_history,
    option,
    plugin_folder,
    run_serve,
)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    folder = tmp_path / "model"
    folder.mkdir()
    configure(folder)
    return folder


def configure(folder: Path, **more: Any) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048, **more}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A Python that says that it has what a server needs, and whose server is a script of the test."""
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -c ]; then exec {sys.executable} -c '
        '"import importlib.util; real = importlib.util.find_spec; '
        "importlib.util.find_spec = lambda name: True if name == 'vllm' else real(name)\n$2\"; fi\n"
        f'exec {sys.executable} "{tmp_path}/server.py" "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--port 8001", "--port", "8001"),
        ("--port=8001 --host x", "--port", "8001"),
        ("--port 1 --port 2", "--port", "2"),
        ("-tp 4", "--tensor-parallel-size", "4"),
        ("--tensor_parallel_size 4", "--tensor-parallel-size", "4"),
        ("--enable-prefix-caching --port 1", "--enable-prefix-caching", ""),
        ("--enable-prefix-caching", "--enable-prefix-caching", ""),
        ("--port 1", "--host", None),
    ],
)
def test_options_are_found_as_vllm_takes_them(words: str, name: str, value: str | None) -> None:
    assert option(words.split(), name) == value


@pytest.mark.parametrize(
    ("words", "history", "said"),
    [
        ("-tp 2", False, "a part of the heads"),
        ("--pipeline-parallel-size=2", False, "a part of the layers"),
        ("-cc {}", False, "CUDA graphs"),
        ("-O3", False, "CUDA graphs"),
        ("--no-enforce-eager", False, "CUDA graphs"),
        ("--speculative-config {}", False, "drafted"),
        ("--async-scheduling", False, "not done yet"),
        ("--enable-prefix-caching", True, "mixture"),
        ("--kv-cache-dtype fp8", False, "second time"),
    ],
)
def test_options_with_which_numbers_would_be_wrong_are_refused(words: str, history: bool, said: str) -> None:
    with pytest.raises(AssayError, match=said):
        check_options(words.split(), history=history)


def test_options_that_do_no_harm_are_left_alone() -> None:
    check_options(
        shlex.split("-tp 1 --enable-prefix-caching --kv-cache-dtype auto --port 80 --dtype bfloat16"),
        history=False,
    )
    check_options(["--no-enable-prefix-caching"], history=True)


@pytest.mark.parametrize(
    ("codec", "mode", "expected"),
    [
        ("hadamard(bits=4)", "inforward", False),
        ("sinks(n=4)+fp8", "inforward", False),
        ("hadamard(bits=4)", "decode", True),
        ("recent(n=8)+hadamard", "inforward", True),
        ("int(bits=4)", "inforward", True),
        ("v:kakeya", "inforward", True),
        ("mean+hadamard", "inforward", True),
    ],
)
def test_which_codecs_change_tokens_later(codec: str, mode: str, expected: bool) -> None:
    assert needs_history(codec, mode) is expected


def test_the_command_holds_all_that_a_worker_needs(checkpoint: Path, python: str) -> None:
    plan = ServePlan(
        str(checkpoint), "recent(n=8)+fp8", python=python, options=("--port", "8001"), skip_layers=(0,)
    )
    launch = launch_of(plan)
    for word in ("--enforce-eager", "--no-async-scheduling", "--no-enable-prefix-caching"):
        assert word in launch.command
    assert launch.command[-2:] == ("--port", "8001")
    hook = json.loads(launch.environment[HOOK])
    assert hook["config"]["codec"] == "recent(n=8)+fp8"
    assert hook["config"]["length"] == 2048
    assert hook["config"]["skip_layers"] == [0]
    assert (
        "--no-enable-prefix-caching"
        not in launch_of(ServePlan(str(checkpoint), "fp8", python=python)).command
    )
    # It can be pasted into a shell.
    words = shlex.split(str(launch))
    assert words[-len(launch.command) :] == list(launch.command)
    assert json.loads(words[2].partition("=")[2]) == hook


def test_a_python_finds_the_plugin_in_its_folder(checkpoint: Path) -> None:
    folder = plugin_folder()
    assert plugin_folder() == folder
    code = (
        "import importlib.metadata as m, assay; "
        "e = [e for e in m.entry_points(group='vllm.general_plugins') if e.name == 'assay'][0]; "
        "print(e.load().__module__, assay.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    module, path = done.stdout.split()
    assert module == "assay.engines.vllm.hooks"
    assert Path(path).resolve() == Path(assay.__file__).resolve()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"use_sliding_window": True}, "sliding-window"),
    ],
)
def test_checkpoints_that_cannot_be_hooked_are_refused(
    checkpoint: Path, python: str, config: dict[str, Any], said: str
) -> None:
    configure(checkpoint, **config)
    with pytest.raises(AssayError, match=said):
        launch_of(ServePlan(str(checkpoint), "fp8", python=python))


def test_a_plugin_that_would_not_be_loaded_is_refused(
    checkpoint: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(AssayError, match="keeps assay's plug-in out"):
        launch_of(ServePlan(str(checkpoint), "fp8", python=python))
    monkeypatch.setenv("VLLM_PLUGINS", "")  # none at all
    with pytest.raises(AssayError, match="keeps assay's plug-in out"):
        launch_of(ServePlan(str(checkpoint), "fp8", python=python))


SERVER = """
import json, os, socket, sys, time
how = {how!r}
if how == "refuses":
    open(os.environ["ASSAY_VLLM_HOOK_REPORT"], "w").write(json.dumps({{"error": "no such layers", "remedy": "other ones"}}))
    sys.exit(1)
if how == "dies":
    sys.exit(3)
if how == "serves":
    open(os.environ["ASSAY_VLLM_HOOK_REPORT"], "w").write(json.dumps({{"layers": 30}}))
    sys.exit(0)
listening = socket.create_server(("127.0.0.1", {port}))
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("refuses", "no such layers"),
        ("dies", "status 3"),
        ("ignores", "no worker of it loaded"),
        ("serves", None),
    ],
)
def test_a_server_without_its_codec_is_no_success(
    checkpoint: Path, python: str, tmp_path: Path, how: str, said: str | None
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "server.py").write_text(SERVER.format(how=how, port=port))
    plan = ServePlan(str(checkpoint), "fp8", python=python, options=("--port", str(port)))
    lines: list[str] = []
    if said is None:
        report = run_serve(plan, lines.append)
        assert report.results["layers"] == 30
        assert HOOK in lines[0]
    else:
        with pytest.raises(AssayError, match=said):
            run_serve(plan, lines.append)


def test_from_the_command_line(
    checkpoint: Path, python: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["kv", "serve", str(checkpoint), "--codec", "fp8", "--python", python, "--dry-run", "--json"]
    monkeypatch.setattr(serve, "_run", lambda *given: pytest.fail("nothing may be started"))
    assert invoke([*asked, "--", "--port", "9000"]) == 0
    printed = capsys.readouterr()
    assert "--port 9000" in printed.err
    body = json.loads(printed.out)
    assert body["results"] == {"codec": "fp8", "mode": "inforward", "layers": None, "dry_run": True}
    assert body["subject"]["command"][-1] == "9000"
    assert invoke([*asked, "--", "-tp", "2"]) == 2
    assert "parallel" in json.loads(capsys.readouterr().out)["findings"][0]["title"]
    assert invoke([*asked, "--mode", "snapshot"]) == 2
