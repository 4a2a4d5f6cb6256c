"""transformers as a scoring engine: final states of windows by any path, with hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from assay.engines import Engine, setup_facts
from assay.engines.device import (
    Batches,
    free_memory,
    memory_error,
    out_of_memory,
    window_bytes,
    windows_at_once,
)
from assay.engines.hf.cache import new_cache, token_bytes, with_cache
from assay.engines.hf.engine import HfEngine
from assay.engines.hf.tokenizer import facts_of
from assay.engines.scoring import (
    Engagement,
    EngineHook,
    GreedyStep,
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
    top_two,
)
from assay.engines.tokenizer import document_start
from assay.errors import AssayError


def choose_batch(model: Any, length: int, job: ScoreJob, *, hooked: bool = False) -> int:
    """How many windows of `length` tokens run together: all that 70 % of the free memory holds, or
    that make it faster.

    The cache is counted where one is read; with a hook twice more in float32, which it may hold.
    See `window_bytes`.
    """
    config, size = model.config.get_text_config(), model.dtype.itemsize
    token = (token_bytes(model) or 0) if hooked or job.path is not ScoringPath.PREFILL else 0
    if hooked:
        token *= 1 + 8 // size
    eager = config._attn_implementation == "eager"
    window = window_bytes(config, size, length, job, token, eager=eager)
    return windows_at_once(model.device.type, length, job, window, free_memory(model.device))


def window_states(
    model: Any,
    windows: Sequence[Window],
    job: ScoreJob,
    hook: EngineHook | None,
    batches: Batches | None = None,
) -> Iterator[tuple[Window, torch.Tensor]]:
    """Yield (window, states [length − scored_from, d]) in order; row i predicts token `scored_from
    + i`.

    A batch that does not fit into memory is halved and tried again. AssayError where one window
    does not fit, where a hook cannot forget what it has seen of a batch that failed, and where
    windows are longer than the positions that the model has.
    """
    check_positions(model, windows)
    if not windows:
        return
    length = len(windows[0].tokens)

    def states_of(part: Sequence[Window]) -> torch.Tensor:
        try:
            return _batch_states(model, part, job, hook)
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error) and hook and len(part) > 1:
                if not hasattr(hook, "discard"):
                    raise memory_error(
                        f"{len(part)} windows of {length:,} tokens",
                        model.device,
                        "give a smaller --batch",
                    ) from error
                hook.discard()
            raise

    def too_large(window: Window) -> AssayError:
        return memory_error(f"a single window of {length:,} tokens", model.device)

    batches = batches or Batches(
        job.batch or choose_batch(model, length, job, hooked=hook is not None)
    )
    yield from batches.run(windows, states_of, too_large)


def _batch_states(
    model: Any, windows: Sequence[Window], job: ScoreJob, hook: EngineHook | None
) -> torch.Tensor:
    """States [B, length − scored_from, d] of one batch."""
    ids = torch.tensor([w.tokens for w in windows], dtype=torch.long, device=model.device)
    states = None
    with torch.inference_mode():
        for index in range(hook.passes if hook else 1):
            cache = hook.new_cache(len(windows), index) if hook else None
            if job.path is ScoringPath.PREFILL:
                states = _forward(model, ids[:, :-1], cache)[:, job.scored_from - 1 :]
            else:
                states = _through_cache(model, ids, job, hook, cache)
    if states is None:
        raise ValueError("a hook must ask for at least one pass")
    return states


def _forward(model: Any, ids: torch.Tensor, cache: Any | None) -> torch.Tensor:
    """Final states [B, T, d] of a block of tokens that follows what is in `cache`."""
    base = model.base_model
    output = base(input_ids=ids, **with_cache(base, cache), use_cache=cache is not None)
    states: torch.Tensor = output.last_hidden_state
    return states


def _through_cache(
    model: Any, ids: torch.Tensor, job: ScoreJob, hook: EngineHook | None, cache: Any | None
) -> torch.Tensor:
    """Prefill the prefix, then feed the rest by blocks (or one by one), each reading the cache."""
    if cache is None:
        cache = new_cache(model)
    prefix, last = (
        job.scored_from - 1,
        ids.shape[1] - 1,
    )  # the last token predicts nothing that is scored
    if prefix:
        _forward(model, ids[:, :prefix], cache)
    if hook:
        hook.after_prefix(cache)
    step = 1 if job.path is ScoringPath.DECODE else job.chunk
    rows = [
        _forward(model, ids[:, lo : min(lo + step, last)], cache)
        for lo in range(prefix, last, step)
    ]
    return torch.cat(rows, dim=1)


def check_positions(model: Any, windows: Sequence[Window]) -> None:
    """AssayError where windows are longer than the model has positions, or hold a token that it has
    not.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    # Scaled rotary embeddings may reach further than this number says.
    scaled = (setup_facts(config).get("rope") or {}).get("rope_type")
    longest = max((len(w.tokens) for w in windows), default=0)
    if limit and longest > limit and not scaled:
        raise AssayError(
            f"windows of {longest:,} tokens are longer than the {limit:,} positions that the"
            " model has",
            finding_id="fidelity.window_too_long",
            remedy=f"give --length {limit} or less",
        )
    rows = int(model.get_input_embeddings().weight.shape[0])
    if (largest := max((max(w.tokens) for w in windows), default=0)) >= rows:
        raise AssayError(
            f"the tokenizer gives token {largest:,}, and {type(model).__name__} has {rows:,}"
            " embeddings: they do not belong together",
            finding_id="fidelity.tokenizer",
            remedy="put the tokenizer that the model was trained with into its folder",
        )


