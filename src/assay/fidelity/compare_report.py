"""The report of a comparison: what was measured, what was left out, what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from assay.environment import describe
from assay.fidelity.control import Control, control_findings, control_metrics, controlled
from assay.fidelity.findings import findings_of
from assay.fidelity.margin_tests import margin_tests
from assay.fidelity.memory import Memory
from assay.fidelity.names import printable
from assay.fidelity.pairs import all_pairs
from assay.fidelity.plan import Plan
from assay.fidelity.reference import Reference
from assay.fidelity.report import blocks, headline
from assay.fidelity.result import CandidateResult, verdict_of
from assay.fidelity.run import Run
from assay.progress import span
from assay.runs import read_value
from assay.verdict import Finding, Metric, Report, Severity, Verdict, worst


def unfinished(run: Run, done: int) -> Report:
    """The report of a run that was interrupted while its reference was scored: `done` windows of it
    are kept.
    """
    size = read_value(run.folder / "size.json")
    total = size[0] if size else run.plan.windows
    left = run.budget.expected.get("reference", 0.0) * (total - done) / total
    after = f", about {span(left)} before the candidates" if left else ""
    return Report(
        command="compare",
        verdict=Verdict.INCONCLUSIVE,
        subject=_names(run.plan),
        findings=[
            Finding(
                "fidelity.interrupted",
                Severity.INFO,
                f"interrupted while the reference was scored: {done} of {total} passages are kept, "
                f"the same command goes on from there{after}",
                evidence={"passages": done, "of": total},
            )
        ],
        results={
            "candidates": [],
            "plan_sha256": run.plan.sha256,
            "scored": {"reference": done, "of": total},
            **run.budget.results(),
        },
        environment=describe(),
        headline=[Metric("reference", f"{done} of {total} passages scored, no candidate yet")],
        interrupted=True,
        summary="nothing is compared yet",
    )


def report(
    run: Run,
    reference: Reference,
    results: Sequence[CandidateResult],
    failed: Sequence[Finding] = (),
    interrupted: bool = False,
    memory: Memory | None = None,
) -> Report:
    """The report of a comparison.

    Args:
        run: The comparison.
        reference: Its reference.
        results: What was measured, a result a side.
        failed: The findings of the sides that could not be compared.
        interrupted: Whether the run ended before its time.
        memory: The memory that it was expected to take.
    """
    plan = run.plan
    missing = len(results) + len(failed) < len(run.sides)
    results, against = controlled(results, plan)
    verdicts = [verdict_of(r, plan.allow_marginal) for r in results] + [Verdict.ERROR] * len(failed)
    if missing or interrupted:  # half a run cannot acquit
        verdicts.append(Verdict.INCONCLUSIVE)
    verdicts += [found.verdict for found in against.values()]
    tests = margin_tests([r.summary for r in results], plan)
    pairs = all_pairs(results)
    bodies = [
        r.to_json()
        | {"margins": [t.to_json() for t in t_of]}
        | ({"control": against[r.label].to_json()} if r.label in against else {})
        for r, t_of in zip(results, tests, strict=True)
    ]
    own = shared_results(plan, reference)
    shared = {
        **own,
        "chars_per_token": own["text"].get("characters_per_token"),
        "seed": plan.seed,
        "memory": memory.to_json() if memory else None,
        **run.budget.results(),
        "candidates": bodies,
        "pairs": [pair.to_json() for pair in pairs],
    }
    # The figures of a single candidate are at the top level as well.
    body = bodies[0] if run.single and bodies else {}
    names = _names(plan)
    return Report(
        command="compare",
        verdict=worst(verdicts or [Verdict.INCONCLUSIVE]),
        subject={
            **names,
            "text": own["text"]["sources"],
            "plan": (
                plan.facts()
                | {"candidates": names["candidates"], "control": printable(plan.control)}
            ),
        },
        findings=[*failed, *_findings(run, reference, results, against, interrupted)],
        results=body | shared,
        environment=describe(),
        headline=[*headline(results), *control_metrics([*against.values()])] if results else (),
        blocks=blocks(results, plan, tests, pairs) if results else (),
        interrupted=interrupted,
    )


def _names(plan: Plan) -> dict[str, Any]:
    """The reference and the candidates as they may be printed."""
    return {
        "reference": plan.reference,
        "candidates": [printable(spec) for spec in plan.candidates],
    }


def _findings(
    run: Run,
    reference: Reference,
    results: Sequence[CandidateResult],
    against: Mapping[str, Control],
    interrupted: bool,
) -> list[Finding]:
    """What there is to say of the results and of the run, in this order."""
    plan = run.plan
    findings = [f for r in results for f in findings_of(r, plan.allow_marginal)]
    findings += run.budget.findings()
    findings += certain_findings(results, len(reference.windows))
    findings += [r.routing.finding(r.label) for r in results if r.routing]
    findings += control_findings([*against.values()])
    if interrupted:
        findings.append(
            Finding(
                "fidelity.interrupted",
                Severity.INFO,
                "interrupted: scored windows are kept, the same command goes on from there",
            )
        )
    if results:
        findings += implausible(reference.text_facts, results[0].summary.ppl_reference)
    if reference.text_facts["windows_available"] < plan.windows:
        findings.append(_fewer_windows(plan, reference))
    return findings


def shared_results(plan: Plan, reference: Reference) -> dict[str, Any]:
    """What `results` holds once for all candidates: against what, on which windows, by
    which plan.
    """
    how = {"length": plan.length, "path": plan.path, "scored": plan.scored}
    return {
        "reference": reference.facts,
        "text": {**reference.text_facts, **how},
        "plan_sha256": plan.sha256,
    }


def certain_findings(results: Sequence[CandidateResult], windows: int) -> list[Finding]:
    """Of which results further windows would not have changed the verdict."""
    title = "{}: the verdict was certain after {} of {} passages; --all scores all"
    return [
        Finding(
            "fidelity.certain", Severity.INFO, title.format(r.label, r.summary.windows, windows)
        )
        for r in results
        if r.certain
    ]


LEAST_CHARACTERS, MOST_PERPLEXITY = 2.0, 300.0


def implausible(text: Mapping[str, Any], ppl_reference: float) -> list[Finding]:
    """Signs that the tokenizer is not the model's: fewer than 2 characters a token in Latin text
    (English has 3 to 5), or a reference perplexity above 300."""
    found = []
    if text.get("latin") and text["characters_per_token"] < LEAST_CHARACTERS:
        found.append(f"the text has {text['characters_per_token']:.2f} characters a token")
    if ppl_reference > MOST_PERPLEXITY:
        found.append(f"the reference's perplexity is {ppl_reference:,.0f}")
    if not found:
        return []
    return [
        Finding(
            "fidelity.implausible_reference",
            Severity.WARNING,
            f"{' and '.join(found)}: is this the model's own tokenizer, and its kind of text?",
            "A comparison on text that the model cannot read says nothing about its use.",
            evidence={
                "characters_per_token": text.get("characters_per_token"),
                "ppl_reference": ppl_reference,
            },
            causes=(
                "a tokenizer that was converted without its merges splits text into characters",
                "the model needs a start token that its tokenizer does not put",
                "text of another kind or language than the model was trained on",
            ),
            remedies=(
                "compare the ids of a sentence with those of the original tokenizer",
                "give text of the model's own kind with --text",
            ),
        )
    ]


def _fewer_windows(plan: Plan, reference: Reference) -> Finding:
    return Finding(
        "fidelity.fewer_windows",
        Severity.WARNING,
        f"the text has {len(reference.windows)} windows of {plan.length:,} tokens, {plan.windows}"
        " were asked for",
        remedies=("give more text with --text, or a smaller --length",),
    )
