"""What a doctor found: every start it made, and what it concluded from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from assay.options import DoctorOptions
from assay.serving.command import ServeCommand, Setting
from assay.serving.search import Configuration, State
from assay.serving.symptoms import Engaged, Observation, Seen
from assay.verdict import Report


@dataclass(frozen=True)
class Start:
    """One start of one configuration and what it showed."""

    configuration: Configuration
    index: int
    seen: Seen
    observation: Observation
    resumed: bool = False


@dataclass
class Diagnosis:
    """Everything that a doctor found, for the report."""

    command: ServeCommand
    options: DoctorOptions
    baseline: Seen | None = None
    given: Seen | None = None
    given_state: State = "undecided"
    guilty: list[list[str]] = field(default_factory=list)
    proven: bool = True
    cannot_run: dict[str, str] = field(default_factory=dict)
    acquitted: set[str] = field(default_factory=set)
    rules: frozenset[str] = frozenset()
    engaged: dict[str, Engaged] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    rungs: list[tuple[Configuration, Observation]] = field(default_factory=list)
    kept_safe: list[str] = field(default_factory=list)
    """Settings that the baseline keeps, since it does not start without them."""
    checkpoint: list[Report] = field(default_factory=list)
    compared_itself: bool = False
    """A failing baseline was compared with transformers on the same files."""
    seconds: float = 0.0
    out_of_time: bool = False
    interrupted: bool = False
    failed: str = ""
    notices: list[Any] = field(default_factory=list)

    @property
    def all(self) -> Configuration:
        """Every setting of the given command that can run."""
        return frozenset(s.name for s in self.command.settings if s.name not in self.cannot_run)

    def setting(self, name: str) -> Setting:
        """The setting of a name."""
        return next(s for s in self.command.settings if s.name == name)

    def of(self, configuration: Configuration) -> Start | None:
        """The first measured start of a configuration."""
        starts = [
            s for s in self.starts if s.configuration == configuration and not s.observation.failed
        ]
        return starts[0] if starts else None

    @property
    def launches(self) -> int:
        """Servers that this run started."""
        return sum(not s.resumed for s in self.starts)