def output_head(model: Any) -> Head:
    """The head of `model`. AssayError where its logits are not those that the model itself
    computes.

    Besides the matrix a model may scale its logits (Cohere's `logit_scale`, Granite's
    `logits_scaling`) or cap them (Gemma 2's `final_logit_softcapping`).
    """
    linear = model.get_output_embeddings()
    if linear is None:
        raise AssayError(
            f"{type(model).__name__} has no output head that states could be put through",
            finding_id="fidelity.no_head",
            remedy="compare causal language models",
        )
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    if divisor := getattr(config, "logits_scaling", None):
        scale /= float(divisor)
    head = Head(
        linear.weight.detach(),
        None if linear.bias is None else linear.bias.detach(),
        softcap=getattr(config, "final_logit_softcapping", None),
        scale=scale,
    )
    _check(model, head)
    return head


def _check(model: Any, head: Head) -> None:
    """Compare the head with the model's own logits on a few tokens."""
    ids = torch.arange(1, 9, device=model.device).unsqueeze(0)
    with torch.inference_mode():
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        own = model(input_ids=ids, use_cache=False).logits[0].float()
        rebuilt = head.logits(states)
    # One unit of the logits' own rounding, relative to the largest of them.
    tolerance = 4 * float(torch.finfo(model.dtype).eps) * float(own.abs().max())
    difference = float((own - rebuilt).abs().max())
    if not difference <= tolerance and bool(torch.isfinite(own).all()):
        raise AssayError(
            f"the logits of {type(model).__name__} cannot be rebuilt from its final states: they"
            f" differ by {difference:.3g}",
            finding_id="fidelity.no_head",
            remedy="compare it through another engine (vllm:, gguf:)",
            evidence={"max_difference": difference, "tolerance": tolerance},
        )


def greedy_steps(
    model: Any, head: Head, prefixes: Sequence[tuple[int, ...]], count: int
) -> list[list[GreedyStep]]:
    """`count` tokens after each of the equally long prefixes, all in one batch, token by token
    through the cache.
    """
    ids = torch.tensor(prefixes, dtype=torch.long, device=model.device)
    base, cache = model.base_model, new_cache(model)
    steps: list[list[GreedyStep]] = []
    with torch.inference_mode():
        for _ in range(count):
            states = base(
                input_ids=ids, **with_cache(base, cache), use_cache=True
            ).last_hidden_state
            steps.append(top_two(head.logits(states[:, -1])))
            ids = torch.tensor([[step.token] for step in steps[-1]], device=model.device)
    return [list(row) for row in zip(*steps, strict=True)]


