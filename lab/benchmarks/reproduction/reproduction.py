"""A published KV recipe and its decomposition on two engines, point by point: SmolLM2-135M or
Qwen2.5-Coder-1.5B.

    python reproduction.py --engine hf   --text WIKI_TEST --calibrate WIKI_VALID
    [--device cuda] [--minutes 5] python reproduction.py --engine vllm --text WIKI_TEST
    --calibrate WIKI_VALID [--options "kv_cache_gib=6"] python reproduction.py --model
    qwen15 --engine hf --stages core,cells,layers:2 --length 2113 … --kept ROWS

The 1.5B has the study's own KV shape: 28 layers, 2 KV heads of 128. `cells`, `nested` and `alone`
are the published cells that `core` leaves out, `few` what another attention kernel is asked
(`--name hf-eager --options attention=eager`). A stage with `:2` takes every second of the windows.

The recipe in one configuration: keys before RoPE, Q-preconditioned, random sketch of half of
head_dim, 3 bits, values beyond 2 deviations apart; values with 2 bits and one shared basis; six
layers exact. Published it ran with a share of variance of 1.0 in transformers and of 0.95 in vLLM,
through two harnesses, on 4 windows of 64 tokens. Here every window has 1,024 tokens and 64 more:
`inforward` and `snapshot` score all of them, `decode` (exact prefill, cache replaced) the 64, which
is also the published sample of each window. Every engine is held against itself with the exact
cache.

Rows are kept as they are measured, as sums of each window (all tokens, and the last 64; 0 tokens
where a window was left out), most telling first; what is there, or in the files of `--kept`, is not
measured again. `sizes` counts the bytes of one window's streams of every row that wants them.
`reproduction_tables.py` makes the figures out of them.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from assay.demo.models import build_qwen15, build_smollm2
from assay.engines.scoring import Engagement, ScoringEngine, Window
from assay.engines.specs import open_scorer
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.engaged import engaged
from assay.fidelity.observation import WindowObservation
from assay.fidelity.plan import Plan
from assay.fidelity.reference import plan_windows
from assay.fidelity.score import observe
from assay.runs import cache_dir
from assay_lab.gap.phases.noise import noise_codec
from assay_lab.kv import sampler
from assay_lab.kv.cache_bytes import measured_bytes
from assay_lab.kv.calibrate import captured
from assay_lab.kv.calibration import Calibration, passages, read_calibration, write_calibration
from assay_lab.kv.evaluator import CodecEvaluator, Passages, ScoringSetup
from assay_lab.kv.hook_plan import Mode, hook_spec
from assay_lab.options import CalibrationPlan
from reproduction_rows import Rows

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Subject:
    """A model with its layers: those kept exact (the first and last two, and two between, where the
    published recipe had them), and which become exact beside them when the boundary is extended to
    so many."""

    build: Callable[[], Path]
    layers: int
    exact: tuple[int, ...]
    further: dict[int, tuple[int, ...]]

    @property
    def coded(self) -> list[int]:
        """The layers that the recipe codes."""
        return [layer for layer in range(self.layers) if layer not in self.exact]


MODELS = {
    "smollm2": Subject(
        build_smollm2, 30, (0, 1, 7, 15, 28, 29), {10: (2, 3, 26, 27), 14: (4, 5, 24, 25)}
    ),
    "qwen15": Subject(
        build_qwen15, 28, (0, 1, 7, 14, 26, 27), {10: (2, 3, 24, 25), 14: (4, 5, 22, 23)}
    ),
}
TAIL = 64
SIGMAS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
RATIOS = (1.0, 0.95)


@dataclass(frozen=True)
class Row:
    """One configuration; `skip` None: the recipe's exact layers. `size`: count the bytes of one
    window's streams.

    `table`: "" is the engine's own, "plain" the same with the queries' moment not averaged over
    RoPE, "other" that of the other engine. `special` gives some layers another SPEC.
    """

    name: str
    codec: str
    mode: str = "inforward"
    streams: str = "kv"
    skip: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    size: bool = False
    table: str = ""
    special: tuple[tuple[int, str], ...] = ()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def recipe(
    ratio: float,
    *,
    q: bool = True,
    lost: bool = False,
    bits: tuple[int, int] = (3, 2),
    far: str = "",
    outer: str = "",
) -> str:
    """The recipe; `lost`: residuals of keys come back without their norm, as the published decoder
    gave them without `q`.

    `bits` of keys and values; `far`: options more of values; `outer`: a wrapper around both.
    """
    around = f"{outer}prerope+" + ("qprecond+" if q else "")
    norm = ",published_norm=true" if lost else ""
    return (
        f"k:{around}kakeya(bits={bits[0]},pca=random,outlier=2,variance={ratio}{norm});"
        f"v:{outer}kakeya(bits={bits[1]},pca=random,basis=shared,variance={ratio}{far})"
    )


def core() -> Iterator[Row]:
    """The recipe itself, its controls, its streams and its harnesses, at both shares of
    variance.
    """
    yield from (Row(f"joint vr={ratio}", recipe(ratio), size=True) for ratio in RATIOS)
    yield Row("identity", "prerope+identity", skip=())
    for ratio in RATIOS:
        yield Row(f"k only vr={ratio}", recipe(ratio), streams="k")
        yield Row(f"v only vr={ratio}", recipe(ratio), streams="v")
    for ratio in RATIOS:
        yield Row(f"decode vr={ratio}", recipe(ratio), mode="decode")
        yield Row(f"snapshot vr={ratio}", recipe(ratio), mode="snapshot")


def few() -> Iterator[Row]:
    """Of `core`, what another attention kernel of an engine is asked."""
    wanted = (
        "joint vr=0.95",
        "joint vr=1.0",
        "decode vr=1.0",
        "k only vr=0.95",
        "v only vr=0.95",
        "identity",
    )
    rows = {row.name: row for row in core()}
    yield from (rows[name] for name in wanted)


def norms() -> Iterator[Row]:
    """The recipe without Q-preconditioning, and without the norm of its residuals."""
    for ratio in RATIOS:
        yield Row(f"joint vr={ratio} q=off norm=lost", recipe(ratio, q=False, lost=True), size=True)
        yield Row(f"joint vr={ratio} q=off", recipe(ratio, q=False), size=True)
        yield Row(f"joint vr={ratio} norm=lost", recipe(ratio, lost=True))


def noise() -> Iterator[Row]:
    """Gaussian noise where the codec's error goes."""
    yield from (Row(f"noise {sigma:g}", noise_codec(recipe(1.0), sigma, 0)) for sigma in SIGMAS)


