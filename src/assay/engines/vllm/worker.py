"""The worker: `python -m assay.engines.vllm.worker`, in an environment that has vLLM.

Reads one request a line from stdin (`{"call": …, …}`) and answers each with one line on what was stdout; everything
that prints goes to stderr. It ends when stdin does, or when the process that started it is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from assay.engines.scoring import (
    Engagement,
    GreedyStep,
    Head,
    HookSpec,
    ScoreJob,
    ScoringPath,
    StateRows,
    TokenizerFacts,
    Window,
)
from assay.engines.vllm.core import VllmCore
from assay.engines.vllm.start import VllmSpec, reason_of
from assay.errors import AssayError, UsageError

if TYPE_CHECKING:
    import torch


# -----------------------------------------------------------------------------
# What goes between assay and a worker: JSON lines, and tensors in safetensors files beside them.


def job_to_json(job: ScoreJob) -> dict[str, Any]:
    """A job as plain JSON types."""
    return asdict(job)


def job_from_json(data: Mapping[str, Any]) -> ScoreJob:
    """Read what `job_to_json` wrote."""
    hook = data["hook"]
    return ScoreJob(**{**data, "path": ScoringPath(data["path"]), "hook": HookSpec(**hook) if hook else None})


def windows_to_json(windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Windows as plain JSON types."""
    return [{"index": w.index, "tokens": list(map(int, w.tokens))} for w in windows]


def windows_from_json(data: Sequence[Mapping[str, Any]]) -> list[Window]:
    """Read what `windows_to_json` wrote."""
    return [Window(w["index"], tuple(w["tokens"])) for w in data]


