"""KV-cache codecs at their real stored bytes, scored by teacher-forced decode, on four models.

    python benchmarks/kv_codecs.py --calibrate WIKI_VALID --calibration-name mixed --calibrate-only [--device cuda]
    python benchmarks/kv_codecs.py --calibration-name mixed --text WIKI_TEST [--text pydoc] [--text python] --specs FILE

The first half of each window is prefilled exactly, then the cache is replaced by what the codec makes of it, and the
second half is fed token by token; the reference does the same with the bf16 cache. Calibrated on other text than it is
scored on: `wiki` is WikiText valid alone, `mixed` has other kinds too (`kv_texts.py`). Every row is written as it is
measured, and one that is there already is not measured again. Codecs are fitted ahead by other processes (--jobs).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import kv_texts
from assay.cli.progress import show
from assay.demo.models import build_gemma3, build_qwen05, build_qwen15, build_smollm2
from assay.engines.hf.scorer import HfScorer
from assay.environment import describe
from assay.fidelity.plan import Plan, blocks_of
from assay.fidelity.reference import plan_windows
from assay.fidelity.result import summarise
from assay.lab.kv.cache_hook import Mode
from assay.lab.kv.calibrate import CalibrationPlan, run_calibrate
from assay.lab.kv.calibration import Calibration, read_calibration
from assay.lab.kv.codec import cache_shape
from assay.lab.kv.fit import Bench, fitters
from assay.lab.kv.lab import Lab
from assay.lab.kv.rope import Rotary
from assay.lab.kv.spec import parse_spec
from assay.runs import cache_dir, write_atomically
from assay.stats.bootstrap import Resampling
from assay.stats.equivalence import Margins

RESULTS = Path(__file__).parent / "results"
MODELS = {
    "smollm2": build_smollm2,
    "gemma3": build_gemma3,
    "qwen05": build_qwen05,
    "qwen15": build_qwen15,
}

# What engines offer, the plain baseline over its range, and the same with exact sinks and keys before RoPE.
PLAIN = ["bf16", "fp8", "fp8(format=e5m2)", "int(bits=4,group=32)"]
HADAMARD = [f"hadamard(bits={b})" for b in (6, 5, 4, 3.5, 3, 2.5, 2)]
AROUND = [f"prerope+sinks(n=4)+mean+hadamard(bits={b})" for b in (6, 5, 4, 3, 2.5, 2)]


def main() -> None:
    arguments = _arguments()
    out = arguments.out or RESULTS / f"kv_codecs_{arguments.model}.json"
    began = time.monotonic()
    spec = f"hf:{MODELS[arguments.model]()}?device={arguments.device}&dtype={arguments.dtype}"
    table = cache_dir("kv-calibration") / f"{arguments.model}-{arguments.calibration_name}.safetensors"
    if not table.exists():
        _calibrate(arguments, spec, table)
    if arguments.calibrate_only:
        return
    lines = arguments.specs.read_text().split("\n") if arguments.specs else [*PLAIN, *HADAMARD, *AROUND]
    specs = [parse_spec(line) for line in lines if line.strip() and not line.startswith("#")]
    document: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rows": []}
    done = {
        (r["text"], r["codec"], r["mode"], r.get("calibration"), r.get("dtype", "auto"))
        for r in document["rows"]
    }
    calibration = read_calibration(table)
    scorer = HfScorer.load(spec)
    shape = cache_shape(scorer.engine.model)
    calibration.check_model(shape)
    mode, labs, facts = Mode(arguments.mode), {}, {}
    for source in arguments.text:
        name, path = _evaluated(source)
        plan = Plan(spec, (spec,), text=(path,), windows=arguments.windows, length=arguments.length)
        windows, facts[name] = plan_windows(plan, scorer.tokenizer)
        calibration.check_text(facts[name], [w.sha256 for w in windows])
        labs[name] = Lab(scorer, windows, mode, arguments.batch)
    bench = Bench(shape, Rotary(scorer.engine.model, arguments.length), calibration)

    def todo(codec: str) -> list[str]:
        rest = (codec, mode.value, arguments.calibration_name, arguments.dtype)
        return [t for t in labs if (t, *rest) not in done]

    with fitters(bench, arguments.jobs) as pool:
        chosen = [s for s in specs if todo(str(s))]
        pending = {}
        for number, parsed in enumerate(chosen):
            # Two ahead: fitting goes on while this one is scored.
            for ahead in chosen[number : number + 1 + arguments.jobs]:
                if str(ahead) not in pending:
                    pending[str(ahead)] = pool.start(ahead, range(shape.layers))
            fitted_at = time.perf_counter()
            coders = pending[str(parsed)]()
            pending[str(parsed)] = None
            waited = time.perf_counter() - fitted_at
            for text in todo(str(parsed)):
                if time.monotonic() - began > 60 * arguments.minutes:
                    print("out of time")
                    scorer.close()
                    return
                started = time.perf_counter()
                measured = labs[text].measure(
                    coders.by_stream,
                    table_tokens=32_768,
                    measure_windows=12,
                    progress=show,
                    label=str(parsed),
                )
                ended = time.perf_counter()
                blocks = blocks_of(facts[text]["places"])
                figures = summarise(measured.seen, Margins(), Resampling(2000, 0), blocks=blocks).to_json()
                row = {
                    "codec": str(parsed),
                    "mode": mode.value,
                    "text": text,
                    "calibration": arguments.calibration_name,
                    "dtype": arguments.dtype,
                    "bytes": measured.bytes.to_json(),
                    **{
                        k: figures[k]
                        for k in (
                            "grade", "dppl_pct", "kld", "top1_pct", "tokens", "windows", "clusters", "windows_needed",
                            "ppl_reference",
                        )
                    },
                    "characters_per_token": facts[text]["characters_per_token"],
                    "fires": measured.engagement.fires,
                    "fit_s": round(waited, 1),
                    "score_s": round(ended - started, 1),
                }  # fmt: skip
                document["rows"].append(row)
                document |= {"model": arguments.model, "length": arguments.length, "machine": machine()}
                document.setdefault("texts", {}).update(facts)
                document.setdefault("calibrations", {})[arguments.calibration_name] = {
                    k: calibration.provenance[k] for k in ("text", "samples", "sensitivity_windows")
                }
                out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
                print(_line(row), flush=True)
    scorer.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dtype", default="auto", help="float32: without the rounding of bf16, which hides small errors"
    )
    parser.add_argument("--calibrate", type=Path, help="WikiText valid; needed where no calibration is kept")
    parser.add_argument("--calibration-name", choices=("wiki", "mixed"), default="mixed")
    parser.add_argument("--calibrate-only", action="store_true")
    parser.add_argument("--calibration-windows", type=int, default=96)
    parser.add_argument("--sensitivity", type=int, default=16, help="windows to measure the sensitivity on")
    parser.add_argument("--text", action="append", default=[], help="a file, pydoc, or python")
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--specs", type=Path, help="file with one SPEC a line, in place of the built-in list")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further row after so long")
    parser.add_argument("--tokens", type=int, default=8192, help="sampled tokens of the calibration")
    parser.add_argument("--mode", default="decode")
    parser.add_argument("--jobs", type=int, default=1, help="processes that fit codecs")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _calibrate(arguments: argparse.Namespace, spec: str, table: Path) -> Calibration:
    """The calibration file, by its plan."""
    source = arguments.calibrate
    if arguments.calibration_name == "mixed":
        source = cache_dir("kv-texts") / "mixed.txt"
        # Whole or not at all: several of these processes may run at once.
        write_atomically(source, kv_texts.mixed(arguments.calibrate.read_text(encoding="utf-8")))
    plan = CalibrationPlan(
        spec,
        table,
        text=(str(source),),
        windows=arguments.calibration_windows,
        length=arguments.length,
        batch=8,
        tokens=arguments.tokens,
        sensitivity=arguments.sensitivity,
    )
    run_calibrate(plan, show)
    return read_calibration(table)


def _evaluated(source: str) -> tuple[str, str]:
    """Name of an evaluated text in the rows, and the source that `assay` reads."""
    if source == "python":
        path = cache_dir("kv-texts") / "python.txt"
        write_atomically(path, kv_texts.python_source())
        return "python", str(path)
    return (source, source) if source == "pydoc" else (Path(source).name, source)


def _line(row: dict[str, Any]) -> str:
    change = row["dppl_pct"]
    return (
        f"{row['text']} {row['codec']}: {row['bytes']['ratio']:.2f}x KL {row['kld']['mean']:.5f} "
        f"dppl {change['value']:+.2f} [{change['lo']:+.2f}, {change['hi']:+.2f}] "
        f"top-1 {row['top1_pct']['value']:.2f} {row['grade']} ({row['fit_s']} + {row['score_s']} s)"
    )


def machine() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return describe() | {"gpu": gpu}


if __name__ == "__main__":
    main()
