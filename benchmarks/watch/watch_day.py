"""`assay watch` at a real llama-server: a day of rounds, six faults put behind the same address,
and its load.

    bash benchmarks/build/build_llama_cpp.sh python benchmarks/watch/watch_day.py record [--seconds
    300]     # asks the server; keeps results/watch_day_rounds.json as it goes python
    benchmarks/watch/watch_day.py judge                      # writes results/watch_day.json

SmolLM2-135M-Instruct as bf16 (its Q4_1 file with the weights written as bf16). `record` lets the
real `Watch` step with a clock that runs ahead by the interval after each round: first the least
round, as a watch with 1 % of load asks it, again and again, every fourth stretch with two streams
of other requests. Then, for each fault, the server is ended, another one is started at the same
port under the same name, and the watch, with the baseline that it learnt of the healthy server,
steps until it raises an alarm. `judge` makes 24 hours of a round a minute: all rounds that were
recorded, in their order, and after these rounds whose values are drawn from those of their items.
llama-server cannot score a prompt, so first tokens and their probabilities are watched.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from assay.demo import Server, llama_server
from assay.demo.models import SMOLLM2, gguf_of
from assay.environment import describe
from assay.monitor.canary import Canary
from assay.monitor.change import Changes
from assay.monitor.loop import Watch
from assay.monitor.options import WatchOptions
from assay.runs import cache_dir
from assay.serving.launch import free_port
from identity import rounded
from watch_alarms import CORES, Replay, cpu_seconds, traffic, update

RESULTS = Path(__file__).parent / "results"
ROUNDS, OUT = RESULTS / "watch_day_rounds.json", RESULTS / "watch_day.json"
BINARY = cache_dir("llama.cpp") / "bin" / "llama-server"
NAME, DAY = "smollm2", 1440
MOST = 60
"""Rounds that a fault is given to be found."""
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "damaged weights": ("garbage", ()),
    "weights in Q4_0": ("q4_0", ()),
    "weights in Q8_0": ("q8_0", ()),
    "RoPE base 3,000 instead of 100,000": ("bf16", ("--rope-freq-base", "3000")),
    "KV cache in q4_0": ("bf16", ("-ctk", "q4_0", "-ctv", "q4_0", "-fa", "on")),
    "the process stopped": ("bf16", ()),
    "the process ended": ("", ()),
}


class Clock:
    """Seconds that pass by themselves, and by the waits that are left out."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


