"""vLLM's core in another process, as this process sees it."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from assay.engines.scoring import (
    Engagement,
    GreedyStep,
    Head,
    ScoreJob,
    StateRows,
    TokenizerFacts,
    Window,
)
from assay.engines.vllm.head import HeadFile
from assay.engines.vllm.path import packages_alone
from assay.engines.vllm.spec import VllmSpec
from assay.engines.vllm.wire import RANK_ERROR, send
from assay.errors import AssayError, UsageError

_GRACE_SECONDS = 20.0


_INTERRUPT_SECONDS = 10.0
"""In which a worker leaves the call that it answers."""


DETAIL = re.compile(r"Error|error|Killed|out of memory|No module")


class RemoteCore:
    """A worker with one engine: the calls of `VllmCore`. It is ended, and its folder removed, by
    `close`.
    """

    _interrupted = False
    _ended = False
    """Whether it did not live through an interrupt."""

    def __init__(self, spec: VllmSpec, python: Path) -> None:
        """Start the worker and the engine in it; AssayError with the last lines of its log where
        that fails.
        """
        self._name = Path(spec.model).name
        self._ranks, self._tensor = spec.ranks, spec.tensor_parallel
        self._folder = Path(tempfile.mkdtemp(prefix="assay-vllm-"))
        self._log = self._folder / "worker.log"
        self._heads: list[Head] = []
        self._thread = ThreadPoolExecutor(1, "assay-vllm-worker")
        try:
            self._process = _start(python, self._folder, self._log)
            self._facts, *self._known = self._call("start", spec)
        except KeyboardInterrupt:  # nothing is there yet that it should keep
            if hasattr(self, "_process"):
                self._kill()
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def _call(self, call: str, *arguments: Any) -> Any:
        # In a thread, which no signal interrupts in the middle of an answer.
        answer = self._thread.submit(self._exchange, call, *arguments)
        try:
            well, found = answer.result()
        except KeyboardInterrupt:
            self._interrupt(answer)
            raise
        if not well:
            raise self._error(*found)
        return found

    def _exchange(self, call: str, *arguments: Any) -> tuple[bool, Any]:
        """Ask and take the answer; AssayError where the worker is gone."""
        pipes = self._process
        if pipes.stdin is None or pipes.stdout is None:
            raise RuntimeError("the worker has no pipes")
        try:
            send((call, *arguments), pipes.stdin)  # type: ignore[arg-type]
            well, found = pickle.load(pipes.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._died() from error
        return well, found

    def _interrupt(self, answer: Future[tuple[bool, Any]]) -> None:
        """Have the worker leave the call that it answers; it lives on for what the report asks.

        One that does not within some seconds, in the middle of a long kernel, is ended.
        """
        self._interrupted = True
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            self._ended = answer.exception(_INTERRUPT_SECONDS) is not None
        except (TimeoutError, KeyboardInterrupt):
            self._ended = True
            self._kill()

    def _kill(self) -> None:
        """End the worker and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @cached_property
    def tokenizer(self) -> TokenizerFacts:
        """Facts of the tokenizer that lies beside the weights; texts go to the worker and back."""
        decode = lru_cache(maxsize=2**18)(self._decode)
        sha256, vocab_size, bos_id = self._known
        return TokenizerFacts(
            sha256,
            vocab_size,
            bos_id,
            encode=lambda text: list(self._call("tokenizer.encode", text)),
            decode=lambda ids: decode(tuple(map(int, ids))),
        )

    def _decode(self, ids: tuple[int, ...]) -> str:
        if self._ended:  # a report is made all the same
            return "".join(f"⟨token {number}⟩" for number in ids)
        return str(self._call("tokenizer.decode", list(ids)))

    @cached_property
    def head(self) -> Head:
        """The output head."""
        head: Head = self._call("head")
        return head

    def facts(self) -> dict[str, Any]:
        """What scores."""
        return {**self._facts, "placement": "worker"}

    def memory(self) -> list[dict[str, int]]:
        """Bytes of the output heads that each rank holds, and the most memory it has used."""
        return list(self._call("memory"))

    def begin(self, job: ScoreJob, length: int) -> int:
        """Get ready for windows of `length` tokens; how many of them run together."""
        return int(self._call("begin", job, length))

    def score(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """Final states of each window."""
        return list(self._call("score", windows))

    def reduce(
        self, windows: Sequence[Window], references: Sequence[StateRows], target: str
    ) -> list[dict[str, torch.Tensor]]:
        """Statistics of each window against reference states, computed on the worker's device."""
        first, head = references[0].first, references[0].head
        number = next((i for i, known in enumerate(self._heads) if known is head), len(self._heads))
        if number == len(self._heads):
            sent: Head | HeadFile = Head(
                head.weight, head.bias, softcap=head.softcap, scale=head.scale
            )
            if self._ranks > 1:  # each reads its rows, so that none is sent the whole
                sent = HeadFile.of(head, self._folder, number)
            self._call("keep_head", number, sent)
            self._heads.append(head)
        states = [reference.states for reference in references]
        return list(self._call("reduce", windows, first, states, number, target))

    def greedy(self, prefixes: Sequence[tuple[int, ...]], count: int) -> list[list[GreedyStep]]:
        """Greedy tokens after each prefix."""
        return list(self._call("greedy", [tuple(map(int, prefix)) for prefix in prefixes], count))

    def engagement(self) -> Engagement:
        """What took part since `begin`."""
        found: Engagement = self._call("engagement")
        return found

    def end(self) -> Engagement:
        """Take off what `begin` put in place; what took part."""
        found: Engagement = self._call("end")
        return found

    def close(self) -> None:
        """End the worker and remove its folder."""
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            if self._interrupted:  # its engine was left in the middle of a step
                self._kill()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self._kill()
                process.wait()
        self._thread.shutdown(wait=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _error(self, kind: str, message: str, facts: Mapping[str, Any]) -> AssayError:
        if kind == "interrupted":  # not by this side
            return AssayError(
                f"the vLLM worker for {self._name} was interrupted",
                finding_id="fidelity.engine_failed",
                remedy="run it again",
            )
        if kind == "UsageError":
            return UsageError(message, remedy=facts["remedy"], finding_id=facts["finding_id"])
        if (
            self._ranks > 1
            and facts.get("finding_id") == "fidelity.engine_load"
            and (told := self._rank_said())
        ):
            return AssayError(f"vLLM cannot load {self._name}: {told}", **facts)
        if kind == "bug":
            return AssayError(
                f"vLLM failed in its worker: {message}",
                finding_id="fidelity.engine_failed",
                remedy="; ".join(self._last_lines()) or "run it again with --debug",
            )
        return AssayError(message, **facts)

    def _rank_said(self) -> str:
        """Which rank failed first while the engine started, and what it said, from the log."""
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        found = RANK_ERROR.search(text)
        if found is None:
            return ""
        rank = int(found["stage"] or 0) * self._tensor + int(found["rank"] or 0)
        return f"rank {rank} of {self._ranks}: {found['said'].strip()[:300]}"

    def _died(self) -> AssayError:
        self._process.wait()
        status = self._process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        memory = " (the system may have run out of memory)" if status == -9 else ""
        said = " | ".join(self._last_lines()) or "it wrote no log"
        return AssayError(
            f"the vLLM worker for {self._name} {how}{memory}: {said}",
            finding_id="fidelity.engine_failed",
            remedy=(
                "check that its Python has vLLM and that the model fits; a smaller batch or"
                " kv_cache_gib needs less"
            ),
            evidence={"status": status},
        )

    def _last_lines(self, count: int = 3) -> list[str]:
        """The last lines of the log that speak of an error, else the last lines."""
        if not self._log.exists():
            return []
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return [line[-300:] for line in ([x for x in lines if DETAIL.search(x)] or lines)[-count:]]


def _start(python: Path, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the worker. Its path holds assay alone: the packages beside it are of another
    environment.
    """
    alone = packages_alone(folder / "path")
    environment = {
        **os.environ,
        "PYTHONPATH": str(alone),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }
    environment.pop("PYTHONHOME", None)
    try:
        with log.open("wb") as out:
            return subprocess.Popen(
                [str(python), "-m", "assay.engines.vllm.wire"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
    except OSError as error:
        raise AssayError(
            f"the vLLM worker cannot be started with {python}: {error.strerror}",
            finding_id="fidelity.engine_missing",
            remedy="give the path of bin/python in the environment that has vLLM",
        ) from error
