"""The phases of a decomposition, and the bench that runs their configurations and keeps what they
came to.

So an interrupted decomposition goes on where it stopped. One engine is open at a time. Everything
measured is compared with a stored run without codec, its *anchor*: final states of one engine by
one path, scored once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from assay.engines.scoring import ScoreJob, ScoringEngine, ScoringPath, TokenizerFacts, Window
from assay.engines.specs import open_scorer
from assay.errors import AssayError
from assay.fidelity.budget import Budget, OutOfTime, size_for
from assay.fidelity.engaged import engaged
from assay.fidelity.kept_rows import KeptRows, engine_key, kept_states
from assay.fidelity.metrics.token_statistics import statistics_device, window_statistics
from assay.fidelity.names import fingerprint, label_of
from assay.fidelity.observation import WindowObservation, from_arrays, observation, to_arrays
from assay.fidelity.pace import WORTH_MEASURING, measure_pace
from assay.fidelity.reference import plan_windows, tokenizer_check
from assay.fidelity.score import key_of, require_path
from assay.fidelity.text.sources import read_text
from assay.progress import Progress, span
from assay.runs import Kept
from assay.stats import Interval, Resampling
from assay.verdict import Finding, jsonable
from assay_lab.gap.buckets import Effect, WindowSums, aligned, effect, ratio
from assay_lab.gap.plan import (
    Configuration,
    Corners,
    EngineName,
    GapPlan,
    Step,
    engine_name,
    engine_steps,
    grouped,
    planned_runs,
    with_placement,
)
from assay_lab.kv.cache_bytes import measured_bytes, stream_facts
from assay_lab.kv.calibration import read_calibration
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.measured import Measured, Scoring, kept_measurements, measure_kept
from assay_lab.kv.opening import LEAST_CODED
from assay_lab.kv.sensitivity import NoiseGrowth, noise_growth
from assay_lab.kv.spec import parse_spec
from assay_lab.kv.stream_coder import Key, StreamFacts
from assay_lab.options import GAP_MINUTES

RUN_COST = 1.7
"""How much longer a run takes than an engine alone: about two in three have a codec, which takes as
long again.
"""
IN_MODE = 4
"""Runs of the path in the mode of the total, where it is not the base mode: the reference twice,
the codec twice.
"""
PATH_SHARE = 0.75
"""Share of a budget that the path, its repetition and the floors may take; the rest is for the
phases.
"""
OVERRUN = 0.1
"""Share of a budget by which a run that is under way may exceed it: what is left is for the report.
"""


class Bench:
    """Windows, stored runs and one open engine. Use as a context manager."""

    def __init__(self, plan: GapPlan, progress: Progress) -> None:
        self.plan = plan
        self.progress = progress
        self.budget = Budget.of(plan.budget, plan.quick, GAP_MINUTES)
        self.run_seconds: list[tuple[str, float]] = []
        """Mode and seconds of each configuration, its anchor included."""
        self.planned = 0
        """About how many configurations will be measured, where somebody has counted them."""
        self.facts: dict[str, Mapping[str, Any]] = {}
        self.measured: dict[str, Measured] = {}
        self.windows: dict[str, list[Window]] = {}
        self.text: dict[str, Any] = {}
        self._engine: ScoringEngine | None = None
        self._open: tuple[str, bool] | None = None
        self._check: Callable[[TokenizerFacts, str], None] | None = None
        self._keys: dict[str, dict[str, Any]] = {}
        self._states = kept_states()
        self._kept = kept_measurements()

    def __enter__(self) -> Bench:
        try:
            self._read_text()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine that is open."""
        if self._engine:
            self._engine.close()
        self._engine = self._open = None

    def notices(self) -> list[Finding]:
        """What a report should say of the cache of kept values."""
        return [*self._states.notices("gap"), *self._kept.notices("gap")]

    def _read_text(self) -> None:
        with self.budget.stage("opening the reference"):
            tokenizer = self.engine(self.plan.reference).tokenizer
        self._fit()
        windows, facts = plan_windows(self.plan.comparison(self.plan.base), tokenizer)
        # What is decomposed comes first; what is left of the text is fresh.
        main = min(self.plan.windows, len(windows))
        self.windows = {"main": windows[:main], "fresh": windows[main:]}
        self.text = facts
        for path in filter(None, (self.plan.calibration, self.plan.other_calibration)):
            read_calibration(Path(path)).check_text(facts, windows)
        self._check = tokenizer_check(tokenizer.sha256, tokenizer.vocab_size)

    def _fit(self) -> None:
        """Take as many and as long windows as let the path fit into most of the budget; tell the
        expected time.

        Where not even the fewest fit, the total is measured in the base mode too: token by token
        takes most of the time.
        """
        plan, budget = self.plan, self.budget
        self.planned = sum(planned_runs(plan))
        if budget.seconds is None and plan.windows * plan.length * self.planned < WORTH_MEASURING:
            return
        opening = 3 * budget.took["opening the reference"]
        paces: dict[str, float] = {}

        def measure() -> tuple[int, int, str]:
            text = read_text(plan.text).text
            for mode in dict.fromkeys((plan.base, plan.mode)):
                compared = replace(plan.comparison(mode), windows=plan.windows)
                found = measure_pace(self.engine(plan.reference), compared, text)
                paces[mode] = RUN_COST * found.score + found.compare
            if budget.seconds is None:
                return plan.windows, plan.length, plan.mode
            size, cheaper = (plan.windows, plan.length), replace(plan, mode=plan.base)
            for one, share in ((plan, PATH_SHARE), (cheaper, PATH_SHARE)):
                if some := size_for(
                    share * (budget.left() - opening), path_cost(one), *size, LEAST_CODED
                ):
                    return *some, one.mode
            # All of the time, so that the phases are left out; OutOfTime where not even that is
            # enough.
            return *budget.size(
                path_cost(cheaper), *size, opening=opening, least=LEAST_CODED
            ), cheaper.mode

        def path_cost(plan: GapPlan) -> float:
            in_mode = IN_MODE if plan.mode != plan.base else 0
            return (planned_runs(plan)[0] - in_mode) * paces[plan.base] + in_mode * paces[plan.mode]

        about = ["gap plan", plan.facts(), budget.seconds]
        windows, length, mode = (
            measure() if budget.seconds is None else self._kept.have(about, measure)
        )
        budget.note_size((plan.windows, plan.length), (windows, length))
        if mode != plan.mode:
            budget.leave_out(
                f"the path {plan.mode}: the total is that of {mode}",
                f"what {plan.mode} adds to {mode}",
            )
            plan = replace(plan, mode=mode)
        phases = planned_runs(plan)[1]
        self.planned = sum(planned_runs(plan))
        if paces:  # a run that goes on knows its size and nothing of its speed
            tokens = windows * length
            path = opening + path_cost(plan) * tokens
            rest = min(phases * paces[plan.base] * tokens, max(0.0, budget.left() - path))
            budget.tell({"engine and codec": path, "phases": rest}, self.progress)
        self.plan = replace(plan, windows=windows, length=length, fresh=min(plan.fresh, windows))

    def _told(self) -> str:
        """Which of the planned runs this is, and how long it may be until the last of them."""
        done = len(self.run_seconds)
        if not done or done >= self.planned:
            return ""
        left = sum(seconds for _, seconds in self.run_seconds) / done * (self.planned - done)
        number = f"{done + 1} of about {self.planned}, " if self.budget.seconds is None else ""
        return f" ({number}about {span(min(left, max(0.0, self.budget.left())))} left)"

    def affords(
        self, what: str, unknown: str, runs: int, reserve: tuple[int, int] = (0, 0)
    ) -> bool:
        """Whether the budget allows so many more runs in the base mode, and after them `reserve` in
        it and in that of the total.
        """
        base, total = (self._a_run(mode) for mode in (self.plan.base, self.plan.mode))
        return self.budget.affords(what, unknown, (runs + reserve[0]) * base + reserve[1] * total)

    def _a_run(self, mode: str) -> float:
        """Mean seconds of the runs so far that had a mode; of all where none had."""
        took = [s for own, s in self.run_seconds if own == mode] or [s for _, s in self.run_seconds]
        return sum(took) / len(took) if took else 0.0

    def engine(self, spec: str, again: bool = False) -> ScoringEngine:
        """The engine, opened where it is not; whatever else is open is closed first.

        With `again` it is one that was opened for an independent run; others may use it after that.
        """
        if (
            self._open is None
            or self._open[0] != spec
            or again > self._open[1]
            or self._engine is None
        ):
            self.close()
            with self.progress(f"opening {label_of(spec)}", 1) as advance:
                self._engine = open_scorer(spec)
                advance()
            self._open = (spec, again)
            if self._check:
                self._check(self._engine.tokenizer, label_of(spec))
            self.facts.setdefault(spec, self._engine.describe())
        return self._engine

    def states(self, spec: str) -> bool:
        """Whether an engine gives final states, so that others can be compared with it."""
        return not spec.startswith("gguf:")

    def key(self, spec: str) -> dict[str, Any]:
        """What decides the numbers of an engine, the same all through the run."""
        if spec not in self._keys:
            self._keys[spec] = engine_key(spec)
        return self._keys[spec]

    def job(self, config: Configuration) -> ScoreJob:
        """How a configuration is scored, without its hook."""
        job = self.plan.comparison(config.mode).job
        other = config.again or config.other_batch
        return replace(job, batch=self.plan.other_batch) if other else job

    def anchor(self, config: Configuration, windows: str = "main") -> KeptRows:
        """The final states of an engine without codec, by the path of the configuration's mode."""
        plain = config.plain
        kept = self._states.within(self.key(plain.engine))
        kept = kept.within("again") if plain.again else kept
        job = self.job(plain)
        rows = KeptRows(kept, self._ordered(plain, windows), job)
        facts = kept.get("facts")
        if facts and not rows.read() and rows.read_head():
            self.facts.setdefault(plain.engine, facts)
            return rows
        engine = self.engine(plain.engine, plain.again)
        require_path(engine, job)
        with self.progress(
            f"scoring {label_of(plain.engine)}", len(self.windows[windows])
        ) as advance:
            rows.score(engine, advance)
        rows.keep_head()
        kept.put("facts", self.facts[plain.engine])
        return rows

    def between(self, anchor: Configuration, other: Configuration) -> Measured:
        """One stored run against another: two engines without codec."""
        windows = self.windows["main"]
        kept = self._kept_for(other, anchor).within("between")
        arrays = kept.get(key_of(windows))
        if arrays is None:
            device = statistics_device()
            sides = [self.anchor(config).rows(windows) for config in (anchor, other)]
            seen = [
                observation(a.window, a.first, window_statistics(a, b.to(device)))
                for a, b in zip(*sides, strict=True)
            ]
            kept.put(key_of(windows), to_arrays(seen))
            return Measured(seen)
        return Measured(from_arrays(arrays, windows))

    def measure(
        self, config: Configuration, anchor: Configuration, windows: str = "main"
    ) -> Measured:
        """Score a configuration against the anchor of another (or of itself). In the order of the
        windows.

        AssayError where the codec took no part in the numbers.
        """
        chosen, job = self._ordered(config, windows), self.job(config)

        def prepare(count: int) -> Scoring:
            rows = self.anchor(anchor, windows)
            return rows, self.engine(config.engine, config.again), self._hooked(config)

        def late() -> bool:
            budget = self.budget
            if budget.seconds is not None and budget.left() < -OVERRUN * budget.seconds:
                raise OutOfTime(
                    f"the budget of {span(budget.seconds)} ended while {config.label} was scored",
                    finding_id="fidelity.budget",
                    remedy="run it again: it goes on from there",
                )
            return False

        began, done = time.monotonic(), list[WindowObservation]()
        label = f"{config.label} | against {anchor.plain.label}"
        with self.progress(f"scoring {config.label}{self._told()}", len(chosen)) as advance:
            try:
                kept = self._kept_for(config, anchor)
                found = measure_kept(
                    chosen,
                    job.batch,
                    kept,
                    prepare,
                    on_window=done.append,
                    advance=advance,
                    enough=late,
                )
            except BaseException:
                if (
                    len(done) > 1
                ):  # what there is of a run that is cut short; an interval needs two windows
                    self.measured[f"{label}, first {len(done)} windows"] = Measured(done)
                raise
        self.run_seconds.append((config.mode, time.monotonic() - began))
        self.budget.took["runs"] = sum(seconds for _, seconds in self.run_seconds)
        seen = sorted(found.seen, key=lambda w: w.index)
        if not config.lossless:
            path = ScoringPath(job.path)
            engaged(seen, found.engagement, path=path, hooked=True, same=False, label=config.label)
        size = measured_bytes(found.engagement, self.plan.length - 1) if config.codec else None
        found = replace(found, seen=seen, bytes=size)
        self.measured[label] = found
        return found

    def try_out(self, config: Configuration) -> None:
        """Score one window and forget it; AssayError where the engine does not take the codec."""
        for _ in self.engine(config.engine).score_windows(
            self.windows["main"][:1], self._hooked(config)
        ):
            pass

    def _hooked(self, config: Configuration) -> ScoreJob:
        return config.hooked(self.job(config), self.plan.length, self.plan.seed)

    def _ordered(self, config: Configuration, windows: str) -> list[Window]:
        chosen = self.windows[windows]
        return chosen[::-1] if config.again else chosen

    def _kept_for(self, config: Configuration, anchor: Configuration) -> Kept:
        """What is kept of a configuration against an anchor."""
        tables = fingerprint(config.calibration) if config.calibration else None
        sides = [
            self.key(c.engine) | {"again": c.again, "job": asdict(self.job(c))}
            for c in (config, anchor.plain)
        ]
        return self._kept.within([config.facts(), self.plan.seed, tables, sides])


