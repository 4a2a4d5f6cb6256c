"""`assay compare`: score a reference and its candidates on the same tokens, and judge each."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from assay.engines.ray_scorer import on_ray
from assay.engines.scoring import ROOM_FACTS, Engagement, ScoringPath
from assay.engines.server.candidate import ServerCandidate
from assay.engines.specs import check_spec, is_server, open_candidate
from assay.engines.threads import begin_run, interrupt_run
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.breakdown.bins import by_class, by_confidence, by_depth, worst_tokens
from assay.fidelity.breakdown.floors import Floors
from assay.fidelity.breakdown.greedy import compare_greedy, continue_greedily
from assay.fidelity.breakdown.token_class import token_class
from assay.fidelity.budget import Budget
from assay.fidelity.control import control_findings, control_metrics, controlled
from assay.fidelity.engaged import Engaged, engaged
from assay.fidelity.findings import findings_of
from assay.fidelity.margin_tests import margin_tests
from assay.fidelity.memory import Memory, estimate_memory
from assay.fidelity.names import fingerprint, label_of, printable
from assay.fidelity.observation import WindowObservation, on_disk, size_of
from assay.fidelity.pairs import all_pairs
from assay.fidelity.plan import QUICK_MINUTES, Plan
from assay.fidelity.power import power_of
from assay.fidelity.reference import Reference, open_reference, windows_kept
from assay.fidelity.report import blocks, headline
from assay.fidelity.result import CandidateResult, verdict_of
from assay.fidelity.routing import check_engines, measure_routing
from assay.fidelity.score import Candidate, observe, require
from assay.fidelity.summary import Summary, is_certain, margins_of, per_window, summarise
from assay.fidelity.table.rows import RowFile
from assay.fidelity.text.tokenizer_proof import prove_tokenizer
from assay.files import read_json
from assay.progress import NO_PROGRESS, Progress, span
from assay.runs import Kept, RunLock, cache_dir, cache_path, read_value
from assay.stats import Resampling
from assay.stats.multiplicity import confidence_of_analysis
from assay.stats.resolution import MIN_PILOT
from assay.verdict import Finding, Metric, Report, Severity, Verdict, worst

Say = Callable[[str], None]
"""Told one line of text that a person may want to read while the run goes on."""
Decode = Callable[[Sequence[int]], str]

FIRST_LOOK = 16
"""Windows after which the verdict is looked at for the first time, then after twice as many, and so
on.
"""
IN_MEMORY = 256 << 20
"""Bytes of the figures of its tokens that a candidate keeps in memory while others are scored; more
goes to the disk.
"""


@on_ray
def run_compare(
    plan: Plan,
    progress: Progress = NO_PROGRESS,
    *,
    say: Say = lambda line: None,
    on_result: Callable[[str, CandidateResult], Any] = lambda spec, result: None,
) -> Report:
    """Compare every candidate of the plan with its reference; `on_result` is told its spec and its
    result as it is measured.

    Scored windows are kept in the cache until the run ends, so an interrupted one goes on where it
    stopped; with `plan.keep` they stay. Interrupted, the report holds what was measured. Of several
    candidates one that cannot be compared is a finding beside the results of the others.
    """
    for spec in plan.sides:
        check_spec(spec, ScoringPath(plan.path))
    if plan.routing:
        check_engines((plan.reference, *plan.sides), plan.ray)
    memory = estimate_memory(plan, progress)
    budget = Budget.of(plan.budget, plan.quick, QUICK_MINUTES)
    with RowFile(plan.rows) if plan.rows else nullcontext() as rows, RunLock() as lock:
        folder = lock.folder(cache_dir("compare") / (key := plan_key(plan)))
        begin_run(key)
        servers = _servers(plan)
        results: list[CandidateResult] = []
        failed: list[Finding] = []
        interrupted = False
        reference = None
        try:
            try:
                with budget.limit():
                    reference = open_reference(plan, folder, progress, budget)
            except KeyboardInterrupt:
                if not (done := windows_kept(folder)):
                    raise
                interrupt_run()
                return unfinished(plan, folder, done, budget)
            plan = reference.plan or plan
            for number, spec in enumerate(plan.sides):
                label = label_of(spec, plan.sides)
                share = budget.left() / (len(plan.sides) - number)
                if share <= 0:
                    budget.leave_out(label, f"anything about {label}")
                    continue
                try:
                    with budget.stage(label):
                        with budget.limit():
                            engine = servers.pop(spec, None) or open_candidate(spec)
                        result, cut = _candidate(
                            plan, reference, spec, engine, folder, progress, say, budget, share
                        )
                except AssayError as error:
                    if len(plan.candidates) == 1:
                        raise
                    failed.append(_not_compared(error, label_of(spec, plan.sides)))
                    continue
                except KeyboardInterrupt:  # while it was opened; `_candidate` shows what it has
                    interrupted = True
                    break
                if result:
                    if rows:
                        body = {
                            "candidate": result.label,
                            "per_window": per_window(result.seen, result.blocks),
                        }
                        rows.add(shared_results(plan, reference) | {"candidates": [body]})
                    if len(plan.sides) > 1 and size_of(result.seen) > IN_MEMORY:
                        result = replace(result, seen=on_disk(result.seen, folder))
                    results.append(result)
                    on_result(spec, result)
                if cut:
                    interrupted = True
                    break
            if not interrupted and results:
                try:
                    with budget.limit():
                        results = _with_floors(results, reference, budget)
                except KeyboardInterrupt:
                    interrupted = True
        finally:
            for opened in (reference, *servers.values()):
                if opened:
                    opened.close()
        if interrupted:
            interrupt_run()
        if not (
            interrupted
            or plan.keep
            or failed
            or any("passages" in i["unknown"] for i in budget.left_out)
        ):
            shutil.rmtree(folder, ignore_errors=True)
    return report(
        plan, reference, results, failed, interrupted=interrupted, budget=budget, memory=memory
    )


def _with_floors(
    results: Sequence[CandidateResult], reference: Reference, budget: Budget
) -> list[CandidateResult]:
    """The results with the floors, where these were left for later and there is time for them."""
    if reference.floors_later is None:
        return list(results)
    seconds, measure = reference.floors_later
    if seconds > budget.left():
        budget.leave_out("the floors", "whether a small KL is more than rounding would give")
        return list(results)
    with budget.stage("floors"):
        floors = measure()
    return [replace(result, floors=floors) for result in results]


def unfinished(plan: Plan, folder: Path, done: int, budget: Budget) -> Report:
    """The report of a run that was interrupted while its reference was scored: `done` windows of it
    are kept.
    """
    size = read_value(folder / "size.json")
    total = size[0] if size else plan.windows
    left = budget.expected.get("reference", 0.0) * (total - done) / total
    after = f", about {span(left)} before the candidates" if left else ""
    return Report(
        command="compare",
        verdict=Verdict.INCONCLUSIVE,
        subject={
            "reference": plan.reference,
            "candidates": [printable(spec) for spec in plan.candidates],
        },
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
            "plan_sha256": plan.sha256,
            "scored": {"reference": done, "of": total},
            **budget.results(),
        },
        environment=describe(),
        headline=[Metric("reference", f"{done} of {total} passages scored, no candidate yet")],
        interrupted=True,
        summary="nothing is compared yet",
    )


def _not_compared(error: AssayError, label: str) -> Finding:
    """The finding of one candidate of several that could not be compared."""
    found = error.to_finding()
    title = found.title if label in found.title else f"{label}: {found.title}"
    return replace(
        found, title=title, severity=Severity.ERROR, evidence={**found.evidence, "candidate": label}
    )


def _servers(plan: Plan) -> dict[str, Candidate]:
    """The servers among the candidates, open; AssayError for one that cannot be compared, before
    anything is scored.
    """
    servers: dict[str, Candidate] = {}
    try:
        for spec in dict.fromkeys(filter(is_server, plan.sides)):
            servers[spec] = open_candidate(spec)
            require(servers[spec], plan.job, plan.length)
    except BaseException:
        for opened in servers.values():
            opened.close()
        raise
    return servers


class Looks:
    """How often a candidate was judged on fewer of the same windows and left undecided.

    Who extends a run until it is decided looks several times, and every look can err: see
    `confidence_of_analysis`.
    """

    def __init__(self, plan: Plan, spec: str, windows: int) -> None:
        same = (
            plan.path,
            plan.scored,
            str(plan.length),
            *map(fingerprint, (plan.reference, spec, *plan.text)),
        )
        self._kept, self._key = Kept(cache_path("looks")), ["undecided", *same]
        self._windows = windows
        found = self._kept.get(self._key)
        self._undecided: set[int] = set(_counts_of_0_2(same) if found is None else found)

    @property
    def number(self) -> int:
        """Which look this one is, from 1."""
        return 1 + sum(count < self._windows for count in self._undecided)

    def record(self, summary: Summary) -> None:
        """Remember that so many windows left the candidate undecided."""
        if summary.judgement.aim is not None:
            self._kept.put(self._key, sorted(self._undecided | {self._windows}))


def _counts_of_0_2(same: Sequence[str]) -> list[int]:
    """What assay 0.2.0 has kept of it; nothing where that file cannot be read."""
    name = f"{sha256(chr(10).join(same).encode()).hexdigest()[:32]}.json"
    try:
        found = read_json(cache_path("looks") / name)
    except AssayError:
        return []
    counts = found if isinstance(found, list) else []
    return [count for count in counts if isinstance(count, int) and not isinstance(count, bool)]


def plan_key(plan: Plan) -> str:
    """Name of the folder of a run: the plan, and the state of the files that it names."""
    parts = [
        plan.sha256,
        *(fingerprint(spec) for spec in (plan.reference, *plan.sides, *plan.text)),
    ]
    return sha256("\n".join(parts).encode()).hexdigest()[:32]


def report(
    plan: Plan,
    reference: Reference,
    results: Sequence[CandidateResult],
    failed: Sequence[Finding] = (),
    *,
    interrupted: bool,
    budget: Budget | None = None,
    memory: Memory | None = None,
) -> Report:
    """The report of what was measured, and of the candidates that could not be compared (`failed`)."""
    budget = budget or Budget()
    missing = len(results) + len(failed) < len(plan.sides)
    results, against = controlled(results, plan)
    findings = [*failed, *(f for r in results for f in findings_of(r, plan.allow_marginal))]
    findings += budget.findings()
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
    verdicts = [verdict_of(r, plan.allow_marginal) for r in results] + [Verdict.ERROR] * len(failed)
    if missing or interrupted:  # half a run cannot acquit
        verdicts.append(Verdict.INCONCLUSIVE)
    verdicts += [found.verdict for found in against.values()]
    verdict = worst(verdicts or [Verdict.INCONCLUSIVE])
    tests = margin_tests([r.summary for r in results], plan)
    bodies = [
        r.to_json()
        | {"margins": [t.to_json() for t in t_of]}
        | ({"control": against[r.label].to_json()} if r.label in against else {})
        for r, t_of in zip(results, tests, strict=True)
    ]
    pairs = all_pairs(results)
    own = shared_results(plan, reference)
    text = own["text"]
    if results:
        findings += implausible(reference.text_facts, results[0].summary.ppl_reference)
    if reference.text_facts["windows_available"] < plan.windows:
        findings.append(_fewer_windows(plan, reference))
    shared = {
        **own,
        "chars_per_token": text.get("characters_per_token"),
        "seed": plan.seed,
        "memory": memory.to_json() if memory else None,
        **budget.results(),
        "candidates": bodies,
        "pairs": [pair.to_json() for pair in pairs],
    }
    # Of one candidate its figures stand at the top as well.
    body = bodies[0] if len(plan.candidates) == 1 and bodies else {}
    return Report(
        command="compare",
        verdict=verdict,
        subject={
            "reference": plan.reference,
            "candidates": [printable(spec) for spec in plan.candidates],
            "text": text["sources"],
            "plan": (
                plan.facts()
                | {
                    "candidates": [printable(spec) for spec in plan.candidates],
                    "control": printable(plan.control),
                }
            ),
        },
        findings=findings,
        results=body | shared,
        environment=describe(),
        headline=[*headline(results), *control_metrics([*against.values()])] if results else (),
        blocks=blocks(results, plan, tests, pairs) if results else (),
        interrupted=interrupted,
    )


def shared_results(plan: Plan, reference: Reference) -> dict[str, Any]:
    """What `results` holds once for all candidates: against what, on which windows, by which plan."""
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


def _candidate(
    plan: Plan,
    reference: Reference,
    spec: str,
    engine: Candidate,
    folder: Path,
    progress: Progress,
    say: Say,
    budget: Budget,
    share: float,
) -> tuple[CandidateResult | None, bool]:
    """One candidate, which is closed then, and whether the run was interrupted in the middle of it.

    `share` are the seconds that it may take. It ends early once its verdict is certain (`--all`:
    never).
    """
    label = label_of(spec, plan.sides)
    seen: list[WindowObservation] = []
    margins = margins_of(plan)
    cut = certain = False
    began, look, total = time.monotonic(), FIRST_LOOK, len(reference.windows)

    def left() -> float:
        return began + share - time.monotonic()

    def enough() -> bool:
        nonlocal certain, look
        if not (plan.all or plan.control) and look <= len(seen) < total:
            look = 2 * len(seen)
            certain = is_certain(seen, margins, reference.blocks(len(seen)))
        return certain or left() <= 0

    def on_window(found: WindowObservation) -> None:
        seen.append(found)
        if len(seen) == MIN_PILOT and (power := power_of(seen, plan, len(reference.windows))):
            say(f"{label}: {power}")

    try:
        facts = engine.describe()
        kept = folder / f"candidate-{plan.sides.index(spec):02d}"
        if isinstance(engine, ServerCandidate):
            proof = prove_tokenizer(engine, reference.probe_ids, reference.windows, label)
            facts["tokenizer"] = proof.to_json()
        else:
            reference.check(engine.tokenizer, label)
            reference.find_head(engine)
            if reference.routing:
                reference.routing.check(engine, label)
        # When an interrupted run goes on, another server may answer at the same address, another
        # machine, or another vLLM in an environment of its own, may score.
        steady = {name: value for name, value in facts.items() if name not in ROOM_FACTS}
        who = (
            facts
            if isinstance(engine, ServerCandidate)
            else {**describe(), "cpu_count": None, "engine": steady}
        )
        kept = kept.with_name(
            f"{kept.name}-{sha256(repr(sorted(who.items())).encode()).hexdigest()[:16]}"
        )
        kept.mkdir(parents=True, exist_ok=True)
        with progress(f"scoring {label}", len(reference.windows)) as advance:
            try:
                with budget.limit():
                    observe(
                        reference.rows,
                        engine,
                        reference.windows,
                        plan.job,
                        kept=Kept(kept),
                        on_window=on_window,
                        advance=advance,
                        enough=enough,
                        left=left,
                    )
            except KeyboardInterrupt:
                cut = True
        if not cut and not certain and len(seen) < total:
            budget.leave_out(
                f"{total - len(seen)} of {total} passages of {label}",
                "differences that fewer passages cannot resolve",
            )
        if not seen:
            return None, cut
        looks, blocks = Looks(plan, spec, len(seen)), reference.blocks(len(seen))
        if cut:  # batches that were kept may lie anywhere
            blocks = reference.blocks(total)
        same = reference.is_same(spec, facts)
        took_part = engaged(
            seen,
            Engagement() if isinstance(engine, ServerCandidate) else engine.engagement(),
            path=ScoringPath(plan.path),
            hooked=False,
            same=same or cut,
            label=label,
        )
        # The engine stays open until here: its tokenizer says what tokens are.
        decode = _texts(engine, seen, cut)
        result = assess(
            plan,
            reference.floors,
            decode,
            seen,
            label,
            took_part,
            {**facts, **engine.describe()},
            blocks=blocks,
            confidence=confidence_of_analysis(looks.number),
            self_test=same,
        )
        if not cut:
            looks.record(result.summary)
        result = replace(result, power=power_of(seen, plan, len(seen)), certain=certain)
        if plan.greedy and not cut:
            continued = continue_greedily(
                engine, reference.windows, plan.greedy, kept / "greedy.json"
            )
            texts = (lambda token: decode([token])) if decode else str
            greedy = compare_greedy(
                reference.greedy, continued, reference.windows, plan.greedy, texts
            )
            result = replace(result, greedy=greedy)
        if reference.routing and not (cut or isinstance(engine, ServerCandidate)):
            scored = [reference.windows[w.index] for w in seen]
            told = progress if reference.routing.layers else NO_PROGRESS
            with told(f"routing of {label}", len(scored)) as advance:
                routing = measure_routing(
                    engine,
                    reference.routing,
                    reference.rows,
                    seen,
                    scored,
                    plan.job,
                    blocks,
                    advance,
                )
            result = replace(result, routing=routing)
        return result, cut
    finally:
        engine.close()


def _texts(engine: Candidate, seen: Sequence[WindowObservation], cut: bool) -> Decode | None:
    """What turns ids into text, None where nothing can.

    A server is asked for the tokens of the windows in advance, but not when somebody waits for an
    interrupted run to end; a worker has ended with the interrupt.
    """
    ids = [int(i) for i in np.unique(np.concatenate([w.tokens for w in seen]))]
    if isinstance(engine, ServerCandidate):
        return engine.decode if not cut and engine.read_texts(ids) else None
    try:
        engine.tokenizer.decode(ids[:1])
    except AssayError:
        if not cut:
            raise
        return None
    return engine.tokenizer.decode


def assess(
    plan: Plan,
    floors: Floors,
    decode: Decode | None,
    seen: Sequence[WindowObservation],
    label: str,
    took_part: Engaged,
    facts: dict[str, Any],
    *,
    blocks: Sequence[int] | None = None,
    confidence: float = 0.95,
    self_test: bool,
) -> CandidateResult:
    """Figures, breakdowns and floors of what was seen. AssayError where not one token is finite.

    Without `decode` nobody knows the texts of tokens: there is no breakdown by kind, and tokens
    stand as their ids.
    """
    if not any(w.finite.any() for w in seen):
        raise AssayError(
            f"{label}: the logits of all {sum(w.kl.size for w in seen):,} tokens are not finite",
            finding_id="fidelity.nonfinite",
            remedy=(
                "look for NaN in the checkpoint (assay verify --values) or score in a wider type"
                " (?dtype=float32)"
            ),
        )
    return CandidateResult(
        label=label,
        summary=summarise(
            seen,
            margins_of(plan),
            Resampling(plan.draws, plan.seed),
            blocks=blocks,
            confidence=confidence,
        ),
        engaged=took_part,
        seen=seen,
        blocks=blocks,
        self_test=self_test,
        engine=facts,
        breakdowns={
            "depth": by_depth(seen),
            "confidence": by_confidence(seen),
            "class": by_class(seen, lambda token: token_class(decode([token]))) if decode else [],
        },
        worst=worst_tokens(seen, decode or (lambda ids: " ".join(map(str, ids)))),
        floors=floors,
    )
