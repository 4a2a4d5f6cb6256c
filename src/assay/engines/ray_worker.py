"""A worker of a Ray cluster: an engine in a process of its own, on the node that Ray chose (see
`ray_scorer`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from assay.engines.scoring import (
    ROOM_FACTS,
    Engagement,
    GreedyStep,
    Head,
    HookSpec,
    LogitRows,
    ScoreJob,
    ScoringAbility,
    ScoringEngine,
    StateRows,
    TokenizerFacts,
    Window,
    WindowRows,
)
from assay.engines.specs import open_scorer
from assay.environment import describe
from assay.errors import AssayError
from assay.plugins import packages
from assay.runs import Kept, cache_path, source_digest

Found = TypeVar("Found")


@dataclass(frozen=True)
class Refusal:
    """An error of a worker in parts: exceptions with named arguments do not survive the way between
    processes.
    """

    message: str
    finding_id: str
    remedy: str
    evidence: Mapping[str, Any]

    def error(self, where: str = "") -> AssayError:
        """The error itself; `where` names the node."""
        return AssayError(
            f"{where}{self.message}",
            finding_id=self.finding_id,
            remedy=self.remedy,
            evidence=self.evidence,
        )


@dataclass(frozen=True)
class Opened:
    """An engine as its worker sees it. `setup` is what has to agree between workers, `environment`
    what a report says.
    """

    tokenizer: TokenizerFacts | None
    vocabulary: tuple[str, int, int | None]
    ability: ScoringAbility
    facts: Mapping[str, Any]
    setup: Mapping[str, Any]
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class Done:
    """A batch that was scored: `found` of it, what took part, and what the engine says of itself
    now.
    """

    found: Any
    engagement: Engagement
    facts: Mapping[str, Any]
    tables: str = ""
    """SHA-256 of the calibration file that the hook read there."""


class Worker:
    """One engine at a time in this process; every call names the engine that it is for."""

    def __init__(self, threads: int) -> None:
        # Before torch is imported: what it starts with, and what `choose_threads` answers.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._spec = ""
        self._engine: ScoringEngine | None = None
        self._opened: Opened | None = None
        self._heads: dict[str, Head] = {}

    def hello(self) -> tuple[str, dict[str, Any]]:
        """The node, and what has to agree before an engine is opened."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return f"node {ray.util.get_node_ip_address()} ({node[:8]})", software()

    def open(self, spec: str) -> Opened | Refusal:
        """Open the engine; what it is, as it was before it scored anything."""

        def opened() -> Opened:
            if self._opened and self._engine and self._spec == spec:
                return self._opened
            engine, there = self._on(spec), describe()
            machine = {name: there.get(name) for name in ("threads", "gpu", "platform", "cpu")}
            if machine["gpu"]:  # whose host does not matter
                del machine["cpu"]
            facts = engine.describe()
            steady = {name: value for name, value in facts.items() if name not in ROOM_FACTS}
            setup = {
                **software(),
                **machine,
                "engine": steady,
                "files of the model": model_files(spec),
            }
            tokenizer = engine.tokenizer
            vocabulary = (tokenizer.sha256, tokenizer.vocab_size, tokenizer.bos_id)
            self._opened = Opened(
                _sendable(tokenizer), vocabulary, engine.ability, facts, setup, there
            )
            return self._opened

        return _answer(opened)

    def run(self, spec: str, target: str, *given: Any) -> Any:
        """`target(engine, *given)`, by import path."""
        return _answer(lambda: _function(target)(self._on(spec), *given))

    def score(self, spec: str, windows: Sequence[Window], job: ScoreJob) -> Done | Refusal:
        """Final states of each window."""

        def scored() -> Any:
            rows = list(self._on(spec).score_windows(windows, job))
            return [row.states.detach().cpu().clone() for row in rows if isinstance(row, StateRows)]

        return self._done(spec, job, scored)

    def observe(
        self, spec: str, windows: Sequence[Window], job: ScoreJob, rows: Sequence[Any], target: str
    ) -> Done | Refusal:
        """What `target` (rows of the reference, engine, windows, job) sees of each window."""

        def observed() -> Any:
            references = (self._row(row) for row in rows)
            return list(_function(target)(references, self._on(spec), windows, job))

        return self._done(spec, job, observed)

    def _done(self, spec: str, job: ScoreJob, work: Callable[[], Any]) -> Done | Refusal:
        def done() -> Done:
            found, engine = work(), self._on(spec)
            return Done(found, engine.engagement(), engine.describe(), tables_of(job))

        return _answer(done)

    def _on(self, spec: str) -> ScoringEngine:
        if self._engine is None or self._spec != spec:
            if self._engine:
                self._engine.close()
            self._engine, self._spec, self._opened = None, "", None
            self._heads.clear()
            self._engine, self._spec = open_scorer(spec), spec
        return self._engine

    def _row(self, row: Any) -> WindowRows:
        """Rows of the reference as they were before they were sent; its head comes once."""
        if isinstance(row, LogitRows):
            return row
        window, first, states, reference = row
        name = reference[0].hex()
        if name not in self._heads:
            import ray

            self._heads = {name: ray.get(reference[0])}
        return StateRows(window, first, states, self._heads[name])