# The phases of a decomposition: what each measures on one engine, and what is made of it.


# Phase 1: the steps of the bucket `engine`, and what an engine allows to switch alone.


def steps_of(bench: Bench, corners: Corners) -> list[Step]:
    """The steps of the bucket `engine`, by what both engines say of themselves."""
    if corners.same_engine:
        return [Step("engine.none", bench.plan.candidate)]
    dtypes = [
        bench.facts.get(s, {}).get("dtype") for s in (bench.plan.reference, bench.plan.candidate)
    ]
    return engine_steps(bench.plan.reference, bench.plan.candidate, (dtypes[0], dtypes[1]))


def measure_direct(bench: Bench, steps: Sequence[Step], found: dict[str, Measured]) -> None:
    """Each step but the first against the engine before it, in runs of their own; what is there is
    left alone.
    """
    mode = bench.plan.base
    for before, step in pairwise(steps):
        if step.name not in found:
            found[step.name] = bench.measure(
                Configuration(step.engine, mode), Configuration(before.engine, mode)
            )


@dataclass(frozen=True)
class Switch:
    """One option of one engine, everything else as it was."""

    name: str
    base: str
    switched: str


def switches(
    reference: str, candidate: str, steps: Sequence[Step], facts: Mapping[str, Mapping[str, Any]]
) -> list[Switch]:
    """The attention kernels of both engines; for transformers in the number format in which the
    engines meet.
    """
    found: dict[str, Switch] = {}
    meeting = [reference, *(s.engine for s in steps)]
    for spec in (
        *[s for s in meeting if engine_name(s, codec=False).kind == "hf"][-1:],
        candidate,
        reference,
    ):
        engine = engine_name(spec, codec=False)
        option, value = _attention(engine, facts.get(spec, {}))
        if value and f"{engine.kind}.attention" not in found:
            name = f"{engine.kind}.attention"
            found[name] = Switch(name, spec, str(engine.with_option(option, value)))
    return list(found.values())


