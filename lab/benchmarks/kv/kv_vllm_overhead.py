"""What a KV codec costs in vLLM, in tokens a second, against no hook and against the engine's own
compressed caches.

Run it with a Python that has vLLM and assay in its path:

    python kv_vllm_overhead.py ./model --minutes 6 --out FILE.jsonl

Configurations of one engine run in one process (`kv_vllm_measured.py`), engine after engine; its
rows are written as they come, one that fails loses nothing but itself, and a file with rows of the
same settings is gone on with. A codec is timed in turns with the same engine without it. Every
engine has the same bytes of memory for its cache; `cache_tokens` is what it says it holds. Names
that end in `-graphs` have CUDA graphs and compilation, the engine's default; the others have
`enforce_eager`, the only way that runs hooks, as the row `codec-graphs` shows. Times are of whole
`LLM.generate` calls:

- *prefill*: `windows` prompts of `length` tokens, one new token each, in prompt tokens a second (in
  snapshot both passes);
- *decode*: `requests` prompts of `prompt` tokens, `new` + 1 tokens each, less the same with one
  token each, in new tokens a
  second.

Codecs that learn are fitted ahead, beside the first engines (`kv_vllm_fitted.py`), from the
calibration of `kv_codecs.py --calibrate-only`; without one their rows are not measured.

vLLM 0.25's TurboQuant presets run on its model runner V1, whose steps assay follows, only with
their name put right in memory (`assay.engines.vllm.start`); then they are tried on V2. What both
say is kept where neither runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from assay.runs import cache_dir
from kv_vllm_child import Child, Fits

SETTINGS = (
    "windows",
    "length",
    "requests",
    "prompt",
    "new",
    "repeats",
    "cache_gib",
    "step_tokens",
    "device",
)
PREDICTING = "prerope+sinks+pca(step=0.003, weights=measured, predict=all)"
TRELLIS = "prerope+sinks+pca(step=0.003, weights=measured, predict=all, trellis=8)"


@dataclass(frozen=True)
class Engine:
    """What an engine is started with. `runner` is vLLM's model runner."""

    kv_cache_dtype: str = "auto"
    eager: bool = True
    runner: str = "1"


@dataclass(frozen=True)
class Configuration:
    """An engine, and with a `mode` the codec in it, by default that of `--codec`."""

    engine: Engine = field(default_factory=Engine)
    mode: str = ""
    codec: str | None = None

    @property
    def learns(self) -> bool:
        """Whether its codec needs a calibration."""
        return self.codec in (PREDICTING, TRELLIS)


GRAPHS = Engine(eager=False)
PRESETS = [f"turboquant_{name}" for name in ("4bit_nc", "k8v4", "k3v4_nc", "3bit_nc")]
CONFIGURATIONS = {
    "bf16": Configuration(),
    "hadamard-inforward": Configuration(mode="inforward"),
    "pca-predict": Configuration(mode="inforward", codec=PREDICTING),
    "pca-predict-trellis": Configuration(mode="inforward", codec=TRELLIS),
    "identity-inforward": Configuration(mode="inforward", codec="identity"),
    "hadamard-decode": Configuration(mode="decode"),
    "hadamard-snapshot": Configuration(mode="snapshot"),
    "fp8": Configuration(Engine("fp8")),
    "turboquant_4bit_nc": Configuration(Engine(PRESETS[0])),
    "bf16-graphs": Configuration(GRAPHS),
    "codec-graphs": Configuration(GRAPHS, mode="inforward"),
    "fp8-graphs": Configuration(replace(GRAPHS, kv_cache_dtype="fp8")),
    "turboquant_4bit_nc-graphs": Configuration(replace(GRAPHS, kv_cache_dtype=PRESETS[0])),
    "turboquant_k8v4": Configuration(Engine(PRESETS[1])),
}
"""By name, the most telling first."""
FURTHER = {
    **{name: Configuration(Engine(name)) for name in PRESETS[2:]},
    **{
        f"{name}-graphs": Configuration(replace(GRAPHS, kv_cache_dtype=name))
        for name in PRESETS[1:]
    },
    "identity-snapshot": Configuration(mode="snapshot", codec="identity"),
    "bf16-v2": Configuration(Engine(runner="2")),
}
"""Run only where they are asked for."""
KNOWN = CONFIGURATIONS | FURTHER


def attempts(engine: Engine) -> list[Engine]:
    """Ways to start it, in turn."""
    if not engine.kv_cache_dtype.startswith("turboquant"):
        return [engine]
    return [engine, replace(engine, runner="2")]


