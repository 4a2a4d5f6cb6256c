"""What a decomposition is: everything that can change its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from assay.errors import UsageError
from assay.fidelity.plan import Plan
from assay.gap.path import engine_name
from assay.kv.hook import Mode
from assay.kv.hooks import path_of
from assay.kv.spec import parse_spec

PHASES = {
    1: "engine baseline",
    2: "codec input and residual",
    3: "noise sensitivity",
    4: "layers",
    5: "harness",
    6: "calibration",
}
SWEEP = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Noise levels, as multiples of the codec's own relative error."""
MEASURED = 32
"""Most windows whose streams are encoded for real: bytes of each are counted and hashed."""
QUICK: dict[str, Any] = {"windows": 8, "length": 256, "fresh": 8, "groups": 5, "sweep": (0.25, 0.5, 1.0)}


@dataclass(frozen=True)
class GapPlan:
    """One decomposition. `mode` is what the total is measured in, `base_mode` what engine and codec are told apart in.

    Layers are attributed in `groups` of neighbours (0: each alone). `fresh` windows take no part in the decomposition;
    recommendations are measured on them. `margin` is a fraction of perplexity.
    """

    reference: str
    candidate: str
    codec: str
    mode: str = Mode.DECODE.value
    base_mode: str = Mode.INFORWARD.value
    text: tuple[str, ...] = ()
    windows: int = 32
    length: int = 1024
    fresh: int = 16
    batch: int = 8
    phases: tuple[int, ...] = tuple(PHASES)
    groups: int = 0
    sweep: tuple[float, ...] = SWEEP
    calibration: str | None = None
    other_calibration: str | None = None
    margin: float = 0.03
    seed: int = 0

    def __post_init__(self) -> None:
        for mode in (self.mode, self.base_mode):
            if mode not in list(Mode):
                raise _usage(f"unknown mode {mode!r}", f"one of {', '.join(Mode)}")
        for name, least in (("windows", 2), ("length", 16), ("fresh", 0), ("batch", 1), ("groups", 0)):
            if getattr(self, name) < least:
                raise _usage(f"{name} must be at least {least}, got {getattr(self, name)}", "")
        if wrong := sorted(set(self.phases) - set(PHASES)):
            raise _usage(f"there is no phase {wrong[0]}", f"phases are 1 to {len(PHASES)}")
        if not 0 < self.margin < 1:
            raise _usage(f"a margin of {self.margin} cannot be judged", "write --margin-ppl 3%")
        if not self.sweep or any(not s > 0 for s in self.sweep):
            raise _usage("noise levels must be positive", "give multiples of the codec's own error")
        parse_spec(self.codec)
        engine_name(self.reference)
        engine_name(self.candidate)

    def comparison(self, mode: str) -> Plan:
        """The windows and the scoring path of a mode. The second half of each window is scored, whatever the path."""
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
        """A batch of another size, for what is measured again: two rounds instead of one, whatever the size.

        Of fewer windows than a batch holds it is smaller than their number, or both would be the same batch.
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


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="gap.usage")
