"""Score a reference and a candidate on the same windows, and keep what was seen of each token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from assay.engines.scoring import (
    Engagement,
    Head,
    ScoreJob,
    ScoringEngine,
    ScoringPath,
    StateRows,
    Window,
    WindowRows,
)
from assay.engines.server.engine import ServerCandidate
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.metrics import RowStatistics, choose_ids, window_bounds, window_statistics
from assay.fidelity.plan import fingerprint
from assay.progress import Advance
from assay.runs import Kept, cache_path, source_digest

if TYPE_CHECKING:
    from assay.engines.server.scoring import TopkLogprobs


# What was measured at every scored token of one window, and its file form.


@dataclass(frozen=True)
class WindowObservation:
    """Statistics of the scored tokens `first` … of one window; every array is [n], in the order of
    the tokens.

    Names as in `RowStatistics`; tokens whose logits were not finite on either side hold NaN and are
    never averaged.
    """

    index: int
    first: int
    tokens: NDArray[np.int32]
    nll_ref: NDArray[np.float64]
    nll_cand: NDArray[np.float64]
    kl: NDArray[np.float64]
    kl_rev: NDArray[np.float64]
    top1: NDArray[np.bool_]
    p_ref: NDArray[np.float64]
    p_cand: NDArray[np.float64]
    conf: NDArray[np.float64]
    tv: NDArray[np.float64]
    beyond: NDArray[np.bool_]

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Which tokens count: those whose logits were finite on both sides."""
        return ~np.isnan(self.nll_cand) & ~np.isnan(self.nll_ref)

    @property
    def dnll(self) -> NDArray[np.float64]:
        """NLL of the candidate minus NLL of the reference, in nats."""
        return self.nll_cand - self.nll_ref


@dataclass(frozen=True)
class BoundedObservation(WindowObservation):
    """A window of which the candidate is known at a few ids only; names as in `BoundedStatistics`.

    `kl`, `kl_rev` and `tv` are lower bounds, `top1` holds where both certainly have the same
    likeliest token.
    """

    top1_possible: NDArray[np.bool_]
    tail_ref: NDArray[np.float64]
    tail_cand: NDArray[np.float64]
    kl_upper: NDArray[np.float64]
    tv_lo: NDArray[np.float64]
    tv_hi: NDArray[np.float64]


def observation(window: Window, first: int, statistics: RowStatistics) -> WindowObservation:
    """Put the statistics of one window into numpy arrays."""
    arrays = {f.name: getattr(statistics, f.name).numpy() for f in fields(statistics)}
    return _observed(
        arrays, index=window.index, first=first, tokens=np.asarray(window.tokens, np.int32)
    )


def to_arrays(seen: Sequence[WindowObservation]) -> dict[str, NDArray[Any]]:
    """Equally long windows as arrays [windows, …], to be kept; their numbers are not part of it."""
    names = [f.name for f in fields(seen[0]) if f.name != "index"]
    return {name: np.stack([np.asarray(getattr(w, name)) for w in seen]) for name in names}


def from_arrays(
    arrays: Mapping[str, NDArray[Any]], windows: Sequence[Window]
) -> list[WindowObservation]:
    """The observations of these windows, from what `to_arrays` made of them."""
    found = []
    for i, window in enumerate(windows):
        values = {name: array[i] for name, array in arrays.items()}
        found.append(_observed(values, index=window.index, first=int(values.pop("first"))))
    return found


def size_of(seen: Sequence[WindowObservation]) -> int:
    """Bytes of all arrays."""
    return sum(a.nbytes for w in seen for a in vars(w).values() if isinstance(a, np.ndarray))


