"""What the streams of a measured window came to."""

from __future__ import annotations

from dataclasses import dataclass

BF16_BYTES = 2


@dataclass(frozen=True)
class StreamFacts:
    """One window's real stream: its bytes, those of the same tokens in bf16, Σx², Σ(x − x̂)² and
    the stream's SHA-256.

    `apart` is Σ(r − x̂)², r what attention read, over the tokens that are coded on both sides or
    exact on both; of a coder that predicts, how far the sizes of both errors are apart
    (`LiveStream._apart`). The hash is empty where no coder is at work.
    """

    stored: int
    exact: int
    power: float
    error: float
    sha256: str
    apart: float = 0.0
