"""What a check measures, in the order of what decides most per second; how long it takes, and what a budget leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from assay.coherence.conversation import GREEDY, TEMPERATURE, TOP_P, Probe, Sampling, Task
from assay.coherence.probes import (
    DEFAULT_LONGEST,
    LEAST_CONTEXT,
    LEAST_TEXTS,
    LONGEST_CONTEXT,
    MARGIN_TOKENS,
    NAMES,
    Needle,
    passages,
    planned_tokens,
)
from assay.coherence.tools import LEVELS, cases
from assay.options import RunTime, option

LEAST_EXTENSION = 12
"""Fewer further texts than this decide nothing, and would use up a look."""
EXTENSIONS = (6, 6, 6, 12, 12)
"""Sampled texts a probe of each extension: about as many texts as the plan itself has, then twice as many."""
LOOKS = 1 + len(EXTENSIONS)
"""How often the verdict is asked for at most: after the plan, and after each extension of it."""
QUICK_SECONDS = 60.0
QUICK_SECONDS_SLOW = 180.0
"""`--quick` on a server that writes fewer than `SLOW` tokens a second."""
SLOW = 200.0
EVIDENCE_SECONDS = 1.0
"""A verdict that is certain so soon is shown with texts of the other probes too, which cost next to nothing."""


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
        DEFAULT_LONGEST, "Longest context that is searched for a needle, in tokens.", lo=256, hi=10_000_000
    )
    token_budget: float = option(1.0, "Factor on every length limit, for models that reason at length.", lo=0.1, hi=100)
    thinking: bool = option(True, "Ask the chat template not to reason.")
    run_code: bool = option(False, "Run the code that the model wrote, in a sandboxed subprocess.")
    throughput: bool = option(True, "Do not measure speed.")
    suite: str = option(
        "text", "What to ask: texts of all kinds, or exact tool calls and JSON.", choices=("text", "tools")
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
    quick: bool = option(False, "One text per probe, in 60 s, or in 3 min on a slow server.", apart=True)
    all: bool = option(False, "Measure everything, even after the verdict is certain.", apart=True)


@dataclass(frozen=True)
class Stage:
    """A part of the plan that is measured on both sides and judged before the next one.

    `texts` runs `tasks`, `scores` scores the first `texts` of the fixed texts (by themselves, or in a `context` of so
    many tokens), `speed` times `repeats` rounds, `tools` runs the tools suite with `streams` requests at once.
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
    """The stages of the plan, what decides most per second first; `probes` are those that the subject can answer."""
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
    stages.append(Stage("fixed texts", "scores", "how well the model predicts plain text", texts=fixed))
    texts("short texts", "whether short answers are sane", _drawn(plan, short, 0, 1))
    texts("long texts", "whether long answers are sane", _drawn(plan, long, 0, 1))
    if plan.throughput:
        stages.append(Stage("speed", "speed", "how fast the server is", repeats=plan.repeats))
    texts("greedy texts", "whether greedy answers are sane", (Task(p, "", GREEDY) for p in sampled))
    context = min(max_model_len or LONGEST_CONTEXT, LONGEST_CONTEXT) - MARGIN_TOKENS
    if context >= LEAST_CONTEXT:
        without = "whether the model loses its way deep in the context"
        stages.append(Stage("texts in context", "scores", without, texts=fixed, context=context))
    texts("more texts", "small differences in the rate of bad texts", _drawn(plan, sampled, 1, plan.samples))
    needle = by_name.get("needle")
    if isinstance(needle, Needle):
        for length in needle.lengths:
            cells = (v for v in needle.variants if v.startswith(f"{length}@"))
            without = f"whether facts are found in {length:,} tokens"
            texts(f"needles in {length:,} tokens", without, (Task(needle, v, GREEDY) for v in cells))
    return stages


def extension(plan: Plan, probes: Sequence[Probe], look: int) -> Stage:
    """Further texts of the sampled probes, with seeds that were not used yet, for the `look`-th verdict (2 …)."""
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

# About how many tokens a healthy model writes; those of probes that are not here are half their limit of 120.
_EXPECTED = {
    "france": 30, "story": 450, "fibonacci": 250, "json_list": 40, "spanish": 140, "second_turn": 200, "tool_call": 70,
    "needle": 20, "burst": 70,
}  # fmt: skip
_TIMED_TOKENS, _TOOL_TOKENS, _TOOL_PROMPT = 160, 45, 300


@dataclass
class Pace:
    """How fast the subject is, learnt from what it has done: seconds of later stages are told from it."""

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
    """The first stage for which the subject had slowed down, its tokens a second before, and then."""
    _written: int = 0
    _writing_s: float = 0.0
    _stream_s: float = 0.0
    _own_s: float = 0.0

    def learn(self, stage: Stage, seconds: float, written: int) -> None:
        """Take the seconds that the subject took for a stage, and the tokens that it wrote."""
        self.took[stage.name] = seconds
        if stage.kind == "texts" and written and seconds > 0:
            streams = len(stage.tasks) if stage.name == FIRST else min(len(stage.tasks), self.parallel)
            now, before, a_stream = (written / seconds, self.write, self._writing_s and self._written / self._stream_s)
            needles = any(task.probe.name == "needle" for task in stage.tasks)  # whose time is that of reading
            told = before and not needles and seconds > HICCUP_S
            if before and told and now < before / SLOWER and now / streams < a_stream / SLOWER:
                self.slower = self.slower or (stage.name, before, now)
                self._written, self._writing_s, self._stream_s = 0, 0.0, 0.0  # tells nothing any more
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

    def seconds(self, stage: Stage, kept: Callable[[Stage], bool] = lambda stage: False) -> float | None:
        """Expected seconds of a stage on both sides; None before the first answers. `kept`: the reference has it already."""
        if self.write is None:
            return None
        read = self.read or 8 * self.write
        own = self._writing(stage) / self.write + self._reading(stage) / read
        timed = stage.kind == "speed"
        return own * (1.0 if kept(stage) else 1.0 + self.reference * (0.3 if timed else 1.0))

    def _writing(self, stage: Stage) -> float:
        """Tokens to write, in units of a full set of streams: one stream alone writes about a third as fast."""
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
        needles = (task.variant.partition("@")[0] for task in stage.tasks if task.probe.name == "needle")
        return sum(map(int, needles))


SLOWER = 4.0
"""Texts that are written so many times more slowly than those before, in all and by stream, say that the server slowed down."""
HICCUP_S = 2.0
"""A stage that took less tells nothing of a server that slowed down: the client or the machine may have paused."""

_SHARE = {"scores": 0.3, "speed": 0.25}
"""Of the time that is left, the most that one stage of a kind may take: fixed texts must not cost the probes."""


def fit(
    stages: Sequence[Stage], pace: Pace, left: float, kept: Callable[[Stage], bool]
) -> tuple[list[Stage], list[Stage]]:
    """The stages that fit into `left` seconds, in their order and some of them shortened, and those that do not."""
    chosen: list[Stage] = []
    dropped: list[Stage] = []
    for stage in stages:
        form: Stage | None = stage
        while form is not None and (pace.seconds(form, kept) or 0.0) > left * _SHARE.get(stage.kind, 1.0):
            form = form.shorter()
        if form is None:
            dropped.append(stage)
        else:
            left -= pace.seconds(form, kept) or 0.0
            chosen.append(form)
    return chosen, dropped
