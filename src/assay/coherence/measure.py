"""Measure one engine: probes, fixed texts, speed. What is measured stays, even when the run is interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from statistics import median

from assay.coherence.conversation import (
    GREEDY,
    TEMPERATURE,
    TOP_P,
    Context,
    Outcome,
    Probe,
    Sampling,
    Task,
    answer_text,
    generate_all,
    run_tasks,
    side_by_side,
    user,
)
from assay.coherence.grading import Grade, grade
from assay.coherence.needle import DEFAULT_LONGEST, filler
from assay.coherence.probes import FIBONACCI, NAMES, extract_code, standard_probes
from assay.coherence.record import HEAD_CHARS, CheckRecord, PassageScore, ProbeResult, Sample, TimedText
from assay.coherence.sandbox import run_fibonacci
from assay.engines.base import Capability, Engine, Reply, Request
from assay.engines.server.errors import RequestRefused
from assay.engines.tool_calls import EXCERPT, call_remains, read_calls
from assay.errors import AssayError
from assay.options import Options, option
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Verdict

# -----------------------------------------------------------------------------
# Bits per byte of fixed texts: how well does the model predict plain text, near the start and deep in the context?
#
# A sane language model needs well under 2 bits for a byte of English; a broken one needs more, long before its text
# looks wrong. Against a reference, which scores the same texts, much smaller differences show.

LONGEST_CONTEXT = 4096
"""Deepest position, in tokens, at which passages are scored."""

_DEEP_PASSAGES = 4
_MARGIN_TOKENS = 32


@cache
def passages() -> tuple[str, ...]:
    """The fixed texts, shipped with assay."""
    text = (files("assay.coherence") / "passages.txt").read_text(encoding="utf-8")
    body = "\n".join(line for line in text.splitlines() if not line.startswith("# Fixed texts"))
    return tuple(block.strip("\n") for block in body.split("\n----\n"))


def score_passages(
    engine: Engine, max_model_len: int | None, on_done: Callable[[], None] = lambda: None
) -> Iterator[PassageScore]:
    """Score every passage by itself, and a few of them again at half and at full depth of the context.

    Depth needs the engine's own tokenizer; without it only the passages by themselves are scored.
    """
    texts = passages()
    for index, text in enumerate(texts):
        scores = engine.score(text)
        yield PassageScore(f"p{index:02d}", 0, scores.nll, len(text.encode()))
        on_done()
    if Capability.TOKENIZE not in engine.capabilities:
        return
    counts = [len(engine.tokenize(text)) for text in texts]
    usable = min(max_model_len or LONGEST_CONTEXT, LONGEST_CONTEXT) - _MARGIN_TOKENS
    for share in (0.5, 1.0):
        for target in range(_DEEP_PASSAGES):
            context = _context(texts, counts, target, int(usable * share) - counts[target])
            if context is None:
                return
            yield _score_last(engine, f"p{target:02d}", f"{context}\n\n", texts[target], counts[target])
            on_done()


def planned_scores(max_model_len: int | None) -> int:
    """How many scores `score_passages` will yield at most, for a progress bar."""
    return len(passages()) + 2 * _DEEP_PASSAGES


def _context(texts: tuple[str, ...], counts: list[int], target: int, tokens: int) -> str | None:
    """Other passages, over and over, up to `tokens` tokens; None where not even two of them fit."""
    chosen: list[str] = []
    total, index = 0, target
    while True:
        index = (index + 1) % len(texts)
        if index == target:
            continue
        if total + counts[index] + 2 > tokens:
            break
        chosen.append(texts[index])
        total += counts[index] + 2
    return "\n\n".join(chosen) if len(chosen) >= 2 else None


def _score_last(engine: Engine, name: str, context: str, text: str, tokens: int) -> PassageScore:
    """Score `context + text` and keep the tokens of `text`, which are the last ones."""
    logprobs = engine.score(context + text).token_logprobs
    last = logprobs[-tokens:]
    nats = -sum(value for value in last if value is not None)
    return PassageScore(name, len(logprobs) - tokens, nats, len(text.encode()))


# -----------------------------------------------------------------------------
# From the replies of one conversation to one graded sample.

# From the worst label to the best; the sample of a conversation of several replies is its worst reply.
_WORST_FIRST = ("degenerate", "empty", "truncated_reasoning", "ok")


def to_sample(outcome: Outcome, *, run_code: bool = False) -> Sample:
    """Grade every reply of a conversation; the worst one is the sample, the checks see them all.

    `run_code` also runs the code that the Fibonacci probe asked for, in a sandboxed subprocess.
    """
    task = outcome.task
    checks = task.probe.check(outcome.replies, task.variant)
    if run_code and task.probe.name == FIBONACCI.name:
        checks = (*checks, run_fibonacci(extract_code(answer_text(outcome.replies[-1]))))
    graded = [(reply, grade_reply(reply)) for reply in outcome.replies]
    forms = [tool_form(reply, outcome.tools) for reply in outcome.replies] if outcome.tools else [("", "")]
    form, call_text = min(forms, key=lambda found: _FORMS.index(found[0]))
    reply, worst = min(graded, key=lambda pair: _WORST_FIRST.index(pair[1].label))
    return Sample(
        label=worst.label,
        kind=worst.kind,
        onset_char=worst.onset_char,
        finish_reason=reply.finish_reason,
        completion_tokens=reply.completion_tokens,
        text_head=shown_text(reply)[:HEAD_CHARS],
        text_chars=received_chars(reply),
        coherent_chars=worst.coherent_chars,
        temperature=task.sampling.temperature,
        seed=task.sampling.seed,
        prompt_tokens=reply.prompt_tokens,
        checks=checks,
        variant=task.variant,
        tool_form=form,
        tool_text=call_text,
    )


# From the worst to the best; a conversation is as bad as its worst reply.
_FORMS = ("remains", "unread", "parsed", "")


def tool_form(reply: Reply, names: Collection[str]) -> tuple[str, str]:
    """What became of a call to one of the tools `names`, and the text in which it stands where nothing parsed it."""
    if reply.tool_calls:
        return "parsed", ""
    if remains := call_remains(reply.content, names):
        # A call that was cut at the length limit is unfinished, not mangled.
        cut = reply.finish_reason == "length" and reply.content.endswith(remains)
        return ("", "") if cut else ("remains", remains)
    return ("unread", reply.content[:EXCERPT]) if read_calls(reply.content, names).calls else ("", "")


def grade_reply(reply: Reply) -> Grade:
    """Grade content, reasoning and tool calls of one reply, each in its own right."""
    return grade(
        reply.content,
        reasoning=reply.reasoning or None,
        tool_calls=reply.tool_calls,
        finish_reason=reply.finish_reason,
    )


def shown_text(reply: Reply) -> str:
    """What a person is shown of a reply: the content, else the reasoning, else the tool calls."""
    if reply.content:
        return reply.content
    if reply.reasoning:
        return reply.reasoning
    return " ".join(f"{call.name}({call.arguments})" for call in reply.tool_calls)


def received_chars(reply: Reply) -> int:
    """Code points received in all fields, to hold against the tokens that were billed."""
    calls = sum(len(call.name) + len(call.arguments) for call in reply.tool_calls)
    return len(reply.content) + len(reply.reasoning) + calls


# -----------------------------------------------------------------------------
# How fast is the server, measured on text that is then graded?
#
# Decode speed of one stream is (n − tokens in the first chunk) / (t_last − t_first), with n from the server's usage:
# a speculating server sends several tokens in one chunk, so chunks are not tokens. Prompts differ from their first
# word on, so that a prefix cache does not answer for the model.

TOKENS = 160
"""Tokens of one timed text at most: enough for a loop to show, short enough to repeat."""

_SUBJECTS = (
    "how a lighthouse works", "why leaves change colour in autumn", "how bread rises", "what a librarian does all day",
    "how a bicycle stays upright", "why the sea is salty", "how a letter travels to another country",
    "what happens inside a beehive in winter", "how glass is made", "why cities have parks", "how a piano makes sound",
    "what a glacier leaves behind", "how people kept time before clocks", "why bridges need joints",
    "how a seed becomes a tree", "what makes a good map",
)  # fmt: skip


def timed_requests(count: int, seed: int, chat: bool) -> list[Request]:
    """`count` requests for short prose with different beginnings, recorded seeds and the usual sampling."""
    rng = random.Random(f"throughput/{seed}")
    requests = []
    for index in range(count):
        subject = _SUBJECTS[index % len(_SUBJECTS)]
        number = rng.randint(10_000, 99_999)
        question = f"Note {number}: write about 150 words on {subject}."
        prompt = f"Note {number}\n\nA short article on {subject}.\n\n"
        requests.append(
            Request(
                messages=(user(question),) if chat else None,
                prompt=None if chat else prompt,
                max_tokens=TOKENS,
                temperature=TEMPERATURE,
                top_p=TOP_P,
                seed=seed + index,
            )
        )
    return requests


def time_round(engine: Engine, requests: Sequence[Request], round_: int) -> list[TimedText]:
    """Stream all `requests` at once and grade what came; a reply whose tokens the server does not count is left out."""
    replies = side_by_side(engine.stream, requests, len(requests))
    return [
        to_timed_text(reply, round_)
        for reply in replies
        if reply.timing is not None and reply.completion_tokens is not None
    ]


def to_timed_text(reply: Reply, round_: int = 0) -> TimedText:
    """Grade and speed of one reply; without a speed where nothing was timed, as on the reference side."""
    timing, tokens = reply.timing, reply.completion_tokens or 0
    grade = grade_reply(reply)
    text = TimedText(
        label=grade.label,
        kind=grade.kind,
        onset_char=grade.onset_char,
        text_head=shown_text(reply)[:HEAD_CHARS],
        text_chars=received_chars(reply),
        coherent_chars=grade.coherent_chars,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=tokens,
        round=round_,
    )
    if timing is None:
        return text
    return replace(
        text,
        ttft_s=timing.ttft,
        e2e_s=(timing.finished or timing.last_token) - timing.started,
        itl_s=timing.time_per_output_token(tokens),
        decode_tokens_per_s=timing.decode_tokens_per_s(tokens),
        first_chunk_source=timing.first_chunk_source,
    )


def prefill_speed(engine: Engine, prompts: Sequence[str], chat: bool) -> float | None:
    """Median of prompt tokens / TTFT over long prompts, in tokens a second; None where it cannot be known."""
    speeds = []
    for prompt in prompts:
        reply = engine.stream(
            Request(messages=(user(prompt),) if chat else None, prompt=None if chat else prompt, max_tokens=1)
        )
        if reply.timing is not None and reply.prompt_tokens and reply.timing.ttft > 0:
            speeds.append(reply.prompt_tokens / reply.timing.ttft)
    return median(speeds) if speeds else None


def summary(values: Sequence[float | None]) -> dict[str, float | None]:
    """Median, minimum and maximum of the values that are there."""
    known = [value for value in values if value is not None]
    if not known:
        return {"median": None, "min": None, "max": None}
    return {"median": median(known), "min": min(known), "max": max(known)}


def aggregate_tokens_per_s(texts: Sequence[TimedText]) -> float | None:
    """Tokens of all streams of a round over the time of its longest one, median over rounds."""
    rounds: dict[int, list[TimedText]] = {}
    for text in texts:
        rounds.setdefault(text.round, []).append(text)
    speeds = [
        sum(t.completion_tokens for t in batch) / longest
        for batch in rounds.values()
        if (longest := max(t.e2e_s or 0.0 for t in batch)) > 0
    ]
    return median(speeds) if speeds else None


# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan(Options):
    """What to measure. Two runs compare if their plans agree."""

    VERB, AREA = "check", "server"

    samples: int = option(3, "Sampled texts a probe, beside a greedy one.", lo=1, hi=1000)
    seed: int = option(0, "First seed; recorded in the result.", lo=0, hi=2**62)
    concurrency: int = option(1, "Streams whose speed is measured at once.", lo=1, hi=512)
    parallel: int = option(8, "Probes that run at once.", lo=1, hi=512)
    repeats: int = option(5, "Timed rounds after the warm-up.", lo=3, hi=1000)
    only: tuple[str, ...] = option(
        (), "Run this probe only; may be given again.", flag="probe", metavar="NAME", choices=NAMES
    )
    longest_needle: int = option(
        DEFAULT_LONGEST,
        "Longest context that is searched for a needle, in tokens.",
        lo=256,
        hi=10_000_000,
    )
    token_budget: float = option(
        1.0, "Factor on every length limit, for models that reason at length.", lo=0.1, hi=100
    )
    thinking: bool = option(True, "Ask the chat template not to reason.")
    run_code: bool = option(False, "Run the code that the model wrote, in a sandboxed subprocess.")
    throughput: bool = option(True, "Do not measure speed.")


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