def on_disk(seen: Sequence[WindowObservation], folder: Path) -> list[WindowObservation]:
    """The same observations of equally long windows, their arrays mapped from files that were in
    `folder`.

    The system drops what is mapped from memory where it needs room. The files have no name any
    more, so that they go with the process.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for name in (f.name for f in fields(seen[0]) if f.name not in ("index", "first")):
        file = folder / f"{name}.npy"
        np.save(file, np.stack([getattr(w, name) for w in seen]))
        arrays[name] = np.asarray(np.load(file, mmap_mode="r"))
        file.unlink()
    return [
        _observed({name: array[i] for name, array in arrays.items()}, index=w.index, first=w.first)
        for i, w in enumerate(seen)
    ]


def _observed(arrays: Mapping[str, Any], **facts: Any) -> WindowObservation:
    """The observation that these arrays make: a bounded one where they hold bounds."""
    kind = BoundedObservation if "tail_ref" in arrays else WindowObservation
    return kind(**facts, **arrays)


def pooled(seen: Sequence[WindowObservation], name: str) -> NDArray[np.float64]:
    """One statistic of all finite tokens of all windows, as one array."""
    return np.concatenate([np.asarray(getattr(w, name), np.float64)[w.finite] for w in seen])


def by_block(
    seen: Sequence[WindowObservation], blocks: Sequence[int] | None
) -> list[WindowObservation]:
    """Windows of one block as one observation, so that it is the unit whose errors count; None:
    every window by itself.

    `blocks[i]` is the block of the window with the index i.
    """
    if blocks is None or len(set(blocks)) == len(blocks):
        return list(seen)
    groups: dict[int, list[WindowObservation]] = {}
    for window in seen:
        groups.setdefault(blocks[window.index], []).append(window)
    return [group[0] if len(group) == 1 else _concatenated(group) for group in groups.values()]


def _concatenated(group: Sequence[WindowObservation]) -> WindowObservation:
    arrays = {
        f.name: np.concatenate([getattr(w, f.name) for w in group])
        for f in fields(group[0])
        if f.name not in ("index", "first")
    }
    return _observed(arrays, index=group[0].index, first=group[0].first)


# From a reference's rows and a candidate to what is seen of every window, by the best way that the
# candidate offers.

Candidate = ScoringEngine | ServerCandidate
_STATISTICS = "assay.fidelity.metrics:batch_statistics"


@runtime_checkable
class _Reduces(Protocol):
    """An engine that computes statistics where it runs, so that no states of its own have to
    travel.
    """

    def reduce_windows(
        self, windows: Sequence[Window], references: Iterator[StateRows], job: ScoreJob, target: str
    ) -> Iterator[tuple[Window, Mapping[str, torch.Tensor]]]: ...


@runtime_checkable
class Spreads(Protocol):
    """An engine in several processes, each of which measures a part of the windows."""

    def observe_windows(
        self, rows: Iterator[WindowRows], windows: Sequence[Window], job: ScoreJob, target: str
    ) -> Iterator[WindowObservation]:
        """What `target(rows, engine, windows, job)` sees of each window where a part of it runs, in
        order.
        """
        ...


def measure(
    rows: Iterator[WindowRows],
    candidate: Candidate,
    windows: Sequence[Window],
    job: ScoreJob,
    left: Callable[[], float] = lambda: inf,
) -> Generator[WindowObservation, None, None]:
    """Observations of `windows`, in order; `rows` are the reference's rows of them.

    A server is bounded by a few ids. An engine that reduces gets the reference's states, where it
    has states; from any other come the rows themselves.
    """
    if isinstance(candidate, ServerCandidate):
        yield from _by_ids(rows, candidate, job, left)
        return
    if isinstance(candidate, Spreads):
        yield from candidate.observe_windows(rows, windows, job, f"{__name__}:measure")
        return
    first = next(rows, None)
    rows = chain([] if first is None else [first], rows)
    if isinstance(candidate, _Reduces) and isinstance(first, StateRows):
        yield from _by_reduction(rows, candidate, windows, job)
        return
    for reference, own in zip(rows, candidate.score_windows(windows, job), strict=True):
        yield observation(reference.window, reference.first, window_statistics(reference, own))


def _by_reduction(
    rows: Iterator[WindowRows], candidate: _Reduces, windows: Sequence[Window], job: ScoreJob
) -> Iterator[WindowObservation]:
    states = (row for row in rows if isinstance(row, StateRows))
    for window, values in candidate.reduce_windows(windows, states, job, _STATISTICS):
        yield observation(window, job.scored_from, RowStatistics(**values))


def _by_ids(
    rows: Iterator[WindowRows], candidate: ServerCandidate, job: ScoreJob, left: Callable[[], float]
) -> Iterator[WindowObservation]:
    """Bounds from log-probabilities of the reference's likeliest ids; `job.batch` requests are
    under way at once, or 8.

    It ends early where no time is `left` (seconds) while an answer is waited for.
    """
    at_once = job.batch or 8
    pool = ThreadPoolExecutor(at_once)
    asked: deque[tuple[WindowRows, Future[TopkLogprobs]]] = deque()

    def oldest() -> WindowObservation:
        row, scores = asked.popleft()
        seconds = left()
        scored = scores.result(None if seconds == inf else max(0.0, seconds))
        return observation(row.window, row.first, window_bounds(row, scored))

    try:
        for row in rows:
            chosen = choose_ids(row, candidate.ids)
            asked.append((row, pool.submit(candidate.score_topk, row.window, chosen, row.first)))
            if len(asked) > at_once:
                yield oldest()
        while asked:
            yield oldest()
    except TimeoutError:
        return
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class ReferenceRows(Protocol):
    """The reference's side of a comparison, scored already or along with the candidate."""

    def rows(self, windows: Sequence[Window]) -> Iterator[WindowRows]:
        """The rows of the given windows, in order."""
        ...


