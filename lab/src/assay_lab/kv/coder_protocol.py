"""What the harness needs of a codec that is fitted to one stream (K or V) of one layer."""

from __future__ import annotations

from typing import Protocol

import torch


class StreamCoder(Protocol):
    """A fitted codec for one stream of one layer. Tensors are [KV heads, tokens, head_dim].

    Tokens are coded in blocks of `granularity`, each on its own: coding two blocks together or one
    after the other gives the same. The first `exact_first` tokens of a sequence and, at any time,
    the last `exact_last` stay exact.
    """

    @property
    def granularity(self) -> int:
        """Tokens of a block; 1 where every token is coded alone."""
        ...

    @property
    def exact_first(self) -> int:
        """Sinks: tokens at the start that are kept as they are."""
        ...

    @property
    def exact_last(self) -> int:
        """Recent tokens that are kept as they are until newer ones come."""
        ...

    @property
    def before_rope(self) -> bool:
        """Whether it codes keys as they are before RoPE."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether what comes back is always bit for bit what went in."""
        ...

    @property
    def predictor_keys(self) -> tuple[tuple[int, str], ...]:
        """Streams (layer, stream) whose reconstruction of the same tokens it needs, in the order of
        `predictors`'s heads.
        """
        ...

    @property
    def table_bytes(self) -> int:
        """Bytes of calibration tables that the decoder of this stream needs."""
        ...

    def encode(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> bytes:
        """The stream of a whole sequence, exact tokens included."""
        ...

    def decode(self, stream: bytes, *, predictors: torch.Tensor | None = None) -> torch.Tensor:
        """What a stream holds, float32."""
        ...

    def reconstruct(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> torch.Tensor:
        """What whole blocks become, sinks and recent tokens aside: decode(encode(x)) without the
        bytes.
        """
        ...
