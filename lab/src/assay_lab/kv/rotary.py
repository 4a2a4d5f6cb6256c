"""Rotary embeddings taken off and put on again, so that a codec sees keys as before them.

RoPE turns pairs of channels by an angle that grows with the position: k' = k cos + rot(k) sin,
with rot(k) = (−k₂, k₁) for the halves k₁, k₂ of the rotated channels. It is orthogonal up to the
factor s of long-context variants (cos² + sin² = s²), so k = (k' cos − rot(k') sin) / s². The
cosines come from the model's own rotary module, with any scaling.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from assay.errors import AssayError


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines [tokens, rotated channels] of given positions, float32."""

    cos: torch.Tensor
    sin: torch.Tensor

    def remove(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys [..., tokens, head_dim] before RoPE, float32."""
        rotated, rest = self._split(keys)
        scale = self.cos.square() + self.sin.square()
        return self._join((rotated * self.cos - _rotate_half(rotated) * self.sin) / scale, rest)

    def apply(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys [..., tokens, head_dim] after RoPE, float32."""
        rotated, rest = self._split(keys)
        return self._join(rotated * self.cos + _rotate_half(rotated) * self.sin, rest)

    def _split(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.cos.shape[-1]
        keys = keys.float()
        return keys[..., :width], keys[..., width:]

    def _join(self, rotated: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    import torch

    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


class Rotary:
    """The rotations of every layer of a model, computed once for positions 0 … `length` − 1."""

    def __init__(self, model: Any, length: int) -> None:
        module = getattr(model.get_decoder(), "rotary_emb", None)
        if module is None:
            raise AssayError(
                f"{type(model).__name__} has no rotary embedding that could be taken off its keys",
                finding_id="kv.rope_unknown",
                remedy="leave prerope out of the codec",
            )
        self._by_type, self._types = _rotations(
            module, model.config.get_text_config(), length, model.device
        )

    @classmethod
    def of_config(cls, config: Any, length: int) -> Rotary:
        """The rotations that transformers' model of this configuration has, without its weights; on
        the CPU.
        """
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        decoder = skeleton.get_decoder()
        text = config.get_text_config()
        decoder.rotary_emb = type(decoder.rotary_emb)(config=text)
        found = cls.__new__(cls)
        found._by_type, found._types = _rotations(
            decoder.rotary_emb, text, length, torch.device("cpu")
        )
        return found

    @property
    def length(self) -> int:
        """Positions that it has rotations of."""
        return int(next(iter(self._by_type.values())).cos.shape[0])

    def cpu(self) -> Rotary:
        """The same on the CPU, without the model it came from."""
        found = type(self).__new__(type(self))
        found._by_type = {k: Rotation(r.cos.cpu(), r.sin.cpu()) for k, r in self._by_type.items()}
        found._types = self._types
        return found

    @property
    def device(self) -> torch.device:
        """Where its rotations are."""
        return next(iter(self._by_type.values())).cos.device

    def at(self, layer: int, lo: int, hi: int) -> Rotation:
        """The rotation of positions lo … hi − 1 in a layer."""
        whole = self._by_type[self._types[layer]]
        return Rotation(whole.cos[lo:hi], whole.sin[lo:hi])


def _rotations(
    module: Any, config: Any, length: int, device: torch.device
) -> tuple[dict[str, Rotation], list[str]]:
    """The rotations of each type of layer, and the type of every layer."""
    import torch

    positions = torch.arange(length, device=device).unsqueeze(0)
    probe = torch.zeros(1, device=device, dtype=torch.float32)
    by_type = "layer_type" in inspect.signature(module.forward).parameters
    types = list(
        getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    )
    types = types if by_type else ["all"] * len(types)
    found = {}
    for kind in set(types):
        cos, sin = module(probe, positions, kind) if by_type else module(probe, positions)
        found[kind] = Rotation(cos[0].float(), sin[0].float())
    return found, types
