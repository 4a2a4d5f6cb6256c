"""From a SPEC, a model and a calibration to the coders of every layer and stream."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError, UsageError
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.calibration import Calibration
from assay_lab.kv.codecs.samples import Samples, Site
from assay_lab.kv.spec import KvSpec, Recipe
from assay_lab.kv.stream_coder import Coders, FittedCodec, Key
from assay_lab.kv.transforms import Rotary

if TYPE_CHECKING:
    import torch


RecipeOf = Callable[[int, str], "Recipe | None"]
"""The recipe of a layer and stream; None keeps it exact."""


@dataclass(frozen=True)
class CoderSet:
    """Coders by (layer, stream); what is not there stays exact."""

    by_stream: Mapping[Key, FittedCodec]

    @property
    def table_bytes(self) -> int:
        """Bytes of the calibration tables of all decoders."""
        return sum(coder.table_bytes for coder in self.by_stream.values())

    @property
    def lossless(self) -> bool:
        """Whether nothing can differ."""
        return all(coder.lossless for coder in self.by_stream.values())


@dataclass(frozen=True)
class Bench:
    """What coders are fitted on: the model's cache, its rotary embedding, and a calibration where
    there is one.
    """

    shape: CacheShape
    rotary: Rotary | None = None
    calibration: Calibration | None = None
    _fitted: dict[Any, FittedCodec] = field(default_factory=dict, compare=False, repr=False)
    _decoded: dict[Key, tuple[FittedCodec, torch.Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Reconstructed samples of the latest layers, which coders after them predict from."""

    def fit(
        self,
        recipe: Recipe,
        layer: int,
        stream: str,
        coded: Mapping[Key, FittedCodec] | None = None,
    ) -> FittedCodec:
        """One coder, the same one if asked again; `coded` are those of the streams before it.

        AssayError where the recipe needs a calibration and there is none.
        """
        site, coded = self._site(layer, stream), coded or {}
        sides = sides_of(recipe, site, coded, self.shape)
        key = (recipe, layer, stream, tuple((side, id(coded.get(side))) for side in sides))
        if key not in self._fitted:
            fitted = recipe.fit(self._samples(recipe, site, coded, sides))
            check_alone(fitted, coded)
            self._fitted[key] = fitted
        return self._fitted[key]

    def _samples(
        self, recipe: Recipe, site: Site, coded: Mapping[Key, FittedCodec], sides: Sequence[Key]
    ) -> Samples:
        if not self.calibration:
            return Samples(site)
        found = self.calibration.samples(site, before_rope=recipe.before_rope, rotary=self.rotary)
        side = self._side(coded, sides)
        if (
            side is not None
            and found.x is not None
            and self.rotary
            and found.x.shape[1] < side.shape[1]
        ):
            side = side[:, self.calibration.tensors["positions"] < self.rotary.length]
        return replace(found, side=side, sides=tuple(sides))

    def _side(self, coded: Mapping[Key, FittedCodec], sides: Sequence[Key]) -> torch.Tensor | None:
        """What the decoder has of the samples of some streams, their heads one after the other,
        keys before RoPE.
        """
        import torch

        parts = [self._reconstructed(key, coded) for key in sides]
        return torch.cat(parts) if parts else None

    def _reconstructed(self, key: Key, coded: Mapping[Key, FittedCodec]) -> torch.Tensor:
        if self.calibration is None:
            raise ValueError("there are no samples to reconstruct")
        samples = self.calibration.samples(self._site(*key), before_rope=True, rotary=None)
        x, coder = samples.need_x("prediction"), coded.get(key)
        if coder is None or coder.lossless:
            return x
        known = self._decoded.get(key)
        if known is None or known[0] is not coder:
            back = coder.reconstruct(x, self._side(coded, coder.sides))
            if samples.positions is not None:
                back = back.where((samples.positions >= coder.exact_first)[:, None], x)
            # In bf16: what is learnt from them does not hang on their last digits.
            self._decoded[key] = (coder, back.bfloat16())
            for old in [k for k in self._decoded if k[0] < key[0] - 1]:
                del self._decoded[old]
        return self._decoded[key][1].float()

    def _site(self, layer: int, stream: str) -> Site:
        return Site(stream, layer, self.shape.layers, self.shape.kv_heads, self.shape.head_dim)

    def fit_all(
        self, recipe_of: RecipeOf, layers: Iterable[int] | None = None, streams: str = "kv"
    ) -> CoderSet:
        """Coders of the given layers (all by default) and streams, in an order in which each may
        predict from those before.
        """
        found: dict[Key, FittedCodec] = {}
        for layer in sorted(range(self.shape.layers) if layers is None else layers):
            for stream in sorted(streams):
                recipe = recipe_of(layer, stream)
                if recipe is not None:
                    found[layer, stream] = self.fit(recipe, layer, stream, found)
        return CoderSet(found)


