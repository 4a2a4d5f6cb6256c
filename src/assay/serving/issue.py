"""A bug report in the form that engines ask for, made of a diagnosis."""

from __future__ import annotations

from assay.environment import VERSION, describe
from assay.serving.diagnosis import Diagnosis
from assay.serving.launch import gpus


def issue_text(found: Diagnosis) -> str:
    """A bug report in the form that engines ask for: environment, minimal command, what happens,
    what should.
    """
    facts, gpu = describe(), (gpus() or "none").replace("\n", "; ")
    minimal = {n for names in found.guilty for n in names} or found.all
    start = found.of(frozenset(minimal)) or found.of(found.all)
    says = (
        "\n".join(f"- {rule}: {text}" for rule, text in (start.seen.bad if start else {}).items())
        or "- nothing was found bad"
    )
    texts = [
        s.text_head
        for p in (start.observation.record.probes if start else ())
        for s in p.samples
        if s.degenerate
    ][:2]
    server = start.observation.facts if start else {}
    return "\n".join(
        [
            "### Your current environment",
            "",
            f"- {facts['platform']}, {facts['cpu']}, GPU: {gpu}",
            f"- engine: {found.command.engine} {server.get('version') or ''}".rstrip(),
            f"- Python {facts['python']}, "
            + ", ".join(f"{n} {v}" for n, v in facts["packages"].items()),
            "",
            "### Minimal command that fails",
            "",
            "```",
            found.command.text(frozenset(minimal)),
            "```",
            "",
            "### Command that works",
            "",
            "```",
            found.command.text(found.all - minimal),
            "```",
            "",
            "### What happens",
            "",
            says,
            *(["", "```text", *texts, "```"] if texts else []),
            "",
            (
                f"Found by assay {VERSION} doctor in {found.launches} launches; declared error rate"
                " of each decision 5 %."
            ),
        ]
    )
