"""Summaries of benchmarks that print one figure a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from assay.speculation.observation import Definition, Kind, Observation
from assay.speculation.parsers.base import Line, Parser
from assay.speculation.parsers.counts import count, number
from assay.speculation.parsers.figures import NUMBER, Figures, role_of
from assay.speculation.rounding import position_counts

VLLM = Definition("vllm_summary", "vLLM benchmark summary of one run")
SGLANG = Definition("sglang_summary", "SGLang benchmark summary of one run")


_FIGURE = re.compile(
    rf"^\W*([A-Za-z#][\w /()%#.-]{{0,60}}?)[\"']?\s*[:=]\s*[\"']?({NUMBER})\s*(%?)[\"',]*\s*$", re.I
)

_POSITION = re.compile(
    r"^\W*(?:(pos(?:ition)?)|acceptance (?:rate )?at token)"
    r" (\d{1,3}):\s*(\d[\d.]*)\s*%?\s*(?:\((\d+)/(\d+)\))?\s*$",
    re.I,
)


@dataclass
class _Block:
    """The figures of one summary as they come in."""

    figures: Figures = field(default_factory=Figures)
    rates: dict[int, float] = field(default_factory=dict)
    exact: dict[int, int] = field(default_factory=dict)
    sglang: bool = False


class SummaryParser(Parser):
    """One figure a line, as `vllm bench serve`, vLLM's offline example and SGLang's benchmarks
    print them at the end.
    """

    fallback = 1
    engine = "vllm"
    also = ("sglang",)
    needles = ("accept",)
    company = (
        "acceptance",
        "accepted tokens",
        "accepted_tokens",
        "accept len",
        "accept_len",
        "accept_rate",
        "_accepted",
    )
    near = ("draft", "position ", "output", "predict", "backend:")

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def line(self, line: Line) -> Iterable[Observation] | None:
        """A figure; what it belongs to is known once all are there (`settle`)."""
        text = line.text
        if len(text) > 200:
            return None
        position = _POSITION.match(text)
        if position:
            return self._position(position)
        match = _FIGURE.match(text)
        role = role_of(match[1], whole=True) if match else None
        if not match or role is None:
            if text.strip().lower().startswith("backend:") and "sglang" in text.lower():
                self._blocks.append(_Block(sglang=True))
            return None
        if not self._blocks or (role in self._blocks[-1].figures.own and role != "length"):
            self._blocks.append(_Block())  # the same figure again: the summary of another run
        block = self._blocks[-1]
        block.sglang |= "accept length" in text.lower() or "(server)" in text
        block.figures.named(match[1], match[2], match[3], whole=True)
        return ()

    def _position(self, match: re.Match[str]) -> Iterable[Observation] | None:
        rate, index = number(match[3]), int(match[2])
        if not self._blocks or rate is None:
            return None
        block = self._blocks[-1]
        if match[4] and match[5]:
            block.exact[index] = count(match[4]) or 0
            rate = (count(match[4]) or 0) / max(1, count(match[5]) or 1)
        elif (match[1] and "%" not in match[0]) or rate > 1:
            rate /= 100  # positions are printed in per cent
        block.rates[index] = min(1.0, rate)
        return ()

    def settle(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        """The summaries, beside what the log lines say."""
        return [
            *observations,
            *(o for i, b in enumerate(self._blocks) if (o := _summary(b, i)) is not None),
        ]


def _summary(block: _Block, index: int) -> Observation | None:
    found = block.figures.observation(
        "sglang" if block.sglang else "vllm", Kind.SUMMARY, stream=f"run {index}"
    )
    if found is None or not found.counts.drafts or not found.counts.drafted:
        return found
    k = (
        found.counts.drafted // found.counts.drafts
        if found.counts.drafted % found.counts.drafts == 0
        else None
    )
    rates = [block.rates[i] for i in range(len(block.rates)) if i in block.rates]
    exact = tuple(block.exact[i] for i in range(len(block.exact)) if i in block.exact)
    positions = exact or position_counts(
        found.counts.drafts, rates, found.counts.accepted, complete=len(rates) == k
    )
    return replace(
        found,
        definition=SGLANG if block.sglang else VLLM,
        num_speculative_tokens=k,
        counts=replace(found.counts, at_position=positions or None),
    )
