"""The demo on the real thing: one server passes, its broken copy fails, nothing is left running."""

from __future__ import annotations

import subprocess

import pytest

from assay.demo.run import run_demo
from assay.verdict import Verdict

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_the_whole_model_passes_and_the_broken_copy_fails() -> None:
    report, pair = run_demo()
    (_, whole), (_, broken) = pair
    assert (whole.verdict, broken.verdict) == (Verdict.PASS, Verdict.FAIL)
    assert report.verdict is Verdict.PASS
    assert report.results["whole"]["valid"] is True
    assert report.results["broken"]["valid"] is False
    assert report.results["whole"]["decode_tokens_per_s"]["median"] > 0
    processes = subprocess.run(
        ["ps", "-eo", "args"], capture_output=True, text=True, check=True
    ).stdout
    assert "assay-demo-" not in processes
