"""What one line, metrics sample or response says about drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MOST_POSITIONS = 1000
"""No draft is longer; a larger figure is not one of positions."""


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
        "vLLM V0: counts since start; 'accepted' also counts hits after the first rejection, so"
        " tokens per step are emitted / drafts"
    ),
    "vllm_counters": "vLLM counters since start; length = 1 + accepted / drafts",
    "vllm_request": "vLLM counts of one request; histogram[i] = steps that accepted i drafts",
    "vllm_summary": "vLLM benchmark summary of one run",
    "sglang_summary": "SGLang benchmark summary of one run",
    "sglang_accept_len": "SGLang: accept len = tokens per verify step, bonus token included",
    "sglang_gauges": "SGLang gauges: the last interval only",
    "sglang_request": "SGLang counts of one request",
    "sglang_average": "SGLang average length since start, printed without a weight",
    "llamacpp_request": (
        "llama.cpp counts of one request (the denominator is the number of drafted tokens)"
    ),
    "llamacpp_total": "llama.cpp statistics of one drafting method since start",
    "llamacpp_counters": "llama.cpp counters since start",
    "trtllm_iteration": "TensorRT-LLM counts of one iteration; one draft a request",
    "trtllm_counters": "TensorRT-LLM counters since start; verify steps are not counted",
    "trtllm_request": "TensorRT-LLM counts of one request",
    "trtllm_average": "TensorRT-LLM average acceptance length, printed without a weight",
    "mlx_request": "mlx-vlm counts of one request; a round is one verify step",
    "mlc_counts": (
        "MLC: accept_count[i] / draft_count[i]; entry 0 is the slot that is always accepted"
    ),
    "fastdeploy_request": (
        "FastDeploy counts of one request; its accepted tokens include bonus tokens, which are"
        " left out"
    ),
    "named": "figures read by their names: draft tokens accepted of drafted, steps, tokens a step",
    "openai_usage": "OpenAI usage: accepted and rejected prediction tokens of one request",
}


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one line, metrics sample or response says. Unknown values are None.

    `replica` names the engine of several, `stream` the counter inside it.
    `accepted_per_position[i]` counts the steps whose draft position i was accepted, out of
    `drafts_per_position[i]` (out of `drafts` where None). `rates_per_position`, `acceptance_rate`
    and `mean_acceptance_length` are as printed; `reported_rate` keeps a printed rate whose meaning
    turned out to be another. `emitted` counts all tokens of the steps that drafted, bonus tokens
    included; `generated` the tokens of the whole reply and `steps` its decode steps, which need not
    all have drafted. `accepted_first` counts the drafts of which at least the first token was
    accepted. `implied_depth` is the number of speculative tokens that other figures imply. `weight`
    is the share of a printed value in an average, None where that is not known.
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
    steps: int | None = None
    accepted_first: int | None = None
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
        """The same as the constructor, at a tenth of its cost: what is not known stays the default
        of the class.

        For the lines of which a log may hold millions; the constructor of a frozen class sets every
        field one by one.
        """
        own = object.__new__(cls)
        own.__dict__.update(known)
        return own

    @property
    def has_counts(self) -> bool:
        """Whether anything here can be added up."""
        return (
            self.drafted is not None
            or self.drafts is not None
            or self.accepted_per_position is not None
        )

    @property
    def empty(self) -> bool:
        """Whether nothing was drafted in it."""
        if self.drafted is not None:
            return self.drafted == 0
        if self.drafts is not None:
            return self.drafts == 0
        return self.idle
