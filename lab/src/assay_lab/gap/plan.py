"""The plan of `assay gap`: what is compared, and about how many runs it takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from assay.engines import full_spec, with_options
from assay.fidelity.plan import Plan
from assay_lab.gap.engine_steps import engine_name
from assay_lab.kv.hook_plan import path_of
from assay_lab.kv.spec import parse_spec
from assay_lab.options import GapOptions

MEASURED = 32
"""Most windows whose streams are encoded for real: bytes of each are counted and hashed."""


@dataclass(frozen=True)
class GapPlan(GapOptions):
    """One decomposition; its engines are written in full (`full_spec`). Without a codec it tells
    two engines apart.
    """

    def __post_init__(self) -> None:
        for side in ("reference", "candidate"):
            spec = with_options(
                full_spec(getattr(self, side)), device="auto", threads=self.threads or "auto"
            )
            object.__setattr__(self, side, spec)
            engine_name(getattr(self, side), codec=bool(self.codec), reference=side == "reference")
        super().__post_init__()
        if self.codec:
            parse_spec(self.codec)

    @property
    def base(self) -> str:
        """The mode in which engine and codec are told apart: that of the total where there is no
        codec.
        """
        return self.base_mode if self.codec else self.mode

    def comparison(self, mode: str) -> Plan:
        """The windows and the scoring path of a mode. The second half of each window is scored,
        on any path.
        """
        return Plan(
            reference=self.reference,
            candidates=(self.candidate,),
            text=self.text,
            windows=self.windows + self.fresh,
            length=self.length,
            path=path_of(mode).value,
            scored="second-half",
            batch=self.batch,
            seed=self.seed,
        )

    @property
    def other_batch(self) -> int:
        """A batch of another size, for what is measured again: two rounds instead of one at any
        size.

        Of fewer windows than a batch holds it is smaller than their number, or both would be the
        same batch.
        """
        together = min(self.batch, self.windows)
        return together * 5 // 8 or 2

    @property
    def measured(self) -> int:
        """Windows whose streams are encoded for real, for sizes and residuals; all are coded."""
        return min(self.windows, MEASURED)

    def wants(self, phase: int) -> bool:
        """Whether a phase is part of the run; the path itself always is."""
        return phase in self.phases


def planned_runs(plan: GapPlan) -> tuple[int, int]:
    """About how many configurations are measured: those of the path, its repetition and the floors,
    and those of all phases.
    """
    if not plan.codec:
        return 6, 4 if plan.wants(1) else 0
    path = 10 + 2 * (plan.mode != plan.base)
    own = {
        3: len(plan.sweep),
        4: plan.groups or _layers(plan.reference),
        5: 7,
        6: 2 * bool(plan.calibration and plan.other_calibration),
    }
    sides = 2 * sum(count for phase, count in own.items() if plan.wants(phase))
    return path, sides + 6 * bool(plan.fresh) + 5 * plan.wants(1)


def _layers(spec: str) -> int:
    """Layers of a model as its config.json has them; 24 where that says nothing."""
    try:
        config = json.loads(
            (Path(engine_name(spec, codec=False).model) / "config.json").read_text(encoding="utf-8")
        )
        return int(config.get("text_config", config)["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 24
