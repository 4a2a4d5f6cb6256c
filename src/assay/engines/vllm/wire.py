"""The pipe to vLLM's own Python: requests and answers, pickled, tensors by shared memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from operator import attrgetter
from types import FrameType
from typing import Any, BinaryIO

import torch

from assay.engines.scoring import StateRows
from assay.engines.vllm.core import VllmCore
from assay.engines.vllm.start import reason_of
from assay.errors import AssayError

RANK_ERROR = re.compile(
    r"\(Worker(?:_PP(?P<stage>\d+))?(?:_TP(?P<rank>\d+))?\b[^)]*\).*?"
    r"\b(?P<said>(?:\w+\.)*\w*(?:Error|Exception): .+)"
)


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


def leave_with_parent(parent: int) -> None:
    """End when the parent is gone, even in the middle of a step."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Entry of the process."""
    threading.Thread(target=leave_with_parent, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # no print may get between the answers
        serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    # Under its own name, which the other side can import: what is pickled says where it comes from.
    from assay.engines.vllm import wire

    wire.main()