@dataclass(frozen=True)
class LiveRows:
    """Rows that an engine scores as they are asked for, where they are too large to keep."""

    engine: ScoringEngine
    job: ScoreJob

    def rows(self, windows: Sequence[Window]) -> Iterator[WindowRows]:
        """The rows of the given windows, in order."""
        return self.engine.score_windows(windows, self.job)


def batches(windows: Sequence[Window], size: int) -> list[Sequence[Window]]:
    """The windows in the groups that are scored together: a group is kept whole, since rounding
    depends on company.

    Of an engine that chooses its batch itself (size 0) four windows are a group.
    """
    size = size or 4
    return [windows[lo : lo + size] for lo in range(0, len(windows), size)]


def key_of(part: Sequence[Window]) -> list[str]:
    """The key under which a group of windows is kept; its number is that of what is kept of a
    token.
    """
    return ["2", *(window.sha256 for window in part)]


def read_kept(kept: Kept, part: Sequence[Window]) -> list[WindowObservation] | None:
    """What is kept of windows that are scored together; None where they are still to be scored."""
    arrays = kept.get(key_of(part))
    return None if arrays is None else from_arrays(arrays, part)


def observe(
    reference: ReferenceRows,
    candidate: Candidate,
    windows: Sequence[Window],
    job: ScoreJob,
    *,
    kept: Kept | None = None,
    on_window: Callable[[WindowObservation], Any] = lambda seen: None,
    advance: Advance = lambda: None,
    enough: Callable[[], bool] = lambda: False,
    left: Callable[[], float] = lambda: inf,
) -> list[WindowObservation]:
    """Observations of all windows, in order; of the first ones where `enough` ends it between two
    batches, or no time is `left`.

    With `kept`, every batch is kept as it is done, and what is there already is not scored again.
    `on_window` sees each observation as it comes, those that were kept first.
    """
    require(candidate, job, len(windows[0].tokens))
    seen: dict[int, WindowObservation] = {}
    todo = []
    # A server answers for one window at a time.
    for part in batches(windows, 1 if isinstance(candidate, ServerCandidate) else job.batch):
        known = read_kept(kept, part) if kept else None
        if known is None:
            todo.append(part)
        for found in known or ():
            seen[found.index] = found
            on_window(found)
            advance()
        if enough():
            return [seen[w.index] for w in windows if w.index in seen]
    rows = [window for part in todo for window in part]
    if not rows:
        return [seen[w.index] for w in windows]
    # Closed however it ends: an engine says what took part when its rows have come to an end.
    with closing(measure(iter(reference.rows(rows)), candidate, rows, job, left)) as scored:
        for part in todo:
            done = []
            for found in islice(scored, len(part)):
                done.append(found)
                seen[found.index] = found
                if kept and len(done) == len(part):
                    kept.put(key_of(part), to_arrays(done))
                on_window(found)
                advance()
            if enough():
                break
        else:
            for _ in scored:
                pass
    return [seen[w.index] for w in windows if w.index in seen]


