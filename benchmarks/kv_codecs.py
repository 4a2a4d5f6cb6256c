"""KV-cache codecs at their real stored bytes, scored by teacher-forced decode: SmolLM2-135M or Gemma 3 270M.

    python benchmarks/kv_codecs.py --calibrate WIKI_VALID --text WIKI_TEST [--text OTHER] [--device cuda] [--windows 128]

The first half of each window is prefilled exactly, then the cache is replaced by what the codec makes of it, and the
second half is fed token by token; the reference does the same with the bf16 cache. Calibrated on other text than it is
scored on. Every row is written as it is measured, and one that is there already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from assay.cache import cache_dir
from assay.cli.progress import show
from assay.demo.models import build_gemma3, build_smollm2
from assay.engines.hf.scorer import HfScorer
from assay.environment import describe
from assay.fidelity.plan import Plan
from assay.fidelity.reference import plan_windows
from assay.fidelity.summary import summarise
from assay.kv.calibrate import CalibrationPlan, run_calibrate
from assay.kv.calibration import read_calibration
from assay.kv.fitting import fitters
from assay.kv.hook import Mode
from assay.kv.lab import Lab
from assay.kv.model import cache_shape
from assay.kv.rope import Rotary
from assay.kv.setup import Bench
from assay.kv.spec import parse_spec
from assay.stats.bootstrap import Resampling
from assay.stats.equivalence import Margins

RESULTS = Path(__file__).parent / "results"
MODELS = {"smollm2": build_smollm2, "gemma3": build_gemma3}

# What engines offer, the plain baseline over its range, and the same with exact sinks and keys before RoPE.
PLAIN = ["bf16", "fp8", "fp8(format=e5m2)", "int(bits=4,group=32)"]
HADAMARD = [f"hadamard(bits={b})" for b in (6, 5, 4, 3.5, 3, 2.5, 2)]
AROUND = [f"prerope+sinks(n=4)+mean+hadamard(bits={b})" for b in (6, 5, 4, 3, 2.5, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--specs", type=Path, help="file with one SPEC a line, in place of the built-in list")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further row after so long")
    parser.add_argument("--tokens", type=int, default=8192, help="sampled tokens of the calibration")
    parser.add_argument("--mode", default="decode")
    parser.add_argument("--jobs", type=int, default=1, help="processes that fit codecs")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    out = arguments.out or RESULTS / f"kv_codecs_{arguments.model}.json"
    specs = arguments.specs.read_text().split("\n") if arguments.specs else [*PLAIN, *HADAMARD, *AROUND]
    began = time.monotonic()
    spec = f"hf:{MODELS[arguments.model]()}?device={arguments.device}"
    table = cache_dir("kv-calibration") / f"{arguments.model}.safetensors"
    if not table.exists():
        plan = CalibrationPlan(
            spec, (str(arguments.calibrate),), windows=48, batch=8, tokens=arguments.tokens
        )
        run_calibrate(plan, table, show)
    document: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rows": []}
    done = {(r["text"], r["codec"], r["mode"]) for r in document["rows"]}
    calibration = read_calibration(table)
    scorer = HfScorer.load(spec)
    plan = Plan(spec, (spec,), (str(arguments.text),), windows=arguments.windows, length=arguments.length)
    windows, text = plan_windows(plan, scorer.tokenizer)
    shape = cache_shape(scorer.engine.model)
    calibration.check_model(shape)
    calibration.check_text(text, [w.sha256 for w in windows])
    bench = Bench(shape, Rotary(scorer.engine.model, arguments.length), calibration)
    mode = Mode(arguments.mode)
    lab = Lab(scorer, windows, mode, arguments.batch)
    with fitters(bench, arguments.jobs) as pool:
        for line in specs:
            if not line.strip() or line.startswith("#"):
                continue
            parsed = parse_spec(line)
            if (arguments.text.name, str(parsed), mode.value) in done:
                continue
            if time.monotonic() - began > 60 * arguments.minutes:
                print("out of time")
                break
            fitted_at = time.perf_counter()
            coders = pool.fit(parsed, range(shape.layers))
            started = time.perf_counter()
            measured = lab.measure(
                coders.by_stream, table_tokens=32_768, measure_windows=4, progress=show, label=line
            )
            ended = time.perf_counter()
            figures = summarise(measured.seen, Margins(), Resampling(2000, 0)).to_json()
            row = {
                "codec": str(parsed),
                "mode": mode.value,
                "text": arguments.text.name,
                "bytes": measured.bytes.to_json(),
                **{
                    k: figures[k]
                    for k in ("grade", "dppl_pct", "kld", "top1_pct", "tokens", "windows", "windows_needed")
                },
                "fires": measured.engagement.fires,
                "fit_s": round(started - fitted_at, 1),
                "score_s": round(ended - started, 1),
            }
            document["rows"].append(row)
            document |= {"model": arguments.model, "length": arguments.length, "machine": machine()}
            document["calibration"] = {k: calibration.provenance[k] for k in ("text", "samples")}
            out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(
                f"{row['codec']}: {row['bytes']['ratio']:.2f}x KL {row['kld']['mean']:.5f} "
                f"dppl {row['dppl_pct']['value']:+.2f} [{row['dppl_pct']['lo']:+.2f}, {row['dppl_pct']['hi']:+.2f}] "
                f"top-1 {row['top1_pct']['value']:.2f} {row['grade']} ({row['fit_s']} + {row['score_s']} s)",
                flush=True,
            )
    scorer.close()


def machine() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return describe() | {"gpu": gpu}


if __name__ == "__main__":
    main()
