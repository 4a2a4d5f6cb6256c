"""Coders of many layers and streams fitted by several processes: transforms and code tables take seconds each.

Bench and coders go between processes as plain bytes. As tensors they would take shared memory and a file handle each, and
those of a GPU would make every worker open it.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from assay.errors import AssayError
from assay.kv.codec import Site
from assay.kv.model import CacheShape
from assay.kv.setup import Bench, CoderSet
from assay.kv.spec import KvSpec

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
        if predicts(spec, self.bench.shape):
            return self.start(spec, layers, streams)()
        work = [(spec, layer, stream) for layer in layers for stream in streams if spec.of(stream)]
        found = {}
        for (_, layer, stream), coder in zip(work, self.pool.map(_fit_one, work, chunksize=1), strict=True):
            found[layer, stream] = _opened(coder)
        return CoderSet(found)

    def start(self, spec: KvSpec, layers: Iterable[int], streams: str = "kv") -> Callable[[], CoderSet]:
        """Begin in one other process what `fit` does; the result is there when the returned function returns."""
        if self.pool is None:
            return lambda: self.fit(spec, layers, streams)
        begun = self.pool.apply_async(_fit_all, ((spec, tuple(layers), streams),))

        def result() -> CoderSet:
            return CoderSet(_opened(begun.get()))

        return result


def predicts(spec: KvSpec, shape: CacheShape) -> bool:
    """Whether a SPEC's coders need one another, so that they can only be fitted one after the other."""
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
    """An error of a worker in parts: exceptions with named arguments do not survive the way between processes."""

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