def _attention(engine: EngineName, facts: Mapping[str, Any]) -> tuple[str, str | None]:
    """The option that names the kernel, and another value for it; None where there is none to
    choose.
    """
    if engine.kind == "hf":
        return "attention", "sdpa" if engine.get("attention") == "eager" else "eager"
    if engine.kind != "vllm" or not str(facts.get("device", "")).startswith("cuda"):
        return "attention_backend", None  # vLLM has one kernel on a CPU, llama.cpp none to choose
    return "attention_backend", "FLASH_ATTN" if "TRITON" in str(
        facts.get("attention_backend")
    ) else "TRITON_ATTN"


def measure_switches(
    bench: Bench, chosen: Sequence[Switch], found: dict[str, Measured], skipped: dict[str, str]
) -> None:
    """Each against the engine as it was; they are no part of the sum. `skipped` says what an engine
    refused.
    """
    for switch in chosen:
        base = Configuration(switch.base, bench.plan.base)
        if not bench.states(switch.base):
            continue
        try:
            found[switch.name] = bench.measure(
                Configuration(switch.switched, bench.plan.base), base
            )
        except AssayError as error:
            skipped[f"switch: {switch.name}"] = error.message


# Phase 2: what the codec is given, and what it leaves out, layer by layer on both engines.


