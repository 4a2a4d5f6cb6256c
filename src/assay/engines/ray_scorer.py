"""Engines on a Ray cluster: `--ray [ADDRESS]` opens every engine in workers, and batches of windows
are their work.

The driver cuts the text, plans the batches, keeps the results and judges them, as it does without
Ray: a worker gets the batch that its engine would have formed anyway, with as many threads, and the
results come back in the order of the windows. So every number is the same bit for bit, and a run
that was interrupted under Ray goes on without it, and the other way round.

A worker that is lost (killed, out of memory, its node gone) is replaced where the cluster has room,
and its batches are scored again. Workers whose set-up differs (versions, source, device, number
format, threads, files of the model) are refused by name, so that no result is merged from two
set-ups. No clock of a node is ever read.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from assay.engines.ray_worker import (
    Opened,
    Refusal,
    Worker,
    head_of,
    model_files,
    software,
    tables_of,
)
from assay.engines.scoring import (
    Engagement,
    GreedyStep,
    Head,
    HookSpec,
    LogitRows,
    ScoreJob,
    StateRows,
    TokenizerFacts,
    Window,
    WindowRows,
    check_windows,
)
from assay.engines.specs import opened_by
from assay.engines.threads import choose_threads
from assay.environment import measured_on
from assay.errors import AssayError, UsageError
from assay.progress import NO_PROGRESS, Progress
from assay.signals import handlers_kept
from assay.verdict import Finding, Report, Severity

_WORKER = "assay.engines.ray_worker"
LOCAL = "local"
"""The address that stands for a cluster of this machine's own, which ends with the run."""
TRIES = 3
"""How often a batch is given to a worker before its loss is an error, and how often in a row
workers may die as they open.
"""
AHEAD = 2
"""Batches that a worker has before it: the next one arrives while it scores."""
HELLO_S = 60.0
"""Seconds in which the first worker has to answer, and after which the run goes on with those that
have answered.
"""


# The driver's side: the workers of a run, and who does what.


