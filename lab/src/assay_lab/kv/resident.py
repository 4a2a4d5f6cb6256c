"""The compressed cache of transformers: it holds the streams themselves, so that memory is freed.

Each layer keeps the payloads of full blocks as bytes, the exact sinks, and the tokens that are not
coded yet; reading decodes, one layer at a time. Attention sees what `assay kv eval` measures in its
mode *decode*: the first call (the prompt) attends to exact keys and values; every later token reads
what the codec makes of those before it, and is coded itself when its block is full and it is no
longer recent, or at once where each token is coded alone. A codec that predicts gets what the layer
below, and the keys of its own, decoded in the same call; only that is kept, until the layer is
done.

    cache = resident_cache(model, "prerope+sinks(n=4)+hadamard(bits=4)", length=2048)
    model.generate(**inputs, past_key_values=cache)
    cache.resident_bytes, cache.exact_bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import DynamicCache

from assay.errors import AssayError, UsageError
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.calibration import read_calibration
from assay_lab.kv.handover import Handover, handovers
from assay_lab.kv.layer_coders import CoderSet, LayerCoders
from assay_lab.kv.predictors import last_readers
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.spec import parse_spec

if TYPE_CHECKING:
    import torch

    from assay_lab.kv.stream_coder import FittedCodec


def resident_cache(
    model: Any, codec: str, *, length: int, calibration: str | Path | None = None
) -> Any:
    """A cache for `model`, to be given as `past_key_values`, for sequences of up to `length`
    tokens.

    Has `resident_bytes`, `exact_bytes` (the same tokens in the model's type) and `table_bytes`.
    Batches, beams and sliding layers work; taking tokens back (assisted generation) does not.
    AssayError for a SPEC that needs a calibration and has none, or that of another model.
    """
    shape = cache_shape(model)
    known = read_calibration(Path(calibration)) if calibration else None
    if known:
        known.check_model(shape)
    rotary = Rotary(model, length)
    spec = parse_spec(codec)
    coders = LayerCoders(shape, rotary, known).fit_all(lambda _, stream: spec.of(stream))
    return compressed(_cache_type()(config=model.config), coders, rotary, length)


def compressed(held: Any, coders: CoderSet, rotary: Rotary, length: int) -> Any:
    """An empty `DynamicCache` whose layers hold the streams of `coders` from now on, for up to
    `length` tokens.
    """
    given = handovers(coders.by_stream, rotary)
    last = last_readers(coders.by_stream)
    held.__class__ = _cache_type()
    for index, layer in enumerate(held.layers):
        layer.__class__ = _resident(type(layer))  # type: ignore[arg-type, unused-ignore]
        layer.assay_window = getattr(layer, "sliding_window", None)
        layer.assay_done = tuple(given[key] for key, reader in last.items() if reader == index)
        layer.assay_streams = tuple(
            HeldStream(
                index,
                coder := coders.by_stream.get((index, stream)),
                rotary,
                layer.assay_window,
                length,
                predictors=tuple(
                    given[source] for source in (coder.predictor_keys if coder else ())
                ),
                handover=given.get((index, stream)),
            )
            for stream in "kv"
        )
    held.table_bytes = coders.table_bytes
    return held


class HeldStream:
    """Keys or values of one layer, [B, KV heads, tokens, head_dim], compressed as soon as they may
    be.

    `window`: a sliding layer's; blocks that no later query can see are dropped. `length` bounds
    positions before RoPE. `predictors` are those of the streams that the coder predicts from,
    updated before this one in every step; into `handover` goes what others predict from.
    """

    def __init__(
        self,
        layer: int,
        coder: FittedCodec | None,
        rotary: Rotary,
        window: int | None,
        length: int,
        *,
        predictors: Sequence[Handover] = (),
        handover: Handover | None = None,
    ) -> None:
        self._layer = layer
        self._coder = coder
        self._rotary = rotary if coder and coder.before_rope and not coder.lossless else None
        self._back = None if window is None else window - 1
        self._limit = length
        self._predictors = tuple(predictors)
        self._handover = handover
        self._exact = coder is None or coder.lossless
        self.reads = 0
        """How often tokens attended to what the coder made."""
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.length: int = 0
        self._sinks: torch.Tensor | None = None
        self._blocks: list[list[bytes]] = []
        """Payloads by block and row of the batch."""
        self._blocks_at = self._coder.exact_first if self._coder else 0
        self._tail: torch.Tensor | None = None

    @property
    def resident_bytes(self) -> int:
        """Bytes of payloads and of the storage behind the tensors that are kept."""
        held = sum(len(payload) for block in self._blocks for payload in block)
        kept = (t for t in (self._sinks, self._tail) if t is not None)
        return held + sum(int(t.untyped_storage().nbytes()) for t in kept)

    @property
    def exact_bytes(self) -> int:
        """Bytes of the tokens in the model's type, those that a sliding layer would have dropped
        aside.
        """
        if self._tail is None:
            return 0
        rows, heads, _, width = self._tail.shape
        tokens = self.length if self._back is None else min(self.length, self._back)
        return int(rows * heads * tokens * width * self._tail.element_size())

    def update(self, new: torch.Tensor) -> torch.Tensor:
        """Take new tokens, and return all that they attend to, themselves included."""
        import torch

        start = self.length
        self.length += new.shape[-2]
        turned = self._rotary or (self._handover and self._handover.rotary)
        if turned and self.length > self._limit:
            raise UsageError(
                f"the compressed cache was made for {self._limit} tokens, and now there are"
                f" {self.length}",
                remedy="make it with a larger length",
                finding_id="kv.length",
            )
        self._tail = new.clone() if self._tail is None else torch.cat([self._tail, new], dim=-2)
        if self._handover:
            self._handover.clear()
        whole = new if start == 0 else self._read(start)
        if self._handover and self._exact:
            self._handover.put_exact(whole, self.length - whole.shape[-2])
        self._compress()
        if self._back is None or start == 0:
            return whole
        return whole[..., -(min(start, self._back) + new.shape[-2]) :, :]

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return 0 if self._tail is None else int(self._tail.shape[0])

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be taken several times."""
        if self._tail is None:
            return
        index = rows.to(self._tail.device)
        self._tail = self._tail.index_select(0, index)
        self._sinks = None if self._sinks is None else self._sinks.index_select(0, index)
        self._blocks = [[block[i] for i in index.tolist()] for block in self._blocks]

    def _read(self, start: int) -> torch.Tensor:
        """All tokens that are held, as new ones from position `start` on see them."""
        import torch

        tail = self._held_tail()
        parts = [] if self._sinks is None else [self._sinks]
        coder, first = self._coder, self._first
        if coder is None:
            parts.append(tail)
        else:
            seen_from = 0 if self._back is None else max(0, start - self._back)
            if self._blocks:
                parts.append(
                    self._given(self._decoded(coder, tail.device, seen_from), self._blocks_at)
                )
            at_once = (
                coder.granularity == 1 and coder.exact_last == 0 and start >= coder.exact_first
            )
            ready = (
                (self.length if at_once else start)
                - coder.exact_last
                - max(first, coder.exact_first)
            )
            coded = max(0, ready) // coder.granularity * coder.granularity
            skip = max(0, coder.exact_first - first)
            parts.append(tail[..., :skip, :])
            if coded:
                fresh = tail[..., skip : skip + coded, :]
                parts.append(
                    self._given(
                        self._round_trip(coder, fresh, first + skip, seen_from), first + skip
                    )
                )
            parts.append(tail[..., skip + coded :, :])
        return torch.cat([part.to(tail.dtype) for part in parts], dim=-2)

    def _given(self, states: torch.Tensor, at: int) -> torch.Tensor:
        """Decoded tokens from position `at` on as attention sees them; others may predict from
        them.
        """
        if self._handover and not self._exact:
            self._handover.put(states, at)
        return self._outside(states, at)

    def _near(self, lo: int, hi: int, seen_from: int, device: torch.device) -> torch.Tensor | None:
        """What the coder predicts positions lo … hi − 1 from, [rows, predictor heads, tokens,
        d].
        """
        import torch

        if not self._predictors:
            return None
        return torch.cat(
            [source.take(lo, hi, seen_from).to(device) for source in self._predictors], dim=1
        )

    def _decoded(self, own: FittedCodec, device: torch.device, seen_from: int) -> torch.Tensor:
        """The tokens of all blocks as the codec sees them, in one go."""
        self.reads += 1
        coder = own.coder
        rows, size = len(self._blocks[0]), coder.block_tokens
        parts = coder.unpack([payload for block in self._blocks for payload in block], size)
        near = self._near(
            self._blocks_at, self._blocks_at + len(self._blocks) * size, seen_from, device
        )
        found = coder.dequantise(
            tuple(part.to(device) for part in parts), None if near is None else _blocks(near, size)
        )
        return _tokens(found, rows)

    def _round_trip(
        self, own: FittedCodec, x: torch.Tensor, at: int, seen_from: int
    ) -> torch.Tensor:
        """What tokens from position `at` on become, which are not worth bytes yet, as the codec
        sees them.
        """
        self.reads += 1
        near = self._near(at, at + x.shape[-2], seen_from, x.device)
        back = own.reconstruct(
            _folded(self._inside(x, at)), None if near is None else _folded(near)
        )
        return back.unflatten(1, (x.shape[0], -1)).transpose(0, 1)

    def _compress(self) -> None:
        """Turn what may be coded into payloads, and drop what no later token can see."""
        tail = self._held_tail()
        coder, oldest = self._coder, 0 if self._back is None else max(0, self.length - self._back)
        if coder is None:
            keep = self.length - oldest
            self._tail = tail[..., -keep:, :].clone() if keep < tail.shape[-2] else tail
            return
        tail = self._without_sinks(tail, coder.exact_first)
        first = self.length - tail.shape[-2]
        size = coder.coder.block_tokens
        count = (
            max(0, tail.shape[-2] - coder.exact_last) // size if first >= coder.exact_first else 0
        )
        unseen = min(count, max(0, oldest - first) // size)
        if unseen or not self._blocks:
            self._blocks, self._blocks_at = [], first + unseen * size
        if count > unseen:
            whole = tail[..., unseen * size : count * size, :]
            self._blocks += self._payloads(coder, whole, first + unseen * size, oldest)
        gone = min(len(self._blocks), max(0, oldest - self._blocks_at) // size)
        self._blocks, self._blocks_at = self._blocks[gone:], self._blocks_at + gone * size
        if self._sinks is not None and oldest >= coder.exact_first:
            self._sinks = None
        rest = tail[..., count * size :, :]
        # A view would hold on to all that was there.
        self._tail = rest if rest.untyped_storage().nbytes() == rest.nbytes else rest.clone()

    def _without_sinks(self, tail: torch.Tensor, count: int) -> torch.Tensor:
        """The tail once its first `count` tokens of all, when they are there, have been put
        aside.
        """
        if self._first > 0 or not 0 < count <= self.length:
            return tail
        self._sinks = tail[..., :count, :].clone()
        return tail[..., count:, :]

    @property
    def _first(self) -> int:
        """Position of the first token of the tail."""
        return self.length - int(self._held_tail().shape[-2])

    def _payloads(
        self, own: FittedCodec, x: torch.Tensor, at: int, seen_from: int
    ) -> list[list[bytes]]:
        """Whole blocks of [rows, heads, tokens, d] as bytes by block and row."""
        coder, rows = own.coder, x.shape[0]
        near = self._near(at, at + x.shape[-2], seen_from, x.device)
        predictors = None if near is None else _blocks(near, coder.block_tokens)
        codes = coder.quantise(_blocks(self._inside(x, at), coder.block_tokens), predictors)
        if self._handover and not self._exact:
            self._handover.put(_tokens(coder.dequantise(codes, predictors), rows), at)
        found = coder.pack(codes)
        return [found[i : i + rows] for i in range(0, len(found), rows)]

    def _inside(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """Tokens from position `at` on as the codec sees them."""
        if not self._rotary:
            return x
        return self._rotary.at(self._layer, at, at + x.shape[-2]).remove(x)

    def _outside(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """Tokens from position `at` on as attention sees them."""
        if not self._rotary:
            return x
        return self._rotary.at(self._layer, at, at + x.shape[-2]).apply(x)

    def _held_tail(self) -> torch.Tensor:
        if self._tail is None:
            raise ValueError("nothing has gone into this stream yet")
        return self._tail


def _blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, heads, blocks · size, d] → [blocks · rows, heads, size, d]."""
    return x.unflatten(2, (-1, size)).permute(2, 0, 1, 3, 4).flatten(0, 1)


def _tokens(blocks: torch.Tensor, rows: int) -> torch.Tensor:
    """[blocks · rows, heads, size, d] → [rows, heads, blocks · size, d]."""
    return blocks.unflatten(0, (-1, rows)).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _folded(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, tokens, d] → [heads, rows · tokens, d]."""
    return x.transpose(0, 1).flatten(1, 2)


@cache
def _cache_type() -> type:
    """`DynamicCache` that knows its bytes."""

    class ResidentCache(DynamicCache):  # type: ignore[misc, unused-ignore]
        table_bytes: int

        @property
        def resident_bytes(self) -> int:
            """Bytes that the layers hold."""
            return sum(
                stream.resident_bytes for layer in self.layers for stream in layer.assay_streams
            )

        @property
        def exact_bytes(self) -> int:
            """Bytes that an exact cache of the same tokens would hold."""
            return sum(
                stream.exact_bytes for layer in self.layers for stream in layer.assay_streams
            )

    return ResidentCache


@cache
def _resident(base: type) -> type:
    """A subclass of a cache layer, full or sliding, that holds two `HeldStream`s in place of
    tensors.
    """

    class Resident(base):  # type: ignore[misc]
        assay_streams: tuple[HeldStream, HeldStream]
        assay_done: tuple[Handover, ...]

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            seen = tuple(
                s.update(x)
                for s, x in zip(self.assay_streams, (key_states, value_states), strict=True)
            )
            for handover in self.assay_done:
                handover.clear()
            if hasattr(self, "cumulative_length"):
                self.cumulative_length = self.assay_streams[0].length
            return seen

        def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
            return self.assay_streams[0].length

        def reorder_cache(self, beam_idx: Any) -> None:
            self._select(beam_idx)

        def batch_select_indices(self, indices: Any) -> None:
            self._select(indices)

        def batch_repeat_interleave(self, repeats: int) -> None:
            import torch

            for stream in self.assay_streams:
                stream.select(torch.arange(stream.rows).repeat_interleave(repeats))

        def reset(self) -> None:
            for stream in self.assay_streams:
                stream.clear()
            if hasattr(self, "cumulative_length"):
                self.cumulative_length = 0

        def crop(self, *args: Any, **kwargs: Any) -> None:
            raise AssayError(
                "a compressed cache cannot give tokens back, as assisted generation asks",
                finding_id="kv.unsupported",
                remedy="generate without an assistant",
            )

        def _select(self, indices: Any) -> None:
            for stream in self.assay_streams:
                stream.select(indices)

    Resident.__name__ = f"Resident{base.__name__}"
    return Resident
