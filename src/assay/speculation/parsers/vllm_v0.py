"""vLLM V0: one line of counts since start, and the old metric names.

V0 counts a draft token as accepted also when an earlier one of the same draft was rejected. What
entered the text is `emitted − drafts`, one bonus token a step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from assay.speculation.observation import Counts, Definition, Kind, Observation, Printed
from assay.speculation.parsers.base import Line, Parser, Sample
from assay.speculation.parsers.counts import count, number

TOTAL = Definition(
    "vllm_v0_total",
    "vLLM V0: counts since start; 'accepted' also counts hits after the first rejection, so tokens per step are emitted / drafts",  # noqa: E501
    counts_after_rejection=True,
)


_HEAD = re.compile(r"Speculative metrics:(.*)", re.I)

_FIELDS = {
    "rate": re.compile(r"Draft acceptance rate:\s*(nan|[\d.]+)", re.I),
    "efficiency": re.compile(r"System efficiency:\s*(nan|[\d.]+)", re.I),
    "k": re.compile(r"Number of speculative tokens:\s*(\d+)", re.I),
    "accepted": re.compile(r"Number of accepted tokens:\s*(\d+)", re.I),
    # 0.5.3 wrote "tokens tokens".
    "drafted": re.compile(r"Number of draft tokens(?: tokens)?:\s*(\d+)", re.I),
    "emitted": re.compile(r"Number of emitted tokens(?: tokens)?:\s*(\d+)", re.I),
}

_NAME = re.compile(
    r"^vllm[:_]spec_decode_(draft_acceptance_rate|efficiency|num_accepted_tokens|num_draft_tokens|num_emitted_tokens)"
    r"(?:_total)?$"
)


class VllmV0Parser(Parser):
    """Lines are totals since start."""

    engine = "vllm"
    metric_words = ("spec_decode",)
    needles = ("accept",)
    company = ("speculative metrics:",)

    def line(self, line: Line) -> Iterable[Observation] | None:
        """A total since start."""
        head = _HEAD.search(line.text)
        if not head or not ("efficiency" in head[1] or "emitted" in head[1]):
            return None
        found = {
            name: match[1] for name, regex in _FIELDS.items() if (match := regex.search(head[1]))
        }
        drafted, k = count(found.get("drafted")), count(found.get("k"))
        if drafted is None:
            rate = number(found.get("rate"))
            if rate is None:
                return ()
            return (
                Observation(
                    engine=self.engine,
                    kind=Kind.VALUE,
                    definition=TOTAL,
                    num_speculative_tokens=k,
                    time=line.time,
                    printed=Printed(acceptance_rate=rate),
                ),
            )
        return (
            Observation(
                engine=self.engine,
                kind=Kind.TOTAL,
                definition=TOTAL,
                replica=line.replica,
                stream=line.process,
                num_speculative_tokens=k,
                time=line.time,
                counts=Counts(
                    drafted=drafted,
                    accepted=count(found.get("accepted")),
                    drafts=drafted // k if k and drafted % k == 0 else None,
                    emitted=count(found.get("emitted")),
                ),
            ),
        )

    def samples(self, samples: Sequence[Sample]) -> Iterable[Observation]:
        """A total since start, from the old names."""
        found: dict[str, float] = {}
        for sample in samples:
            match = _NAME.match(sample.name)
            if match:
                found[match[1]] = found.get(match[1], 0.0) + sample.value
        if "draft_acceptance_rate" not in found and "num_emitted_tokens" not in found:
            return ()
        drafted, emitted = (
            count(found.get("num_draft_tokens")),
            count(found.get("num_emitted_tokens")),
        )
        if drafted is None:
            return (
                Observation(
                    engine=self.engine,
                    kind=Kind.VALUE,
                    definition=TOTAL,
                    printed=Printed(acceptance_rate=number(found.get("draft_acceptance_rate"))),
                ),
            )
        return (
            Observation(
                engine=self.engine,
                kind=Kind.TOTAL,
                definition=TOTAL,
                counts=Counts(
                    drafted=drafted,
                    accepted=count(found.get("num_accepted_tokens")),
                    emitted=emitted,
                ),
                printed=Printed(implied_depth=_depth(drafted, emitted, found.get("efficiency"))),
            ),
        )


def _depth(drafted: int, emitted: int | None, efficiency: float | None) -> int | None:
    """Number of speculative tokens k that the efficiency gauge implies.

    efficiency = emitted / (drafts · (k + 1)) with drafts = drafted / k, so (k + 1) / k = emitted /
    (drafted · efficiency).
    """
    if not drafted or not emitted or not efficiency or not 0 < efficiency <= 1:
        return None
    ratio = emitted / (drafted * efficiency)
    if ratio <= 1:
        return None
    k = 1 / (ratio - 1)
    return round(k) if round(k) >= 1 and abs(k - round(k)) < 0.15 else None
