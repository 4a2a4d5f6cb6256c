"""The worker and its other side without vLLM: what a line may ask for, and what a dead or missing worker becomes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_stand_in import VOCAB, Engine, install

from assay.engines.scoring import (
    Head,
    HookSpec,
    ScoreJob,
    ScoringPath,
    StateRows,
    Window,
)
from assay.engines.vllm import worker as wire
from assay.engines.vllm.core import VllmCore
from assay.engines.vllm.start import VllmSpec
from assay.engines.vllm.worker import (
    RemoteCore,
    Session,
    answer,
)
from assay.errors import AssayError

WINDOWS = [Window(3, tuple(range(12))), Window(8, tuple(range(12, 24)))]
JOB = ScoreJob(ScoringPath.CHUNKED, scored_from=4, chunk=3, batch=2, hook=HookSpec("a.b:c", {"x": 1}))


def test_jobs_windows_and_heads_survive_the_way(tmp_path: Path) -> None:
    assert wire.job_from_json(json.loads(json.dumps(wire.job_to_json(JOB)))) == JOB
    assert wire.windows_from_json(json.loads(json.dumps(wire.windows_to_json(WINDOWS)))) == WINDOWS
    head = Head(
        torch.randn(9, 4, dtype=torch.bfloat16), torch.randn(9, dtype=torch.bfloat16), softcap=3.0, scale=0.5
    )
    rest = wire.save_head(tmp_path / "head", head)
    read = wire.load_head(tmp_path / "head", json.loads(json.dumps(rest)))
    states = torch.randn(5, 4, dtype=torch.bfloat16)
    assert torch.equal(read.logits(states), head.logits(states))
    assert not (tmp_path / "head").exists()


class Line:
    """Asks a session line by line, as the other side does."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, call: str, **request: Any) -> Any:
        return json.loads(json.dumps(answer(self.session, json.dumps({"call": call, **request}))))


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    install(monkeypatch)
    session = Session()
    session._core, session._folder = VllmCore(VllmSpec("toy"), Engine()), tmp_path
    return Line(session)


def test_a_session_scores_and_reduces_through_files(line: Line, tmp_path: Path) -> None:
    job = ScoreJob(scored_from=4, batch=2)
    assert line("begin", job=wire.job_to_json(job), length=12) == {"result": None}
    names = line("score", windows=wire.windows_to_json(WINDOWS))["result"]
    states = [wire.load_tensors(tmp_path / name)["states"] for name in names]
    assert [s.shape for s in states] == [(8, 8)] * 2
    found = line("head")["result"]
    head = wire.load_head(tmp_path / found["file"], found["rest"], keep=True)
    assert head.vocab_size == VOCAB
    for i, values in enumerate(states):
        wire.save_tensors(tmp_path / f"r{i}", {"states": values})
    names = line(
        "reduce",
        windows=wire.windows_to_json(WINDOWS),
        files=["r0", "r1"],
        head=found["file"],
        rest=found["rest"],
        first=4,
        target="assay.fidelity.metrics:batch_statistics",
    )["result"]
    for name in names:
        assert float(wire.load_tensors(tmp_path / name)["kl"].abs().max()) < 1e-9
    engagement = wire.engagement_from_json(line("end")["result"])
    assert (engagement.bytes_read, engagement.fires) == (0, None)
    assert StateRows(WINDOWS[0], 4, states[0], head).logits(0, 1).shape == (1, VOCAB)


def test_no_error_escapes_a_session(line: Line) -> None:
    assert "unknown call" in line("explode")["error"]["message"]
    assert line("score", windows=wire.windows_to_json(WINDOWS))["error"]["kind"] == "bug"
    error = line("begin", job=wire.job_to_json(ScoreJob()), length=10_000)["error"]
    assert (error["kind"], error["finding_id"]) == ("UsageError", "fidelity.usage")
    assert answer(Session(), "no json")["error"]["kind"] == "bug"


@pytest.mark.skipif("vllm" in sys.modules, reason="this Python has vLLM")
def test_a_python_without_vllm_says_so() -> None:
    with pytest.raises(AssayError, match=r"cannot load m: No module named 'vllm'"):
        RemoteCore(VllmSpec("m"), Path(sys.executable))


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_worker_that_dies_is_one_error_with_its_last_words(tmp_path: Path) -> None:
    python = script(tmp_path, "echo harmless >&2; echo 'RuntimeError: no GPU' >&2; kill -9 $$")
    with pytest.raises(AssayError, match=r"killed by signal 9 .*RuntimeError: no GPU") as caught:
        RemoteCore(VllmSpec("/models/m"), python)
    assert "harmless" not in caught.value.message
    with pytest.raises(AssayError, match="ended with status 3: it wrote no log"):
        RemoteCore(VllmSpec("m"), script(tmp_path, "exit 3"))


def test_a_python_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("text")
    path.chmod(0o755)
    with pytest.raises(AssayError, match="cannot be started"):
        RemoteCore(VllmSpec("m"), path)
