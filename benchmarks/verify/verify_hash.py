"""Hash throughput of `assay verify` against OpenSSL's own sha256 over all cores, and what a second
run costs.

    python benchmarks/verify/verify_hash.py [GIB [RUNS [PAIRED]]]

Twelve files of GIB / 12 each, of which the first PAIRED (all by default) are hashed by both
(sparse: their zeros come from memory, so that the disk is out of the comparison; sha256 takes the
same time for every byte). OpenSSL runs as `openssl dgst -sha256`, one process a file, as many at
once as there are cores. Both take turns; the ratio is that of each pair. Then a warm run: the
digests are remembered. Writes results/verify_hash.json.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from assay.checkpoint.digests import Digest, DigestCache, hash_files
from assay.checkpoint.options import VerifyOptions
from assay.checkpoint.verify import verify

RESULTS = Path(__file__).parent / "results" / "verify_hash.json"
FILES = 12


def write(folder: Path, total: int) -> list[Path]:
    paths = []
    for i in range(FILES):
        path = folder / f"part-{i:02d}.bin"
        with path.open("wb") as stream:
            stream.truncate(total // FILES)
        paths.append(path)
    return paths


def cpu() -> float:
    """CPU seconds of this process and its children: what the work takes on a machine that does
    nothing else.
    """
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def by_openssl(paths: list[Path]) -> tuple[float, dict[str, str]]:
    began = time.perf_counter()
    done = subprocess.run(
        ["xargs", "-P", str(os.cpu_count()), "-n", "1", "openssl", "dgst", "-sha256", "-r"],
        input="\n".join(map(str, paths)), capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    return seconds, {
        Path(line.split("*")[1]).name: line.split()[0] for line in done.stdout.splitlines()
    }


def by_assay(paths: list[Path]) -> tuple[float, dict[str, str]]:
    digests: dict[str, Digest] = {}
    began = time.perf_counter()
    hash_files([(p.name, p, p.stat().st_size) for p in paths], DigestCache(None), digests)
    seconds = time.perf_counter() - began
    return seconds, {name: str(d.sha256) for name, d in digests.items()}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def second_run(folder: Path, cache: Path) -> dict[str, Any]:
    """The hashing stage of the whole verb, cold and warm."""
    (folder / "config.json").write_text("{}")
    options = VerifyOptions(allow_unverified=True, cache_file=cache, hashing="all")
    cold = verify(str(folder), options)
    warm = [verify(str(folder), options) for _ in range(5)]
    assert all(
        w.results["bytes"]["from_cache"] == cold.results["bytes"]["hashed"] - 2 for w in warm
    )
    assert [f["sha256"] for f in warm[0].results["files"]] == [
        f["sha256"] for f in cold.results["files"]
    ]
    seconds = [w.results["seconds"]["files"] for w in warm]
    first = cold.results["seconds"]["files"]
    return {
        "cold_s": first, "warm_s": spread(seconds),
        "faster": first / statistics.median(seconds), "goal": 50,
    }  # fmt: skip


def main() -> None:
    total = int(float(sys.argv[1]) * (1 << 30)) if len(sys.argv) > 1 else 12 << 30
    runs = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    paired = int(sys.argv[3]) if len(sys.argv) > 3 else FILES
    theirs, mine = [], []
    their_cpu, my_cpu = [], []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "files"
        folder.mkdir()
        paths = write(folder, total)
        for i in range(runs):
            for turn in (by_openssl, by_assay) if i % 2 else (by_assay, by_openssl):
                used = cpu()
                seconds, digests = turn(paths[:paired])
                (theirs if turn is by_openssl else mine).append((seconds, digests))
                (their_cpu if turn is by_openssl else my_cpu).append(cpu() - used)
        assert all(d == theirs[0][1] for _, d in (*theirs, *mine))
        again = second_run(folder, Path(place) / "digests.sqlite")
    size = total // FILES * paired
    ratios = [t / m for (t, _), (m, _) in zip(theirs, mine, strict=True)]
    result = {
        "paired_bytes": size,
        "paired_files": paired,
        "second_run_bytes": total // FILES * FILES,
        "runs": runs,
        "cores": os.cpu_count(),
        "openssl_gb_per_s": spread([size / s / 1e9 for s, _ in theirs]),
        "assay_gb_per_s": spread([size / s / 1e9 for s, _ in mine]),
        "assay_to_openssl": spread(ratios),
        "goal_ratio": 0.95,
        "openssl_cpu_s": spread(their_cpu),
        "assay_cpu_s": spread(my_cpu),
        "second_run": again,
        "openssl": subprocess.run(
            ["openssl", "version"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
