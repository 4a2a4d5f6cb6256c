"""Routing fidelity of mixture-of-experts models: which tokens go to other experts, and how much of
the KL that makes up.

transformers 5 calls the experts of a layer with the hidden states, the chosen experts [n, k] and
their gate weights [n, k], after any router. A hook reads these two, and in a
second pass puts those of the reference in their place: the KL that is left then has other causes
than routing. The reference's are kept on the disk, so that only one model is in memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from assay.engines.scoring import Engagement, ScoreJob, ScoringEngine, Window, WindowRows
from assay.errors import AssayError, UsageError
from assay.fidelity.metrics.token_statistics import window_statistics
from assay.fidelity.observation import WindowObservation
from assay.fidelity.score import ReferenceRows
from assay.progress import Advance, Progress
from assay.runs import Kept
from assay.stats import ClusterEstimate, cluster_proportion, cluster_ratio, not_negative
from assay.verdict import Finding, Metric, Severity, Table

if TYPE_CHECKING:
    import torch

_CHOSEN = {"top_k_index", "selected_experts", "router_indices"}
"""How the experts modules of transformers name the chosen experts, their second argument."""
_COUNTS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
Routed = Mapping[str, NDArray[Any]]
"""Of one window: `index` [layers, tokens, k], the chosen experts, and `weight` of the same shape,
their gate weights.
"""


def check_engines(specs: Sequence[str], ray: str = "") -> None:
    """UsageError unless all are engines whose routers can be read and replaced: in this process,
    not on a cluster.
    """
    if ray:
        raise UsageError(
            "--routing reads and replaces what the routers of a model in this process choose, which"
            " --ray opens elsewhere",
            remedy="leave one of the two out",
            finding_id="fidelity.usage",
        )
    if other := next((s for s in specs if not s.startswith("hf:")), None):
        kind = other.partition(":")[0]
        raise UsageError(
            f"--routing reads and replaces what a router chooses, which {kind}: does not offer",
            remedy="give the reference and all candidates as hf:MODEL, or leave --routing out",
            finding_id="fidelity.usage",
        )


def expert_layers(model: Any) -> dict[str, Any]:
    """The experts modules of a model of transformers by name; none in a dense one.

    AssayError where the configuration speaks of experts and no module is called in the way that can
    be read.
    """
    found = {}
    for name, module in model.named_modules():
        arguments = list(inspect.signature(type(module).forward).parameters)[1:4]
        if len(arguments) == 3 and arguments[1] in _CHOSEN and hasattr(module, "num_experts"):
            found[name] = module
    config = model.config.get_text_config()
    count = max((getattr(config, key, None) or 0 for key in _COUNTS), default=0)
    if not found and count > 1:
        raise AssayError(
            f"{type(model).__name__} has {count} experts, but routes in a way that cannot be read",
            finding_id="fidelity.missing_capability",
            remedy=(
                "leave --routing out; models whose experts are called with top_k_index can be read"
                " (Mixtral, Qwen3-MoE, …)"
            ),
        )
    return found


class RoutingHook:
    """Reads what the routers choose; with `given` a second pass runs with that in its place, and
    rows come from it.

    `given(number)` is the routing of the window with that number in the order in which windows are
    scored.
    """

    def __init__(
        self, layers: Mapping[str, Any], given: Callable[[int], Routed] | None = None
    ) -> None:
        self.passes = 1 if given is None else 2
        self._layers, self._given = layers, given
        self._seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self._forced: list[Routed] = []
        self._at: list[int] = []
        self._batch = self._first = self._taken = self._fires = 0

    @contextmanager
    def attach(self, model: Any) -> Iterator[None]:
        """Watch the experts modules."""
        handles = [
            module.register_forward_pre_hook(self._watch(number))
            for number, module in enumerate(self._layers.values())
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def new_cache(self, batch: int, index: int) -> None:
        """A pass over the next `batch` windows begins; it runs with the engine's own cache."""
        if index == 0:
            self._first += self._batch
            self._batch, self._taken = batch, 0
            self._seen = [[] for _ in self._layers]
        self._at = [0] * len(self._layers)
        given = range(self._first, self._first + batch) if index and self._given else ()
        self._forced = [self._given(number) for number in given] if self._given else []

    def after_prefix(self, cache: Any) -> None:
        """Nothing is to be done."""

    def discard(self) -> None:
        """Forget a batch that did not fit into memory."""
        self._batch = 0

    def engagement(self) -> Engagement:
        """How often experts were called."""
        return Engagement(fires=self._fires)

    def take(self) -> Routed:
        """What the candidate itself chose in the next window of the batch that has run."""
        import torch

        layers = [
            [torch.cat([part[side][self._taken] for part in parts]).cpu() for parts in self._seen]
            for side in (0, 1)
        ]
        self._taken += 1
        index, weight = (torch.stack(side) for side in layers)
        return {"index": index.numpy().astype(np.uint16), "weight": weight.float().numpy()}

    def _watch(self, layer: int) -> Callable[..., Any]:
        import torch

        def watch(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if len(arguments) < 3 or arguments[1].shape != arguments[2].shape:
                raise AssayError(
                    f"{type(module).__name__} is called in a way from which no routing can be read",
                    finding_id="fidelity.missing_capability",
                    remedy="leave --routing out",
                )
            self._fires += 1
            hidden, index, weight, *rest = arguments
            rows = index.reshape(self._batch, -1, index.shape[-1])
            if not self._forced:
                self._seen[layer].append((rows.clone(), weight.reshape(rows.shape).clone()))
                return None
            lo = self._at[layer]
            hi = self._at[layer] = lo + rows.shape[1]

            def given(key: str, like: torch.Tensor) -> torch.Tensor:
                values = np.stack([routed[key][layer, lo:hi] for routed in self._forced])
                found = torch.from_numpy(values.astype(np.int64 if key == "index" else np.float32))
                return found.reshape(*index.shape[:-1], values.shape[-1]).to(
                    like.device, like.dtype
                )

            return (hidden, given("index", index), given("weight", weight), *rest)

        return watch


def routed_rows(
    engine: ScoringEngine,
    windows: Sequence[Window],
    job: ScoreJob,
    layers: Mapping[str, Any],
    given: Callable[[int], Routed] | None = None,
) -> Iterator[tuple[WindowRows, Routed]]:
    """The rows of every window, by `given` routing where there is one, and what its own routers
    choose.
    """
    hook = RoutingHook(layers, given)
    for row in engine.score_windows(windows, replace(job, hook=hook)):
        yield row, hook.take()


@dataclass(frozen=True)
class Routing:
    """How a reference routes its windows: the experts of each layer by name, and rows on the disk;
    no layers: no experts.
    """

    layers: Mapping[str, int]
    kept: Kept | None = None

    def check(self, engine: ScoringEngine, label: str) -> None:
        """AssayError unless the engine's model has as many experts in as many layers."""
        counts = _experts(engine)[1]
        if list(counts.values()) == list(self.layers.values()):
            return
        own, theirs = (
            f"{len(c)} layers of {max(c.values())} experts" if c else "no experts"
            for c in (counts, self.layers)
        )
        raise AssayError(
            f"{label} has {own}, the reference {theirs}: their routing cannot be compared",
            finding_id="fidelity.routing_mismatch",
            remedy="leave --routing out",
        )

    def rows(self, window: Window) -> Routed:
        """What its routers chose in a window."""
        found = self.kept.get(["routing", window.sha256]) if self.kept else None
        if found is None:
            raise AssayError(
                f"the routing of window {window.index} is gone from the cache",
                finding_id="fidelity.store_damaged",
                remedy="run the same command again",
            )
        return cast("Routed", found)


def read_routing(
    engine: ScoringEngine, windows: Sequence[Window], job: ScoreJob, kept: Kept, progress: Progress
) -> Routing:
    """Run the reference over the windows once more and keep what its routers choose."""
    layers, counts = _experts(engine)
    if layers and not all(["routing", w.sha256] in kept for w in windows):
        with progress("reading the reference's routing", len(windows)) as advance:
            for row, routed in routed_rows(engine, windows, _as_scored(engine, job), layers):
                kept.put(["routing", row.window.sha256], routed)
                advance()
    return Routing(counts, kept)


def _experts(engine: ScoringEngine) -> tuple[dict[str, Any], dict[str, int]]:
    """The experts modules of an `hf:` engine, and how many experts each has."""
    layers = expert_layers(engine.engine.model)  # type: ignore[attr-defined]
    return layers, {name: int(module.num_experts) for name, module in layers.items()}


def _as_scored(engine: ScoringEngine, job: ScoreJob) -> ScoreJob:
    """The job with as many windows together as the engine found room for: rounding depends on
    company.
    """
    return replace(
        job, batch=job.batch or int(engine.describe().get("batch", {}).get("windows", 0))
    )


@dataclass(frozen=True)
class Layer:
    """One layer: the share of tokens whose set of experts changed, and the share of gate weight
    that went elsewhere.
    """

    name: str
    experts: int
    top_k: int
    changed: ClusterEstimate
    moved: ClusterEstimate


@dataclass(frozen=True)
class RoutingResult:
    """Routing of a candidate against the reference's. Intervals are by cluster of windows.

    `changed` and `moved` are over all layers, `anywhere` is the share of tokens that change experts
    in at least one. `share` is the part of the KL that goes when the reference's routing is forced,
    (free − forced) / free; None where there is no KL. Without `layers` there are no experts.
    """

    layers: Sequence[Layer] = ()
    changed: ClusterEstimate | None = None
    anywhere: ClusterEstimate | None = None
    moved: ClusterEstimate | None = None
    kl_free: ClusterEstimate | None = None
    kl_forced: ClusterEstimate | None = None
    share: ClusterEstimate | None = None

    def to_json(self) -> dict[str, Any]:
        """`results.routing`."""
        if not self.layers:
            return {"available": False, "reason": "no experts", "layers": []}
        return {
            "available": True,
            "changed_pct": _bounds(self.changed, 100),
            "changed_anywhere_pct": _bounds(self.anywhere, 100),
            "weight_moved_pct": _bounds(self.moved, 100),
            "kld_free": _bounds(self.kl_free),
            "kld_forced": _bounds(self.kl_forced),
            "share_of_kld_pct": _bounds(self.share, 100),
            "layers": [
                {
                    "layer": one.name,
                    "experts": one.experts,
                    "top_k": one.top_k,
                    "changed_pct": _bounds(one.changed, 100),
                    "weight_moved_pct": _bounds(one.moved, 100),
                }
                for one in self.layers
            ],
        }

    def finding(self, label: str) -> Finding:
        """What there is to say of it."""
        if not self.layers:
            return Finding("fidelity.routing", Severity.INFO, f"{label}: no experts")
        part = f": routing makes up {_text(self.share, 100)} % of it" if self.share else ""
        remedies = ("keep the router, and what its input goes through, in the reference's type",)
        most = max(self.layers, key=lambda one: one.changed.value)
        return Finding(
            "fidelity.routing",
            Severity.INFO,
            f"{label}: with the reference's routing KL is {_text(self.kl_forced)} instead of"
            f" {_text(self.kl_free)}{part}",
            f"In a layer {_text(self.changed, 100)} % of tokens change experts and"
            f" {_text(self.moved, 100)} % of the gate weight moves; most in {most.name}."
            f" {_text(self.anywhere, 100)} % change in some layer.",
            evidence={
                "candidate": label,
                **{k: v for k, v in self.to_json().items() if k != "layers"},
            },
            remedies=remedies if self.share and self.share.value > 0.5 else (),
        )

    def metric(self) -> Metric:
        """The line of the first screen."""
        if not self.layers:
            return Metric("routing", "no experts")
        return Metric(
            "routing",
            f"{_text(self.changed, 100)} % of tokens change experts, {_text(self.moved, 100)} % of"
            " gate weight moves",
        )

    def table(self, prefix: str) -> list[Table]:
        """Layer by layer."""
        rows = [
            (
                one.name,
                f"{one.top_k} of {one.experts}",
                _text(one.changed, 100),
                _text(one.moved, 100),
            )
            for one in self.layers
        ]
        columns = (
            "experts",
            "chosen",
            "tokens that change experts (%)",
            "gate weight that moves (%)",
        )
        return [Table(f"{prefix}Routing", columns, rows, numeric=frozenset({2, 3}))] if rows else []


def measure_routing(
    engine: ScoringEngine,
    routing: Routing,
    reference: ReferenceRows,
    seen: Sequence[WindowObservation],
    windows: Sequence[Window],
    job: ScoreJob,
    blocks: Sequence[int],
    advance: Advance,
) -> RoutingResult:
    """Run a candidate over the windows twice more: with its own routing, which is read, and with
    the reference's.

    `seen` are the observations of the same windows, `blocks` their clusters; `routing.check` has
    passed.
    """
    layers, counts = _experts(engine)
    if not counts:
        return RoutingResult()
    sums: list[tuple[int, NDArray[np.float64]]] = []
    rows = routed_rows(
        engine, windows, _as_scored(engine, job), layers, lambda n: routing.rows(windows[n])
    )
    top_k, first = 0, job.scored_from - 1  # what goes through the model at i predicts token i + 1
    for free, trusted, (forced, after) in zip(seen, reference.rows(windows), rows, strict=True):
        before = routing.rows(forced.window)
        top_k = before["index"].shape[-1]
        moved = np.stack(
            [
                _moved(_cut(before, layer, first), _cut(after, layer, first), count)
                for layer, count in enumerate(counts.values())
            ]
        )
        changed = _changed(before["index"][:, first:], after["index"][:, first:])
        kl = window_statistics(trusted, forced).kl.numpy()
        some = free.finite & np.isfinite(kl)
        whole = [
            changed.shape[1],
            changed.any(0).sum(),
            some.sum(),
            free.kl[some].sum(),
            kl[some].sum(),
        ]
        sums.append((blocks[free.index], np.concatenate([whole, changed.sum(1), moved.sum(1)])))
        advance()
    return _summary(sums, counts, top_k)


def _cut(routed: Routed, layer: int, first: int) -> tuple[NDArray[Any], NDArray[Any]]:
    return routed["index"][layer, first:], routed["weight"][layer, first:]


def _changed(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Of [layers, tokens, k] each: which sets of experts [layers, tokens] differ."""
    if a.shape != b.shape:
        return np.ones(a.shape[:2], bool)
    return cast("NDArray[np.bool_]", (np.sort(a, -1) != np.sort(b, -1)).any(-1))


def _moved(
    a: tuple[NDArray[Any], NDArray[Any]], b: tuple[NDArray[Any], NDArray[Any]], experts: int
) -> NDArray[np.float64]:
    """The total variation of the gate weights of each token: what share of them went to other
    experts.

    Weights that do not sum to 1 (Qwen3-MoE may leave them so) are divided by their sum first.
    """
    spread = []
    for index, weight in (a, b):
        dense = np.zeros((len(index), experts))
        np.put_along_axis(dense, index.astype(np.int64), np.abs(weight), axis=1)
        spread.append(dense / np.maximum(dense.sum(1, keepdims=True), np.finfo(float).tiny))
    return cast("NDArray[np.float64]", np.abs(spread[0] - spread[1]).sum(1) / 2)


def _summary(
    sums: Sequence[tuple[int, NDArray[np.float64]]], counts: Mapping[str, int], top_k: int
) -> RoutingResult:
    clusters: dict[int, NDArray[np.float64]] = {}
    for block, one in sums:
        clusters[block] = clusters.get(block, 0) + one
    tokens, anywhere, scored, free, forced, *each = np.stack([*clusters.values()]).T
    changed, moved = each[: len(counts)], each[len(counts) :]
    pairs = len(counts) * tokens
    return RoutingResult(
        layers=[
            Layer(
                name,
                count,
                top_k,
                cluster_proportion(c, tokens),
                not_negative(cluster_ratio(m, tokens)),
            )
            for (name, count), c, m in zip(counts.items(), changed, moved, strict=True)
        ],
        # Layers of a token are no new evidence: the windows' clusters tell the error, as
        # everywhere.
        changed=cluster_proportion(np.sum(changed, axis=0), pairs),
        anywhere=cluster_proportion(anywhere, tokens),
        moved=not_negative(cluster_ratio(np.sum(moved, axis=0), pairs)),
        kl_free=not_negative(cluster_ratio(free, scored)),
        kl_forced=not_negative(cluster_ratio(forced, scored)),
        share=cluster_ratio(free - forced, np.maximum(free, 0)) if (free > 0).any() else None,
    )


def _bounds(found: ClusterEstimate | None, scale: float = 1) -> dict[str, float | None] | None:
    if found is None:
        return None
    values = (found.value, found.interval.lo, found.interval.hi)
    return dict(
        zip(
            ("value", "lo", "hi"),
            (scale * v if np.isfinite(v) else None for v in values),
            strict=True,
        )
    )


def _text(found: ClusterEstimate | None, scale: float = 1) -> str:
    if found is None:
        return "–"
    value, lo, hi = (scale * v for v in (found.value, found.interval.lo, found.interval.hi))
    form = ".1f" if scale != 1 else ".3g"
    return f"{value:{form}} [{lo:{form}}, {hi:{form}}]"
