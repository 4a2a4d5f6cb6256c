"""`assay kv serve`: the command that it makes, and what it refuses with words."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("numba")

import assay
from assay.cli.main import invoke
from assay.engines.vllm.hooks import HOOK
from assay.errors import AssayError
from assay_lab.kv import serve
from assay_lab.kv.block_tables import BlockTables
from assay_lab.kv.calibrate import CalibrationPlan, run_calibrate
from assay_lab.kv.layer_coders import LayerCoders
from assay_lab.kv.serve import ServePlan, launch_of, plugin_folder, run_serve
from assay_lab.kv.serve_checks import check_options, needs_history, option


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
    """A Python that says that it has what a server needs, and whose server is a script of the
    test.
    """
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
        ("-dcp 2", "--decode-context-parallel-size", "2"),
        ("-sc {}", "--speculative-config", "{}"),
        ("--spec_method ngram", "--speculative-config", "ngram"),
        ("--speculative-config.method ngram", "--speculative-config", "ngram"),
        ("--tensor-parallel 2", "--tensor-parallel-size", "2"),
        ("--kv-cache-dtype auto", "--kv-cache-dtype-skip-layers", None),
        ("--model-impl x --config-format y", "--model", None),
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
def test_options_with_which_numbers_would_be_wrong_are_refused(
    words: str, history: bool, said: str
) -> None:
    with pytest.raises(AssayError, match=said):
        check_options(words.split(), history=history)


def test_options_that_do_no_harm_are_left_alone() -> None:
    check_options(
        shlex.split(
            "-tp 1 --enable-prefix-caching --kv-cache-dtype auto --port 80 --dtype bfloat16"
        ),
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
        str(checkpoint),
        "recent(n=8)+fp8",
        python=python,
        options=("--port", "8001"),
        skip_layers=(0,),
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


def test_a_checkpoint_that_is_not_there_is_refused_before_vllm_starts(python: str) -> None:
    with pytest.raises(AssayError, match="there is no") as caught:
        launch_of(ServePlan("./nomodel", "fp8", python=python))
    assert "check the path" in caught.value.remedy


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
"""  # noqa: E501


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
    checkpoint: Path,
    python: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = [
        "kv",
        "serve",
        str(checkpoint),
        "--codec",
        "fp8",
        "--python",
        python,
        "--dry-run",
        "--json",
    ]
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


# A tier of coded blocks.

