"""A hook on the keys and values of vLLM's attention layers, before they enter the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from assay.engines.scoring import Engagement, HookSpec, load_hook
from assay.engines.vllm.steps import Rewrite, Steps
from assay.errors import AssayError

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
            raise refused(
                f"the hook {spec.target} is none of K and V (it has no on_kv)", "use it with hf:"
            )
        if not eager:
            raise refused(
                "compiled models and CUDA graphs run no hooks", "leave out enforce_eager=false"
            )
        layers = attention_layers(model)
        if hasattr(self._hook, "bind"):
            if steps is None:
                raise refused(
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
                raise refused(
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
            raise refused(
                f"{type(module).__name__} is no attention that assay hooks",
                "use Llama, Qwen2 or Qwen3",
            )
        if number in layers:
            raise refused(f"layer {number} has two attentions", "use a plain decoder")
        layers[number] = module
    expected = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    stage = getattr(model, "model", None)  # a pipeline stage has some of them
    if stage is not None and hasattr(stage, "start_layer") and hasattr(stage, "end_layer"):
        expected = stage.end_layer - stage.start_layer
    if not layers or (expected is not None and len(layers) != expected):
        raise refused(
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
            raise refused(
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


def refused(what: str, remedy: str) -> AssayError:
    """The error for a model on which no hook can be put."""
    return AssayError(what, finding_id="fidelity.hook_missing", remedy=remedy)
