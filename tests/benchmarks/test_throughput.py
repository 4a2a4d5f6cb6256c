"""Shares and speed-ups of benchmarks/compare/throughput.py are those of single rounds; its workers
run both ways on a tiny model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_target import make_target

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "compare"
sys.path.insert(0, str(BENCHMARKS))
import throughput


def test_shares_are_of_one_round() -> None:
    def timed(rate: float, processor: float) -> dict[str, float]:
        return {"windows_per_s": rate, "processor_s": processor}

    rounds = [
        {
            "prefill 1": timed(10, 1),
            "scored 1": timed(5, 2),
            "prefill 2": timed(18, 1),
            "scored 2": timed(9, 2),
        },
        {
            "prefill 1": timed(2, 1),
            "scored 1": timed(1, 2),
            "prefill 2": timed(4, 1),
            "scored 2": timed(2, 4),
        },
    ]
    found = throughput.summary(rounds, [1, 2])
    assert found["share_of_prefill"][1] == {"value": 0.5, "lo": 0.5, "hi": 0.5}
    assert found["share_of_prefill_by_processor"][2]["value"] == pytest.approx((0.5 + 0.25) / 2)
    assert found["speed_up"]["scored"]["value"] == pytest.approx(1.9)
    assert found["speed_up"]["scored"]["lo"] < 1.8 < 2 < found["speed_up"]["scored"]["hi"]


@pytest.mark.slow
def test_two_workers_share_the_windows(tmp_path: Path) -> None:
    model, out = make_target(tmp_path / "tiny", hidden=32, layers=1), tmp_path / "out.json"
    sizes = ["--windows", "5", "--length", "32", "--batch", "2", "--rounds", "1", "--threads", "1"]
    command = [
        sys.executable,
        str(BENCHMARKS / "throughput.py"),
        f"hf:{model}",
        *sizes,
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert set(found["windows_per_s"]) == {"prefill 1", "scored 1", "prefill 2", "scored 2"}
    assert all(r["windows_per_s"] > 0 and r["processor_s"] > 0 for r in found["rounds"][0].values())
    assert found["engine"]["threads"] == 1
