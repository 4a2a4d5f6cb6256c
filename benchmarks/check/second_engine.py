"""`assay check` on a server of another kind: llama.cpp's own, with the GGUF file that SmolLM2's
checkpoint came from.

    bash benchmarks/build/build_llama_cpp.sh && python benchmarks/check/second_engine.py [--binary
    llama-server] [--timeout S]

The weights are the same, so the reference run by transformers should be matched. llama.cpp's server
cannot score a prompt; the check says so and judges by texts and prompts alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from assay.cli.progress import show
from assay.coherence.check import run_check
from assay.coherence.options import CheckOptions
from assay.demo import llama_server
from assay.demo.models import SMOLLM2, build_smollm2, gguf_of
from assay.report.console import print_report
from assay.runs import cache_dir

RESULTS = Path(__file__).parent / "results" / "second_engine.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--binary", type=Path, default=cache_dir("llama.cpp") / "bin" / "llama-server"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        help="seconds for one answer; more on a busy machine",
    )
    arguments = parser.parse_args()
    with llama_server(gguf_of(SMOLLM2), arguments.binary) as server:
        options = CheckOptions(
            seed=1000,
            repeats=3,
            reference_engine=f"hf:{build_smollm2()}",
            timeout=arguments.timeout,
        )
        report = run_check(server.url, options, show)
    print_report(report)
    kept = report.to_json()
    kept["subject"].pop("model_root", None)
    RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
