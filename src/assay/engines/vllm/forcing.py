"""Teacher-forced decode: a logits processor of vLLM that leaves only the wanted token at each step.

Imported by vLLM from its path, in the process that samples.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

FORCED = "assay_forced"
"""Key of `SamplingParams.extra_args`: the token ids to generate, in order."""


class TeacherForcing(LogitsProcessor):  # type: ignore[misc]
    """Sets the logits of all tokens but the next forced one to −inf; other requests are left
    alone.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[
            int, tuple[list[int], list[int]]
        ] = {}  # row: forced ids, ids generated so far

    def is_argmax_invariant(self) -> bool:
        """It changes which token is the likeliest: that is its purpose."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the requests through the batch: first those that left, then those that came, then
        the moves.
        """
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _prompt, generated in batch_update.added:
            forced = (params.extra_args or {}).get(FORCED)
            self._rows.pop(row, None)
            if forced is not None:
                self._rows[row] = (forced, generated)
        for source, target, direction in batch_update.moved:
            moved, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if other is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [requests, V], changed in place."""
        if not self._rows:
            return logits
        rows = list(self._rows)
        tokens = [forced[len(generated)] for forced, generated in self._rows.values()]
        if len(rows) == logits.shape[0]:
            logits.fill_(float("-inf"))
        else:
            logits[rows] = float("-inf")
        logits[rows, tokens] = 0.0
        return logits
