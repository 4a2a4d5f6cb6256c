"""What a KV-cache codec is: parameters, then a fitted coder for one stream of one layer, then bytes.

A codec is a frozen dataclass whose fields are its parameters. `fit` binds it to one stream (K or V) of one layer, with
calibration where it needs some, and returns a `FittedCodec`, which turns [KV heads, tokens, head_dim] into a stream of
bytes and back. Decoding reads the stream and the fitted tables, nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from assay.errors import AssayError
from assay.kv.stream import StreamHeader, read_stream, write_stream

if TYPE_CHECKING:
    import torch

    from assay.kv.samples import Samples


@dataclass(frozen=True)
class Site:
    """Where a codec is put: layer, stream (`k` or `v`), KV heads and width of a head."""

    layer: int
    stream: str
    heads: int
    head_dim: int


class Codec(ABC):
    """Parameters of a codec. Subclasses are frozen dataclasses; `name` is how a SPEC writes them."""

    name: ClassVar[str]

    @abstractmethod
    def fit(self, site: Site, samples: Samples | None = None) -> FittedCodec:
        """A coder for `site`. AssayError where the codec needs calibration samples and there are none."""


class FittedCodec(ABC):
    """A codec bound to one stream of one layer; see `assay.kv.coder.StreamCoder` for what the attributes mean."""

    granularity: int = 1
    exact_first: int = 0
    exact_last: int = 0
    before_rope: bool = False
    lossless: bool = False
    table_bytes: int = 0
    block_tokens: int = 128
    """Tokens that one block of the stream holds: the unit of random access, a multiple of `granularity`."""

    def __init__(self, name: str, site: Site) -> None:
        self.name = name
        self.site = site

    @abstractmethod
    def encode_block(self, x: torch.Tensor) -> bytes:
        """Bytes of 1 … `block_tokens` tokens [h, n, d], float32 and finite."""

    @abstractmethod
    def decode_block(self, data: memoryview, tokens: int) -> torch.Tensor:
        """What `encode_block` was given, as it comes back: float32 [h, n, d] on the CPU."""

    def reconstruct(self, x: torch.Tensor) -> torch.Tensor:
        """decode(encode(x)) of whole blocks, on the device of `x`. Codecs override it with the same maths, no bytes."""
        return self.decode(self.encode(x)).to(x.device)

    def encode(self, x: torch.Tensor) -> bytes:
        """The stream of a whole sequence [h, n, d]; n may be 0. AssayError for NaN, infinity or another shape."""
        x = self._checked(x)
        step = self.block_tokens
        blocks = [self.encode_block(x[:, lo : lo + step]) for lo in range(0, x.shape[1], step)]
        return write_stream(self._header(x.shape[1]), blocks)

    def decode(self, stream: bytes) -> torch.Tensor:
        """Everything that a stream holds, float32 [h, n, d]; AssayError where it is damaged or of another codec."""
        header, blocks = read_stream(stream)
        return self._joined(header, [(i, b) for i, b in enumerate(blocks)], 0, header.tokens)

    def decode_range(self, stream: bytes, lo: int, hi: int) -> torch.Tensor:
        """Tokens lo … hi − 1 of a stream; only the blocks that hold them are decoded."""
        header, blocks = read_stream(stream)
        if not 0 <= lo <= hi <= header.tokens:
            raise ValueError(f"tokens {lo} to {hi} are not within the {header.tokens} of the stream")
        first, last = lo // header.block_tokens, -(-hi // header.block_tokens)
        return self._joined(header, [(i, blocks[i]) for i in range(first, last)], lo, hi)

    def writer(self) -> StreamWriter:
        """A stream that grows as tokens come."""
        return StreamWriter(self)

    def _joined(
        self, header: StreamHeader, blocks: list[tuple[int, memoryview]], lo: int, hi: int
    ) -> torch.Tensor:
        import torch

        self._same(header)
        parts = []
        for index, data in blocks:
            start = index * header.block_tokens
            tokens = min(header.block_tokens, header.tokens - start)
            part = self.decode_block(data, tokens)
            parts.append(part[:, max(0, lo - start) : hi - start])
        if not parts:
            return torch.zeros(header.heads, 0, header.head_dim)
        return torch.cat(parts, dim=1)

    def _header(self, tokens: int) -> StreamHeader:
        return StreamHeader(self.name, self.site.heads, tokens, self.site.head_dim, self.block_tokens)

    def _same(self, header: StreamHeader) -> None:
        mine = self._header(header.tokens)
        if header != mine:
            raise AssayError(
                f"the stream is of {header.codec} for {header.heads} × {header.head_dim} channels in blocks of "
                f"{header.block_tokens}, not of {mine.codec} for {mine.heads} × {mine.head_dim} in blocks of {mine.block_tokens}",
                finding_id="kv.stream_mismatch",
                remedy="decode it with the codec and the parameters that wrote it",
            )

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim != 3 or x.shape[0] != self.site.heads or x.shape[2] != self.site.head_dim:
            raise ValueError(
                f"{self.name} takes [{self.site.heads}, tokens, {self.site.head_dim}], got {list(x.shape)}"
            )
        x = x.float()
        if not bool(x.isfinite().all()):
            where = (~x.isfinite()).nonzero()[0].tolist()
            raise AssayError(
                f"layer {self.site.layer}, stream {self.site.stream}: the value at head {where[0]}, token {where[1]}, "
                f"channel {where[2]} is not finite",
                finding_id="kv.nonfinite",
                remedy="a cache with NaN or infinity cannot be coded; look at the weights (assay verify --values)",
            )
        return x


class StreamWriter:
    """Tokens appended to a stream one batch after another; a block is encoded when it is full.

    `stream()` is at any time what `encode` of all tokens would give: the last, partial block is encoded with it.
    """

    def __init__(self, fitted: FittedCodec) -> None:
        self._fitted = fitted
        self._blocks: list[bytes] = []
        self._rest: torch.Tensor | None = None
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens appended so far."""
        return self._tokens

    def append(self, x: torch.Tensor) -> None:
        """More tokens [h, n, d]."""
        import torch

        x = self._fitted._checked(x)
        self._tokens += x.shape[1]
        rest = x if self._rest is None else torch.cat([self._rest, x], dim=1)
        step = self._fitted.block_tokens
        while rest.shape[1] >= step:
            self._blocks.append(self._fitted.encode_block(rest[:, :step]))
            rest = rest[:, step:]
        self._rest = rest

    def stream(self) -> bytes:
        """The stream of all tokens so far."""
        blocks = list(self._blocks)
        if self._rest is not None and self._rest.shape[1]:
            blocks.append(self._fitted.encode_block(self._rest))
        return write_stream(self._fitted._header(self._tokens), blocks)


def need_samples(samples: Any, what: str) -> Any:
    """`samples`, or AssayError that says what needs them."""
    if samples is None:
        raise AssayError(
            f"{what} needs calibration",
            finding_id="kv.calibration_missing",
            remedy="make it with `assay kv calibrate` and give it with --calibration FILE",
        )
    return samples
