"""How fast a subject is, so that stages fit into a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from assay.coherence.passages import planned_tokens
from assay.coherence.stages import FIRST, Stage
from assay.coherence.streams import STREAM_CASES
from assay.coherence.streams import TOKENS as STREAM_TOKENS
from assay.coherence.tools import cases

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
        alone = stage.kind in ("streams", "needs") or kept(stage)
        return own * (1.0 if alone else 1.0 + self.reference * (0.3 if timed else 1.0))

    def _writing(self, stage: Stage) -> float:
        """Tokens to write, in units of a full set of streams: one stream alone writes about a third
        as fast.
        """
        if stage.kind == "texts":
            return sum(_EXPECTED.get(task.probe.name, 60) for task in stage.tasks)
        if stage.kind == "speed":
            return 3 * _TIMED_TOKENS * (stage.repeats + 1)
        if stage.kind == "needs":
            return 6 * _TIMED_TOKENS
        if stage.kind == "streams":
            return 2 * STREAM_TOKENS * STREAM_CASES
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
