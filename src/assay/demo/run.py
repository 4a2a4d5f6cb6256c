"""The demo: a real server, whole and broken, checked by the same command, side by side."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.coherence.check import CheckOptions, run_check
from assay.demo.damage import DAMAGES, damage_checkpoint
from assay.demo.prepare import prepare
from assay.demo.servers import vllm_server
from assay.errors import AssayError
from assay.extras import install
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Finding, Report, Severity, Verdict

DAMAGE = "shifted_scales"
"""A fault whose texts a reader recognises as broken; random blocks leave NaN, and no text at all.
"""
PLAN: dict[str, Any] = {"quick": True, "token_budget": 0.5, "longest_needle": 512}
"""The quick plan, with answers half as long: they take most of the reference's time."""
BUDGET_S, STARTS = 140.0, 3.0
"""What a check may take, or so many times the start of its server where that is more: the measure
of a slow machine.
"""


def run_demo(
    progress: Progress = NO_PROGRESS, damage: str = DAMAGE
) -> tuple[Report, list[tuple[str, Report]]]:
    """Serve SmolLM2-135M with vLLM on the CPU, check it, damage a copy, and check that.

    Returns the report of the demo, which passes if the whole model passed and the damaged one
    failed, and the two reports with their titles. What it needs is installed and built on the first
    run; nothing is left running.
    """
    _require_packages()
    model = prepare(progress)
    with progress(
        "vLLM serves the model, then a broken copy: about 4 minutes on two quiet cores", 0
    ):
        pass
    pair = [("the model as it is", _checked(model, model, progress, "whole"))]
    if not pair[0][1].interrupted:
        with tempfile.TemporaryDirectory(prefix="assay-demo-") as folder:
            broken = damage_checkpoint(damage, model, Path(folder) / model.name)
            title = f"a broken copy: {DAMAGES[damage].description}"
            pair.append((title, _checked(broken, model, progress, "broken")))
    return _report([report for _, report in pair], damage), pair


def _require_packages() -> None:
    """The extra must be there before gigabytes are fetched for it."""
    missing = [name for name in ("torch", "transformers", "gguf") if find_spec(name) is None]
    if missing:
        raise AssayError(
            f"the demo needs packages that are not installed: {', '.join(missing)}",
            finding_id="server.missing_package",
            remedy=install("demo"),
        )


def _checked(model: Path, reference: Path, progress: Progress, which: str) -> Report:
    def named(what: str, steps: int) -> Any:
        return progress(f"{which}: {what}", steps)

    with contextlib.ExitStack() as stack:
        begun = time.monotonic()
        with named("starting vLLM (about 45 s)", 1) as advance:
            server = stack.enter_context(vllm_server(model, name=model.name))
            advance()
        budget = max(BUDGET_S, STARTS * (time.monotonic() - begun)) / 60
        options = CheckOptions(**PLAN, budget=budget, reference_engine=f"hf:{reference}")
        return run_check(server.url, options, named)


def _report(reports: Sequence[Report], damage: str) -> Report:
    """The report on the demo itself: it holds if the whole model passed and the damaged copy
    failed.
    """
    interrupted = any(report.interrupted for report in reports)
    verdicts = [report.verdict for report in reports]
    told_apart = verdicts == [Verdict.PASS, Verdict.FAIL]
    results = {
        which: report.to_json()["results"]["throughput"] | {"verdict": report.verdict.value}
        for which, report in zip(("whole", "broken"), reports, strict=False)
    }
    verdict, summary = Verdict.PASS, "The model as it is passed, and the broken copy failed."
    findings: tuple[Finding, ...] = ()
    if interrupted and not told_apart:
        verdict, findings = (
            Verdict.INCONCLUSIVE,
            (
                Finding(
                    "coherence.interrupted",
                    Severity.WARNING,
                    "interrupted: what was measured until then is shown",
                ),
            ),
        )
    elif not told_apart:
        said = " and ".join(v.value for v in verdicts)
        verdict, findings = (
            Verdict.FAIL,
            (
                Finding(
                    "coherence.demo",
                    Severity.ERROR,
                    f"the demo expected pass and fail, and got {said}",
                ),
            ),
        )
    return Report(
        command="demo",
        verdict=verdict,
        subject={
            "engine": reports[0].subject.get("server"),
            "model": reports[0].subject.get("model"),
        },
        findings=findings,
        results={**results, "damage": damage},
        summary=summary if told_apart else "",
        interrupted=interrupted,
    )