def layers(subject: Subject, ratio: float) -> Iterator[Row]:
    """Every coded layer alone."""
    for layer in subject.coded:
        yield Row(f"layer {layer:02d} vr={ratio}", recipe(ratio), layers=(layer,), skip=())


def boundary(subject: Subject, ratio: float) -> Iterator[Row]:
    """More layers exact at the ends."""
    exact = subject.exact
    for count, more in subject.further.items():
        exact = (*exact, *more)
        yield Row(f"exact {count} vr={ratio}", recipe(ratio), skip=tuple(sorted(exact)), size=True)


def hottest(subject: Subject, ratio: float, rows: dict[str, Any], kind: str) -> Iterator[Row]:
    """As many more exact, but those that hurt most alone; nothing before the layers have been
    measured.
    """
    alone = {
        int(name.split()[2]): sum(row["all"]["kl"])
        for name, row in rows.items()
        if name.startswith(f"{kind} layer ") and name.endswith(f"vr={ratio}") and "all" in row
    }
    if not set(subject.coded) <= set(alone):
        return
    worst = sorted(subject.coded, key=lambda layer: -alone[layer])
    for count in subject.further:
        exact = tuple(sorted((*subject.exact, *worst[: count - len(subject.exact)])))
        yield Row(f"exact {count} hottest vr={ratio}", recipe(ratio), skip=exact, size=True)


