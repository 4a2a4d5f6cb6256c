"""transformers as a scoring engine: final states of windows by any path, with hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from assay.engines.base import Engine
from assay.engines.continuing import GreedyStep
from assay.engines.hf.caches import token_bytes
from assay.engines.hf.engine import HfEngine
from assay.engines.hf.greedy import greedy_steps
from assay.engines.hf.head import output_head
from assay.engines.hf.tokenizer import document_start, tokenizer_facts
from assay.engines.hf.window_scoring import window_states
from assay.engines.scoring import (
    Engagement,
    EngineHook,
    Head,
    ScoreJob,
    ScoringAbility,
    ScoringPath,
    StateRows,
    TokenizerFacts,
    Window,
    WindowRows,
    check_windows,
    load_hook,
)


class HfScorer:
    """Scores windows with a model of transformers in this process."""

    def __init__(self, engine: HfEngine) -> None:
        self.engine = engine
        self._engagement = Engagement()

    @classmethod
    def load(cls, spec: str) -> HfScorer:
        """Load `hf:PATH?…`; AssayError where that is not possible."""
        return cls(HfEngine.load(spec))

    @property
    def ability(self) -> ScoringAbility:
        """Every path, whole distributions, states; not prefill where the KV cache is held in another type."""
        unread = self.engine.spec.unread
        paths = frozenset(ScoringPath) - {ScoringPath.PREFILL} if unread else frozenset(ScoringPath)
        return ScoringAbility(paths, hooks=True, reason=unread)

    @cached_property
    def tokenizer(self) -> TokenizerFacts:
        """Facts of the tokenizer that lies beside the weights."""
        return tokenizer_facts(self.engine.tokenizer)

    @cached_property
    def head(self) -> Head:
        """The output head, checked against the model's own logits."""
        return output_head(self.engine.model)

    def describe(self) -> dict[str, Any]:
        """Engine, versions, model and number formats."""
        return self.engine.describe()

    def score_windows(self, windows: Sequence[Window], job: ScoreJob) -> Iterator[WindowRows]:
        """The rows of every window, in order; the hook of the job is in place while the iterator lives."""
        return self.score_with(windows, job, load_hook(job.hook) if job.hook else None)

    def score_with(
        self, windows: Sequence[Window], job: ScoreJob, hook: EngineHook | None
    ) -> Iterator[WindowRows]:
        """As `score_windows`, with a hook that is an object already."""
        check_windows(windows, job)
        self.engine.spec.refuse_path(job.path)
        with hook.attach(self.engine.model) if hook else nullcontext():
            for window, states in window_states(self.engine.model, windows, job, hook):
                yield StateRows(window, job.scored_from, states, self.head)
        # The hook knows all it did only when it has been taken off.
        self._engagement = (
            hook.engagement() if hook else Engagement(bytes_read=_bytes_read(self.engine.model, windows, job))
        )

    def generate_greedy(self, prefixes: Sequence[tuple[int, ...]], count: int) -> list[list[GreedyStep]]:
        """`count` greedy tokens after each of the equally long prefixes."""
        return greedy_steps(self.engine.model, self.head, prefixes, count)

    def sampler(self) -> tuple[Engine, tuple[int, ...]]:
        """The model, and what separates documents for it: its start token, or the end-of-text token."""
        return self.engine, (document_start(self.engine.tokenizer),)

    def engagement(self) -> Engagement:
        """What the hook counted; without one, the cache bytes that the path reads."""
        return self._engagement

    def close(self) -> None:
        """Drop the model."""
        self.__dict__.pop("head", None)
        self.engine.close()


def _bytes_read(model: Any, windows: Sequence[Window], job: ScoreJob) -> int | None:
    """K and V bytes of earlier blocks that attention reads in all steps, were no layer to slide. 0 for prefill.

    None where nobody knows what a token takes.
    """
    if job.path is ScoringPath.PREFILL:
        return 0
    token = token_bytes(model)
    if token is None:
        return None
    step = 1 if job.path is ScoringPath.DECODE else job.chunk
    tokens = sum(range(job.scored_from - 1, len(windows[0].tokens) - 1, step))
    return len(windows) * tokens * token
