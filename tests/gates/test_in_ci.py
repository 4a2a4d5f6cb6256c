"""Where a gate runs by itself: in pytest, as an action, before a commit, and all of it in the
example repository.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gate_servers import LOG, Right, deployment

from checkpoint_samples import llama
from cli.check_servers import Sane, serving
from stub_server import StubServer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "gated-model"
yaml = pytest.importorskip("yaml")

pytestmark = pytest.mark.engine


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with serving(Right(Sane())) as server:
        yield server


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """That of a child: this source tree, its own cache, and a `python` and an `assay` of the
    running interpreter.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, module in (("python", ""), ("assay", "-m assay")):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        tool.chmod(0o755)
    return {
        **os.environ, "PYTHONPATH": str(ROOT / "src"), "ASSAY_CACHE": str(tmp_path / "cache"),
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip


def run(
    command: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def pytest_in(
    folder: Path, environment: dict[str, str], *more: str
) -> subprocess.CompletedProcess[str]:
    plugin = ["-p", "assay.gates.pytest_plugin", "-p", "no:cacheprovider"]
    return run(
        [sys.executable, "-m", "pytest", "-q", "--strict-markers", *plugin, *more],
        folder,
        environment,
    )


# pytest


TESTS = """\
import pytest

@pytest.mark.assay_gate("assay.toml")
def test_marked():
    pass

def test_fixture(assay_gate):
    assert assay_gate().verdict == "pass"

@pytest.mark.assay_gate("bad.toml")
def test_bad():
    pass

@pytest.mark.assay_gate("undecided.toml")
def test_undecided():
    pass

@pytest.mark.assay_gate("none.toml")
def test_none():
    pass

def test_unknown_option(assay_gate):
    assay_gate("assay.toml", base_line="x")
"""


def test_the_plug_in_fails_what_does_not_pass_and_asks_once(
    tmp_path: Path, stub: StubServer, environment: dict[str, str]
) -> None:
    deployment(tmp_path, stub)
    logs = '[subject]\nlogs = ["vllm.log"]\n[spec]\n'
    (tmp_path / "bad.toml").write_text(f'{logs}min_acceptance = "90%"\n')
    (tmp_path / "undecided.toml").write_text(f'{logs}min_acceptance = "70%"\n')
    (tmp_path / "test_it.py").write_text(TESTS)
    done = pytest_in(tmp_path, environment, "-rA")
    outcomes = {
        line.split("::")[1].split()[0]: line.split()[0]
        for line in done.stdout.splitlines()
        if line.startswith(("PASSED", "FAILED", "ERROR"))
    }
    assert {name for name, outcome in outcomes.items() if outcome == "PASSED"} == {
        "test_marked", "test_fixture",
    }  # fmt: skip
    assert "assay gate: FAIL: spec does not hold" in done.stdout
    assert "assay gate: INCONCLUSIVE: spec is undecided" in done.stdout
    assert "cannot read the contract" in done.stdout
    assert "the nearest is 'baseline'" in done.stdout
    assert "Traceback" not in done.stdout
    first = len(stub.exchanges)
    pytest_in(tmp_path, environment, "-k", "marked")
    assert first < 1.5 * (len(stub.exchanges) - first)  # two tests, one gate


def test_the_plug_in_costs_a_session_next_to_nothing(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n    assert not {'httpx', 'numpy', 'rich', 'scipy'} &"
        " sys.modules.keys()\n"
    )
    done = pytest_in(tmp_path, environment)
    assert done.returncode == 0, done.stdout


# The action and the hooks


def action_step() -> dict[str, Any]:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    step: dict[str, Any] = next(s for s in action["runs"]["steps"] if s.get("id") == "gate")
    assert "${{" not in step["run"], "an input that stands in a script can be code"
    assert set(action["inputs"]) >= {"contract", "server", "baseline", "package", "output"}
    return step


@pytest.mark.parametrize(
    ("limit", "allow", "code", "verdict"),
    [
        ("60%", "false", 0, "pass"),
        ("90%", "false", 1, "fail"),
        ("70%", "false", 3, "inconclusive"),
        ("70%", "true", 0, "inconclusive"),
        ("6O%", "true", 2, "error"),
    ],
)
def test_the_action_tells_the_verdict(
    tmp_path: Path, environment: dict[str, str], limit: str, allow: str, code: int, verdict: str
) -> None:
    (tmp_path / "vllm.log").write_text(LOG * 20)
    (tmp_path / "my assay.toml").write_text(
        f'[subject]\nlogs = ["vllm.log"]\n[spec]\nmin_acceptance = "{limit}"\n'
    )
    given = {
        "CONTRACT": "my assay.toml",
        "SERVER": "",
        "KEY": "",
        "BASELINE": "none.json",
        "OUTPUT": "out $(touch x)",
        "ALLOW": allow,
        "GITHUB_OUTPUT": "outputs",
        "GITHUB_STEP_SUMMARY": "summary.md",
    }
    assert set(action_step()["env"]) == set(given) - {"GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY"}
    done = run(["bash", "-e", "-c", action_step()["run"]], tmp_path, environment | given)
    assert done.returncode == code, done.stderr
    outputs = (tmp_path / "outputs").read_text()
    assert f"verdict={verdict}\n" in outputs
    assert (
        json.loads((tmp_path / given["OUTPUT"] / "assay-gate.json").read_text())["verdict"]
        == verdict
    )
    assert not (tmp_path / "x").exists()
    assert (tmp_path / "summary.md").exists() == (verdict != "error")
    assert "::warning::assay: there is no baseline none.json yet" in done.stdout


def test_the_action_imports_nothing_from_the_checkout(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """A pull request brings files that Python would import first from the folder it runs in."""
    (tmp_path / "vllm.log").write_text(LOG * 20)
    (tmp_path / "assay.toml").write_text(
        '[subject]\nlogs = ["vllm.log"]\n[spec]\nmin_acceptance = "90%"\n'
    )
    for name in ("assay", "typer", "pip", "json", "tomllib"):
        (tmp_path / f"{name}.py").write_text("print('pwned')\nraise SystemExit(0)\n")
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    (install,) = [s["run"] for s in action["runs"]["steps"] if "id" not in s]
    given = {
        "CONTRACT": "assay.toml",
        "SERVER": "",
        "KEY": "",
        "BASELINE": "",
        "OUTPUT": ".",
        "ALLOW": "false",
        "PACKAGE": "--version",
    }
    installed = run(["bash", "-e", "-c", install], tmp_path, environment | given)
    assert "pwned" not in installed.stdout
    done = run(["bash", "-e", "-c", action_step()["run"]], tmp_path, environment | given)
    assert (done.returncode, "pwned" in done.stdout + done.stderr) == (1, False)


STEP = {
    "id",
    "if",
    "name",
    "uses",
    "with",
    "run",
    "shell",
    "env",
    "working-directory",
    "continue-on-error",
    "timeout-minutes",
}


def lint(document: dict[str, Any], steps: list[dict[str, Any]], *, composite: bool) -> list[str]:
    """What actionlint says of steps: unknown keys, scripts that do not parse, expressions of what
    does not exist.
    """
    wrong, ids = [], [s["id"] for s in steps if "id" in s]
    wrong += [f"{i} twice" for i in ids if ids.count(i) > 1]
    for step in steps:
        wrong += [f"unknown key {key}" for key in step.keys() - STEP]
        if ("run" in step) == ("uses" in step):
            wrong.append("a step has one of run and uses")
        if composite and "run" in step and "shell" not in step:
            wrong.append("a script of an action names its shell")
        if "uses" in step and not step["uses"].startswith("./") and "@" not in step["uses"]:
            wrong.append(f"{step['uses']} has no version")
        if "run" in step:
            parsed = subprocess.run(
                ["bash", "-n", "-c", step["run"]], capture_output=True, check=False
            )
            wrong += [parsed.stderr.decode()] if parsed.returncode else []
    for text in re.findall(r"\$\{\{(.*?)\}\}", json.dumps(document)) + [
        str(s["if"]) for s in steps if "if" in s
    ]:
        for kind, name in re.findall(r"\b(inputs|steps|github|env|runner)\.([\w-]+)", text):
            known = {"inputs": document.get("inputs", {}), "steps": ids}.get(kind, {name: ""})
            wrong += [] if name in known else [f"{kind}.{name} does not exist"]
    return wrong


def test_the_action_and_the_workflow_are_as_github_reads_them() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert action.keys() == {"name", "description", "branding", "inputs", "outputs", "runs"}
    assert action["runs"].keys() == {"using", "steps"} and action["runs"]["using"] == "composite"
    assert all(
        set(i) <= {"description", "default", "required"} and i["description"]
        for i in action["inputs"].values()
    )
    assert all(set(o) == {"description", "value"} for o in action["outputs"].values())
    assert lint(action, action["runs"]["steps"], composite=True) == []
    used = {n for _, n in re.findall(r"\b(inputs)\.([\w-]+)", json.dumps(action))}
    assert used == set(action["inputs"])
    workflow = yaml.safe_load(
        (EXAMPLE / ".github" / "workflows" / "gate.yml").read_text(encoding="utf-8")
    )
    assert workflow.keys() == {
        "name",
        True,
        "permissions",
        "jobs",
    }  # YAML reads `on` as true, and so does GitHub
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert (
            job.keys() == {"runs-on", "steps"}
            and lint(workflow, job["steps"], composite=False) == []
        )


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ({"run": "if true; then", "shell": "bash"}, "syntax error"),
        ({"run": "true"}, "names its shell"),
        ({"run": "echo ${{ inputs.nothing }}", "shell": "bash"}, "inputs.nothing does not exist"),
        ({"uses": "actions/checkout"}, "has no version"),
        ({"uses": "a/b@v1", "wiht": {}}, "unknown key wiht"),
    ],
)
def test_the_lint_finds_what_is_wrong(step: dict[str, Any], says: str) -> None:
    assert any(
        says in line
        for line in lint({"inputs": {}, "runs": {"steps": [step]}}, [step], composite=True)
    )


def test_the_hooks_are_a_manifest_and_run(
    tmp_path: Path, stub: StubServer, environment: dict[str, str]
) -> None:
    clientlib = pytest.importorskip("pre_commit.clientlib")
    hooks = {
        hook["id"]: hook for hook in clientlib.load_manifest(str(ROOT / ".pre-commit-hooks.yaml"))
    }
    assert set(hooks) == {"assay-contract", "assay-verify", "assay-serve"}
    deployment(tmp_path, stub)
    (tmp_path / "bad.toml").write_text("[chek]\n")

    def hook(name: str, folder: Path, *files: str) -> int:
        words = yaml.safe_load("- " + hooks[name]["entry"])[0]
        return run(["bash", "-c", f'{words} "$@"', "hook", *files], folder, environment).returncode

    assert hook("assay-contract", tmp_path, "assay.toml") == 0
    assert hook("assay-contract", tmp_path, "bad.toml", "assay.toml") == 2
    assert stub.exchanges == []
    llama(tmp_path / "model")
    assert hook("assay-verify", tmp_path / "model") == 0
    serve = ("vllm", "serve", "./model", "--max-model-len")
    assert hook("assay-serve", tmp_path, *serve, "64") == 0
    assert hook("assay-serve", tmp_path, *serve, "64", "--max-num-seqz", "8") == 1
    next((tmp_path / "model").glob("*.safetensors")).write_bytes(b"version https://git-lfs\n")
    assert hook("assay-verify", tmp_path / "model") != 0


# The example


@pytest.fixture
def example(tmp_path: Path, environment: dict[str, str]) -> Path:
    """The example repository with a checkpoint and its manifest, as its README says."""
    folder = tmp_path / "gated-model"
    shutil.copytree(EXAMPLE, folder)
    llama(folder / "model")
    done = run(
        ["assay", "verify", "model", "--write-manifest", "manifest.json", "--allow-unverified"],
        folder,
        environment,
    )
    assert done.returncode == 0, done.stdout
    return folder


def test_the_example_holds_a_healthy_server(
    example: Path, stub: StubServer, environment: dict[str, str]
) -> None:
    gate = ["assay", "gate", "--server", stub.url]
    done = run([*gate, "--json=good.json"], example, environment)
    assert done.returncode == 0, done.stdout
    done = run([*gate, "--baseline", "good.json"], example, environment)
    assert done.returncode == 0, done.stdout
    tested = pytest_in(example, environment, f"--assay-server={stub.url}")
    assert tested.returncode == 0, tested.stdout


def test_the_example_stops_a_server_that_breaks_tool_calls(
    example: Path, stub: StubServer, environment: dict[str, str]
) -> None:
    stub.on("POST /v1/chat/completions", Right(Sane(), spoilt=30))
    done = run(["assay", "gate", "--server", stub.url], example, environment)
    assert done.returncode == 1
    assert "follow their schema ≥ 75 %" in done.stdout
    tested = pytest_in(example, environment, f"--assay-server={stub.url}")
    assert "FAILED tests/test_gate.py::test_the_deployment_keeps_its_contract" in tested.stdout


def test_the_example_stops_an_altered_file(
    example: Path, stub: StubServer, environment: dict[str, str]
) -> None:
    run(["assay", "gate", "--server", stub.url, "--json=good.json"], example, environment)
    shard = next((example / "model").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    shard.with_name("extra.txt").write_text("x")
    gate = ["assay", "gate", "--server", stub.url, "--baseline", "good.json"]
    done = run([*gate, "--json=now.json"], example, environment)
    changed = json.loads((example / "now.json").read_text())["results"]["baseline"]["changes"]
    assert {"file extra.txt", f"file {shard.name}"} <= {
        c["what"] for c in changed if c["part"] == "verify"
    }
    assert done.returncode == 1
    assert "verify does not hold; check and tools hold" in " ".join(done.stdout.split())


def test_the_example_names_what_exists() -> None:
    workflow = yaml.safe_load(
        (EXAMPLE / ".github" / "workflows" / "gate.yml").read_text(encoding="utf-8")
    )
    inputs = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"]
    step = next(s for s in workflow["jobs"]["gate"]["steps"] if "assay@" in s.get("uses", ""))
    assert step["with"].keys() <= inputs.keys()
    hooks = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    used = yaml.safe_load((EXAMPLE / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["id"] for hook in used} <= hooks
