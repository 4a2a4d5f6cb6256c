"""What a check measures, and measuring it stage by stage: graded texts, scores of fixed texts,
speed, tool calls.

What is measured stays, also when a stage is interrupted: a `Measurement` adds to its record answer
by answer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median
from typing import Any, Literal

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
    in_order,
    run_fibonacci,
    run_tasks,
    user,
)
from assay.coherence.detectors.stutter import stutter_counts
from assay.coherence.grading import Grade, grade
from assay.coherence.probes import (
    DEFAULT_LONGEST,
    FIBONACCI,
    LEAST_CONTEXT,
    LEAST_TEXTS,
    LONGEST_CONTEXT,
    MARGIN_TOKENS,
    NAMES,
    Needle,
    extract_code,
    filler,
    passages,
    planned_tokens,
    score_alone,
    score_in_context,
    standard_probes,
)
from assay.coherence.record import HEAD_CHARS, CheckRecord, ProbeResult, Sample, TimedText
from assay.coherence.tools import LEVELS, cases, run_level
from assay.engines import EXCERPT, Capability, Engine, Reply, Request, call_remains, read_calls
from assay.engines.server.http import RequestRefused
from assay.errors import AssayError
from assay.options import RunTime, option
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Verdict

# What a check measures, in the order of what decides most per second; how long it takes, and what a
# budget leaves out.


LEAST_EXTENSION = 12
"""Fewer further texts than this decide nothing, and would use up a look."""
EXTENSIONS = (6, 6, 6, 12, 12)
"""Sampled texts a probe of each extension: about as many texts as the plan itself has, then twice
as many.
"""
LOOKS = 1 + len(EXTENSIONS)
"""How often the verdict is asked for at most: after the plan, and after each extension of it."""
QUICK_SECONDS = 60.0
QUICK_SECONDS_SLOW = 180.0
"""`--quick` on a server that writes fewer than `SLOW` tokens a second."""
SLOW = 200.0
EVIDENCE_SECONDS = 1.0
"""A verdict that is certain so soon is shown with texts of the other probes too, which cost next to
nothing.
"""


@dataclass(frozen=True)
class Plan(RunTime):
    """What to measure. Two runs compare if their plans agree."""

    VERB, AREA = "check", "server"

    samples: int = option(3, "Sampled texts per probe, beside a greedy one.", lo=1, hi=1000)
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
    suite: str = option(
        "text",
        "What to ask: texts of all kinds, or exact tool calls and JSON.",
        choices=("text", "tools"),
    )
    margin_answers: float = option(
        0.01,
        "With a reference: share of right answers that may be lost and still be no worse.",
        form="fraction",
        metavar="PERCENT",
        lo=0,
        hi=1,
        apart=True,
    )
    quick: bool = option(
        False, "One text per probe, in 60 s, or in 3 min on a slow server.", apart=True
    )
    all: bool = option(False, "Measure everything, even after the verdict is certain.", apart=True)


@dataclass(frozen=True)
class Stage:
    """A part of the plan that is measured on both sides and judged before the next one.

    `texts` runs `tasks`, `scores` scores the first `texts` of the fixed texts (by themselves, or in
    a `context` of so many tokens), `speed` times `repeats` rounds, `tools` runs the tools suite
    with `streams` requests at once.
    """

    name: str
    kind: Literal["texts", "scores", "speed", "tools"]
    without: str
    """What the verdict cannot say where this stage is left out."""
    tasks: tuple[Task, ...] = ()
    texts: int = 0
    context: int = 0
    repeats: int = 0
    streams: int = 1
    prefill: bool = True
    """Whether a `speed` stage times long prompts too."""

    def shorter(self) -> Stage | None:
        """A form of it that takes about half as long; None where there is none."""
        if self.kind == "texts" and len(self.tasks) > 1 and self.name != FIRST:
            return replace(self, tasks=self.tasks[: len(self.tasks) // 2])
        if self.context >= 2 * LEAST_CONTEXT:
            return replace(self, context=self.context // 2)
        if self.kind == "scores" and not self.context and self.texts > LEAST_TEXTS:
            return replace(self, texts=LEAST_TEXTS)
        if self.kind == "speed" and self.repeats > 1:
            return replace(self, repeats=self.repeats // 2)
        return None


FIRST = "first answers"


def stages_of(plan: Plan, probes: Sequence[Probe], max_model_len: int | None) -> list[Stage]:
    """The stages of the plan, what decides most per second first; `probes` are those that the
    subject can answer.
    """
    if plan.suite == "tools":
        says = "whether tool calls hold with {} requests at once"
        return [
            Stage(f"tools, {n} at a time", "tools", says.format(n), streams=n)
            for n in sorted(LEVELS, key=lambda level: (level == 1, level))
        ]
    by_name = {probe.name: probe for probe in probes}
    sampled = [probe for probe in probes if not probe.variants]
    short = [probe for probe in sampled if probe.name not in _LONG]
    long = [probe for probe in sampled if probe.name in _LONG]
    stages: list[Stage] = []

    def texts(name: str, without: str, tasks: Iterator[Task]) -> None:
        if found := tuple(tasks):
            stages.append(Stage(name, "texts", without, found))

    if "burst" in by_name:
        texts(FIRST, "whether requests at the same moment mix", _variants(by_name["burst"]))
    fixed = len(passages())
    stages.append(
        Stage("fixed texts", "scores", "how well the model predicts plain text", texts=fixed)
    )
    texts("short texts", "whether short answers are sane", _drawn(plan, short, 0, 1))
    texts("long texts", "whether long answers are sane", _drawn(plan, long, 0, 1))
    if plan.throughput:
        stages.append(Stage("speed", "speed", "how fast the server is", repeats=plan.repeats))
    texts("greedy texts", "whether greedy answers are sane", (Task(p, "", GREEDY) for p in sampled))
    context = min(max_model_len or LONGEST_CONTEXT, LONGEST_CONTEXT) - MARGIN_TOKENS
    if context >= LEAST_CONTEXT:
        without = "whether the model loses its way deep in the context"
        stages.append(Stage("texts in context", "scores", without, texts=fixed, context=context))
    texts(
        "more texts",
        "small differences in the rate of bad texts",
        _drawn(plan, sampled, 1, plan.samples),
    )
    needle = by_name.get("needle")
    if isinstance(needle, Needle):
        for length in needle.lengths:
            cells = (v for v in needle.variants if v.startswith(f"{length}@"))
            without = f"whether facts are found in {length:,} tokens"
            texts(
                f"needles in {length:,} tokens", without, (Task(needle, v, GREEDY) for v in cells)
            )
    return stages


def extension(plan: Plan, probes: Sequence[Probe], look: int) -> Stage:
    """Further texts of the sampled probes, with seeds that were not used yet, for the `look`-th
    verdict (2 …).
    """
    begin = plan.samples + sum(EXTENSIONS[: look - 2])
    sampled = [probe for probe in probes if not probe.variants]
    tasks = tuple(_drawn(plan, sampled, begin, begin + EXTENSIONS[look - 2]))
    return Stage(f"more texts, look {look}", "texts", "what was unclear", tasks)


def _drawn(plan: Plan, probes: Sequence[Probe], begin: int, end: int) -> Iterator[Task]:
    for index in range(begin, end):
        for probe in probes:
            yield Task(probe, "", Sampling(TEMPERATURE, TOP_P, seed=plan.seed + index))


def _variants(probe: Probe) -> Iterator[Task]:
    return (Task(probe, variant, GREEDY) for variant in probe.variants)


_LONG = frozenset({"story", "fibonacci"})

# About how many tokens a healthy model writes; those of probes that are not here are half their
# limit of 120.
_EXPECTED = {
    "france": 30,
    "story": 450,
    "fibonacci": 250,
    "json_list": 40,
    "spanish": 140,
    "second_turn": 200,
    "tool_call": 70,
    "needle": 20,
    "burst": 70,
}
_TIMED_TOKENS, _TOOL_TOKENS, _TOOL_PROMPT = 160, 45, 300


@dataclass
class Pace:
    """How fast the subject is, learnt from what it has done: seconds of later stages are told from
    it.
    """

    write: float | None = None
    """Tokens a second that it writes, over all streams."""
    read: float | None = None
    """Prompt tokens a second that it scores."""
    reference: float = 0.0
    """Seconds of the reference for each second of the subject; 0 where none is run."""
    took: dict[str, float] = field(default_factory=dict)
    """Seconds that each stage took."""
    parallel: int = 8
    """Texts that are asked for at once."""
    slower: tuple[str, float, float] | None = None
    """The first stage for which the subject had slowed down, its tokens a second before, and then.
    """
    _written: int = 0
    _writing_s: float = 0.0
    _stream_s: float = 0.0
    _own_s: float = 0.0

    def learn(self, stage: Stage, seconds: float, written: int) -> None:
        """Take the seconds that the subject took for a stage, and the tokens that it wrote."""
        self.took[stage.name] = seconds
        if stage.kind == "texts" and written and seconds > 0:
            streams = (
                len(stage.tasks) if stage.name == FIRST else min(len(stage.tasks), self.parallel)
            )
            now, before, a_stream = (
                written / seconds,
                self.write,
                self._writing_s and self._written / self._stream_s,
            )
            needles = any(
                task.probe.name == "needle" for task in stage.tasks
            )  # whose time is that of reading
            told = before and not needles and seconds > HICCUP_S
            if before and told and now < before / SLOWER and now / streams < a_stream / SLOWER:
                self.slower = self.slower or (stage.name, before, now)
                self._written, self._writing_s, self._stream_s = (
                    0,
                    0.0,
                    0.0,
                )  # tells nothing any more
            self._written += written
            self._writing_s += seconds
            self._stream_s += seconds * streams
            self.write = self._written / self._writing_s
        elif stage.kind == "scores" and seconds > 0:
            self.read = planned_tokens(stage.texts, stage.context) / seconds

    def learn_reference(self, seconds: float, own: float) -> None:
        """Take the seconds that the reference took for what took the subject `own` seconds."""
        self.took["reference"] = self.took.get("reference", 0.0) + seconds
        self._own_s += own
        if self._own_s > 0:
            self.reference = self.took["reference"] / self._own_s

    def seconds(
        self, stage: Stage, kept: Callable[[Stage], bool] = lambda stage: False
    ) -> float | None:
        """Expected seconds of a stage on both sides; None before the first answers. `kept`: the
        reference has it already.
        """
        if self.write is None:
            return None
        read = self.read or 8 * self.write
        own = self._writing(stage) / self.write + self._reading(stage) / read
        timed = stage.kind == "speed"
        return own * (1.0 if kept(stage) else 1.0 + self.reference * (0.3 if timed else 1.0))

    def _writing(self, stage: Stage) -> float:
        """Tokens to write, in units of a full set of streams: one stream alone writes about a third
        as fast.
        """
        if stage.kind == "texts":
            return sum(_EXPECTED.get(task.probe.name, 60) for task in stage.tasks)
        if stage.kind == "speed":
            return 3 * _TIMED_TOKENS * (stage.repeats + 1)
        slow = 3.0 if stage.streams == 1 else 1.0
        return slow * _TOOL_TOKENS * len(cases()) if stage.kind == "tools" else 0.0

    def _reading(self, stage: Stage) -> float:
        if stage.kind == "scores":
            return planned_tokens(stage.texts, stage.context)
        if stage.kind == "tools":
            return _TOOL_PROMPT * len(cases())
        needles = (
            task.variant.partition("@")[0] for task in stage.tasks if task.probe.name == "needle"
        )
        return sum(map(int, needles))


SLOWER = 4.0
"""Texts that are written so many times more slowly than those before, in all and by stream, say
that the server slowed down.
"""
HICCUP_S = 2.0
"""A stage that took less tells nothing of a server that slowed down: the client or the machine may
have paused.
"""

_SHARE = {"scores": 0.3, "speed": 0.25}
"""Of the time that is left, the most that one stage of a kind may take: fixed texts must not cost
the probes.
"""


def fit(
    stages: Sequence[Stage], pace: Pace, left: float, kept: Callable[[Stage], bool]
) -> tuple[list[Stage], list[Stage]]:
    """The stages that fit into `left` seconds, in their order and some of them shortened, and those
    that do not.
    """
    chosen: list[Stage] = []
    dropped: list[Stage] = []
    for stage in stages:
        form: Stage | None = stage
        while form is not None and (pace.seconds(form, kept) or 0.0) > left * _SHARE.get(
            stage.kind, 1.0
        ):
            form = form.shorter()
        if form is None:
            dropped.append(stage)
        else:
            left -= pace.seconds(form, kept) or 0.0
            chosen.append(form)
    return chosen, dropped


# Measuring.


# From the worst label to the best; the sample of a conversation of several replies is its worst
# reply.
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
    forms = (
        [tool_form(reply, outcome.tools) for reply in outcome.replies]
        if outcome.tools
        else [("", "")]
    )
    # A call that came as one counts; a second call after the tool's result is a weak model's, not a
    # broken server's.
    form, call_text = (
        forms[0] if forms[0][0] else min(forms, key=lambda found: _FORMS.index(found[0]))
    )
    said = [stutter_counts(f"{reply.content}\n{reply.reasoning}") for reply in outcome.replies]
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
        words=sum(counts.words for counts in said),
        stutters=sum(counts.total for counts in said),
        think_tag=any(bare_reasoning(reply) for reply in outcome.replies),
        stutter_text="; ".join(example for counts in said for example in counts.examples)[
            :HEAD_CHARS
        ],
    )


# From the worst to the best.
_FORMS = ("remains", "unread", "parsed", "")


def tool_form(reply: Reply, names: Collection[str]) -> tuple[str, str]:
    """What became of a call to one of the tools `names`, and the text in which it stands where
    nothing parsed it.
    """
    if reply.tool_calls:
        return "parsed", ""
    if remains := call_remains(reply.content, names):
        # A call that was cut at the length limit is unfinished, not mangled.
        cut = reply.finish_reason == "length" and reply.content.endswith(remains)
        return ("", "") if cut else ("remains", remains)
    return (
        ("unread", reply.content[:EXCERPT]) if read_calls(reply.content, names).calls else ("", "")
    )


def grade_reply(reply: Reply) -> Grade:
    """Grade content, reasoning and tool calls of one reply, each in its own right.

    Many templates open the reasoning in the prompt, so that a server without a reasoning parser
    sends all of it up to `</think>` as content. That is how such a server works, and no broken
    model: the reasoning is graded as reasoning.
    """
    thought = bare_reasoning(reply)
    return grade(
        reply.content.partition(CLOSES)[2] if thought else reply.content,
        reasoning=thought or reply.reasoning or None,
        tool_calls=reply.tool_calls,
        finish_reason=reply.finish_reason,
    )


CLOSES = "</think>"


def bare_reasoning(reply: Reply) -> str:
    """The reasoning in the content that ends with `</think>` and begins without a mark; empty where
    there is none.
    """
    before, closes, after = reply.content.partition(CLOSES)
    return (
        before
        if closes and after.strip() and "<think>" not in before and not reply.reasoning
        else ""
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


# How fast is the server, measured on text that is then graded?
#
# Decode speed of one stream is (n − tokens in the first chunk) / (t_last − t_first), with n from
# the server's usage: a speculating server sends several tokens in one chunk, so chunks are not
# tokens. Prompts differ from their first word on, so that a prefix cache does not answer for the
# model.

TOKENS = 160
"""Tokens of one timed text at most: enough for a loop to show, short enough to repeat."""

_SUBJECTS = (
    "how a lighthouse works",
    "why leaves change colour in autumn",
    "how bread rises",
    "what a librarian does all day",
    "how a bicycle stays upright",
    "why the sea is salty",
    "how a letter travels to another country",
    "what happens inside a beehive in winter",
    "how glass is made",
    "why cities have parks",
    "how a piano makes sound",
    "what a glacier leaves behind",
    "how people kept time before clocks",
    "why bridges need joints",
    "how a seed becomes a tree",
    "what makes a good map",
)


def timed_requests(count: int, seed: int, chat: bool) -> list[Request]:
    """`count` requests for short prose with different beginnings, recorded seeds and the usual
    sampling.
    """
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
    """Stream all `requests` at once and grade what came; a reply whose tokens the server does not
    count is left out.
    """
    replies = in_order(engine.stream, requests, len(requests))
    return [
        to_timed_text(reply, round_)
        for reply in replies
        if reply.timing is not None and reply.completion_tokens is not None
    ]


def to_timed_text(reply: Reply, round_: int = 0) -> TimedText:
    """Grade and speed of one reply; without a speed where nothing was timed, as on the reference
    side.
    """
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
    """Median of prompt tokens / TTFT over long prompts, in tokens a second; None where it cannot be
    known.
    """
    speeds = []
    for prompt in prompts:
        reply = engine.stream(
            Request(
                messages=(user(prompt),) if chat else None,
                prompt=None if chat else prompt,
                max_tokens=1,
            )
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
                timed = time_round(self.engine, batch, round_)
                if round_ > 0:  # the first one warms up
                    self._add(timed=tuple(timed))
                advance()
                if time.monotonic() > deadline:
                    break
            if stage.prefill and time.monotonic() <= deadline:
                tokens = min(1024, (self.max_model_len or 2048) // 2)
                long = [filler(f"{plan.seed}/prefill/{index}", tokens) for index in range(3)]
                self._add(prefill_tokens_per_s=prefill_speed(self.engine, long, self.chat))
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
            self._add(probes=(result(samples=(to_sample(outcome, run_code=self.plan.run_code),)),))
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
