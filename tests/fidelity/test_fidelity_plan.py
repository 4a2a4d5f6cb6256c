"""A plan from the command line, from TOML, and what is wrong in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.engines.scoring import ScoringPath
from assay.errors import AssayError, UsageError
from assay.fidelity.names import fingerprint, label_of
from assay.fidelity.plan import Plan
from assay.fidelity.plan_file import plan_from, read_plan

TOML = """
reference = "hf:./model?dtype=float32"
candidates = ["hf:./model", "vllm:./model?kv_cache_dtype=fp8"]
text = "wiki.txt"
windows = 12
path = "decode"
margin-ppl = "0.5%"
"""


def test_a_file_and_the_command_line_make_one_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(TOML)
    plan = read_plan(file, {"windows": 20})
    assert plan.candidates == ("hf:./model", "vllm:./model?kv_cache_dtype=fp8")
    assert plan.text == ("wiki.txt",)
    assert plan.windows == 20
    assert plan.job.path is ScoringPath.DECODE
    assert plan.margin_ppl == pytest.approx(0.005)
    assert plan_from(plan.facts(), {}, "echo") == plan


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("candidates = ['a']", "reference"),
        ("reference = 'a'\ncandidates = []", "no candidate"),
        ("reference = 'a'\ncandidates = ['b', 'b']", "given twice"),
        ("reference = 'a'\ncandidates = 'b'\nseed = -1", "seed"),
        ("reference = 'a'\ncandidates = 'b'\nmarginal_ppl = 3", "300"),
        ("reference = 'a'\ncandidates = 'b'\nmargin_top1 = 0.5", "top-1"),
        ("reference = 'a'\ncandidates = 'b'\nmarginal_ppl = inf", "finite number"),
        ("reference = 'a'\ncandidates = 'b'\nwindow = 3", "window"),
        ("reference = 'a'\ncandidates = 'b'\nwindows = '3'", "windows"),
        ("reference = 'a'\ncandidates = 'b'\npath = 'sideways'", "sideways"),
        ("reference = 'a'\ncandidates = 'b'\nmargin_ppl = 'much'", "much"),
        ("reference = 'a'\ncandidates = 'b'\nmargin_ppl = 0.05", "margin"),
        ("reference = ", "not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_plan(file, {})


def test_a_path_has_one_fingerprint_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_bytes(b"1")
    same = {
        fingerprint(s) for s in ("hf:./model?a=1&b=2", "hf:model/?b=2&a=1", f"hf:{model}?a=1&b=2")
    }
    assert len(same) == 1
    others = {fingerprint(s) for s in ("hf:./model", "vllm:./model?a=1&b=2", "hf:./model?a=1&b=3")}
    assert len(others | same) == 4
    (model / "weights").write_bytes(b"12")
    assert fingerprint("hf:./model?a=1&b=2") not in same


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml"):
        read_plan(tmp_path / "nowhere.toml", {})


def test_the_hash_follows_every_setting() -> None:
    plan = Plan("hf:a", ("hf:b",))
    others = [
        Plan("hf:a", ("hf:b",), seed=1),
        Plan("hf:a", ("hf:b",), windows=8),
        Plan("hf:a", ("hf:c",)),
    ]
    assert len({p.sha256 for p in [plan, *others]}) == 4


def test_second_half_scores_from_the_middle() -> None:
    assert Plan("a", ("b",), scored="second-half", length=512).job.scored_from == 257


def test_labels_hold_no_folder_and_are_distinct() -> None:
    specs = ["hf:/home/me/model?dtype=float32", "hf:/other/model?dtype=float32", "gguf:x/y.gguf"]
    assert [label_of(s, specs) for s in specs] == [
        "hf:model?dtype=float32 #1",
        "hf:model?dtype=float32 #2",
        "gguf:y.gguf",
    ]
    assert (
        label_of("vllm:a/b?python=/home/me/bin/python&dtype=auto")
        == "vllm:b?python=python&dtype=auto"
    )


def test_a_changed_file_has_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    before = fingerprint(f"hf:{tmp_path}?dtype=float32")
    assert fingerprint(f"hf:{tmp_path}?dtype=float32") == before
    (tmp_path / "model.safetensors").write_bytes(b"12")
    assert fingerprint(f"hf:{tmp_path}?dtype=float32") != before


def test_engines_that_cannot_be_compared_are_refused_with_the_reason() -> None:
    from assay.engines.specs import open_scorer

    with pytest.raises(AssayError, match="no distribution can be rebuilt") as error:
        open_scorer("http://me:secret@localhost:8000?model=m")
    assert "secret" not in str(error.value)
    assert error.value.finding_id == "fidelity.missing_capability"
    with pytest.raises(UsageError, match="names no engine"):
        open_scorer("ollama:model")
