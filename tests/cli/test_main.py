"""The command line itself: help, completion, where reports go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from assay.cli.main import VERBS, invoke
from assay.cli.verb import AREAS, Group, Verb
from assay.options import declared_options

ORDER = [
    "check",
    "watch",
    "grade",
    "verify",
    "spec",
    "compare",
    "reference",
    "rerun",
    "kv",
    "gap",
    "demo",
]


def commands() -> list[Verb]:
    return [
        v
        for verb in VERBS.values()
        for v in (verb.verbs.values() if isinstance(verb, Group) else [verb])
    ]


def test_help_shows_whole_sentences_in_the_order_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "..." not in shown.partition("Commands:")[2]
    names = [
        line[2:].partition("  ")[0].strip()
        for line in shown.partition("Commands:")[2].splitlines()
        if line[2:3].strip()
    ]
    assert [name for name in names if name in ORDER] == ORDER
    assert invoke(["kv", "--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]
    assert all(len(verb.sentence) < 150 for verb in commands())


@pytest.mark.parametrize("verb", commands(), ids=lambda verb: verb.name)
def test_every_verb_has_help_that_names_all_its_options(
    verb: Verb, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb.name.partition(" ")[0] in AREAS
    assert invoke([*verb.name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    module, _, name = verb.options.partition(":")
    if module:
        options = declared_options(getattr(sys.modules[module], name)).values()
        assert [o.flag for o in options if o.listed and f"--{o.flag}" not in shown] == []
        assert [o.name for o in options if o.listed and not o.help] == []
        own = getattr(sys.modules[module], name)
        assert own.VERB in (verb.name, "assay") and own.AREA in (
            AREAS[verb.name.partition(" ")[0]],
            "server",
        )
    assert "-v" in shown and "\nOutput:" in shown


def test_help_of_a_codec_command_loads_no_torch() -> None:
    program = (
        "import sys; from assay.cli.main import invoke; invoke(['kv', 'eval', '--help']);"
        " invoke(['gap', '--help']); sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("assay ch", "check"),
        ("assay check --no-thr", "--no-throughput"),
        ("assay kv ev", "eval"),
        ("assay kv eval --mode in", "inforward"),
    ],
)
def test_the_shell_completes(typed: str, found: str) -> None:
    environment = {
        "_ASSAY_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(typed.count(" ")),
    }
    done = subprocess.run(
        [sys.executable, "-m", "assay"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [found]


def test_completion_is_installed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "assay", "--install-completion", "bash"],
        # The shell is named, not looked for among the parents of this process.
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "_ASSAY_COMPLETE" in (tmp_path / ".bash_completions" / "assay.sh").read_text()


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("The capital of France is Paris.")
    return tmp_path


def test_json_into_a_file_leaves_the_console(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["verify", ".", "--json", "out.json"]) == 2
    assert capsys.readouterr().out.startswith("ERROR  assay verify")
    assert json.loads((text / "out.json").read_text())["command"] == "verify"
    for arguments in (["--json=graded.json"], ["--json", "graded.json"], ["--json", "fresh.json"]):
        assert invoke(["grade", "a.txt", *arguments]) == 0
        assert "PASS" in capsys.readouterr().out
        assert (
            json.loads((text / arguments[-1].removeprefix("--json=")).read_text())["verdict"]
            == "pass"
        )
    assert invoke(["verify", "--nonsense", "--json", "usage.json"]) == 2
    assert json.loads((text / "usage.json").read_text())["findings"][0]["id"] == "checkpoint.usage"
    assert invoke(["verify", ".", "--json", "no/folder/out.json"]) == 2
    assert "its folder does not exist" in capsys.readouterr().out


def test_json_alone_prints_it_wherever_it_stands(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {
        "object": "chat.completion",
        "choices": [{"message": {"content": "Paris."}, "finish_reason": "stop"}],
    }
    (text / "answer.json").write_text(json.dumps(answer))
    for arguments in (
        ["grade", "--json", "answer.json"],
        ["grade", "answer.json", "--json"],
        ["grade", "a.txt", "--json", "answer.json"],
        ["--json", "x"],
    ):
        assert invoke(arguments) == (0 if "grade" in arguments else 2)
        json.loads(capsys.readouterr().out)
    assert json.loads((text / "answer.json").read_text()) == answer


def test_an_error_is_printed_once(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["grade", "nowhere.txt"]) == 2
    out, err = capsys.readouterr()
    assert (out.count("No such file"), err) == (1, "")
    assert "→" in out


def test_verbose_prints_the_evidence(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text / "b.txt").write_text("the " * 300)
    assert invoke(["grade", "b.txt"]) == 1
    short = capsys.readouterr().out
    assert invoke(["grade", "b.txt", "-v"]) == 1
    assert len(capsys.readouterr().out) > len(short)


def test_the_end_of_a_command_does_not_wait_for_answers_that_nobody_will_read() -> None:
    program = (
        "import time, concurrent.futures as f, assay.cli.main as m\n"
        "def left(_): f.ThreadPoolExecutor(1).submit(time.sleep, 600); print('done'); return 3\n"
        "m.invoke = left; m.main([])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (3, "done\n")


def test_answers_that_nobody_waits_for_any_more_do_not_hold_up_the_end() -> None:
    """As after a budget that ended while a server was slow."""
    code = """
import time
from concurrent.futures import ThreadPoolExecutor
from assay.cli import main
def invoke(words):
    ThreadPoolExecutor(1).submit(time.sleep, 120)
    print("told")
    return 3
main.invoke = invoke
main.main([])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "told\n", "")
