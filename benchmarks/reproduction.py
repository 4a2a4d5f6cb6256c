"""A published KV recipe and its decomposition on two engines, point by point: SmolLM2-135M.

    python benchmarks/reproduction.py --engine hf   --text WIKI_TEST --calibrate WIKI_VALID [--device cuda] [--minutes 5]
    python benchmarks/reproduction.py --engine vllm --text WIKI_TEST --calibrate WIKI_VALID [--options "kv_cache_gib=6"]

The recipe in one configuration: keys before RoPE, Q-preconditioned, random sketch of half of head_dim, 3 bits, values
beyond 2 deviations apart; values with 2 bits and one shared basis; six layers exact. Published it ran with a share of
variance of 1.0 in transformers and of 0.95 in vLLM, through two harnesses, on 4 windows of 64 tokens. Here every window
has 1,024 tokens and 64 more: `inforward` and `snapshot` score all of them, `decode` (exact prefill, cache replaced) the 64,
which is also the published sample of each window. Every engine is held against itself with the exact cache.

Rows are kept as they are measured, as sums of each window (all tokens, and the last 64), most telling first; what is there is
not measured again. `reproduction_tables.py` makes the figures out of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.demo.models import build_smollm2
from assay.engines.scoring import ScoringEngine, Window
from assay.engines.specs import open_scorer
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.plan import Plan
from assay.fidelity.reference import plan_windows
from assay.fidelity.score import WindowObservation, engaged, observe
from assay.lab.gap.phases import noise_codec
from assay.lab.kv.accounting import measured_bytes
from assay.lab.kv.cache_hook import Mode, hook_spec
from assay.lab.kv.calibrate import CalibrationPlan, run_calibrate
from assay.lab.kv.calibration import Calibration, read_calibration, write_calibration
from assay.lab.kv.lab import Trials
from assay.runs import cache_dir

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESULTS = Path(__file__).parent / "results"
LAYERS = 30
EXACT = (0, 1, 7, 15, 28, 29)
"""Layers kept exact: the first and last two, and two between, where the published recipe had them."""
FURTHER = {10: (2, 3, 26, 27), 14: (4, 5, 24, 25)}
"""Which layers become exact beside them when the boundary is extended to so many."""
TAIL = 64
SIGMAS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
RATIOS = (1.0, 0.95)


@dataclass(frozen=True)
class Row:
    """One configuration. `size`: count the bytes of one window's streams. `plain`: the queries' moment not averaged over RoPE."""

    name: str
    codec: str
    mode: str = "inforward"
    streams: str = "kv"
    skip: tuple[int, ...] = EXACT
    layers: tuple[int, ...] | None = None
    size: bool = False
    plain: bool = False


def recipe(ratio: float, *, q: bool = True, lost: bool = False) -> str:
    """The recipe; `lost`: residuals of keys come back without their norm, as the published decoder gave them without `q`."""
    around = "prerope+" + ("qprecond+" if q else "")
    norm = ",published_norm=true" if lost else ""
    return (
        f"k:{around}kakeya(bits=3,pca=random,outlier=2,variance={ratio}{norm});"
        f"v:kakeya(bits=2,pca=random,basis=shared,variance={ratio})"
    )


def core() -> Iterator[Row]:
    """The recipe itself, its controls, its streams and its harnesses, at both shares of variance."""
    yield from (Row(f"joint vr={ratio}", recipe(ratio), size=True) for ratio in RATIOS)
    yield Row("identity", "prerope+identity", skip=())
    for ratio in RATIOS:
        yield Row(f"k only vr={ratio}", recipe(ratio), streams="k")
        yield Row(f"v only vr={ratio}", recipe(ratio), streams="v")
    for ratio in RATIOS:
        yield Row(f"decode vr={ratio}", recipe(ratio), mode="decode")
        yield Row(f"snapshot vr={ratio}", recipe(ratio), mode="snapshot")
    for ratio in RATIOS:
        yield Row(f"joint vr={ratio} q=off norm=lost", recipe(ratio, q=False, lost=True), size=True)
        yield Row(f"joint vr={ratio} q=off", recipe(ratio, q=False), size=True)
        yield Row(f"joint vr={ratio} norm=lost", recipe(ratio, lost=True))


def noise() -> Iterator[Row]:
    """Gaussian noise where the codec's error goes."""
    yield from (Row(f"noise {sigma:g}", noise_codec(recipe(1.0), sigma, 0)) for sigma in SIGMAS)


