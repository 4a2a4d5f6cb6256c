"""One watched server: a round is asked, judged and kept.

The state (baselines, evidence, alarms) is kept after every round, so a watch that was stopped goes
on where it was. Only rounds are counted, never the time of day, so a clock that is set changes
nothing; memory and disk are bounded.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.engines.server.endpoint import without_credentials
from assay.monitor.alarm_log import AlarmLog
from assay.monitor.alarms import CHANGES
from assay.monitor.canary import Canary, Round, State
from assay.monitor.change import LEARN, Changes, Numbers
from assay.monitor.options import WatchOptions
from assay.monitor.webhook import Webhook
from assay.runs import Kept, cache_dir
from assay.speculation.health import Health

IN_A_ROW = 2
"""Rounds in a row that are broken or down before an alarm is raised."""
_FORMAT = 1


@dataclass
class Watch:
    """One watched server: its rounds so far, its baseline, and its alarms."""

    url: str
    options: WatchOptions
    canary: Canary
    say: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    changes: Changes | None = None
    rounds: dict[str, int] = field(default_factory=dict)
    last: Round = field(default_factory=Round)
    state: str = "learning"
    done: int = 0
    """Rounds of this process; `rounds` counts those of earlier ones too."""
    in_a_row: int = 0
    other: int = 0
    """Rounds in a row that gave the other kind of numbers than those that are watched."""
    met: set[State] = field(default_factory=set)
    """States of the rounds of this process."""
    model: str = ""
    server: str = ""
    root: str = ""
    """What the server says that it loaded under the model's name: a folder or a repository."""
    starts: list[float] = field(default_factory=list)
    """When the processes that answered here began, the latest last."""

    def __post_init__(self) -> None:
        self.where = without_credentials(self.url)
        self.webhook = Webhook(self.options.webhook) if self.options.webhook else None
        self.log = AlarmLog(self.where, self.say, self.wall, self.webhook)
        self.kept = Kept(
            cache_dir("watch"), {"watch": _FORMAT, "url": self.where, "model": self.options.model}
        )
        self.acceptance: float | None = None
        self.bits: float | None = None
        self.waited = self.options.interval
        self.at: float | None = None
        """When the last round ended, by the wall clock."""
        self.beat = self.clock()
        self.lock = threading.RLock()
        if self.options.new_baseline:
            self.kept.forget("state")
        elif (state := self.kept.get("state")) is not None:
            self._restore(state)

    @property
    def alarms(self) -> Mapping[str, Mapping[str, Any]]:
        """Alarms that stand: since when (wall clock) and why."""
        return self.log.standing

    @property
    def events(self) -> deque[dict[str, Any]]:
        """The latest events."""
        return self.log.events

    @property
    def learning(self) -> bool:
        """Whether no number or token has a baseline yet."""
        changes = self.changes
        return changes is None or not (
            changes.numbers.base or (changes.tokens.base and not changes.numbers.first)
        )

    def wait(self) -> float:
        """Seconds until the next round."""
        self.waited = self.canary.wait()
        return self.waited

    def step(self) -> Round:
        """Ask a round, judge it, tell what is new, keep the state."""
        self.canary.watched = self.model
        found = self.canary.round()
        with self.lock:
            self.last, self.at, self.beat = found, self.wall(), self.clock()
            self.done += 1
            self.met.add(found.state)
            self.rounds[found.state.value] = self.rounds.get(found.state.value, 0) + 1
            self._whether_it_works(found)
            if found.state in (State.OK, State.BUSY):
                self._who_it_is(found)
                self._whether_it_restarted(found)
                self._whether_it_speculates(found)
                self._whether_it_changed(found)
            self._set_state(found)
        self.save()
        return found

    def _whether_it_works(self, found: Round) -> None:
        bad = found.state in (State.BROKEN, State.DOWN)
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if bad and self.in_a_row >= IN_A_ROW:
            other = "down" if found.state is State.BROKEN else "broken"
            self.log.end(other)
            self.log.raise_alarm(found.state.value, found.reason)
        elif found.state is State.OK:
            self.log.end("down", "broken")

    def _who_it_is(self, found: Round) -> None:
        if self.server and found.version and found.version != self.server:
            self.log.event("version", f"the server is now {found.version}, it was {self.server}")
        self.server = found.version or self.server
        self.model = self.model or found.model
        self.log.about["model"] = self.model
        if found.root and found.model == self.model:
            if self.root and found.root != self.root:
                self.log.raise_alarm("root", f"it is now {found.root}, it was {self.root}")
            elif self.root:
                self.log.end("root")
            self.root = self.root or found.root
        if found.listed and self.model and self.options.model is None:
            if self.model not in found.listed:
                names = ", ".join(found.listed[:3])
                self.log.raise_alarm("model", f"it lists {names}, and {self.model} no longer")
            else:
                self.log.end("model")

    def _whether_it_restarted(self, found: Round) -> None:
        if found.started is None or (self.starts and found.started == self.starts[-1]):
            return
        if found.started in self.starts[:-1]:
            why = "the start time of its process goes back and forth"
            self.log.raise_alarm("several_servers", why)
            self.starts.remove(found.started)
        elif self.starts:
            self.log.event("restarted", "the server's process is a new one")
            self.log.end("several_servers")
        self.starts = [*self.starts, found.started][-8:]

    def _whether_it_speculates(self, found: Round) -> None:
        if found.speculation is None or not found.speculation.judged:
            return
        self.acceptance = found.speculation.rate.value if found.speculation.rate else None
        if found.speculation.health is Health.BROKEN:
            self.log.raise_alarm("speculation", found.speculation.reason)
        else:
            self.log.end("speculation")

    def _whether_it_changed(self, found: Round) -> None:
        changes = self._changes_for(found)
        if found.bits:
            self.bits = math.fsum(found.bits.values()) / len(found.bits)
        raised, over = changes.update(
            found.bits if changes.scores else found.token_bits, found.tokens, found.tools
        )
        for name in raised:
            self.log.raise_alarm(name, self._measured(name))
        self.log.end(*over)

    def _changes_for(self, found: Round) -> Changes:
        """The detectors, made for what the server can: after a restart it may score texts that it
        did not, or no more.
        """
        if self.changes is None:
            self.changes = Changes(
                self.options.interval, self.options.false_alarms, scores=bool(found.bits)
            )
        changes = self.changes
        other = found.bits if not changes.scores else found.token_bits if not found.bits else {}
        self.other = self.other + 1 if other else 0
        if self.other >= LEARN:
            changes.measure(scores=not changes.scores)
            self.log.end(*[name for name in self.alarms if name.startswith("bits_per_")])
            self.log.event(
                "state", f"it {'scores texts now' if changes.scores else 'no longer scores texts'}"
            )
        return changes

    def _measured(self, name: str) -> str:
        assert self.changes is not None
        quantity = next(q for q in self.changes.quantities if name.startswith(f"{q.name}."))
        if isinstance(quantity, Numbers):
            return (
                f"{quantity.last or 0.0:+.4f} {quantity.name.replace('_', ' ')} against the"
                " baseline in the last round"
            )
        return f"{100 * (quantity.last or 0.0):.0f}% of those of the last round"

    def _set_state(self, found: Round) -> None:
        state = found.state.value
        if found.state is State.OK:
            state = (
                "changed" if set(self.alarms) & CHANGES else "learning" if self.learning else "ok"
            )
        if state != self.state:
            self.state = self.log.about["state"] = state
            self.log.event("state", f"{state}{f': {found.reason}' if found.reason else ''}")

    def save(self) -> None:
        """Keep the state."""
        with self.lock:
            state = self.log.to_json() | {
                "changes": self.changes.state() if self.changes else None,
                "numbers": self.changes.numbers.name if self.changes else None,
                "rounds": self.rounds,
                "model": self.model,
                "root": self.root,
                "server": self.server,
                "starts": self.starts,
                "state": self.state,
            }
        self.kept.put("state", state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what was kept; where that is damaged, begin anew and say so."""
        try:
            changes = None
            if state["changes"] is not None:
                scores = state["numbers"] == "bits_per_byte"
                changes = Changes(self.options.interval, self.options.false_alarms, scores=scores)
                changes.restore(state["changes"])
            self.log.restore(state)
            self.rounds = {str(n): int(c) for n, c in state["rounds"].items()}
            self.model, self.server = str(state["model"]), str(state["server"])
            self.root = str(state.get("root", ""))  # a state of 0.2.0 has none
            self.starts = [float(s) for s in state["starts"]]
            self.state = str(state["state"])
            self.log.about |= {"model": self.model, "state": self.state}
            self.changes = changes
        except (KeyError, TypeError, ValueError, AttributeError):
            self.kept.forget("state")
            self.log.event(
                "state", "what was kept of this server is damaged; the baseline is learnt anew"
            )