@dataclass(frozen=True)
class StreamResidual:
    """One stream of one layer. Powers are Σx², errors Σ(x − x̂)², both summed over the windows that
    both engines coded.

    `power_ratio` and `error_ratio` are candidate over reference; `relative` the error over the
    power of each engine.
    """

    layer: int
    stream: str
    relative_reference: float
    relative_candidate: float
    power_ratio: Interval | None
    error_ratio: Interval | None
    equal_streams: int
    windows: int

    def to_json(self) -> dict[str, Any]:
        """As an entry of `results.residual.streams`."""
        return {
            "layer": self.layer,
            "stream": self.stream,
            "relative_error": {
                "reference": self.relative_reference,
                "candidate": self.relative_candidate,
            },
            "power_ratio": jsonable(self.power_ratio),
            "error_ratio": jsonable(self.error_ratio),
            "equal_streams": self.equal_streams,
            "windows": self.windows,
        }


def residuals(reference: Measured, candidate: Measured) -> list[StreamResidual]:
    """Streams of both engines, paired by window."""
    sides = [_by_window(m) for m in (reference, candidate)]
    windows = sorted(set(sides[0]) & set(sides[1]))
    if not windows:
        return []
    keys = sorted(k for k in sides[0][windows[0]] if sides[0][windows[0]][k].sha256)
    found = []
    for layer, stream in keys:
        a = [sides[0][w][layer, stream] for w in windows]
        b = [sides[1][w][layer, stream] for w in windows]
        found.append(
            StreamResidual(
                layer,
                stream,
                _relative(a),
                _relative(b),
                ratio([f.power for f in b], [f.power for f in a]),
                ratio([f.error for f in b], [f.error for f in a]),
                sum(x.sha256 == y.sha256 for x, y in zip(a, b, strict=True)),
                len(windows),
            )
        )
    return found