def kept_layers(shape: CacheShape, skip: Sequence[int]) -> list[int]:
    """The layers that are coded; UsageError for one that does not exist, and where none is left."""
    require_layers(shape, skip)
    kept = [layer for layer in range(shape.layers) if layer not in skip]
    if not kept:
        raise UsageError(
            f"--skip-layers leaves none of the {shape.layers} layers to code",
            remedy="leave out at least one",
            finding_id="kv.usage",
        )
    return kept


def require_layers(shape: CacheShape, layers: Sequence[int]) -> None:
    """UsageError for a layer that the model has not."""
    wrong = [layer for layer in layers if not 0 <= layer < shape.layers]
    if wrong:
        raise UsageError(
            f"layer {wrong[0]} does not exist: the model has layers 0 to {shape.layers - 1}",
            remedy="give layers of the model to --skip-layers",
            finding_id="kv.usage",
        )


# Coders of many layers and streams fitted by several processes: transforms and code tables take
# seconds each.
#
# Bench and coders go between processes as plain bytes. As tensors they would take shared memory and
# a file handle each, and those of a GPU would make every worker open it.

_Item = tuple[KvSpec, int, str]


@dataclass(frozen=True)
class Fitters:
    """Fits coders on a bench, in this process or in a pool of others."""

    bench: Bench
    pool: Any = None

    def fit(self, spec: KvSpec, layers: Iterable[int], streams: str = "kv") -> CoderSet:
        """As `Bench.fit_all`; an error of a worker is raised here."""
        if self.pool is None:
            return self.bench.fit_all(lambda _, stream: spec.of(stream), layers, streams)
        return self.start(spec, layers, streams)()

    def start(
        self, spec: KvSpec, layers: Iterable[int], streams: str = "kv"
    ) -> Callable[[], CoderSet]:
        """Begin in other processes what `fit` does; the result is there when the returned function
        returns.

        Coders that need one another are fitted by one process, others by all that are free.
        """
        if self.pool is None:
            return lambda: self.fit(spec, layers, streams)
        if predicts(spec, self.bench.shape):
            whole = self.pool.apply_async(_fit_all, ((spec, tuple(layers), streams),))
            return lambda: CoderSet(_opened(whole.get()))
        work = [(spec, layer, stream) for layer in layers for stream in streams if spec.of(stream)]
        parts = self.pool.map_async(_fit_one, work, chunksize=1)
        return lambda: CoderSet(
            {item[1:]: _opened(coder) for item, coder in zip(work, parts.get(), strict=True)}
        )


def predicts(spec: KvSpec, shape: CacheShape) -> bool:
    """Whether a SPEC's coders need one another, so that they can only be fitted one after the
    other.
    """
    last = shape.layers - 1
    return any(
        recipe.sides(Site(stream, last, shape.layers, shape.kv_heads, shape.head_dim))
        for stream in ("k", "v")
        if (recipe := spec.of(stream))
    )


@contextmanager
def fitters(bench: Bench, jobs: int) -> Iterator[Fitters]:
    """`jobs` processes that each have the bench, with one thread; 1 is this process.

    They are started afresh: a copy of a process whose torch already has threads may hang.
    """
    if jobs <= 1:
        yield Fitters(bench)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _begin, (_on_cpu(bench),)) as pool:
        yield Fitters(bench, pool)


