"""The steps of vLLM's scheduler: which tokens of which request each of them runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assay.errors import AssayError

WINDOW = "assay_window"
"""Key of `SamplingParams.extra_args`: the window that a request scores."""


def around_steps(runner: Any, step: Callable[[Callable[[], Any], Any], Any]) -> Callable[[], None]:
    """Have `step(run, scheduler_output)` run every step of a model runner from now on; returns what
    undoes it.
    """
    before, inner = runner.__dict__.get("execute_model"), runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        return step(lambda: inner(scheduler_output, *args, **kwargs), scheduler_output)

    runner.execute_model = execute_model

    def undo() -> None:
        runner.__dict__.pop("execute_model", None)
        if before is not None:
            runner.execute_model = before

    return undo


@dataclass(frozen=True)
class Request:
    """What one request has in a step: rows `offset` … of the packed tensors are its tokens `start`
    … `end` − 1.

    `key` stays the same over all steps (and passes, where windows are scored). The first `prefix`
    tokens are what a scoring path prefills, the prompt where the engine serves. `row` is its place
    in the batch.
    """

    key: str
    start: int
    count: int
    offset: int
    prefix: int
    row: int

    @property
    def end(self) -> int:
        """Position after its last token of this step."""
        return self.start + self.count


@dataclass(frozen=True)
class Rewrite:
    """K and V [tokens, kv_heads, head_dim] for earlier tokens of a request, from position `lo` on,
    after RoPE.
    """

    request: Request
    lo: int
    k: torch.Tensor
    v: torch.Tensor


class Steps:
    """Follows the steps of a model runner: whose rows are whose, and where earlier tokens lie in
    the paged cache.

    vLLM packs the requests of a step one after the other, in the order of its batch. K and V of a
    token lie in a slot: block `table[request][position // size]`, place `position % size`. Slots
    are written through the attention backend's own function, so that the layout and number format
    of the cache stay its business.
    """

    def __init__(self, runner: Any, prefix: int | None) -> None:
        """`prefix` is that of every request, None for each its prompt."""
        self._runner = runner
        self._prefix = prefix
        self._scheduled: Mapping[str, int] | None = None
        self._requests: tuple[Request, ...] | None = None
        self._checked = False

    @property
    def serving(self) -> bool:
        """Whether requests come and go, each with its own prompt."""
        return self._prefix is None

    def watch(self, after: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """Follow every step from now on; `after` is called when one is done. Returns what undoes
        it.
        """

        def step(run: Callable[[], Any], scheduler_output: Any) -> Any:
            self._scheduled, self._requests = scheduler_output.num_scheduled_tokens, None
            self._checked = False
            try:
                output = run()
                if self._scheduled:
                    after()
                return output
            finally:
                self._scheduled = self._requests = None

        return around_steps(self._runner, step)

    @property
    def requests(self) -> tuple[Request, ...] | None:
        """The requests of the step that runs; None where none does (vLLM also runs its model to
        measure memory).
        """
        if self._scheduled is None:
            return None
        if self._requests is None:
            self._requests = self._read()
        return self._requests

    def _read(self) -> tuple[Request, ...]:
        found, offset = [], 0
        for row, name in enumerate(self._runner.input_batch.req_ids):
            state = self._runner.requests[name]
            extra = getattr(state.sampling_params, "extra_args", None) or {}
            count = int((self._scheduled or {})[name])
            prefix = int(state.num_prompt_tokens) if self._prefix is None else self._prefix
            found.append(
                Request(
                    str(extra.get(WINDOW, name)),
                    int(state.num_computed_tokens),
                    count,
                    offset,
                    prefix,
                    row,
                )
            )
            offset += count
        return tuple(found)

    def check(self, positions: torch.Tensor) -> None:
        """Hold the positions [tokens] that the model was given against the requests,
        once a step.
        """
        requests = self.requests
        if self._checked or requests is None:
            return
        expected = np.concatenate([np.arange(r.start, r.end) for r in requests])
        given = positions.detach().cpu().numpy()
        if given.ndim != 1 or not np.array_equal(given[: len(expected)], expected):
            raise AssayError(
                "vLLM's positions are not those of its requests, so that tokens cannot be told"
                " apart",
                finding_id="fidelity.engine_failed",
                remedy="use a model with plain positions, without speculative decoding",
            )
        self._checked = True

    def alive(self) -> frozenset[str]:
        """Ids of the requests that the engine still holds."""
        return frozenset(self._runner.requests)

    def rewrite(self, attention: Any, changes: Sequence[Rewrite]) -> None:
        """Put K and V into the slots of earlier tokens of one layer's cache."""
        update = getattr(attention.impl, "do_kv_cache_update", None)
        if update is None:
            raise AssayError(
                f"{type(attention.impl).__name__} has no way to write into its cache outside"
                " attention",
                finding_id="fidelity.hook_missing",
                remedy="choose another attention_backend, such as FLASH_ATTN or TRITON_ATTN",
            )
        slots = torch.from_numpy(self._slots(attention.layer_name, changes)).to(changes[0].k.device)
        keys = torch.cat([change.k for change in changes]).contiguous()
        values = torch.cat([change.v for change in changes]).contiguous()
        cache = attention.kv_cache
        # Older releases keep one cache for each stage of a pipeline.
        update(
            attention, keys, values, cache[0] if isinstance(cache, list | tuple) else cache, slots
        )

    def _slots(self, layer_name: str, changes: Sequence[Rewrite]) -> NDArray[np.int64]:
        groups = self._runner.kv_cache_config.kv_cache_groups
        number = next(i for i, group in enumerate(groups) if layer_name in group.layer_names)
        table = self._runner.input_batch.block_table[number]
        blocks, size = table.get_numpy_array(), int(table.block_size)
        found = []
        for change in changes:
            positions = np.arange(change.lo, change.lo + change.k.shape[0])
            if change.lo + change.k.shape[0] > change.request.start:
                raise ValueError(
                    "tokens of the running step go back through attention, not into the cache"
                )
            found.append(
                blocks[change.request.row, positions // size].astype(np.int64) * size
                + positions % size
            )
        return np.concatenate(found)
