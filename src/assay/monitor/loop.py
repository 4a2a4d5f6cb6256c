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

from assay.engines.server.http import without_credentials
from assay.errors import AssayError
from assay.monitor.alarms import ALARMS, CHANGES
from assay.monitor.canary import Canary, Round, State
from assay.monitor.change import CALM, LEARN, MONTH_S, Changes, Numbers
from assay.monitor.options import WatchOptions
from assay.monitor.webhook import Webhook
from assay.runs import Kept, cache_dir
from assay.speculation.health import Health
from assay.verdict import Finding, Metric, Report, Severity, Table, Verdict

STATES = ("learning", "ok", "changed", "busy", "broken", "down")
IN_A_ROW = 2
"""Rounds in a row that are broken or down before an alarm is raised."""
EVENTS = 100
_FORMAT = 1
_DRIFT = 0.01
"""Bits per byte whose detection time is told."""


@dataclass
class Watch:
    """One watched server: its rounds so far, what stands, and whom to tell."""

    url: str
    options: WatchOptions
    canary: Canary
    say: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    changes: Changes | None = None
    alarms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Alarms that stand: since when (wall clock) and why."""
    raised: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=EVENTS))
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
    starts: list[float] = field(default_factory=list)
    """When the processes that answered here began, the latest last."""

    def __post_init__(self) -> None:
        self.where = without_credentials(self.url)
        self.webhook = Webhook(self.options.webhook) if self.options.webhook else None
        self.kept = Kept(
            cache_dir("watch"), {"watch": _FORMAT, "url": self.where, "model": self.options.model}
        )
        self.acceptance: float | None = None
        self.bits: float | None = None
        self.waited = self.options.interval
        self._at: float | None = None
        self._beat = self.clock()
        self._lock = threading.RLock()
        self._new: dict[str, int] = {}
        if self.options.new_baseline:
            self.kept.forget("state")
        elif (state := self.kept.get("state")) is not None:
            self._restore(state)

    # One round.

    def wait(self) -> float:
        """Seconds until the next round."""
        self.waited = self.canary.wait()
        return self.waited

    def step(self) -> Round:
        """Ask a round, judge it, tell what is new, keep the state."""
        self.canary.watched = self.model
        found = self.canary.round()
        with self._lock:
            self.last, self._at, self._beat = found, self.wall(), self.clock()
            self.done += 1
            self.met.add(found.state)
            self.rounds[found.state.value] = self.rounds.get(found.state.value, 0) + 1
            self._whether_it_works(found)
            if found.state in (State.OK, State.BUSY):
                self._who_it_is(found)
                self._whether_it_changed(found)
            self._set_state(found)
        self.save()
        return found

    def _whether_it_works(self, found: Round) -> None:
        bad = found.state in (State.BROKEN, State.DOWN)
        self.in_a_row = self.in_a_row + 1 if bad else 0
        if bad and self.in_a_row >= IN_A_ROW:
            other = "down" if found.state is State.BROKEN else "broken"
            if other in self.alarms:
                self._over(other)
            self._raise(found.state.value, found.reason)
        elif found.state is State.OK:
            for name in ("down", "broken"):
                if name in self.alarms:
                    self._over(name)

    def _who_it_is(self, found: Round) -> None:
        if self.server and found.version and found.version != self.server:
            self._event("version", f"the server is now {found.version}, it was {self.server}")
        self.server = found.version or self.server
        self.model = self.model or found.model
        if found.listed and self.model and self.options.model is None:
            if self.model not in found.listed:
                self._raise(
                    "model", f"it lists {', '.join(found.listed[:3])}, and {self.model} no longer"
                )
            elif "model" in self.alarms:
                self._over("model")
        if found.started is not None and (not self.starts or found.started != self.starts[-1]):
            if found.started in self.starts[:-1]:
                self._raise("several_servers", "the start time of its process goes back and forth")
                self.starts.remove(found.started)
            elif self.starts:
                self._event("restarted", "the server's process is a new one")
                if "several_servers" in self.alarms:
                    self._over("several_servers")
            self.starts = [*self.starts, found.started][-8:]
        if found.speculation is not None and found.speculation.judged:
            self.acceptance = found.speculation.rate.value if found.speculation.rate else None
            if found.speculation.health is Health.BROKEN:
                self._raise("speculation", found.speculation.reason)
            elif "speculation" in self.alarms:
                self._over("speculation")

    def _whether_it_changed(self, found: Round) -> None:
        changes = self._changes_for(found)
        if found.bits:
            self.bits = math.fsum(found.bits.values()) / len(found.bits)
        raised, over = changes.update(
            found.bits if changes.scores else found.token_bits, found.tokens, found.tools
        )
        for name in raised:
            self._raise(name, self._measured(name))
        for name in over:
            if name in self.alarms:
                self._over(name)

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
            for name in [n for n in self.alarms if n.startswith("bits_per_")]:
                self._over(name)
            self._event(
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
            self.state = state
            self._event("state", f"{state}{f': {found.reason}' if found.reason else ''}")

    @property
    def learning(self) -> bool:
        """Whether no number or token has a baseline yet."""
        changes = self.changes
        return changes is None or not (
            changes.numbers.base or (changes.tokens.base and not changes.numbers.first)
        )

    # Whom to tell.

    def _raise(self, name: str, why: str) -> None:
        if name in self.alarms:
            self.alarms[name]["why"] = why
            return
        self.alarms[name] = {"since": self.wall(), "why": why}
        self.raised[name] = self.raised.get(name, 0) + 1
        self._new[name] = self._new.get(name, 0) + 1
        self._event("alarm", f"{ALARMS[name].title}: {why}", name)

    def _over(self, name: str) -> None:
        del self.alarms[name]
        self._event("over", f"no longer: {ALARMS[name].title}", name)

    def _event(self, kind: str, text: str, alarm: str = "") -> None:
        now = self.wall()
        event = {"at": now, "kind": kind, "text": text[:400], "alarm": alarm}
        self.events.append(event)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
        self.say(f"{stamp} {kind}: {event['text']}")
        if self.webhook is not None:
            self.webhook.post(
                {
                    "source": "assay watch",
                    "url": self.where,
                    "model": self.model,
                    "state": self.state,
                    **event,
                }
            )

    # What is kept.

    def save(self) -> None:
        """Keep the state."""
        with self._lock:
            state = {
                "changes": self.changes.state() if self.changes else None,
                "numbers": self.changes.numbers.name if self.changes else None,
                "alarms": self.alarms,
                "raised": self.raised,
                "rounds": self.rounds,
                "events": list(self.events),
                "model": self.model,
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
            self.alarms = {
                n: {"since": float(a["since"]), "why": str(a["why"])}
                for n, a in state["alarms"].items()
                if n in ALARMS
            }
            self.raised = {str(n): int(c) for n, c in state["raised"].items()}
            self.rounds = {str(n): int(c) for n, c in state["rounds"].items()}
            self.events.extend(dict(e) for e in state["events"])
            self.model, self.server = str(state["model"]), str(state["server"])
            self.starts = [float(s) for s in state["starts"]]
            self.state = str(state["state"])
            self.changes = changes
        except (KeyError, TypeError, ValueError, AttributeError):
            self.kept.forget("state")
            self._event(
                "state", "what was kept of this server is damaged; the baseline is learnt anew"
            )

    # What is shown.

    def status(self) -> dict[str, Any]:
        """Everything that is known now, as plain JSON types."""
        with self._lock:
            changes, last = self.changes, self.last
            up = changes.numbers.detectors.get("up") if changes else None
            evidence = {
                f"{q.name}.{kind}": d.evidence / d.limit
                for q in (changes.quantities if changes else ())
                for kind, d in q.detectors.items()
            }
            finds = changes.finds(_DRIFT) * self.waited if changes and changes.scores else math.inf
            return {
                "url": self.where,
                "model": self.model,
                "server": self.server,
                "state": self.state,
                "states": STATES,
                "reason": last.reason,
                "alarms": sorted(self.alarms),
                "known_alarms": tuple(ALARMS),
                "raised": dict(self.raised),
                "rounds": dict(self.rounds),
                "evidence": evidence,
                "bits_per_byte": self.bits,
                "difference": changes.numbers.last if changes else None,
                "tolerance": up.tolerance if up else None,
                "tokens_changed": changes.tokens.last if changes else None,
                "tool_changed": changes.tools.last if changes else None,
                "latency_s": last.latency_s,
                "queued": last.queued,
                "acceptance": self.acceptance,
                "load": self.canary.budget.measured(self.clock()),
                "interval_s": self.waited,
                "finds_s": finds if math.isfinite(finds) else None,
                "learning": self.learning,
                "at": self._at,
                "generates": self.state not in ("broken", "down"),
                "alive": self.clock() - self._beat < 3 * self.waited + 20 * self.options.timeout,
                "webhook_failures": self.webhook.failures if self.webhook else 0,
            }

    def report(self, interrupted: bool = False) -> Report:
        """What the watch found, alarms of this process first."""
        status = self.status()
        findings = [self._finding(name) for name in dict.fromkeys([*self._new, *self.alarms])]
        verdict = Verdict.PASS
        if self.met <= {State.DOWN}:
            verdict = Verdict.ERROR
            why = self.last.reason or "it was never asked"
            findings = [AssayError(why, finding_id="server.unreachable").to_finding()]
        elif any(f.severity is Severity.ERROR for f in findings):
            verdict = Verdict.FAIL
        elif self.learning:
            verdict = Verdict.INCONCLUSIVE
        findings += self.kept.notices("server")
        summary = {
            Verdict.PASS: "nothing changed while it was watched.",
            Verdict.INCONCLUSIVE: (
                f"it answers; its baseline is not learnt yet ({LEARN} values an item)."
            ),
        }.get(verdict, "")
        load, finds = status["load"], status["finds_s"]
        headline = [
            Metric("state", self.state),
            Metric(
                "rounds",
                ", ".join(f"{count} {name}" for name, count in self.rounds.items()) or "none",
            ),
            Metric("load", "unknown" if load is None else f"{100 * load:.2f} % of one stream"),
            Metric(
                "a drift of 0.01 bits per byte",
                (
                    f"found within {finds / 60:.0f} min"
                    if finds
                    else "not found by this server's answers yet"
                ),
            ),
        ]
        rows = [
            (
                time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(e["at"])),
                f"{e['kind']}: {e['text']}"[:72],
            )
            for e in list(self.events)[-12:]
        ]
        plan = self.options.facts() | {
            "limit_rounds": self.changes.limit if self.changes else None,
            "month_s": MONTH_S,
            "calm_rounds": CALM,
        }
        return Report(
            command="watch",
            verdict=verdict,
            subject={
                "engine": "server",
                "url": self.where,
                "model": self.model,
                "server": self.server,
            },
            findings=tuple(findings),
            results={"watch": status, "events": list(self.events), "plan": plan},
            headline=tuple(headline),
            blocks=(Table("Latest events (UTC)", ("when", "what"), rows),) if rows else (),
            interrupted=interrupted,
            summary=summary,
        )

    def _finding(self, name: str) -> Finding:
        alarm, stands = ALARMS[name], self.alarms.get(name)
        told = [e["text"] for e in self.events if e["alarm"] == name and e["kind"] == "alarm"]
        title = f"{alarm.title}: {stands['why']}" if stands else told[-1] if told else alarm.title
        return Finding(
            alarm.id,
            alarm.severity,
            title + ("" if stands else " (it is over)"),
            evidence={
                "alarm": name,
                "raised": self.raised.get(name, 0),
                "stands": stands is not None,
            },
            causes=alarm.causes,
            remedies=tuple(r.replace("URL", self.where) for r in alarm.remedies),
        )
