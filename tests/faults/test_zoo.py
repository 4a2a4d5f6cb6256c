from __future__ import annotations

from pathlib import Path

import pytest

from assay.checkpoint.options import VerifyOptions
from assay.checkpoint.verify import verify
from assay.verdict import Severity, Verdict
from faults.zoo import FAULTS, Fault, healthy


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_a_fault_raises_its_finding(fault: Fault, tmp_path: Path) -> None:
    folder, listing = tmp_path / "model", tmp_path / "manifest.json"
    fault.make(folder)
    if fault.manifest:
        verify(str(folder), VerifyOptions(write_manifest=listing, digest_cache=False))
    fault.damage(folder)
    options = VerifyOptions(
        manifest=listing if fault.manifest else None,
        allow_unverified=True,
        digest_cache=False,
        **fault.options,
    )
    report = verify(str(folder), options)
    raised = {(f.id, f.severity.value) for f in report.findings}
    assert (f"checkpoint.{fault.finding}", fault.severity) in raised
    assert report.verdict is (Verdict.FAIL if fault.severity == "error" else Verdict.PASS)
    report.to_json()


@pytest.mark.parametrize("kind", list(healthy()))
def test_a_healthy_checkpoint_raises_nothing(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    healthy()[kind](folder)
    report = verify(
        str(folder), VerifyOptions(values=True, allow_unverified=True, digest_cache=False)
    )
    assert [f.title for f in report.findings if f.id != "checkpoint.unverified"] == []
    assert report.verdict is Verdict.PASS
    assert all(f.severity is not Severity.ERROR for f in report.findings)


def test_the_zoo_is_as_large_as_promised() -> None:
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 40
    assert len(healthy()) >= 15
