"""vLLM as a scoring engine, wherever it runs: in this process, or in a worker with another Python."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from itertools import islice
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import torch

from assay.engines.scoring import (
    Engagement,
    GreedyStep,
    Head,
    ScoreJob,
    ScoringAbility,
    ScoringPath,
    StateRows,
    TokenizerFacts,
    Window,
    check_windows,
)
from assay.engines.vllm.core import VllmCore
from assay.engines.vllm.path import packages_alone
from assay.engines.vllm.ranks import HeadFile
from assay.engines.vllm.start import VllmSpec, parse_spec, reason_of
from assay.errors import AssayError, UsageError
from assay.runs import cache_dir

PYTHON = "ASSAY_VLLM_PYTHON"


def open_core(spec: VllmSpec) -> VllmCore | RemoteCore:
    """Start vLLM for `spec`; AssayError where there is none, or where it cannot load the model."""
    python = find_python(spec.python)
    return VllmCore.start(spec) if python is None else RemoteCore(spec, python)


def find_python(named: str = "") -> Path | None:
    """The Python to start a worker with; None if this process can import vLLM itself.

    In this order: the one that is named, this process, the one in `ASSAY_VLLM_PYTHON`, the private
    environment that `assay demo` keeps in the cache.
    """
    if named:
        return _checked(Path(named), "python=")
    found = find_spec("vllm")
    if found is not None and found.origin is not None:  # a mere folder of that name has none
        return None
    if from_environment := os.environ.get(PYTHON):
        return _checked(Path(from_environment), PYTHON)
    ready = sorted(cache_dir(".").glob("vllm-*/.ready"))
    if ready:
        return ready[-1].parent / "bin" / "python"
    raise AssayError(
        "vllm: needs vLLM, which this Python does not have",
        finding_id="fidelity.engine_missing",
        remedy=(f"pip install 'llm-assay[vllm]', or name a Python that has vLLM in {PYTHON}"),
    )


def _checked(python: Path, source: str) -> Path:
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise AssayError(
            f"{source} names no Python that can be run: {python}",
            finding_id="fidelity.engine_missing",
            remedy="give the path of bin/python in the environment that has vLLM",
        )
    return python


class VllmScorer:
    """Scores windows with vLLM, whether it runs here or in a worker."""

    def __init__(self, spec: VllmSpec, core: VllmCore | RemoteCore) -> None:
        self.spec = spec
        self.core = core
        self._engagement = Engagement()

    @classmethod
    def load(cls, spec: str) -> VllmScorer:
        """Load `vllm:MODEL?…`; AssayError where that is not possible."""
        parsed = parse_spec(spec)
        if Path(parsed.model).exists():  # the worker has another working folder
            parsed = replace(parsed, model=str(Path(parsed.model).resolve()))
        if parsed.kv_pages:
            parsed = replace(parsed, kv_pages=str(Path(parsed.kv_pages).resolve()))
        core = open_core(parsed)
        if told := core.facts().get("unequal_memory"):
            warnings.warn(told, RuntimeWarning, stacklevel=2)
        return cls(parsed, core)

    @property
    def ability(self) -> ScoringAbility:
        """Every path, whole distributions, states. Hooks are those of K and V, see
        `assay.engines.vllm.hooks`.
        """
        return ScoringAbility(
            frozenset(ScoringPath),
            reason="hooks of transformers' modules do not fit vLLM's; those of K and V do",
        )

    @property
    def tokenizer(self) -> TokenizerFacts:
        """Facts of the tokenizer that lies beside the weights."""
        return self.core.tokenizer

    @property
    def head(self) -> Head:
        """The output head."""
        return self.core.head

    def describe(self) -> dict[str, Any]:
        """Engine, versions, model, number formats, cache."""
        return self.core.facts()

    def score_windows(self, windows: Sequence[Window], job: ScoreJob) -> Iterator[StateRows]:
        """The rows of every window, in order; memory holds the states of one batch."""
        for part in self._batches(windows, job):
            for window, states in zip(part, self.core.score(part), strict=True):
                yield StateRows(window, job.scored_from, states, self.core.head)

    def reduce_windows(
        self, windows: Sequence[Window], references: Iterator[StateRows], job: ScoreJob, target: str
    ) -> Iterator[tuple[Window, Mapping[str, torch.Tensor]]]:
        """Statistics of every window against a reference's states, computed on the engine's device.

        `references` are the reference's rows of `windows`, taken batch by batch. `target` is the
        import path of a function of a batch (reference rows, candidate rows) that gives a dataclass
        of tensors for each window, such as `assay.fidelity.metrics.token_statistics:batch_statistics`. For a worker
        only the states travel to it and the statistics back; in this process it is what
        `score_windows` and that function do.
        """
        for part in self._batches(windows, job):
            yield from zip(
                part,
                self.core.reduce(part, list(islice(references, len(part))), target),
                strict=True,
            )

    def generate_greedy(
        self, prefixes: Sequence[tuple[int, ...]], count: int
    ) -> list[list[GreedyStep]]:
        """`count` greedy tokens after each prefix, as vLLM generates them."""
        return self.core.greedy(prefixes, count)

    def _batches(self, windows: Sequence[Window], job: ScoreJob) -> Iterator[Sequence[Window]]:
        """Batches of windows, with the job's hook in place; the engagement is booked as each is
        done.
        """
        batch = self.core.begin(job, check_windows(windows, job))
        try:
            for lo in range(0, len(windows), batch):
                yield windows[lo : lo + batch]
                self._engagement = self.core.engagement()
        except BaseException:
            with suppress(AssayError):  # what failed first is the reason
                self.core.end()
            raise
        self._engagement = self.core.end()

    def engagement(self) -> Engagement:
        """Cache bytes that attention read, and fires of the hook by layer."""
        return self._engagement

    def close(self) -> None:
        """Give the engine back."""
        self.core.close()


# The engine in another process, whose Python may be another one.


_GRACE_SECONDS = 20.0
_INTERRUPT_SECONDS = 10.0
"""In which a worker leaves the call that it answers."""
_RANK_ERROR = re.compile(
    r"\(Worker(?:_PP(?P<stage>\d+))?(?:_TP(?P<rank>\d+))?\b[^)]*\).*?\b(?P<said>(?:\w+\.)*\w*(?:Error|Exception): .+)"
)
_DETAIL = re.compile(r"Error|error|Killed|out of memory|No module")


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return _tensor, (str(value.dtype).removeprefix("torch."), tuple(value.shape), raw)
        return NotImplemented


def _tensor(dtype: str, shape: tuple[int, ...], raw: bytes) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return (
        torch.frombuffer(bytearray(raw), dtype=kind) if raw else torch.empty(0, dtype=kind)
    ).reshape(shape)


def send(value: Any, pipe: BinaryIO) -> None:
    """Write one value, tensors on any device among it."""
    _Pickler(pipe, protocol=5).dump(value)
    pipe.flush()


class Session:
    """The worker's side: one engine, and the heads of references that were sent to it."""

    def __init__(self) -> None:
        self.core: VllmCore | None = None
        self.heads: dict[int, Any] = {}  # of a Head, or the HeadFile that several ranks read
        self.busy = False

    def interrupt(self, sign: int, frame: FrameType | None) -> None:
        """The handler of the other side's request to end the call that is being answered."""
        if self.busy:
            self.busy = False
            raise KeyboardInterrupt

    def answer(self, call: str, *arguments: Any) -> tuple[bool, Any]:
        """Whether a call went well, and its result, or what is known of the error; no error
        escapes.
        """
        try:
            self.busy = True
            return self._answer(call, *arguments)
        except KeyboardInterrupt:
            return False, ("interrupted", "", {})
        finally:
            self.busy = False

    def _answer(self, call: str, *arguments: Any) -> tuple[bool, Any]:
        try:
            if call == "start":
                self.core = VllmCore.start(*arguments)
                known = self.core.tokenizer
                return True, (self.core.facts(), known.sha256, known.vocab_size, known.bos_id)
            if call == "keep_head":
                self.heads[arguments[0]] = arguments[1]
                return True, None
            if call == "reduce":
                windows, first, states, head, target = arguments
                rows = [
                    StateRows(w, first, s, self.heads[head])
                    for w, s in zip(windows, states, strict=True)
                ]
                arguments = (windows, rows, target)
            found = attrgetter(call)(self.core)
            return True, found(*arguments) if callable(found) else found
        except AssayError as error:
            facts = {
                "finding_id": error.finding_id,
                "remedy": error.remedy,
                "evidence": error.evidence,
            }
            return False, (type(error).__name__, error.message, facts)
        except Exception as error:
            traceback.print_exc()
            return False, ("bug", f"{type(error).__name__}: {reason_of(error)}", {})


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer every call until there are no more."""
    session = Session()
    signal.signal(signal.SIGINT, session.interrupt)
    with contextlib.suppress(EOFError):
        while True:
            send(session.answer(*pickle.load(requests)), answers)
    if session.core is not None:
        session.core.close()


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
            if self._ranks > 1:  # they read their rows, so that nobody is sent the whole
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
        if kind == "interrupted":  # by somebody else than this side
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
        found = _RANK_ERROR.search(text)
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
        return [line[-300:] for line in ([x for x in lines if _DETAIL.search(x)] or lines)[-count:]]


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
                [str(python), "-m", "assay.engines.vllm.scorer"],
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


def _leave_with(parent: int) -> None:
    """End when the parent is gone, even in the middle of a step."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Entry of the process."""
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever prints must not get between the answers
        serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    # Under its own name, which the other side can import: what is pickled says where it comes from.
    from assay.engines.vllm import scorer

    scorer.main()
