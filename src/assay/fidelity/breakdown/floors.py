"""How much a reference differs from itself: the noise floor of a comparison.

It is scored again at another batch size, with rounding noise, and through its own storage. No
candidate can be told from the reference below these; a KL within twice the largest is not ranked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from assay.engines.scoring import HookSpec, ScoreJob, ScoringEngine, StateRows, Window
from assay.fidelity.metrics.token_statistics import window_statistics
from assay.fidelity.score import ReferenceRows, Spreads, measure
from assay.progress import Progress

if TYPE_CHECKING:
    import torch


FLOOR_WINDOWS = 4
"""Windows that each floor is measured on."""


@dataclass(frozen=True)
class Floors:
    """Mean KL in nats; None where it was not or cannot be measured.

    `self_kld`: scored again at another batch size. `storage_bf16`: against its own states in 16
    bits. `rounding_bf16`: under noise of one bf16 rounding unit after every layer.
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
            window_statistics(rows, _in_bf16(rows)).kl
            for rows in reference.rows(some)
            if isinstance(rows, StateRows)
        )
        advance()
        rounding = None
        if engine.ability.hooks:
            # The noise is what an equivalent kernel with another order of bf16 operations may show
            # (the idea is that of exllamav3's qbench).
            noise = HookSpec(
                "assay.fidelity.breakdown.rounding:RoundingNoise", {"sigma": 2.0**-9, "seed": seed}
            )
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
        yield from (
            torch.tensor(w.kl) for w in measure(reference.rows(windows), engine, windows, job)
        )
        return
    for rows, own in zip(reference.rows(windows), engine.score_windows(windows, job), strict=True):
        yield window_statistics(rows, own).kl


def _mean_kl(kl: Iterable[torch.Tensor]) -> float | None:
    import torch

    parts = list(kl)
    finite = torch.cat(parts) if parts else torch.empty(0)
    finite = finite[finite.isfinite()]
    return float(finite.mean()) if finite.numel() else None
