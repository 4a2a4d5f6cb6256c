"""What assay puts into vLLM while it runs: a watch on its steps, and hooks on keys and values in
its attention.

Hooks sit between projection and RoPE, or after RoPE, in models whose attention is written as
Llama's: `rotary_emb(positions, q, k)`, then `attn(q, k, v)` (Llama, Qwen2, Qwen3 and what vLLM
derives from them). What a hook returns is what attention uses and what goes into the KV cache, so
later tokens read it. Nothing of vLLM is changed on disk; what is put around a method of the running
model runner is taken off again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from assay.engines.scoring import Engagement, HookSpec, load_hook
from assay.errors import AssayError, UsageError
from assay.plugins import load

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
        """Hold the positions [tokens] that the model was given against the requests, once a step."""
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


ARCHITECTURES = frozenset({"LlamaAttention", "Qwen2Attention", "Qwen3Attention"})
"""Names of the attention classes that have been read; a subclass of one counts by its own name or
its parents'.
"""


class KvHook(Protocol):
    """What a hook of vLLM must offer. `on_kv` is called for every layer and step, in the order of
    layers.

    `k` and `v` are [tokens, kv_heads, head_dim], the packed tokens of all requests of the step;
    `positions` [tokens]. Both returned tensors keep shape, type and device. `placement` says
    whether `k` comes before or after RoPE (norms of queries and keys are applied before).

    What else a hook may have, each called where it is there: `passes` and `start_pass(index)`, for
    one that must see a batch more than once; `bind(model, context)`, called once before anything
    else, with the model and the engine's `HookContext`; `placement_of(layer)`, where `placement`
    differs by layer; `on_query(layer, q, positions)`, which sees the queries [tokens, heads,
    head_dim] of the same place, before `on_kv`; `commit()` and `discard()`, when a batch went
    through or failed half-way; `engagement()`, instead of the count of calls, and `notes`;
    `check_ranks(tensor, stages)`, which raises where several ranks cannot run it (without it none
    do), and `merged(engagements)`, that of all ranks.
    """

    placement: Literal["pre_rope", "post_rope"]

    def on_kv(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values to use instead."""
        ...


@dataclass(frozen=True)
class HookContext:
    """What the engine offers a hook: the step that runs, and the cache of each layer.

    `attentions` are the attention modules by layer number, `rotary` their RoPE. `share` is the
    number of the rank and how many share the heads.
    """

    steps: Steps
    attentions: Mapping[int, Any]
    rotary: Mapping[int, Any]
    share: tuple[int, int] = (0, 1)

    def rewrite(self, layer: int, changes: Sequence[Rewrite], *, rotate: bool) -> None:
        """Replace K and V of earlier tokens in the cache of a layer; with `rotate` K is given
        before RoPE.
        """
        turned = list(changes)
        if rotate and changes:
            keys = torch.cat([change.k for change in changes])
            positions = torch.cat([torch.arange(c.lo, c.lo + c.k.shape[0]) for c in changes])
            flat = keys.flatten(1).contiguous()
            # RoPE works in place, and some kernels take no key alone.
            _, rotated = self.rotary[layer](positions.to(flat.device), flat.clone(), flat)
            parts = rotated.view(keys.shape).split([c.k.shape[0] for c in changes])
            turned = [replace(c, k=k) for c, k in zip(changes, parts, strict=True)]
        if turned:
            self.steps.rewrite(self.attentions[layer].attn, turned)


