"""A KV cache of transformers that holds the compressed streams themselves, so that memory is really
freed.

Each layer keeps the payloads of full blocks as bytes, the exact sinks, and the tokens that are not
coded yet; reading decodes, one layer at a time. What attention sees is what `assay kv eval`
measures in its mode *decode*: the first call (the prompt) attends to exact keys and values; every
later token reads what the codec makes of those before it, and is coded itself when its block is
full and it is no longer recent, or at once where each token is coded alone. A codec that predicts
gets what the layer below, and the keys of its own, decoded in the same call; only that is kept,
until the layer is done.

    cache = resident_cache(model, "prerope+sinks(n=4)+hadamard(bits=4)", length=2048)
    model.generate(**inputs, past_key_values=cache)
    cache.resident_bytes, cache.exact_bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from transformers import DynamicCache

from assay.errors import AssayError, UsageError
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.calibration import Calibration, read_calibration
from assay_lab.kv.codecs.samples import Samples, Site
from assay_lab.kv.layer_coders import CoderSet, LayerCoders
from assay_lab.kv.predictors import last_readers
from assay_lab.kv.spec import KvSpec, parse_spec
from assay_lab.kv.stream_coder import Coders, Key
from assay_lab.kv.transforms import Rotary

if TYPE_CHECKING:
    import torch

    from assay_lab.kv.stream_coder import FittedCodec


# What one stream of a compressed cache decoded in the running step, for the streams that predict
# from it.


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
        """Positions lo … hi − 1. Zeros stand for tokens before `seen_from` that are gone;
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
                sides=tuple(given[side] for side in (coder.sides if coder else ())),
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
    positions before RoPE. `sides` are those of the streams that the coder predicts from, updated
    before this one in every step; into `handover` goes what others predict from.
    """

    def __init__(
        self,
        layer: int,
        coder: FittedCodec | None,
        rotary: Rotary,
        window: int | None,
        length: int,
        *,
        sides: Sequence[Handover] = (),
        handover: Handover | None = None,
    ) -> None:
        self._layer = layer
        self._coder = coder
        self._rotary = rotary if coder and coder.before_rope and not coder.lossless else None
        self._back = None if window is None else window - 1
        self._limit = length
        self._sides = tuple(sides)
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
        """What the coder predicts positions lo … hi − 1 from, [rows, side heads, tokens, d]."""
        import torch

        if not self._sides:
            return None
        return torch.cat([side.take(lo, hi, seen_from).to(device) for side in self._sides], dim=1)

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
        """The tail once its first `count` tokens of all, when they are there, have been put aside."""
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
        side = None if near is None else _blocks(near, coder.block_tokens)
        codes = coder.quantise(_blocks(self._inside(x, at), coder.block_tokens), side)
        if self._handover and not self._exact:
            self._handover.put(_tokens(coder.dequantise(codes, side), rows), at)
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
    from transformers import DynamicCache

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


# A codec on a plain model of transformers, for the time of a context.


_NAMES = ("past_key_values", "cache")
"""What a model calls its cache: `cache` from transformers 5.24 on."""
_LONGEST = 32_768
_ATTACHED: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The SPECs at work, by model."""


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of the latest cache when the model last ran, of the same tokens in its own type, and of
    the decoders' tables.
    """

    stored: int
    exact: int
    tables: int

    @property
    def ratio(self) -> float:
        """How many times smaller the cache is, tables aside; NaN before the first token."""
        return self.exact / self.stored if self.stored else float("nan")


@dataclass(frozen=True)
class AttachableCodec:
    """A SPEC with its calibration: what `assay_lab.codec` gives."""

    spec: KvSpec
    calibration: Calibration | None = None

    @classmethod
    def of(cls, spec: str, calibration: str | Path | None = None) -> AttachableCodec:
        """UsageError for a wrong SPEC; AssayError where it needs a calibration and has none, or one
        that cannot be read.
        """
        parsed = parse_spec(spec)
        if calibration is not None:
            return cls(parsed, read_calibration(Path(calibration)))
        try:
            for stream in "kv":
                if recipe := parsed.of(stream):
                    recipe.fit(Samples(Site(stream, 0, 1, 1, 64)))
        except AssayError as error:
            if error.finding_id != "kv.no_calibration":
                raise
            raise AssayError(
                f"{spec} learns from a calibration, and none is given",
                finding_id="kv.no_calibration",
                remedy=(
                    "codec(SPEC, calibration=FILE); this makes one: `assay kv calibrate MODEL"
                    " --text FILE --out FILE`"
                ),
            ) from None
        return cls(parsed)

    def attached(self, model: Any, *, length: int | None = None) -> Attached:
        """The context in which caches of `model` are coded; `length`: the most tokens of a
        sequence.

        Without a length it is what the model was made for, at most 32,768. AssayError for a model
        whose layers are not all full or sliding attention, and for a calibration of another model.
        """
        return Attached(self, model, length)


class Attached:
    """One attachment. `reads`: how often a layer's keys or values were read as the codec made them,
    since it was entered.
    """

    def __init__(self, codec: AttachableCodec, model: Any, length: int | None) -> None:
        self.codec = codec
        self.model = model
        self.reads = 0
        self.bytes = HeldBytes(0, 0, 0)
        if not callable(getattr(model, "get_decoder", None)):
            raise UsageError(
                f"{type(model).__name__} is no language model of transformers",
                remedy="give what AutoModelForCausalLM.from_pretrained gives",
                finding_id="kv.usage",
            )
        shape = cache_shape(model)
        if codec.calibration is not None:
            codec.calibration.check_model(shape)
        config = model.config.get_text_config()
        self.length = length or min(
            _LONGEST, getattr(config, "max_position_embeddings", None) or _LONGEST
        )
        self._rotary = Rotary(model, self.length)
        layer_coders = LayerCoders(shape, self._rotary, codec.calibration)
        self._coders: CoderSet = layer_coders.fit_all(lambda _, stream: codec.spec.of(stream))
        self._seen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._hooks: list[Any] = []
        self._ran = False

    def __enter__(self) -> Self:
        if self.model in _ATTACHED:
            raise UsageError(
                f"{_ATTACHED[self.model]} is attached to this model already",
                remedy="leave its context before another one begins",
                finding_id="kv.usage",
            )
        _ATTACHED[self.model] = str(self.codec.spec)
        self.reads, self._ran = 0, False
        decoder = self.model.get_decoder()
        self._hooks = [
            decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            decoder.register_forward_hook(self._after, with_kwargs=True),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        _ATTACHED.pop(self.model, None)
        if kind is None and self._ran and not self.reads:
            raise AssayError(
                f"{self.codec.spec} took no part: all that the model read was exact",
                finding_id="fidelity.not_engaged",
                remedy=(
                    "generate more tokens than the codec keeps exact, with use_cache; a pass over a"
                    " prompt reads no cache"
                ),
            )

    def _before(self, decoder: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Make the cache that a forward pass begins with a compressed one."""
        name = next((n for n in _NAMES if n in given), _NAMES[0])
        held = given.get(name)
        uses = given.get("use_cache")
        if held is None and (uses or (uses is None and decoder.config.use_cache)):
            held = DynamicCache(config=self.model.config)
        if held is None or held in self._seen:
            return None
        if type(held) is not DynamicCache:
            raise UsageError(
                f"{self.codec.spec} takes the cache that `generate` makes by itself (DynamicCache),"
                f" not {type(held).__name__}",
                remedy="leave out past_key_values and cache_implementation",
                finding_id="kv.unsupported",
            )
        if held.get_seq_length():
            raise UsageError(
                f"a cache of {held.get_seq_length()} tokens was begun without {self.codec.spec}",
                remedy="begin it inside the context",
                finding_id="kv.unsupported",
            )
        if not held.layers:
            held.layers = DynamicCache(config=self.model.config).layers
        compressed(held, self._coders, self._rotary, self.length)
        self._seen[held] = 0
        return args, {**given, name: held}

    def _after(
        self, decoder: Any, args: tuple[Any, ...], given: dict[str, Any], output: Any
    ) -> None:
        """Count what the codec did, and what the cache takes now."""
        self._ran = True
        held = next((given[n] for n in _NAMES if given.get(n) is not None), None)
        if held is None or held not in self._seen:
            return
        reads = sum(stream.reads for layer in held.layers for stream in layer.assay_streams)
        self.reads += reads - self._seen[held]
        self._seen[held] = reads
        self.bytes = HeldBytes(held.resident_bytes, held.exact_bytes, held.table_bytes)
