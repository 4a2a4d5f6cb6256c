"""What `assay check` makes of damaged checkpoints on a real vLLM server, with and without a
reference.

    python benchmarks/check/server_faults.py                                     # all on the CPU,
    in the
    private environment python benchmarks/check/server_faults.py --python PYTHON --device cuda
    #
    with the vLLM of PYTHON, on a GPU python benchmarks/check/server_faults.py --only NAME,NAME
    [--again]
    # these damages, no healthy runs python benchmarks/check/server_faults.py --healthy 10
      --no-damages
    # seeds 1000 to 10000 of the whole model python benchmarks/check/server_faults.py --out FILE &&
      python
    benchmarks/check/server_faults_results.py FILE

Every damage of `assay.demo.run` is served and checked once, against the model itself run by
transformers; the same record is then judged again without the reference, so both answers are about
the same texts. Healthy runs with different seeds say how often a whole server would be failed. Rows
are written as they come. What is there, in the file or in the committed results, is not run again,
unless `--again` says so. Models come from the cache (ASSAY_CACHE): a machine without a package
index gets its folder `models`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from assay.cli.progress import show
from assay.coherence.check import run_check
from assay.coherence.judge import judge
from assay.coherence.options import CheckOptions
from assay.coherence.record import CheckRecord
from assay.demo import vllm_server
from assay.demo.damage import DAMAGES, damage_checkpoint
from assay.demo.models import build_gemma3, build_smollm2
from server_faults_results import RESULTS, load, machine, merged, save

NO_BOS = "gemma_without_bos"
"""The natural fault: Gemma 3 270M, a base model, whose tokenizer does not add the start token it
was trained with.
"""


def checked(
    model: Path, reference: Path, arguments: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """One check of a server that is already up, as a row of the table."""
    device = f"?device={arguments.device}" if arguments.device else ""
    began = time.perf_counter()
    options = CheckOptions(
        seed=seed, samples=arguments.samples, repeats=3, reference_engine=f"hf:{reference}{device}"
    )
    report = run_check(arguments.url, options, show).to_json()
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
        "reference_degenerate": sum(
            p["degenerate"] for p in results["reference"]["probes"].values()
        ),
        "bits_per_byte": results["bits_per_byte"]["mean"],
        "reference_bits_per_byte": results["reference"]["bits_per_byte"],
        "decode_tokens_per_s": results["throughput"]["decode_tokens_per_s"]["median"],
        "throughput_valid": results["throughput"]["valid"],
        "rules": results["rules"],
        "measured_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "machine": machine(arguments.device, report["subject"]["server"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", type=Path, help="interpreter that holds vLLM; default: the private environment"
    )
    parser.add_argument(
        "--model", type=Path, help="whole checkpoint; default: SmolLM2-135M from the cache"
    )
    parser.add_argument("--device", default="", help="device of the reference engine, such as cuda")
    parser.add_argument(
        "--healthy",
        type=int,
        help="runs of the whole model, each with its own seed; default 10, with --only 0",
    )
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", type=_names, help="these damages only, separated by commas")
    parser.add_argument("--no-damages", action="store_true", help="healthy runs only")
    parser.add_argument(
        "--again", action="store_true", help="measure also what was measured before"
    )
    parser.add_argument(
        "--serve-arg", action="append", default=[], help="one more argument for the server"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="begin no further server after so long"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    whole = arguments.model or build_smollm2()
    names = () if arguments.no_damages else arguments.only or (*DAMAGES, NO_BOS)
    healthy = arguments.healthy if arguments.healthy is not None else 0 if arguments.only else 10
    known, found = load(RESULTS), load(arguments.out)
    began = time.perf_counter()

    def wanted(group: str, name: str) -> bool:
        late = time.perf_counter() - began > 60 * arguments.minutes
        return not late and (
            arguments.again or (name not in known[group] and name not in found[group])
        )

    def keep(group: str, name: str, row: dict[str, Any]) -> None:
        nonlocal found
        found = merged(found, {"healthy": {}, "damages": {}} | {group: {name: row}})
        save(arguments.out, found)
        print(name, _line(row), flush=True)

    def serve(model: Path) -> Any:
        return vllm_server(
            model, name="smollm2", python=arguments.python, extra_args=arguments.serve_arg
        )

    seeds = [str(1000 * (index + 1)) for index in range(healthy)]
    if any(wanted("healthy", seed) for seed in seeds):
        with serve(whole) as server:
            arguments.url = server.url
            for seed in seeds:
                if wanted("healthy", seed):
                    keep("healthy", seed, checked(whole, whole, arguments, int(seed)))
    for name in names:
        if not wanted("damages", name):
            print(name, "is there already, or time is up", flush=True)
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
        keep("damages", name, row | {"description": description})


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.replace(",", " ").split() if name)
    unknown = set(names) - {*DAMAGES, NO_BOS}
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"unknown: {', '.join(sorted(unknown))}; there are {', '.join((*DAMAGES, NO_BOS))}"
        )
    return names


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['with_reference']} / {row['without_reference']} alone; {row['degenerate']} of"
        f" {row['texts']} degenerate, {row['bits_per_byte'] or float('nan'):.3f} bits per byte, by"
        f" {', '.join(row['signals_with_reference']) or 'nothing'}; {row['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
