"""What one stream of a compressed cache decoded in the running step, for streams that predict from
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from assay_lab.kv.predictors import last_readers
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.stream_coder import Coders, Key

if TYPE_CHECKING:
    import torch


class Handover:
    """Tokens [rows, heads, tokens, head_dim] as a decoder has them: float32, keys before RoPE.

    `rotary` is that of keys that may be handed over exact, None for values. They are kept until
    `clear`, not longer than the last stream that predicts from them needs.
    """

    def __init__(self, layer: int, rotary: Rotary | None) -> None:
        self._layer = layer
        self.rotary = rotary
        self._pieces: list[tuple[int, torch.Tensor]] = []

    def put(self, states: torch.Tensor, first: int) -> None:
        """Decoded tokens from position `first` on; they count where earlier ones of the same
        positions differ.
        """
        self._pieces.append((first, states))

    def put_exact(self, x: torch.Tensor, first: int) -> None:
        """Tokens that are not coded, as attention sees them."""
        if self.rotary:
            x = self.rotary.at(self._layer, first, first + x.shape[-2]).remove(x)
        self.put(x.float(), first)

    def take(self, lo: int, hi: int, seen_from: int) -> torch.Tensor:
        """Positions lo … hi − 1. Zeros replace tokens before `seen_from` that are gone;
        ValueError for others.
        """
        for first, states in reversed(self._pieces):
            if first <= lo and hi <= first + states.shape[-2]:
                return states[..., lo - first : hi - first, :]
        covered = lo if lo >= seen_from else min(seen_from, hi)
        for first, states in sorted(self._pieces, key=_first):
            if first <= covered:
                covered = max(covered, first + states.shape[-2])
        if not self._pieces or covered < hi:
            raise ValueError(f"positions {lo} to {hi} of layer {self._layer} are not decoded yet")
        like = self._pieces[0][1]
        out = like.new_zeros((*like.shape[:-2], hi - lo, like.shape[-1]))
        for first, states in self._pieces:
            begin, end = max(lo, first), min(hi, first + states.shape[-2])
            if begin < end:
                out[..., begin - lo : end - lo, :] = states[..., begin - first : end - first, :]
        return out

    def clear(self) -> None:
        """Nothing predicts from them any more."""
        self._pieces.clear()


def handovers(coders: Coders, rotary: Rotary) -> dict[Key, Handover]:
    """One for every stream that another predicts from."""
    return {
        key: Handover(key[0], rotary if key[1] == "k" else None) for key in last_readers(coders)
    }


def _first(piece: tuple[int, torch.Tensor]) -> int:
    return piece[0]
