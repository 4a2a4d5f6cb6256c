"""vLLM in a process of its own, in an environment that has it, and the other side of that process here.

`python -m assay.engines.vllm.worker` reads pickled calls of the methods of one `VllmCore` from its stdin and answers each on what
was its stdout; everything that prints goes to stderr. It ends when its stdin does, or when the process that started it is
gone. Tensors travel as bytes from the main memory of one process to that of the other.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import torch

from assay.engines.scoring import Engagement, GreedyStep, Head, ScoreJob, StateRows, TokenizerFacts, Window
from assay.engines.vllm.core import VllmCore
from assay.engines.vllm.start import VllmSpec, reason_of
from assay.errors import AssayError, UsageError

_GRACE_SECONDS = 20.0
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
    return (torch.frombuffer(bytearray(raw), dtype=kind) if raw else torch.empty(0, dtype=kind)).reshape(
        shape
    )


def send(value: Any, pipe: BinaryIO) -> None:
    """Write one value, tensors on any device among it."""
    _Pickler(pipe, protocol=5).dump(value)
    pipe.flush()


class Session:
    """The worker's side: one engine, and the heads of references that were sent to it."""

    def __init__(self) -> None:
        self.core: VllmCore | None = None
        self.heads: dict[int, Head] = {}

    def answer(self, call: str, *arguments: Any) -> tuple[bool, Any]:
        """Whether a call went well, and its result, or what is known of the error; no error escapes."""
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
                    StateRows(w, first, s, self.heads[head]) for w, s in zip(windows, states, strict=True)
                ]
                arguments = (windows, rows, target)
            found = attrgetter(call)(self.core)
            return True, found(*arguments) if callable(found) else found
        except AssayError as error:
            facts = {"finding_id": error.finding_id, "remedy": error.remedy, "evidence": error.evidence}
            return False, (type(error).__name__, error.message, facts)
        except Exception as error:
            traceback.print_exc()
            return False, ("bug", f"{type(error).__name__}: {reason_of(error)}", {})


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer every call until there are no more."""
    session = Session()
    with contextlib.suppress(EOFError):
        while True:
            send(session.answer(*pickle.load(requests)), answers)
    if session.core is not None:
        session.core.close()


class RemoteCore:
    """A worker with one engine: the calls of `VllmCore`. It is ended, and its folder removed, by `close`."""

    def __init__(self, spec: VllmSpec, python: Path) -> None:
        """Start the worker and the engine in it; AssayError with the last lines of its log where that fails."""
        self._name = Path(spec.model).name
        self._folder = Path(tempfile.mkdtemp(prefix="assay-vllm-"))
        self._log = self._folder / "worker.log"
        self._heads: list[Head] = []
        try:
            self._process = _start(python, self._folder, self._log)
            self._facts, *self._known = self._call("start", spec)
        except BaseException:
            self.close()
            raise

    def _call(self, call: str, *arguments: Any) -> Any:
        pipes = self._process
        if pipes.stdin is None or pipes.stdout is None:
            raise RuntimeError("the worker has no pipes")
        try:
            send((call, *arguments), pipes.stdin)  # type: ignore[arg-type]
            well, found = pickle.load(pipes.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._died() from error
        except KeyboardInterrupt:
            pipes.kill()  # its answer would be taken for that of the next call
            raise
        if not well:
            raise self._error(*found)
        return found

    @cached_property
    def tokenizer(self) -> TokenizerFacts:
        """Facts of the tokenizer that lies beside the weights; texts go to the worker and back."""
        decode = lru_cache(maxsize=2**18)(lambda ids: str(self._call("tokenizer.decode", list(ids))))
        sha256, vocab_size, bos_id = self._known
        return TokenizerFacts(
            sha256,
            vocab_size,
            bos_id,
            encode=lambda text: list(self._call("tokenizer.encode", text)),
            decode=lambda ids: decode(tuple(map(int, ids))),
        )

    @cached_property
    def head(self) -> Head:
        """The output head."""
        head: Head = self._call("head")
        return head

    def facts(self) -> dict[str, Any]:
        """What scores."""
        return {**self._facts, "placement": "worker"}

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
            self._call(
                "keep_head", number, Head(head.weight, head.bias, softcap=head.softcap, scale=head.scale)
            )
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
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _error(self, kind: str, message: str, facts: Mapping[str, Any]) -> AssayError:
        if kind == "UsageError":
            return UsageError(message, remedy=facts["remedy"], finding_id=facts["finding_id"])
        if kind == "bug":
            return AssayError(
                f"vLLM failed in its worker: {message}",
                finding_id="fidelity.engine_failed",
                remedy="; ".join(self._last_lines()) or "run it again with --debug",
            )
        return AssayError(message, **facts)

    def _died(self) -> AssayError:
        self._process.wait()
        status = self._process.returncode
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        memory = " (the system may have run out of memory)" if status == -9 else ""
        said = " | ".join(self._last_lines()) or "it wrote no log"
        return AssayError(
            f"the vLLM worker for {self._name} {how}{memory}: {said}",
            finding_id="fidelity.engine_failed",
            remedy="check that its Python has vLLM and that the model fits; a smaller batch or kv_cache_gib needs less",
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
    """Start the worker. Its path holds assay alone: the packages beside it are of another environment."""
    alone = folder / "path"
    alone.mkdir()
    (alone / "assay").symlink_to(Path(__file__).parents[2], target_is_directory=True)
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
                [str(python), "-m", "assay.engines.vllm.worker"],
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
    from assay.engines.vllm import worker

    worker.main()