TIER = "prerope+sinks(n=2)+pca(bits=2.5, predict=all)"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model and its calibration."""
    from tiny_target import make_target

    folder = tmp_path_factory.mktemp("tier")
    make_target(folder / "model", layers=2)
    (folder / "text.txt").write_text("\n".join(topics[name] for name in sorted(topics)))
    plan = CalibrationPlan(
        str(folder / "model"),
        folder / "c",
        text=(str(folder / "text.txt"),),
        windows=8,
        length=128,
        tokens=900,
    )
    run_calibrate(plan)
    return folder / "model", folder / "c"


def tier_plan(
    model: Path, calibration: Path | None, python: str, *options: str, **more: Any
) -> ServePlan:
    given = None if calibration is None else str(calibration)
    more = {"codec": TIER, "tier": "stream", **more}
    return ServePlan(str(model), calibration=given, python=python, options=options, **more)


def test_a_tier_is_a_connector_of_vllm_with_tables_that_are_fitted_once(
    calibrated: tuple[Path, Path],
    checkpoint: Path,
    python: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = tier_plan(
        *calibrated, python, "--port", "8001", tier_dir=tmp_path / "kept", tier_size=0.01
    )
    launch = launch_of(plan)
    words = list(launch.command)
    assert words[-2:] == ["--port", "8001"] and HOOK not in launch.environment
    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert given["kv_connector_module_path"] == "assay_lab.kv.connector"
    assert given["kv_load_failure_policy"] == "recompute"
    extra = given["kv_connector_extra_config"]
    assert extra["size"] == 10**7 and extra["folder"] == str(tmp_path / "kept")
    tables = BlockTables.read(Path(extra["tables"]))
    assert tables.facts.layers == 2 and tables.facts.exact_first == 2 and tables.facts.before_rope
    monkeypatch.setattr(LayerCoders, "fit_all", None)  # what was fitted is kept
    assert launch_of(plan).command == launch.command
    report = run_serve(replace(plan, dry_run=True), lambda line: None)
    assert report.results["tier"] is None and report.results["dry_run"]
    # A sibling of other weights has other tables.
    shutil.copytree(calibrated[0], tmp_path / "other")
    weights = tmp_path / "other" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(TypeError):  # it is fitted again
        launch_of(tier_plan(tmp_path / "other", calibrated[1], python, tier_dir=tmp_path / "kept"))


@pytest.mark.parametrize(
    ("options", "more", "said"),
    [
        (["-tp", "2"], {}, "--tensor-parallel-size"),
        (["--speculative-config", "{}"], {}, "drafted tokens"),
        (["--kv-transfer-config", "{}"], {}, "one KV connector"),
        (["--kv-cache-dtype", "fp8"], {}, "--kv-cache-dtype"),
        (["--distributed-executor-backend", "mp"], {}, "one process"),
        (["-dp", "2"], {}, "one process"),
        (["--spec-tokens", "2"], {}, "drafted tokens"),
        (["--kv-transfer-config.kv_connector", "X"], {}, "one KV connector"),
        (["--model", "other"], {}, "first argument"),
        (["--config", "x.yaml"], {}, "looks into a file"),
        (["--hf-overrides", "{}"], {}, "config.json"),
        (["-q", "fp8"], {}, "weights as they are stored"),
        ([], {"codec": "pages(bits=2)"}, "no parameters"),
        ([], {"codec": "prerope+pca(step=nan)"}, "finite"),
        ([], {"codec": "prerope+pca(step=1e-300)"}, "cannot be fitted"),
        ([], {"tier_size": 1e9}, "GB of memory"),
        ([], {"streams": "k"}, "all layers"),
        ([], {"codec": "hadamard(bits=4)"}, "not entropy-coded"),
        ([], {"codec": "prerope+pca(bits=2, trellis=8)"}, "trellis"),
        ([], {"tier_size": 1e-6}, "may not hold a single block"),
        ([], {"tier_size": 1e9, "tier_dir": "kept"}, "GB left"),
        ([], {"tier_dir": "/proc/kept"}, "cannot"),
    ],
)  # fmt: skip
def test_a_tier_that_could_not_work_is_refused_before_the_engine_starts(
    calibrated: tuple[Path, Path], checkpoint: Path, python: str, tmp_path: Path, options: list[str],  # noqa: E501
    more: dict[str, Any], said: str,
) -> None:  # fmt: skip
    if "tier_dir" in more:
        more = {**more, "tier_dir": tmp_path / more["tier_dir"]}
    with pytest.raises(AssayError, match=said):
        launch_of(tier_plan(*calibrated, python, *options, **more))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}, "MLA"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}, "length of a request"),  # noqa: E501
        ({"hidden_size": 128, "head_dim": 32}, "another model"),
    ],
)  # fmt: skip
def test_a_model_whose_cache_no_block_holds_is_refused_before_the_engine_starts(
    calibrated: tuple[Path, Path], checkpoint: Path, python: str, config: dict[str, Any], said: str
) -> None:
    model, calibration = calibrated
    known = json.loads((model / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(known | config))
    (checkpoint / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    with pytest.raises(AssayError, match=said):
        launch_of(tier_plan(checkpoint, calibration, python))


def test_options_of_a_tier_without_one_are_refused(python: str, tmp_path: Path) -> None:
    with pytest.raises(AssayError, match="none was asked for"):
        ServePlan("m", "fp8", tier_dir=tmp_path)
    with pytest.raises(AssayError, match="the cache is exact"):
        ServePlan("m", "fp8", tier="stream", mode="decode")
    with pytest.raises(AssayError, match="none was asked for"):
        ServePlan("m", "fp8", tier_size=3.0)
    with pytest.raises(AssayError, match="packed pages hold other codes"):
        ServePlan("m", "pages", tier="stream")
    for size in (float("inf"), 1e308):
        with pytest.raises(AssayError, match=r"must be (a )?finite"):
            ServePlan("m", "fp8", tier="stream", tier_size=size)
    with pytest.raises(AssayError, match=r"finite number|at least 0"):
        ServePlan("m", "fp8", tier="stream", tier_size=float("nan"))


@pytest.mark.parametrize(
    "damage", ["tables empty", "tables cut", "facts", "link empty", "link garbage", "link other"]
)
@pytest.mark.engine
def test_tables_that_were_damaged_are_made_again(
    calibrated: tuple[Path, Path], checkpoint: Path, tmp_path: Path, damage: str
) -> None:
    from assay_lab.kv.block_tables import tables_for

    def again(codec: str = "prerope+pca(bits=2)") -> BlockTables:
        return tables_for(str(calibrated[0]), codec, str(calibrated[1]), tmp_path)

    made = again()
    link, place = next(tmp_path.glob("*.fitted")), made.write(tmp_path)
    whole = place.read_bytes()
    if damage == "link other":
        link.write_text(again("prerope+pca(bits=3)").digest.hex())
    elif damage.startswith("link"):
        link.write_bytes(b"\xff\0/.." * (damage == "link garbage"))
    elif damage == "facts":
        place.write_bytes(whole.replace(b'\\"layers\\"', b'\\"lawyer\\"', 1))
        assert place.read_bytes() != whole
    else:
        place.write_bytes(whole[: len(whole) // 2 * (damage == "tables cut")])
    assert again().digest == BlockTables.read(place).digest == made.digest
    assert link.read_text() == made.digest.hex()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "foo"}'])
@pytest.mark.parametrize(
    "more", [{"tier": "stream", "codec": TIER}, {"codec": "pages"}, {"codec": "fp8"}]
)
def test_a_configuration_that_cannot_be_read_is_refused(
    calibrated: tuple[Path, Path], checkpoint: Path, python: str, text: str, more: dict[str, Any]
) -> None:
    (checkpoint / "config.json").write_text(text)
    (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(AssayError, match=r"cannot read|no model whose attention"):
        launch_of(ServePlan(str(checkpoint), calibration=str(calibrated[1]), python=python, **more))


def test_a_tier_needs_a_calibration_and_weights_at_hand(
    calibrated: tuple[Path, Path], checkpoint: Path, python: str
) -> None:
    with pytest.raises(AssayError, match="need a calibration"):
        launch_of(tier_plan(calibrated[0], None, python))
    with pytest.raises(AssayError, match="and weights"):
        launch_of(tier_plan(checkpoint, calibrated[1], python))