def cells(subject: Subject, ratio: float = 0.95) -> Iterator[Row]:
    """Published cells beside `core`, most telling first: tables, bits, placement, and the exact
    layers with 4 bits.

    Tables whose moment is averaged over RoPE's rotations are those of queries after RoPE; the
    study's are not averaged.
    """
    yield Row(f"plain vr={ratio}", recipe(ratio), table="plain")
    yield Row(f"decode plain vr={1.0}", recipe(1.0), mode="decode", table="plain")
    yield Row(f"prefix only vr={ratio}", recipe(ratio, outer=f"recent(n={TAIL})+"))
    yield Row(f"K4 vr={ratio}", recipe(ratio, bits=(4, 2)), size=True)
    yield Row(f"K4V4 vr={ratio}", recipe(ratio, bits=(4, 4)), size=True)
    yield Row("K4V4 vr=1.0", recipe(1.0, bits=(4, 4)), size=True)
    yield Row(f"V outliers vr={ratio}", recipe(ratio, far=",outlier=2"), size=True)
    yield Row(f"v only outliers vr={ratio}", recipe(ratio, far=",outlier=2"), streams="v")
    four = recipe(ratio, bits=(4, 4))
    special = tuple((layer, four) for layer in subject.exact)
    yield Row(f"exact at 4 bits vr={ratio}", recipe(ratio), skip=(), special=special, size=True)
    yield Row(f"tables of the other vr={ratio}", recipe(ratio), table="other")


def growing(subject: Subject, ratio: float = 0.95) -> Iterator[Row]:
    """Of the coded layers spread over the depth, as many as stand here (`joint` has all): does
    error add up, or its square?
    """
    for count in (1, 2, 4, 8, 16):
        yield Row(
            f"nested {count:02d} vr={ratio}", recipe(ratio), layers=nested(subject, count), skip=()
        )


def boundary_alone(subject: Subject, ratio: float = 0.95) -> Iterator[Row]:
    """Every layer that the recipe keeps exact, coded alone."""
    for layer in subject.exact:
        yield Row(f"alone {layer:02d} vr={ratio}", recipe(ratio), layers=(layer,), skip=())


