"""A start on another machine: what is asked for, what comes back, and who runs it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from assay.options import DoctorOptions
from assay.serving.command import ServeCommand
from assay.serving.search import Configuration
from assay.serving.symptoms import Observation
from assay.verdict import Finding, Report


@dataclass(frozen=True)
class StartRequest:
    """One start, as a process on another machine is asked for it. `left`: seconds of the budget."""

    command: ServeCommand
    options: DoctorOptions
    configuration: Configuration
    index: int
    number: int
    rules: Collection[str]
    symptom: frozenset[str]
    baseline: Observation | None
    left: float


@dataclass(frozen=True)
class StartAnswer:
    """What such a start showed (None: out of time), and how a failing baseline compares with a
    trusted engine.
    """

    observation: Observation | None
    compared: Sequence[Report]
    compared_itself: bool
    notices: Sequence[Finding]

    @property
    def version(self) -> str:
        """Kind and version of the server, as it names itself; empty where it named none."""
        facts = self.observation.facts if self.observation else {}
        return f"{facts.get('kind', '')} {facts['version']}" if facts.get("version") else ""


class Cluster(Protocol):
    """Where starts run that do not run here. `size`: how many at the same time."""

    @property
    def size(self) -> int:
        """Starts at the same time."""

    def starts(self, asked: Sequence[StartRequest]) -> Iterator[StartAnswer]:
        """What each start showed, in their order; AssayError where one cannot be had."""

    def facts(self) -> dict[str, Any]:
        """What the report says of it."""

    def findings(self) -> list[Finding]:
        """What was lost on the way."""
