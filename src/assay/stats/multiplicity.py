"""The error of several tests, and of several interim analyses of one run (alpha spending)."""

from __future__ import annotations

from collections.abc import Sequence


def confidence_of_analysis(number: int) -> float:
    """The confidence of the deciding intervals at an interim analysis: the alpha that it spends.

    A run that is extended until it is decided would be accepted at the margin more often than one
    analysis allows. So each analysis spends its own part of the error (Bonferroni): 2.5 % on each
    side at the first, less than 1 % more at all others together.

    Args:
        number: Which analysis of the same windows this is, counted from 1.

    Returns:
        0.95 at the first, 0.99 at the second, then 0.995, 0.9975 …
    """
    if number < 1:
        raise ValueError("interim analyses are counted from 1")
    return 0.95 if number == 1 else 1.0 - 0.01 / 2 ** (number - 2)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values in the order given: p̃₍ᵢ₎ = max over j ≤ i of min(1, (m − j + 1) p₍ⱼ₎).

    Rejecting every test with p̃ ≤ α keeps the chance of one false rejection or more at α, under
    any dependence.
    """
    if any(not 0.0 <= p <= 1.0 for p in p_values):
        raise ValueError(f"p-values must lie between 0 and 1, got {list(p_values)}")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
