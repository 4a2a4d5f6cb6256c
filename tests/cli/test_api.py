"""The functions of `import assay`: the snippets of docs/api.md run, types hold in a user's file,
nothing heavy is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from check_servers import Sane, serving

import assay
from stub_server import StubServer

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "api.md").read_text(), re.M | re.S)
FUNCTIONS = ("check", "grade", "verify", "spec", "compare", "reference", "gate", "card", "watch")
LOG = (
    "INFO 01-01 00:00:00 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 2.40,"
    " Accepted throughput: 70.00 tokens/s, Drafted throughput: 100.00 tokens/s, Accepted: 700"
    " tokens, Drafted: 1000 tokens, Per-position acceptance rate: 0.900, 0.500, Avg Draft"
    " acceptance rate: 70.0%\n"
)


def needs_engine(snippet: str) -> bool:
    return any(
        word in snippet for word in ("assay.compare(", "assay.reference(", "from_pretrained(")
    )


def run(snippet: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    namespace = names or {}
    exec(compile(snippet, "docs/api.md", "exec"), namespace)
    return namespace


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "vllm.log").write_text(LOG * 20)
    (tmp_path / "assay.toml").write_text('[subject]\nlogs = ["vllm.log"]\n[spec]\n')
    (tmp_path / "wiki.txt").write_text(
        "All work and no play makes this text as long as eight windows need. " * 60
    )
    return tmp_path


def test_every_function_is_shown_in_at_most_eight_lines() -> None:
    text = "\n".join(SNIPPETS)
    assert [name for name in FUNCTIONS if f"assay.{name}(" not in text] == []
    assert max(len(snippet.splitlines()) for snippet in SNIPPETS) <= 8


@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if not needs_engine(s)])
def test_the_snippets_run(snippet: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Sane()) as stub:
        run(snippet.replace("http://localhost:8000", stub.url))
    if comment := re.search(r"print\(.*\)  # (.*)", snippet):
        assert comment[1] in capsys.readouterr().out


@pytest.mark.engine
@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if needs_engine(s)])
def test_the_snippets_with_an_engine_run(snippet: str, here: Path, tiny_llama: Path) -> None:
    (here / "model" / "config.json").unlink()
    (here / "model").rmdir()
    (here / "model").symlink_to(tiny_llama)
    found = run(snippet)
    if "coded" in found:
        assert found["coded"].bytes.ratio > 2 and found["coded"].reads
        return
    assert found["report"].verdict in assay.Verdict
    assert found["report"].results["grade"] in ("ACCEPT", "INCONCLUSIVE", "MARGINAL", "REJECT")


def test_files_are_graded_where_a_path_is_given(here: Path) -> None:
    (here / "a.txt").write_text("the " * 200)
    report = assay.grade_files(here / "a.txt", here / "wiki.txt")
    assert isinstance(report, assay.Report)
    with pytest.deprecated_call(match="grade_files"):
        assert assay.grade(here / "a.txt").results == assay.grade_files(here / "a.txt").results
    assert report.verdict is assay.Verdict.FAIL
    assert [f["path"] for f in report.results["files"]] == [
        str(here / "a.txt"),
        str(here / "wiki.txt"),
    ]
    assert report.environment["assay"] == assay.__version__
    assert assay.grade("a.txt").label == "ok"  # a text that happens to be a file's name
    assert (
        assay.grade("", reasoning="I think so.", finish_reason="length").label
        == "truncated_reasoning"
    )


def test_a_subject_that_fails_is_a_report_and_one_that_cannot_be_examined_an_error(
    here: Path,
) -> None:
    (here / "model" / "config.json").write_text("{")
    report = assay.verify(here / "model")
    assert report.verdict is assay.Verdict.FAIL
    assert report.to_html().startswith("<!DOCTYPE html>")
    assert report.to_json()["command"] == "verify"
    with pytest.raises(assay.AssayError) as error:
        assay.check("http://127.0.0.1:9")
    assert error.value.finding_id == "server.unreachable"
    assert assay.grade_files(here / "nowhere.txt").findings[0].id == "coherence.unreadable"
    with pytest.raises(assay.AssayError):
        assay.compare("hf:./nowhere", "hf:./nowhere?dtype=float32")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: assay.check("u", sample=1),
            "check: unknown option 'sample', the nearest is 'samples'",
        ),
        (lambda: assay.check("u", samples=0), "samples must be at least 1"),
        (lambda: assay.check("u", probe="stroy"), "unknown probe 'stroy'"),
        (lambda: assay.verify("u", hash="some"), "unknown hash 'some'"),
        (lambda: assay.verify("u", engine_version="tgi==1"), "tgi==1"),
        (
            lambda: assay.spec("u", cost=1),
            "spec: unknown option 'cost', the nearest is 'cost_ratio'",
        ),
        (lambda: assay.compare("hf:a"), "names no candidate"),
        (
            lambda: assay.compare("hf:a", "hf:b", window=3),
            "unknown option 'window', the nearest is 'windows'",
        ),
        (lambda: assay.compare("hf:a", "hf:b", margin_ppl="much"), "much"),
        (lambda: assay.reference("hf:a", out="x", format="zip"), "unknown format 'zip'"),
    ],
)
def test_wrong_options_are_named_before_anything_runs(call: Any, said: str) -> None:
    with pytest.raises(assay.UsageError, match=re.escape(said)):
        call()


def test_progress_is_told(here: Path) -> None:
    from contextlib import contextmanager

    told: list[str] = []

    @contextmanager
    def progress(what: str, steps: int) -> Any:
        told.append(what)
        yield lambda: None

    with StubServer() as stub:
        assay.check(stub.url, samples=1, probe="france", no_throughput=True, progress=progress)
    assert told


USER = """
from pathlib import Path
import assay