def read_rows(path: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of the same settings by configuration, the last of each."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {row["configuration"]: row for row in rows if row["settings"] == settings}


def base_of(row: dict[str, Any]) -> str:
    """The configuration that a row without a codec is compared with: the exact cache of the same
    kind of engine.
    """
    if not row["eager"]:
        return "bf16-graphs"
    return "bf16-v2" if row["runner"] == "2" else "bf16"


def line_of(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    """A row in words, against the exact cache in the same engine."""
    name = f"{row['configuration']:26}"
    if row["status"] != "measured":
        return f"{name} {row['status']}: {row['reasons'][0]}"
    base = rows.get(base_of(row), {})
    parts = [name]
    for what in ("prefill_tok_s", "decode_tok_s"):
        if row[what] is None:
            continue
        part = f"{what.partition('_')[0]} {row[what]['median']:>9,.0f} tok/s"
        if f"change_{what}" in row:
            part += f" ({row[f'change_{what}']['median']:+.1f} % in turns)"
        elif base.get("status") == "measured" and base is not row:
            part += f" ({row[what]['median'] / base[what]['median'] - 1:+.1%})"
        parts.append(part)
    return "  ".join([*parts, f"{row['cache_tokens']:,} tokens of cache", f"{row['took_s']} s"])


class Run:
    """All configurations that are not in the file yet, while there is time."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.monotonic()
        self.settings = {name: getattr(args, name) for name in SETTINGS}
        self.settings |= {"codec": args.codec, "model": Path(args.model).name}
        self.rows = read_rows(args.out, self.settings)
        names = args.configurations.split(",")
        done = {
            n for n, row in self.rows.items() if row["status"] != "not measured" and not args.again
        }
        self.todo = [name for name in names if name not in done]
        codecs = {n: KNOWN[n].codec or args.codec for n in self.todo if KNOWN[n].learns}
        self.fits = Fits(args.model, codecs, args.calibration)

    @property
    def left(self) -> float:
        """Seconds."""
        return float(self.args.minutes * 60 - (time.monotonic() - self.began))

    def write(self, name: str, found: dict[str, Any]) -> None:
        """Keep a row and say what it is."""
        row = {"configuration": name, "settings": self.settings, **found}
        self.rows[name] = row
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        with self.args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(line_of(row, self.rows), flush=True)

    def next_group(self) -> list[str]:
        """The first configuration to do and those of the same engine; fitted ones before those that
        still are.
        """
        ready = [n for n in self.todo if not KNOWN[n].learns or self.fits.path(n)]
        some = ready or self.todo
        return [n for n in some if KNOWN[n].engine == KNOWN[some[0]].engine]

    def all(self) -> None:
        """Engine after engine."""
        if not self.args.calibration.exists():
            reason = (
                f"no calibration {self.args.calibration.name}: kv_codecs.py --calibrate-only"
                " makes it"
            )
            for name in [n for n in self.todo if KNOWN[n].learns]:
                self.done(name, {"status": "not measured", "reasons": [reason]})
        late = []
        while self.todo and self.left > 0:
            group = self.next_group()
            for name in [n for n in group if KNOWN[n].learns and not self.fits.wait(n, self.left)]:
                group.remove(name)
                if reason := self.fits.failure(name):
                    self.done(name, {"status": "unavailable", "reasons": [reason]})
                else:
                    self.todo.remove(name)
                    late.append(name)
            if group:
                self.engine(group)
        self.fits.stop()
        if late or self.todo:
            print(f"out of time before {', '.join([*self.todo, *late])}", file=sys.stderr)
        print("\n".join(["", *(line_of(row, self.rows) for row in self.rows.values())]))

    def engine(self, group: list[str]) -> None:
        """Rows of one engine, each way that it can be started, until one gives a row.

        What is left after a row that ended the process begins anew in another.
        """
        failures: list[str] = []
        ways = attempts(KNOWN[group[0]].engine)
        for engine in ways:
            facts, known, wrote = dict[str, Any](), len(failures), False
            child = Child(self.job(engine, group))
            began = time.monotonic()
            for found in child.lines(self.left, self.args.quiet):
                if "engine" in found:
                    facts = found["engine"]
                    continue
                if found["status"] == "unavailable" and engine != ways[-1]:
                    failures += found["reasons"]
                    continue
                # The first row of an engine has waited for it.
                took, began = round(time.monotonic() - began, 1), time.monotonic()
                self.done(
                    found.pop("row"),
                    {**facts, **found, "took_s": took, "earlier_failures": failures},
                )
                wrote = True
            self.log(f"{group[0]}-{engine.runner}", child.errors)
            if wrote or self.left <= 0:
                return
            if len(failures) == known:
                failures.append(child.reason())
        # An engine that has started fell over its first row.
        for name in group[: 1 if facts else None]:
            self.done(name, {"status": "unavailable", "reasons": failures})

    def job(self, engine: Engine, group: list[str]) -> dict[str, Any]:
        """What an engine's process is told."""
        rows = []
        for name in group:
            known = KNOWN[name]
            codec = (
                {"codec": known.codec or self.args.codec, "mode": known.mode} if known.mode else {}
            )
            rows.append({"name": name, "fitted": self.fits.path(name), **codec})
        return {
            "model": self.args.model,
            "settings": self.settings,
            "limit": self.args.limit,
            "engine": asdict(engine),
            "rows": rows,
        }

    def done(self, name: str, found: dict[str, Any]) -> None:
        """A configuration has its row."""
        self.todo.remove(name)
        self.write(name, found)

    def log(self, name: str, text: str) -> None:
        """Keep what an engine said."""
        if self.args.logs:
            self.args.logs.mkdir(parents=True, exist_ok=True)
            (self.args.logs / f"{name}.log").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--codec", default="hadamard(bits=4)")
    parser.add_argument(
        "--configurations", default=",".join(CONFIGURATIONS), help=f"of {', '.join(KNOWN)}"
    )
    parser.add_argument("--calibration", type=Path, help="of the codecs that learn")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--limit", type=float, default=8.0, help="seconds for the repeats of one measurement"
    )
    parser.add_argument(
        "--quiet", type=float, default=150.0, help="seconds without a row that end an engine"
    )
    parser.add_argument("--cache-gib", type=float, default=6.0)
    parser.add_argument("--step-tokens", type=int, default=32768)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument(
        "--again", action="store_true", help="measure what is in the file already too"
    )
    parser.add_argument("--logs", type=Path, help="folder for what engines said")
    parser.add_argument("--out", type=Path, default=Path("kv_vllm_overhead.jsonl"))
    args = parser.parse_args()
    unknown = set(args.configurations.split(",")) - set(KNOWN)
    if unknown:
        parser.error(f"unknown configurations {sorted(unknown)}; known: {', '.join(KNOWN)}")
    if args.calibration is None:
        args.calibration = cache_dir("kv-calibration") / "smollm2-mixed.safetensors"
    Run(args).all()


if __name__ == "__main__":
    main()
