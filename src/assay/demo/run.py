"""The demo: a real server, whole and broken, checked by the same command, side by side."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from assay.coherence.check import CheckOptions, run_check
from assay.coherence.measure import Plan
from assay.demo.damage import DAMAGES, damage_checkpoint
from assay.demo.models import build_smollm2
from assay.demo.servers import vllm_server
from assay.demo.vllm_env import vllm_python
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Finding, Report, Severity, Verdict

DAMAGE = "random_blocks"
PLAN = Plan(samples=1, repeats=3)


def run_demo(
    progress: Progress = NO_PROGRESS, damage: str = DAMAGE
) -> tuple[Report, list[tuple[str, Report]]]:
    """Serve SmolLM2-135M with vLLM on the CPU, check it, damage a copy, and check that.

    Returns the report of the demo, which passes if the whole model passed and the damaged one failed, and the two
    reports with their titles. What it needs is installed and built on the first run; nothing is left running.
    """
    vllm_python(progress)
    model = build_smollm2(progress)
    whole = _checked(model, model, progress, "whole")
    with tempfile.TemporaryDirectory(prefix="assay-demo-") as folder:
        broken_model = damage_checkpoint(damage, model, Path(folder) / model.name)
        broken = _checked(broken_model, model, progress, "broken")
    titles = ("the model as it is", f"a copy with a fault: {DAMAGES[damage].description}")
    return _report(whole, broken, damage), list(zip(titles, (whole, broken), strict=True))


def _checked(model: Path, reference: Path, progress: Progress, which: str) -> Report:
    def named(what: str, steps: int) -> Any:
        return progress(f"{which}: {what}", steps)

    with contextlib.ExitStack() as stack:
        with named("starting vLLM", 1) as advance:
            server = stack.enter_context(vllm_server(model, name=model.name))
            advance()
        options = CheckOptions(plan=PLAN, reference_engine=f"hf:{reference}")
        return run_check(server.url, options, named)


def _report(whole: Report, broken: Report, damage: str) -> Report:
    told_apart = whole.verdict is Verdict.PASS and broken.verdict is Verdict.FAIL
    results = {
        "whole": whole.to_json()["results"]["throughput"] | {"verdict": whole.verdict.value},
        "broken": broken.to_json()["results"]["throughput"]
        | {"verdict": broken.verdict.value, "damage": damage},
    }
    findings = () if told_apart else (
        Finding(
            id="coherence.demo",
            severity=Severity.ERROR,
            title=f"the demo expected pass and fail, and got {whole.verdict.value} and {broken.verdict.value}",
        ),
    )  # fmt: skip
    return Report(
        command="demo",
        verdict=Verdict.PASS if told_apart else Verdict.FAIL,
        subject={"engine": whole.subject.get("server"), "model": whole.subject.get("model")},
        findings=findings,
        results=results,
        interrupted=whole.interrupted or broken.interrupted,
    )
