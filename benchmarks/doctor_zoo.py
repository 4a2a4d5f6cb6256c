"""Faulty and healthy serve commands through `assay doctor`: is the guilty set found, is nobody wrongly accused?

    python benchmarks/doctor_zoo.py --llama-server BIN [--only NAME …]     (about two minutes a case)

Cases on `llama-server` are real faults of a real engine and model; those on `small_server.py` of the tests show faults
that no engine shows at will. Results are added to benchmarks/results/doctor_zoo.json case by case.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.demo.models import QWEN05, SMOLLM2, gguf_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "doctor_zoo.json"
SMALL = ROOT / "tests" / "serving" / "small_server.py"


@dataclass(frozen=True)
class Case:
    """A command, and what the doctor should say: guilty settings, or another role, or `baseline`."""

    name: str
    engine: str
    settings: str
    guilty: tuple[str, ...] = ()
    role: tuple[str, str] | None = None
    baseline_fails: bool = False
    fault_rate: float = 1.0
    model: str = "smollm2"

    @property
    def healthy(self) -> bool:
        return not (self.guilty or self.role or self.baseline_fails)


PLAIN = "--no-mmap --ubatch-size 128"
CASES = (
    Case("rope base 100", "llama", f"{PLAIN} --rope-freq-base 100", ("--rope-freq-base",)),
    Case("rope scale", "llama", f"--rope-scale 0.02 {PLAIN}", ("--rope-scale",)),
    Case("norm epsilon overridden", "llama", f"{PLAIN} --override-kv llama.attention.layer_norm_rms_epsilon=float:30", ("--override-kv",)),
    Case("template of another model", "llama", f"{PLAIN} --chat-template gemma", ("--chat-template",)),
    Case("q4_0 keys, Qwen", "llama", f"{PLAIN} -ctk q4_0", ("--cache-type-k",), model="qwen05"),
    Case("GPU layers without a GPU", "llama", f"{PLAIN} -ngl 99", role=("--n-gpu-layers", "no_effect")),
    Case("context beyond memory", "llama", f"{PLAIN} -c 400000000", role=("--ctx-size", "cannot_run")),
    Case("corrupt file", "llama", PLAIN, baseline_fails=True, model="corrupt"),
    Case("fp8 that breaks", "small", "--harmless-a 1 --kv fp8 --harmless-b 2 --harmless-c 3", ("--kv",)),
    Case("two that fail together", "small", "--pair-a --harmless-a 1 --pair-b --harmless-b 2", ("--pair-a", "--pair-b")),
    Case("above 16 streams", "small", "--harmless-a 1 --crowd --harmless-b 2", ("--crowd",), fault_rate=1 / 3),
    Case("one start in three", "small", "--harmless-a 1 --flaky {count} --harmless-b 2", ("--flaky",), fault_rate=1 / 3),
    Case("half as fast", "small", "--harmless-a 1 --slow 0.004 --harmless-b 2", ("--slow",)),
    Case("dies when asked", "small", "--harmless-a 1 --dies --harmless-b 2", ("--dies",)),
    Case("out of memory", "small", "--harmless-a 1 --memory", role=("--memory", "cannot_run")),
    Case("a flag that is refused", "small", "--harmless-a 1 --refuses", role=("--refuses", "cannot_run")),
    Case("a flag that is ignored", "small", "--harmless-a 1 --nothing", role=("--nothing", "no_effect")),
    Case("healthy, plain", "llama", PLAIN),
    Case("healthy, flash attention", "llama", f"{PLAIN} -fa on"),
    Case("healthy, q8_0 keys", "llama", "-ctk q8_0 --ubatch-size 128"),
    Case("healthy, four streams", "llama", "-np 4 --ubatch-size 128"),
    Case("healthy, one flag", "small", "--harmless-a 1"),
    Case("healthy, three flags", "small", "--harmless-a 1 --harmless-b 2 --harmless-c 3"),
    Case("healthy, eight starts", "small", "--harmless-a 1 --kv fp16", fault_rate=1 / 3),
    Case("healthy, a worker of its own", "small", "--harmless-a 1 --spawn zoo"),
)  # fmt: skip


def model_of(case: Case, folder: Path) -> Path:
    if case.model != "corrupt":
        return gguf_of(QWEN05 if case.model == "qwen05" else SMOLLM2)
    raw = bytearray(gguf_of(SMOLLM2).read_bytes())
    for at in range(len(raw) // 2, len(raw) - 70_000, len(raw) // 80):
        raw[at : at + 60_000] = os.urandom(60_000)
    (folder / "corrupt.gguf").write_bytes(raw)
    return folder / "corrupt.gguf"


def run(case: Case, binary: str, folder: Path) -> dict[str, Any]:
    out = folder / "report.json"
    options = [
        "--budget",
        "7",
        "--seconds",
        "15",
        "--fault-rate",
        f"{case.fault_rate}",
        "--no-ladder",
        "--no-tools",
    ]
    settings = case.settings.format(count=folder / "count").split()
    command = [binary, "-m", str(model_of(case, folder)) if case.engine == "llama" else "", *settings]
    if case.engine == "small":
        options += ["--command-template", f"{sys.executable} {SMALL} --port {{port}} {{settings}}"]
        command = settings
    env = {**os.environ, "ASSAY_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", "assay", "doctor", "--json", str(out), *options, "--", *command]
    subprocess.run(words, env=env, capture_output=True, check=False, timeout=560)
    report = json.loads(out.read_text())
    found = report["results"]
    roles = {s["name"]: s["role"] for s in found["settings"]}
    fails = any(f["id"] == "server.baseline_fails" for f in report["findings"])
    right = set(found["guilty"]) == set(case.guilty) and fails == case.baseline_fails
    if case.role:
        right = right and roles.get(case.role[0]) == case.role[1]
    if case.healthy:
        right = right and report["verdict"] == "pass"
    return {
        "engine": case.engine, "model": case.model if case.engine == "llama" else None, "settings": case.settings,
        "expected": list(case.guilty) or (list(case.role) if case.role else ["baseline"] if case.baseline_fails else []),
        "healthy": case.healthy, "right": right, "accused": found["guilty"], "roles": roles, "verdict": report["verdict"],
        "symptoms": found.get("symptoms"), "launches": found["launches"], "launches_exhaustive": found.get("launches_exhaustive"),
        "minutes": round(found["minutes"], 2), "fault_rate": case.fault_rate,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--llama-server", default="")
    parser.add_argument("--only", nargs="*")
    asked = parser.parse_args()
    machine = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "shared": "two cores shared with other work",
    }
    for case in CASES:
        if (asked.only and case.name not in asked.only) or (
            case.engine == "llama" and not asked.llama_server
        ):
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = run(case, asked.llama_server, Path(folder))
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"machine": machine, "rows": {}}
        kept["rows"][case.name] = row
        RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        print(
            f"{case.name:34} right={row['right']} accused={row['accused']} launches={row['launches']} {row['minutes']} min",
            flush=True,
        )


if __name__ == "__main__":
    main()