def relative_error(measured: Measured) -> float:
    """√(Σ error / Σ power) over all coded streams: the codec as noise of this size. 0 where nothing
    was looked at.
    """
    facts = [
        f
        for found in stream_facts(measured.engagement).values()
        for f in found
        if f.sha256 and f.power > 0
    ]
    # Noise is as large as each stream's own power allows, so streams count alike.
    return (sum(f.error / f.power for f in facts) / len(facts)) ** 0.5 if facts else 0.0


def _by_window(measured: Measured) -> dict[int, Mapping[Key, StreamFacts]]:
    facts = stream_facts(measured.engagement)
    return {
        window: {key: found[i] for key, found in facts.items() if i < len(found)}
        for i, window in enumerate(measured.windows)
    }


def _relative(facts: list[StreamFacts]) -> float:
    power = sum(f.power for f in facts)
    return (sum(f.error for f in facts) / power) ** 0.5 if power else 0.0


# Phase 3: what an error of known size does, on both engines.
#
# Gaussian noise of σ · rms goes where the codec's error goes. KL grows with the power of a small
# error (`assay_lab.kv.sensitivity`); the codec's own error, put on that curve, tells whether it is
# worse than noise of its size.

_FALLBACK = 0.02
"""σ of a codec without error: something to sweep around."""


