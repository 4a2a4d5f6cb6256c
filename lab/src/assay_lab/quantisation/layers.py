"""The linear layers of a model, and their weights replaced in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def linear_layers(model: Any) -> list[Any]:
    """The linear layers but the output head; a weight that several share is named once."""
    head = model.get_output_embeddings()
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            found.setdefault(id(module.weight), module)
    return list(found.values())


def replace_weights(
    model: Any,
    round_trip: Callable[[torch.Tensor], torch.Tensor],
    stored_bytes: Callable[[torch.Tensor], int],
) -> int:
    """Put every linear layer's weight through `round_trip` in place.

    Returns the bytes of all parameters: `stored_bytes` of the replaced ones, the others as they are
    held.
    """
    total: int = 0
    counted = set[int]()
    with torch.no_grad():
        for module in linear_layers(model):
            module.weight.copy_(round_trip(module.weight))
            total += stored_bytes(module.weight)
            counted.add(id(module.weight))
    rest = {id(p): p for p in model.parameters() if id(p) not in counted}
    total += sum(p.numel() * p.element_size() for p in rest.values())
    return total
