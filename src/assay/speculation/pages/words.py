"""What the label of a figure means: one vocabulary of synonyms for every engine and benchmark."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a figure counts or measures."""

    RATE = "rate"
    LENGTH = "length"
    """Tokens per step, bonus token included."""
    MEAN_ACCEPTED = "mean accepted"
    """Accepted tokens per step; some count the bonus token, others do not."""
    POSITION = "position"
    POSITIONS = "positions"
    """A list of rates by position."""
    STEP_LENGTHS = "step lengths"
    """A list with the length of every step."""
    ACCEPTED = "accepted"
    DRAFTED = "drafted"
    REJECTED = "rejected"
    DRAFTS = "drafts"
    DEPTH = "depth"
    GENERATED = "generated"


@dataclass(frozen=True)
class Meaning:
    """A role; `sure` where the label names drafting by itself.

    `positions` are the draft positions, from 0; `percent` is set where the label says per cent;
    `statistic` is "mean", "median" or "other".
    """

    role: Role
    sure: bool
    positions: tuple[int, ...] = ()
    percent: bool = False
    statistic: str = "mean"


_ACCEPT = r"(?:accept(?:ance|ed|s|ing)?|acc)"
_STEP = (
    r"(?:steps?|iter(?:ation)?s?|rounds?|cycles?|verif(?:y|ication)(?: steps?)?|forwards?"
    r"|(?:forward )?pass(?:es)?|(?:target )?calls?|drafts?)"
)
_LEAD = (
    r"(?:(?:draft(?:er|ing)?|spec|speculat(?:ive|ion)|decod(?:e|ing|er)|mtp|nextn|eagle\d?|medusa"
    r"|dflash|n ?gram|token|tokens|overall|mean|average|avg|total|final|pooled|global|aggregate|the"
    r"|our|measured|request|seq|sequence|normalized|num|number of|n|sum|all|count of|model|output|server"  # noqa: E501
    r"|per position|bench(?:mark)?) )*"
)
_TAIL = (
    r"(?: (?:pct|percent|percentage|tokens?|tok|server|benchmark|benchmarks|overall|mean|average|avg"  # noqa: E501
    r"|total|count|num|n|ct|per step|value|in|of|step|the))*"
)
_RULES: tuple[tuple[Role, re.Pattern[str]], ...] = tuple(
    (role, re.compile(pattern))
    for role, pattern in (
        (Role.STEP_LENGTHS, r"(?:accept(?:ance|ed)?|spec) (?:lengths|lens|length list)"),
        (
            Role.POSITIONS,
            rf"{_LEAD}(?:{_ACCEPT} )?(?:rates? )?(?:per|by|at) (?:draft )?(?:pos|positions?|depths?)"  # noqa: E501
            rf"(?: {_ACCEPT})?(?: (?:rates?|ratios?))?|{_LEAD}{_ACCEPT} rates",
        ),
        (
            Role.LENGTH,
            rf"{_LEAD}{_ACCEPT} ?(?:len(?:gth)?)(?: per {_STEP})?{_TAIL}|{_LEAD}(?:spec(?:ulative)?|draft)"  # noqa: E501
            rf" (?:accepted )?len(?:gth)? (?:mean|avg|average)|(?:mean|average|avg) spec\w* len(?:gth)?"  # noqa: E501
            rf"|{_LEAD}(?:decoded |emitted |generated |new |output )?(?:tokens?|toks?) (?:per )?{_STEP}{_TAIL}"  # noqa: E501
            r"|(?:mean |average |avg )?(?:tau|τ)|block efficiency|ar (?:average|mean)",
        ),
        (
            Role.MEAN_ACCEPTED,
            rf"(?:mean|average|avg)(?: num| number of)? accepted(?: draft)?(?: tokens?| toks?| len)?"  # noqa: E501
            rf"(?: per {_STEP})?|accepted(?: draft)? (?:tokens?|toks?) per {_STEP}",
        ),
        (
            Role.RATE,
            rf"{_LEAD}{_ACCEPT} (?:rates?|ratio|probability|share|pct|percent|percentage){_TAIL}"
            rf"|(?:pct|percent|share) (?:of )?(?:draft(?:ed)? )?(?:tokens )?accepted|{_LEAD}acceptance"  # noqa: E501
            r"|draft accept",
        ),
        (
            Role.ACCEPTED,
            rf"{_LEAD}accepted(?: draft(?:ed)?| prediction| speculative)?{_TAIL}"
            rf"|{_LEAD}(?:drafts?|draft tokens|tokens) accepted{_TAIL}",
        ),
        (
            Role.REJECTED,
            rf"{_LEAD}rejected(?: draft(?:ed)?| prediction| speculative)?{_TAIL}|{_LEAD}tokens rejected",  # noqa: E501
        ),
        (
            Role.DRAFTS,
            r"(?:num |number of |total |n )?(?:drafts|spec(?:ulative)? steps|(?:verify|verification|draft)"  # noqa: E501
            r" (?:steps|rounds|calls|cycles)|rounds|verifications)(?: count| total)?",
        ),
        (
            Role.DEPTH,
            r"(?:num |number of |n )?speculative tokens|num spec(?:ulative)? tokens|spec k|draft n max"  # noqa: E501
            r"|draft max|num assistant tokens",
        ),
        (
            Role.DRAFTED,
            rf"{_LEAD}(?:draft(?:ed)?|proposed|speculated)(?: draft)?(?: tokens?| toks?)(?: count| total"  # noqa: E501
            r"| generated| proposed| num| n)?|(?:total )?(?:drafted|proposed|tokens drafted|tokens proposed)",  # noqa: E501
        ),
        (
            Role.GENERATED,
            r"(?:num |total |n )?(?:completion|output|generated|new) tokens(?: count| total)?",
        ),
    )
)
_POSITION = re.compile(
    rf"(?:{_LEAD}(?:{_ACCEPT} )?(?:rates? )?(?:at |of |for )?(?:draft )?)(?:positions?|pos|token|head)"  # noqa: E501
    rf" (\d{{1,2}})(?: (?:to )?(\d{{1,2}}))?(?: {_ACCEPT}(?: rate)?)?{_TAIL}"
)
_STATISTICS = re.compile(
    r"\b(?:(mean|avg|average)|(median|p ?50)|(min|minimum|max|maximum|p ?\d\d|std|stdev|stddev|sd))\b"  # noqa: E501
)
_NOT_OURS = re.compile(
    r"\b(?:train\w*|valid\w*|loss|epochs?|thresholds?|throughput|per second|tok s|tokens s|toks s|tps"  # noqa: E501
    r"|s|sec|seconds|ms|latency|time|speedup|target|goal|ignored|memory|gb|mb|price|usd)\b"
)
_NAMES_DRAFTING = re.compile(
    r"draft|specul|\bspec\b|mtp|eagle ?\d?\b|medusa|nextn|dflash|n ?gram|lookahead|propos"
)


