"""Coders of many layers and streams fitted by several processes.

Transforms and code tables take seconds each. `LayerCoders` and coders go between processes as plain
bytes: as tensors they would take shared memory and a file handle each, and those of a GPU would
make every worker open it.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.codecs.samples import LayerStream
from assay_lab.kv.layer_coders import CoderSet, LayerCoders
from assay_lab.kv.spec import KvSpec

if TYPE_CHECKING:
    pass

_Item = tuple[KvSpec, int, str]


@dataclass(frozen=True)
class Fitters:
    """Fits coders on a layer_coders, in this process or in a pool of others."""

    layer_coders: LayerCoders
    pool: Any = None

    def fit(self, spec: KvSpec, layers: Iterable[int], streams: str = "kv") -> CoderSet:
        """As `LayerCoders.fit_all`; an error of a worker is raised here."""
        if self.pool is None:
            return self.layer_coders.fit_all(lambda _, stream: spec.of(stream), layers, streams)
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
        if predicts(spec, self.layer_coders.shape):
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
        recipe.predictor_keys(
            LayerStream(stream, last, shape.layers, shape.kv_heads, shape.head_dim)
        )
        for stream in ("k", "v")
        if (recipe := spec.of(stream))
    )


@contextmanager
def fitters(layer_coders: LayerCoders, jobs: int) -> Iterator[Fitters]:
    """`jobs` processes that each have the layer_coders, with one thread; 1 is this process.

    They are started afresh: a copy of a process whose torch already has threads may hang.
    """
    if jobs <= 1:
        yield Fitters(layer_coders)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _begin, (_on_cpu(layer_coders),)) as pool:
        yield Fitters(layer_coders, pool)


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


_OF_THIS_WORKER: list[LayerCoders] = []
"""That of a worker."""


def _on_cpu(layer_coders: LayerCoders) -> bytes:
    rotary = layer_coders.rotary.cpu() if layer_coders.rotary else None
    return pickle.dumps(LayerCoders(layer_coders.shape, rotary, layer_coders.calibration))


def _begin(layer_coders: bytes) -> None:
    import torch

    torch.set_num_threads(1)
    _OF_THIS_WORKER.append(pickle.loads(layer_coders))


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
        return pickle.dumps(_OF_THIS_WORKER[0].fit(recipe, layer, stream))
    except AssayError as error:
        return _refused(error)


def _fit_all(item: tuple[KvSpec, tuple[int, ...], str]) -> bytes | _Refused:
    spec, layers, streams = item
    try:
        found = _OF_THIS_WORKER[0].fit_all(lambda _, stream: spec.of(stream), layers, streams)
        return pickle.dumps(dict(found.by_stream))
    except AssayError as error:
        return _refused(error)


def _refused(error: AssayError) -> _Refused:
    return _Refused(error.message, error.finding_id, error.remedy, error.evidence)
