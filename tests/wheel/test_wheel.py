"""The wheels that the sdists build do in clean environments what README says.

`make test-wheel` runs it: each environment is made anew, on every Python of this machine that is
promised, and each extra by itself on the oldest.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from environments import PYTHONS, ROOT, Environment, built, environment

from assay.cli.main import LAB, OWN
from assay.cli.verb import Group
from assay.demo.models import SMOLLM2, gguf_of
from assay.extras import install
from assay.runs import cache_dir
from checkpoint_samples import llama
from cli.check_servers import Sane, serving
from gates.gate_servers import CONTRACT, LOG, Right, deployment
from stub_server import StubServer

pytestmark = [pytest.mark.slow, pytest.mark.wheel, pytest.mark.engine, pytest.mark.timeout(1800)]

SMALL_SERVER = ROOT / "tests" / "serving" / "small_server.py"
LLAMA_CPP = "llama-cpp-python==0.3.36"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    return built(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def stub() -> Iterator[StubServer]:
    with serving(Right(Sane())) as server:
        yield server


def test_the_sdists_build_without_a_network(dist: Path, tmp_path: Path) -> None:
    names = {path.name.split("-")[0] for path in dist.iterdir()}
    assert names == {"llm_assay", "llm_assay_lab"} and len([*dist.iterdir()]) == 4
    isolated = shutil.which("unshare")
    alone = [isolated, "-rn"] if isolated and os.getuid() == 0 else []
    command = [
        *alone,
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "sdist",
        "-d",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)


# The core


@pytest.fixture(scope="module", params=PYTHONS)
def core(
    request: pytest.FixtureRequest, dist: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp(f"core-{request.param}")
    found = environment(folder, request.param, dist)
    print(f"\nPython {request.param}: the core takes {found.megabytes()} MB, pip included")
    yield found
    shutil.rmtree(folder, ignore_errors=True)


def words() -> list[list[str]]:
    """Every command of the core, and the verbs of the laboratory."""
    found: list[list[str]] = []
    for name, verb in OWN.items():
        found.append(name.split())
        if isinstance(verb, Group):
            found += [[name, sub] for sub in verb.verbs]
    return [*found, *([name] for name in LAB)]


def test_every_verb_has_help(core: Environment) -> None:
    assert core.assay("--help").returncode == 0
    for command in words():
        done = core.assay(*command, "--help")
        assert (done.returncode, done.stderr) == (0, ""), command
        assert "Usage" in done.stdout or "assay " in done.stdout, command


def test_every_verb_without_torch_works(core: Environment, stub: StubServer) -> None:
    work = core.work
    deployment(work, stub)
    llama(work / "model")
    (work / "loop.txt").write_text("The answer is" + " the" * 200)
    (work / "sane.txt").write_text("The capital of France is Paris, a city on the river Seine.")
    small = f"{core.python} {SMALL_SERVER} --port {{port}} {{settings}}"
    for arguments, codes in (
        (["check", stub.url, "--quick", "--json", "check.json", "--html", "check.html"], {0, 3}),
        (["watch", stub.url, "--rounds", "2", "--interval", "1", "--listen", "none"], {0, 3}),
        (["grade", "loop.txt"], {1}),
        (["grade", "sane.txt"], {0}),
        (["spec", "vllm.log", "--json", "spec.json"], {0}),
        (["verify", "model", "--write-manifest", "sums.json", "--allow-unverified"], {0}),
        (["verify", "model", "--manifest", "sums.json"], {0}),
        (["card", "spec.json", "--out", "card"], {0}),
        (["gate", "--json", "gate.json", "--junit", "gate.xml", "--summary", "gate.md"], {0}),
        (["card", "gate.json", "--out", "card-of-gate"], {0}),
        (["doctor", "--lint", "--", "vllm", "serve", "model"], {0, 3}),
        (
            ["doctor", "--command-template", small, "--fault-rate", "1", "--no-ladder", "--no-tools",  # noqa: E501
             "--seconds", "5", "--budget", "4", "--bundle", "doctor.tar", "--", "--kv", "fp8"],
            {1},
        ),
        (["bundle", "show", "doctor.tar"], {1}),
        (["bundle", "verify", "doctor.tar"], {0}),
    ):  # fmt: skip
        done = core.assay(*arguments)
        said = f"{' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode in codes, said
        assert "Traceback" not in done.stderr, said


def test_every_other_verb_names_its_extra(core: Environment) -> None:
    (core.work / "plan.toml").write_text('reference = "hf:a"\ncandidates = ["hf:b"]\n')
    (core.work / "pack").mkdir(exist_ok=True)
    for arguments, extra in (
        (["compare", "hf:a", "hf:b"], "hf"),
        (["compare", "plan.toml"], "hf"),
        (["reference", "hf:a", "--out", "stored"], "hf"),
        (["reference", "pack", "pack"], "hf"),
        (["rerun", "result.json"], "hf"),
        (["table", "rows.parquet"], "scale"),
        (["demo"], "demo"),
        (["kv", "list"], "lab"),
        (["kv", "eval", "hf:a", "--codec", "fp8"], "lab"),
        (["gap", "hf:a", "hf:b"], "lab"),
        (["heads", "train", "hf:a"], "lab"),
    ):
        code, report = core.report(*arguments)
        assert (code, report["verdict"]) == (2, "error"), arguments
        assert install(extra) in report["findings"][0]["remedies"][0], arguments
        assert len(report["findings"]) == 1
        done = core.assay(*arguments)
        assert done.returncode == 2 and f"llm-assay[{extra}]" in done.stdout, arguments


def test_the_steps_of_the_action_work(core: Environment, stub: StubServer, dist: Path) -> None:
    yaml = pytest.importorskip("yaml")
    steps = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"]
    (core.work / "contract.toml").write_text(CONTRACT.replace("{url}", stub.url))
    (core.work / "vllm.log").write_text(LOG * 20)
    given = {
        "CONTRACT": "contract.toml", "SERVER": "", "KEY": "", "BASELINE": "", "OUTPUT": "out",
        "ALLOW": "false", "PACKAGE": "llm-assay", "PIP_FIND_LINKS": str(dist),
        "GITHUB_OUTPUT": "outputs", "GITHUB_STEP_SUMMARY": "summary.md",
    }  # fmt: skip
    for step in steps:
        done = core.run("bash", "-e", "-c", step["run"], **given)
        assert done.returncode == 0, f"{step['run']}\n{done.stdout}\n{done.stderr}"
    assert "verdict=pass" in (core.work / "outputs").read_text()
    report = json.loads((core.work / "out" / "assay-gate.json").read_text())
    assert report["verdict"] == "pass"


def test_the_plug_in_of_pytest_works(core: Environment, stub: StubServer) -> None:
    core.install("pytest")
    deployment(core.work, stub)
    (core.work / "test_it.py").write_text(
        "def test_it(assay_gate):\n    assert assay_gate().verdict == 'pass'\n"
    )
    done = core.run(core.python, "-m", "pytest", "-q", "--strict-markers", "test_it.py")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_pip_finds_nothing_wrong(core: Environment) -> None:
    done = core.run(core.python, "-m", "pip", "check")
    assert done.returncode == 0, done.stdout


# Each extra by itself


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path_factory.mktemp("tiny") / "tiny"))


def llama_cpp_wheel() -> Path:
    """The wheel of llama-cpp-python, built from its sdist once and kept by version."""
    folder = cache_dir("wheels")
    kept = list(folder.glob(f"llama_cpp_python-{LLAMA_CPP.partition('==')[2]}-*.whl"))
    if not kept:
        command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "-w", str(folder)]
        subprocess.run([*command, LLAMA_CPP], check=True, capture_output=True, timeout=1700)
        kept = list(folder.glob("llama_cpp_python-*.whl"))
    return kept[0]


SHAPE = ("--text", "text.txt", "--windows", "16", "--length", "32", "--no-floors")


@pytest.mark.parametrize("extra", ["hf", "gguf", "kv", "lab", "scale", "ray", "demo", "sign"])
def test_an_extra_alone_runs_its_verb(
    extra: str, dist: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cache = Path(os.environ["ASSAY_CACHE"]) if extra in ("gguf", "demo") else None
    if extra == "gguf":
        os.environ["PIP_FIND_LINKS"] = (
            f"{llama_cpp_wheel().parent} {os.environ.get('PIP_FIND_LINKS', '')}"
        )
    found = environment(tmp_path / extra, PYTHONS[0], dist, extra, cache=cache)
    try:
        checked = found.run(found.python, "-m", "pip", "check")
        assert checked.returncode == 0, checked.stdout
        text = "A text that is long enough for a few windows of tokens, and for some more. "
        (found.work / "text.txt").write_text(text * 200)
        (found.work / "rows").mkdir()
        commands = {
            "scale": [(("table", "rows"), {2})],
            "sign": [(("reference", "pack", "rows"), {2})],
            "demo": [(("demo",), {0})],
        }.get(extra)
        if extra == "gguf":
            model = f"gguf:{gguf_of(SMOLLM2)}"
            commands = [(("compare", model, model, *SHAPE), {0, 3})]
        if commands is None:
            model = f"hf:{request.getfixturevalue('tiny')}"
            commands = {
                "hf": [(("compare", model, model, *SHAPE), {0, 3})],
                "ray": [(("compare", model, model, *SHAPE, "--ray"), {0, 3})],
            }.get(extra, [(("kv", "list"), {0}), (("gap", model, model, *SHAPE[:6]), {0, 1, 3})])
        for arguments, codes in commands:
            done = found.assay(*arguments)
            said = f"{arguments}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            assert done.returncode in codes, said
            assert "Traceback" not in done.stderr and "pip install" not in done.stdout, said
    finally:
        shutil.rmtree(tmp_path / extra, ignore_errors=True)
