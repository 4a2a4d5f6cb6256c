"""Alarms that stand, the events of a watch, and the messages about both."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from assay.monitor.alarms import ALARMS
from assay.monitor.webhook import Webhook
from assay.verdict import Finding

EVENTS = 100
"""Events that are kept, the latest ones."""


class AlarmLog:
    """What was raised and what is over, told to a person and to a webhook as it happens.

    Args:
        where: URL of the watched server, without credentials.
        say: Takes one line for a person.
        wall: Wall clock in seconds.
        webhook: Gets a JSON message for every event; None where none was named.
    """

    def __init__(
        self,
        where: str,
        say: Callable[[str], None],
        wall: Callable[[], float],
        webhook: Webhook | None,
    ) -> None:
        self.where, self.say, self.wall, self.webhook = where, say, wall, webhook
        self.standing: dict[str, dict[str, Any]] = {}
        """Alarms that stand: since when (wall clock) and why."""
        self.raised: dict[str, int] = {}
        """How often each alarm was raised, in earlier processes too."""
        self.new: dict[str, int] = {}
        """How often each alarm was raised in this process."""
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS)
        self.about: dict[str, str] = {"model": "", "state": "learning"}
        """What every message to the webhook holds beside the event."""

    def raise_alarm(self, name: str, why: str) -> None:
        """Raise an alarm, or renew the reason of one that stands."""
        if name in self.standing:
            self.standing[name]["why"] = why
            return
        self.standing[name] = {"since": self.wall(), "why": why}
        self.raised[name] = self.raised.get(name, 0) + 1
        self.new[name] = self.new.get(name, 0) + 1
        self.event("alarm", f"{ALARMS[name].title}: {why}", name)

    def end(self, *names: str) -> None:
        """End the alarms of these names that stand."""
        for name in names:
            if self.standing.pop(name, None) is not None:
                self.event("over", f"no longer: {ALARMS[name].title}", name)

    def event(self, kind: str, text: str, alarm: str = "") -> None:
        """Keep an event and tell it."""
        now = self.wall()
        event = {"at": now, "kind": kind, "text": text[:400], "alarm": alarm}
        self.events.append(event)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
        self.say(f"{stamp} {kind}: {event['text']}")
        if self.webhook is not None:
            self.webhook.post({"source": "assay watch", "url": self.where, **self.about, **event})

    def findings(self) -> list[Finding]:
        """A finding for each alarm of this process, and for each older one that stands."""
        return [self._finding(name) for name in dict.fromkeys([*self.new, *self.standing])]

    def _finding(self, name: str) -> Finding:
        alarm, stands = ALARMS[name], self.standing.get(name)
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

    def to_json(self) -> dict[str, Any]:
        """What is kept of it."""
        return {"alarms": self.standing, "raised": self.raised, "events": list(self.events)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what was kept; KeyError, TypeError, ValueError or AttributeError if
        damaged.
        """
        standing = {
            name: {"since": float(alarm["since"]), "why": str(alarm["why"])}
            for name, alarm in state["alarms"].items()
            if name in ALARMS
        }
        raised = {str(name): int(count) for name, count in state["raised"].items()}
        events = [dict(event) for event in state["events"]]
        self.standing, self.raised = standing, raised
        self.events.extend(events)