@dataclass(frozen=True)
class _Refused:
    """An error of a worker in parts: exceptions with named arguments do not survive the way between
    processes.
    """

    message: str
    finding_id: str
    remedy: str
    evidence: Mapping[str, Any]

    def error(self) -> AssayError:
        return AssayError(
            self.message, finding_id=self.finding_id, remedy=self.remedy, evidence=self.evidence
        )


_BENCH: list[Bench] = []
"""That of a worker."""


def _on_cpu(bench: Bench) -> bytes:
    rotary = bench.rotary.cpu() if bench.rotary else None
    return pickle.dumps(Bench(bench.shape, rotary, bench.calibration))


def _begin(bench: bytes) -> None:
    import torch

    torch.set_num_threads(1)
    _BENCH.append(pickle.loads(bench))


def _opened(found: bytes | _Refused) -> Any:
    if isinstance(found, _Refused):
        raise found.error()
    return pickle.loads(found)


def _fit_one(item: _Item) -> bytes | _Refused:
    spec, layer, stream = item
    recipe = spec.of(stream)
    if recipe is None:
        raise ValueError(f"{spec} leaves {stream} exact")
    try:
        return pickle.dumps(_BENCH[0].fit(recipe, layer, stream))
    except AssayError as error:
        return _refused(error)


def _fit_all(item: tuple[KvSpec, tuple[int, ...], str]) -> bytes | _Refused:
    spec, layers, streams = item
    try:
        found = _BENCH[0].fit_all(lambda _, stream: spec.of(stream), layers, streams)
        return pickle.dumps(dict(found.by_stream))
    except AssayError as error:
        return _refused(error)


def _refused(error: AssayError) -> _Refused:
    return _Refused(error.message, error.finding_id, error.remedy, error.evidence)


# What a coder predicts from: streams that the decoder has before it comes to the coder's own.


def sides_of(
    recipe: Recipe, site: Site, coded: Mapping[Key, FittedCodec], shape: CacheShape
) -> tuple[Key, ...]:
    """The streams that a site's coder predicts from, given the coders before it.

    UsageError where one of them is coded so that the decoder would not have it in time.
    """
    own = shape.windows[site.layer]
    found = []
    for key in recipe.sides(site):
        window = shape.windows[key[0]]
        if window is not None and (own is None or own > window):
            continue
        side = coded.get(key)
        if side is not None and not side.lossless:
            _check(recipe, site, key, side)
        found.append(key)
    return tuple(found)


def last_readers(coders: Coders) -> dict[Key, int]:
    """Every stream that another predicts from, with the last layer that does."""
    found: dict[Key, int] = {}
    for (layer, _), coder in coders.items():
        for side in coder.sides:
            found[side] = max(layer, found.get(side, layer))
    return found


def check_alone(fitted: FittedCodec, coded: Mapping[Key, FittedCodec]) -> None:
    """UsageError where a coder of blocks predicts from coded tokens, which are decoded one by one."""
    if fitted.granularity != 1 and any(
        key in coded and not coded[key].lossless for key in fitted.sides
    ):
        raise UsageError(
            f"{fitted.spec} in layer {fitted.site.layer}, stream {fitted.site.stream}, codes"
            f" {fitted.granularity} tokens together, but predicts from streams that are coded token"
            " by token",
            remedy="leave out what works on blocks, such as mean(of=block)",
            finding_id="kv.side",
        )


def _check(recipe: Recipe, site: Site, key: Key, side: FittedCodec) -> None:
    here = (
        f"{recipe} in layer {site.layer}, stream {site.stream}, predicts from layer {key[0]},"
        f" stream {key[1]}"
    )
    ends = (side.exact_first, side.exact_last), (recipe.exact_first, recipe.exact_last)
    if side.granularity != 1 or ends[0] != ends[1]:
        raise UsageError(
            f"{here}, which must be coded token by token with the same sinks and recent tokens, not"
            f" by {side.spec}",
            remedy=(
                "give both streams the same wrappers, and codecs of single tokens such as pca or"
                " hadamard"
            ),
            finding_id="kv.side",
        )
    if key[1] == "k" and not side.before_rope:
        raise UsageError(
            f"{here}, whose keys are coded after RoPE",
            remedy="put prerope before the codec of the keys",
            finding_id="kv.side",
        )
