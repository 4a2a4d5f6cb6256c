"""Tensors between the main memory and an accelerator, with as little waiting as there can be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`. A GPU fetches it from pinned memory when its turn comes, and nobody waits for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(groups: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The same tensors in the main memory: one copy for all of a type and device, as each copy waits for the device."""
    found = [dict(group) for group in groups]
    away: dict[tuple[torch.dtype, torch.device], list[tuple[int, str]]] = defaultdict(list)
    for i, group in enumerate(groups):
        for name, tensor in group.items():
            if tensor.device.type != "cpu":
                away[tensor.dtype, tensor.device].append((i, name))
    for places in away.values():
        copies = copied_together([groups[i][name] for i, name in places], lambda joined: joined.cpu())
        for (i, name), values in zip(places, copies, strict=True):
            found[i][name] = values
    return found


def copied_together(
    tensors: Sequence[torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """What one `copy` of all tensors of one type, joined, makes of each."""
    import torch

    parts = copy(torch.cat([tensor.reshape(-1) for tensor in tensors])).split([t.numel() for t in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
