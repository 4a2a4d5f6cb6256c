"""How fast is a large log read, against `grep -c SpecDecoding` on the same file, and in how much
memory?

    python benchmarks/spec/spec_parser_speed.py [GIGABYTES]

Writes a log with 0.1 % speculative lines to the temporary folder, reads it with both in turn (page
cache warm, median of 5; grep in the C locale and in UTF-8), deletes it, and writes
results/spec_parser_speed.json. The time of `assay spec` is that of the whole command, start of
Python included; `read_s` is the reading alone, in a process that is up. Memory is the sum over its
processes of their proportional share.
"""

from __future__ import annotations

import json
import os
import random
import re
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
        "(APIServer pid=1) INFO 10-01 12:00:00 [metrics.py:101] SpecDecoding metrics: Mean"
        f" acceptance length: {1 + sum(hits) / drafts:.2f}, Accepted throughput: 11.70 tokens/s,"
        f" Drafted throughput: 19.20 tokens/s, Accepted: {sum(hits)} tokens, Drafted: {3 * drafts}"
        f" tokens, Per-position acceptance rate: {rates}, Avg Draft acceptance rate:"
        f" {100 * sum(hits) / (3 * drafts):.1f}%\n"
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
                "(APIServer pid=1) INFO 10-01 12:00:00 [loggers.py:271] Engine 000: Avg prompt"
                f" throughput: 12.0 tokens/s, Avg generation throughput: {rng.random() * 99:.1f}"
                " tokens/s, Running: 4 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.2%, Prefix"
                " cache hit rate: 0.0%\n"
            )
        else:
            lines.append(
                "(APIServer pid=1) INFO:    "
                f' 10.0.{rng.randrange(255)}.{rng.randrange(255)}:{rng.randrange(65535)} - "POST'
                ' /v1/chat/completions HTTP/1.1" 200 OK\n'
            )
    block = "".join(lines).encode()
    blocks = max(1, size // len(block))
    with path.open("wb") as out:
        for _ in range(blocks):
            out.write(block)
    return blocks * LINES // EVERY


def processor_seconds() -> float:
    """Processor time of all children so far, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(command: list[str], locale: str = "C.UTF-8") -> tuple[float, bytes]:
    """Seconds and output of a command."""
    began = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, check=False, env={**os.environ, "LC_ALL": locale}
    )
    return time.perf_counter() - began, done.stdout


def peak_memory(command: list[str]) -> float:
    """Peak memory of a command and its children, in MB, looked at every 10 ms."""
    peak = 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(share, [process.pid, *children(process.pid)])))
            time.sleep(0.01)
    return peak


def children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def share(pid: int) -> float:
    """Proportional set size in MB; 0 once the process has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1]) / 1024


def read_alone(path: Path) -> float:
    """Seconds that the reading takes in a process that is up."""
    code = (
        "import sys, time, numpy\nfrom assay.speculation.run import read_files\nfrom"
        " assay.speculation.record import combine\nbegan ="
        " time.perf_counter()\ncombine(read_files([sys.argv[1]]).settled())\nprint(time.perf_counter()"  # noqa: E501
        " - began)"
    )
    return float(timed([sys.executable, "-c", code, str(path)])[1])


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
        load = os.getloadavg()[0]
        greps, greps_c, assays, reads = [], [], [], []
        spent: dict[str, list[float]] = {"grep": [], "assay": []}
        for _ in range(5):
            before = processor_seconds()
            seconds, counted = timed(grep_command)
            greps.append(seconds)
            spent["grep"].append(processor_seconds() - before)
            greps_c.append(timed(grep_command, "C")[0])
            before = processor_seconds()
            seconds, out = timed(assay_command)
            assays.append(seconds)
            spent["assay"].append(processor_seconds() - before)
            reads.append(read_alone(path))
        record = json.loads(out)["results"]["record"]
        result = {
            "bytes": path.stat().st_size,
            "speculative_lines": wanted,
            "counted_by_grep": int(counted),
            "counted_by_assay": record["windows"],
            "grep_s": statistics.median(greps),
            "grep_c_locale_s": statistics.median(greps_c),
            "assay_s": statistics.median(assays),
            "read_s": statistics.median(reads),
            "assay_all_s": assays,
            "grep_all_s": greps,
            "read_all_s": reads,
            "speed_relative_to_grep": statistics.median(greps) / statistics.median(assays),
            "read_speed_relative_to_grep": statistics.median(greps) / statistics.median(reads),
            "assay_gb_per_s": path.stat().st_size / 1e9 / statistics.median(assays),
            "peak_memory_mb": peak_memory(assay_command),
            "processor_s": {name: statistics.median(seconds) for name, seconds in spent.items()},
            "load_average_before": load,
            "cpus": len(os.sched_getaffinity(0)),
        }
    finally:
        path.unlink()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
