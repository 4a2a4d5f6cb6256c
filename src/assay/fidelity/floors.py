"""What difference would be there anyway: the reference against itself, against rounding, against its own storage.

No candidate can be told from the reference below these; a KL within twice the largest of them is not ranked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import Engagement, HookSpec, ScoreJob, ScoringEngine, StateRows, Window
from assay.fidelity.metrics import window_statistics
from assay.fidelity.score import ReferenceRows, Spreads, measure
from assay.progress import Progress

if TYPE_CHECKING:
    import torch

FLOOR_WINDOWS = 4
"""Windows that each floor is measured on."""


@dataclass(frozen=True)
class Floors:
    """Mean KL in nats; None where it was not or cannot be measured.

    `self_kld`: scored again at another batch size. `storage_bf16`: against its own states in 16 bits.
    `rounding_bf16`: under noise of one bf16 rounding unit after every layer.
    """

    self_kld: float | None = None
    storage_bf16: float | None = None
    rounding_bf16: float | None = None

    @property
    def largest(self) -> float:
        """The largest that is known, 0 where none is."""
        return max((v for v in asdict(self).values() if v is not None), default=0.0)

    def to_json(self) -> dict[str, float | None]:
        """Plain JSON types."""
        return asdict(self)


def measure_floors(
    engine: ScoringEngine,
    reference: ReferenceRows,
    windows: Sequence[Window],
    job: ScoreJob,
    seed: int,
    progress: Progress,
) -> Floors:
    """All floors that the engine can give, on the first windows."""
    some = windows[:FLOOR_WINDOWS]
    with progress("measuring floors", 3) as advance:
        again = replace(job, batch=2 if job.batch == 1 else 1)
        own = _mean_kl(_apart(engine, reference, some, again))
        advance()
        storage = _mean_kl(
            window_statistics(rows, _in_bf16(rows)).kl for rows in reference.rows(some) if isinstance(rows, StateRows)
        )
        advance()
        rounding = None
        if engine.ability.hooks:
            # The noise is what an equivalent kernel with another order of bf16 operations may show (the idea is that
            # of exllamav3's qbench).
            noise = HookSpec("assay.fidelity.floors:RoundingNoise", {"sigma": 2.0**-9, "seed": seed})
            rounding = _mean_kl(_apart(engine, reference, some, replace(job, hook=noise)))
        advance()
    return Floors(own, storage, rounding)


def _in_bf16(rows: StateRows) -> StateRows:
    import torch

    return replace(rows, states=rows.states.to(torch.bfloat16).to(rows.states.dtype))


def _apart(
    engine: ScoringEngine, reference: ReferenceRows, windows: Sequence[Window], job: ScoreJob
) -> Iterator[torch.Tensor]:
    """KL of the tokens of each window between the reference and what the engine scores now."""
    import torch

    if isinstance(engine, Spreads):
        yield from (torch.tensor(w.kl) for w in measure(reference.rows(windows), engine, windows, job))
        return
    for rows, own in zip(reference.rows(windows), engine.score_windows(windows, job), strict=True):
        yield window_statistics(rows, own).kl


def _mean_kl(kl: Iterable[torch.Tensor]) -> float | None:
    import torch

    parts = list(kl)
    finite = torch.cat(parts) if parts else torch.empty(0)
    finite = finite[finite.isfinite()]
    return float(finite.mean()) if finite.numel() else None


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

    def discard(self) -> None:
        """Nothing is kept of a batch."""

    def engagement(self) -> Engagement:
        """How often the noise was added."""
        return Engagement(fires=self._fires)
