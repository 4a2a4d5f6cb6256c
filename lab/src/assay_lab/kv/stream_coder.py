"""A codec at work on one stream of one layer: whole sequences and appended tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from math import isfinite, sqrt
from typing import TYPE_CHECKING
from zlib import crc32

import torch

from assay.errors import AssayError, UsageError
from assay_lab.kv.codecs.base import BlockCoder
from assay_lab.kv.codecs.samples import Site, Tables
from assay_lab.kv.codecs.stream import (
    Block,
    Stream,
    exact_from_bytes,
    exact_to_bytes,
    from_bytes,
    to_bytes,
)
from assay_lab.kv.coder_protocol import StreamCoder

if TYPE_CHECKING:
    from assay_lab.kv.transforms import Rotary


_LARGEST = 1e37
"""Beyond it, float32 may not hold what comes back."""


class FittedCodec:
    """A block coder with exact tokens at both ends, and the stream format around it.

    Tensors are [heads, tokens, head_dim] of one floating type on any device. Blocks begin after the
    first `exact_first` tokens; the last `exact_last` stay exact until newer ones come. `side` [side
    heads, tokens, width] is what a predicting codec has before it decodes these tokens, all of
    them, exact ones included.
    """

    def __init__(
        self,
        spec: str,
        coder: BlockCoder,
        exact_first: int,
        exact_last: int,
        before_rope: bool,
        sides: tuple[tuple[int, str], ...] = (),
    ) -> None:
        self.spec = spec
        self.coder = coder
        self.exact_first = exact_first
        self.exact_last = max(exact_last, coder.exact_last)
        self.before_rope = before_rope
        self.sides = sides
        self._tables_crc = _crc(coder.tables)

    @property
    def site(self) -> Site:
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

    def encode(self, x: torch.Tensor, side: torch.Tensor | None = None) -> bytes:
        """The whole stream of a sequence; AssayError for NaN or infinity, UsageError for a wrong
        shape.
        """
        writer = self.open()
        writer.append(x, side)
        return writer.finish()

    def decode(
        self, stream: bytes, *, side: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """All tokens of a stream, float32 unless `dtype` says otherwise; AssayError where it is
        damaged.
        """
        parts = from_bytes(stream)
        self._check_own(parts)
        site, device = self.site, None if side is None else side.device
        found, token = [torch.zeros(site.heads, 0, site.head_dim, device=device)], 0
        # Blocks of one length that follow one another are decoded in one go.
        for (exact, tokens), run in groupby(
            parts.blocks, lambda block: (block.exact, block.tokens)
        ):
            payloads = [block.payload for block in run]
            end = token + tokens * len(payloads)
            near = None if side is None else side[:, token:end]
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

    def reconstruct(self, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
        """What coded tokens become, exact ends aside: decode(encode(x)) without the bytes, float32."""
        heads, tokens, width = x.shape
        size = self.coder.granularity
        whole = tokens - tokens % size
        parts = []
        for lo, hi in ((0, whole), (whole, tokens)):
            if lo == hi:
                continue
            length = min(size, hi - lo) if size > 1 else hi - lo
            blocks = _blocks(x[:, lo:hi], length)
            near = None if side is None else _blocks(side[:, lo:hi], length)
            parts.append(_joined(self.coder.reconstruct(blocks, near)))
        return torch.cat(parts, dim=1) if parts else x.float().reshape(heads, 0, width)

    def _decoded(
        self, payloads: list[bytes], tokens: int, exact: bool, side: torch.Tensor | None
    ) -> torch.Tensor:
        if exact:
            shape = (self.site.heads, tokens, self.site.head_dim)
            return torch.cat([exact_from_bytes(payload, shape) for payload in payloads], dim=1)
        near = None if side is None else _blocks(side, tokens)
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
        self._side: torch.Tensor | None = None

    def append(self, x: torch.Tensor, side: torch.Tensor | None = None) -> None:
        """Add tokens [heads, tokens, head_dim]."""
        fitted = self._fitted
        self._check(x, side)
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
        if side is not None:
            near = side[:, first:]
            self._side = near if self._side is None else torch.cat([self._side, near], dim=1)
        size = fitted.coder.block_tokens
        self._code((self._pending.shape[1] - fitted.exact_last) // size, size)

    def finish(self) -> bytes:
        """The stream with all tokens; the writer can go on afterwards."""
        fitted, kept = self._fitted, list(self._blocks)
        pending, near = self._pending, self._side
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
        self._blocks, self._pending, self._side = kept, pending, near
        return to_bytes(stream)

    def _code(self, count: int, size: int) -> None:
        """Code the first `count` blocks of `size` pending tokens."""
        if count <= 0 or size <= 0 or self._pending is None:
            return
        coder, end = self._fitted.coder, count * size
        near = None if self._side is None else _blocks(self._side[:, :end], size)
        blocks = _blocks(self._pending[:, :end], size)
        codes = coder.quantise(blocks, near)
        if not all(bool(part.isfinite().all()) for part in codes if part.is_floating_point()):
            raise self._overflow(float(blocks.abs().max()))
        self._blocks += [Block(size, False, payload) for payload in coder.pack(codes)]
        self._pending = self._pending[:, end:]
        self._side = None if self._side is None else self._side[:, end:]

    def _keep(self, x: torch.Tensor) -> None:
        self._blocks.append(Block(x.shape[1], True, exact_to_bytes(x)))

    def _check(self, x: torch.Tensor, side: torch.Tensor | None) -> None:
        site = self._fitted.site
        if x.ndim != 3 or (x.shape[0], x.shape[2]) != (site.heads, site.head_dim):
            raise UsageError(
                f"a KV tensor of shape {list(x.shape)} does not fit [{site.heads}, tokens,"
                f" {site.head_dim}]",
                finding_id="kv.shape",
            )
        if side is not None and side.shape[1] != x.shape[1]:
            raise UsageError(
                f"side information of {side.shape[1]} tokens does not fit {x.shape[1]}",
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


# One stream (K or V) of one layer while a batch of windows goes through the model.


# States that tokens are added to, one at a time or many.


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


Key = tuple[int, str]
"""(layer, stream), stream `k` or `v`."""

Coders = Mapping[Key, StreamCoder]
"""Coders by layer and stream. One that is not there stays exact."""

BF16_BYTES = 2


@dataclass(frozen=True)
class StreamFacts:
    """One window's real stream: its bytes, those of the same tokens in bf16, Σx², Σ(x − x̂)² and
    the stream's SHA-256.

    `apart` is Σ(r − x̂)², r what attention read, over the tokens that are coded on both sides or
    exact on both; of a coder that predicts, how far the sizes of both errors are apart
    (`Track._apart`). The hash is empty where no coder is at work.
    """

    stored: int
    exact: int
    power: float
    error: float
    sha256: str
    apart: float = 0.0


class Track:
    """The exact states of a stream so far, and how far they have been coded.

    `exact` is [B, KV heads, tokens, head_dim] in the model's type, as the cache would hold it.
    """

    def __init__(self, key: Key, coder: StreamCoder | None, rotary: Rotary | None) -> None:
        self.key = key
        self.coder = coder
        self._rotary = rotary
        self._states = Growing()
        self._done = 0
        self._latest: tuple[int, torch.Tensor] | None = None

    @property
    def exact(self) -> torch.Tensor:
        """The exact states so far; ValueError before the first."""
        return self._states.states

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self._states.length

    @property
    def sides(self) -> tuple[Key, ...]:
        """The streams that its coder predicts from."""
        return self.coder.sides if self.coder else ()

    @property
    def done(self) -> int:
        """Positions below are not given out by `next_blocks` again."""
        return self._done

    def append(self, new: torch.Tensor) -> None:
        """New tokens [B, h, n, d]."""
        self._states.append(new)

    def codes_at_once(self, position: int) -> bool:
        """Whether a token at `position` is coded as it comes."""
        coder = self.coder
        return bool(
            coder
            and coder.granularity == 1
            and coder.exact_last == 0
            and position >= coder.exact_first
        )

    def check_together(self, position: int, tokens: int) -> None:
        """UsageError where `tokens` that are fed at once from `position` on would not see what each
        would see alone.
        """
        if tokens == 1 or not self.coder or self.codes_at_once(position):
            return
        if max(self.whole_blocks(position)) != max(self.whole_blocks(position + tokens - 1)):
            raise UsageError(
                f"{tokens} tokens cannot be fed together at {position}: stream {self.key[1]} codes"
                f" tokens behind them in blocks of {self.coder.granularity}, with"
                f" {self.coder.exact_first} exact at the start and {self.coder.exact_last} at"
                " the end",
                remedy="feed one at a time (--block 1), or as many as the codec's blocks hold",
                finding_id="kv.block",
            )

    def whole_blocks(self, end: int) -> tuple[int, int]:
        """Positions of all blocks among the first `end` tokens that are full and not recent."""
        if self.coder is None:
            return 0, 0
        lo = self.coder.exact_first
        ready = end - self.coder.exact_last
        return lo, ready - max(0, ready - lo) % self.coder.granularity

    def next_blocks(self, end: int) -> tuple[int, int]:
        """As `whole_blocks`, but only those that were not given out before."""
        lo, hi = self.whole_blocks(end)
        lo = max(lo, self._done)
        self.mark(hi)
        return lo, hi

    def mark(self, hi: int) -> None:
        """Positions below `hi` are not given out by `next_blocks` again."""
        self._done = max(self._done, hi)

    def code(self, lo: int, hi: int, side: torch.Tensor | None = None) -> torch.Tensor:
        """Positions lo … hi − 1 of all windows as the codec gives them back, [B, h, hi − lo, d].

        `side` [B, side heads, hi − lo, d]: what the decoder has of the streams that the coder
        predicts from.
        """
        x = self.exact[..., lo:hi, :]
        if self.coder is None or self.coder.lossless:
            return x
        result = self._coded(x, lo, side, keep=True)
        self.mark(hi)
        return result

    def _coded(
        self, x: torch.Tensor, lo: int, side: torch.Tensor | None, *, keep: bool = False
    ) -> torch.Tensor:
        """Exact states [B, h, n, d] from position `lo` on as the codec gives them back, in their
        type.
        """
        if self.coder is None or self.coder.lossless:
            return x
        values, rotation = x, None
        if self.key[1] == "k" and self.coder.before_rope and self._rotary:
            rotation = self._rotary.at(self.key[0], lo, lo + x.shape[-2])
            values = rotation.remove(values)
        # Blocks are coded each on its own, so windows can stand one after the other.
        near = None if side is None else _folded(side)
        result = (
            self.coder.reconstruct(_folded(values), near)
            .unflatten(1, (x.shape[0], -1))
            .transpose(0, 1)
        )
        if keep:
            self._latest = (lo, result)
        return (result if rotation is None else rotation.apply(result)).to(x.dtype)

    def decoded(self, lo: int, hi: int) -> torch.Tensor:
        """What the decoder has of positions lo … hi − 1 when others predict from them, keys before
        RoPE, float32.

        Coded ones must be the latest that were coded; ValueError where they are not.
        """
        if self.coder is None or self.coder.lossless:
            return self._before_rope(self.exact[..., lo:hi, :].float(), lo)
        start, states = self._latest or (hi, None)
        if states is None or lo < start or hi > start + states.shape[-2]:
            raise ValueError(f"positions {lo} to {hi} of {self.key} are not coded yet")
        return states[..., lo - start : hi - start, :]

    def forget(self) -> None:
        """Nothing predicts from what was coded last any more."""
        self._latest = None

    def _before_rope(self, x: torch.Tensor, lo: int) -> torch.Tensor:
        if self.key[1] == "v" or not self._rotary:
            return x
        return self._rotary.at(self.key[0], lo, lo + x.shape[-2]).remove(x)

    def facts(
        self,
        window: int,
        start: int,
        side: torch.Tensor | None = None,
        read: torch.Tensor | None = None,
    ) -> tuple[StreamFacts, torch.Tensor]:
        """The real stream of one window's tokens from `start` on, encoded and decoded again, and
        what came back.

        `side` [side heads, tokens, d] is what came back of the streams that the coder predicts
        from; keys before RoPE. `read` [h, tokens, d] is what the cache holds of the window from
        `start` on; None: what `code` makes of it now.
        """
        x = self.exact[window, :, start:, :]
        values = x.float()
        exact = x.numel() * BF16_BYTES
        if self.coder is None:
            found = StreamFacts(exact, exact, float(values.square().sum()), 0.0, "")
            return found, self._before_rope(values, start)
        if self.key[1] == "k" and self.coder.before_rope and self._rotary:
            x = values = self._rotary.at(self.key[0], start, start + x.shape[-2]).remove(values)
        stream = self.coder.encode(x, side)
        back = self.coder.decode(stream, side=side).to(values.device)
        found = StreamFacts(
            len(stream),
            exact,
            float(values.square().sum()),
            float((values - back).square().sum()),
            sha256(stream).hexdigest(),
            self._apart(window, start, back, read, side),
        )
        return found, back if self.coder.before_rope else self._before_rope(back, start)

    def _apart(
        self,
        window: int,
        start: int,
        back: torch.Tensor,
        read: torch.Tensor | None,
        side: torch.Tensor | None,
    ) -> float:
        """Σ(r − x̂)² of the tokens whose stream can be compared with what attention read.

        A coder that predicts falls on other levels wherever a side differs in a last bit, as on a
        GPU with the company of a window, and is as good there: of its coded tokens (‖r − x‖ − ‖x̂ −
        x‖)² counts, which is never more. At the end of a window the stream codes a block that is
        not full, and tokens that have just ceased to be recent, which attention still read as they
        came: these are left out, as are blocks of a sliding layer, which begin elsewhere in its
        stream.
        """
        if (coder := self.coder) is None or (start and coder.granularity > 1):
            return 0.0
        x = self.exact[window, :, start:, :]
        first, tokens = coder.exact_first, x.shape[1]
        done = (self.whole_blocks(self.length)[1] if read is None else self._done) - start
        done = tokens if coder.lossless else done
        if read is None and done > first:
            read = x.clone()
            near = None if side is None else side[None, :, first:done]
            read[:, first:done] = self._coded(x[None, :, first:done], start + first, near)[0]
        elif read is None:
            read = x
        if self.key[1] == "k" and coder.before_rope and self._rotary:
            back = self._rotary.at(self.key[0], start, start + tokens).apply(back)
        # A sliding layer that let go of the first tokens keeps as many others exact in its stream.
        from_ = first if start else 0
        parts = [(from_, done), (max(done, tokens - coder.exact_last), tokens)]
        held, wanted = read.float(), back.to(x.dtype).to(read.dtype).float()
        if coder.sides and from_ < done:
            errors = [
                float((r[:, from_:done] - x[:, from_:done].float()).square().sum())
                for r in (held, wanted)
            ]
            found, parts = (sqrt(errors[0]) - sqrt(errors[1])) ** 2, parts[1:]
        else:
            found = 0.0
        return found + sum(
            float((held[:, lo:hi] - wanted[:, lo:hi]).square().sum()) for lo, hi in parts if lo < hi
        )


def facts_of_window(
    tracks: Mapping[Key, Track],
    window: int,
    starts: Mapping[Key, int],
    read: Mapping[Key, torch.Tensor] | None = None,
) -> Iterator[tuple[Key, StreamFacts]]:
    """The real streams of one window, each stream's tokens from its start on, predicted from what
    came back of others.

    `read` is what the cache holds of the streams' tokens from their starts on, where the caller has
    it.
    """
    import torch

    needed = {side for track in tracks.values() for side in track.sides}
    decoded: dict[Key, torch.Tensor] = {}
    # In this order the sides of a stream come before it.
    for key in sorted(tracks):
        track = tracks[key]
        parts = [decoded[side][:, starts[key] - starts[side] :] for side in track.sides]
        side, held = torch.cat(parts) if parts else None, (read or {}).get(key)
        found, back = track.facts(window, starts[key], side, held)
        yield key, found
        if key in needed:
            decoded[key] = back


def _folded(x: torch.Tensor) -> torch.Tensor:
    """[B, h, n, d] → [h, B · n, d]."""
    return x.transpose(0, 1).flatten(1, 2)