class HfScorer:
    """Scores windows with a model of transformers in this process."""

    def __init__(self, engine: HfEngine) -> None:
        self.engine = engine
        self._engagement = Engagement()
        self._batches: Batches | None = None

    @classmethod
    def load(cls, spec: str) -> HfScorer:
        """Load `hf:PATH?…`; AssayError where that is not possible."""
        return cls(HfEngine.load(spec))

    @property
    def ability(self) -> ScoringAbility:
        """Every path, whole distributions, states; not prefill where the KV cache is held in
        another type.
        """
        unread = self.engine.spec.unread
        paths = frozenset(ScoringPath) - {ScoringPath.PREFILL} if unread else frozenset(ScoringPath)
        return ScoringAbility(paths, hooks=True, reason=unread)

    @cached_property
    def tokenizer(self) -> TokenizerFacts:
        """Facts of the tokenizer that lies beside the weights."""
        return facts_of(self.engine.tokenizer)

    @cached_property
    def head(self) -> Head:
        """The output head, checked against the model's own logits."""
        return output_head(self.engine.model)

    def describe(self) -> dict[str, Any]:
        """Engine, versions, model and number formats; after scoring, how many windows ran
        together.
        """
        return self.engine.describe() | ({"batch": self._batches.note()} if self._batches else {})

    def batch_size(self, windows: Sequence[Window], job: ScoreJob) -> int:
        """How many of the windows run together."""
        return job.batch or choose_batch(
            self.engine.model, check_windows(windows, job), job, hooked=job.hook is not None
        )

    def score_windows(self, windows: Sequence[Window], job: ScoreJob) -> Iterator[WindowRows]:
        """The rows of every window, in order; the hook of the job is in place while the iterator
        lives.
        """
        size = self.batch_size(windows, job)
        hook = load_hook(job.hook) if job.hook else None
        self.engine.spec.refuse_path(job.path)
        model, head = (
            self.engine.model,
            self.head,
        )  # the head's check runs the model, which is no hook's to see
        # What did not fit once does not fit the next time, and both sides of a comparison should
        # run alike.
        self._batches = batches = self._batches.again(size) if self._batches else Batches(size)
        self._engagement = Engagement()
        try:
            with hook.attach(model) if hook else nullcontext():
                for window, states in window_states(model, windows, job, hook, batches):
                    yield StateRows(window, job.scored_from, states, head)
        # of a run that was cut short too; the hook knows all it did only when it has been taken off
        finally:
            found = (
                hook.engagement()
                if hook
                else Engagement(bytes_read=_bytes_read(model, windows, job))
            )
            notes = {"batch": batches.note()} if batches.halved else {}
            self._engagement = replace(found, notes={**found.notes, **notes})

    def generate_greedy(
        self, prefixes: Sequence[tuple[int, ...]], count: int
    ) -> list[list[GreedyStep]]:
        """`count` greedy tokens after each of the equally long prefixes."""
        model = self.engine.model

        def too_large(prefix: tuple[int, ...]) -> AssayError:
            return memory_error(f"a prefix of {len(prefix):,} tokens", model.device)

        found = Batches(len(prefixes)).run(
            prefixes, lambda part: greedy_steps(model, self.head, part, count), too_large
        )
        return [steps for _, steps in found]

    def sampler(self) -> tuple[Engine, tuple[int, ...]]:
        """The model, and what separates documents for it: its start token, or the end-of-text
        token.
        """
        return self.engine, (document_start(self.engine.tokenizer),)

    def engagement(self) -> Engagement:
        """What the hook counted; without one, the cache bytes that the path reads."""
        return self._engagement

    def close(self) -> None:
        """Drop the model."""
        self.__dict__.pop("head", None)
        self.engine.close()


def _bytes_read(model: Any, windows: Sequence[Window], job: ScoreJob) -> int | None:
    """K and V bytes of earlier blocks that attention reads in all steps, were no layer to slide. 0
    for prefill.

    None where the size of a token is unknown.
    """
    if job.path is ScoringPath.PREFILL:
        return 0
    token = token_bytes(model)
    if token is None:
        return None
    step = 1 if job.path is ScoringPath.DECODE else job.chunk
    tokens = sum(range(job.scored_from - 1, len(windows[0].tokens) - 1, step))
    return len(windows) * tokens * token
