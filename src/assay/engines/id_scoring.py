"""Engines that give log-probabilities of a few ids at each position and no distributions: what a comparison asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from assay.engines.scoring import ScoreJob, Window

if TYPE_CHECKING:
    from assay.engines.server.chosen import ChosenScores


@runtime_checkable
class IdScorer(Protocol):
    """A candidate that can be bounded, but not measured over its whole vocabulary."""

    @property
    def ids(self) -> int:
        """How many ids are scored at each position, that of the token that came among them."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """Entries of its vocabulary, where it says so."""
        ...

    def describe(self) -> dict[str, Any]:
        """What scored: kind, version, model; plain JSON types, no path."""
        ...

    def require(self, job: ScoreJob, length: int) -> None:
        """AssayError with the reason where it cannot score windows of `length` tokens as `job` asks."""
        ...

    def score_ids(self, window: Window, chosen: Sequence[Sequence[int]], first: int) -> ChosenScores:
        """Log-probabilities at the tokens `first` … of a window, of the chosen ids or of its own likeliest."""
        ...

    def tokenize(self, text: str) -> Sequence[int]:
        """Token ids of a text, without special tokens; AssayError where it cannot."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; empty where it cannot tell."""
        ...

    def read_texts(self, ids: Sequence[int]) -> bool:
        """Get the texts of many single tokens at once, so that `decode` knows them; False where it cannot."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...