def layers(ratio: float) -> Iterator[Row]:
    """Every coded layer alone."""
    for layer in range(LAYERS):
        if layer not in EXACT:
            yield Row(f"layer {layer:02d} vr={ratio}", recipe(ratio), layers=(layer,), skip=())


def boundary(ratio: float) -> Iterator[Row]:
    """More layers exact at the ends."""
    exact = EXACT
    for count, more in FURTHER.items():
        exact = (*exact, *more)
        yield Row(f"exact {count} vr={ratio}", recipe(ratio), skip=tuple(sorted(exact)), size=True)


def hottest(ratio: float, rows: dict[str, Any], kind: str) -> Iterator[Row]:
    """As many more exact, but those that hurt most alone; nothing before the layers have been measured."""
    alone = {
        int(name.split()[2]): sum(row["all"]["kl"])
        for name, row in rows.items()
        if name.startswith(f"{kind} layer ") and name.endswith(f"vr={ratio}") and "all" in row
    }
    if len(alone) < LAYERS - len(EXACT):
        return
    worst = sorted(alone, key=lambda layer: -alone[layer])
    for count in FURTHER:
        exact = tuple(sorted((*EXACT, *worst[: count - len(EXACT)])))
        yield Row(f"exact {count} hottest vr={ratio}", recipe(ratio), skip=exact, size=True)


