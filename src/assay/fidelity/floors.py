"""What difference would be there anyway: the reference against itself, against rounding, against its own storage.

No candidate can be told from the reference below these; a KL within twice the largest of them is not ranked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from assay.engines.scoring import Engagement, HookSpec, ScoreJob, ScoringEngine, StateRows, Window, WindowRows
from assay.fidelity.metrics import window_statistics

FLOOR_WINDOWS = 4
"""Windows that each floor is measured on."""


def self_floor(
    engine: ScoringEngine, rows: Mapping[int, WindowRows], windows: Sequence[Window], job: ScoreJob
) -> float:
    """Mean KL of the reference scored again at another batch size: what its own kernels make of it."""
    other = replace(job, batch=1 if job.batch > 1 else 2)
    return _mean_kl((rows[again.window.index], again) for again in engine.score_windows(windows, other))


def rounding_floor(
    engine: ScoringEngine,
    rows: Mapping[int, WindowRows],
    windows: Sequence[Window],
    job: ScoreJob,
    seed: int,
) -> float:
    """Mean KL under multiplicative noise of one bf16 rounding unit (2⁻⁹) after every layer.

    It is what an equivalent kernel with another order of bf16 operations may show (the idea is that of exllamav3's
    qbench). Only for engines that take hooks of transformers.
    """
    hook = HookSpec("assay.fidelity.floors:RoundingNoise", {"sigma": 2.0**-9, "seed": seed})
    noisy = engine.score_windows(windows, replace(job, hook=hook))
    return _mean_kl((rows[again.window.index], again) for again in noisy)


def storage_floor(rows: Sequence[StateRows]) -> float:
    """Mean KL of the reference against its own states in bf16: what a 16-bit store adds."""
    import torch

    pairs = (
        (r, StateRows(r.window, r.first, r.states.to(torch.bfloat16).to(r.states.dtype), r.head))
        for r in rows
    )
    return _mean_kl(pairs)


def _mean_kl(pairs: Any) -> float:
    import torch

    values = torch.cat([window_statistics(a, b).kl for a, b in pairs])
    return float(values[~values.isnan()].mean())


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
            noise = torch.randn(hidden.shape, generator=generator, device=hidden.device, dtype=torch.float32)
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

    def engagement(self) -> Engagement:
        """How often the noise was added."""
        return Engagement(fires=self._fires)
