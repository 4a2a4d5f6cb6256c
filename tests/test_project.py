"""What people expect of a project: one version, a wheel that is whole, workflows and a container
that call what exists.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.extras import EXTRA_OF

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def load(path: Path) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_version_is_one() -> None:
    version = PROJECT["version"]
    assert version == assay.__version__
    assert load(ROOT / "CITATION.cff")["version"] == version
    assert re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$",
        (ROOT / "CHANGELOG.md").read_text(),
        re.M,
    )


def test_the_distribution_is_llm_assay_and_its_command_assay() -> None:
    assert PROJECT["name"] == "llm-assay"
    assert PROJECT["scripts"] == {"assay": "assay.cli.main:main"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    with zipfile.ZipFile(next(out.glob("llm_assay-*.whl"))) as archive:
        archive.extractall(out / "installed")
    return out / "installed"


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    package = ROOT / "src" / "assay"
    ignored = {"__pycache__"}
    files = {
        p.relative_to(package)
        for p in package.rglob("*")
        if p.is_file() and not ignored & set(p.parts)
    }
    assert {
        p.relative_to(wheel / "assay") for p in (wheel / "assay").rglob("*") if p.is_file()
    } == files


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "check"),
        (["grade", "loop.txt"], 1, "degenerate"),
        (["spec", "log.txt"], 0, "healthy"),
        (["verify", "model", "--json"], 2, "checkpoint."),
        (["gate", "--help"], 0, "contract"),
        (["gate", "--contract", "gate.toml"], 2, "pip install 'llm-assay[hf]'"),
        (["compare", "a", "b"], 2, "pip install 'llm-assay[hf]'"),
        (["compare", "a", "b", "--json"], 2, '"fidelity.not_installed"'),
        (["reference", "a", "--out", "stored"], 2, "pip install 'llm-assay[hf]'"),
        (["demo"], 2, "pip install 'llm-assay[demo]'"),
        (["kv", "eval", "a", "--json"], 2, "pip install 'llm-assay[lab]'"),
        (["gap", "a", "b"], 2, "pip install 'llm-assay[lab]'"),
        (["heads", "train", "a"], 2, "pip install 'llm-assay[lab]'"),
    ],
)
def test_the_core_works_without_torch(
    wheel: Path, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "loop.txt").write_text("The answer is" + " the" * 200)
    (tmp_path / "log.txt").write_text(
        "(EngineCore_DP0 pid=1) INFO 11-29 10:00:00 [metrics.py:100] SpecDecoding metrics: Mean"
        " acceptance length: 2.80, Accepted throughput: 90.00 tokens/s, Drafted throughput: 150.00"
        " tokens/s, Accepted: 900 tokens, Drafted: 1500 tokens, Per-position acceptance rate:"
        " 0.800, 0.600, 0.400, Avg Draft acceptance rate: 60.0%\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "gate.toml").write_text(
        '[reference]\nengine = "hf:a"\n[subject]\nengine = "hf:b"\n[compare]\n'
    )
    program = (
        f"import sys; sys.path.insert(0, {str(wheel)!r})\nfor name in ('torch', 'transformers',"
        " 'vllm', 'llama_cpp', 'accelerate', 'gguf'): sys.modules[name] = None\nfrom assay import"
        " plugins; plugins._points = lambda group: ()\nfrom assay.cli.main import main;"
        " main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == code, done.stderr
    assert said in done.stdout


def test_the_extra_that_a_missing_package_needs_is_one_that_has_it() -> None:
    project = {
        name: tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
        for name in (".", "lab")
    }
    extras = project["."]["optional-dependencies"]
    brought = {extra: " ".join(packages).replace("-", "_") for extra, packages in extras.items()}
    brought["lab"] += " ".join(project["lab"]["dependencies"])
    brought["hf"] += " tokenizers"  # of transformers
    brought["gguf"] += " llama_cpp"
    assert {p: e for p, e in EXTRA_OF.items() if not re.search(rf"\b{p}", brought[e])} == {}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_of_the_makefile(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    steps = [step for job in load(path)["jobs"].values() for step in job["steps"]]
    called = {
        target
        for step in steps
        if step.get("run", "").startswith("make ")
        for target in step["run"].split()[1:]
    }
    assert called <= targets
    assert all("uses" in step or "run" in step for step in steps)


def test_the_fast_tests_run_on_every_python_that_is_promised() -> None:
    promised = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    job = load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["fast-tests"]
    assert set(job["strategy"]["matrix"]["python"]) == promised


@pytest.mark.parametrize(
    "path", [p for p in FORMS if p.stem != "config"], ids=lambda path: path.stem
)
def test_issue_forms_ask_for_the_json(path: Path) -> None:
    form = load(path)
    assert {"name", "description", "body"} <= form.keys()
    assert "--json" in str([field for field in form["body"] if field["id"] == "json"])


def test_the_container_copies_what_exists_and_starts_assay() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    assert all(
        w[0] in {"FROM", "COPY", "RUN", "USER", "WORKDIR", "ENTRYPOINT", "CMD"} for w in words
    )
    copied = [
        name for w in words if w[0] == "COPY" and not w[1].startswith("--") for name in w[1:-1]
    ]
    assert copied and all((ROOT / name).exists() for name in copied)
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert set(copied) == kept
    assert PROJECT["name"] in " ".join(lines) and "torch" not in " ".join(w[-1] for w in words)
    assert lines.index("USER assay") < lines.index('ENTRYPOINT ["assay"]')


def test_every_script_and_results_file_that_the_docs_name_is_there() -> None:
    named = re.compile(
        r"(?:lab/)?benchmarks/(?:\w+/)*[\w.-]*\w\.(?:py|sh|specs|jsonl|json|md|npz|log|gz)\b"
    )
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab").rglob("*.md")]
    missing = {
        (p.name, path)
        for p in pages
        for path in named.findall(p.read_text())
        if not (ROOT / path).exists()
    }
    assert not missing
