"""llama.cpp in this process as an engine that scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from assay.engines.device import Batches, memory_error
from assay.engines.scoring import (
    Engagement,
    GreedyStep,
    LogitRows,
    ScoreJob,
    ScoringAbility,
    ScoringPath,
    TokenizerFacts,
    Window,
    check_windows,
    top_two,
)
from assay.engines.threads import choose_threads
from assay.errors import AssayError, UsageError

if TYPE_CHECKING:
    import torch
from assay.engines.gguf.context import Context, NoContext
from assay.engines.gguf.library import describe_model, load_library, load_model
from assay.engines.gguf.spec import GgufSpec, parse_gguf
from assay.engines.gguf.tokenizer import tokenizer_facts

_LOGIT_BYTES = 1 << 30
"""Bound on the logits of one batch: windows × scored tokens × vocabulary × 4. One window may exceed
it alone.
"""


_AT_ONCE = 8
"""Windows that run together by default."""


class GgufScorer:
    """Scores windows with llama.cpp. Attention reads K and V from the cache on every path, prefill
    included.
    """

    def __init__(self, spec: GgufSpec, library: Any, model: Any) -> None:
        self.spec = spec
        self._library = library
        self._model = model
        self._engagement = Engagement()
        self._batches: Batches | None = None

    @classmethod
    def load(cls, spec: str) -> GgufScorer:
        """Load `gguf:FILE?…`; AssayError where llama-cpp-python is missing or cannot read the
        file.
        """
        parsed = parse_gguf(spec)
        return cls(parsed, load_library(), load_model(parsed))

    @property
    def ability(self) -> ScoringAbility:
        """Every path, whole distributions, no states."""
        return ScoringAbility(
            frozenset(ScoringPath),
            states=False,
            reason="llama.cpp gives logits; its output head is quantised and applied inside",
        )

    @cached_property
    def tokenizer(self) -> TokenizerFacts:
        """Facts of the tokenizer in the file."""
        return tokenizer_facts(self._library, self._model)

    def describe(self) -> dict[str, Any]:
        """Engine, versions, model and number formats."""
        return {
            "engine": "gguf",
            "model": Path(self.spec.model).name,
            "llama_cpp_python": self._library.__version__,
            "kv_cache": {"k": self.spec.k, "v": self.spec.v},
            "ubatch": self.spec.ubatch,
            "gpu_layers": self.spec.gpu_layers if self._library.llama_supports_gpu_offload() else 0,
            "threads": self.spec.threads or choose_threads(),
            **describe_model(self._library, self._model),
        }

    def score_windows(self, windows: Sequence[Window], job: ScoreJob) -> Iterator[LogitRows]:
        """The rows of every window, in order; memory holds the logits of one batch."""
        length = check_windows(windows, job)
        if job.hook:
            raise UsageError(
                "llama.cpp takes no hooks",
                remedy="use hf: or vllm: for what changes the forward pass",
                finding_id="fidelity.usage",
            )
        scored = length - job.scored_from
        most = max(1, _LOGIT_BYTES // (4 * scored * self.tokenizer.vocab_size))
        batch = min(job.batch or _AT_ONCE, len(windows), most)
        self._batches = batches = self._batches.again(batch) if self._batches else Batches(batch)
        self._engagement = Engagement()
        read = 0.0

        def rows_of(part: Sequence[Window]) -> torch.Tensor:
            nonlocal read
            blocks = plan_blocks(length, job, max(1, self.spec.ubatch // len(part)))
            widest = max(hi - lo for lo, hi in blocks)
            try:
                context = Context(
                    self._library,
                    self._model,
                    self.spec,
                    sequences=len(part),
                    length=length,
                    block=widest,
                )
            except NoContext as error:
                if len(part) == 1:
                    raise
                raise MemoryError from error
            with context:
                rows = score_window(context, part, job, blocks)
                read += (
                    len(part) * context.bytes_per_token(length - 1) * sum(hi for _, hi in blocks)
                )
            return rows

        def too_large(window: Window) -> AssayError:
            return memory_error(f"a single window of {length:,} tokens", "llama.cpp")

        for window, values in batches.run(windows, rows_of, too_large):
            notes = {"batch": batches.note()} if batches.halved else {}
            self._engagement = Engagement(bytes_read=int(read), notes=notes)
            yield LogitRows(window, job.scored_from, values)

    def generate_greedy(
        self, prefixes: Sequence[tuple[int, ...]], count: int
    ) -> list[list[GreedyStep]]:
        """`count` greedy tokens after each of the equally long prefixes, all in one batch through
        the cache.
        """
        import torch

        ids = np.array(prefixes, dtype=np.int32)
        length = ids.shape[1]
        steps: list[list[GreedyStep]] = []
        with Context(
            self._library,
            self._model,
            self.spec,
            sequences=len(prefixes),
            length=length + count,
            block=max(1, length - 1),
        ) as context:
            context.clear()
            if length > 1:
                context.read(ids[:, :-1], 0, logits=False)
            last = ids[:, -1:]
            for position in range(length - 1, length - 1 + count):
                rows = context.read(last, position, logits=True)
                if rows is None:
                    raise RuntimeError("llama.cpp gave no logits, though they were asked for")
                steps.append(top_two(torch.from_numpy(rows[:, 0])))
                last = np.array([[step.token] for step in steps[-1]], dtype=np.int32)
        return [list(row) for row in zip(*steps, strict=True)]

    def engagement(self) -> Engagement:
        """Bytes of the cache that attention has read."""
        return self._engagement

    def close(self) -> None:
        """Free the model."""
        if self._model:
            self._library.llama_model_free(self._model)
            self._model = None


def plan_blocks(length: int, job: ScoreJob, prefill: int) -> list[tuple[int, int]]:
    """The tokens lo … hi − 1 that each call reads, in order; the last token of a window predicts
    nothing.

    Prefill is cut into blocks of `prefill` tokens, which bounds the logits of one call. On the
    other paths so is the prefix; then come blocks of `job.chunk` tokens, or single ones.
    """
    last = length - 1
    prefix = last if job.path is ScoringPath.PREFILL else job.scored_from - 1
    step = 1 if job.path is ScoringPath.DECODE else job.chunk
    # A block is scored whole or not at all.
    edges = sorted(
        {
            *range(0, prefix, prefill),
            *range(prefix, last, step),
            min(job.scored_from - 1, last),
            last,
        }
    )
    return list(pairwise(edges))


def score_window(
    context: Context, windows: Sequence[Window], job: ScoreJob, blocks: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Float32 logits [B, length − scored_from, V]."""
    import torch

    ids = np.array([w.tokens for w in windows], dtype=np.int32)
    first = job.scored_from - 1
    values = torch.empty(len(windows), ids.shape[1] - job.scored_from, context.vocab_size)
    context.clear()
    for lo, hi in blocks:
        rows = context.read(ids[:, lo:hi], lo, logits=lo >= first)
        if rows is not None:
            values[:, lo - first : hi - first] = torch.from_numpy(rows)
    return values
