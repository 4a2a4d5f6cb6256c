"""What a rule of a check is, with the parts that rules share.

A rule looks at one kind of evidence and says good, bad, unclear, or that it was not examined. It
compares with a reference where there is one. Intervals are two-sided; their confidence depends on
how often the verdict has been asked for (alpha spending over interim analyses,
`assay.stats.multiplicity.confidence_of_analysis`), so that asking again makes no accident more
likely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from assay.stats import Interval
from assay.verdict import Finding, Severity


class Rule(StrEnum):
    """Names of the rules, as results and reports show them."""

    HARD_TEXTS = "hard_texts"
    DEGENERATE_RATE = "degenerate_rate"
    HIDDEN_TOKENS = "hidden_tokens"
    THINK_TAG = "think_tag"
    TRUNCATED_REASONING = "truncated_reasoning"
    UNFINISHED = "unfinished"
    THROUGHPUT = "throughput"
    NEEDS = "needs"
    STREAMING = "streaming"
    STUTTER = "stutter"
    ANSWERS = "answers"
    SAME_ANSWERS = "same_answers"
    TOOL_FORM = "tool_form"
    TOOLS = "tools"
    BITS_PER_BYTE = "bits_per_byte"
    DEPTH = "depth"
    SERVER_COUNTERS = "server_counters"
    PROMPTS = "prompts"


State = Literal["good", "bad", "unclear", "not_examined"]


@dataclass(frozen=True)
class Ruling:
    """What one rule says, in one line, with the findings it raises."""

    rule: Rule
    state: State
    says: str
    findings: tuple[Finding, ...] = ()


Rulings = Ruling | list[Ruling] | None
"""What a rule returns: one ruling, several, or none where it has nothing to say."""


def coherence_finding(
    id_: str, severity: Severity, title: str, evidence: Mapping[str, Any], **more: Any
) -> Finding:
    """A finding whose id begins with `coherence.`."""
    return Finding(id=f"coherence.{id_}", severity=severity, title=title, evidence=evidence, **more)


def percent(interval: Interval) -> str:
    """A rate with its interval in words."""
    return f"{interval.value:.0%} [{interval.lo:.0%}, {interval.hi:.0%}]"
