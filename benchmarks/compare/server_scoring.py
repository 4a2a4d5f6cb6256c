"""What scoring fixed texts by a server costs: wide or narrow, one by one or together, each depth
anew or read from one text.

    python benchmarks/compare/server_scoring.py [--repeats 3] [--out FILE]

A real vLLM CPU server with SmolLM2-135M (context 4,096 + 64, as `assay check` scores up to 4,096).
Each way scores the same tokens of the same passages; ways take turns, and beside the wall time
stands the processor time of the server's processes, which other programs on the machine change
less. `narrow` asks for the target token only (`prompt_logprobs=0`), `wide` for 20 ids.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from assay.coherence.passages import passages
from assay.demo import vllm_server
from assay.demo.models import build_smollm2
from assay.engines.server.engine import ServerEngine
from assay.engines.server.prompt_scores import by_prompt_logprobs
from assay.environment import describe

RESULTS = Path(__file__).parent / "results"
DEPTH = 4064
DEEP = 4


def family(pid: int) -> list[int]:
    """A process and all that it started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found


def processor_seconds(pid: int) -> float:
    total = 0
    for one in family(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def deep_texts(counts: list[int]) -> list[str]:
    """Contexts of half and of full depth with a passage at the end, a text for each of the deep
    passages.
    """
    texts = passages()
    found = []
    for share in (0.5, 1.0):
        for target in range(DEEP):
            chosen: list[str] = []
            total, index = 0, target
            while True:
                index = (index + 1) % len(texts)
                if index == target:
                    continue
                if total + counts[index] + 2 > int(DEPTH * share) - counts[target]:
                    break
                chosen.append(texts[index])
                total += counts[index] + 2
            found.append("\n\n".join([*chosen, texts[target]]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "server_scoring.json")
    arguments = parser.parse_args()
    texts = list(passages())
    with (
        vllm_server(build_smollm2(), name="smollm2", max_model_len=4096 + 64) as server,
        ServerEngine.connect(server.url, timeout=600) as engine,
    ):
        counts = [len(engine.tokenize(text)) for text in texts]
        deep = deep_texts(counts)
        longest = deep[DEEP]

        def wide(sources: list[str]) -> list[float]:
            found = [
                by_prompt_logprobs(engine._transport, engine.model, [s], 20)[0] for s in sources
            ]
            return [-sum(v for v in f.values[1:]) for f in found]

        ways: dict[str, Callable[[], list[float]]] = {
            "passages, wide, one by one": lambda: wide(texts),
            "passages, narrow, one by one": lambda: [engine.score(t).nll for t in texts],
            "passages, narrow, together": lambda: [s.nll for s in engine.score_many(texts)],
            "depths, wide, a request each": lambda: wide(deep),
            "depths, narrow, a request each": lambda: [engine.score(t).nll for t in deep],
            "depths, narrow, one text for all": lambda: [engine.score(longest).nll],
        }
        rows: list[dict[str, Any]] = []
        for repeat in range(arguments.repeats):
            for name, way in ways.items():
                before, started = processor_seconds(server.pid), time.monotonic()
                nll = way()
                seconds = time.monotonic() - started
                rows.append(
                    {
                        "way": name,
                        "repeat": repeat,
                        "seconds": seconds,
                        "load": os.getloadavg()[0],
                        "server_seconds": processor_seconds(server.pid) - before,
                        "requests": len(nll),
                        "nll": sum(nll),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
                arguments.out.write_text(
                    json.dumps(
                        {
                            "tokens": {
                                "passages": sum(counts),
                                "depths": [len(engine.tokenize(t)) for t in deep],
                            },
                            "environment": describe(),
                            "rows": rows,
                        },
                        indent=1,
                    )
                    + "\n"
                )
    lines = ["| way | seconds | processor seconds of the server |", "|---|---|---|"]
    for name in ways:
        own = [row for row in rows if row["way"] == name]
        lines.append(
            f"| {name} | {median(r['seconds'] for r in own):.1f} |"
            f" {median(r['server_seconds'] for r in own):.1f} |"
        )
    arguments.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