def require(candidate: Candidate, job: ScoreJob, length: int) -> None:
    """AssayError where the candidate cannot score windows of `length` tokens as `job` asks."""
    if isinstance(candidate, ServerCandidate):
        candidate.require(job, length)
    else:
        require_path(candidate, job)


def require_path(engine: ScoringEngine, job: ScoreJob) -> None:
    """AssayError where the engine cannot score whole distributions by the path of `job`."""
    ability, name = engine.ability, engine.describe().get("engine", "this engine")
    if not ability.full_vocabulary or job.path not in ability.paths:
        what = f"by the {job.path} path" if ability.full_vocabulary else "whole distributions"
        raise AssayError(
            f"{name} cannot score {what}: {ability.reason or 'it offers no way to'}",
            finding_id="fidelity.missing_capability",
            remedy=(
                f"paths it offers: {', '.join(sorted(ability.paths)) or 'none'}; or use another"
                " engine"
            ),
        )


# Did the thing under test take part in the numbers?
#
# A comparison whose differences are all exactly zero has compared a thing with itself: one-shot
# prefill never reads a KV cache, a hook may never have fired, a flag may have been ignored. Such a
# result is an error unless sameness was what was asked for.


@dataclass(frozen=True)
class Engaged:
    """What is known of the candidate's part. `zero_share` is the share of tokens with exactly no
    difference.
    """

    ok: bool
    fires: int | None
    bytes_read: int | None
    zero_share: float

    def to_json(self) -> dict[str, Any]:
        """As the object `results.engaged`."""
        return {
            "ok": self.ok,
            "fires": self.fires,
            "bytes_read": self.bytes_read,
            "zero_share": self.zero_share,
        }


def zero_share(seen: Sequence[WindowObservation]) -> float:
    """Share of scored tokens whose NLL and KL differ by exactly nothing."""
    total = sum(w.kl.size for w in seen)
    zero = sum(int(((w.kl == 0) & (w.dnll == 0)).sum()) for w in seen)
    return zero / total if total else 0.0


def engaged(
    seen: Sequence[WindowObservation],
    engagement: Engagement,
    *,
    path: ScoringPath,
    hooked: bool,
    same: bool,
    label: str,
) -> Engaged:
    """The facts, or AssayError `fidelity.not_engaged`.

    `same` says that the candidate is the reference itself or an identity; `hooked` that a hook had
    to fire.
    """
    share = zero_share(seen)
    unread = path is not ScoringPath.PREFILL and engagement.bytes_read == 0
    silent = hooked and not engagement.fires
    ok = same or not (share == 1.0 or unread or silent)
    if ok:
        return Engaged(True, engagement.fires, engagement.bytes_read, share)
    if silent:
        why = "its hook never fired"
    elif unread:
        why = f"the {path} path read no cache"
    else:
        why = "every difference is exactly zero"
    raise AssayError(
        f"{label} took no part in the numbers: {why}",
        finding_id="fidelity.not_engaged",
        remedy=(
            "give longer windows (--length): tokens that a codec keeps exact, the first and the"
            " recent, may be all there are"
            if silent
            else (
                "score through the decode path (--path decode), or compare the reference with"
                " itself if that is meant"
            )
        ),
        evidence={
            "zero_share": share,
            "fires": engagement.fires,
            "bytes_read": engagement.bytes_read,
        },
    )


# What an engine makes of windows with nothing added: scored once, kept by content, and found by the
# next command.
#
# The key of a batch is everything that can change its final states: the engine and its files,
# versions, machine and threads, the scoring path, and the windows that run together, as rounding
# depends on the company of a window.


STATES_BYTES = 8 << 30
"""What kept states may take on the disk; those used longest ago go first."""


def kept_states() -> Kept:
    """The folder of kept states, trimmed."""
    kept = Kept(cache_path("states"))
    kept.trim(STATES_BYTES)
    return kept


