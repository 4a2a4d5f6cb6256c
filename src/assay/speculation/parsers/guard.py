"""Engines that give up drafting for a request by themselves, and say so."""

from __future__ import annotations

import re
from collections.abc import Iterable

from assay.speculation.parsers.base import Line, Parser
from assay.speculation.record import Kind, Observation

_GAVE_UP = re.compile(r"\b(spec-[\w-]+): req \S+ gave up \((.*?)verifies=(\d+) accepted=(\d+)/(\d+)")


class GuardParser(Parser):
    """`spec-ngram: req N gave up (…: verifies=8 accepted=0/8 …)`."""

    engine = "imp"
    markers = ("gave up",)

    def line(self, line: Line) -> Iterable[Observation]:
        """A request that gave up drafting."""
        match = _GAVE_UP.search(line.text)
        if not match:
            return ()
        return (
            Observation(
                engine=self.engine, kind=Kind.REQUEST, definition="guard_request", drafts=int(match[3]),
                accepted=int(match[4]), drafted=int(match[5]), time=line.time,
                note="the engine stops drafting by itself after useless drafts; later requests look like speculation off",
            ),
        )  # fmt: skip