@dataclass(frozen=True)
class NoiseCurve:
    """KL of a sweep on one engine, and how it grows: only levels whose KL stands above the floor
    say that.
    """

    sigmas: tuple[float, ...]
    effects: tuple[Effect, ...]
    growth: NoiseGrowth
    sums: Mapping[float, WindowSums]

    @property
    def linear(self) -> tuple[float, float] | None:
        """The σ between which the answer is linear: KL grows as σ²."""
        found = self.growth
        return None if found.lo is None or found.hi is None else (found.lo, found.hi)

    def to_json(self) -> dict[str, Any]:
        """As `results.noise.ENGINE`."""
        slope, level = self.growth.slope, self.growth.coefficient
        return {
            "points": [
                {"sigma": s, **e.to_json()} for s, e in zip(self.sigmas, self.effects, strict=True)
            ],
            "slope": None if slope is None else asdict(slope),
            "linear_range": None if self.linear is None else list(self.linear),
            "kld_per_squared_sigma": None if level is None else asdict(level),
        }


def noise_codec(codec: str, sigma: float, seed: int) -> str:
    """Noise at the place of the codec: before RoPE where the codec is, on the streams that it
    codes.
    """
    spec = parse_spec(codec)
    parts = []
    for stream in "kv":
        recipe = spec.of(stream)
        if recipe is not None:
            place = "prerope+" if stream == "k" and recipe.before_rope else ""
            parts.append(f"{stream}:{place}noise(sigma={sigma:g},seed={seed})")
    return ";".join(parts)


def sigmas_of(error: float, sweep: Sequence[float]) -> tuple[float, ...]:
    """The levels of a sweep: multiples of the codec's relative error, to three digits."""
    base = error if error > 0 else _FALLBACK
    return tuple(float(f"{base * s:.3g}") for s in sorted(sweep))


def measure_noise(
    bench: Bench,
    corners: Corners,
    engine: str,
    sigmas: Sequence[float],
    found: dict[float, Measured],
) -> None:
    """Every level against the engine without noise."""
    for sigma in sigmas:
        codec = noise_codec(bench.plan.codec, sigma, bench.plan.seed)
        config = corners.with_codec(engine, codec=codec, calibration=None)
        found[sigma] = bench.measure(config, config.plain)


def curve(measured: Mapping[float, Measured], floor: float, seed: int = 0) -> NoiseCurve:
    """The curve of one engine; a KL under twice the floor says nothing of how it grows."""
    by_name = aligned({str(sigma): m.seen for sigma, m in measured.items()})
    sigmas = tuple(sorted(measured))
    sums = {sigma: by_name[str(sigma)] for sigma in sigmas}
    effects = tuple(effect(sums[s]) for s in sigmas)
    above = [s for s, e in zip(sigmas, effects, strict=True) if e.kl.value > 2 * floor]
    growth = NoiseGrowth(None, None, None, None)
    if above:
        tokens = [int(t) for t in sums[sigmas[0]].tokens]
        growth = noise_growth(
            above, [list(sums[s].kl) for s in above], tokens, Resampling(2000, seed)
        )
    return NoiseCurve(sigmas, effects, growth, sums)


def kl_at(found: NoiseCurve, sigma: float) -> float | None:
    """KL of noise of this size, read off the curve (log–log, no further out than its ends)."""
    points = [
        (math.log(s), math.log(e.kl.value))
        for s, e in zip(found.sigmas, found.effects, strict=True)
        if e.kl.value > 0
    ]
    if (
        not points
        or not sigma > 0
        or not points[0][0] - 1e-9 <= math.log(sigma) <= points[-1][0] + 1e-9
    ):
        return None
    return float(
        math.exp(np.interp(math.log(sigma), [x for x, _ in points], [y for _, y in points]))
    )


# Phase 4: every layer (or group of neighbours) coded alone, on both engines, and how the parts add
# up.


@dataclass(frozen=True)
class LayerEffect:
    """A group of layers coded alone on one engine, against that engine without codec."""

    layers: tuple[int, ...]
    name: str
    effect: Effect
    sums: WindowSums

    def to_json(self) -> dict[str, Any]:
        """Layers and both currencies."""
        return {"layers": list(self.layers), "name": self.name, **self.effect.to_json()}