def preconditioning() -> Iterator[Row]:
    """Why 2 bits with Q-preconditioning are worse in-forward although they read better: rank, sinks, build-up or values?

    All layers coded, as in `kakeya_recipe.py --kl`. Keys alone first, since nothing is done to values.
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


def twice(q: bool, full: bool, sinks: int | str, mode: str, streams: str, plain: bool = False) -> Row:
    """One cell of `preconditioning`; `sinks`: 4 exact tokens of both streams, of one ("k", "v"), or 0."""
    kind = "kakeya(bits=2" + (")" if full else ",pca=random)")
    k, v = ("sinks(n=4)+" if sinks in (4, stream) else "" for stream in "kv")
    name = (
        f"precond {streams} {mode} q={'plain' if plain else 'on' if q else 'off'} "
        f"rank={'full' if full else 'half'} sinks={sinks}"
    )
    codec = f"k:prerope+{k}{'qprecond+' if q else ''}{kind};v:{v}{kind}"
    return Row(name, codec, mode, streams, skip=(), plain=plain, size=mode == "inforward")


def first_tokens() -> Iterator[Row]:
    """With 2 bits: is it the keys or the values of the first tokens that preconditioning meets? And the published moments."""
    for sinks in (0, "v", "k", 4):
        yield from (twice(q, False, sinks, "inforward", "kv") for q in (False, True))
    yield from (twice(q, False, 0, "inforward", "k") for q in (False, True))
    yield from (twice(True, False, 0, "inforward", streams, plain=True) for streams in ("k", "kv"))


def read_alone() -> Iterator[Row]:
    """Keys of each layer alone with 2 bits, with and without Q-preconditioning: where it helps and where it hurts."""
    for layer in range(LAYERS):
        for q in (False, True):
            codec = f"k:prerope+{'qprecond+' if q else ''}kakeya(bits=2,pca=random)"
            yield Row(f"keys {layer:02d} q={'on' if q else 'off'}", codec, layers=(layer,), skip=())


STAGES = {
    "core": core,
    "noise": noise,
    "layers": lambda: layers(0.95),
    "boundary": lambda: (row for ratio in (0.95, 1.0) for row in boundary(ratio)),
    "precond": preconditioning,
    "first": first_tokens,
    "layers1": lambda: layers(1.0),
    "keys": read_alone,
}
DEFAULT = {
    "hf": "core,noise,layers,boundary,hottest,precond,keys,layers1",
    "vllm": "core,noise,layers,boundary,hottest",
}


class Runner:
    """One open engine with its windows; scores rows and writes each into the document."""

    def __init__(self, given: argparse.Namespace, engine: ScoringEngine, windows: Sequence[Window]) -> None:
        self.given = given
        self.engine = engine
        self.windows = windows
        self.began = time.monotonic()
        self.trials: dict[str, Trials] = {}
        self.document: dict[str, Any] = (
            json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {"rows": {}}
        )

    def run(self, rows: Iterator[Row]) -> bool:
        """Measure what is not there yet; False when the time is up."""
        for row in rows:
            row = replace(row, codec=row.codec.replace("kakeya(", f"kakeya(block={self.given.block},"))
            key = f"{self.given.engine} {row.name}"
            if "tail" in self.document["rows"].get(key, {}):
                continue
            if time.monotonic() - self.began > 60 * self.given.minutes:
                print("out of time before", key, flush=True)
                return False
            started = time.monotonic()
            try:
                found = self.score(row)
            except (AssayError, RuntimeError) as error:
                found = {"error": str(error)[:300]}
            self.keep(key, {**asdict(row), **found, "seconds": round(time.monotonic() - started, 1)})
        return True

    def keep(self, key: str, found: dict[str, Any]) -> None:
        """Write a row, and say what it came to."""
        self.document["rows"][key] = found
        self.given.out.write_text(json.dumps(self.document, ensure_ascii=False) + "\n", encoding="utf-8")
        said = found.get("error") or " ".join(
            f"{part}: KL {sum(s['kl']) / sum(s['tokens']):.5f} dNLL {sum(s['dnll']) / sum(s['tokens']):+.5f}"
            for part in ("all", "tail")
            if (s := found.get(part))
        )
        print(f"{key}: {said} ({found['seconds']} s)", flush=True)

    def of_mode(self, mode: str) -> Trials:
        """The windows with their exact cache; *decode* scores what comes after the 1,024 tokens."""
        if mode not in self.trials:
            from_tail = len(self.windows[0].tokens) - self.given.tail if mode == Mode.DECODE else None
            trials = Trials(self.engine, self.windows, Mode(mode), self.given.batch, scored_from=from_tail)
            # The exact cache by prefill is one and the same for both modes that use it.
            other = self.trials.get(Mode.SNAPSHOT if mode == Mode.INFORWARD else Mode.INFORWARD)
            self.trials[mode] = trials if mode == Mode.DECODE or other is None else other
        return self.trials[mode]

    def score(self, row: Row) -> dict[str, Any]:
        """Sums by window, and bytes where the row asks for them; AssayError where the codec took no part."""
        trials = self.of_mode(row.mode)
        trials.score_reference()
        table = self.given.table.with_suffix(".plain.safetensors") if row.plain else self.given.table
        hook = hook_spec(
            self.given.engine,
            codec=row.codec,
            mode=row.mode,
            length=trials.length,
            calibration=str(table),
            streams=row.streams,
            skip_layers=row.skip,
            layers=row.layers,
            measure_windows=int(row.size),
        )
        job = replace(trials.job, hook=hook)
        seen = observe(trials, self.engine, trials.windows, job)
        took = self.engine.engagement()
        if row.name != "identity":
            engaged(seen, took, path=job.path, hooked=True, same=False, label=row.name)
        found: dict[str, Any] = {"fires": took.fires, "tail": sums(seen, self.given.tail)}
        if row.mode != Mode.DECODE:
            found["all"] = sums(seen, 0)
        if row.size:
            found["ratio"] = measured_bytes(took, trials.length - 1).ratio
        return found

    def engines(self, rows: list[Any]) -> None:
        """Both engines with the exact cache: vLLM against the kept rows of transformers."""
        key = "vllm engine"
        if key in self.document["rows"] or not rows:
            return
        started = time.monotonic()
        trials = self.of_mode("inforward")

        class Kept:
            def rows(self, windows: Sequence[Window]) -> Iterator[Any]:
                return iter(rows)

        seen = observe(Kept(), self.engine, trials.windows, trials.job)
        found = {"tail": sums(seen, self.given.tail), "all": sums(seen, 0)}
        self.keep(key, {**found, "seconds": round(time.monotonic() - started, 1)})


def sums(seen: Sequence[WindowObservation], tail: int) -> dict[str, list[float]]:
    """Sums of each window over its last `tail` tokens (0: all): KL, ΔNLL, tokens that agree in the likeliest, tokens."""
    import numpy as np

    found: dict[str, list[float]] = {"kl": [], "dnll": [], "top1": [], "tokens": []}
    for window in seen:
        use = window.finite & np.isfinite(window.kl) & np.isfinite(window.dnll)
        if tail:
            use = use & (np.arange(use.size) >= use.size - tail)
        for name in ("kl", "dnll", "top1"):
            values: NDArray[np.float64] = np.asarray(getattr(window, name), np.float64)
            found[name].append(float(f"{values[use].sum():.7g}"))
        found["tokens"].append(int(use.sum()))
    return found


def calibrated(given: argparse.Namespace, model: str) -> None:
    """The calibration, and a second file whose moments of queries are as the published tool took them."""
    if not given.table.exists():
        plan = CalibrationPlan(
            model,
            given.table,
            text=(given.calibrate,),
            windows=16,
            length=given.calibration_length,
            tokens=4096,
        )
        run_calibrate(plan)
    plain = given.table.with_suffix(".plain.safetensors")
    if not plain.exists():
        known = read_calibration(given.table)
        kept = {k: t for k, t in known.tensors.items() if not k.endswith("_sigma_rope")}
        write_calibration(plain, Calibration(kept, known.provenance))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("hf", "vllm"), required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument(
        "--calibrate", required=True, help="other text, for moments of queries and the shared basis"
    )
    parser.add_argument("--stages", default="", help=f"some of {', '.join(STAGES)}, hottest; in this order")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument(
        "--length", type=int, default=1024 + TAIL + 1, help="tokens of a window, the first unscored"
    )
    parser.add_argument("--tail", type=int, default=TAIL)
    parser.add_argument("--block", type=int, default=512, help="tokens of a block of the recipe")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--options", default="", help="options of vLLM's engine, joined by &")
    parser.add_argument("--calibration-length", type=int, default=512)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further row after so long")
    parser.add_argument("--out", type=Path, default=RESULTS / "reproduction.json")
    given = parser.parse_args()
    given.table = cache_dir("kv-calibration") / "reproduction.safetensors"
    model = str(build_smollm2())
    of_hf = f"hf:{model}?device={given.device}"
    of_vllm = f"vllm:{model}?max_model_len={max(given.length, 512)}" + (
        f"&{given.options}" if given.options else ""
    )
    calibrated(given, of_hf)
    spec = of_hf if given.engine == "hf" else of_vllm
    plan = Plan(spec, (spec,), text=(given.text,), windows=given.windows, length=given.length)
    exact = clean(of_hf, plan, given) if given.engine == "vllm" else []
    engine = open_scorer(spec)
    try:
        windows, text = plan_windows(plan, engine.tokenizer)
        read_calibration(given.table).check_text(text, [w.sha256 for w in windows])
        runner = Runner(given, engine, windows)
        runner.document["facts"] = runner.document.get("facts", {}) | {
            given.engine: engine.describe(),
            "text": text,
            "windows": len(windows),
            "length": given.length,
            "tail": given.tail,
            f"machine {given.engine}": describe() | {"gpu": gpu()},
        }
        runner.engines(exact)
        for stage in (given.stages or DEFAULT[given.engine]).split(","):
            rows = (
                hottest(0.95, runner.document["rows"], given.engine)
                if stage == "hottest"
                else STAGES[stage]()
            )
            if not runner.run(rows):
                break
    finally:
        engine.close()


def clean(spec: str, plan: Plan, given: argparse.Namespace) -> list[Any]:
    """Transformers' rows of all windows with the exact cache; its model is dropped again."""
    engine = open_scorer(spec)
    try:
        windows, _ = plan_windows(plan, engine.tokenizer)
        return list(engine.score_windows(windows, Trials(engine, windows, Mode.INFORWARD, given.batch).job))
    finally:
        engine.close()


def gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


if __name__ == "__main__":
    main()
