"""A pytest plug-in: a marker and a fixture that hold a deployment to its contract.

    @pytest.mark.assay_gate("assay.toml")
    def test_the_deployment_keeps_its_contract(): ...

A gate is run once a session for the same contract and options. A test fails unless the verdict is
pass: what is undecided or could not be examined is no pass. Nothing of assay is imported before a
test asks for a gate.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from assay.verdict import Report

MARKER = "assay_gate"
_LINES = 5
"""Findings that a failed test shows."""
_KEPT = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--assay-server`, and the contract that is meant where a test names none."""
    group = parser.getgroup("assay", "assay: hold a deployment to its contract")
    group.addoption(
        "--assay-server", metavar="URL", help="server to examine in place of the contract's"
    )
    group.addoption(
        "--assay-api-key-env",
        metavar="NAME",
        help="environment variable with the API key of --assay-server",
    )
    group.addoption("--assay-contract", metavar="FILE", help="contract of tests that name none")
    parser.addini("assay_contract", "contract of tests that name none", default="assay.toml")


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(contract, **options): run `assay gate` first; the test fails unless it passes",
    )


@pytest.fixture(scope="session")
def assay_gate(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`assay_gate(contract=None, **options)` runs a gate and gives its report; the options are
    those of `assay.gate`.
    """
    return lambda contract=None, **options: _run(request.config, contract, options)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Run the gate of a marked test before its body; the test fails unless the gate passes."""
    for mark in item.iter_markers(MARKER):
        contract, options = (mark.args[0] if mark.args else None), dict(mark.kwargs)
        if len(mark.args) > 1:
            pytest.fail(f"the marker {MARKER} takes one contract", pytrace=False)
        report = _run(item.config, options.pop("contract", contract), options)
        if report.exit_code:
            pytest.fail(_told(report), pytrace=False)


def _run(config: pytest.Config, contract: str | Path | None, options: dict[str, Any]) -> Report:
    """The report of a gate, kept for the session. An AssayError fails the test in one line."""
    from assay.errors import AssayError
    from assay.gates.gate import GateOptions, run_gate

    named = contract or config.getoption("--assay-contract") or config.getini("assay_contract")
    path = config.rootpath / named
    if server := config.getoption("--assay-server"):
        options.setdefault("server", server)
    if key := config.getoption("--assay-api-key-env"):
        options.setdefault("api_key_env", key)
    kept = config.stash.setdefault(_KEPT, {})
    run = repr((path, sorted(options.items())))
    if run not in kept:
        try:
            kept[run] = run_gate(GateOptions.of({"contract": path, **options}))
        except AssayError as error:
            kept[run] = error
    found = kept[run]
    if isinstance(found, AssayError):
        pytest.fail(
            f"assay gate: {found.message}" + (f" ({found.remedy})" if found.remedy else ""),
            pytrace=False,
        )
    report: Report = found
    return report


def _told(report: Report) -> str:
    """The verdict, and the gravest findings each with what to do."""
    from assay.report.text import VERDICTS, one_line, sentence

    lines = [f"assay gate: {VERDICTS[report.verdict].word}: {sentence(report)}"]
    ranked = sorted(
        report.findings, key=lambda f: ("error", "warning", "info").index(f.severity.value)
    )
    for finding in ranked[:_LINES]:
        lines.append(f"  {finding.severity.value}: {one_line(finding.title)}")
        lines += [f"    {one_line(remedy)}" for remedy in finding.remedies[:1]]
    if len(ranked) > _LINES:
        lines.append(f"  and {len(ranked) - _LINES} more findings")
    return "\n".join(lines)
