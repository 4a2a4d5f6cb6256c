"""The normalised evidence: what one line, sample or response says, and what a whole source adds up to.

Field names follow NVIDIA AIPerf's engine-neutral acceptance record where they fit. Rates are fractions. Lengths
count the bonus token, so that a step which accepted nothing has length 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """How an observation relates to the run it comes from."""

    WINDOW = "window"
    """Counts of one logging interval: add them up."""
    REQUEST = "request"
    """Counts of one request: add them up."""
    TOTAL = "total"
    """Counts since the process started: take differences."""
    SUMMARY = "summary"
    """Counts of a finished benchmark: use them where there is nothing finer."""
    VALUE = "value"
    """Printed rates without counts."""


DEFINITIONS: Mapping[str, str] = {
    "vllm_v1_window": "vLLM V1 log: counts of one interval; length = 1 + accepted / drafts",
    "vllm_v0_total": (
        "vLLM V0: counts since start; 'accepted' also counts hits after the first rejection, so tokens per step are "
        "emitted / drafts"
    ),
    "vllm_counters": "vLLM counters since start; length = 1 + accepted / drafts",
    "vllm_request": "vLLM counts of one request; histogram[i] = steps that accepted i drafts",
    "vllm_summary": "vLLM benchmark summary of one run",
    "quoted_rates": "printed rates without counts; an efficiency above 1 is read as the net multiplier",
    "sglang_accept_len": "SGLang: accept len = tokens per verify step, bonus token included",
    "sglang_gauges": "SGLang gauges: the last interval only",
    "sglang_request": "SGLang counts of one request",
    "llamacpp_request": "llama.cpp counts of one request (the denominator is the number of drafted tokens)",
    "llamacpp_total": "llama.cpp statistics of one drafting method since start",
    "llamacpp_counters": "llama.cpp counters since start",
    "trtllm_iteration": "TensorRT-LLM counts of one iteration; one draft a request",
    "trtllm_counters": "TensorRT-LLM counters since start; verify steps are not counted",
    "trtllm_request": "TensorRT-LLM counts of one request",
    "trtllm_average": "TensorRT-LLM average acceptance length, printed without a weight",
    "mlx_request": "mlx-vlm counts of one request; a round is one verify step",
    "mlc_counts": "MLC: accept_count[i] / draft_count[i]; entry 0 is the slot that is always accepted",
    "guard_request": "engine that stops drafting by itself: drafts, accepted and drafted of one request",
    "openai_usage": "OpenAI usage: accepted and rejected prediction tokens of one request",
}


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one line, metrics sample or response says. Unknown values are None.

    `replica` names the engine of several, `stream` the counter inside it. `accepted_per_position[i]` counts the
    steps whose draft position i was accepted, out of `drafts_per_position[i]` (out of `drafts` where None).
    `rates_per_position`, `acceptance_rate` and `mean_acceptance_length` are as printed;
    `reported_rate` keeps a printed rate whose meaning turned out to be another. `emitted` counts all tokens
    of the steps, bonus tokens included; `generated` counts the tokens of the whole reply, whose steps need not all
    have drafted. `implied_depth` is the number of speculative tokens that other figures imply. `weight` is the share of a printed value in an average, None where that is not known.
    """

    engine: str
    kind: Kind
    definition: str
    replica: str | None = None
    stream: str = ""
    drafted: int | None = None
    accepted: int | None = None
    drafts: int | None = None
    accepted_per_position: tuple[int, ...] | None = None
    drafts_per_position: tuple[int, ...] | None = None
    rates_per_position: tuple[float, ...] | None = None
    acceptance_rate: float | None = None
    reported_rate: float | None = None
    mean_acceptance_length: float | None = None
    num_speculative_tokens: int | None = None
    emitted: int | None = None
    generated: int | None = None
    implied_depth: int | None = None
    multiplier: float | None = None
    weight: float | None = 1.0
    time: str | None = None
    generation_throughput: float | None = None
    running: int | None = None
    context_tokens: int | None = None
    partial: bool = False
    estimated: bool = False
    idle: bool = False
    note: str = ""

    @classmethod
    def of(cls, **known: Any) -> Observation:
        """The same as the constructor, at a tenth of its cost: what is not known stays the default of the class.

        For the lines of which a log may hold millions; the constructor of a frozen class sets every field one by one.
        """
        own = object.__new__(cls)
        own.__dict__.update(known)
        return own

    @property
    def has_counts(self) -> bool:
        """Whether anything here can be added up."""
        return self.drafted is not None or self.drafts is not None or self.accepted_per_position is not None

    @property
    def empty(self) -> bool:
        """Whether nothing was drafted in it."""
        if self.drafted is not None:
            return self.drafted == 0
        if self.drafts is not None:
            return self.drafts == 0
        return self.idle


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a source adds up to. Unknown values are None.

    `positions[i]` is (accepted, drafts) of draft position i. `tokens_per_step` is the mean acceptance length, or
    what can be derived in its place (from the generated tokens of the replies). `leading_accepted` are the drafts
    that entered the text where that differs from `accepted` (vLLM V0). `windows` counts observations with drafts.
    """

    engine: str | None = None
    drafted: int | None = None
    accepted: int | None = None
    drafts: int | None = None
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    per_position: tuple[float, ...] | None = None
    num_speculative_tokens: int | None = None
    windows: int = 0
    counts: bool = False
    positions: tuple[tuple[int, int], ...] | None = None
    tokens_per_step: float | None = None
    leading_accepted: int | None = None
    emitted: int | None = None
    generated: int | None = None
    multiplier: float | None = None
    reported_accept_rate: float | None = None
    generation_throughput: float | None = None
    partial: bool = False
    estimated: bool = False
    definitions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    per_implementation: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)

    @property
    def nothing_drafted(self) -> bool:
        """Whether the source shows that no token was drafted."""
        if self.counts:
            return not self.drafted and not self.drafts and self.positions is None
        return self.acceptance_rate is None and self.tokens_per_step is None and self.windows == 0

    @property
    def impossible(self) -> bool:
        """Whether more was accepted than drafted, beyond what counters of one page run ahead of each other."""
        return (
            self.drafted is not None
            and self.accepted is not None
            and self.accepted > self.drafted + max(8, self.drafted // 50)
        )

    @property
    def leading(self) -> int | None:
        """Accepted drafts that entered the text."""
        return self.accepted if self.leading_accepted is None else self.leading_accepted

    def to_json(self) -> dict[str, Any]:
        """The object `results.record`."""
        own: dict[str, Any] = {
            "engine": self.engine,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "drafts": self.drafts,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "per_position": None if self.per_position is None else list(self.per_position),
            "num_speculative_tokens": self.num_speculative_tokens,
            "windows": self.windows,
            "counts": self.counts,
            "tokens_per_step": self.tokens_per_step,
            "emitted": self.emitted,
            "reported_accept_rate": self.reported_accept_rate,
            "reported_multiplier": self.multiplier,
            "generation_throughput": self.generation_throughput,
            "partial": self.partial,
            "estimated": self.estimated,
            "definitions": {name: DEFINITIONS[name] for name in self.definitions},
            "notes": list(self.notes),
        }
        if self.per_implementation:
            own["per_implementation"] = {k: dict(v) for k, v in self.per_implementation.items()}
        return own
