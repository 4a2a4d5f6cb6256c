"""`assay kv calibrate`: learn from text what codecs need to know of a model's keys and values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from assay.environment import describe
from assay.errors import UsageError
from assay.kv.calibration import Calibration, write_calibration
from assay.kv.capture import capture
from assay.kv.session import session
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Metric, Report, Verdict


@dataclass(frozen=True)
class CalibrationPlan:
    """What is calibrated: `tokens` sampled tokens out of `windows` windows of the text."""

    model: str
    text: tuple[str, ...]
    windows: int = 32
    length: int = 1024
    batch: int = 4
    tokens: int = 4096

    def __post_init__(self) -> None:
        if not self.text:
            raise UsageError(
                "calibration needs text that is never evaluated",
                remedy="name it with --text",
                finding_id="kv.usage",
            )
        if self.tokens < 256:
            raise UsageError(f"256 tokens or more are needed, got {self.tokens}", finding_id="kv.usage")


def run_calibrate(plan: CalibrationPlan, out: Path, progress: Progress = NO_PROGRESS) -> Report:
    """Run the text through the model, and write one calibration file."""
    with session(plan.model, plan.text, windows=plan.windows, length=plan.length, calibration=None) as opened:
        windows, text, shape = opened.windows, opened.text, opened.bench.shape
        tensors = capture(
            opened.scorer, windows, shape, tokens=plan.tokens, batch=plan.batch, progress=progress
        )
        engine = opened.scorer.describe()
    provenance = {
        "cache": shape.to_json(),
        "engine": engine,
        "text": text,
        "windows": [w.sha256 for w in windows],
        "samples": int(tensors["positions"].numel()),
        "environment": describe(),
    }
    write_calibration(out, Calibration(tensors, provenance))
    size = out.stat().st_size
    return Report(
        command="kv calibrate",
        verdict=Verdict.PASS,
        subject={"model": plan.model, "out": str(out), "plan": asdict(plan)},
        results={**provenance, "bytes": size, "windows": len(windows)},
        environment=describe(),
        headline=[
            Metric("calibrated on", f"{provenance['samples']:,} tokens of {len(windows)} windows"),
            Metric("file", f"{size / 2**20:.1f} MiB"),
        ],
        summary=f"give it to codecs with --calibration {out}",
    )