def nested(subject: Subject, count: int) -> tuple[int, ...]:
    """The first `count` of the coded layers in an order that halves the gaps: those of a smaller
    number are among them.
    """
    coded, order = subject.coded, [len(subject.coded) // 2]
    while len(order) < len(coded):
        left = (i for i in range(len(coded)) if i not in order)
        order.append(max(left, key=lambda i: (min(abs(i - j) for j in order), -i)))
    return tuple(sorted(coded[i] for i in order[:count]))


def preconditioning() -> Iterator[Row]:
    """Why 2 bits with Q-preconditioning are worse in-forward although they read better: rank,
    sinks, build-up or values?

    All layers coded, as in `kakeya_recipe.py --kl`. Keys alone first, since nothing is done to
    values.
    """

    both = (False, True)
    for mode in ("inforward", "snapshot"):
        for full in both:
            for sinks in (0, 4):
                for q in both:
                    yield twice(q, full, sinks, mode, "k")
    for full, sinks in ((False, 0), (False, 4), (True, 4)):
        yield from (twice(q, full, sinks, "inforward", "kv") for q in both)
    yield from (twice(True, full, 0, "inforward", "k", plain=True) for full in both)


def twice(
    q: bool, full: bool, sinks: int | str, mode: str, streams: str, plain: bool = False
) -> Row:
    """One cell of `preconditioning`; `sinks`: 4 exact tokens of both streams, of one ("k", "v"), or
    0.
    """
    kind = "kakeya(bits=2" + (")" if full else ",pca=random)")
    k, v = ("sinks(n=4)+" if sinks in (4, stream) else "" for stream in "kv")
    name = (
        f"precond {streams} {mode} q={'plain' if plain else 'on' if q else 'off'} "
        f"rank={'full' if full else 'half'} sinks={sinks}"
    )
    codec = f"k:prerope+{k}{'qprecond+' if q else ''}{kind};v:{v}{kind}"
    return Row(
        name,
        codec,
        mode,
        streams,
        skip=(),
        table="plain" if plain else "",
        size=mode == "inforward",
    )


def first_tokens() -> Iterator[Row]:
    """With 2 bits: is it the keys or the values of the first tokens that preconditioning meets? And
    the published moments.
    """
    for sinks in (0, "v", "k", 4):
        yield from (twice(q, False, sinks, "inforward", "kv") for q in (False, True))
    yield from (twice(q, False, 0, "inforward", "k") for q in (False, True))
    yield from (twice(True, False, 0, "inforward", streams, plain=True) for streams in ("k", "kv"))


def read_alone(subject: Subject) -> Iterator[Row]:
    """Keys of each layer alone with 2 bits, with and without Q-preconditioning: where it helps and
    where it hurts.
    """
    for layer in range(subject.layers):
        for q in (False, True):
            codec = f"k:prerope+{'qprecond+' if q else ''}kakeya(bits=2,pca=random)"
            yield Row(f"keys {layer:02d} q={'on' if q else 'off'}", codec, layers=(layer,), skip=())


STAGES: dict[str, Callable[[Subject], Iterator[Row]]] = {
    "core": lambda _: core(),
    "few": lambda _: few(),
    "cells": cells,
    "nested": growing,
    "alone": boundary_alone,
    "norms": lambda _: norms(),
    "noise": lambda _: noise(),
    "layers": lambda subject: layers(subject, 0.95),
    "boundary": lambda subject: (row for ratio in (0.95, 1.0) for row in boundary(subject, ratio)),
    "precond": lambda _: preconditioning(),
    "first": lambda _: first_tokens(),
    "layers1": lambda subject: layers(subject, 1.0),
    "keys": read_alone,
}
DEFAULT = {
    "hf": "core,norms,noise,layers,boundary,hottest,precond,keys,layers1,sizes",
    "vllm": "core,norms,noise,layers,boundary,hottest,sizes",
}


class Runner:
    """One open engine with its windows; scores rows and writes each into the document."""

    def __init__(
        self, given: argparse.Namespace, engine: ScoringEngine, windows: Sequence[Window]
    ) -> None:
        self.given = given
        self.engine = engine
        self.windows = windows
        self.began = time.monotonic()
        self.labs: dict[tuple[str, int], CodecEvaluator] = {}
        self.kept = Rows([file for file in given.kept if file.exists()]).rows
        self.document: dict[str, Any] = (
            json.loads(given.out.read_text(encoding="utf-8"))
            if given.out.exists()
            else {"rows": {}}
        )

    @property
    def rows(self) -> dict[str, Any]:
        """What was measured here, and what was kept of earlier runs."""
        return self.kept | {
            k: r for k, r in self.document["rows"].items() if "tail" in r or k not in self.kept
        }

    def late(self, key: str) -> bool:
        """Whether the time is up."""
        late = bool(time.monotonic() - self.began > 60 * self.given.minutes)
        if late:
            print("out of time before", key, flush=True)
        return late

    def run(self, rows: Iterator[Row], every: int) -> bool:
        """Measure on every so many of the windows what is not there yet; False when the time is
        up.
        """
        for row in rows:
            row = self.placed(row)
            key = f"{self.given.name} {row.name}"
            if "tail" in self.rows.get(key, {}) or (
                row.table == "other" and not self.table(row).exists()
            ):
                continue
            if self.late(key):
                return False
            started = time.monotonic()
            try:
                found = self.score(row, every)
            except (AssayError, RuntimeError) as error:
                found = {"error": str(error)[:300]}
            self.keep(
                key, {**asdict(row), **found, "seconds": round(time.monotonic() - started, 1)}
            )
        return True

    def sizes(self, rows: Iterator[Row]) -> bool:
        """Count the bytes of one window's streams for rows that want them and have been measured
        here without.
        """
        for row in (self.placed(r) for r in rows if r.size):
            key = f"{self.given.name} {row.name}"
            known = self.document["rows"].get(key, {})
            if "tail" in known and "ratio" not in known:
                if self.late(f"{key} size"):
                    return False
                known.update(self.size(row))
                self.keep(key, known)
        return True

    def placed(self, row: Row) -> Row:
        """With the recipe's exact layers, and the size of its blocks."""

        def blocks(codec: str) -> str:
            return codec.replace("kakeya(", f"kakeya(block={self.given.block},")

        skip = self.given.subject.exact if row.skip is None else row.skip
        special = tuple((layer, blocks(codec)) for layer, codec in row.special)
        return replace(row, codec=blocks(row.codec), skip=skip, special=special)

    def table(self, row: Row) -> Path:
        """The calibration that a row takes."""
        if row.table == "other":
            return table_of(self.given.model, {"hf": "vllm", "vllm": "hf"}[self.given.engine])
        return plain_of(self.given.table) if row.table else self.given.table

    def keep(self, key: str, found: dict[str, Any]) -> None:
        """Write a row, and say what it came to."""
        self.document["rows"][key] = found
        unready = self.given.out.with_suffix(".part")
        unready.write_text(json.dumps(self.document, ensure_ascii=False) + "\n", encoding="utf-8")
        unready.replace(self.given.out)
        said = found.get("error") or " ".join(
            f"{part}: KL {sum(s['kl']) / sum(s['tokens']):.5f} dNLL"
            f" {sum(s['dnll']) / sum(s['tokens']):+.5f}"
            for part in ("all", "tail")
            if (s := found.get(part))
        )
        print(f"{key}: {said} ({found['seconds']} s)", flush=True)

    def of_mode(self, mode: str, every: int) -> CodecEvaluator:
        """Windows with their exact cache; *decode* scores what comes after the 1,024 (or 2,048)
        tokens.
        """
        if (mode, every) not in self.labs:
            from_tail = (
                len(self.windows[0].tokens) - self.given.tail if mode == Mode.DECODE else None
            )
            self.labs[mode, every] = CodecEvaluator(
                self.engine,
                ScoringSetup(self.given.spec, Mode(mode), self.given.batch, scored_from=from_tail),
                Passages(self.windows[::every]),
            )
            self.labs[mode, every].score_reference()
        return self.labs[mode, every]

    def score(self, row: Row, every: int) -> dict[str, Any]:
        """Sums by window; AssayError where the codec took no part."""
        lab = self.of_mode(row.mode, every)
        seen, took = self.observed(row, lab, measured=0)
        if row.name != "identity":
            engaged(seen, took, path=lab.job.path, hooked=True, same=False, label=row.name)
        count = len(self.windows)
        found: dict[str, Any] = {
            "fires": took.fires,
            "every": every,
            "tail": sums(seen, self.given.tail, count),
        }
        if row.mode != Mode.DECODE:
            found["all"] = sums(seen, 0, count)
        return found

    def size(self, row: Row) -> dict[str, Any]:
        """How many times smaller than bf16 the streams of one window are."""
        lab = self.of_mode(row.mode, len(self.windows))
        try:
            return {
                "ratio": (
                    measured_bytes(self.observed(row, lab, measured=1)[1], lab.length - 1).ratio
                )
            }
        except (
            AssayError,
            RuntimeError,
        ) as error:  # such as streams that do not give back what attention read
            return {"no ratio": str(error)[:300]}

    def observed(
        self, row: Row, lab: CodecEvaluator, measured: int
    ) -> tuple[list[WindowObservation], Engagement]:
        """The windows with the row's codec, and what took part; the streams of `measured` windows
        are encoded.
        """
        hook = hook_spec(
            self.given.engine,
            codec=row.codec,
            mode=row.mode,
            length=lab.length,
            calibration=str(self.table(row)),
            streams=row.streams,
            skip_layers=row.skip,
            layers=row.layers,
            layer_codecs=dict(row.special),
            measure_windows=measured,
        )
        seen = observe(lab.reference, self.engine, lab.windows, replace(lab.job, hook=hook))
        return seen, self.engine.engagement()

    def engines(self, rows: list[Any], every: int) -> None:
        """This engine with the exact cache against the rows of transformers (sdpa)."""
        key = f"{self.given.name} engine"
        if key in self.rows or not rows:
            return
        started = time.monotonic()
        lab = self.of_mode("inforward", every)

        class Kept:
            def rows(self, windows: Sequence[Window]) -> Iterator[Any]:
                return iter(rows)

        seen = observe(Kept(), self.engine, lab.windows, lab.job)
        own = lab.reference.rows(lab.windows)
        near = [top20(a, b, self.given.tail) for a, b in zip(rows, own, strict=True)]
        count = len(self.windows)
        found: dict[str, Any] = {
            "tail": sums(seen, self.given.tail, count),
            "all": sums(seen, 0, count),
        }
        found |= {"every": every, "symmetric_top20": near}
        self.keep(key, {**found, "seconds": round(time.monotonic() - started, 1)})


def top20(reference: Any, candidate: Any, tail: int) -> float:
    """Mean symmetric KL of the last `tail` rows over the reference's 20 likeliest ids, both sides
    normalised on them.
    """
    count = len(reference.window.tokens) - reference.first
    p, q = (
        rows.to(reference.head.weight.device).logits(count - tail, count)
        for rows in (reference, candidate)
    )
    ids = p.topk(20).indices
    p, q = p.gather(1, ids).log_softmax(-1), q.gather(1, ids).log_softmax(-1)
    return float(((p.exp() - q.exp()) * (p - q)).sum(-1).mean() / 2)


def sums(seen: Sequence[WindowObservation], tail: int, count: int) -> dict[str, list[float]]:
    """Sums of each of `count` windows over its last `tail` tokens (0: all): KL, ΔNLL, equal
    likeliest tokens, tokens.
    """
    import numpy as np

    found: dict[str, list[float]] = {name: [0] * count for name in ("kl", "dnll", "top1", "tokens")}
    for window in seen:
        use = window.finite & np.isfinite(window.kl) & np.isfinite(window.dnll)
        if tail:
            use = use & (np.arange(use.size) >= use.size - tail)
        for name in ("kl", "dnll", "top1"):
            values: NDArray[np.float64] = np.asarray(getattr(window, name), np.float64)
            found[name][window.index] = float(f"{values[use].sum():.7g}")
        found["tokens"][window.index] = int(use.sum())
    return found


def table_of(model: str, engine: str) -> Path:
    """Where the calibration of a model by an engine lies."""
    return cache_dir("kv-calibration") / f"reproduction-{model}-{engine}.safetensors"


def plain_of(table: Path) -> Path:
    """Where the same lies with moments of queries as the published tool took them: before RoPE, not
    averaged.
    """
    return table.with_suffix(".plain.safetensors")


def calibrate(engine: ScoringEngine, given: argparse.Namespace) -> None:
    """The calibration, and a second file whose moments of queries are as the published tool took
    them.
    """
    plain = plain_of(given.table)
    if given.table.exists() and plain.exists():
        return
    plan = CalibrationPlan(
        given.spec,
        given.table,
        text=(given.calibrate,),
        windows=16,
        length=given.calibration_length,
        tokens=4096,
    )
    text = Plan(given.spec, (given.spec,), text=plan.text, windows=plan.windows, length=plan.length)
    windows, facts = plan_windows(text, engine.tokenizer)
    moments: dict[int, torch.Tensor] = {}
    own = sampler.averaged

    def averaged(sigma: torch.Tensor, rotary: Any, layer: int, length: int) -> torch.Tensor:
        moments[layer] = sigma
        return own(sigma, rotary, layer, length)

    with mock.patch.object(sampler, "averaged", averaged):
        tensors, cache = captured(engine, windows, plan)
    known: dict[str, Any] = {
        "cache": cache,
        "engine": engine.describe(),
        "text": facts,
        "passages": passages(windows),
    }
    known |= {"windows": [w.sha256 for w in windows], "samples": int(tensors["positions"].numel())}
    known |= {"sensitivity_windows": 0, "environment": describe()}
    kept = {k: t for k, t in tensors.items() if not k.endswith("_sigma_rope")}
    kept |= {f"layer_{layer}_sigma": sigma for layer, sigma in moments.items()}
    for file, found in ((plain, kept), (given.table, tensors)):
        unready = file.with_suffix(".part")
        write_calibration(unready, Calibration(found, known))
        unready.replace(file)


@contextmanager
def alone_in_starting() -> Iterator[None]:
    """Hold the lock file that START_LOCK names, so that engines of several programs start one after
    the other.
    """
    if not (path := os.environ.get("START_LOCK")):
        yield
        return
    with Path(path).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("hf", "vllm"), required=True)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument(
        "--name", help="of the rows, in place of the engine's, where options set it apart"
    )
    parser.add_argument("--text", required=True)
    parser.add_argument(
        "--calibrate", required=True, help="other text, for moments of queries and the shared basis"
    )
    parser.add_argument(
        "--stages", default="", help=f"some of {', '.join(STAGES)}, hottest; in this order"
    )
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument(
        "--length", type=int, default=1024 + TAIL + 1, help="tokens of a window, the first unscored"
    )
    parser.add_argument("--tail", type=int, default=TAIL)
    parser.add_argument("--block", type=int, default=512, help="tokens of a block of the recipe")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--options", default="", help="options of the engine, joined by &")
    parser.add_argument(
        "--kept",
        type=Path,
        nargs="*",
        default=[],
        help="rows of earlier runs, not to be measured again",
    )
    parser.add_argument("--calibration-length", type=int, default=512)
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin no further row after so long"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "reproduction.json")
    given = parser.parse_args()
    given.subject, given.name = MODELS[given.model], given.name or given.engine
    given.table = table_of(given.model, given.engine)
    model, more = given.subject.build(), given.options and f"&{given.options}"
    of_hf = f"hf:{model}?device={given.device}"
    given.spec = (
        of_hf + more
        if given.engine == "hf"
        else f"vllm:{model}?max_model_len={max(given.length, 512)}{more}"
    )
    stages = [
        (stage, int(every or 1)) for stage, _, every in (s.partition(":") for s in stages_of(given))
    ]
    plan = Plan(
        given.spec, (given.spec,), text=(given.text,), windows=given.windows, length=given.length
    )
    known = Rows([file for file in (*given.kept, given.out) if file.exists()])
    first = stages[0][1]
    needed = given.name != "hf" and f"{given.name} engine" not in known.rows
    exact = clean(of_hf, plan, given, first) if needed else []
    with alone_in_starting() if given.engine == "vllm" else nullcontext():
        engine = open_scorer(given.spec)
    try:
        calibrate(engine, given)
        windows, text = plan_windows(plan, engine.tokenizer)
        if (
            known.facts.get("text", {}).get("windows_sha256", text["windows_sha256"])
            != text["windows_sha256"]
        ):
            raise SystemExit("the rows that are kept are of other windows")
        read_calibration(given.table).check_text(text, windows)
        runner = Runner(given, engine, windows)
        runner.document["facts"] = runner.document.get("facts", {}) | {
            given.name: engine.describe(),
            "text": text,
            "windows": len(windows),
            "length": given.length,
            "tail": given.tail,
            f"machine {given.name}": describe() | {"gpu": _gpu()},
        }
        runner.engines(exact, first)
        for stage, every in stages:
            if stage == "sizes":
                done = runner.sizes(row for own in STAGES.values() for row in own(given.subject))
            elif stage == "hottest":
                done = runner.run(hottest(given.subject, 0.95, runner.rows, given.name), every)
            else:
                done = runner.run(STAGES[stage](given.subject), every)
            if not done:
                break
    finally:
        engine.close()


def stages_of(given: argparse.Namespace) -> list[str]:
    """The stages as they were asked for."""
    return str(given.stages or DEFAULT[given.engine]).split(",")


def clean(spec: str, plan: Plan, given: argparse.Namespace, every: int) -> list[Any]:
    """Transformers' rows of every so many windows with the exact cache; its model is dropped
    again.
    """
    engine = open_scorer(spec)
    try:
        windows = plan_windows(plan, engine.tokenizer)[0][::every]
        return list(
            engine.score_windows(
                windows, ScoringSetup(spec, Mode.INFORWARD, given.batch).job(len(windows[0].tokens))
            )
        )
    finally:
        engine.close()


if __name__ == "__main__":
    main()
