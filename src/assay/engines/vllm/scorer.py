"""vLLM as an engine that scores, in this process or in an environment of its own."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from assay.engines.scoring import (
    Engagement,
    GreedyStep,
    Head,
    ScoreJob,
    ScoringAbility,
    ScoringPath,
    StateRows,
    TokenizerFacts,
    Window,
    check_windows,
)
from assay.engines.vllm.core import VllmCore
from assay.engines.vllm.remote import RemoteCore
from assay.engines.vllm.spec import VllmSpec, parse_vllm
from assay.errors import AssayError
from assay.runs import cache_dir

PYTHON = "ASSAY_VLLM_PYTHON"


def open_core(spec: VllmSpec) -> VllmCore | RemoteCore:
    """Start vLLM for `spec`; AssayError where there is none, or where it cannot load the model."""
    python = find_python(spec.python)
    return VllmCore.start(spec) if python is None else RemoteCore(spec, python)


def find_python(named: str = "") -> Path | None:
    """The Python to start a worker with; None if this process can import vLLM itself.

    In this order: the one that is named, this process, the one in `ASSAY_VLLM_PYTHON`, the private
    environment that `assay demo` keeps in the cache.
    """
    if named:
        return _checked(Path(named), "python=")
    found = find_spec("vllm")
    if found is not None and found.origin is not None:  # a mere folder of that name has none
        return None
    if from_environment := os.environ.get(PYTHON):
        return _checked(Path(from_environment), PYTHON)
    stamps = sorted(cache_dir(".").glob("vllm-*/.ready"))
    # The Python that an environment was made with may have been removed since.
    ready = [p for stamp in stamps if (p := stamp.parent / "bin" / "python").exists()]
    if ready:
        return ready[-1]
    raise AssayError(
        "vllm: needs vLLM, which this Python does not have",
        finding_id="fidelity.engine_missing",
        remedy=(f"pip install 'llm-assay[vllm]', or name a Python that has vLLM in {PYTHON}"),
    )


def _checked(python: Path, source: str) -> Path:
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise AssayError(
            f"{source} names no Python that can be run: {python}",
            finding_id="fidelity.engine_missing",
            remedy="give the path of bin/python in the environment that has vLLM",
        )
    return python


class VllmScorer:
    """Scores windows with vLLM, whether it runs here or in a worker."""

    def __init__(self, spec: VllmSpec, core: VllmCore | RemoteCore) -> None:
        self.spec = spec
        self.core = core
        self._engagement = Engagement()

    @classmethod
    def load(cls, spec: str) -> VllmScorer:
        """Load `vllm:MODEL?…`; AssayError where that is not possible."""
        parsed = parse_vllm(spec)
        if Path(parsed.model).exists():  # the worker has another working folder
            parsed = replace(parsed, model=str(Path(parsed.model).resolve()))
        if parsed.kv_pages:
            parsed = replace(parsed, kv_pages=str(Path(parsed.kv_pages).resolve()))
        core = open_core(parsed)
        if told := core.facts().get("unequal_memory"):
            warnings.warn(told, RuntimeWarning, stacklevel=2)
        return cls(parsed, core)

    @property
    def ability(self) -> ScoringAbility:
        """Every path, whole distributions, states. Hooks are those of K and V, see
        `assay.engines.vllm.hooks`.
        """
        return ScoringAbility(
            frozenset(ScoringPath),
            reason="hooks of transformers' modules do not fit vLLM's; those of K and V do",
        )

    @property
    def tokenizer(self) -> TokenizerFacts:
        """Facts of the tokenizer that lies beside the weights."""
        return self.core.tokenizer

    @property
    def head(self) -> Head:
        """The output head."""
        return self.core.head

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

        `references` are the reference's rows of `windows`, taken batch by batch. `target` is the
        import path of a function of a batch (reference rows, candidate rows) that gives a dataclass
        of tensors for each window, such as
        `assay.fidelity.metrics.token_statistics:batch_statistics`. For a worker only the states
        travel to it and the statistics back; in this process it is what `score_windows` and that
        function do.
        """
        for part in self._batches(windows, job):
            yield from zip(
                part,
                self.core.reduce(part, list(islice(references, len(part))), target),
                strict=True,
            )

    def generate_greedy(
        self, prefixes: Sequence[tuple[int, ...]], count: int
    ) -> list[list[GreedyStep]]:
        """`count` greedy tokens after each prefix, as vLLM generates them."""
        return self.core.greedy(prefixes, count)

    def _batches(self, windows: Sequence[Window], job: ScoreJob) -> Iterator[Sequence[Window]]:
        """Batches of windows, with the job's hook in place; the engagement is booked as each is
        done.
        """
        batch = self.core.begin(job, check_windows(windows, job))
        try:
            for lo in range(0, len(windows), batch):
                yield windows[lo : lo + batch]
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
