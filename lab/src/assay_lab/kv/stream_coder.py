"""A codec fitted to one stream of one layer, with its exact tokens, as a stream of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from math import isfinite
from zlib import crc32

import torch

from assay.errors import AssayError, UsageError
from assay_lab.kv.codecs.base import BlockCoder
from assay_lab.kv.codecs.samples import LayerStream, Tables
from assay_lab.kv.codecs.stream import (
    Block,
    Stream,
    exact_from_bytes,
    exact_to_bytes,
    from_bytes,
    to_bytes,
)
from assay_lab.kv.coder_protocol import StreamCoder

_LARGEST = 1e37
"""Beyond it, float32 may not hold what comes back."""


class FittedCodec:
    """A block coder with exact tokens at both ends, and the stream format around it.

    Tensors are [heads, tokens, head_dim] of one floating type on any device. Blocks begin after the
    first `exact_first` tokens; the last `exact_last` stay exact until newer ones come. `predictors`
    [predictor heads, tokens, width] is what a predicting codec has before it decodes these tokens,
    all of them, exact ones included.
    """

    def __init__(
        self,
        spec: str,
        coder: BlockCoder,
        exact_first: int,
        exact_last: int,
        before_rope: bool,
        predictor_keys: tuple[tuple[int, str], ...] = (),
    ) -> None:
        self.spec = spec
        self.coder = coder
        self.exact_first = exact_first
        self.exact_last = max(exact_last, coder.exact_last)
        self.before_rope = before_rope
        self.predictor_keys = predictor_keys
        self._tables_crc = _crc(coder.tables)

    @property
    def site(self) -> LayerStream:
        """The stream and layer it is for."""
        return self.coder.site

    @property
    def granularity(self) -> int:
        """Tokens that are reconstructed together; 1 where each is coded alone."""
        return self.coder.granularity

    @property
    def lossless(self) -> bool:
        """Whether every value comes back bit for bit."""
        return self.coder.lossless

    @property
    def tables(self) -> Tables:
        """What was learnt from samples."""
        return self.coder.tables

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables that the decoder needs."""
        return self.coder.table_bytes

    def encode(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> bytes:
        """The whole stream of a sequence; AssayError for NaN or infinity, UsageError for a wrong
        shape.
        """
        writer = self.open()
        writer.append(x, predictors)
        return writer.finish()

    def decode(
        self,
        stream: bytes,
        *,
        predictors: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """All tokens of a stream, float32 unless `dtype` says otherwise; AssayError where it is
        damaged.
        """
        parts = from_bytes(stream)
        self._check_own(parts)
        site, device = self.site, None if predictors is None else predictors.device
        found, token = [torch.zeros(site.heads, 0, site.head_dim, device=device)], 0
        # Blocks of one length that follow one another are decoded in one go.
        for (exact, tokens), run in groupby(
            parts.blocks, lambda block: (block.exact, block.tokens)
        ):
            payloads = [block.payload for block in run]
            end = token + tokens * len(payloads)
            near = None if predictors is None else predictors[:, token:end]
            found.append(self._decoded(payloads, tokens, exact, near).to(device))
            token = end
        return torch.cat(found, dim=1).to(dtype or torch.float32)

    def open(self, stream: bytes | None = None) -> StreamWriter:
        """A writer for tokens that come later, at the end of `stream` where one is given."""
        if stream is None:
            return StreamWriter(self, [])
        parts = from_bytes(stream)
        self._check_own(parts)
        return StreamWriter(self, list(parts.blocks))

    def reconstruct(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> torch.Tensor:
        """What coded tokens become, exact ends aside: decode(encode(x)) without the bytes,
        float32.
        """
        heads, tokens, width = x.shape
        size = self.coder.granularity
        whole = tokens - tokens % size
        parts = []
        for lo, hi in ((0, whole), (whole, tokens)):
            if lo == hi:
                continue
            length = min(size, hi - lo) if size > 1 else hi - lo
            blocks = _blocks(x[:, lo:hi], length)
            near = None if predictors is None else _blocks(predictors[:, lo:hi], length)
            parts.append(_joined(self.coder.reconstruct(blocks, near)))
        return torch.cat(parts, dim=1) if parts else x.float().reshape(heads, 0, width)

    def _decoded(
        self, payloads: list[bytes], tokens: int, exact: bool, predictors: torch.Tensor | None
    ) -> torch.Tensor:
        if exact:
            shape = (self.site.heads, tokens, self.site.head_dim)
            return torch.cat([exact_from_bytes(payload, shape) for payload in payloads], dim=1)
        near = None if predictors is None else _blocks(predictors, tokens)
        return _joined(self.coder.dequantise(self.coder.unpack(payloads, tokens), near))

    def _check_own(self, parts: Stream) -> None:
        site = self.site
        if (parts.heads, parts.head_dim) != (site.heads, site.head_dim):
            raise AssayError(
                f"the KV stream has {parts.heads} heads of {parts.head_dim} values, "
                f"the codec is for {site.heads} of {site.head_dim}",
                finding_id="kv.stream_other_shape",
            )
        if parts.spec != self.spec:
            raise AssayError(
                f"the KV stream was coded by {parts.spec}, not by {self.spec}",
                finding_id="kv.stream_other_codec",
                remedy="decode it with the codec that its header names",
            )
        if parts.tables != self._tables_crc:
            raise AssayError(
                f"the KV stream was coded with other calibration tables of {self.spec}",
                finding_id="kv.stream_other_tables",
                remedy="decode it with the calibration it was encoded with",
            )


class StreamWriter:
    """Takes tokens as they come and codes each block as soon as it is full; `finish` gives the
    stream.
    """

    def __init__(self, fitted: FittedCodec, blocks: list[Block]) -> None:
        self._fitted = fitted
        self._blocks = blocks
        self._seen = sum(block.tokens for block in blocks)
        self._sinks: torch.Tensor | None = None
        self._pending: torch.Tensor | None = None
        self._predictors: torch.Tensor | None = None

    def append(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> None:
        """Add tokens [heads, tokens, head_dim]."""
        fitted = self._fitted
        self._check(x, predictors)
        first = max(0, min(fitted.exact_first - self._seen, x.shape[1]))
        self._seen += x.shape[1]
        if first:
            self._sinks = (
                x[:, :first]
                if self._sinks is None
                else torch.cat([self._sinks, x[:, :first]], dim=1)
            )
        if self._sinks is not None and self._seen >= fitted.exact_first:
            self._keep(self._sinks)
            self._sinks = None
        rest = x[:, first:]
        self._pending = rest if self._pending is None else torch.cat([self._pending, rest], dim=1)
        if predictors is not None:
            near = predictors[:, first:]
            self._predictors = (
                near if self._predictors is None else torch.cat([self._predictors, near], dim=1)
            )
        size = fitted.coder.block_tokens
        self._code((self._pending.shape[1] - fitted.exact_last) // size, size)

    def finish(self) -> bytes:
        """The stream with all tokens; the writer can go on afterwards."""
        fitted, kept = self._fitted, list(self._blocks)
        pending, near = self._pending, self._predictors
        if self._sinks is not None:
            self._keep(self._sinks)
        tokens = 0 if pending is None else pending.shape[1]
        self._code(1, tokens - fitted.exact_last)
        if self._pending is not None and self._pending.shape[1]:
            self._keep(self._pending)
        stream = Stream(
            fitted.spec,
            fitted.site.heads,
            fitted.site.head_dim,
            fitted._tables_crc,
            tuple(self._blocks),
        )
        # The unfinished block goes on where it was, so that nothing is coded twice.
        self._blocks, self._pending, self._predictors = kept, pending, near
        return to_bytes(stream)

    def _code(self, count: int, size: int) -> None:
        """Code the first `count` blocks of `size` pending tokens."""
        if count <= 0 or size <= 0 or self._pending is None:
            return
        coder, end = self._fitted.coder, count * size
        near = None if self._predictors is None else _blocks(self._predictors[:, :end], size)
        blocks = _blocks(self._pending[:, :end], size)
        codes = coder.quantise(blocks, near)
        if not all(bool(part.isfinite().all()) for part in codes if part.is_floating_point()):
            raise self._overflow(float(blocks.abs().max()))
        self._blocks += [Block(size, False, payload) for payload in coder.pack(codes)]
        self._pending = self._pending[:, end:]
        self._predictors = None if self._predictors is None else self._predictors[:, end:]

    def _keep(self, x: torch.Tensor) -> None:
        self._blocks.append(Block(x.shape[1], True, exact_to_bytes(x)))

    def _check(self, x: torch.Tensor, predictors: torch.Tensor | None) -> None:
        site = self._fitted.site
        if x.ndim != 3 or (x.shape[0], x.shape[2]) != (site.heads, site.head_dim):
            raise UsageError(
                f"a KV tensor of shape {list(x.shape)} does not fit [{site.heads}, tokens,"
                f" {site.head_dim}]",
                finding_id="kv.shape",
            )
        if predictors is not None and predictors.shape[1] != x.shape[1]:
            raise UsageError(
                f"side information of {predictors.shape[1]} tokens does not fit {x.shape[1]}",
                finding_id="kv.shape",
            )
        # Both ends are numbers only if all between them are: one pass where nothing is wrong.
        largest = float(torch.stack(torch.aminmax(x)).abs().max()) if x.numel() else 0.0
        if not isfinite(largest):
            bad = ~torch.isfinite(x)
            head, token, channel = (int(i) for i in bad.nonzero()[0])
            raise AssayError(
                f"{int(bad.sum())} of {x.numel()} values of the {site.stream.upper()} stream of"
                f" layer {site.layer} are NaN or infinite, the first at head {head}, token {token},"
                f" channel {channel}",
                finding_id="kv.not_finite",
                remedy="look for what makes them: a codec cannot tell them from damage",
            )
        if largest > _LARGEST and not self._fitted.lossless:
            raise self._overflow(largest)

    def _overflow(self, largest: float) -> AssayError:
        site = self._fitted.site
        return AssayError(
            f"{self._fitted.spec} overflows on the {site.stream.upper()} stream of layer"
            f" {site.layer}, whose values go up to {largest:.3g}",
            finding_id="kv.overflow",
            remedy="look for what makes such values; only the codec identity holds them",
        )


def _blocks(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """[heads, n · tokens, width] → [n, heads, tokens, width]."""
    return x.unflatten(1, (-1, tokens)).transpose(0, 1)


def _joined(blocks: torch.Tensor) -> torch.Tensor:
    """[n, heads, tokens, width] → [heads, n · tokens, width]."""
    return blocks.transpose(0, 1).flatten(1, 2)


def _crc(tables: Tables) -> int:
    value = 0
    for name in sorted(tables):
        value = crc32(tables[name].tobytes(), crc32(name.encode(), value))
    return value


Key = tuple[int, str]
"""(layer, stream), stream `k` or `v`."""

Coders = Mapping[Key, StreamCoder]
"""Coders by layer and stream. One that is not there stays exact."""
