"""Final states of token windows from a causal model of transformers, by any scoring path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from assay.engines.hf.cache_name import with_cache
from assay.engines.hf.caches import new_cache
from assay.engines.scoring import EngineHook, ScoreJob, ScoringPath, Window
from assay.engines.setup import setup_facts
from assay.errors import AssayError

if TYPE_CHECKING:
    import torch


def window_states(
    model: Any, windows: Sequence[Window], job: ScoreJob, hook: EngineHook | None
) -> Iterator[tuple[Window, torch.Tensor]]:
    """Yield (window, states [length − scored_from, d]) in order; row i predicts token `scored_from + i`.

    A batch that does not fit into memory is halved and tried again; AssayError where one window does not fit, and
    where windows are longer than the positions that the model has.
    """
    _check_positions(model, windows)
    batch, done = job.batch, 0
    while done < len(windows):
        part = windows[done : done + batch]
        try:
            states = _batch_states(model, part, job, hook)
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            if len(part) == 1:
                raise AssayError(
                    f"out of memory with a single window of {len(part[0].tokens):,} tokens on {model.device}",
                    finding_id="fidelity.out_of_memory",
                    remedy="give a smaller --length, a smaller type (?dtype=bfloat16) or another device",
                ) from error
            batch = max(1, len(part) // 2)
            _give_back(model)
            continue
        yield from zip(part, states, strict=True)
        done += len(part)


def _batch_states(
    model: Any, windows: Sequence[Window], job: ScoreJob, hook: EngineHook | None
) -> torch.Tensor:
    """States [B, length − scored_from, d] of one batch."""
    import torch

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
    import torch

    if cache is None:
        cache = new_cache(model)
    prefix, last = job.scored_from - 1, ids.shape[1] - 1  # the last token predicts nothing that is scored
    if prefix:
        _forward(model, ids[:, :prefix], cache)
    if hook:
        hook.after_prefix(cache)
    step = 1 if job.path is ScoringPath.DECODE else job.chunk
    rows = [_forward(model, ids[:, lo : min(lo + step, last)], cache) for lo in range(prefix, last, step)]
    return torch.cat(rows, dim=1)


def _check_positions(model: Any, windows: Sequence[Window]) -> None:
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    # Scaled rotary embeddings may reach further than this number says.
    scaled = (setup_facts(config).get("rope") or {}).get("rope_type")
    longest = max((len(w.tokens) for w in windows), default=0)
    if limit and longest > limit and not scaled:
        raise AssayError(
            f"windows of {longest:,} tokens are longer than the {limit:,} positions of {type(model).__name__}",
            finding_id="fidelity.window_too_long",
            remedy=f"give --length {limit} or less",
        )


def _out_of_memory(error: RuntimeError) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _give_back(model: Any) -> None:
    import torch

    if model.device.type == "cuda":
        torch.cuda.empty_cache()
