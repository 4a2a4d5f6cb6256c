"""`assay check --identity`: is this the model that a reference file was made of?

A reference holds, for prompts cut in the middle of prose, how many tokens each has, the greedy next
token and the likeliest tokens with their probabilities; and the bits per byte of fixed texts, where
a server can score. Cuts are at fixed places, so many of them lie where two continuations are about
equally likely: there a small change of the weights moves most probability. Each statistic is
bounded on both sides with a declared error: *different* is said of the reference's own model in at
most 1 % of runs, and *same* of a model that is further away than the allowance in at most 1 %.
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from assay.coherence.conversation import side_by_side, user
from assay.coherence.probes import passages
from assay.coherence.record import from_fields
from assay.engines import Capability, Request
from assay.engines.server.engine import ServerEngine
from assay.engines.server.scoring import TopToken
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay.runs import write_atomically
from assay.stats import cluster_mean
from assay.verdict import Finding, Metric, Severity, Table, Verdict, jsonable

FORMAT = "assay-identity/1"
ALPHA = 0.01
"""One-sided error of *different*, of all tests together, and of *same*."""
WIDTH = 5
CUTS = 12
"""Prompts that end inside each fixed text."""
PARALLEL = 8
ROUNDING = 0.25
"""Nats between the two likeliest tokens that rounding can turn: two steps of bf16 at a logit of 16
to 32.
"""
_STRANGE = (
    "naïve café — “quoted” … 中文 русский עברית 🙂🙃",
    "    indented\t\ttabs\n\n\nlines  double  spaces",
    "0123456789 3.14159 1,000,000 1e-9",
    "def f(x):\n    return {'a': [x ** 2, None]}",
    "<|im_start|>user </s> [INST] <pad>",
    "supercalifragilisticexpialidocious Donaudampfschifffahrt",
)
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
itself, as the first texts meet an empty prefix cache (benchmarks/results/identity.json). On
another: bf16 of llama.cpp and vLLM lie 0.013 apart."""