def software() -> dict[str, Any]:
    """What has to be the same on all nodes with any engine: packages, and the
    source of assay.
    """
    there = describe()
    known = {name: there[name] for name in ("assay", "python", "packages")}
    # A verb that a plug-in brings is known where the command line runs; it scores nothing itself.
    scoring = [p for p in there["plugins"] if p["group"] != "assay.verbs"]
    return {
        **known,
        "plugins": scoring,
        "source of assay": source_digest(".", *packages("assay.verbs").values()),
    }


def model_files(spec: str) -> dict[str, str]:
    """SHA-256 of the files of the model of `spec` on this machine, by name; each is read once for
    each state it is in.
    """
    name = spec.partition("?")[0].partition(":")[2]
    path = Path(name).expanduser()
    if not path.exists() and find_spec("huggingface_hub"):
        from huggingface_hub import try_to_load_from_cache

        with suppress(ValueError, OSError):
            cached = try_to_load_from_cache(name, "config.json")
            path = Path(cached).parent if isinstance(cached, str) else path
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    kept = Kept(cache_path("model-files"))
    found = {}
    for file in files:
        if file.is_file() and not file.name.startswith("."):
            facts = file.stat()
            key = [str(file.resolve()), facts.st_size, facts.st_mtime_ns]
            found[file.name] = kept.have(key, partial(_sha256, file))
    return found


def head_of(engine: Any) -> Head:
    """The output head of an engine, in the main memory."""
    head: Head = engine.head
    bias = None if head.bias is None else head.bias.cpu()
    return Head(head.weight.cpu(), bias, softcap=head.softcap, scale=head.scale)


def batch_of(engine: Any, windows: Sequence[Window], job: ScoreJob) -> int:
    """How many windows the engine would run together."""
    own = getattr(engine, "batch_size", None)
    return int(own(windows, job)) if own else job.batch or 4


def greedy_of(
    engine: Any, prefixes: Sequence[tuple[int, ...]], count: int
) -> list[list[GreedyStep]]:
    """Greedy continuations by the engine."""
    found: list[list[GreedyStep]] = engine.generate_greedy(prefixes, count)
    return found


def encode_of(engine: Any, text: str) -> list[int]:
    """Token ids, where the tokenizer itself cannot be sent."""
    return list(engine.tokenizer.encode(text))


def decode_of(engine: Any, ids: Sequence[int]) -> str:
    """Text, where the tokenizer itself cannot be sent."""
    return str(engine.tokenizer.decode(ids))


def _answer(work: Callable[[], Found]) -> Found | Refusal:
    try:
        return work()
    except AssayError as error:
        return Refusal(error.message, error.finding_id, error.remedy, error.evidence)


def _function(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _sendable(tokenizer: TokenizerFacts) -> TokenizerFacts | None:
    """The tokenizer where it can be sent, which one of llama.cpp cannot."""
    from ray import cloudpickle

    try:
        cloudpickle.dumps(tokenizer)
    except Exception:  # a library's own objects may raise anything
        return None
    return tokenizer


def tables_of(job: ScoreJob) -> str:
    """SHA-256 of the calibration that the hook of a job reads on this machine; empty where it reads
    none.
    """
    config = job.hook.config if isinstance(job.hook, HookSpec) else {}
    path = config.get("calibration")
    return _sha256(Path(path)) if path else ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