def engagement_from_json(data: Mapping[str, Any]) -> Engagement:
    """Read `asdict(engagement)`, whose layer numbers JSON turned into text."""
    return Engagement(**{**data, "per_layer": {int(k): v for k, v in data["per_layer"].items()}})


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to one file, on the CPU."""
    from safetensors.torch import save_file

    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def load_tensors(path: Path, *, keep: bool = False) -> dict[str, torch.Tensor]:
    """Read what `save_tensors` wrote into memory, and remove the file unless it is to be kept."""
    from safetensors.torch import load

    tensors: dict[str, torch.Tensor] = load(path.read_bytes())
    if not keep:
        path.unlink()
    return tensors


def save_head(path: Path, head: Head) -> dict[str, Any]:
    """Write the tensors of a head; returns the rest of it as JSON."""
    tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
    save_tensors(path, tensors)
    return {"softcap": head.softcap, "scale": head.scale}


def load_head(path: Path, rest: Mapping[str, Any], *, keep: bool = False) -> Head:
    """Read what `save_head` wrote."""
    tensors = load_tensors(path, keep=keep)
    return Head(tensors["weight"], tensors.get("bias"), **rest)


# -----------------------------------------------------------------------------

Request = Mapping[str, Any]


class Session:
    """One engine and the calls that a line may name."""

    def __init__(self) -> None:
        self._core: VllmCore | None = None
        self._files = 0
        self._folder = Path()

    @property
    def core(self) -> VllmCore:
        """The engine that `open` started."""
        if self._core is None:
            raise RuntimeError("nothing is open")
        return self._core

    def open(self, request: Request) -> Any:
        """Start the engine."""
        self._folder = Path(request["folder"])
        self._core = VllmCore.start(VllmSpec(**request["spec"]))
        tokenizer = self.core.tokenizer
        return {
            "facts": self.core.facts(),
            "tokenizer": {
                "sha256": tokenizer.sha256,
                "vocab_size": tokenizer.vocab_size,
                "bos_id": tokenizer.bos_id,
            },
        }

    def encode(self, request: Request) -> Any:
        """Token ids of a text."""
        return self.core.tokenizer.encode(request["text"])

    def decode(self, request: Request) -> Any:
        """Text of token ids."""
        return self.core.tokenizer.decode(request["ids"])

    def head(self, request: Request) -> Any:
        """The output head, in a file."""
        path = self._new_file()
        return {"file": path.name, "rest": save_head(path, self.core.head)}

    def begin(self, request: Request) -> Any:
        """Get ready to score."""
        self.core.begin(job_from_json(request["job"]), request["length"])

    def score(self, request: Request) -> Any:
        """States of windows, one file each."""
        return [
            self._keep({"states": states})
            for states in self.core.score(windows_from_json(request["windows"]))
        ]

    def reduce(self, request: Request) -> Any:
        """Statistics of windows against reference states, one file each."""
        windows = windows_from_json(request["windows"])
        head = load_head(self._folder / request["head"], request["rest"], keep=True)
        references = [
            StateRows(window, request["first"], load_tensors(self._folder / name)["states"], head)
            for window, name in zip(windows, request["files"], strict=True)
        ]
        return [self._keep(found) for found in self.core.reduce(windows, references, request["target"])]

    def greedy(self, request: Request) -> Any:
        """Greedy tokens after each prefix."""
        rows = self.core.greedy([tuple(p) for p in request["prefixes"]], request["count"])
        return [[asdict(step) for step in row] for row in rows]

    def engagement(self, request: Request) -> Any:
        """What took part so far."""
        return asdict(self.core.engagement())

    def end(self, request: Request) -> Any:
        """Take the hook off."""
        return asdict(self.core.end())

    def close(self, request: Request) -> Any:
        """Shut the engine down."""
        if self._core is not None:
            self._core.close()
            self._core = None

    def _new_file(self) -> Path:
        self._files += 1
        return self._folder / f"worker-{self._files:08d}.safetensors"

    def _keep(self, tensors: Mapping[str, Any]) -> str:
        path = self._new_file()
        save_tensors(path, tensors)
        return path.name


CALLS = (
    "open",
    "encode",
    "decode",
    "head",
    "begin",
    "score",
    "reduce",
    "greedy",
    "engagement",
    "end",
    "close",
)


def answer(session: Session, line: str) -> dict[str, Any]:
    """The answer to one line: `{"result": …}` or `{"error": …}`; no error escapes."""
    try:
        request = json.loads(line)
        if request["call"] not in CALLS:
            raise ValueError(f"unknown call {request['call']!r}")
        call: Callable[[Request], Any] = getattr(session, request["call"])
        return {"result": call(request)}
    except AssayError as error:
        return {
            "error": {
                "kind": type(error).__name__,
                "message": error.message,
                "finding_id": error.finding_id,
                "remedy": error.remedy,
                "evidence": error.evidence,
            }
        }
    except Exception as error:
        import traceback

        traceback.print_exc()
        return {"error": {"kind": "bug", "message": f"{type(error).__name__}: {reason_of(error)}"}}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer every line until there are no more."""
    session = Session()
    for line in requests:
        answers.write(json.dumps(answer(session, line)) + "\n")
        answers.flush()
    session.close({})


def _leave_with(parent: int) -> None:
    """End when the parent is gone, even in the middle of a step."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Entry of the process."""
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # whatever prints must not get between the answers
        serve(sys.stdin, answers)


if __name__ == "__main__":
    main()


# -----------------------------------------------------------------------------
# The other side of the worker: the same calls as `VllmCore`, in a process with another Python.

_GRACE_SECONDS = 20.0
_DETAIL = re.compile(r"Error|error|Killed|out of memory|No module")