@dataclass(frozen=True)
class Attribution:
    """All groups of one engine, and all together. `additivity` is joint KL over the sum of the
    single ones: near 1 where errors do not meet, above where they feed each other, below where they
    drown each other."""

    parts: Sequence[LayerEffect]
    joint: Effect
    additivity: Interval | None

    def to_json(self) -> dict[str, Any]:
        """As `results.layers.ENGINE`."""
        found = self.additivity
        return {
            "parts": [p.to_json() for p in self.parts],
            "joint": self.joint.to_json(),
            "additivity": None
            if found is None
            else {"value": found.value, "lo": found.lo, "hi": found.hi},
        }

    def hottest(self) -> list[LayerEffect]:
        """Groups by KL, the worst first."""
        return sorted(self.parts, key=lambda p: -p.effect.kl.value)


def group_name(group: Sequence[int]) -> str:
    """`codec.layer.07`, or `codec.layers.00-05`."""
    if len(group) == 1:
        return f"codec.layer.{group[0]:02d}"
    return f"codec.layers.{group[0]:02d}-{group[-1]:02d}"


def measure_layers(
    bench: Bench, corners: Corners, engine: str, layers: int, found: dict[str, Measured]
) -> None:
    """Each group alone against the engine without codec, by name."""
    for group in grouped(layers, bench.plan.groups):
        config = corners.with_codec(engine, layers=group)
        found[group_name(group)] = bench.measure(config, config.plain)


def attribute(
    layers: int, groups: int, alone: Mapping[str, Measured], joint: Measured
) -> Attribution:
    """Effects of all groups and of all layers together, on the same tokens."""
    sums = aligned({"joint": joint.seen, **{name: m.seen for name, m in alone.items()}})
    parts = [
        LayerEffect(group, name, effect(sums[name]), sums[name])
        for group in grouped(layers, groups)
        if (name := group_name(group)) in sums
    ]
    single = sum(p.sums.kl for p in parts)
    return Attribution(parts, effect(sums["joint"]), ratio(sums["joint"].kl, single))


# Phases 5 and 6: what the way of measuring changes, and what tables of the other engine change.

_SKIPPED = ("fidelity.not_engaged", "kv.unsupported", "kv.usage")


def measure_harness(
    bench: Bench, corners: Corners, engine: str, found: dict[str, Measured]
) -> dict[str, str]:
    """Every mode, an identity as the control, keys or values alone, and the prefix alone; returns
    why some were not.

    Each against the engine without codec on the same path.
    """
    plan = bench.plan
    # As the path has it, so that a mode which it has measured is not measured again.
    wanted = {
        mode.value: corners.with_codec(engine, mode.value, measured=plan.measured) for mode in Mode
    }
    wanted["identity"] = corners.with_codec(engine, codec="identity", calibration=None)
    wanted["k_only"] = corners.with_codec(engine, streams="k")
    wanted["v_only"] = corners.with_codec(engine, streams="v")
    # As many recent tokens as are scored stay exact: only what comes before them is coded.
    exact = plan.length - 1 - plan.length // 2
    wanted["prefix_only"] = corners.with_codec(
        engine, Mode.INFORWARD.value, codec=with_placement(plan.codec, f"recent(n={exact})")
    )
    skipped: dict[str, str] = {}
    for name, config in wanted.items():
        try:
            found[name] = bench.measure(config, config.plain)
        except AssayError as error:
            # A codec of one stream has nothing to do in the other; an engine may lack a mode.
            if error.finding_id not in _SKIPPED:
                raise
            skipped[name] = error.message
    return skipped


def measure_tables(bench: Bench, corners: Corners, engine: str, found: dict[str, Measured]) -> None:
    """The codec with each calibration, against the engine without codec."""
    tables = {"reference": bench.plan.calibration, "candidate": bench.plan.other_calibration}
    for name, path in tables.items():
        config = corners.with_codec(engine, calibration=path)
        found[name] = bench.measure(config, config.plain)


def effects_json(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Effects by name, over the tokens that all of them scored."""
    return {
        name: {"name": name, **effect(sums).to_json()}
        for name, sums in aligned({name: m.seen for name, m in measured.items()}).items()
    }


def tables_json(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Effects of both calibrations, and their difference paired by window."""
    found = effects_json(measured)
    if len(measured) == 2:
        sums = aligned({name: m.seen for name, m in measured.items()})
        found["candidate_minus_reference"] = effect(sums["candidate"] - sums["reference"]).to_json()
    return found
