"""Cache layers of transformers that hand every new key and value to a function before they keep it.

What differs between releases of transformers is here: the signature of `update` and the names of
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from assay.engines.hf.cache import new_cache

if TYPE_CHECKING:
    import torch

OnUpdate = Callable[
    [int, int, "torch.Tensor", "torch.Tensor"], tuple["torch.Tensor", "torch.Tensor"]
]
"""`on_update(layer, position, keys, values)` → what the layer keeps; tensors are [batch, KV heads,
tokens, head_dim], `position` is that of the first of the tokens."""


def observed_cache(model: Any, on_update: OnUpdate) -> Any:
    """The cache of `model` with layers that pass through `on_update`.

    Each layer stays what the model wants (full or sliding) and holds the type that its engine was
    asked for; only its `update` is preceded by the call.
    """
    held = new_cache(model)
    for index, layer in enumerate(held.layers):
        layer.__class__ = _observed(type(layer))  # type: ignore[arg-type, unused-ignore]
        layer.assay_index = index
        layer.assay_position = 0
        layer.assay_on_update = on_update
    return held


@cache
def _observed(base: type) -> type:
    """A subclass of a cache layer that passes new states through `assay_on_update`."""

    class Observed(base):  # type: ignore[misc]
        assay_position: int

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            kept = self.assay_on_update(
                self.assay_index, self.assay_position, key_states, value_states
            )
            result = super().update(*kept, *args, **kwargs)
            self.assay_position += key_states.shape[-2]
            return result

    Observed.__name__ = f"Observed{base.__name__}"
    return Observed


def kept_from(layer: Any) -> int:
    """Position of the first token that a layer still holds: a sliding layer lets go of old ones."""
    return int(layer.assay_position) - (int(layer.keys.shape[-2]) if layer.is_initialized else 0)
