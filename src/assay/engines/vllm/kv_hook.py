"""Hooks on keys and values inside vLLM's attention: between projection and RoPE, or after RoPE.

Works for models whose attention is written as Llama's: `rotary_emb(positions, q, k)`, then `attn(q, k, v)` (Llama,
Qwen2, Qwen3 and what vLLM derives from them). What the hook returns is what attention uses and what goes into the
KV cache, so later tokens read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from assay.engines.scoring import Engagement, HookSpec, load_hook
from assay.errors import AssayError

if TYPE_CHECKING:
    import torch

ARCHITECTURES = frozenset({"LlamaAttention", "Qwen2Attention", "Qwen3Attention"})
"""Names of the attention classes that have been read; a subclass of one counts by its own name or its parents'."""


class KvHook(Protocol):
    """What a hook of vLLM must offer. `on_kv` is called for every layer and step, in the order of layers.

    `k` and `v` are [tokens, kv_heads, head_dim], the packed tokens of all requests of the step; `positions` [tokens].
    Both returned tensors keep shape, type and device. `placement` says whether `k` comes before or after RoPE (norms
    of queries and keys are applied before). A hook that must see a batch more than once sets `passes`, and is told
    which pass begins by `start_pass(index)` if it has that method.
    """

    placement: Literal["pre_rope", "post_rope"]

    def on_kv(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values to use instead."""
        ...


class KvHooks:
    """One hook in place in all layers of a model of vLLM, until `remove`."""

    def __init__(self, spec: HookSpec, model: Any, *, eager: bool) -> None:
        self._hook = load_hook(spec)
        self.passes = int(getattr(self._hook, "passes", 1))
        self._fires: dict[int, int] = {}
        self._pending: dict[int, int] = {}
        self._undo: list[Callable[[], None]] = []
        if not hasattr(self._hook, "on_kv"):
            raise _refused(f"the hook {spec.target} is none of K and V (it has no on_kv)", "use it with hf:")
        if not eager:
            raise _refused("compiled models and CUDA graphs run no hooks", "leave out enforce_eager=false")
        layers = attention_layers(model)
        for layer, module in layers.items():
            self._fires[layer] = self._pending[layer] = 0
            self._undo.append(_hook_layer(module, layer, self))

    def start_pass(self, index: int) -> None:
        """Tell the hook which pass over the batch begins."""
        if hasattr(self._hook, "start_pass"):
            self._hook.start_pass(index)

    def apply(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the hook with K and V [tokens, heads · head_dim] by head; check and flatten what it returns."""
        shape = (k.shape[0], heads, -1)
        found = self._hook.on_kv(layer, k.reshape(shape), v.reshape(shape), positions)
        for name, old, new in zip("kv", (k, v), found, strict=True):
            if new.numel() != old.numel() or new.dtype != old.dtype or new.device != old.device:
                raise _refused(
                    f"the hook changed {name} of layer {layer} from {old.dtype} {tuple(old.shape)} to "
                    f"{new.dtype} {tuple(new.shape)}",
                    "return tensors of the same shape, type and device",
                )
        self._pending[layer] += 1
        return found[0].reshape(k.shape), found[1].reshape(v.shape)

    @property
    def after_rope(self) -> bool:
        """Whether K is handed over with positions in it."""
        return bool(self._hook.placement == "post_rope")

    def commit(self) -> None:
        """Count the fires of a batch that went through; AssayError where some layers fired and others did not."""
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
        self.discard()

    def discard(self) -> None:
        """Forget the fires of a batch that failed half-way."""
        self._pending = dict.fromkeys(self._pending, 0)

    def engagement(self) -> Engagement:
        """Fires of each layer in all batches that went through."""
        notes: Mapping[str, Any] = getattr(self._hook, "notes", {})
        return Engagement(sum(self._fires.values()), None, dict(self._fires), dict(notes))

    def remove(self) -> None:
        """Undo everything, in reverse."""
        while self._undo:
            self._undo.pop()()


def attention_layers(model: Any) -> dict[int, Any]:
    """The attention modules of the decoder by layer number; AssayError where one is of a kind that was not read."""
    layers: dict[int, Any] = {}
    for name, module in model.named_modules():
        number = next((int(part) for part in reversed(name.split(".")) if part.isdigit()), None)
        if number is None or not (hasattr(module, "rotary_emb") and hasattr(module, "attn")):
            continue
        if not any(kind.__name__ in ARCHITECTURES for kind in type(module).__mro__):
            raise _refused(
                f"{type(module).__name__} is no attention that assay hooks", "use Llama, Qwen2 or Qwen3"
            )
        if number in layers:
            raise _refused(f"layer {number} has two attentions", "use a plain decoder")
        layers[number] = module
    expected = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    if not layers or (expected is not None and len(layers) != expected):
        raise _refused(
            f"{type(model).__name__} has {len(layers)} attention layers that can be hooked, of {expected}",
            "use a Llama, Qwen2 or Qwen3 model",
        )
    return layers


def _hook_layer(module: Any, layer: int, hooks: KvHooks) -> Callable[[], None]:
    """Put the hook around one attention; returns what undoes it.

    Before RoPE V is not at hand yet, so RoPE is put off: its module only notes what it was called with, and the hook
    and then the real RoPE run when attention itself is called.
    """
    rotary = module.rotary_emb
    noted: dict[str, Any] = {}

    def note(positions: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        noted["call"] = (positions, args, kwargs)
        return rotary(positions, query, key, *args, **kwargs) if hooks.after_rope else (query, key)

    def before_attention(attention: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        query, key, value, *rest = inputs
        if "call" not in noted:
            raise _refused(
                f"layer {layer} called no RoPE before its attention", "use a Llama, Qwen2 or Qwen3 model"
            )
        positions, args, kwargs = noted.pop("call")
        key, value = hooks.apply(layer, key, value, positions, module.num_kv_heads)
        if not hooks.after_rope:
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
