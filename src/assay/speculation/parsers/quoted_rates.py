"""The line that guides of the field quote: `Spec decode metrics: draft_acceptance_rate=…, system_efficiency=…`.

No engine of today prints it, but scripts and dashboards do. Keys may come in any order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from assay.speculation.parsers.base import Line, Parser, count, number
from assay.speculation.record import Kind, Observation

_HEAD = re.compile(r"spec(?:ulative)?[ _-]?decod(?:e|ing)[ _-]metrics\b:?(.*)", re.I)
_PAIR = re.compile(r"\b([a-z_]+)\s*=\s*(nan|[\d.]+)\s*(%?)", re.I)
_RATE = ("draft_acceptance_rate", "acceptance_rate", "accept_rate", "avg_draft_acceptance_rate")
_LENGTH = ("mean_acceptance_length", "acceptance_length", "accept_length", "tokens_per_step")
_MULTIPLIER = ("system_efficiency", "net_multiplier", "speedup")


class QuotedRatesParser(Parser):
    """Printed rates, with counts where the line has them."""

    engine = "vllm"
    markers = ("rate=", "rate =", "length=", "efficiency=", "efficiency =", "tokens=")

    def line(self, line: Line) -> Iterable[Observation]:
        """Key-value pairs in any order."""
        head = _HEAD.search(line.text)
        if not head:
            return ()
        found: dict[str, float] = {}
        for name, text, percent in _PAIR.findall(head[1]):
            value = number(text)
            if value is not None:
                found[name.lower()] = value / 100 if percent else value
        rate, length = _first(found, _RATE), _first(found, _LENGTH)
        multiplier = _first(found, _MULTIPLIER)
        drafted = count(_first(found, ("num_draft_tokens", "draft_tokens", "drafted")))
        accepted = count(_first(found, ("num_accepted_tokens", "accepted_tokens", "accepted")))
        if rate is None and length is None and multiplier is None and drafted is None:
            return ()
        counted = drafted is not None and accepted is not None
        return (
            Observation(
                engine=self.engine, kind=Kind.WINDOW if counted else Kind.VALUE, definition="quoted_rates",
                drafted=drafted if counted else None, accepted=accepted if counted else None, acceptance_rate=rate,
                mean_acceptance_length=length, multiplier=multiplier, time=line.time, replica=line.replica,
                num_speculative_tokens=count(_first(found, ("num_spec_tokens", "num_speculative_tokens"))),
            ),
        )  # fmt: skip


def _first(found: dict[str, float], names: tuple[str, ...]) -> float | None:
    return next((found[name] for name in names if name in found), None)