class RemoteCore:
    """A worker with one engine. It is ended, and its folder removed, by `close`."""

    def __init__(self, spec: VllmSpec, python: Path) -> None:
        """Start the worker and the engine in it; AssayError with the last lines of its log where that fails."""
        self._name = Path(spec.model).name
        self._folder = Path(tempfile.mkdtemp(prefix="assay-vllm-"))
        self._log = self._folder / "worker.log"
        self._heads: dict[int, tuple[Head, str, dict[str, Any]]] = {}
        self._sent = 0
        try:
            self._process = _start(python, self._folder, self._log)
            opened = self._call("open", spec=spec.to_json(), folder=str(self._folder))
        except BaseException:
            self.close()
            raise
        self._facts: dict[str, Any] = opened["facts"]
        self._tokenizer: dict[str, Any] = opened["tokenizer"]

    def _call(self, call: str, **request: Any) -> Any:
        pipes = self._process
        if pipes.stdin is None or pipes.stdout is None:
            raise RuntimeError("the worker has no pipes")
        try:
            pipes.stdin.write(json.dumps({"call": call, **request}) + "\n")
            pipes.stdin.flush()
            line = pipes.stdout.readline()
        except OSError:
            line = ""
        except KeyboardInterrupt:
            pipes.kill()  # its answer would be taken for that of the next call
            raise
        if not line:
            raise self._died()
        answer = json.loads(line)
        if "error" in answer:
            raise self._error(answer["error"])
        return answer["result"]

    @cached_property
    def tokenizer(self) -> TokenizerFacts:
        """Facts of the tokenizer that lies beside the weights; texts go to the worker and back."""
        decode = lru_cache(maxsize=2**18)(lambda ids: str(self._call("decode", ids=list(ids))))
        return TokenizerFacts(
            **self._tokenizer,
            encode=lambda text: list(self._call("encode", text=text)),
            decode=lambda ids: decode(tuple(map(int, ids))),
        )

    @cached_property
    def head(self) -> Head:
        """The output head."""
        found = self._call("head")
        return load_head(self._folder / found["file"], found["rest"])

    def facts(self) -> dict[str, Any]:
        """What scores."""
        return {**self._facts, "placement": "worker"}

    def begin(self, job: ScoreJob, length: int) -> None:
        """Get ready for windows of `length` tokens."""
        self._call("begin", job=job_to_json(job), length=length)
        self._first = job.scored_from

    def score(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """Final states of each window."""
        files = self._call("score", windows=windows_to_json(windows))
        return [load_tensors(self._folder / name)["states"] for name in files]

    def reduce(
        self, windows: Sequence[Window], references: Sequence[StateRows], target: str
    ) -> list[dict[str, torch.Tensor]]:
        """Statistics of each window against reference states, computed on the worker's device."""
        head, rest = self._send_head(references[0].head)
        sent = [self._send({"states": reference.states}) for reference in references]
        files = self._call(
            "reduce",
            windows=windows_to_json(windows),
            files=sent,
            first=references[0].first,
            head=head,
            rest=rest,
            target=target,
        )
        return [load_tensors(self._folder / name) for name in files]

    def greedy(self, prefixes: Sequence[tuple[int, ...]], count: int) -> list[list[GreedyStep]]:
        """Greedy tokens after each prefix."""
        rows = self._call("greedy", prefixes=[list(map(int, p)) for p in prefixes], count=count)
        return [[GreedyStep(**step) for step in row] for row in rows]

    def _send(self, tensors: dict[str, torch.Tensor]) -> str:
        self._sent += 1
        name = f"sent-{self._sent:08d}.safetensors"
        save_tensors(self._folder / name, tensors)
        return name

    def _send_head(self, head: Head) -> tuple[str, dict[str, Any]]:
        """File and rest of a reference's head, written once. The head is kept, so that its id stays its own."""
        if id(head) not in self._heads:
            name = f"head-{len(self._heads)}.safetensors"
            self._heads[id(head)] = (head, name, save_head(self._folder / name, head))
        return self._heads[id(head)][1:]

    def engagement(self) -> Engagement:
        """What took part since `begin`."""
        return engagement_from_json(self._call("engagement"))

    def end(self) -> Engagement:
        """Take off what `begin` put in place; what took part."""
        return engagement_from_json(self._call("end"))

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

    def _error(self, error: dict[str, Any]) -> AssayError:
        kind, message = error.pop("kind"), error.pop("message")
        if kind == "UsageError":
            return UsageError(message, remedy=error["remedy"], finding_id=error["finding_id"])
        if kind == "bug":
            return AssayError(
                f"vLLM failed in its worker: {message}",
                finding_id="fidelity.engine_failed",
                remedy="; ".join(self._last_lines()) or "run it again with --debug",
            )
        return AssayError(message, **error)

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


def _start(python: Path, folder: Path, log: Path) -> subprocess.Popen[str]:
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
                text=True,
                encoding="utf-8",
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
