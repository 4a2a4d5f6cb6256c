"""What is known of a watched server now, as plain JSON types."""

from __future__ import annotations

import math
from typing import Any

from assay.monitor.alarms import ALARMS
from assay.monitor.loop import Watch

STATES = ("learning", "ok", "changed", "busy", "broken", "down")
_DRIFT = 0.01
"""Bits per byte whose detection time is told."""


def status_of(watch: Watch) -> dict[str, Any]:
    """The status of a watch: what its pages, its metrics and its report show."""
    with watch.lock:
        return _status(watch)


def _status(watch: Watch) -> dict[str, Any]:
    changes, last = watch.changes, watch.last
    up = changes.numbers.detectors.get("up") if changes else None
    evidence = {
        f"{q.name}.{kind}": d.evidence / d.limit
        for q in (changes.quantities if changes else ())
        for kind, d in q.detectors.items()
    }
    finds = changes.finds(_DRIFT) * watch.waited if changes and changes.scores else math.inf
    patience = 3 * watch.waited + 20 * watch.options.timeout
    return {
        "url": watch.where,
        "model": watch.model,
        "server": watch.server,
        "state": watch.state,
        "states": STATES,
        "reason": last.reason,
        "alarms": sorted(watch.alarms),
        "known_alarms": tuple(ALARMS),
        "raised": dict(watch.log.raised),
        "rounds": dict(watch.rounds),
        "evidence": evidence,
        "bits_per_byte": watch.bits,
        "difference": changes.numbers.last if changes else None,
        "tolerance": up.tolerance if up else None,
        "tokens_changed": changes.tokens.last if changes else None,
        "tool_changed": changes.tools.last if changes else None,
        "latency_s": last.latency_s,
        "queued": last.queued,
        "acceptance": watch.acceptance,
        "load": watch.canary.budget.measured(watch.clock()),
        "interval_s": watch.waited,
        "finds_s": finds if math.isfinite(finds) else None,
        "learning": watch.learning,
        "at": watch.at,
        "generates": watch.state not in ("broken", "down"),
        "alive": watch.clock() - watch.beat < patience,
        "webhook_failures": watch.webhook.failures if watch.webhook else 0,
    }