def file_of(kind: str, folder: Path) -> Path:
    """The GGUF file of a type, or one with 60 blocks of random bytes in its weights."""
    file = folder / f"{kind}.gguf"
    if file.exists():
        return file
    if kind != "garbage":
        rounded(gguf_of(SMOLLM2), file, kind.upper())
        return file
    shutil.copy(file_of("bf16", folder), file)
    size, rng = file.stat().st_size, random.Random(0)
    with file.open("r+b") as out:
        for n in range(60):
            out.seek(size // 4 + n * (size // 2) // 60)
            out.write(rng.randbytes(4096))
    return file


@contextmanager
def served(kind: str, more: tuple[str, ...], port: int, folder: Path) -> Iterator[Server]:
    with llama_server(
        file_of(kind, folder),
        BINARY,
        max_model_len=1024,
        streams=4,
        extra_args=more,
        port=port,
        alias=NAME,
    ) as server:
        yield server


def stepped(watch: Watch, clock: Clock, pid: int | None) -> dict[str, Any]:
    """One round of the watch, and what it cost."""
    before = cpu_seconds(pid) if pid else 0.0
    found = watch.step()
    row = {
        "state": found.state.value,
        "reason": found.reason,
        "bits": found.bits,
        "token_bits": found.token_bits,
        "tokens": found.tokens,
        "tools": found.tools,
        "label": found.label,
        "cost_s": found.cost_s,
        "requests": found.requests,
        "cpu_s": cpu_seconds(pid) - before if pid else 0.0,
        "interval_s": watch.wait(),
        "alarms": sorted(watch.alarms),
    }
    clock.ahead += row["interval_s"]
    return row


def save(kept: dict[str, Any]) -> None:
    ROUNDS.write_text(json.dumps(kept | {"environment": describe()}) + "\n", encoding="utf-8")


def record(seconds: float, folder: Path) -> None:
    port, clock = free_port(), Clock()
    url = f"http://127.0.0.1:{port}"
    kept: dict[str, Any] = {"healthy": [], "faults": {}}
    canary = Canary(url, timeout=20.0, interval_s=60.0, load=0.01, clock=clock)
    watch = Watch(url, WatchOptions(listen="none", new_baseline=True), canary, clock=clock)
    with served("bf16", (), port, folder) as server:
        end, stretch = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            stretch += 1
            work = stretch % 4 == 0
            with traffic(url, 2) if work else nullcontext():
                for _ in range(20):
                    row = stepped(watch, clock, server.pid) | {"at_work": work}
                    kept["healthy"].append(row)
            save(kept)
            print(len(kept["healthy"]), watch.state, sorted(watch.alarms), flush=True)
        assert watch.changes is not None
        state = copy.deepcopy(watch.changes.state())
    name = watch.changes.numbers.name
    for fault, (kind, more) in FAULTS.items():
        canary = Canary(url, timeout=5.0, interval_s=60.0, load=0.01, clock=clock)
        watch = Watch(url, WatchOptions(listen="none", new_baseline=True), canary, clock=clock)
        watch.changes = Changes(60.0, 1.0, scores=name == "bits_per_byte")
        watch.changes.restore(copy.deepcopy(state))
        rows: list[dict[str, Any]] = []
        with served(kind, more, port, folder) if kind else nullcontext() as server:
            pid = server.pid if server else None
            if fault == "the process stopped":
                canary.round()
                os.killpg(server.pid, signal.SIGSTOP)
            try:
                while len(rows) < MOST and not watch.alarms:
                    rows.append(stepped(watch, clock, pid))
            finally:
                if fault == "the process stopped":
                    os.killpg(server.pid, signal.SIGCONT)
        canary.close()
        kept["faults"][fault] = rows
        save(kept)
        print(fault, len(rows), sorted(watch.alarms), flush=True)


def day(healthy: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """24 hours: the recorded rounds in their order, the rest drawn; the alarms of change that they
    raise.
    """
    from assay.monitor.canary import Round

    changes, alarms, replay = Changes(60.0, 1.0, scores=False), list[str](), Replay(seed)
    real = healthy[:DAY]
    for row in real:
        found = Round(**{k: row[k] for k in ("bits", "token_bits", "tokens", "tools", "label")})
        alarms += update(changes, found)
    for _ in range(DAY - len(real)):
        alarms += update(changes, replay.round(healthy))
    return {
        "seed": seed,
        "rounds": DAY,
        "recorded": len(real),
        "drawn": DAY - len(real),
        "false_alarms": len(alarms),
        "alarms": alarms,
    }


def judge() -> None:
    kept = json.loads(ROUNDS.read_text())
    healthy = kept["healthy"]
    idle = [r for r in healthy if not r["at_work"] and r["requests"]]
    costs = [r["cost_s"] for r in idle]
    wait = median(r["interval_s"] for r in idle)
    faults = {}
    for name, rows in kept["faults"].items():
        found = rows[-1]["alarms"]
        waits = [r["interval_s"] for r in rows]
        faults[name] = {
            "rounds_to_alarm": len(rows) if found else None,
            "rounds_given": len(rows),
            "alarms": found,
            "minutes_to_alarm": sum(waits[:-1]) / 60 if found else None,
            "states": [r["state"] for r in rows],
            "reason": rows[-1]["reason"],
        }
    out = {
        "about": __doc__,
        "model": "SmolLM2-135M-Instruct as bf16, llama-server on the CPU",
        "recorded_rounds": {
            "healthy": len(healthy),
            "of these with other requests": sum(r["at_work"] for r in healthy),
        },
        "alarms_while_healthy": sorted({a for r in healthy for a in r["alarms"]}),
        "states_while_healthy": {
            s: sum(r["state"] == s for r in healthy) for s in {r["state"] for r in healthy}
        },
        "days": [day(healthy, seed) for seed in range(30)],
        "detection": faults,
        "load": {
            "requests_a_round": median(r["requests"] for r in idle),
            "seconds_of_one_stream": median(costs),
            "cpu_seconds": median(r["cpu_s"] for r in idle),
            "cores": CORES,
            "interval_s": wait,
            "share_of_one_stream": sum(costs) / sum(r["interval_s"] for r in idle),
            "share_of_cpu": sum(r["cpu_s"] for r in idle)
            / (CORES * sum(r["interval_s"] for r in idle)),
        },
        "environment": kept["environment"],
    }
    OUT.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    print(
        json.dumps(
            {
                k: out[k]
                for k in (
                    "recorded_rounds",
                    "alarms_while_healthy",
                    "states_while_healthy",
                    "detection",
                    "load",
                )
            },
            indent=1,
        )
    )
    print(sum(d["false_alarms"] for d in out["days"]), "false alarms in", len(out["days"]), "days")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "judge"))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/assay-identity"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.what == "record":
        record(arguments.seconds, arguments.folder)
    judge()


if __name__ == "__main__":
    main()
