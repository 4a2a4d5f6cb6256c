"""Training that resumes, refuses and reports; and the files that it leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from assay.checkpoint.options import VerifyOptions
from assay.checkpoint.verify import verify
from assay.errors import AssayError, UsageError
from assay_lab.heads import training
from assay_lab.heads.experiment import run_try
from assay_lab.heads.export import read_head
from assay_lab.heads.report import run_train
from assay_lab.heads.text import Written, draft_vocabulary
from assay_lab.heads.training import CHECKPOINT
from assay_lab.options import HeadTrainPlan, HeadTryPlan
from tiny_target import TRAIN, make_target

pytestmark = pytest.mark.engine


def plan(target: Path, out: Path, **more: Any) -> HeadTrainPlan:
    return HeadTrainPlan.of({"model": str(target), "out": out, **TRAIN, "steps": 8, **more})


def with_text(trained: Any, out: Path) -> Path:
    """A folder whose text is there already."""
    out.mkdir(exist_ok=True)
    shutil.copytree(trained[0] / "text", out / "text")
    return out


def test_a_trained_head_learns_and_says_so(trained: Any) -> None:
    folder, report = trained
    curve = report.results["loss_curve"]
    assert curve[-1]["loss"][0] < 0.6 * curve[0]["loss"][0]
    assert report.results["acceptance"]["all"]["positions"][0]["value"] > 0.4
    assert report.verdict == "pass" and len(report.results["acceptance_curve"]) >= 4
    assert not (folder / CHECKPOINT).exists()
    assert (folder / "model.safetensors").stat().st_size < 1 << 20


def test_verify_accepts_the_head_beside_its_target(trained: Any, target: Path) -> None:
    report = verify(str(trained[0]), VerifyOptions(target=str(target), allow_unverified=True))
    assert not [f for f in report.findings if f.severity == "error"], report.findings


def test_an_interrupted_run_goes_on(
    trained: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real, calls = with_text(trained, tmp_path / "head"), training.losses, 0

    def interrupt(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(training, "losses", interrupt)
        first = run_train(plan(target, out))
    assert first.interrupted and "goes on" in first.findings[0].title
    assert torch.load(out / CHECKPOINT, weights_only=True)["run"]["step"] == 4
    again = run_train(plan(target, out))
    assert again.results["steps"] == 8 and not again.interrupted
    # The same steps as a run that nobody interrupted.
    whole = run_train(plan(target, with_text(trained, tmp_path / "whole")))
    assert again.results["loss_curve"][-1]["step"] == whole.results["loss_curve"][-1]["step"]
    a, b = (read_head(f).state_dict() for f in (out, tmp_path / "whole"))
    assert all(torch.allclose(a[n].float(), b[n].float(), atol=2e-3) for n in a)


def test_a_checkpoint_of_another_plan_is_refused_and_a_damaged_one_named(
    trained: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = with_text(trained, tmp_path / "head")
    with monkeypatch.context() as patched:
        patched.setattr(training, "losses", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        run_train(plan(target, out))
    with pytest.raises(UsageError, match="differs in lr"):
        run_train(plan(target, out, lr=2e-3))
    (out / CHECKPOINT).write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(AssayError, match="is damaged"):
        run_train(plan(target, out))


def test_a_loss_that_is_no_number_ends_the_run(
    trained: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = training.losses

    def broken(*args: Any) -> Any:
        found = real(*args)
        found.by_step[0] = float("nan")
        return found

    monkeypatch.setattr(training, "losses", broken)
    with pytest.raises(AssayError, match="the loss is no number at step") as caught:
        run_train(plan(target, with_text(trained, tmp_path / "head")))
    assert "--lr" in caught.value.remedy


def test_a_full_disk_is_one_line(
    trained: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("assay_lab.heads.export.write_atomically", full)
    with pytest.raises(AssayError, match="cannot be written: No space left on device"):
        run_train(plan(target, with_text(trained, tmp_path / "head")))


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_one_line(
    trained: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise RuntimeError(
            "[enforce fail at inline_container.cc:820] PytorchStreamWriter failed writing file"
            " data/3"
        )

    out = with_text(trained, tmp_path / "head")
    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(training, "KEEP_SECONDS", 0.0)
    with pytest.raises(
        AssayError, match=r"checkpoint.pt cannot be written: .*writing file data/3 \(at step 1\)"
    ) as caught:
        run_train(plan(target, out))
    assert "last checkpoint" in caught.value.remedy and not list(out.glob("*.partial"))


def test_an_engine_that_serves_no_such_head_is_named() -> None:
    from types import SimpleNamespace

    from assay_lab.heads.model import HeadConfig

    config = SimpleNamespace(
        get_text_config=lambda: SimpleNamespace(model_type="gemma3_text", num_hidden_layers=18)
    )
    with pytest.raises(
        UsageError, match="serves no EAGLE-3 head of Llama's layout for gemma3_text"
    ):
        HeadConfig.of_target(SimpleNamespace(config=config), 0)


def test_without_a_folder_the_head_goes_to_the_cache(
    trained: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    (tmp_path / "heads").mkdir()
    with_text(trained, tmp_path / "heads" / target.name)
    report = run_train(HeadTrainPlan.of({"model": str(target), **TRAIN, "steps": 2}))
    assert report.results["head"] == str(tmp_path / "heads" / target.name)
    read_head(tmp_path / "heads" / target.name, target)


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="three different auxiliary layers"):
        run_train(plan(make_target(tmp_path / "shallow", layers=4), tmp_path / "b"))


def test_a_head_of_another_target_or_tokenizer_is_refused(
    trained: Any, target: Path, tmp_path: Path
) -> None:
    folder, _ = trained
    wide = make_target(tmp_path / "wide", hidden=32)
    with pytest.raises(AssayError, match="hidden_size 64, and wide has 32"):
        read_head(folder, wide)
    with pytest.raises(AssayError, match="tokenizer of target"):
        read_head(folder, make_target(tmp_path / "other", words="w"))
    deep = make_target(tmp_path / "deep", layers=9)
    with pytest.raises(AssayError, match="num_hidden_layers 8, and deep has 9"):
        read_head(folder, deep)
    config = json.loads((target / "config.json").read_text())
    (tmp_path / "vocab").mkdir()
    (tmp_path / "vocab" / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))
    with pytest.raises(AssayError, match="vocab_size 320, and vocab has 400"):
        read_head(folder, tmp_path / "vocab")


def test_a_head_that_is_not_whole_is_refused(trained: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, _ = trained
    for name, change, said in (
        ("lost", lambda t: t.pop("fc.weight"), "has no fc.weight"),
        ("extra", lambda t: t.update(more=t["fc.weight"].clone()), "does not know: more"),
        (
            "shape",
            lambda t: t.update({"fc.weight": t["fc.weight"][:8].clone()}),
            "does not fit its own config",
        ),
    ):
        copy = tmp_path / name
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("text"))
        tensors = load_file(copy / "model.safetensors")
        change(tensors)
        save_file(tensors, copy / "model.safetensors")
        with pytest.raises(AssayError, match=said):
            read_head(copy)
    (tmp_path / "lost" / "model.safetensors").write_bytes(b"\x00" * 32)
    with pytest.raises(AssayError, match=r"weights|cannot be read"):
        read_head(tmp_path / "lost")


def test_the_draft_vocabulary_is_what_is_written_most() -> None:
    texts = [Written("chat", [9, 9, 5, 5, 5, 7, 7, 2], 2, 0.0)]
    ids, covered = draft_vocabulary(texts, 12, 4)
    assert ids.tolist() == [0, 2, 5, 7] and covered == 1.0
    assert draft_vocabulary(texts, 12, 2)[1] == pytest.approx(5 / 6)


def test_an_unknown_state_of_a_head_is_refused(target: Path, trained: Any, tmp_path: Path) -> None:
    given = {
        "model": str(target),
        "head": trained[0],
        "out": tmp_path / "x.json",
        "heads": ["asleep"],
    }
    with pytest.raises(UsageError, match="asleep"):
        run_try(HeadTryPlan.of(given))