class KvHooks:
    """One hook in place in all layers of a model of vLLM, until `remove`."""

    def __init__(
        self,
        spec: HookSpec,
        model: Any,
        *,
        eager: bool,
        steps: Steps | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self._hook = load_hook(spec)
        self.passes = int(getattr(self._hook, "passes", 1))
        self._steps = steps
        self._fires: dict[int, int] = {}
        self._pending: dict[int, int] = {}
        self._undo: list[Callable[[], None]] = []
        if not hasattr(self._hook, "on_kv"):
            raise _refused(
                f"the hook {spec.target} is none of K and V (it has no on_kv)", "use it with hf:"
            )
        if not eager:
            raise _refused(
                "compiled models and CUDA graphs run no hooks", "leave out enforce_eager=false"
            )
        layers = attention_layers(model)
        if hasattr(self._hook, "bind"):
            if steps is None:
                raise _refused(
                    f"the hook {spec.target} must know the engine's steps", "use it with vllm:"
                )
            rotary = {layer: module.rotary_emb for layer, module in layers.items()}
            self._hook.bind(model, HookContext(steps, layers, rotary, share))
        if steps is not None:
            self._undo.append(steps.watch(self.check if steps.serving else lambda: None))
        for layer, module in layers.items():
            self._fires[layer] = self._pending[layer] = 0
            self._undo.append(_hook_layer(module, layer, self))

    def start_pass(self, index: int) -> None:
        """Tell the hook which pass over the batch begins."""
        if hasattr(self._hook, "start_pass"):
            self._hook.start_pass(index)

    def apply(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        heads: int,
        query: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the hook with K and V [tokens, heads · head_dim] by head; check and flatten what it
        returns.
        """
        shape = (k.shape[0], heads, -1)
        if self._steps is not None:
            self._steps.check(positions)
        if query is not None and hasattr(self._hook, "on_query"):
            width = k.shape[-1] // heads
            self._hook.on_query(layer, query.reshape(query.shape[0], -1, width), positions)
        found = self._hook.on_kv(layer, k.reshape(shape), v.reshape(shape), positions)
        for name, old, new in zip("kv", (k, v), found, strict=True):
            if new.numel() != old.numel() or new.dtype != old.dtype or new.device != old.device:
                raise _refused(
                    f"the hook changed {name} of layer {layer} from {old.dtype} {tuple(old.shape)}"
                    f" to {new.dtype} {tuple(new.shape)}",
                    "return tensors of the same shape, type and device",
                )
        self._pending[layer] += 1
        return found[0].reshape(k.shape), found[1].reshape(v.shape)

    def after_rope(self, layer: int) -> bool:
        """Whether K of a layer is handed over with positions in it."""
        by_layer = getattr(self._hook, "placement_of", None)
        return bool((by_layer(layer) if by_layer else self._hook.placement) == "post_rope")

    def commit(self) -> None:
        """Count the fires of a batch that went through; AssayError where some layers fired and
        others did not.
        """
        self.check()
        if hasattr(self._hook, "commit"):
            self._hook.commit()

    def check(self) -> None:
        """Count the fires so far; AssayError where some layers fired and others did not."""
        most = max(self._pending.values())
        skipped = [layer for layer, fires in self._pending.items() if fires != most or not fires]
        if skipped:
            raise AssayError(
                f"the hook was skipped in layers {skipped}",
                finding_id="fidelity.not_engaged",
                remedy="run with enforce_eager in one engine process",
                evidence={"fires": {str(layer): fires for layer, fires in self._pending.items()}},
            )
        for layer, fires in self._pending.items():
            self._fires[layer] += fires
        self._pending = dict.fromkeys(self._pending, 0)

    def discard(self) -> None:
        """Forget the fires of a batch that failed half-way."""
        self._pending = dict.fromkeys(self._pending, 0)
        if hasattr(self._hook, "discard"):
            self._hook.discard()

    def engagement(self) -> Engagement:
        """What the hook counted in all batches that went through, its calls in each layer if it
        counts nothing.
        """
        if hasattr(self._hook, "engagement"):
            found: Engagement = self._hook.engagement()
            return found
        notes: Mapping[str, Any] = getattr(self._hook, "notes", {})
        return Engagement(sum(self._fires.values()), None, dict(self._fires), dict(notes))

    def remove(self) -> None:
        """Undo everything, in reverse."""
        while self._undo:
            self._undo.pop()()


def attention_layers(model: Any) -> dict[int, Any]:
    """The attention modules of the decoder by layer number; AssayError where one is of a kind that
    was not read.
    """
    layers: dict[int, Any] = {}
    for name, module in model.named_modules():
        number = next((int(part) for part in reversed(name.split(".")) if part.isdigit()), None)
        if number is None or not (hasattr(module, "rotary_emb") and hasattr(module, "attn")):
            continue
        if not any(kind.__name__ in ARCHITECTURES for kind in type(module).__mro__):
            raise _refused(
                f"{type(module).__name__} is no attention that assay hooks",
                "use Llama, Qwen2 or Qwen3",
            )
        if number in layers:
            raise _refused(f"layer {number} has two attentions", "use a plain decoder")
        layers[number] = module
    expected = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    stage = getattr(model, "model", None)  # a pipeline stage has some of them
    if stage is not None and hasattr(stage, "start_layer") and hasattr(stage, "end_layer"):
        expected = stage.end_layer - stage.start_layer
    if not layers or (expected is not None and len(layers) != expected):
        raise _refused(
            f"{type(model).__name__} has {len(layers)} attention layers that can be hooked, of"
            f" {expected}",
            "use a Llama, Qwen2 or Qwen3 model",
        )
    return layers


def _hook_layer(module: Any, layer: int, hooks: KvHooks) -> Callable[[], None]:
    """Put the hook around one attention; returns what undoes it.

    Before RoPE V is not at hand yet, so RoPE is put off: its module only notes what it was called
    with, and the hook and then the real RoPE run when attention itself is called.
    """
    rotary, after_rope = module.rotary_emb, hooks.after_rope(layer)
    noted: dict[str, Any] = {}

    def note(positions: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        noted["call"] = (positions, args, kwargs)
        return rotary(positions, query, key, *args, **kwargs) if after_rope else (query, key)

    def before_attention(attention: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        query, key, value, *rest = inputs
        if "call" not in noted:
            raise _refused(
                f"layer {layer} called no RoPE before its attention",
                "use a Llama, Qwen2 or Qwen3 model",
            )
        positions, args, kwargs = noted.pop("call")
        key, value = hooks.apply(layer, key, value, positions, module.num_kv_heads, query)
        if not after_rope:
            query, key = rotary(positions, query, key, *args, **kwargs)
        return (query, key, value, *rest)

    handle = module.attn.register_forward_pre_hook(before_attention)
    # The rotary module is shared by all layers, so it is replaced in this one, not hooked.
    del module.rotary_emb
    module.rotary_emb = note

    def undo() -> None:
        handle.remove()
        del module.rotary_emb
        module.rotary_emb = rotary

    return undo


def _refused(what: str, remedy: str) -> AssayError:
    return AssayError(what, finding_id="fidelity.hook_missing", remedy=remedy)


# Entry point `vllm.general_plugins`: puts a hook on keys and values into a vLLM that serves.
#
# vLLM calls `register` in each of its processes, sometimes more than once. Without the environment
# variable `ASSAY_VLLM_HOOK` it does nothing; with it (`{"target": "package.module:factory",
# "config": {…}}`), the hook is put in place as soon as a worker has loaded its model, and a model
# that cannot be hooked ends the start. What came of it is written into the file that
# `ASSAY_VLLM_HOOK_REPORT` names, if any: `{"layers": 30}`, or the `error` and its `remedy`.

HOOK = "ASSAY_VLLM_HOOK"
REPORT = "ASSAY_VLLM_HOOK_REPORT"


def hook_from_environment() -> HookSpec | None:
    """The hook that `ASSAY_VLLM_HOOK` names; UsageError where it cannot be read."""
    text = os.environ.get(HOOK)
    if not text:
        return None
    try:
        return HookSpec(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{HOOK} holds no hook: {error}",
            remedy='write {"target": "package.module:factory", "config": {}}',
            finding_id="kv.usage",
        ) from error


def register() -> None:
    """Have every worker of this process hook its model, if a hook is asked for; then what plug-ins
    add to vLLM.
    """
    for hook in load("assay.vllm_hooks").values():
        hook.register()
    spec = hook_from_environment()
    if spec is None:
        return
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker.load_model, "assay_hook"):
        return
    inner = Worker.load_model

    @wraps(inner)
    def load_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = inner(worker, *args, **kwargs)
        try:
            worker.assay_hooks = _hooked(spec, worker)
        except AssayError as error:
            report({"error": error.message, "remedy": error.remedy})
            raise
        report({"layers": len(worker.assay_hooks.engagement().per_layer)})
        return loaded

    load_model.assay_hook = spec  # type: ignore[attr-defined]
    Worker.load_model = load_model


def _hooked(spec: HookSpec, worker: Any) -> Any:
    config, runner = worker.vllm_config, worker.model_runner
    if config.parallel_config.tensor_parallel_size > 1:
        raise UsageError(
            "with tensor parallelism every worker has a part of the heads, which a codec must see"
            " together",
            remedy="serve with --tensor-parallel-size 1",
            finding_id="kv.usage",
        )
    if not hasattr(runner, "requests"):
        raise UsageError(
            f"{type(runner).__module__} keeps its requests in another way than assay reads them",
            remedy="serve with VLLM_USE_V2_MODEL_RUNNER=0 in the environment",
            finding_id="kv.usage",
        )
    return KvHooks(
        spec,
        runner.get_model(),
        eager=config.model_config.enforce_eager,
        steps=Steps(runner, prefix=None),
    )


def report(found: dict[str, Any]) -> None:
    """Tell whoever started the server, in the file that it named."""
    if path := os.environ.get(REPORT):
        Path(path).write_text(json.dumps(found), encoding="utf-8")
