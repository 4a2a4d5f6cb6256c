"""What is wrong on the command line of `compare`, `reference` and `rerun` costs no model: one line,
exit code 2.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from assay.cli.main import invoke
from assay.engines import specs as opening


@pytest.fixture(autouse=True)
def no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    for name in ("model", "no-model"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "bytes.txt").write_bytes(b"ab\xff")
    (tmp_path / "no-fields.jsonl").write_text('{"content": "a"}\n')
    (tmp_path / "other.json").write_text('{"results": []}')
    (tmp_path / "plan.toml").write_text('reference = "hf:./model"\nwindow = 3\n')
    monkeypatch.setattr(opening, "SCORERS", {})  # whatever opens an engine here comes too late


PAIR = ["compare", "hf:./model", "hf:./model?dtype=float32"]
STORE = ["reference", "hf:./model", "--out"]


@pytest.mark.parametrize(
    ("arguments", "finding", "said"),
    [
        (["compare", "hf:./model"], "usage", "names no candidate"),
        (["compare", "hf:./model", "hf:./other"], "engine_load", "there is no ./other"),
        (
            ["compare", "hf:./model", "hf:./model?weights=int(bit=4)"],
            "usage",
            "unknown option 'bit'",
        ),
        (
            ["compare", "hf:./model", "hf:no-model"],
            "engine_load",
            "the folder holds no config.json",
        ),
        (["compare", "hf:./model", "hf:./file.txt"], "engine_load", "it is a file"),
        (
            ["compare", "hf:./model", "hf:./model?weights=int(bits='4')"],
            "usage",
            "bits must be int, got '4'",
        ),
        (
            ["compare", "hf:./model", "hf:./model?weights=int(minimum=1)"],
            "usage",
            "minimum must be bool, got 1",
        ),
        (["compare", "run:", "hf:./model"], "usage", "names no stored reference"),
        (["compare", "hf:./model", "run:x"], "usage", "no model to score"),
        (["compare", "run:./model", "hf:./model"], "store_unusable", "no stored reference"),
        (["compare", "plan.toml"], "usage", "unknown option 'window', the nearest is 'windows'"),
        ([*PAIR, "--seed", "-1"], "usage", "seed must be at least 0"),
        ([*PAIR, "--seed", "9223372036854775808"], "usage", "seed must be at most"),
        ([*PAIR, "--marginal-ppl", "300%"], "usage", "MARGINAL < 100 %"),
        ([*PAIR, "--margin-ppl", "5%"], "usage", "got 5.000% and 3.000%"),
        ([*PAIR, "--path", "sideways"], "usage", "sideways"),
        ([*PAIR, "--text", "nowhere.txt"], "text_unusable", "cannot read nowhere.txt"),
        ([*PAIR, "--text", "no*where"], "text_unusable", "no file matches"),
        ([*PAIR, "--text", "empty.txt"], "text_unusable", "holds no text"),
        ([*PAIR, "--text", "bytes.txt"], "text_unusable", "byte 2 is 0xff"),
        ([*PAIR, "--text", "no-fields.jsonl"], "text_unusable", "fields: content"),
        ([*PAIR, "--text", "file.txt", "--text", "file.txt"], "text_unusable", "the same text"),
        ([*STORE, "file.txt"], "usage", "needs a folder"),
        (
            [*STORE, "model", "--format", "llama.cpp", "--scored", "second-half"],
            "usage",
            "needs a file",
        ),
        ([*STORE, "new", "--format", "llama.cpp"], "usage", "second half"),
        ([*STORE, "new", "--dtype", "int8"], "usage", "int8"),
        (["rerun", "nowhere.json"], "usage", "cannot read"),
        (["rerun", "other.json"], "usage", "holds no plan"),
        (["rerun", "file.txt"], "usage", "holds no plan"),
    ],
)
def test_it_is_said_before_anything_is_loaded(
    arguments: list[str], finding: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([*arguments, "--json"]) == 2
    body = json.loads(capsys.readouterr().out)
    assert body["verdict"] == "error"
    (found,) = body["findings"]
    assert found["id"] == f"fidelity.{finding}"
    assert said in found["title"]
    assert "\n" not in found["title"]


def test_a_name_that_no_file_can_have_is_one_line() -> None:
    from assay.engines.scoring import ScoringPath
    from assay.engines.specs import check_spec
    from assay.errors import UsageError

    with pytest.raises(UsageError, match="names no model that can be read"):
        check_spec("hf:" + "1" * 500, ScoringPath.PREFILL)
