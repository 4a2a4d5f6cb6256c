"""`assay doctor --lint`: what is known to break about a command and its checkpoint, without a
launch.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from assay.errors import AssayError
from assay.serving.command import ServeCommand, table_notice
from assay.verdict import Finding, Report, Severity, Table, Verdict


def serve_arguments(command: ServeCommand) -> str:
    """The options of a `vllm serve` command as `assay verify --serve-args` takes them."""
    words = [*command.fixed, *(w for s in command.settings for w in s.words)]
    variables = [
        f"{n}={shlex.quote(v)}"
        for n, v in command.variables([s.name for s in command.settings]).items()
    ]
    return " ".join([*variables, shlex.join(words)])


def serving_rules(command: ServeCommand, version: str | None) -> list[Finding]:
    """What verify's serving rules say of the command; nothing for other engines, or where the model
    is not here.
    """
    model = Path(command.model).expanduser() if command.model else None
    if command.engine != "vllm" or model is None or not model.exists():
        return []
    from assay.checkpoint.options import VerifyOptions
    from assay.checkpoint.verify import verify

    options = VerifyOptions(
        hashing="none",
        serve_args=serve_arguments(command),
        engine_version=version,
        allow_unverified=True,
    )
    return [f for f in verify(str(model), options).findings if f.severity is not Severity.INFO]


def run_lint(command: ServeCommand, version: str | None) -> Report:
    """The report of `--lint`: pass, or fail where the rules find an error; inconclusive where there
    is no table.
    """
    number = version.partition("==")[2] if version else None
    notice = table_notice(command, number)
    findings: list[Finding] = []
    try:
        findings += serving_rules(command, version)
    except AssayError as error:
        findings.append(error.to_finding())
    if notice:
        findings.append(Finding("server.no_table", Severity.WARNING, notice))
    model = Path(command.model).expanduser() if command.model else None
    if command.engine == "vllm" and (model is None or not model.exists()):
        findings.append(
            Finding(
                "server.not_examined",
                Severity.INFO,
                f"the checkpoint {command.model or ''} is not a folder here: only the command was"
                " read",
                remedies=("name a folder, or run assay verify hub:ORG/NAME --serve-args '…'",),
            )
        )
    rows = [(s.name, s.value or "", s.safe_value, s.safe.reason) for s in command.settings]
    examined = command.engine == "vllm" and model is not None and model.exists()
    bad = any(f.severity is Severity.ERROR for f in findings)
    verdict = Verdict.FAIL if bad else Verdict.PASS if examined else Verdict.INCONCLUSIVE
    settings = [
        {
            "name": s.name,
            "value": s.value,
            "safe_value": s.safe_value,
            "role": "undecided",
            "engaged": None,
            "evidence": s.safe.reason,
        }
        for s in command.settings
    ]
    return Report(
        command="doctor",
        verdict=verdict,
        subject={"command": command.text(frozenset(s.name for s in command.settings))},
        findings=findings,
        results={
            "lint": True,
            "engine": command.engine,
            "settings": settings,
            "guilty": [],
            "launches": 0,
            "minutes": 0.0,
            "baseline": {"command": command.text(frozenset()), "verdict": None},
            "given": {
                "command": command.text(frozenset(s.name for s in command.settings)),
                "verdict": None,
            },
            "best": None,
        },
        blocks=(
            Table(
                "Settings that differ from the baseline",
                ("setting", "value", "baseline", "why"),
                rows,
            ),
        ),
        summary=(
            ""
            if bad or not examined
            else "No rule knows a fault of this command with this checkpoint."
        ),
    )
