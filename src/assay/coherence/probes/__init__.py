"""The probes of `assay check`: one small file each, listed here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from assay.coherence.probes.base import Probe
from assay.coherence.probes.burst import Burst
from assay.coherence.probes.needle import Needle, needle_lengths
from assay.coherence.probes.question import FIBONACCI, FRANCE, JSON_LIST, SPANISH, STORY
from assay.coherence.probes.second_turn import SecondTurn
from assay.coherence.probes.tool_call import ToolUse
from assay.errors import UsageError

NAMES = (
    "france",
    "story",
    "fibonacci",
    "json_list",
    "spanish",
    "second_turn",
    "tool_call",
    "needle",
    "burst",
)


def standard_probes(
    *,
    max_model_len: int | None,
    longest_needle: int,
    streams: int,
    seed: int,
    count_tokens: Callable[[str], int] | None,
) -> tuple[Probe, ...]:
    """All probes, fitted to one subject; the burst comes last, since it wants the server for itself."""
    needle = Needle(
        lengths=needle_lengths(max_model_len, longest_needle), seed=seed, count_tokens=count_tokens
    )
    return (
        FRANCE,
        STORY,
        FIBONACCI,
        JSON_LIST,
        SPANISH,
        SecondTurn(),
        ToolUse(),
        needle,
        Burst(streams=streams),
    )


def check_names(names: Iterable[str]) -> frozenset[str]:
    """`names` as a set; UsageError where one of them is no probe."""
    chosen = frozenset(names)
    unknown = sorted(chosen - set(NAMES))
    if unknown:
        raise UsageError(f"no probe is called {unknown[0]!r}", remedy=f"choose from {', '.join(NAMES)}")
    return chosen
