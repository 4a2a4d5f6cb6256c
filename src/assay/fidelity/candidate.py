"""One candidate of a comparison: admitted, scored window by window, judged."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from assay.engines.scoring import ROOM_FACTS, Engagement, ScoringPath
from assay.engines.server.candidate import ServerCandidate
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.assess import Decode, Scores, assess
from assay.fidelity.breakdown.greedy import compare_greedy, continue_greedily
from assay.fidelity.engaged import engaged
from assay.fidelity.interim import InterimAnalyses
from assay.fidelity.observation import WindowObservation
from assay.fidelity.power import power_of
from assay.fidelity.reference import Reference
from assay.fidelity.result import CandidateResult
from assay.fidelity.routing import measure_routing
from assay.fidelity.run import Run, Side
from assay.fidelity.score import Candidate, observe
from assay.fidelity.summary import is_certain, margins_of
from assay.fidelity.text.tokenizer_proof import prove_tokenizer
from assay.progress import NO_PROGRESS
from assay.runs import Kept
from assay.stats.multiplicity import confidence_of_analysis
from assay.stats.resolution import MIN_PILOT

FIRST_ANALYSIS = 16
"""Windows after which the verdict is first looked at, then after twice as many, and so on."""


def compare_candidate(
    run: Run, reference: Reference, side: Side, engine: Candidate, seconds: float
) -> tuple[CandidateResult | None, bool]:
    """Compare one candidate with the reference, and close its engine.

    Args:
        run: The comparison.
        reference: Its reference, scored or scoring along.
        side: The candidate.
        engine: Its engine, open.
        seconds: The time that it may take.

    Returns:
        Its result, None where no window was scored, and whether the run was interrupted meanwhile.
    """
    try:
        facts = admit(engine, reference, side.label)
        found = _Scoring(run, reference, side, time.monotonic() + seconds)
        kept = _kept_folder(run.folder, side, engine, facts)
        with run.progress(f"scoring {side.label}", len(reference.windows)) as advance:

            def take(window: WindowObservation) -> None:
                found.add(window)
                advance()

            try:
                with run.budget.limit():
                    observe(
                        reference.rows,
                        engine,
                        reference.windows,
                        run.plan.job,
                        kept=Kept(kept),
                        on_window=take,
                        enough=found.enough,
                        left=found.left,
                    )
            except KeyboardInterrupt:
                found.cut = True
        found.note_what_is_left_out()
        if not found.seen:
            return None, found.cut
        result = _judged(found, engine, facts)
        if not found.cut:
            result = _with_more(result, found, engine, kept)
        return result, found.cut
    finally:
        engine.close()


def admit(engine: Candidate, reference: Reference, label: str) -> dict[str, Any]:
    """What the engine says of itself; AssayError where its tokens are not those of the
    reference.
    """
    facts = engine.describe()
    if isinstance(engine, ServerCandidate):
        proof = prove_tokenizer(engine, reference.probe_ids, reference.windows, label)
        return facts | {"tokenizer": proof.to_json()}
    reference.check(engine.tokenizer, label)
    reference.find_head(engine)
    if reference.routing:
        reference.routing.check(engine, label)
    return facts


def _kept_folder(folder: Path, side: Side, engine: Candidate, facts: Mapping[str, Any]) -> Path:
    """The folder of a candidate's scored windows.

    When an interrupted run goes on, another server may answer at the same address, another machine,
    or another vLLM in an environment of its own, may score: each has a folder of its own.
    """
    who = dict(facts)
    if not isinstance(engine, ServerCandidate):
        steady = {name: value for name, value in facts.items() if name not in ROOM_FACTS}
        who = {**describe(), "cpu_count": None, "engine": steady}
    digest = sha256(repr(sorted(who.items())).encode()).hexdigest()[:16]
    kept = folder / f"candidate-{side.number:02d}-{digest}"
    kept.mkdir(parents=True, exist_ok=True)
    return kept


@dataclass
class _Scoring:
    """The windows of a candidate as they are scored, and whether they are enough."""

    run: Run
    reference: Reference
    side: Side
    end: float
    """Monotonic time after which no window is begun."""
    seen: list[WindowObservation] = field(default_factory=list)
    cut: bool = False
    certain: bool = False
    """Whether no further window can be expected to change the verdict."""
    _next: int = field(default_factory=lambda: FIRST_ANALYSIS)

    @property
    def total(self) -> int:
        return len(self.reference.windows)

    def left(self) -> float:
        return self.end - time.monotonic()

    def add(self, found: WindowObservation) -> None:
        """Take one more window; tell what the run will resolve once there are enough to say."""
        self.seen.append(found)
        if len(self.seen) == MIN_PILOT:
            power = power_of(self.seen, self.run.plan, self.total)
            if power:
                self.run.say(f"{self.side.label}: {power}")

    def enough(self) -> bool:
        """Whether to stop: the verdict is certain (`--all`: never), or the time is over."""
        plan = self.run.plan
        if not (plan.all or plan.control) and self._next <= len(self.seen) < self.total:
            self._next = 2 * len(self.seen)
            blocks = self.reference.blocks(len(self.seen))
            self.certain = is_certain(self.seen, margins_of(plan), blocks)
        return self.certain or self.left() <= 0

    def note_what_is_left_out(self) -> None:
        if not self.cut and not self.certain and len(self.seen) < self.total:
            self.run.budget.leave_out(
                f"{self.total - len(self.seen)} of {self.total} passages of {self.side.label}",
                "differences that fewer passages cannot resolve",
            )

    @property
    def blocks(self) -> list[int]:
        """The cluster of each window; batches that were kept by a cut run may be any windows."""
        return self.reference.blocks(self.total if self.cut else len(self.seen))


def _judged(found: _Scoring, engine: Candidate, facts: Mapping[str, Any]) -> CandidateResult:
    """The result of what was seen, at the confidence of this interim analysis."""
    run, seen = found.run, found.seen
    analyses = InterimAnalyses(run.plan, found.side.spec, len(seen))
    same = found.reference.is_same(found.side.spec, facts)
    took_part = engaged(
        seen,
        Engagement() if isinstance(engine, ServerCandidate) else engine.engagement(),
        path=ScoringPath(run.plan.path),
        hooked=False,
        same=same or found.cut,
        label=found.side.label,
    )
    scores = Scores(
        found.side.label,
        seen,
        took_part,
        # The engine is open until here: its tokenizer says what tokens are.
        decode=_decoder(engine, seen, found.cut),
        engine={**facts, **engine.describe()},
        blocks=found.blocks,
        self_test=same,
    )
    confidence = confidence_of_analysis(analyses.number)
    result = assess(scores, run.plan, found.reference.floors, confidence=confidence)
    if not found.cut:
        analyses.record(result.summary)
    return replace(result, power=power_of(seen, run.plan, len(seen)), certain=found.certain)


def _with_more(
    result: CandidateResult, found: _Scoring, engine: Candidate, kept: Path
) -> CandidateResult:
    """The result with greedy continuations and routing, where the plan asks for them."""
    plan, reference = found.run.plan, found.reference
    if plan.greedy:
        decode = _decoder(engine, found.seen, found.cut)
        continued = continue_greedily(engine, reference.windows, plan.greedy, kept / "greedy.json")
        texts = (lambda token: decode([token])) if decode else str
        greedy = compare_greedy(reference.greedy, continued, reference.windows, plan.greedy, texts)
        result = replace(result, greedy=greedy)
    if reference.routing and not isinstance(engine, ServerCandidate):
        scored = [reference.windows[w.index] for w in found.seen]
        told = found.run.progress if reference.routing.layers else NO_PROGRESS
        with told(f"routing of {found.side.label}", len(scored)) as advance:
            routing = measure_routing(
                engine,
                reference.routing,
                reference.rows,
                found.seen,
                scored,
                plan.job,
                found.blocks,
                advance,
            )
        result = replace(result, routing=routing)
    return result


def _decoder(engine: Candidate, seen: Sequence[WindowObservation], cut: bool) -> Decode | None:
    """What turns ids into text, None where nothing can.

    A server is asked for the tokens of the windows in advance, but not when a user waits for an
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