@dataclass(frozen=True)
class Item:
    """What a model says after one prompt. `likely` are log-probabilities (natural log) by text;
    empty where it gives none.
    """

    token: str
    prompt_tokens: int | None
    likely: Mapping[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Nats between the two likeliest tokens; infinite where only one is listed."""
        first, second, *_ = [*sorted(self.likely.values(), reverse=True), -math.inf, -math.inf]
        return first - second if self.likely else math.inf


@dataclass(frozen=True)
class Print:
    """The fingerprint of one model on one server. Items by text and cut; scores in nats by text."""

    model: str
    server: str
    kind: str
    route: str
    items: tuple[tuple[Item, ...], ...] = ()
    strange: tuple[tuple[int, ...], ...] = ()
    """Token ids of texts that tokenizers cut in different ways."""
    nats: tuple[float, ...] = ()
    noise: Mapping[str, float] = field(default_factory=dict)
    """What each statistic is between two runs of this very server."""
    texts: str = ""
    """Digest of the texts and cuts that were asked."""

    def to_json(self) -> dict[str, Any]:
        """The reference file as plain JSON types."""
        plain = {
            f: getattr(self, f)
            for f in ("model", "server", "kind", "route", "strange", "nats", "noise", "texts")
        }
        rows = [
            [{"token": i.token, "prompt_tokens": i.prompt_tokens, "likely": i.likely} for i in text]
            for text in self.items
        ]
        return {"format": FORMAT, **jsonable(plain), "items": jsonable(rows)}


@cache
def prompts() -> tuple[tuple[str, ...], ...]:
    """Prompts that end after whole words inside each fixed text, `CUTS` of each."""
    found = []
    for text in passages():
        ends = [i for i, c in enumerate(text) if c == " " and i >= 40]
        found.append(
            tuple(text[: ends[round(k * (len(ends) - 1) / (CUTS - 1))]] for k in range(CUTS))
        )
    return tuple(found)


@cache
def _digest() -> str:
    return hashlib.sha256(json.dumps([prompts(), passages(), _STRANGE]).encode()).hexdigest()[:32]


# Take a fingerprint.


def take(engine: ServerEngine, progress: Progress = NO_PROGRESS, *, noise: bool = False) -> Print:
    """Ask a server for its fingerprint: 144 single tokens, eight at once, and twelve scores; twice
    for its `noise`.
    """
    able = engine.capabilities
    route = "completions" if Capability.COMPLETIONS in able else "chat"
    first = Print(
        engine.model,
        f"{engine.identity.kind} {engine.identity.version or ''}".strip(),
        engine.identity.kind,
        route,
        strange=tuple(engine.tokenize(t) for t in _STRANGE) if Capability.TOKENIZE in able else (),
        texts=_digest(),
    )
    passes = 2 if noise else 1
    with progress("greedy tokens inside fixed texts", passes * len(passages()) * CUTS) as advance:
        # One after another for the noise: alone and in a batch is the largest difference that one
        # server makes.
        both = [
            _items(engine, route, advance, parallel)
            for parallel in ((PARALLEL, 1) if noise else (PARALLEL,))
        ]
    scores: list[tuple[float, ...]] = [()] * passes
    if Capability.SCORE in able:
        with progress("scores of fixed texts", passes * len(passages())) as advance:
            for n in range(passes):
                for text in passages():
                    scores[n] += (engine.score(text).nll,)
                    advance()
    found = replace(first, items=both[0], nats=scores[0])
    if not noise:
        return found
    again = replace(found, items=both[1], nats=scores[1])
    values = {name: statistic(found, again) for name, statistic in _STATISTICS.items()}
    means = {
        name: fmean(x for group in groups for x in group)
        for name, groups in values.items()
        if groups
    }
    return replace(found, noise=means)


def _items(
    engine: ServerEngine, route: str, advance: Any, parallel: int
) -> tuple[tuple[Item, ...], ...]:
    def ask(text: int, cut: int) -> tuple[int, int, Item | AssayError]:
        prompt = prompts()[text][cut]
        request = Request(prompt=prompt, max_tokens=1, seed=0)
        if route == "chat":
            asked = user(f"Continue this text, without repeating it: {prompt}")
            request = Request(messages=(asked,), max_tokens=1, seed=0)
        try:
            reply, top = engine.generate_with_top(request, WIDTH)
        except AssayError as error:
            return text, cut, error
        said = reply.content or reply.reasoning
        return (
            text,
            cut,
            Item(top[0].text if top else said, reply.prompt_tokens, top[0].likely if top else {}),
        )

    rows: dict[tuple[int, int], Item] = {}
    work = [lambda t=t, c=c: ask(t, c) for t in range(len(passages())) for c in range(CUTS)]
    for text, cut, item in side_by_side(work, parallel):
        if isinstance(item, AssayError):
            raise item
        rows[text, cut] = item
        advance()
    return tuple(tuple(rows[t, c] for c in range(CUTS)) for t in range(len(passages())))


def write_print(found: Print, path: Path) -> None:
    """Write a reference file; AssayError where that cannot be."""
    try:
        write_atomically(path, json.dumps(found.to_json(), ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        raise AssayError(
            f"cannot write the reference {path.name}: {error.strerror}",
            finding_id="coherence.reference",
            remedy="name another file",
        ) from error


def read_print(path: Path) -> Print:
    """Read a reference file, or the result of `assay check --json`, whose scores alone are
    compared; AssayError else.
    """
    remedy = "make one of the trusted server: assay check URL --identity-out FILE"

    def unusable(why: str) -> AssayError:
        return AssayError(
            f"the reference {path.name} {why}", finding_id="coherence.reference", remedy=remedy
        )

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("command") == "check":
            return _of_check(document)
        if document["format"] != FORMAT:
            raise unusable(f"is of the format {document['format']!r}, not {FORMAT}")
        items = tuple(
            tuple(
                from_fields(Item, i, likely={str(k): float(v) for k, v in i["likely"].items()})
                for i in text
            )
            for text in document["items"]
        )
        found = from_fields(
            Print,
            document,
            items=items,
            strange=tuple(tuple(map(int, t)) for t in document["strange"]),
            nats=tuple(map(float, document["nats"])),
            noise={str(k): float(v) for k, v in document["noise"].items()},
        )
    except OSError as error:
        raise unusable(f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unusable(f"is no fingerprint of a model ({type(error).__name__})") from error
    if (
        found.texts != _digest()
        or {len(t) for t in items} - {CUTS}
        or len(items) not in (0, len(passages()))
    ):
        raise unusable("was made with other texts, by another version of assay")
    numbers = [v for text in items for item in text for v in (0.0, *item.likely.values())]
    if (
        not all(map(math.isfinite, (*numbers, *found.nats, *found.noise.values())))
        or max(numbers, default=0.0) > 0.01
    ):
        raise unusable("holds numbers that are no log-probabilities")
    return found


def _of_check(document: Mapping[str, Any]) -> Print:
    alone = {
        p["passage"]: float(p["nats"])
        for p in document["results"]["bits_per_byte"]["passages"]
        if not p["depth"]
    }
    nats = tuple(alone[f"p{i:02d}"] for i in range(len(passages())))
    server = document["subject"].get("server") or {}
    kind, model = str(server.get("kind")), str(document["subject"].get("model"))
    return Print(
        model, f"{kind} {server.get('version') or ''}".strip(), kind, "", nats=nats, texts=_digest()
    )


# Compare two.


def _pairs(a: Print, b: Print) -> list[list[tuple[Item, Item]]]:
    return [list(zip(x, y, strict=True)) for x, y in zip(a.items, b.items, strict=False)]


def moved(a: Item, b: Item) -> float:
    """Share of probability that moved: total variation distance over the tokens that both list, and
    all others as one.

    Lumping never increases it (the data-processing inequality), so it is a lower bound of the whole
    distribution's.
    """
    both = a.likely.keys() & b.likely.keys()
    p, q = ([math.exp(side.likely[t]) for t in both] for side in (a, b))
    rest = abs(sum(p) - sum(q))
    return (sum(abs(x - y) for x, y in zip(p, q, strict=True)) + rest) / 2


def _moved(a: Print, b: Print) -> list[list[float]]:
    groups = [[moved(x, y) for x, y in pairs if x.likely and y.likely] for pairs in _pairs(a, b)]
    return [g for g in groups if g]


def _flips(a: Print, b: Print) -> list[list[float]]:
    groups = [
        [float(x.token != y.token) for x, y in pairs if x.likely and x.gap > ROUNDING]
        for pairs in _pairs(a, b)
    ]
    return [g for g in groups if g]


def _tokens(a: Print, b: Print) -> list[list[float]]:
    return [
        [float(_same_text(x.token) != _same_text(y.token)) for x, y in pairs]
        for pairs in _pairs(a, b)
    ]


def _scores(a: Print, b: Print) -> list[list[float]]:
    sizes = [len(text.encode()) * math.log(2.0) for text in passages()]
    return [[abs(x - y) / size] for x, y, size in zip(a.nats, b.nats, sizes, strict=False)]


_STATISTICS = {"moved": _moved, "flips": _flips, "tokens": _tokens, "scores": _scores}


def _same_text(token: str) -> str:
    return unicodedata.normalize("NFC", token)


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
    reference: Print
    found: Print

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


def compare_prints(reference: Print, found: Print) -> Identity:
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
    raw = {name: statistic(reference, found) for name, statistic in _STATISTICS.items()}
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


def _test(name: str, groups: list[list[float]], reference: Print, found: Print, tests: int) -> Test:
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


def _tokenizer(a: Print, b: Print) -> str:
    """Whether the tokenizers agree: by ids where both give them, else by the tokens of each prompt
    up to a constant.
    """
    if a.strange and b.strange and len(a.strange) == len(b.strange):
        return "same ids" if a.strange == b.strange else "other ids of the same texts"
    counts = [
        (x.prompt_tokens, y.prompt_tokens) for pairs in _pairs(a, b) for x, y in pairs
        if x.prompt_tokens is not None and y.prompt_tokens is not None
    ]  # fmt: skip
    if not counts:
        return "not known"
    # A start token that one engine adds and another does not is no other tokenizer.
    offsets = {y - x for x, y in counts}
    return (
        "same counts" if len(offsets) == 1 else f"other counts of tokens for {len(counts)} prompts"
    )


# What a person sees.


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


def kept_facts(found: Print) -> Sequence[Any]:
    """A short line about a fingerprint that was taken: items, whether with probabilities, scores."""
    listed = sum(bool(i.likely) for text in found.items for i in text)
    return [sum(map(len, found.items)), listed, len(found.nats)]


# `assay check --determinism`: does one greedy request always give one answer, alone and in a batch?
#
# Each of four prompts is asked alone several times, then all together in batches of 8 and 44. Where
# an answer parts from the first one, the two tokens at that place are compared. If they were about
# equally likely, rounding explains the difference: sums are taken in another order in another
# batch. If one was clearly likelier, the answer was corrupted: by another request in the batch, by
# a cache, by memory.


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
class Parting:
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
    partings: tuple[Parting, ...]

    def to_json(self) -> dict[str, Any]:
        """The level as plain JSON types."""
        rows = [vars(p) | {"why": p.why} for p in self.partings]
        return {
            "batch": self.batch,
            "asked": self.asked,
            "outputs": self.outputs,
            "most_outputs": max(self.outputs, default=0),
            "parted": len(rows),
            "failed": self.failed,
            "error": self.error,
            "partings": rows[:20],
            "why": dict(Counter(p.why for p in self.partings)),
        }


@dataclass(frozen=True)
class Determinism:
    """All levels, and what they come to."""

    levels: tuple[Level, ...]

    @property
    def partings(self) -> tuple[Parting, ...]:
        """All answers that part from the first of their prompt."""
        return tuple(p for level in self.levels for p in level.partings)

    @property
    def decision(self) -> str:
        """`same`, `rounding`, `corruption`, `unclear`, `not known` or `unfinished`."""
        reasons = {p.why for p in self.partings}
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
        failed, error, partings = 0, "", []
        with progress(f"the same requests, {batch} at a time", len(asked)) as advance:
            for prompt, answer in side_by_side([partial(_tried, engine, p) for p in asked], batch):
                advance()
                if isinstance(answer, AssayError):
                    failed, error = failed + 1, answer.message
                    continue
                seen[prompt].add(answer.text)
                if (parting := part(firsts[prompt], answer, prompt, batch)) is not None:
                    partings.append(parting)
        partings.sort(key=lambda p: (p.prompt, p.position))
        levels.append(
            Level(batch, len(asked), tuple(map(len, seen)), failed, error, tuple(partings))
        )
    return Determinism(tuple(levels))


def part(first: Answer, other: Answer, prompt: int = 0, batch: int = 1) -> Parting | None:
    """Where two answers part, and how much likelier the first's token was there; None where they
    are one text.
    """
    if first.text == other.text:
        return None
    if not first.tokens or not other.tokens:
        place = next(i for i, (a, b) in enumerate(zip_longest(first.text, other.text)) if a != b)
        return Parting(
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
        return Parting(prompt, batch, place, longer.gap(""), "(end)", longer.text)
    a, b = first.tokens[place], other.tokens[place]
    # Each side's own view of the two tokens; the first's is the one that no batch touched.
    return Parting(prompt, batch, place, a.gap(b.text), a.text, b.text)


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


# What a person sees.

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
        worst = max(found.partings, key=lambda p: abs(p.gap or 0.0))
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
        gaps = [abs(p.gap) for p in level.partings if p.gap is not None]
        why = ", ".join(f"{n} {name}" for name, n in Counter(p.why for p in level.partings).items())
        first = min((p.position for p in level.partings), default=None)
        rows.append(
            (
                str(level.batch),
                str(level.asked),
                str(len(level.partings)),
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