def engine_key(spec: str) -> dict[str, Any]:
    """What decides the numbers of an engine that is written `spec`: its files, and what runs it
    here.
    """
    machine = {k: v for k, v in describe().items() if k != "cpu_count"}
    return {"engine": fingerprint(spec), "environment": machine, "source": source_digest("engines")}


class KeptRows:
    """The rows of one engine on some windows, by one job; `score` reads what is kept and scores the
    rest.

    `kept` is a folder whose keys hold `engine_key`. The windows of a batch are kept together.
    """

    def __init__(self, kept: Kept, windows: Sequence[Window], job: ScoreJob) -> None:
        self._engine = kept
        self._kept = kept.within([job.path, job.scored_from, job.chunk])
        self._windows = windows
        self._job = job
        self._states: dict[str, torch.Tensor] = {}
        self._head: Head | None = None

    def read(self) -> list[Window]:
        """Read what is kept; the windows that are still to be scored."""
        missing: list[Window] = []
        for part in batches(self._windows, self._job.batch):
            if any(w.sha256 not in self._states for w in part):
                arrays = self._kept.get(key_of(part))
                if arrays is None:
                    missing += part
                else:
                    self._take(part, _tensor(arrays))
        return missing

    def score(self, engine: ScoringEngine, advance: Advance = lambda: None) -> None:
        """Score what is not kept, batch by batch."""
        todo = self.read()
        for _ in range(len(self._windows) - len(todo)):
            advance()
        rows = engine.score_windows(todo, self._job) if todo else iter(())
        for part in batches(todo, self._job.batch):
            states = []
            for found in islice(rows, len(part)):
                if not isinstance(found, StateRows):
                    raise ValueError("an engine that gives no final states has none to keep")
                states.append(found.states.cpu())
                self._head = found.head
                advance()
            whole = torch.stack(states)
            self._kept.put(key_of(part), _arrays(whole))
            self._take(part, whole)
        for _ in rows:  # to its end: an engine books what took part when it is done
            pass
        if self._head is None:
            self._head = engine.head  # type: ignore[attr-defined]

    def keep_head(self) -> None:
        """Keep the output head too, so that the rows can be had when no engine is open."""
        if self._head is None or "head" in self._engine:
            return
        found = {
            "scale": np.array(self._head.scale),
            "softcap": np.array(self._head.softcap or 0.0),
        }
        for name, tensor in (("weight", self._head.weight), ("bias", self._head.bias)):
            if tensor is not None:
                found |= {f"{name} {key}": array for key, array in _arrays(tensor).items()}
        self._engine.put("head", found)

    def read_head(self) -> bool:
        """Read a kept head; False where there is none."""
        found = self._engine.get("head")
        if found is None:
            return False
        weight, bias = (
            (
                _tensor({key: found[f"{name} {key}"] for key in ("values", "dtype")})
                if f"{name} values" in found
                else None
            )
            for name in ("weight", "bias")
        )
        self._head = Head(
            weight, bias, softcap=float(found["softcap"]) or None, scale=float(found["scale"])
        )
        return True

    def rows(self, windows: Sequence[Window]) -> Iterator[StateRows]:
        """The rows of some of the windows, in order; ValueError where they have not been scored."""
        if self._head is None:
            raise ValueError("the windows have not been scored")
        for window in windows:
            yield StateRows(window, self._job.scored_from, self._states[window.sha256], self._head)

    def _take(self, part: Sequence[Window], states: torch.Tensor) -> None:
        self._states |= {window.sha256: own for window, own in zip(part, states, strict=True)}


def _arrays(x: torch.Tensor) -> dict[str, np.ndarray[Any, Any]]:
    """A tensor of any floating type; numpy has no bfloat16, so two bytes go as integers."""
    x = x.detach().cpu().contiguous()
    values = x.view(torch.int16) if x.element_size() == 2 else x
    return {"values": values.numpy(), "dtype": np.array(str(x.dtype).removeprefix("torch."))}


def _tensor(arrays: dict[str, np.ndarray[Any, Any]]) -> torch.Tensor:
    return torch.from_numpy(arrays["values"]).view(getattr(torch, str(arrays["dtype"])))
