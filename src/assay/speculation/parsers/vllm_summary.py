"""vLLM summaries of a finished run: `vllm bench serve` and the offline example."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from assay.speculation.parsers.base import Line, Parser, count, number
from assay.speculation.record import Kind, Observation
from assay.speculation.rounding import position_counts

_FIELDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("rate", re.compile(r"^\s*Acceptance rate \(%\):\s*([\d.]+)")),
    ("length", re.compile(r"^\s*(?:Mean acceptance length|Acceptance length):\s*([\d.]+)\s*$")),
    ("drafts", re.compile(r"^\s*(?:Drafts|Number of draft proposals|num_drafts):\s*([\d,]+)\s*$")),
    (
        "drafted",
        re.compile(r"^\s*(?:Draft tokens|Number of draft tokens generated|num_draft_tokens):\s*([\d,]+)\s*$"),
    ),
    (
        "accepted",
        re.compile(r"^\s*(?:Accepted tokens|Number of accepted tokens|num_accepted_tokens):\s*([\d,]+)\s*$"),
    ),
)
_POSITION = re.compile(
    r"^\s*(?:Position (\d+):\s*([\d.]+)|Acceptance (?:rate )?at token (\d+):\s*([\d.]+))\s*$", re.I
)


@dataclass
class _Block:
    """The figures of one summary as they come in."""

    fields: dict[str, str] = field(default_factory=dict)
    positions: dict[int, float] = field(default_factory=dict)


class VllmSummaryParser(Parser):
    """A summary spans lines, so a total is sent after each; the last one is the whole."""

    engine = "vllm"
    markers = ("cceptance", "raft", "Accepted tokens", "accepted tokens", "Position ")

    def __init__(self) -> None:
        self._block = _Block()
        self._blocks = 0

    def line(self, line: Line) -> Iterable[Observation]:
        """The summary as far as it has come."""
        if "metrics:" in line.text:
            return ()
        position = _POSITION.match(line.text)
        if position:
            percent = position[1] is not None
            index = int(position[1] if percent else position[3])
            rate = number(position[2] if percent else position[4])
            if rate is not None:
                self._block.positions[index] = rate / 100 if percent else rate
            return self._observe()
        for name, regex in _FIELDS:
            match = regex.match(line.text)
            if match:
                if name in self._block.fields:
                    # The same figure again: the summary of another run.
                    self._block = _Block()
                    self._blocks += 1
                self._block.fields[name] = match[1]
                return self._observe()
        return ()

    def _observe(self) -> Iterable[Observation]:
        block = self._block
        drafts, drafted = count(block.fields.get("drafts")), count(block.fields.get("drafted"))
        accepted = count(block.fields.get("accepted"))
        if drafts is None or drafted is None or accepted is None:
            return ()
        rates = tuple(block.positions[i] for i in range(len(block.positions)) if i in block.positions)
        k = drafted // drafts if drafts and drafted % drafts == 0 else None
        return (
            Observation(
                engine=self.engine, kind=Kind.SUMMARY, definition="vllm_summary", stream=f"run {self._blocks}",
                drafted=drafted, accepted=accepted, drafts=drafts, num_speculative_tokens=k,
                accepted_per_position=position_counts(drafts, rates, accepted, complete=len(rates) == k)
                if rates and drafts
                else None,
            ),
        )  # fmt: skip
