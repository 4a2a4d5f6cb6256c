"""Measure one engine: probes, fixed texts, speed. What is measured stays, even when the run is interrupted."""

from __future__ import annotations

from dataclasses import dataclass, field

from assay.coherence.conversation import (
    GREEDY,
    TEMPERATURE,
    TOP_P,
    Outcome,
    Sampling,
    Task,
    generate_all,
    run_tasks,
)
from assay.coherence.passages import planned_scores, score_passages
from assay.coherence.probes import standard_probes
from assay.coherence.probes.base import Context, Probe
from assay.coherence.probes.needle import DEFAULT_LONGEST, filler
from assay.coherence.record import CheckRecord, PassageScore, ProbeResult, Sample, TimedText
from assay.coherence.samples import to_sample
from assay.coherence.throughput import prefill_speed, time_round, timed_requests, to_timed_text
from assay.engines.base import Capability, Engine
from assay.engines.server.errors import RequestRefused
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Verdict


@dataclass(frozen=True)
class Plan:
    """What to measure. Two runs compare if their plans agree."""

    samples: int = 3
    seed: int = 0
    concurrency: int = 1
    parallel: int = 8
    repeats: int = 5
    longest_needle: int = DEFAULT_LONGEST
    token_budget: float = 1.0
    only: frozenset[str] = frozenset()
    """Names of the probes to run; empty for all."""
    thinking: bool = True
    """Whether a model that can reason may do so; otherwise its chat template is asked not to."""
    run_code: bool = False
    throughput: bool = True


