"""The worker and its other side without vLLM: what a call may ask for, and what a dead or missing
worker becomes.
"""

from __future__ import annotations

import io
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_stand_in import VOCAB, Engine, install

from assay.engines.scoring import Head, HookSpec, ScoreJob, ScoringPath, StateRows, Window
from assay.engines.vllm import remote as remote_end
from assay.engines.vllm.core import VllmCore
from assay.engines.vllm.remote import RemoteCore
from assay.engines.vllm.spec import VllmSpec
from assay.engines.vllm.wire import Session, send
from assay.errors import AssayError, UsageError

WINDOWS = [Window(3, tuple(range(12))), Window(8, tuple(range(12, 24)))]
JOB = ScoreJob(
    ScoringPath.CHUNKED, scored_from=4, chunk=3, batch=2, hook=HookSpec("a.b:c", {"x": 1})
)


def sent(value: Any) -> Any:
    """What comes out of a pipe at the other end."""
    pipe = io.BytesIO()
    send(value, pipe)
    pipe.seek(0)
    return pickle.load(pipe)


def test_jobs_windows_and_heads_survive_the_way() -> None:
    assert sent((JOB, WINDOWS)) == (JOB, WINDOWS)
    head = Head(
        torch.randn(9, 4, dtype=torch.bfloat16),
        torch.randn(9, dtype=torch.bfloat16),
        softcap=3.0,
        scale=0.5,
    )
    read, states = sent(head), torch.randn(5, 4, dtype=torch.bfloat16)
    assert torch.equal(read.logits(states), head.logits(states))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int64", "bool", "float8_e4m3fn"]
)
def test_tensors_of_every_type_and_shape_survive_the_way(
    dtype: str, shape: tuple[int, ...]
) -> None:
    tensor = torch.randint(0, 2, (*shape, 2)).to(getattr(torch, dtype))[
        ..., 0
    ]  # a view, not contiguous
    found = sent({"a": [tensor]})["a"][0]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.float(), tensor.float())


class There:
    """A session as the other side sees it, through a pipe both ways."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, call: str, *arguments: Any) -> Any:
        well, found = sent(self.session.answer(*sent((call, *arguments))))
        if not well:
            raise RemoteCore._error(_Quiet(), *found)
        return found


class _Quiet(RemoteCore):
    def __init__(self) -> None:
        self._log, self._ranks = Path("there is none"), 1


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> RemoteCore:
    """The other side of a session with the stand-in engine."""
    install(monkeypatch)
    session = Session()
    session.core = VllmCore(VllmSpec("toy"), Engine())
    core = _Quiet()
    core._heads = []
    monkeypatch.setattr(core, "_call", There(session))
    return core


def test_a_session_scores_and_reduces(remote: RemoteCore) -> None:
    assert remote.begin(ScoreJob(scored_from=4, batch=2), 12) == 2
    states = remote.score(WINDOWS)
    assert [s.shape for s in states] == [(8, 8)] * 2
    assert remote.head.vocab_size == VOCAB
    references = [StateRows(w, 4, s, remote.head) for w, s in zip(WINDOWS, states, strict=True)]
    for _ in range(2):  # the head goes there once
        for found in remote.reduce(
            WINDOWS, references, "assay.fidelity.metrics.token_statistics:batch_statistics"
        ):
            assert float(found["kl"].abs().max()) < 1e-9
    assert len(remote._heads) == 1
    engagement = remote.end()
    assert (engagement.bytes_read, engagement.fires) == (0, None)
    assert references[0].logits(0, 1).shape == (1, VOCAB)


def test_no_error_escapes_a_session(remote: RemoteCore) -> None:
    with pytest.raises(AssayError, match="failed in its worker: AttributeError"):
        remote._call("explode")
    with pytest.raises(
        AssayError, match=r"failed in its worker: RuntimeError: score\(\) before begin"
    ):
        remote.score(WINDOWS)
    with pytest.raises(UsageError, match="do not fit into max_model_len") as caught:
        remote.begin(ScoreJob(), 10_000)
    assert caught.value.finding_id == "fidelity.usage"


def test_as_many_windows_run_together_as_there_is_room_for(remote: RemoteCore) -> None:
    assert remote.begin(ScoreJob(batch=0), 12) == 64
    assert remote.begin(ScoreJob(batch=0), 500) == 4096 // 512


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


@pytest.mark.parametrize(
    ("name", "rank"), [("Worker_TP1", 1), ("Worker_PP1", 2), ("Worker_PP1_TP1", 3), ("Worker", 0)]
)
def test_a_rank_that_does_not_start_is_named_with_its_own_words(
    name: str, rank: int, tmp_path: Path
) -> None:
    core = _Quiet()
    core._name, core._ranks, core._tensor, core._log = "m", 4, 2, tmp_path / "worker.log"
    said = "[x.py:1] torch.OutOfMemoryError: CUDA out of memory."
    core._log.write_text(
        f"(MainProcess pid=1) WARNING: ValueErrors are no reason\n({name} pid=7) ERROR 11-29"
        f" {said}\n(MainProcess pid=1) Exception: WorkerProc initialization failed due to an"
        " exception\n"
    )
    facts = {"finding_id": "fidelity.engine_load", "remedy": "", "evidence": {}}
    error = core._error("AssayError", "vLLM cannot load m: WorkerProc initialization failed", facts)
    assert (
        error.message
        == f"vLLM cannot load m: rank {rank} of 4: torch.OutOfMemoryError: CUDA out of memory."
    )
    core._log.write_text("")
    assert (
        "initialization failed" in core._error("AssayError", "initialization failed", facts).message
    )


WORKER = """
import sys, time
from types import SimpleNamespace
from assay.engines.vllm import wire

class Core:
    tokenizer = SimpleNamespace(sha256="0", vocab_size=9, bos_id=None, decode=lambda ids: f"<{ids}>")
    def facts(self): return {"engine": "stand-in"}
    def score(self, windows):
        print("scoring", file=sys.stderr, flush=True)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            STEP
    def close(self): pass

wire.VllmCore.start = lambda spec: Core()
wire.main()
"""  # noqa: E501


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("time.sleep(0.01)", "<[1, 2]>"),
        # In the middle of a kernel no handler runs.
        ("sum(range(10**12))", "⟨token 1⟩⟨token 2⟩"),
    ],
)
def test_an_interrupted_worker_still_says_what_tokens_are(
    step: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_end, "_INTERRUPT_SECONDS", 5.0)
    (tmp_path / "worker.py").write_text(WORKER.replace("STEP", step))
    core = RemoteCore(
        VllmSpec("m"), script(tmp_path, f"exec {sys.executable} {tmp_path / 'worker.py'}")
    )
    worker = core._process.pid

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    thread = threading.Thread(
        target=lambda: (await_call(core), signal.pthread_kill(main, signal.SIGINT))
    )
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            core.score(WINDOWS)
    finally:
        signal.signal(signal.SIGINT, before)
    assert core.tokenizer.decode((1, 2)) == text
    assert core.facts()["engine"] == "stand-in"
    core.close()
    assert not Path(f"/proc/{worker}").exists()


def await_call(core: RemoteCore) -> None:
    """Return when the worker is in the middle of a call."""
    while "scoring" not in core._log.read_text():
        time.sleep(0.05)
