"""Rounding noise as a hook of a model: each decoder layer's output times 1 + σ · N(0, 1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import Engagement

if TYPE_CHECKING:
    pass


class RoundingNoise:
    """Multiplies what each decoder layer puts out by 1 + σ · N(0, 1), from a fixed seed."""

    passes = 1

    def __init__(self, sigma: float, seed: int) -> None:
        self.sigma = sigma
        self.seed = seed
        self._fires = 0

    @contextmanager
    def attach(self, model: Any) -> Iterator[None]:
        """Hook every decoder layer; undone on leaving."""
        import torch

        generator = torch.Generator(device=model.device).manual_seed(self.seed)

        def noisy(module: Any, inputs: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            noise = torch.randn(
                hidden.shape, generator=generator, device=hidden.device, dtype=torch.float32
            )
            changed = (hidden.float() * (1 + self.sigma * noise)).to(hidden.dtype)
            self._fires += 1
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        handles = [layer.register_forward_hook(noisy) for layer in model.get_decoder().layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def new_cache(self, batch: int, index: int) -> None:
        """The engine's own."""
        return

    def after_prefix(self, cache: Any) -> None:
        """Nothing to do."""

    def discard(self) -> None:
        """Nothing is kept of a batch."""

    def engagement(self) -> Engagement:
        """How often the noise was added."""
        return Engagement(fires=self._fires)
