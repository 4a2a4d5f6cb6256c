"""A codec on a plain model of transformers, for the time of a context."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

from transformers import DynamicCache

from assay.errors import AssayError, UsageError
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.calibration import Calibration, read_calibration
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.layer_coders import CoderSet, LayerCoders
from assay_lab.kv.resident import compressed
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.spec import KvSpec, parse_spec

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
                    recipe.fit(Samples(LayerStream(stream, 0, 1, 1, 64)))
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