report: assay.Report = assay.check("http://localhost:8000", samples=1)
grade: assay.Grade = assay.grade("text", finish_reason="stop")
graded: assay.Report = assay.grade_files(Path("a.txt"), "b.txt")
reports: list[assay.Report] = [
    assay.verify("model"), assay.spec("a.log", "b.log"), assay.compare("hf:a", "hf:b", windows=8),
    assay.reference("hf:a", out="stored"),
]
titles: list[str] = [finding.title for finding in report.findings if finding.severity is assay.Severity.ERROR]
verdict: assay.Verdict = report.verdict
page: str = report.to_html()
grader = assay.StreamingGrader()
onset: int | None = grade.onset_char
version: str = assay.__version__
try:
    assay.check("u")
except (assay.UsageError, assay.AssayError) as error:
    print(error.message, error.remedy)
"""  # noqa: E501


def test_mypy_is_content_with_a_users_file(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    file.write_text(USER)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--cache-dir",
            str(tmp_path / "cache"),
            "--config-file=",
            str(file),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stdout


def test_no_module_hides_a_function() -> None:
    package = ROOT / "src" / "assay"
    assert [n for n in FUNCTIONS if (package / n).exists() or (package / f"{n}.py").exists()] == []
    assert set(assay.__all__) <= set(dir(assay)) | set(assay._HOMES)
    with pytest.raises(AttributeError, match="no attribute 'chek'"):
        assay.chek  # noqa: B018


def test_import_is_quick_and_imports_nothing_heavy() -> None:
    program = (
        "import assay, sys; print([m for m in ('numpy', 'torch', 'httpx', 'typer', 'rich') if m in"
        " sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


WRONG = {
    'assay.check("u", sampels=1)': "sampels",
    'assay.check("u", samples="many")': "samples",
    'assay.verify("m", values=3)': "values",
    'assay.compare("a", "b", windows=8.5)': "windows",
    'assay.gate(baselin="x")': "baselin",
    'assay.grade_files("a", reasoning="x")': "reasoning",
    'assay.grade("a", finish_reson="stop")': "finish_reson",
    'assay.card("a", out=3)': "out",
}


def test_mypy_rejects_a_wrong_name_and_a_wrong_type(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    file.write_text("import assay\n" + "\n".join(WRONG) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "c"), str(file)],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    for line, (call, name) in enumerate(WRONG.items(), 2):
        said = [x for x in done.stdout.splitlines() if x.startswith(f"{file}:{line}: error")]
        assert said and (name in said[0] or "overload" in said[0]), (call, done.stdout)


def test_the_types_of_the_options_are_those_that_are_declared() -> None:
    import ast

    from make_option_types import OUT, render

    def fields(text: str) -> dict[str, dict[str, str]]:
        classes = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)]
        return {
            c.name: {
                ast.unparse(f.target): ast.unparse(f.annotation)
                for f in c.body
                if isinstance(f, ast.AnnAssign)
            }
            for c in classes
        }

    assert fields(OUT.read_text(encoding="utf-8")) == fields(render()), (
        "run: python docs/make_option_types.py"
    )


def test_every_verb_is_a_function_or_the_page_says_why_not() -> None:
    from assay.cli.main import OWN

    page = (ROOT / "docs" / "api.md").read_text()
    verbs = {name.replace(" ", "_") for name in OWN} - {"bundle"}
    assert verbs - set(assay.__all__) == {"demo"}
    assert "`assay demo`" in page
    assert set(dir(assay)) == set(assay.__all__)


def test_the_docstrings_say_what_goes_in_and_what_comes_out() -> None:
    for name in assay.__all__:
        value = getattr(assay, name)
        if callable(value) and getattr(value, "__module__", "") == "assay.api":
            text = value.__doc__ or ""
            assert "Args:" in text, name
