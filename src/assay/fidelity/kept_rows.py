"""What an engine makes of windows with nothing added: scored once, found by the next command.

The key of a batch is everything that can change its final states: the engine and its files,
versions, machine and threads, the scoring path, and the windows that run together, as rounding
depends on the company of a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from assay.engines.scoring import Head, ScoreJob, ScoringEngine, StateRows, Window
from assay.environment import describe
from assay.fidelity.names import fingerprint
from assay.progress import Advance
from assay.runs import Kept, cache_path, source_digest

if TYPE_CHECKING:
    pass
from assay.fidelity.score import batches, key_of

STATES_BYTES = 8 << 30
"""What kept states may take on the disk; those used longest ago go first."""


def kept_states() -> Kept:
    """The folder of kept states, trimmed."""
    kept = Kept(cache_path("states"))
    kept.trim(STATES_BYTES)
    return kept


def engine_key(spec: str) -> dict[str, Any]:
    """What decides the numbers of an engine that is written `spec`: its files, and what runs it
    here.
    """
    machine = {k: v for k, v in describe().items() if k != "cpu_count"}
    return {"engine": fingerprint(spec), "environment": machine, "source": source_digest("engines")}


class KeptRows:
    """The rows of one engine on some windows, by one job; `score` reads what is kept and scores the
    rest.

    `kept` is a folder whose keys hold `engine_key`. The windows of a batch are kept together.
    """

    def __init__(self, kept: Kept, windows: Sequence[Window], job: ScoreJob) -> None:
        self._engine = kept
        self._kept = kept.within([job.path, job.scored_from, job.chunk])
        self._windows = windows
        self._job = job
        self._states: dict[str, torch.Tensor] = {}
        self._head: Head | None = None

    def read(self) -> list[Window]:
        """Read what is kept; the windows that are still to be scored."""
        missing: list[Window] = []
        for part in batches(self._windows, self._job.batch):
            if any(w.sha256 not in self._states for w in part):
                arrays = self._kept.get(key_of(part))
                if arrays is None:
                    missing += part
                else:
                    self._take(part, _tensor(arrays))
        return missing

    def score(self, engine: ScoringEngine, advance: Advance = lambda: None) -> None:
        """Score what is not kept, batch by batch."""
        todo = self.read()
        for _ in range(len(self._windows) - len(todo)):
            advance()
        rows = engine.score_windows(todo, self._job) if todo else iter(())
        for part in batches(todo, self._job.batch):
            states = []
            for found in islice(rows, len(part)):
                if not isinstance(found, StateRows):
                    raise ValueError("an engine that gives no final states has none to keep")
                states.append(found.states.cpu())
                self._head = found.head
                advance()
            whole = torch.stack(states)
            self._kept.put(key_of(part), _arrays(whole))
            self._take(part, whole)
        for _ in rows:  # to its end: an engine books what took part when it is done
            pass
        if self._head is None:
            self._head = engine.head  # type: ignore[attr-defined]

    def keep_head(self) -> None:
        """Keep the output head too, so that the rows can be had when no engine is open."""
        if self._head is None or "head" in self._engine:
            return
        found = {
            "scale": np.array(self._head.scale),
            "softcap": np.array(self._head.softcap or 0.0),
        }
        for name, tensor in (("weight", self._head.weight), ("bias", self._head.bias)):
            if tensor is not None:
                found |= {f"{name} {key}": array for key, array in _arrays(tensor).items()}
        self._engine.put("head", found)

    def read_head(self) -> bool:
        """Read a kept head; False where there is none."""
        found = self._engine.get("head")
        if found is None:
            return False
        weight, bias = (
            (
                _tensor({key: found[f"{name} {key}"] for key in ("values", "dtype")})
                if f"{name} values" in found
                else None
            )
            for name in ("weight", "bias")
        )
        self._head = Head(
            weight, bias, softcap=float(found["softcap"]) or None, scale=float(found["scale"])
        )
        return True

    def rows(self, windows: Sequence[Window]) -> Iterator[StateRows]:
        """The rows of some of the windows, in order; ValueError where they have not been scored."""
        if self._head is None:
            raise ValueError("the windows have not been scored")
        for window in windows:
            yield StateRows(window, self._job.scored_from, self._states[window.sha256], self._head)

    def _take(self, part: Sequence[Window], states: torch.Tensor) -> None:
        self._states |= {window.sha256: own for window, own in zip(part, states, strict=True)}


def _arrays(x: torch.Tensor) -> dict[str, np.ndarray[Any, Any]]:
    """A tensor of any floating type; numpy has no bfloat16, so two bytes go as integers."""
    x = x.detach().cpu().contiguous()
    values = x.view(torch.int16) if x.element_size() == 2 else x
    return {"values": values.numpy(), "dtype": np.array(str(x.dtype).removeprefix("torch."))}


def _tensor(arrays: dict[str, np.ndarray[Any, Any]]) -> torch.Tensor:
    return torch.from_numpy(arrays["values"]).view(getattr(torch, str(arrays["dtype"])))