@dataclass(frozen=True)
class Needs:
    """What a worker takes of a node."""

    threads: int
    cpus: int
    gpus: int

    def fits(self, resources: Mapping[str, float]) -> int:
        """How many such workers a node holds."""
        by_cpu = int(resources.get("CPU", 0) // self.cpus)
        return min(by_cpu, int(resources.get("GPU", 0) // self.gpus)) if self.gpus else by_cpu


_UNKNOWN = "a node that has not answered"


@dataclass
class Actor:
    """A worker and where it is."""

    handle: Any
    node: str = _UNKNOWN
    load: int = 0
    opened: set[str] = field(default_factory=set)


class Pool:
    """The workers of one run. Use as a context manager: none of them is left at its end, however it
    comes.
    """

    KIND: type[Worker] = Worker
    AT_ONCE = AHEAD
    AGAIN = "its passages are scored again", "what they had not finished was scored by others"
    """What is done where a worker is lost, and was done."""
    LEANER = ", or fewer threads (--threads 1, or ?threads=1 behind the engine)"
    TOO_MUCH = "passages", "give a smaller --batch or --length; "

    def __init__(self, address: str, workers: int, progress: Progress = NO_PROGRESS) -> None:
        self.address = address
        self.wanted = workers
        self._progress = progress
        self._ray: Any = None
        self._own = False
        self._needs: Needs | None = None
        self._actors: list[Actor] = []
        self._starting: dict[Any, Actor] = {}
        self._lost: list[str] = []
        self._deaths = 0
        self._count = 0
        self._setups: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._sent: tuple[Head, list[Any]] | None = None
        self._lock = RLock()

    def __enter__(self) -> Pool:
        if find_spec("ray") is None:
            raise AssayError(
                "--ray needs Ray, which is not installed",
                finding_id="fidelity.missing_package",
                remedy="pip install 'llm-assay[ray]'",
            )
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
            os.environ.setdefault(name, "0")
        import ray

        self._ray, self._own = ray, not ray.is_initialized()
        if self._own:
            try:
                self._connect()
            except BaseException:  # Ctrl-C while Ray starts
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        for actor in (*self._actors, *self._starting.values()):
            with suppress(Exception):
                self._ray.kill(actor.handle)
        if self._own:
            self._ray.shutdown()
        measured_on({})

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        local = {
            "address": "local",
            "num_cpus": len(os.sched_getaffinity(0)),
            "include_dashboard": False,
        }
        where = self.address
        if where not in (LOCAL, "auto"):
            host, _, port = where.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            except (OSError, UnicodeError) as error:  # the second: a name that can be no host's
                raise self._unreachable(getattr(error, "strerror", None) or str(error)) from error
        try:
            with self._said(f"joining Ray at {where}"), handlers_kept():
                self._ray.init(**(local if where == LOCAL else {"address": where}), **quiet)
        except (
            ConnectionError,
            RuntimeError,
            ValueError,
            OSError,
            self._ray.exceptions.RayError,
        ) as error:
            raise self._unreachable(
                (str(error).strip() or type(error).__name__).splitlines()[0]
            ) from error

    def _unreachable(self, why: str) -> AssayError:
        return AssayError(
            f"no Ray cluster can be joined at {self.address}: {why}",
            finding_id="fidelity.ray",
            remedy=(
                "start one with `ray start --head`, and run this on one of its nodes, with its"
                " versions of Python and Ray; a cluster that asks for a token needs"
                " RAY_AUTH_MODE=token here"
            ),
        )

    # Who is there.

    def scorer(self, spec: str) -> RayScorer:
        """The engine that `spec` names, in every worker."""
        self._staff(self._needs_of(spec))
        return RayScorer(self, spec)

    @property
    def size(self) -> int:
        """Workers that are there."""
        return max(1, len(self._actors))

    def _needs_of(self, spec: str) -> Needs:
        options = dict(parse_qsl(spec.partition("?")[2]))
        given = options.get("threads", "")
        threads = int(given) if given.isdecimal() and int(given) else choose_threads()
        gpus = 0
        on_gpu = not spec.startswith("gguf:") and options.get("device", "auto") != "cpu"
        if on_gpu and self._ray.cluster_resources().get("GPU", 0):
            parallel = (
                options.get(name, "1")
                for name in ("tensor_parallel", "pipeline_parallel", "data_parallel")
            )
            gpus = 1
            for size in parallel:
                gpus *= int(size) if size.isdecimal() else 1
        return Needs(threads, 1 if gpus else threads, gpus)

    def _staff(self, needs: Needs) -> None:
        """Have workers with these needs; at least one has answered when it returns."""
        if needs == self._needs and self._actors:
            return
        for actor in (*self._actors, *self._starting.values()):
            self._ray.kill(actor.handle)
        self._actors, self._starting, self._needs = [], {}, needs
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        room = sum(needs.fits(node["Resources"]) for node in nodes)
        self._count = self.wanted or room
        what = _counted(needs.gpus, "GPU") if needs.gpus else _counted(needs.threads, "thread")
        if self._count > room or not room:
            raise UsageError(
                f"the cluster has room for {_counted(room, 'worker')} with {what} each, not for"
                f" {max(1, self._count)}",
                remedy="give --workers fewer, more nodes" + ("" if needs.gpus else self.LEANER),
                finding_id="fidelity.ray",
            )
        with self._said(
            f"starting {_counted(self._count, 'worker')} with {what} each on"
            f" {_counted(len(nodes), 'node')}"
        ):
            for _ in range(self._count):
                self._hire()
            until = time.monotonic() + HELLO_S
            while self._starting and time.monotonic() < until:
                self._welcome(min(1.0, max(0.0, until - time.monotonic())))
        if not self._actors:
            raise self._nobody()

    def _hire(self) -> None:
        needs = self._needs
        assert needs is not None
        kind = self._ray.remote(self.KIND).options(
            num_cpus=needs.cpus, num_gpus=needs.gpus, max_restarts=0
        )
        actor = Actor(kind.remote(needs.threads))
        self._starting[actor.handle.hello.remote()] = actor

    def _welcome(self, seconds: float) -> None:
        """Take in the workers that have answered within so many seconds."""
        if not self._starting:
            return
        ready, _ = self._ray.wait(
            list(self._starting), num_returns=len(self._starting), timeout=seconds
        )
        for answer in ready:
            actor = self._starting.pop(answer)
            try:
                actor.node, theirs = self._ray.get(answer)
            except self._ray.exceptions.RayError as error:
                self._bury(actor, error)
                continue
            self._agree("", "this machine", software())
            self._agree("", actor.node, theirs)
            self._actors.append(actor)

    def _bury(self, actor: Actor, error: BaseException) -> None:
        """Note the loss of a worker, and ask for another."""
        if actor in self._actors:
            self._actors.remove(actor)
        self._deaths += 1
        why = _reason(error)
        if (named := re.search(r"\bnode_id: (\w{8})", str(error))) and actor.node == _UNKNOWN:
            actor.node = f"node {named[1]}"
        self._lost.append(f"{actor.node}: {why}")
        with (
            self._said(f"lost a worker on {actor.node} ({why}); {self.AGAIN[0]}"),
            suppress(Exception),
        ):
            self._ray.kill(actor.handle)
        if self._deaths >= TRIES * max(1, self._count):
            raise self._nobody()
        self._hire()

    def _nobody(self) -> AssayError:
        why = "none has answered"
        if self._lost:
            why = f"{len(self._lost)} were lost, the last on {self._lost[-1]}"
        return AssayError(
            f"the workers on the cluster at {self.address} cannot be kept: {why}",
            finding_id="fidelity.ray",
            remedy=(
                "what was measured is kept: look at that node (memory, disk, its log), then run the"
                " same command again"
            ),
            evidence={"lost": list(self._lost)},
        )

    def _agree(self, spec: str, where: str, setup: Mapping[str, Any]) -> None:
        """AssayError unless a set-up is that of all before it."""
        first, known = self._setups.setdefault(spec, (where, setup))
        differing = [name for name in known if known[name] != setup.get(name)]
        if differing:
            raise AssayError(
                f"{where} has another set-up than {first}:"
                f" {_difference(known, setup, differing[0])}; results of the two are not merged",
                finding_id="fidelity.other_setup",
                remedy=(
                    "give all nodes the same versions and files, or take the node out of the"
                    " cluster"
                ),
                evidence={"differs": differing},
            )

    def _said(self, line: str) -> Any:
        return self._progress(line, 0)

    # Who does what.

    def each(self, spec: str) -> Opened:
        """Open the engine in all workers that have not; what it is. AssayError where set-ups
        differ, or one cannot open it.
        """
        found: Opened | None = None
        with self._said(f"opening {self._name(spec)} in {_counted(self.size, 'worker')}"):
            while True:
                todo = [actor for actor in self._actors if spec not in actor.opened]
                asked = [(actor, actor.handle.open.remote(spec)) for actor in todo]
                for actor, answer in asked:
                    try:
                        opened = self._ray.get(answer)
                    except self._ray.exceptions.RayTaskError as error:
                        raise _cause(error) from None
                    except self._ray.exceptions.RayError as error:
                        self._bury(actor, error)
                        continue
                    found = self._admit(actor, spec, opened)
                self._welcome(0.0 if self._actors else HELLO_S)
                if not self._actors:
                    raise self._nobody()
                if all(spec in actor.opened for actor in self._actors):
                    break
        if found is None:
            found = self._admit(self._actors[0], spec, self.any(spec, "open"))
        return found

    def _name(self, spec: str) -> str:
        return spec.partition("?")[0].rpartition("/")[2]

    def _admit(self, actor: Actor, spec: str, opened: Opened | Refusal) -> Opened:
        if isinstance(opened, Refusal):
            raise opened.error(f"{actor.node}: ")
        here = model_files(spec)
        if here and not any(known == spec for known in self._setups):
            self._agree(f"{spec} files", "this machine", {"files of the model": here})
        if here:
            self._agree(f"{spec} files", actor.node, opened.setup)
        self._agree(spec, actor.node, opened.setup)
        actor.opened.add(spec)
        measured_on(
            {name: opened.environment[name] for name in ("platform", "cpu", "cpu_count", "gpu")}
        )
        return opened

    def any(self, spec: str, method: str, *given: Any) -> Any:
        """What one worker answers; another one is asked where it is lost."""
        return next(self.map(spec, [lambda: (method, given)]))

    def all(self, spec: str, target: str, *given: Any) -> list[Any]:
        """What every worker's engine answers to `target`."""
        asked = [(a, a.handle.run.remote(spec, target, *given)) for a in self._actors]
        found = []
        for actor, answer in asked:
            try:
                found.append(self._checked(actor, self._ray.get(answer)))
            except self._ray.exceptions.RayTaskError as error:
                raise _cause(error) from None
            except self._ray.exceptions.RayError as error:
                self._bury(actor, error)
        return found or [self.any(spec, "run", target, *given)]

    def map(
        self, spec: str, units: Sequence[Callable[[], tuple[str, tuple[Any, ...]]]]
    ) -> Iterator[Any]:
        """The answers to all units, in their order; a unit is called for its method and arguments
        when its turn comes.

        At most `AHEAD` units a worker are under way, and no more than twice as many wait for one
        before them.
        """
        todo: deque[int] = deque(range(len(units)))
        asked: dict[int, tuple[str, tuple[Any, ...]]] = {}
        tries = [0] * len(units)
        under_way: dict[Any, tuple[int, Actor]] = {}
        done: dict[int, Any] = {}
        next_out = 0
        try:
            while next_out < len(units):
                while (
                    todo
                    and todo[0] < next_out + 2 * AHEAD * self.size
                    and (actor := self._free(spec))
                ):
                    unit = todo.popleft()
                    try:
                        if unit not in asked:
                            asked[unit] = units[unit]()
                        method, given = asked[unit]
                        under_way[getattr(actor.handle, method).remote(spec, *given)] = unit, actor
                    except (
                        BaseException
                    ):  # the reference cannot be read: the worker has nothing to do
                        actor.load -= 1
                        raise
                if not under_way:
                    self._recruit(spec)
                    continue
                ready, _ = self._ray.wait(list(under_way), timeout=1.0)
                for answer in ready:
                    unit, actor = under_way.pop(answer)
                    actor.load -= 1
                    try:
                        done[unit] = self._checked(actor, self._ray.get(answer))
                        self._deaths = 0
                    except self._ray.exceptions.RayTaskError as error:
                        raise _cause(error) from None
                    except self._ray.exceptions.RayError as error:
                        tries[unit] += 1
                        todo.appendleft(unit)
                        todo = deque(sorted(todo))
                        if tries[unit] >= TRIES:
                            raise self._hopeless(actor, error) from None
                        with self._lock:
                            if actor in self._actors:
                                self._bury(actor, error)
                self._recruit(spec, wait=False)
                while next_out in done:
                    asked.pop(next_out, None)
                    yield done.pop(next_out)
                    next_out += 1
        finally:
            for _, actor in under_way.values():
                actor.load -= 1

    def _free(self, spec: str) -> Actor | None:
        """A worker that may be given one batch more."""
        with self._lock:
            ready = [
                actor
                for actor in self._actors
                if spec in actor.opened and actor.load < self.AT_ONCE
            ]
            actor = min(ready, key=lambda a: a.load, default=None)
            if actor:
                actor.load += 1
            return actor

    def _recruit(self, spec: str, wait: bool = True) -> None:
        """Take in workers that have come, and open the engine in them; wait for one where there is
        none.
        """
        with self._lock:
            before = len(self._actors)
            busy = any(spec in actor.opened for actor in self._actors)
            if wait and not busy:
                until = time.monotonic() + HELLO_S
                while not self._actors and self._starting and time.monotonic() < until:
                    self._welcome(1.0)
                if not self._actors:
                    raise self._nobody()
            else:
                self._welcome(0.0)
                if wait:
                    time.sleep(0.01)
            if len(self._actors) > before or not busy:
                self.each(spec)

    def _checked(self, actor: Actor, found: Any) -> Any:
        if isinstance(found, Refusal):
            raise found.error(f"{actor.node}: " if self.size > 1 else "")
        return found

    def _hopeless(self, actor: Actor, error: BaseException) -> AssayError:
        return AssayError(
            f"{actor.node}: the worker was lost, as were those that tried the same"
            f" {self.TOO_MUCH[0]} before ({TRIES} in all): {_reason(error)}",
            finding_id="fidelity.ray",
            remedy=(
                f"{self.TOO_MUCH[1]}what was measured is kept, the same command goes on from there"
            ),
            evidence={"lost": list(self._lost)},
        )

    def sent(self, head: Head) -> list[Any]:
        """A reference to an output head, which goes to every node once. In a list, so that Ray
        hands it over unread.
        """
        with self._lock:
            if not self._sent or self._sent[0] is not head:
                self._sent = (head, [self._ray.put(head_of(_Holder(head)))])
            return self._sent[1]

    def facts(self) -> dict[str, Any]:
        """What a report says of the cluster."""
        return {"ray": self._ray.__version__, "workers": self._count, "lost": len(self._lost)}

    def findings(self) -> list[Finding]:
        """What was lost on the way."""
        if not self._lost:
            return []
        lost = "a worker was" if len(self._lost) == 1 else f"{len(self._lost)} workers were"
        return [
            Finding(
                "fidelity.worker_lost",
                Severity.INFO,
                f"{lost} lost, and {self.AGAIN[1]}; the last: {self._lost[-1]}",
                evidence={"lost": list(self._lost)},
            )
        ]


def _reason(error: BaseException) -> str:
    """Why a worker is gone, in a few words."""
    text = " ".join(str(error).split())
    for words, said in (
        ("OutOfMemory", "its node ran out of memory"),
        ("node died", "its node is gone"),
        ("node failure", "its node is gone"),
        ("node was terminated", "its node is gone"),
        ("ModuleNotFoundError", "assay or Ray is not installed there"),
        ("exit_type: SYSTEM_ERROR", "its process died"),
        ("process", "its process died"),
    ):
        if words.lower() in f"{type(error).__name__} {text}".lower():
            return said
    return f"{type(error).__name__}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _from_root(spec: str) -> str:
    """`spec` with the whole path of a model on this machine: a worker may be in another folder."""
    kind, colon, rest = spec.partition(":")
    name, mark, options = rest.partition("?")
    path = Path(name).expanduser()
    return f"{kind}{colon}{path.resolve()}{mark}{options}" if path.exists() else spec


def _cause(error: Any) -> BaseException:
    """What was raised in a worker."""
    cause = error.cause
    return cause if isinstance(cause, Exception) else error


def _difference(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> str:
    """`packages: torch 2.13.0 in place of 2.12.1`."""
    a, b = one[name], other.get(name)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        key = next(k for k in {**a, **b} if a.get(k) != b.get(k))
        a, b, name = a.get(key), b.get(key), f"{name}: {key}"
    short = (str(x)[:12] if re.fullmatch(r"[0-9a-f]{64}", str(x)) else str(x) for x in (b, a))
    return f"{name} {' in place of '.join(short)}"


class RayScorer:
    """An engine that scores windows in all workers of a pool, batch by batch."""

    def __init__(self, pool: Pool, spec: str) -> None:
        self._pool, self.spec = pool, _from_root(spec)
        about = pool.each(self.spec)
        self.ability = about.ability
        self._facts = dict(about.facts)
        self._engagement = Engagement()
        self._sizes: dict[Any, int] = {}
        sha256, vocab_size, bos_id = about.vocabulary
        self.tokenizer = about.tokenizer or TokenizerFacts(
            sha256,
            vocab_size,
            bos_id,
            lambda text: self.ask(f"{_WORKER}:encode_of", text),
            lambda ids: self.ask(f"{_WORKER}:decode_of", list(ids)),
        )
        if find_spec("torch"):  # what the driver adds up itself, it adds up as a worker does
            import torch

            torch.set_num_threads(int(about.environment.get("threads") or torch.get_num_threads()))

    @property
    def workers(self) -> int:
        """Engines that score at once."""
        return self._pool.size

    @cached_property
    def head(self) -> Head:
        """The output head."""
        return self.ask(f"{_WORKER}:head_of")  # type: ignore[no-any-return]

    def ask(self, target: str, *given: Any) -> Any:
        """What `target(engine, *given)` gives in a worker."""
        return self._pool.any(self.spec, "run", target, *given)

    def describe(self) -> dict[str, Any]:
        """As the engine describes itself."""
        return dict(self._facts)

    def engagement(self) -> Engagement:
        """What took part in all batches of the last call together."""
        return self._engagement

    def score_windows(self, windows: Sequence[Window], job: ScoreJob) -> Iterator[WindowRows]:
        """The rows of every window, in order. AssayError for an engine without final states: its
        rows are too large to send.
        """
        if not self.ability.states:
            raise AssayError(
                f"{self.spec.partition('?')[0]} gives whole rows of logits, which are too large to"
                " send from node to node",
                finding_id="fidelity.no_states",
                remedy="name it as the candidate, or run without --ray",
            )
        head = self.head
        for part, done in self._batches(windows, job, "score"):
            for window, states in zip(part, done, strict=True):
                yield StateRows(window, job.scored_from, states, head)

    def observe_windows(
        self, rows: Iterator[WindowRows], windows: Sequence[Window], job: ScoreJob, target: str
    ) -> Iterator[Any]:
        """What `target(rows of the reference, engine, windows, job)` sees of each window, in order,
        seen in the workers.
        """

        def message(row: WindowRows) -> Any:
            if isinstance(row, LogitRows):
                return replace(row, values=row.values.detach().cpu().clone())
            return (
                row.window,
                row.first,
                row.states.detach().cpu().clone(),
                self._pool.sent(row.head),
            )

        def more(part: Sequence[Window]) -> tuple[Any, ...]:
            return [message(row) for _, row in zip(part, rows, strict=False)], target

        for _, done in self._batches(windows, job, "observe", more):
            yield from done

    def generate_greedy(
        self, prefixes: Sequence[tuple[int, ...]], count: int
    ) -> list[list[GreedyStep]]:
        """`count` greedy tokens after each prefix, all in one batch on one worker."""
        found: list[list[GreedyStep]] = self.ask(f"{_WORKER}:greedy_of", list(prefixes), count)
        return found

    def close(self) -> None:
        """Nothing: the next engine takes its place in the workers, and all of them end with the
        run.
        """

    def _batches(
        self,
        windows: Sequence[Window],
        job: ScoreJob,
        method: str,
        more: Callable[[Sequence[Window]], tuple[Any, ...]] = lambda part: (),
    ) -> Iterator[tuple[Sequence[Window], Any]]:
        """The windows in the batches that one engine would form, and what came of each."""
        check_windows(windows, job)
        self._engagement = Engagement()
        config = job.hook.config if isinstance(job.hook, HookSpec) else {}
        apart = job.hook is None or ("first" in config and self.spec.startswith("hf:"))
        size = self._together(windows, job)
        job = replace(job, batch=size)
        # What a hook does to one batch may depend on those before it: then one worker has them all.
        step = size if apart else len(windows)
        parts = [windows[lo : lo + step] for lo in range(0, len(windows), step)]

        def unit(number: int) -> Callable[[], tuple[str, tuple[Any, ...]]]:
            own = job
            if "first" in config and isinstance(job.hook, HookSpec):
                own = replace(
                    job, hook=replace(job.hook, config={**config, "first": number * step})
                )
            return lambda: (method, (parts[number], own, *more(parts[number])))

        tables = tables_of(job)
        for part, done in zip(
            parts, self._pool.map(self.spec, [unit(i) for i in range(len(parts))]), strict=True
        ):
            if done.tables != tables:
                raise AssayError(
                    f"a node has another file at {config['calibration']} than this machine",
                    finding_id="fidelity.other_setup",
                    remedy="copy the same calibration file to all nodes",
                )
            self._facts = dict(done.facts)
            self._engagement = _joined(self._engagement, done.engagement)
            yield part, done.found

    def _together(self, windows: Sequence[Window], job: ScoreJob) -> int:
        """How many windows run together: of engines that choose, the least that any worker
        chooses.
        """
        if job.batch:
            return job.batch
        key = (len(windows[0].tokens), job.path, job.scored_from, job.chunk, job.hook is None)
        if key not in self._sizes:
            found = self._pool.all(self.spec, f"{_WORKER}:batch_of", windows[:1], job)
            self._sizes[key] = max(1, min(found))
        return self._sizes[key]


@dataclass(frozen=True)
class _Holder:
    head: Head


def _joined(one: Engagement, other: Engagement) -> Engagement:
    """What took part in two runs of windows, one behind the other."""

    def total(a: int | None, b: int | None) -> int | None:
        return b if a is None else a if b is None else a + b

    layers = dict(one.per_layer)
    for layer, fires in other.per_layer.items():
        layers[layer] = layers.get(layer, 0) + fires
    notes = {**one.notes, **other.notes}
    for name in one.notes.keys() & other.notes.keys():
        before, after = one.notes[name], other.notes[name]
        if isinstance(before, Mapping) and "streams" in before:
            keys = {**before["streams"], **after["streams"]}
            streams = {
                k: [*before["streams"].get(k, ()), *after["streams"].get(k, ())] for k in keys
            }
            notes[name] = {**after, "streams": streams}
    return Engagement(
        total(one.fires, other.fires), total(one.bytes_read, other.bytes_read), layers, notes
    )


# A verb on a cluster.

Verb = TypeVar("Verb", bound=Callable[..., Report])


def on_ray(run: Verb) -> Verb:
    """A verb `run(plan, …)` whose engines are opened on the cluster that its plan names, here where
    it names none.
    """

    @wraps(run)
    def wrapped(plan: Any, *args: Any, **named: Any) -> Report:
        if not plan.ray:
            return run(plan, *args, **named)
        progress = next((a for a in (*args, *named.values()) if callable(a)), NO_PROGRESS)
        with Pool(plan.ray, plan.workers, progress) as pool, opened_by(pool.scorer):
            report = run(plan, *args, **named)
            found = {**report.environment, "cluster": pool.facts()}
            return replace(report, environment=found, findings=(*report.findings, *pool.findings()))

    return wrapped  # type: ignore[return-value]