@dataclass
class Measurement:
    """The record under construction."""

    engine: Engine
    plan: Plan
    max_model_len: int | None = None
    progress: Progress = NO_PROGRESS
    _samples: dict[str, list[Sample]] = field(default_factory=dict)
    _titles: dict[str, str] = field(default_factory=dict)
    _skipped: dict[str, str] = field(default_factory=dict)
    _failed: dict[str, str] = field(default_factory=dict)
    _passages: list[PassageScore] = field(default_factory=list)
    _passages_skipped: str | None = None
    _passages_failed: str | None = None
    _timed: list[TimedText] = field(default_factory=list)
    _timed_skipped: str | None = None
    _timed_failed: str | None = None
    _errors: list[AssayError] = field(default_factory=list)
    _prefill: float | None = None

    @property
    def chat(self) -> bool:
        """Whether the engine applies a chat template; otherwise it continues plain prompts."""
        return Capability.CHAT in self.engine.capabilities

    def run(self) -> None:
        """Measure everything in the plan. Raises the error of the probes where none of them got an answer."""
        self.run_passages()
        self.run_probes()
        fatal = next((error for error in self._errors if error.verdict is Verdict.ERROR), None)
        if fatal is not None and not self._samples:
            raise fatal
        if self.plan.throughput:
            self.run_throughput()

    def record(self) -> CheckRecord:
        """What has been measured so far."""
        probes = [
            ProbeResult(
                name=name,
                title=title,
                samples=tuple(self._samples.get(name, ())),
                skipped=None if self._samples.get(name) else self._skipped.get(name),
                failed=self._failed.get(name),
            )
            for name, title in self._titles.items()
        ]
        return CheckRecord(
            probes=tuple(probes),
            passages=tuple(self._passages),
            passages_skipped=self._passages_skipped,
            passages_failed=self._passages_failed,
            timed=tuple(self._timed),
            timed_skipped=self._timed_skipped,
            timed_failed=self._timed_failed,
            concurrency=self.plan.concurrency,
            prefill_tokens_per_s=self._prefill,
        )

    def run_probes(self) -> None:
        """Run all probes side by side, then those that want the server for themselves."""
        count = self._count_tokens if Capability.TOKENIZE in self.engine.capabilities else None
        probes = standard_probes(
            max_model_len=self.max_model_len,
            longest_needle=self.plan.longest_needle,
            streams=max(8, self.plan.concurrency),
            seed=self.plan.seed,
            count_tokens=count,
        )
        tasks: list[Task] = []
        for probe in probes:
            if self.plan.only and probe.name not in self.plan.only:
                continue
            self._titles[probe.name] = probe.title
            reason = self._skip_reason(probe)
            if reason is None:
                tasks += self._tasks(probe)
            else:
                self._skipped[probe.name] = reason
        together = [task for task in tasks if task.probe.name != "burst"]
        burst = [task for task in tasks if task.probe.name == "burst"]
        context = Context(
            chat=self.chat,
            max_model_len=self.max_model_len,
            token_budget=self.plan.token_budget,
            thinking=self.plan.thinking,
        )
        with self.progress("probing", len(tasks)) as advance:
            for batch, parallel in ((together, self.plan.parallel), (burst, len(burst))):
                if batch:

                    def done(outcome: Outcome) -> None:
                        self._keep(outcome)
                        advance()

                    # Longest answers first, so that no thread is left with one at the end.
                    run_tasks(self.engine, batch, context, parallel=parallel, on_done=done)
        self._titles = {probe.name: probe.title for probe in probes if probe.name in self._titles}

    def run_passages(self) -> None:
        """Score the fixed texts, where the engine can score a prompt."""
        reason = self.engine.capabilities.reason(Capability.SCORE)
        if reason is not None:
            self._passages_skipped = reason
            return
        with self.progress("scoring fixed texts", planned_scores(self.max_model_len)) as advance:
            try:
                for score in score_passages(self.engine, self.max_model_len):
                    self._passages.append(score)
                    advance()
            except RequestRefused as error:
                self._passages_skipped = error.message
            except AssayError as error:
                self._passages_failed = error.message

    def run_throughput(self) -> None:
        """Warm up once, then stream rounds of `concurrency` texts and grade what was timed."""
        reason = self.engine.capabilities.reason(Capability.STREAM)
        if Capability.STREAM in self.engine.capabilities.unfinished:
            self._timed_failed = reason
            return
        if reason is not None:
            self._timed_skipped = reason
            return
        plan = self.plan
        requests = timed_requests((plan.repeats + 1) * plan.concurrency, plan.seed, self.chat)
        with self.progress("timing", plan.repeats + 1) as advance:
            try:
                for round_ in range(plan.repeats + 1):
                    batch = requests[round_ * plan.concurrency : (round_ + 1) * plan.concurrency]
                    timed = time_round(self.engine, batch, round_)
                    if round_ > 0:  # the first one warms up
                        self._timed += timed
                    advance()
                self._prefill = prefill_speed(self.engine, self._long_prompts(), self.chat)
            except RequestRefused as error:
                self._timed_skipped = error.message
            except AssayError as error:
                self._timed_failed = error.message
        if not self._timed and self._timed_skipped is None and self._timed_failed is None:
            self._timed_skipped = "the server does not count the tokens of a stream"

    def run_timed_texts(self) -> None:
        """Write the texts that `run_throughput` times, without timing them: the reference for their grades."""
        plan = self.plan
        requests = timed_requests((plan.repeats + 1) * plan.concurrency, plan.seed, self.chat)[
            plan.concurrency :
        ]
        with self.progress("writing timed texts", len(requests)) as advance:
            for reply in generate_all(self.engine, requests, plan.parallel):
                self._timed.append(to_timed_text(reply))
                advance()

    def _long_prompts(self) -> list[str]:
        tokens = min(1024, (self.max_model_len or 2048) // 2)
        return [filler(f"{self.plan.seed}/prefill/{index}", tokens) for index in range(3)]

    def _tasks(self, probe: Probe) -> list[Task]:
        if probe.variants:
            return [Task(probe, variant, GREEDY) for variant in probe.variants]
        sampled = [
            Task(probe, "", Sampling(TEMPERATURE, TOP_P, seed=self.plan.seed + index))
            for index in range(self.plan.samples)
        ]
        return [*sampled, Task(probe, "", GREEDY)]

    def _skip_reason(self, probe: Probe) -> str | None:
        if not self.chat and Capability.CHAT in probe.needs:
            return self.engine.capabilities.reason(Capability.CHAT)
        reasons = (self.engine.capabilities.reason(capability) for capability in sorted(probe.needs))
        return next((reason for reason in reasons if reason is not None), None)

    def _keep(self, outcome: Outcome) -> None:
        name = outcome.task.probe.name
        if outcome.error is not None:
            if outcome.error.verdict is Verdict.ERROR and outcome.error.finding_id in _ENDS_THE_RUN:
                raise outcome.error
            if isinstance(outcome.error, RequestRefused) and name not in self._samples:
                # The server understood and will not do it: that is its answer, not a fault of the run.
                self._skipped[name] = outcome.error.message
            else:
                self._failed[name] = outcome.error.message
                self._errors.append(outcome.error)
        if outcome.replies and outcome.error is None:
            sample = to_sample(outcome, run_code=self.plan.run_code)
            self._samples.setdefault(name, []).append(sample)

    def _count_tokens(self, text: str) -> int:
        return len(self.engine.tokenize(text))


# Errors after which asking on makes no sense.
_ENDS_THE_RUN = frozenset(
    {"server.unreachable", "server.unauthorized", "server.model_unknown", "server.not_found"}
)
