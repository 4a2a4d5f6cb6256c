"""The worker: `python -m assay.engines.vllm.worker`, in an environment that has vLLM.

Reads one request a line from stdin (`{"call": …, …}`) and answers each with one line on what was stdout; everything
that prints goes to stderr. It ends when stdin does, or when the process that started it is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from assay.engines.scoring import StateRows
from assay.engines.vllm.core import VllmCore
from assay.engines.vllm.spec import VllmSpec
from assay.engines.vllm.start import reason_of
from assay.engines.vllm.wire import (
    job_from_json,
    load_head,
    load_tensors,
    save_head,
    save_tensors,
    windows_from_json,
)
from assay.errors import AssayError

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
