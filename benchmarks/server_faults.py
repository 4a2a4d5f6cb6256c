"""What `assay check` makes of damaged checkpoints on a real vLLM server, with and without a reference.

    python benchmarks/server_faults.py [--python PYTHON] [--healthy 10] [--only NAME ...] [--model DIR] [--out FILE]

Every damage of `assay.demo.damage` is served and checked once, against the model itself run by transformers; the same
record is then judged again without the reference, so both answers are about the same texts. Healthy runs with different
seeds say how often a whole server would be failed. Results are appended as they come; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from assay.cli.progress import show
from assay.coherence.check import CheckOptions, run_check
from assay.coherence.judge import judge
from assay.coherence.measure import Plan
from assay.coherence.record import CheckRecord
from assay.demo.damage import DAMAGES, damage_checkpoint
from assay.demo.models import build_gemma3, build_smollm2
from assay.demo.servers import vllm_server
from assay.environment import describe

NO_BOS = "gemma_without_bos"
"""The natural fault: Gemma 3 270M, a base model, whose tokenizer does not add the start token it was trained with."""
RESULTS = Path(__file__).parent / "results" / "server_faults.json"


def checked(model: Path, reference: Path, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One check of a server that is already up, as a row of the table."""
    plan = Plan(seed=seed, samples=arguments.samples, repeats=3)
    device = f"?device={arguments.device}" if arguments.device else ""
    began = time.perf_counter()
    report = run_check(
        arguments.url, CheckOptions(plan=plan, reference_engine=f"hf:{reference}{device}"), show
    ).to_json()
    alone = judge(CheckRecord.from_json(report["results"]))
    results = report["results"]
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "seed": seed,
        "with_reference": report["verdict"],
        "signals_with_reference": [r["rule"] for r in results["rules"] if r["state"] == "bad"],
        "without_reference": alone.verdict.value,
        "signals_without_reference": [r.rule for r in alone.rulings if r.state == "bad"],
        "texts": sum(len(p["samples"]) for p in results["probes"]),
        "degenerate": sum(
            s["label"] in ("degenerate", "empty") for p in results["probes"] for s in p["samples"]
        ),
        "reference_degenerate": sum(p["degenerate"] for p in results["reference"]["probes"].values()),
        "bits_per_byte": results["bits_per_byte"]["mean"],
        "reference_bits_per_byte": results["reference"]["bits_per_byte"],
        "decode_tokens_per_s": results["throughput"]["decode_tokens_per_s"]["median"],
        "throughput_valid": results["throughput"]["valid"],
        "rules": results["rules"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", type=Path, help="interpreter that holds vLLM; default: the private environment"
    )
    parser.add_argument("--model", type=Path, help="whole checkpoint; default: SmolLM2-135M from the cache")
    parser.add_argument("--device", default="", help="device of the reference engine, such as cuda")
    parser.add_argument(
        "--healthy", type=int, default=10, help="runs of the whole model, each with its own seed"
    )
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="these damages only")
    parser.add_argument("--serve-arg", action="append", default=[], help="one more argument for the server")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further server after so long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    whole = arguments.model or build_smollm2()
    found: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    found.setdefault("machine", describe() | {"node": platform.machine()})
    found.setdefault("healthy", {})
    found.setdefault("damages", {})

    def keep() -> None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")

    began = time.perf_counter()

    def serve(model: Path) -> Any:
        return vllm_server(model, name="smollm2", python=arguments.python, extra_args=arguments.serve_arg)

    seeds = [str(1000 * (index + 1)) for index in range(arguments.healthy)]
    if any(seed not in found["healthy"] for seed in seeds):
        with serve(whole) as server:
            arguments.url = server.url
            for seed in seeds:
                if seed not in found["healthy"]:
                    found["healthy"][seed] = checked(whole, whole, arguments, int(seed))
                    keep()
                    print("healthy", seed, _line(found["healthy"][seed]), flush=True)
    for name in arguments.only or [*DAMAGES, NO_BOS]:
        if name in found["damages"] or time.perf_counter() - began > 60 * arguments.minutes:
            continue
        folder = Path(tempfile.mkdtemp(prefix="assay-damage-"))
        try:
            if name == NO_BOS:
                broken, reference = build_gemma3(add_bos=False), build_gemma3(add_bos=True)
                description = "Gemma 3 270M without its start token"
            else:
                broken, reference = damage_checkpoint(name, whole, folder / "model"), whole
                description = DAMAGES[name].description
            with serve(broken) as server:
                arguments.url = server.url
                row = checked(broken, reference, arguments, seed=1000)
        finally:
            shutil.rmtree(folder)
        found["damages"][name] = row | {"description": description}
        keep()
        print(name, _line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['with_reference']} / {row['without_reference']} alone; {row['degenerate']} of {row['texts']} degenerate, "
        f"{row['bits_per_byte'] or float('nan'):.3f} bits per byte, by {', '.join(row['signals_with_reference']) or 'nothing'}; "
        f"{row['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
