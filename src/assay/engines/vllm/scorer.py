"""vLLM as a scoring engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.engines.continuing import GreedyStep
from assay.engines.scoring import (
    Engagement,
    ScoreJob,
    ScoringAbility,
    ScoringPath,
    StateRows,
    TokenizerFacts,
    Window,
    check_windows,
)
from assay.engines.vllm.placement import Core, open_core
from assay.engines.vllm.spec import VllmSpec, parse_spec
from assay.errors import AssayError

if TYPE_CHECKING:
    import torch


class VllmScorer:
    """Scores windows with vLLM, whether it runs here or in a worker."""

    def __init__(self, spec: VllmSpec, core: Core) -> None:
        self.spec = spec
        self.core = core
        self._engagement = Engagement()

    @classmethod
    def load(cls, spec: str) -> VllmScorer:
        """Load `vllm:MODEL?…`; AssayError where that is not possible."""
        parsed = parse_spec(spec)
        if Path(parsed.model).exists():  # the worker has another working folder
            parsed = replace(parsed, model=str(Path(parsed.model).resolve()))
        return cls(parsed, open_core(parsed))

    @property
    def ability(self) -> ScoringAbility:
        """Every path, whole distributions, states. Hooks are those of K and V, see `assay.engines.vllm.kv_hook`."""
        return ScoringAbility(
            frozenset(ScoringPath),
            reason="hooks of transformers' modules do not fit vLLM's; those of K and V do",
        )

    @property
    def tokenizer(self) -> TokenizerFacts:
        """Facts of the tokenizer that lies beside the weights."""
        return self.core.tokenizer

    def describe(self) -> dict[str, Any]:
        """Engine, versions, model, number formats, cache."""
        return self.core.facts()

    def score_windows(self, windows: Sequence[Window], job: ScoreJob) -> Iterator[StateRows]:
        """The rows of every window, in order; memory holds the states of one batch."""
        for part in self._batches(windows, job):
            for window, states in zip(part, self.core.score(part), strict=True):
                yield StateRows(window, job.scored_from, states, self.core.head)

    def reduce_windows(
        self, windows: Sequence[Window], references: Iterator[StateRows], job: ScoreJob, target: str
    ) -> Iterator[tuple[Window, Mapping[str, torch.Tensor]]]:
        """Statistics of every window against a reference's states, computed on the engine's device.

        `references` are the reference's rows of `windows`, taken batch by batch. `target` is the import path of a
        function of a batch (reference rows, candidate rows) that gives a dataclass of tensors for each window, such as
        `assay.fidelity.metrics:batch_statistics`. For a worker only the states travel to it and the statistics
        back; in this process it is what `score_windows` and that function do.
        """
        for part in self._batches(windows, job):
            yield from zip(
                part, self.core.reduce(part, list(islice(references, len(part))), target), strict=True
            )

    def generate_greedy(self, prefixes: Sequence[tuple[int, ...]], count: int) -> list[list[GreedyStep]]:
        """`count` greedy tokens after each prefix, as vLLM generates them."""
        return self.core.greedy(prefixes, count)

    def _batches(self, windows: Sequence[Window], job: ScoreJob) -> Iterator[Sequence[Window]]:
        """Batches of windows, with the job's hook in place; the engagement is booked as each is done."""
        self.core.begin(job, check_windows(windows, job))
        try:
            for lo in range(0, len(windows), job.batch):
                yield windows[lo : lo + job.batch]
                self._engagement = self.core.engagement()
        except BaseException:
            with suppress(AssayError):  # what failed first is the reason
                self.core.end()
            raise
        self._engagement = self.core.end()

    def engagement(self) -> Engagement:
        """Cache bytes that attention read, and fires of the hook by layer."""
        return self._engagement

    def close(self) -> None:
        """Give the engine back."""
        self.core.close()
