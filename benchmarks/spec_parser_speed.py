"""How fast is a large log read, against `grep -c SpecDecoding` on the same file, and in how much memory?

    python benchmarks/spec_parser_speed.py [GIGABYTES]

Writes a log with 0.1 % speculative lines to the temporary folder, reads it with both (page cache warm, median of 3),
deletes it, and writes results/spec_parser_speed.json.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "spec_parser_speed.json"
LINES = 60_000
EVERY = 1000


def window(rng: random.Random) -> str:
    """One speculative line; three positions."""
    drafts = rng.randrange(40, 200)
    first = rng.randrange(drafts // 2, drafts)
    hits = [first, first * 7 // 10, first * 4 // 10]
    rates = ", ".join(f"{h / drafts:.3f}" for h in hits)
    return (
        f"(APIServer pid=1) INFO 10-01 12:00:00 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: "
        f"{1 + sum(hits) / drafts:.2f}, Accepted throughput: 11.70 tokens/s, Drafted throughput: 19.20 tokens/s, Accepted: "
        f"{sum(hits)} tokens, Drafted: {3 * drafts} tokens, Per-position acceptance rate: {rates}, Avg Draft acceptance "
        f"rate: {100 * sum(hits) / (3 * drafts):.1f}%\n"
    )


def write(path: Path, size: int) -> int:
    """Write about `size` bytes; returns the number of speculative lines."""
    rng = random.Random(0)
    lines = []
    for i in range(LINES):
        if i % EVERY == EVERY // 2:
            lines.append(window(rng))
        elif i % 10 == 0:
            lines.append(
                "(APIServer pid=1) INFO 10-01 12:00:00 [loggers.py:271] Engine 000: Avg prompt throughput: 12.0 tokens/s, Avg "
                f"generation throughput: {rng.random() * 99:.1f} tokens/s, Running: 4 reqs, Waiting: 0 reqs, GPU KV cache "
                "usage: 1.2%, Prefix cache hit rate: 0.0%\n"
            )
        else:
            lines.append(
                f'(APIServer pid=1) INFO:     10.0.{rng.randrange(255)}.{rng.randrange(255)}:{rng.randrange(65535)} - "POST '
                '/v1/chat/completions HTTP/1.1" 200 OK\n'
            )
    block = "".join(lines).encode()
    blocks = max(1, size // len(block))
    with path.open("wb") as out:
        for _ in range(blocks):
            out.write(block)
    return blocks * LINES // EVERY


def timed(command: list[str]) -> tuple[float, bytes]:
    """Seconds and output of a command."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False)
    return time.perf_counter() - began, done.stdout


def main() -> None:
    size = int(float(sys.argv[1] if len(sys.argv) > 1 else "2") * 1e9)
    handle, name = tempfile.mkstemp(suffix=".log")
    os.close(handle)
    path = Path(name)
    try:
        wanted = write(path, size)
        grep_command = ["grep", "-c", "SpecDecoding", name]
        assay_command = [sys.executable, "-m", "assay", "spec", name, "--json"]
        timed(grep_command)
        greps, assays = [], []
        for _ in range(3):
            seconds, counted = timed(grep_command)
            greps.append(seconds)
            seconds, out = timed(assay_command)
            assays.append(seconds)
        record = json.loads(out)["results"]["record"]
        result = {
            "bytes": path.stat().st_size,
            "speculative_lines": wanted,
            "counted_by_grep": int(counted),
            "counted_by_assay": record["windows"],
            "grep_s": statistics.median(greps),
            "assay_s": statistics.median(assays),
            "assay_all_s": assays,
            "grep_all_s": greps,
            "speed_relative_to_grep": statistics.median(greps) / statistics.median(assays),
            "assay_gb_per_s": path.stat().st_size / 1e9 / statistics.median(assays),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        }
    finally:
        path.unlink()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
