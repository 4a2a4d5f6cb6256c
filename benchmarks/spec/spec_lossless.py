"""Losslessness on a real engine: vLLM with a draft against vLLM without, and a control with other
weights.

    python benchmarks/spec/spec_lossless.py MODEL WORKDIR

The control serves a 3-bit copy as if it were the server with speculation: it must fail.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from assay.speculation.lossless import measure
from spec_engine import make_draft, server

RESULTS = Path(__file__).parent / "results" / "spec_lossless.json"


def main() -> None:
    model, work = Path(sys.argv[1]), Path(sys.argv[2])
    draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    other = make_draft("int3", model, work / "int3")
    found = {}
    with server(model, None, work / "lossless_off.log", "off") as off:
        for name, (served, speculative) in {
            "draft": (model, draft),
            "control": (other, None),
        }.items():
            with server(served, speculative, work / f"lossless_{name}.log", "on") as on:
                if on is None or off is None:
                    raise SystemExit(f"the server {name} did not start; see {work}")
                found[name] = measure(on, off, prompts=6, samples=32).to_json()
                print(name, {k: v for k, v in found[name].items() if k != "partings"}, flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
