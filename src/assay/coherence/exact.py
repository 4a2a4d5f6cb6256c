"""`assay check --identity` and `--determinism`: ask for tokens instead of texts."""

from __future__ import annotations

from typing import Any

from assay.coherence.determinism import (
    determinism_metric,
    determinism_table,
    findings_of,
    measure_determinism,
)
from assay.coherence.fingerprint import read_fingerprint, write_fingerprint
from assay.coherence.identity import (
    VERDICTS,
    compare_fingerprints,
    finding_of,
    fingerprint_counts,
    identity_metric,
    identity_table,
)
from assay.coherence.options import CheckOptions
from assay.coherence.take_fingerprint import take_fingerprint
from assay.engines.server.engine import ServerEngine
from assay.progress import Progress
from assay.verdict import Block, Finding, Metric, Report, Verdict, worst


def run_exact(url: str, options: CheckOptions, progress: Progress) -> Report:
    """The report of `--identity`, `--identity-out` and `--determinism`, which ask for tokens and
    not for texts.
    """
    reference = read_fingerprint(options.identity) if options.identity else None
    if options.identity_out and not options.identity_out.parent.is_dir():
        raise options.usage(
            f"--identity-out {options.identity_out}: its folder does not exist", "make it first"
        )
    verdicts, findings, headline, blocks = (
        [Verdict.PASS],
        list[Finding](),
        list[Metric](),
        list[Block](),
    )
    results: dict[str, Any] = {"probes": [], "throughput": {"valid": False, "samples": 0}}
    summary = "the same requests give the same answers, up to rounding."
    with ServerEngine.connect(
        url, options.model, api_key_env=options.api_key_env, timeout=options.timeout
    ) as engine:
        subject = engine.describe()
        if reference or options.identity_out:
            found = take_fingerprint(engine, progress, noise=options.identity_out is not None)
            if options.identity_out:
                write_fingerprint(found, options.identity_out)
                items, listed, scores = fingerprint_counts(found)
                summary = (
                    f"the reference holds {items} tokens, {listed} with probabilities, and {scores}"
                    " scores."
                )
                results["identity_reference"] = {
                    "items": items,
                    "with_probabilities": listed,
                    "scores": scores,
                }
            if reference:
                answer = compare_fingerprints(reference, found)
                results["identity"] = answer.to_json()
                verdicts.append(VERDICTS[answer.decision])
                findings.append(finding_of(answer))
                headline.append(identity_metric(answer))
                blocks.append(identity_table(answer))
                summary = findings[-1].title + "."
        if options.determinism:
            levels = measure_determinism(engine, progress)
            results["determinism"] = levels.to_json()
            verdicts.append(levels.verdict)
            findings += findings_of(levels)
            headline.append(determinism_metric(levels))
            blocks.append(determinism_table(levels))
    verdict = worst(verdicts)
    return Report(
        command="check",
        verdict=verdict,
        subject=subject,
        findings=tuple(findings),
        results=results,
        headline=tuple(headline),
        blocks=tuple(blocks),
        summary=summary if verdict is Verdict.PASS else "",
    )
