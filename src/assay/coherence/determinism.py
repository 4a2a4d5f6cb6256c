"""`assay check --determinism`: compare the answers to one greedy request, alone and in batches.

Each of four prompts is asked alone several times, then all together in batches of 8 and 44. Where
an answer diverges from the first one, the two tokens at that place are compared. If they were about
equally likely, rounding explains the difference: sums are taken in another order in another batch.
If one was clearly likelier, the answer was corrupted: by another request in the batch, by a cache,
by memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from assay.coherence.conversation import side_by_side, user
from assay.coherence.fingerprint import ROUNDING, WIDTH
from assay.engines import Capability, Request
from assay.engines.server.engine import ServerEngine
from assay.engines.server.top_tokens import TopToken
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Finding, Metric, Severity, Table, Verdict

BATCHES = (1, 8, 44)
REPEATS = 4
"""Times that each prompt is asked alone."""
TOKENS = 48
"""Nats: a smaller gap is explained by rounding. Two steps of bf16 at a logit of 16 to 32 (8
significant bits: 2⁻³ each).
"""
CORRUPT = 1.0
"""Nats: rounding turns no larger gap. Between the two it is unclear: 4-bit weights and 8-bit caches
round more coarsely.
"""
_PROMPTS = (
    (
        "The lighthouse keeper had not spoken to anyone for three weeks when the boat finally",
        "Begin a story about a lighthouse keeper.",
    ),
    (
        'def merge_sorted(left, right):\n    """Merge two sorted lists into one."""\n',
        "Write a Python function that merges two sorted lists.",
    ),
    (
        "Rivers shape the land in two ways. First, they",
        "In which two ways do rivers shape the land?",
    ),
    (
        "The recipe for a simple vegetable soup begins with",
        "How do I cook a simple vegetable soup?",
    ),
)


@dataclass(frozen=True)
class Answer:
    """One answer: its text, and its tokens with the likeliest at each step where the server gives
    them.
    """

    text: str
    tokens: tuple[TopToken, ...] = ()


@dataclass(frozen=True)
class Divergence:
    """Where an answer leaves the first one of its prompt. `gap` is in nats, None where the server
    gives no probabilities.
    """

    prompt: int
    batch: int
    position: int
    """In tokens, or in characters where no tokens are given."""
    gap: float | None
    first: str
    other: str

    @property
    def why(self) -> str:
        """`rounding`, `corruption`, `unclear` or `not known`."""
        if self.gap is None:
            return "not known"
        return (
            "rounding"
            if abs(self.gap) <= ROUNDING
            else "corruption"
            if abs(self.gap) > CORRUPT
            else "unclear"
        )


@dataclass(frozen=True)
class Level:
    """All answers at one batch size."""

    batch: int
    asked: int
    outputs: tuple[int, ...]
    """How many different answers each prompt got, those asked alone among them."""
    failed: int
    error: str
    divergences: tuple[Divergence, ...]

    def to_json(self) -> dict[str, Any]:
        """The level as plain JSON types."""
        rows = [vars(p) | {"why": p.why} for p in self.divergences]
        return {
            "batch": self.batch,
            "asked": self.asked,
            "outputs": self.outputs,
            "most_outputs": max(self.outputs, default=0),
            "parted": len(rows),
            "failed": self.failed,
            "error": self.error,
            "partings": rows[:20],
            "why": dict(Counter(p.why for p in self.divergences)),
        }


@dataclass(frozen=True)
class Determinism:
    """All levels, and what they come to."""

    levels: tuple[Level, ...]

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """All answers that diverge from the first of their prompt."""
        return tuple(p for level in self.levels for p in level.divergences)

    @property
    def decision(self) -> str:
        """`same`, `rounding`, `corruption`, `unclear`, `not known` or `unfinished`."""
        reasons = {p.why for p in self.divergences}
        for name in ("corruption", "unclear", "not known", "rounding"):
            if name in reasons:
                return name
        return "unfinished" if any(level.failed for level in self.levels) else "same"

    @property
    def verdict(self) -> Verdict:
        """Rounding is no fault; what cannot be explained is not acquitted."""
        if self.decision == "corruption":
            return Verdict.FAIL
        unfinished = any(level.failed for level in self.levels)
        return (
            Verdict.PASS
            if self.decision in ("same", "rounding") and not unfinished
            else Verdict.INCONCLUSIVE
        )

    def to_json(self) -> dict[str, Any]:
        """The object `results.determinism`."""
        return {
            "decision": self.decision,
            "levels": [level.to_json() for level in self.levels],
            "prompts": len(_PROMPTS),
            "tokens": TOKENS,
            "rounding_nats": ROUNDING,
            "corrupt_nats": CORRUPT,
        }


def measure_determinism(
    engine: ServerEngine, progress: Progress = NO_PROGRESS, batches: Sequence[int] = BATCHES
) -> Determinism:
    """Ask all levels; AssayError where the first answers do not come."""
    firsts: list[Answer] = [_ask(engine, prompt) for prompt in range(len(_PROMPTS))]
    seen: list[set[str]] = [{answer.text} for answer in firsts]
    levels = []
    for batch in batches:
        asked = [
            n % len(_PROMPTS) for n in range(batch if batch > 1 else (REPEATS - 1) * len(_PROMPTS))
        ]
        failed, error, divergences = 0, "", []
        with progress(f"the same requests, {batch} at a time", len(asked)) as advance:
            for prompt, answer in side_by_side([partial(_tried, engine, p) for p in asked], batch):
                advance()
                if isinstance(answer, AssayError):
                    failed, error = failed + 1, answer.message
                    continue
                seen[prompt].add(answer.text)
                if (
                    divergence := find_divergence(firsts[prompt], answer, prompt, batch)
                ) is not None:
                    divergences.append(divergence)
        divergences.sort(key=lambda p: (p.prompt, p.position))
        levels.append(
            Level(batch, len(asked), tuple(map(len, seen)), failed, error, tuple(divergences))
        )
    return Determinism(tuple(levels))


def find_divergence(
    first: Answer, other: Answer, prompt: int = 0, batch: int = 1
) -> Divergence | None:
    """Where two answers diverge, and how much likelier the first's token was there; None where they
    are one text.
    """
    if first.text == other.text:
        return None
    if not first.tokens or not other.tokens:
        place = next(i for i, (a, b) in enumerate(zip_longest(first.text, other.text)) if a != b)
        return Divergence(
            prompt,
            batch,
            place,
            None,
            first.text[place : place + 12],
            other.text[place : place + 12],
        )
    pairs = zip_longest(first.tokens, other.tokens)
    place = next(
        (i for i, (a, b) in enumerate(pairs) if a is None or b is None or a.text != b.text), 0
    )
    if place >= min(len(first.tokens), len(other.tokens)):
        # One ended where the other went on: the end is a token that is not listed by name.
        longer = max(first.tokens, other.tokens, key=len)[place]
        return Divergence(prompt, batch, place, longer.gap(""), "(end)", longer.text)
    a, b = first.tokens[place], other.tokens[place]
    # Each side's own view of the two tokens; the first's is the one that no batch touched.
    return Divergence(prompt, batch, place, a.gap(b.text), a.text, b.text)


def _tried(engine: ServerEngine, prompt: int) -> tuple[int, Answer | AssayError]:
    try:
        return prompt, _ask(engine, prompt)
    except AssayError as error:
        return prompt, error


def _ask(engine: ServerEngine, prompt: int) -> Answer:
    raw, question = _PROMPTS[prompt]
    request = Request(prompt=raw, max_tokens=TOKENS, seed=0)
    if Capability.COMPLETIONS not in engine.capabilities:
        request = Request(messages=(user(question),), max_tokens=TOKENS, seed=0)
    reply, top = engine.generate_with_top(request, WIDTH)
    return Answer(f"{reply.reasoning}{reply.content}", top)


_TITLES = {
    "corruption": (
        Severity.ERROR,
        "the same greedy request gives answers that rounding does not explain",
    ),
    "unclear": (
        Severity.WARNING,
        "the same greedy request gives different answers, and rounding may or may not explain them",
    ),
    "not known": (
        Severity.WARNING,
        (
            "the same greedy request gives different answers, and the server gives no probabilities"
            " to explain them"
        ),
    ),
    "rounding": (
        Severity.INFO,
        (
            "the same greedy request gives different answers where two tokens were about equally"
            " likely: rounding"
        ),
    ),
}


def findings_of(found: Determinism) -> tuple[Finding, ...]:
    """What was found, one finding at most, and one for requests that failed."""
    findings = []
    if found.decision in _TITLES:
        severity, title = _TITLES[found.decision]
        worst = max(found.divergences, key=lambda p: abs(p.gap or 0.0))
        detail = (
            f"prompt {worst.prompt + 1} in a batch of {worst.batch} parts at token"
            f" {worst.position}: {worst.first!r} became {worst.other!r}"
        )
        detail += "" if worst.gap is None else f", which was {worst.gap:.2f} nats less likely"
        bad = severity is not Severity.INFO
        findings.append(
            Finding(
                "coherence.nondeterministic",
                severity,
                title,
                detail=detail,
                evidence=found.to_json(),
                causes=(
                    (
                        "requests of one batch mix",
                        "a prefix cache or KV block is shared or damaged",
                        "memory errors",
                    )
                    if bad
                    else ("sums are taken in another order in another batch",)
                ),
                remedies=(
                    (
                        "repeat with prefix caching off and with --enforce-eager",
                        "take the server out of service until it is explained",
                    )
                    if bad
                    else (
                        "vLLM: VLLM_BATCH_INVARIANT=1, where equal answers matter more than speed",
                    )
                ),
            )
        )
    failed = [level for level in found.levels if level.failed]
    if failed:
        title = (
            f"{sum(level.failed for level in failed)} of the requests in batches failed:"
            f" {failed[-1].error}"
        )
        findings.append(Finding("coherence.determinism_unfinished", Severity.WARNING, title))
    return tuple(findings)


def determinism_table(found: Determinism) -> Table:
    """The levels as a table."""
    rows = []
    for level in found.levels:
        gaps = [abs(p.gap) for p in level.divergences if p.gap is not None]
        why = ", ".join(
            f"{n} {name}" for name, n in Counter(p.why for p in level.divergences).items()
        )
        first = min((p.position for p in level.divergences), default=None)
        rows.append(
            (
                str(level.batch),
                str(level.asked),
                str(len(level.divergences)),
                str(max(level.outputs, default=0)),
                "" if first is None else str(first),
                f"{max(gaps):.3f}" if gaps else "",
                why or "–",
            )
        )
    columns = (
        "at once",
        "asked",
        "parted",
        "most answers",
        "earliest token",
        "largest gap",
        "explained by",
    )
    note = (
        f"{len(_PROMPTS)} prompts, {TOKENS} greedy tokens; gap in nats: to {ROUNDING:g} rounding,"
        f" beyond {CORRUPT:g} corruption"
    )
    return Table(
        "The same requests alone and in batches",
        columns,
        rows,
        numeric=frozenset(range(6)),
        note=note,
    )


def determinism_metric(found: Determinism) -> Metric:
    """The headline."""
    words = {"same": "one answer each", "rounding": "differs by rounding"}
    return Metric("determinism", words.get(found.decision, found.decision))
