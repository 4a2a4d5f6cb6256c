"""States that tokens are added to, one at a time or many."""

from __future__ import annotations

import torch


class Growing:
    """A tensor [..., tokens, d] that grows. Room doubles, so that a token at a time does not copy
    all each time.
    """

    def __init__(self) -> None:
        self._room: torch.Tensor | None = None
        self.length = 0

    @property
    def states(self) -> torch.Tensor:
        """The states so far, which may be written to; ValueError before the first."""
        if self._room is None:
            raise ValueError("nothing has gone through this stream yet")
        return self._room[..., : self.length, :]

    def append(self, new: torch.Tensor) -> None:
        """Add tokens [..., n, d]."""
        need = self.length + new.shape[-2]
        if self._room is None or need > self._room.shape[-2]:
            room = new.new_empty((*new.shape[:-2], max(need, 2 * self.length), new.shape[-1]))
            if self._room is not None:
                room[..., : self.length, :] = self.states
            self._room = room
        self._room[..., self.length : need, :] = new
        self.length = need
