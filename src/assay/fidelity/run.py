"""A comparison, resolved once: its plan, the names of its sides, where its scores are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from assay.engines.specs import is_server
from assay.fidelity.budget import Budget
from assay.fidelity.names import fingerprint, label_of
from assay.fidelity.plan import Plan
from assay.progress import Progress

Say = Callable[[str], None]
"""Told one line of text that a person may want to read while the run goes on."""


@dataclass(frozen=True)
class Side:
    """One engine that is compared with the reference: as it was written, and as it is named."""

    spec: str
    label: str
    number: int

    @property
    def is_server(self) -> bool:
        """Whether it is a server, which gives log-probabilities of a few ids only."""
        return is_server(self.spec)


@dataclass(frozen=True)
class Run:
    """What every stage of a comparison is given.

    Attributes:
        plan: What is compared, how and by which margins.
        sides: The candidates, then the control where it is none of them.
        folder: Where scored windows are kept until the run ends.
        budget: The time that the run may take.
        progress: Told of each window.
        say: Told of what a person may want to read meanwhile.
    """

    plan: Plan
    sides: tuple[Side, ...]
    folder: Path
    budget: Budget
    progress: Progress
    say: Say

    @property
    def single(self) -> bool:
        """Whether there is one candidate, whose error is that of the run."""
        return len(self.plan.candidates) == 1


def sides_of(plan: Plan) -> tuple[Side, ...]:
    """The sides of a plan with their names."""
    return tuple(
        Side(spec, label_of(spec, plan.sides), number) for number, spec in enumerate(plan.sides)
    )


def plan_key(plan: Plan) -> str:
    """The name of the folder of a run: the plan, and the state of the files that it names."""
    files = (fingerprint(spec) for spec in (plan.reference, *plan.sides, *plan.text))
    return sha256("\n".join([plan.sha256, *files]).encode()).hexdigest()[:32]
