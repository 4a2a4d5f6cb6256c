"""`assay check --identity`: decide whether a server has the model of a reference file.

Each statistic is bounded on both sides with a declared error: *different* is said of the
reference's own model in at most 1 % of runs, and *same* of a model that is further away than the
allowance in at most 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from assay.coherence.differences import STATISTICS, item_pairs
from assay.coherence.fingerprint import Fingerprint
from assay.errors import AssayError
from assay.stats import cluster_mean
from assay.verdict import Finding, Metric, Severity, Table, Verdict, jsonable

ALPHA = 0.01
"""One-sided error of *different*, of all tests together, and of *same*."""
Decision = Literal["same", "different", "undecided"]


@dataclass(frozen=True)
class Allowance:
    """What one model may differ by from itself: on the same kind of engine, and on another one with
    other kernels.
    """

    same_engine: float
    other_engine: float
    unit: str


ALLOWED: Mapping[str, Allowance] = {
    "moved": Allowance(0.010, 0.02, "share of probability that moved"),
    "flips": Allowance(0.01, 0.02, "share of greedy tokens that changed beyond rounding"),
    "tokens": Allowance(0.05, 0.05, "share of greedy tokens that changed"),
    "scores": Allowance(0.002, 0.01, "bits per byte, mean absolute difference"),
}
"""On one kind of engine: rounding to 8 bits moves 0.010 to 0.024; bf16 on a GPU lies 0.005 from
itself, as the first texts meet an empty prefix cache (benchmarks/check/results/identity.json). On
another: bf16 of llama.cpp and vLLM lie 0.013 apart."""


@dataclass(frozen=True)
class Test:
    """One statistic: its mean, one-sided bounds at 1 − α each, and what is allowed."""

    name: str
    value: float
    lo: float
    hi: float
    n: int
    allowed: float
    decision: Decision
    says: str
    decides: bool = True
    """Whether *same* may rest on it."""


@dataclass(frozen=True)
class Identity:
    """The answer: a decision, the tests it rests on, and what a fingerprint of tokenizers says."""

    decision: Decision
    tests: tuple[Test, ...]
    tokenizer: str
    reference: Fingerprint
    found: Fingerprint

    def to_json(self) -> dict[str, Any]:
        """The object `results.identity`."""
        return {
            "decision": self.decision,
            "alpha_different": ALPHA,
            "alpha_same": ALPHA,
            "tokenizer": self.tokenizer,
            "tests": [jsonable(vars(test)) for test in self.tests],
            "same_engine": self.reference.kind == self.found.kind,
            "reference": {
                "model": self.reference.model,
                "server": self.reference.server,
                "noise": self.reference.noise,
            },
        }


def compare_fingerprints(reference: Fingerprint, found: Fingerprint) -> Identity:
    """Decide whether `found` is the model of `reference`.

    AssayError where they hold nothing that can be compared.
    """
    if reference.items and found.items and reference.route != found.route:
        raise AssayError(
            f"the reference was asked through {reference.route}, and this server only takes"
            f" {found.route}",
            finding_id="coherence.reference",
            remedy="make the reference at a server with the same route",
        )
    tokenizer = _tokenizer(reference, found)
    raw = {name: statistic(reference, found) for name, statistic in STATISTICS.items()}
    if raw["moved"]:
        raw["tokens"] = []  # what probabilities say is finer
    used = {name: groups for name, groups in raw.items() if groups}
    if not used:
        raise AssayError(
            "the reference and this server have nothing in common to compare: no greedy tokens, no"
            " scores",
            finding_id="coherence.reference",
            remedy="make the reference with --identity-out at a server of this kind",
        )
    tests = tuple(_test(name, groups, reference, found, len(used)) for name, groups in used.items())
    decision: Decision = "undecided"
    if tokenizer.startswith("other") or any(t.decision == "different" for t in tests):
        decision = "different"
    elif all(t.decision == "same" for t in tests if t.decides):
        decision = "same"
    return Identity(decision, tests, tokenizer, reference, found)


def _test(
    name: str, groups: list[list[float]], reference: Fingerprint, found: Fingerprint, tests: int
) -> Test:
    own = ALLOWED[name]
    allowed = own.same_engine if reference.kind == found.kind else own.other_engine
    # What the reference's server does to itself is no difference.
    allowed = max(allowed, 3 * reference.noise.get(name, 0.0))
    n = sum(map(len, groups))
    if name in ("flips", "tokens"):
        value, lo, hi = _share(sum(map(sum, groups)), n, ALPHA / tests)
        hi = _share(sum(map(sum, groups)), n, ALPHA)[2]
    else:
        # Bounds at α each are the ends of a two-sided interval of confidence 1 − 2α.
        low, high = (cluster_mean(groups, 1 - 2 * a) for a in (ALPHA / tests, ALPHA))
        value, lo, hi = low.value, max(0.0, low.interval.lo), high.interval.hi
    decision: Decision = "different" if lo > allowed else "same" if hi <= allowed else "undecided"
    decides = name != "flips"
    return Test(name, value, lo, hi, n, allowed, decision, own.unit, decides)


def _share(count: float, n: int, alpha: float) -> tuple[float, float, float]:
    """A share with exact one-sided bounds at 1 − α each (Clopper and Pearson, Biometrika 26 (1934)
    404).
    """
    from scipy.special import betaincinv

    lo = float(betaincinv(count, n - count + 1, alpha)) if count else 0.0
    hi = float(betaincinv(count + 1, n - count, 1 - alpha)) if count < n else 1.0
    return count / n, lo, hi


def _tokenizer(a: Fingerprint, b: Fingerprint) -> str:
    """Whether the tokenizers agree: by ids where both give them, else by the tokens of each prompt
    up to a constant.
    """
    if a.strange and b.strange and len(a.strange) == len(b.strange):
        return "same ids" if a.strange == b.strange else "other ids of the same texts"
    counts = [
        (x.prompt_tokens, y.prompt_tokens)
        for pairs in item_pairs(a, b)
        for x, y in pairs
        if x.prompt_tokens is not None and y.prompt_tokens is not None
    ]
    if not counts:
        return "not known"
    # A start token that one engine adds and another does not is no other tokenizer.
    offsets = {y - x for x, y in counts}
    return (
        "same counts" if len(offsets) == 1 else f"other counts of tokens for {len(counts)} prompts"
    )


def finding_of(answer: Identity) -> Finding:
    """The finding: an error where it is another model, a warning where it cannot be told."""
    worst = max(answer.tests, key=lambda t: t.value / t.allowed if t.allowed else math.inf)
    measured = (
        f"{worst.value:.4f} {worst.says} ({worst.lo:.4f} to {worst.hi:.4f}), allowed"
        f" {worst.allowed:.4f}"
    )
    if answer.decision == "different":
        detail = (
            measured
            if not answer.tokenizer.startswith("other")
            else f"its tokenizer is another one: {answer.tokenizer}; {measured}"
        )
        return Finding(
            "coherence.identity",
            Severity.ERROR,
            f"this is not {answer.reference.model} as the reference has it",
            detail=detail,
            evidence=answer.to_json(),
            causes=(
                "another model under this name",
                "another quantisation or KV cache type of it",
                "another release of the engine",
            ),
            remedies=(
                "compare the checkpoint with assay verify, and the two servers with assay compare",
            ),
        )
    if answer.decision == "undecided":
        open_ = next(t for t in answer.tests if t.decides and t.decision == "undecided")
        return Finding(
            "coherence.identity_undecided",
            Severity.WARNING,
            "it cannot be told apart from its reference, nor called the same, at this budget",
            detail=(
                f"{open_.value:.4f} {open_.says} ({open_.lo:.4f} to {open_.hi:.4f}), allowed"
                f" {open_.allowed:.4f}"
            ),
            evidence=answer.to_json(),
            remedies=("score whole texts, which tells smaller differences: `assay compare`",),
        )
    return Finding(
        "coherence.identity_same",
        Severity.INFO,
        f"it is {answer.reference.model} up to {measured}",
        evidence=answer.to_json(),
    )


VERDICTS: Mapping[Decision, Verdict] = {
    "same": Verdict.PASS,
    "different": Verdict.FAIL,
    "undecided": Verdict.INCONCLUSIVE,
}
_SHORT = {
    "moved": "probability that moved",
    "flips": "tokens turned beyond rounding",
    "tokens": "tokens that changed",
    "scores": "bits per byte",
}


def identity_table(answer: Identity) -> Table:
    """The tests as a table."""
    rows = [
        (
            _SHORT[t.name],
            f"{t.value:.4f}",
            f"{t.lo:.4f} to {t.hi:.4f}",
            f"{t.allowed:.4f}",
            t.decision if t.decides or t.decision == "different" else "–",
        )
        for t in answer.tests
    ]
    other = answer.tokenizer.startswith("other")
    rows.append(
        ("tokenizer", answer.tokenizer.split(" of ")[0], "", "none", "different" if other else "–")
    )
    title = f"Against {answer.reference.model} on {answer.reference.server}"
    note = (
        f"one-sided bounds: {ALPHA:.0%} for all that say different together, {ALPHA:.0%} for each"
        " that says same"
    )
    columns = ("difference", "measured", "bounds", "allowed", "says")
    return Table(title, columns, rows, numeric=frozenset({1, 2, 3}), note=note)


def identity_metric(answer: Identity) -> Metric:
    """The headline."""
    return Metric("identity", answer.decision, note=f"against {answer.reference.model}")


def fingerprint_counts(found: Fingerprint) -> Sequence[Any]:
    """A short line about a fingerprint that was taken: items, whether with probabilities,
    scores.
    """
    listed = sum(bool(i.likely) for text in found.items for i in text)
    return [sum(map(len, found.items)), listed, len(found.nats)]
