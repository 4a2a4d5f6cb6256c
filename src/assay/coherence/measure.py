"""Measure one side of a check, stage by stage, into its record.

What is measured stays, also when a stage is interrupted: a `Measurement` adds to its record answer
by answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from assay.coherence.conversation import Context, Outcome, Probe, generate_all, run_tasks
from assay.coherence.filler import filler
from assay.coherence.needs import check_need
from assay.coherence.options import Plan
from assay.coherence.passages import score_alone, score_in_context
from assay.coherence.probes import standard_probes
from assay.coherence.record import CheckRecord, NeedCheck, ProbeResult
from assay.coherence.replies import grade_outcome
from assay.coherence.speed import prefill_speed, time_round, timed_requests, to_timed_text
from assay.coherence.stages import FIRST, Stage
from assay.coherence.streams import STREAM_CASES, StreamingEngine, check_streams
from assay.coherence.tools import cases, run_level
from assay.engines import Capability, Engine
from assay.engines.server.errors import RequestRefused
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Verdict


@dataclass
class Measurement:
    """One side of a check, the server or the reference engine, and what has been measured of it so
    far.
    """

    engine: Engine
    plan: Plan
    max_model_len: int | None = None
    progress: Progress = NO_PROGRESS
    record: CheckRecord = field(default_factory=CheckRecord)
    fatal: AssayError | None = None
    """The first error that says that nothing can be examined."""

    @cached_property
    def chat(self) -> bool:
        """Whether the engine applies a chat template; otherwise it continues plain prompts."""
        return Capability.CHAT in self.engine.capabilities

    @cached_property
    def probes(self) -> tuple[Probe, ...]:
        """The probes of the plan that the engine can answer; the others are noted in the record as
        skipped.
        """
        counts = Capability.TOKENIZE in self.engine.capabilities
        probes = standard_probes(
            max_model_len=self.max_model_len,
            longest_needle=self.plan.longest_needle,
            streams=max(8, self.plan.concurrency),
            seed=self.plan.seed,
            count_tokens=(lambda text: len(self.engine.tokenize(text))) if counts else None,
        )
        wanted = [probe for probe in probes if not self.plan.only or probe.name in self.plan.only]
        self._add(
            probes=tuple(ProbeResult(p.name, p.title, skipped=self.skip_reason(p)) for p in wanted)
        )
        return tuple(probe for probe in wanted if self.skip_reason(probe) is None)

    def run(
        self, stage: Stage, what: str = "", deadline: float = float("inf"), *, untimed: bool = False
    ) -> None:
        """Measure one stage until `deadline`; raises only the errors after which asking on makes no
        sense.

        `what` is its name for the progress. `untimed`: the texts of the speed stage are written and
        not timed.
        """
        steps = {
            "texts": self._texts,
            "scores": self._scores,
            "tools": self._tools,
            "speed": self._speed,
            "streams": self._streams,
            "needs": self._needs,
        }
        step = self._timed_texts if untimed and stage.kind == "speed" else steps[stage.kind]
        step(stage, what or stage.name, deadline)

    def _texts(self, stage: Stage, what: str, deadline: float) -> None:
        """Run conversations; those of the first stage all at once, since they ask whether streams
        mix.
        """
        plan = self.plan
        context = Context(self.chat, token_budget=plan.token_budget, thinking=plan.thinking)
        parallel = len(stage.tasks) if stage.name == FIRST else plan.parallel
        with self.progress(what, len(stage.tasks)) as advance:

            def done(outcome: Outcome) -> None:
                self._keep(outcome)
                advance()

            run_tasks(
                self.engine,
                stage.tasks,
                context,
                parallel=parallel,
                on_done=done,
                deadline=deadline,
            )

    def _scores(self, stage: Stage, what: str, deadline: float) -> None:
        """Score the fixed texts, where the engine can score a prompt; in context, where it can
        count tokens too.
        """
        able = self.engine.capabilities
        if reason := able.reason(Capability.SCORE):
            self._add(passages_skipped=reason)
            return
        if stage.context and (Capability.TOKENIZE not in able or self.record.passages_failed):
            return
        alone = not stage.context
        scores = (
            score_alone(self.engine, stage.texts)
            if alone
            else score_in_context(self.engine, stage.context)
        )
        with (
            self.progress(what, stage.texts * (1 if alone else 2)) as advance,
            self._noting("passages"),
        ):
            for score in scores:
                self._add(passages=(score,))
                advance()
                if time.monotonic() > deadline:
                    return

    def _speed(self, stage: Stage, what: str, deadline: float) -> None:
        """Warm up once, then stream rounds of `concurrency` texts and grade what was timed."""
        able = self.engine.capabilities
        if reason := able.reason(Capability.STREAM):
            unfinished = Capability.STREAM in able.unfinished
            self._add(**{"timed_failed" if unfinished else "timed_skipped": reason})
            return
        plan, rounds = self.plan, stage.repeats + 1
        requests = timed_requests(rounds * plan.concurrency, plan.seed, self.chat)
        with self.progress(what, rounds) as advance, self._noting("timed"):
            for round_ in range(rounds):
                batch = requests[round_ * plan.concurrency : (round_ + 1) * plan.concurrency]
                timed = time_round(self.engine, batch, round_, deadline)
                if round_ > 0:  # the first one warms up
                    self._add(timed=tuple(timed))
                advance()
                if time.monotonic() > deadline:
                    break
            if stage.prefill and time.monotonic() <= deadline:
                tokens = min(1024, (self.max_model_len or 2048) // 2)
                long = [filler(f"{plan.seed}/prefill/{index}", tokens) for index in range(3)]
                self._add(prefill_tokens_per_s=prefill_speed(self.engine, long, self.chat))
        if time.monotonic() > deadline and not self.record.timed:
            self._add(timed_skipped="the time was up before a text was timed")
        if not self.record.timed and not (self.record.timed_skipped or self.record.timed_failed):
            self._add(timed_skipped="the server does not count the tokens of a stream")

    def _timed_texts(self, stage: Stage, what: str, deadline: float) -> None:
        """Write the texts that `_speed` times: the reference for their grades."""
        streams = self.plan.concurrency
        requests = timed_requests((stage.repeats + 1) * streams, self.plan.seed, self.chat)[
            streams:
        ]
        with self.progress(what, len(requests)) as advance:
            for reply in generate_all(self.engine, requests, self.plan.parallel, deadline):
                self._add(timed=(to_timed_text(reply),))
                advance()

    def _tools(self, stage: Stage, what: str, deadline: float) -> None:
        """Run the tools suite at one concurrency, where the engine takes tools."""
        if reason := self.engine.capabilities.reason(Capability.TOOLS):
            self._add(tools_skipped=reason)
            return
        with self.progress(what, len(cases())) as advance:
            self._add(tools=(run_level(self.engine, stage.streams, advance, deadline),))

    def _streams(self, stage: Stage, what: str, deadline: float) -> None:
        """Compare streams with whole answers, where the engine is a server."""
        if not isinstance(self.engine, StreamingEngine):
            return
        with self.progress(what, STREAM_CASES) as advance:
            for found in check_streams(
                self.engine, self.plan.parallel, advance, deadline, thinking=self.plan.thinking
            ):
                self._add(streams=(found,))

    def _needs(self, stage: Stage, what: str, deadline: float) -> None:
        """Ask for what the deployment must be able to do, where the engine is a server."""
        if not isinstance(self.engine, StreamingEngine):
            return
        with self.progress(what, len(self.plan.need)) as advance:
            for name in self.plan.need:
                if time.monotonic() > deadline:
                    self._add(needs=(NeedCheck(name, "unclear", "the budget is spent"),))
                    continue
                self._add(needs=(check_need(self.engine, name),))
                advance()

    def skip_reason(self, probe: Probe) -> str | None:
        """Why the engine cannot answer a probe; None where it can."""
        if not self.chat and Capability.CHAT in probe.needs:
            return self.engine.capabilities.reason(Capability.CHAT)
        reasons = (
            self.engine.capabilities.reason(capability) for capability in sorted(probe.needs)
        )
        return next((reason for reason in reasons if reason is not None), None)

    def _keep(self, outcome: Outcome) -> None:
        """Add the sample of a conversation, or what ended it."""
        probe, error = outcome.task.probe, outcome.error
        result = partial(ProbeResult, probe.name, probe.title)
        if error is None:
            self._add(probes=(result(samples=(grade_outcome(outcome, self.plan),)),))
            return
        if error.verdict is Verdict.ERROR and error.finding_id in _ENDS_THE_RUN:
            raise error
        known = self.record.probe(probe.name)
        if isinstance(error, RequestRefused) and not (known and known.samples):
            # The server understood and will not do it: that is its answer, not a fault of the run.
            self._add(probes=(result(skipped=error.message),))
            return
        self._add(probes=(result(failed=error.message),))
        if self.fatal is None and error.verdict is Verdict.ERROR:
            self.fatal = error

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """Note in the record why a step was refused (`…_skipped`) or not finished (`…_failed`)."""
        try:
            yield
        except AssayError as error:
            how = "skipped" if isinstance(error, RequestRefused) else "failed"
            self._add(**{f"{what}_{how}": error.message})

    def _add(self, **fields: Any) -> None:
        self.record = self.record.with_(CheckRecord(concurrency=self.plan.concurrency, **fields))


# Errors after which asking on makes no sense.
_ENDS_THE_RUN = frozenset(
    {"server.unreachable", "server.unauthorized", "server.model_unknown", "server.not_found"}
)
