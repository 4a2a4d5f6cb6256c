"""docs/results.md: generated, not stale, and true of what verbs really print."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from assay.cli.main import invoke

SCRIPT = Path(__file__).parents[1] / "docs" / "make_results.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_results", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_results"] = module
    spec.loader.exec_module(module)
    return module


def documented(script: ModuleType, verb: str) -> set[str]:
    return {key for place in script.VERBS[verb] for key in script.keys_of(place)}


def test_the_page_is_what_the_script_makes(script: ModuleType) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), (
        "run python docs/make_results.py"
    )


def test_a_key_without_a_meaning_and_a_meaning_without_a_key_are_errors(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(script.MEANINGS["gap"], "no_such_key", "nothing")
    with pytest.raises(SystemExit, match="gap: no_such_key is gone"):
        script.page()
    monkeypatch.delitem(script.MEANINGS["gap"], "no_such_key")
    monkeypatch.delitem(script.MEANINGS["gap"], "total")
    with pytest.raises(SystemExit, match="gap: total has no meaning"):
        script.page()


def test_what_light_verbs_print_is_documented(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "answer.txt"
    text.write_text("The capital of France is Paris.", encoding="utf-8")
    metrics = tmp_path / "metrics.txt"
    metrics.write_text(
        "vllm:spec_decode_num_drafts_total 1000\nvllm:spec_decode_num_draft_tokens_total 3000\n"
        "vllm:spec_decode_num_accepted_tokens_total 1800\n",
        encoding="utf-8",
    )
    for words in (["grade", str(text)], ["spec", str(metrics)], ["kv", "list"]):
        invoke([*words, "--json"])
        body = json.loads(capsys.readouterr().out)
        assert body["results"], words
        assert set(body["results"]) <= documented(script, body["command"]), words


def test_every_verb_is_documented(script: ModuleType) -> None:
    from assay.cli.main import VERBS, _commands_of

    groups = {name: commands for name in VERBS if (commands := _commands_of(name))}
    from assay_lab.verbs import KV_COMMANDS as COMMANDS

    known = {*script.VERBS, *script.SAME}
    wanted = {name for name in VERBS if name not in groups and name != "reference pack"}
    wanted |= {
        f"{group} {name}" for group, verbs in groups.items() for name in verbs if group != "heads"
    }
    assert {c.name for c in COMMANDS} <= known
    assert wanted <= known, wanted - known
    page = script.PAGE.read_text(encoding="utf-8")
    assert all(f"\n## {name}\n" in page for name in known)


def test_what_a_demo_and_a_gate_print_is_documented(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from assay.demo.run import _report
    from assay.verdict import Finding, Report, Severity, Verdict

    speed = {"throughput": {"valid": True}}
    bad = [Finding("coherence.flood", Severity.ERROR, "it floods")]
    sides = [
        Report("check", Verdict.PASS, results=speed),
        Report("check", Verdict.FAIL, findings=bad, results=speed),
    ]
    assert set(_report(sides, "shifted_scales").results) == documented(script, "demo")
    contract = tmp_path / "assay.toml"
    contract.write_text('[subject]\nname = "x"\ncheckpoint = "model"\n[verify]\n', encoding="utf-8")
    invoke(["gate", "--contract", str(contract), "--lint", "--json"])
    body = json.loads(capsys.readouterr().out)
    assert body["results"], body["findings"]
    assert set(body["results"]) <= documented(script, "gate")


@pytest.mark.engine
def test_what_verify_and_compare_print_is_documented(
    script: ModuleType,
    smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    small = ["--windows", "8", "--length", "32", "--no-floors"]
    for words in (
        ["verify", str(smollm2)],
        ["compare", str(smollm2), f"hf:{smollm2}?weights=int(bits=8)", *small],
    ):
        capsys.readouterr()
        invoke([*words, "--json"])
        body = json.loads(capsys.readouterr().out)
        assert set(body["results"]) <= documented(script, body["command"]), words
    assert body["results"]["candidates"][0]["grade"] == body["results"]["grade"]
