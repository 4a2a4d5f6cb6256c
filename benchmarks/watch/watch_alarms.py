"""How often `assay watch` cries wolf, how soon it finds a fault, and what it costs the server.

    python benchmarks/watch/watch_alarms.py record NAME [--rounds 150]    # a real vLLM on the CPU:
    healthy, or a fault python benchmarks/watch/watch_alarms.py judge                         #
    replays what was recorded; writes the results

`record` serves SmolLM2-135M-Instruct (or a twin of it) and asks rounds of the canary one after
another, each with all that the canary can ask; `healthy` asks half of them while other requests
keep the server at work, then stops the process (SIGSTOP) and ends it. Values of items and their
times are kept in results/watch_rounds.json. `judge` replays them with a clock that runs ahead: in
every simulated minute the least round (one fixed text, three tokens, the short text) and every
tenth minute a tool call takes the next items in turn, with a value drawn from those that were
recorded for the item, idle by night and at work by day.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from assay.demo import vllm_server
from assay.demo.damage import damage_checkpoint
from assay.demo.models import build_smollm2
from assay.engines import Request
from assay.engines.server.engine import ServerEngine
from assay.environment import describe
from assay.monitor.canary import GARBAGE_BITS, Canary, Round, State
from assay.monitor.change import Changes
from assay.monitor.loop import IN_A_ROW
from assay.monitor.options import WatchOptions
from identity import keep

RESULTS = Path(__file__).parent / "results"
ROUNDS, OUT = RESULTS / "watch_rounds.json", RESULTS / "watch_alarms.json"
TICKS = os.sysconf("SC_CLK_TCK")
CORES = os.cpu_count() or 1
YEAR = 365 * 1440
STARTS = 200
SHIFT = "every text 0.01 bits per byte worse (added to what was recorded)"
FAULTS = {
    "garbage": "random_blocks",
    "rope": "rope_theta",
    "int8": 8,
    "int6": 6,
    "int5": 5,
    "int4": 4,
}


def rounded(source: Path, target: Path, bits: int) -> Path:
    """A twin whose linear weights are rounded to `bits` bits, a scale a row: what a plain quantiser
    does.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for name, weight in tensors.items():
            if weight.ndim == 2 and "embed" not in name:
                scale = weight.float().abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                tensors[name] = ((weight.float() / scale).round() * scale).to(weight.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return target


def checkpoint(name: str, folder: Path) -> Path:
    how = FAULTS.get(name)
    if how is None:
        return build_smollm2()
    if isinstance(how, int):
        return rounded(build_smollm2(), folder / name, how)
    return damage_checkpoint(how, build_smollm2(), folder / name)


def cpu_seconds(leader: int) -> float:
    """CPU time of a server: its process and all that it started."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader:  # its process group
                total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


@contextlib.contextmanager
def traffic(url: str, streams: int) -> Iterator[None]:
    """Other people's requests, of changing lengths, until the block ends."""
    done = threading.Event()

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        with ServerEngine.connect(url) as engine:
            while not done.is_set():
                prompt = " ".join(
                    rng.choice(("river", "stone", "the", "and", "light"))
                    for _ in range(rng.randint(5, 80))
                )
                engine.generate(
                    Request(
                        prompt=prompt,
                        max_tokens=rng.randint(4, 60),
                        temperature=1.0,
                        seed=rng.randint(0, 9999),
                    )
                )

    threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join(60)


def one(canary: Canary, pid: int, least: bool = False) -> dict[str, Any]:
    canary.budget.left = 1e9
    if least:
        canary._chosen = canary._least  # type: ignore[method-assign]
    before, began = cpu_seconds(pid), time.monotonic()
    found = canary.round()
    return {
        "state": found.state.value,
        "reason": found.reason,
        "bits": found.bits,
        "token_bits": found.token_bits,
        "tokens": found.tokens,
        "tools": found.tools,
        "label": found.label,
        "cost_s": found.cost_s,
        "requests": found.requests,
        "seconds": time.monotonic() - began,
        "cpu_s": cpu_seconds(pid) - before,
        "latency_s": found.latency_s,
    }


def save(name: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Add what was recorded so far: the file may have grown meanwhile, and the rest may fail."""
    kept = json.loads(ROUNDS.read_text()) if ROUNDS.exists() else {}
    ROUNDS.write_text(
        json.dumps(kept | {name: rows, "environment": describe()}) + "\n", encoding="utf-8"
    )


def record(name: str, rounds: int, folder: Path) -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    with vllm_server(
        checkpoint(name, folder), name="smollm2", extra_args=("--seed", "0")
    ) as server:
        canary = Canary(server.url, timeout=30.0, load=1.0)
        canary.budget.saved_s = 1e9
        canary.round()
        rows["idle"] = [one(canary, server.pid) for _ in range(rounds)]
        save(name, rows)
        if name == "healthy" or name.startswith("int"):
            rows["least"] = [one(canary, server.pid, least=True) for _ in range(12)]
        if name == "healthy":
            del canary._chosen  # every item again
            with traffic(server.url, 4):
                rows["at work"] = [one(canary, server.pid) for _ in range(rounds // 3)]
            save(name, rows)
        keep(server.url, f"vllm_{name}", folder, determinism=name == "healthy")
        if name == "healthy":
            canary.close()
            canary = Canary(server.url, timeout=3.0, load=1.0)
            canary.round()
            os.killpg(server.pid, signal.SIGSTOP)
            try:
                rows["stopped"] = [one(canary, server.pid) for _ in range(4)]
            finally:
                os.killpg(server.pid, signal.SIGCONT)
    if name == "healthy":
        rows["ended"] = [one(canary, server.pid) for _ in range(3)]
    canary.close()
    save(name, rows)


class Replay:
    """Least rounds in turn, from recorded values."""

    def __init__(self, seed: int) -> None:
        self.rng, self.n = random.Random(seed), 0

    def round(self, rows: list[dict[str, Any]]) -> Round:
        """The next round, every value drawn from those of its item in `rows`."""
        pools = _pools(rows)
        found = Round(state=State.OK)
        self.n += 1
        for kind, count in (("bits", 1), ("tokens", 3), ("token_bits", 3)):
            items = sorted(pools[kind])
            for i in range(count if items else 0):
                item = items[(self.n * count + i) % len(items)]
                getattr(found, kind)[item] = self.rng.choice(pools[kind][item])
        if self.n % 10 == 0 and pools["tools"]:
            found.tools = {item: self.rng.choice(values) for item, values in pools["tools"].items()}
        found.label = self.rng.choice(pools["label"]["label"])
        return found


_POOLS: dict[int, dict[str, dict[str, list[Any]]]] = {}


def _pools(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    if id(rows) not in _POOLS:
        pools: dict[str, dict[str, list[Any]]] = {
            k: {} for k in ("bits", "token_bits", "tokens", "tools", "label")
        }
        for row in rows:
            for kind in ("bits", "token_bits", "tokens", "tools"):
                for item, value in row[kind].items():
                    pools[kind].setdefault(item, []).append(value)
            pools["label"].setdefault("label", []).append(row["label"])
        _POOLS[id(rows)] = pools
    return _POOLS[id(rows)]


def update(changes: Changes, found: Round) -> list[str]:
    scores = changes.numbers.name == "bits_per_byte"
    return changes.update(found.bits if scores else found.token_bits, found.tokens, found.tools)[0]


def year(kept: dict[str, Any], seed: int, *, scores: bool, noise: float = 0.0) -> dict[str, Any]:
    """A year of minutes: idle by night, at work by day.

    vLLM's CPU kernels give the same bits every time, so `noise` adds what other engines have:
    Student's t with 3 degrees of freedom times so many bits per byte, larger by half by day, and a
    token in 500 that turns.
    """
    replay, changes, alarms = Replay(seed), Changes(60.0, 1.0, scores=scores), list[str]()
    rng = np.random.default_rng(seed)
    shakes = (rng.standard_t(3, YEAR) * noise * (4 if not scores else 1)).tolist()
    turns = rng.random(YEAR).tolist()
    most: dict[str, float] = {}
    for minute in range(YEAR):
        by_day = 480 <= minute % 1440 < 1080
        found = replay.round(kept["healthy"]["at work" if by_day else "idle"])
        if noise:
            values = found.bits if scores else found.token_bits
            for item in values:
                values[item] += shakes[minute] * (1.5 if by_day else 1.0)
            if turns[minute] < 3 / 500:
                found.tokens[next(iter(found.tokens))] = "another"
        alarms += update(changes, found)
        for quantity in changes.quantities:
            for kind, detector in quantity.detectors.items():
                name = f"{quantity.name}.{kind}"
                most[name] = max(most.get(name, 0.0), detector.evidence / detector.limit)
    up = changes.numbers.detectors["up"]
    return {
        "quantity": changes.numbers.name,
        "rounds": YEAR,
        "false_alarms": len(alarms),
        "alarms": alarms,
        "seed": seed,
        "largest_evidence": most,
        "added_noise": noise,
        "tolerance": up.tolerance,
        "noise": changes.numbers.noise,
        "finds_0.01_rounds": changes.finds(0.01) if scores else None,
    }


def detection(kept: dict[str, Any], name: str, *, scores: bool) -> dict[str, Any]:
    """Rounds from the fault to the first alarm, over many starts; garbage by a round itself counts
    after two in a row.
    """
    taken, kinds = [], set()
    for start in range(STARTS):
        replay, changes = Replay(start), Changes(60.0, 1.0, scores=scores)
        for n in range(80 + start % 24):
            update(changes, replay.round(kept["healthy"]["idle" if n % 2 else "at work"]))
        bad = 0
        for n in range(1, 1441):
            found = replay.round(kept["healthy" if name == SHIFT else name]["idle"])
            if name == SHIFT:
                found.bits = {item: value + 0.01 for item, value in found.bits.items()}
            garbage = found.label in ("degenerate", "empty") or bool(
                found.bits and min(found.bits.values()) > GARBAGE_BITS
            )
            bad = bad + 1 if garbage else 0
            alarms = ["broken"] if bad >= IN_A_ROW else [] if garbage else update(changes, found)
            if alarms:
                taken.append(n)
                kinds |= set(alarms)
                break
        else:
            taken.append(10**9)
    found_all = [t for t in taken if t < 10**9]
    drift = [0.01] if name == SHIFT else _drift(kept, name)
    return {
        "fault": name,
        "by": changes.numbers.name,
        "starts": STARTS,
        "found": len(found_all),
        "rounds_median": median(taken) if len(found_all) == STARTS else None,
        "rounds_largest": max(found_all, default=None),
        "alarms": sorted(kinds),
        "drift_bits_per_byte": mean(drift) if drift else None,
    }


def _drift(kept: dict[str, Any], name: str) -> list[float]:
    means = {
        k: {i: mean(v) for i, v in _pools(kept[k]["idle"])["bits"].items()}
        for k in ("healthy", name)
    }
    return [means[name][i] - value for i, value in means["healthy"].items() if i in means[name]]


def judge() -> None:
    kept = json.loads(ROUNDS.read_text())
    healthy = kept["healthy"]
    # A least round costs the same whatever the weights are.
    every = [row for recorded in kept.values() for row in recorded.get("least", ())]
    least = [row for row in every if row["state"] == "ok" and row["requests"] == 5]
    faults = [name for name in FAULTS if name in kept]
    states = {}
    for name in ("stopped", "ended"):
        rows = [row["state"] for row in healthy[name]]
        first = next(
            (
                i
                for i in range(1, len(rows))
                if rows[i] == rows[i - 1] and rows[i] in ("broken", "down")
            ),
            None,
        )
        states[name] = {"states": rows, "rounds_to_alarm": None if first is None else first + 1}
    load = {
        "requests": median(r["requests"] for r in least),
        "seconds_of_one_stream": median(r["cost_s"] for r in least),
        "cpu_seconds": median(r["cpu_s"] for r in least),
        "cores": CORES,
        "share_of_one_stream_at_60_s": median(r["cost_s"] for r in least) / 60,
        "share_of_cpu_at_60_s": median(r["cpu_s"] for r in least) / (60 * CORES),
        "interval_s_for_1_percent_of_one_stream": max(
            60.0, median(r["cost_s"] for r in least) / 0.01
        ),
    }
    out = {
        "about": __doc__,
        "model": "SmolLM2-135M-Instruct, vLLM on the CPU",
        "recorded_rounds": {
            k: {w: len(r) for w, r in v.items()} for k, v in kept.items() if k != "environment"
        },
        "options": WatchOptions().facts(),
        "load": load,
        "years": [
            year(kept, seed, scores=scores, noise=noise)
            for seed, (scores, noise) in enumerate(
                ((True, 0.0), (True, 0.0005), (True, 0.002), (False, 0.0005))
            )
        ],
        "detection": [
            detection(kept, name, scores=scores) for name in faults for scores in (True, False)
        ]
        + [detection(kept, SHIFT, scores=True)],
        "states": states,
        "environment": kept["environment"],
    }
    OUT.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: out[k] for k in ("load", "years", "detection", "states")}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "judge"))
    parser.add_argument("names", nargs="*", help=f"healthy or {', '.join(FAULTS)}")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/assay-identity"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.what == "judge":
        judge()
    for name in arguments.names:
        shutil.rmtree(arguments.folder / name, ignore_errors=True)
        record(name, arguments.rounds, arguments.folder)


if __name__ == "__main__":
    main()