def plain(label: str) -> str:
    """A label as words in lower case: `spec_acceptLength (%)` is "spec accept length pct".

    >>> plain("**Draft-Acceptance** Rate (%)"), plain("numDraftTokens"), plain("Tokens/step")
    ('draft acceptance rate pct', 'num draft tokens', 'tokens per step')
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", label[:120]).lower()
    words = words.replace("%", " pct ").replace("/", " per ").replace("#", " num ")
    words = re.sub(r"\(tokens?(?: per step)?\)", " ", words)
    return " ".join(re.sub(r"[^a-z0-9τ]+", " ", words).split())


def meaning(label: str) -> Meaning | None:
    """What a label means; None where it names no figure of drafting.

    >>> meaning("Mean acceptance length").role, meaning("price") is None
    (<Role.LENGTH: 'length'>, True)
    """
    words = plain(label)
    if not words or _NOT_OURS.search(words):
        return None
    percent = bool(re.search(r"\b(?:pct|percent|percentage)\b", words))
    sure = bool(_NAMES_DRAFTING.search(words)) or re.search(r"accept\w* len", words) is not None
    statistic = _statistic(words)
    words = re.sub(r"^(?:num )+", "", words) if re.match(r"(?:num )+mean", words) else words
    position = _POSITION.fullmatch(words)
    if position:
        first, last = int(position[1]), int(position[2] or position[1])
        if first <= last:
            spread = tuple(range(first, last + 1))
            return Meaning(Role.POSITION, sure, spread, percent, statistic)
    for text in dict.fromkeys((words, _without_statistic(words))):
        for role, pattern in _RULES:
            if pattern.fullmatch(text):
                return Meaning(role, sure, (), percent, statistic)
    return None


def _statistic(words: str) -> str:
    found = _STATISTICS.search(words)
    if found is None or found[1]:
        return "mean"
    return "median" if found[2] else "other"


def _without_statistic(words: str) -> str:
    return " ".join(_STATISTICS.sub(" ", words).split())


def statistic_of(label: str) -> str | None:
    """The statistic that a whole label names: "mean", "median", "other", "total", or None.

    >>> statistic_of("avg"), statistic_of("p99"), statistic_of("Run A") is None
    ('mean', 'other', True)
    """
    words = plain(label)
    if re.fullmatch(r"(?:grand )?(?:totals?|sum|all|overall|combined|aggregate)", words):
        return "total"
    return _statistic(words) if _STATISTICS.fullmatch(words) else None


def names_drafting(label: str) -> bool:
    """Whether a label has to do with drafting or acceptance, in any sense."""
    words = plain(label)
    return bool(_NAMES_DRAFTING.search(words) or re.search(r"\baccept", words))


_ABOUT_DRAFTING = re.compile(
    r"draft[ _-]?(?:tokens?|model|head|accept|len|n[ _-]max)|\bdraft(?:s|ed|ing|er)\b|speculat(?:ive|ion|ed)"  # noqa: E501
    r"|spec[ _-]?(?:dec|bench|accept|verify)|\bmtp\b|eagle[ -]?[123]?\b|medusa|nextn|dflash"
    r"|n-?gram|lookahead|accept(?:ance|ed)? ?_?len",
    re.I,
)
_ABOUT_MODELS = re.compile(
    r"tok(?:ens?)?\b|\bt/s\b|decod|vllm|sglang|tensorrt|trt-?llm|llama|mlx|exllama|\btgi\b|\bllm\b|num_steps",
    re.I,
)


def speaks_of_drafting(text: str) -> bool:
    """Whether a page is about drafts of a language model, so that "acceptance rate" means that."""
    return bool(_ABOUT_DRAFTING.search(text) and _ABOUT_MODELS.search(text))


def is_training(text: str) -> bool:
    """Whether a row is a step of training, whose acceptance is not that of a server."""
    return bool(re.search(r"\b(?:\w*loss\w*|grad\w*|lr|learning[ _]rate|epoch)\b", text, re.I))
