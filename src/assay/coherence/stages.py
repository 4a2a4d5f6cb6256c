"""The stages of a check, what decides most per second first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from assay.coherence.conversation import GREEDY, TEMPERATURE, TOP_P, Probe, Sampling, Task
from assay.coherence.needle import Needle
from assay.coherence.options import Plan
from assay.coherence.passages import (
    LEAST_CONTEXT,
    LEAST_TEXTS,
    LONGEST_CONTEXT,
    MARGIN_TOKENS,
    passages,
)
from assay.coherence.tools import LEVELS

LEAST_EXTENSION = 12
"""Fewer further texts than this decide nothing, and would use up an interim analysis."""
EXTENSIONS = (6, 6, 6, 12, 12)
"""Sampled texts a probe of each extension: about as many texts as the plan itself has, then twice
as many.
"""
MAX_ANALYSES = 1 + len(EXTENSIONS)
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
class Stage:
    """A part of the plan that is measured on both sides and judged before the next one.

    `texts` runs `tasks`, `scores` scores the first `texts` of the fixed texts (by themselves, or in
    a `context` of so many tokens), `speed` times `repeats` rounds, `tools` runs the tools suite
    with `streams` requests at once, `streams` asks the same whole and streamed.
    """

    name: str
    kind: Literal["texts", "scores", "speed", "tools", "streams", "needs"]
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
_NEEDS = Stage("needs", "needs", "whether it can do what is needed")
_STREAMS = Stage("streams", "streams", "whether streams hold what whole answers do")


def stages_of(plan: Plan, probes: Sequence[Probe], max_model_len: int | None) -> list[Stage]:
    """The stages of the plan, what decides most per second first; `probes` are those that the
    subject can answer.
    """
    needed = [_NEEDS] if plan.need else []
    if plan.suite == "tools":
        says = "whether tool calls hold with {} requests at once"
        return [
            *needed,
            _STREAMS,
            *(
                Stage(f"tools, {n} at a time", "tools", says.format(n), streams=n)
                for n in sorted(LEVELS, key=lambda level: (level == 1, level))
            ),
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
    stages += [*needed, _STREAMS]
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


def extension(plan: Plan, probes: Sequence[Probe], analysis: int) -> Stage:
    """Further texts of the sampled probes, with seeds that were not used yet, for the `analysis`-th
    verdict (2 …).
    """
    begin = plan.samples + sum(EXTENSIONS[: analysis - 2])
    sampled = [probe for probe in probes if not probe.variants]
    tasks = tuple(_drawn(plan, sampled, begin, begin + EXTENSIONS[analysis - 2]))
    return Stage(f"more texts, look {analysis}", "texts", "what was unclear", tasks)


def _drawn(plan: Plan, probes: Sequence[Probe], begin: int, end: int) -> Iterator[Task]:
    for index in range(begin, end):
        for probe in probes:
            yield Task(probe, "", Sampling(TEMPERATURE, TOP_P, seed=plan.seed + index))


def _variants(probe: Probe) -> Iterator[Task]:
    return (Task(probe, variant, GREEDY) for variant in probe.variants)


_LONG = frozenset({"story", "fibonacci"})
