"""The vocabulary of figures that say themselves what they count."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.speculation.observation import (
    MOST_POSITIONS,
    Counts,
    Definition,
    Kind,
    Observation,
    Printed,
)
from assay.speculation.parsers.counts import count, counts, number
from assay.speculation.rounding import position_counts

NAMED = Definition(
    "named", "figures read by their names: draft tokens accepted of drafted, steps, tokens a step"
)


DRAFTING = (
    "draft",
    "specul",
    "spec_",
    "spec-",
    "spec ",
    "specdec",
    "mtp",
    "eagle",
    "medusa",
    "dflash",
    "nextn",
    "ngram",
    "n-gram",
    "lookahead",
    "propos",
    "accept_len",
    "accept len",
    "acceptance len",
    "tok/cycle",
    "toks/fwd",
    "tok/step",
    "tokens_per_",
    "rounds=",
    "cycles=",
)
"""Words that name drafting in a log line."""

NAMES_DRAFTING = re.compile(
    r"draft|specul|spec_|mtp|eagle|medusa|dflash|nextn|ngram|lookahead|propos", re.I
)

# Words that may stand before or after the one that matters: `total_draft_tokens_count`,
# `spec_num_correct_drafts`.
_BEFORE = (
    r"(?:(?:number_of|num|n|total|all|sum|aggregate|spec(?:ulative|ulation)?|decod(?:e|ing)|mtp|eagle3?|dflash|ngram"
    r"|avg|average|mean|overall|token)_)*"
)

_AFTER = r"(?:_(?:tokens?|count|total|generated|n|num|ct|sum|pct|percent|server|benchmark))*"

_STEP = r"(?:steps?|rounds?|cycles?|iter(?:ation)?s?|calls?|passes|verifies|fwd|forwards?)"

_WORDS = {
    "drafts": (
        rf"drafts|draft_(?:proposals|rounds|steps|calls)|gen_drafts|verify_ct|(?:(?:verify|verification|target)_)?{_STEP}"
    ),
    "drafted": r"draft(?:ed)?|proposed(?:_drafts?)?|speculated|attempt(?:s|ed)|gen_tokens",
    "accepted": (
        r"(?:acc(?:ept(?:s|ed)?)?|correct)(?:_(?:drafts?|drafted|proposed))?|drafts?_(?:tokens?_|n_)?accepted"
        r"|tokens_accepted"
    ),
    "rejected": r"reject(?:s|ed)?(?:_(?:drafts?|drafted|proposed))?",
    "length": rf"acc(?:ept(?:ance|ed)?)?_?len(?:gth)?|tok(?:en)?s?_per_(?:{_STEP}|draft)",
    "rate": r"(?:draft_)?acc(?:ept(?:ance|ed)?)?_(?:rate|ratio)|rate|(?:draft_)?acceptance",
    "depth": r"depth|k|gamma|spec(?:ulative)?_tokens|num_steps",
    "block": r"block_size",
    "multiplier": r"(?:system_)?efficiency|net_multiplier|speedup",
}

_ROLES = {role: re.compile(f"{_BEFORE}(?:{words}){_AFTER}") for role, words in _WORDS.items()}

_GENERATED = re.compile(
    r"(?:(?:num|n|total|avg)_)*(?:emitted|generated|predicted|pred|predict|output|completion|decoded)(?:_tokens?)?"
    r"(?:_n|_count)?|tokens"
)

BY_POSITION = re.compile(
    r"(accepted|drafted)(?:_tokens)?_(?:by_depth|by_position|per_pos(?:ition)?)(?:_total)?$"
)

NUMBER = r"(?:nan|n/a|\d[\d,]{0,20}(?:\.\d{0,20})?)"

_PAIR = re.compile(
    r"([A-Za-z#][\w/#"
    rf" ().%-]{{0,60}}?)[\"']?\s{{0,9}}([=:])\s*[\"']?({NUMBER})(?![\w:])\s*(%|/\s*\d[\d,]{{0,20}})?(?![\w:])",  # noqa: E501
    re.I,
)

_OF = re.compile(r"(?<![\d,.])(\d[\d,]{0,20})\s?(?:/|of|out of)\s?(\d[\d,]{0,20})(?!\d)")

_NOUN = re.compile(
    r"(?<![\d,.])(\d[\d,]{0,20})\s+(?:draft(?:ed)?\s+)?(?:tokens?\s+)?(accepted|drafted|proposed|rejected|generated)\b",
    re.I,
)

_VERB = re.compile(
    r"\b(drafted|proposed|accepted|rejected)\s+(\d[\d,]{0,20})\b(?!\s*(?:/|of\b|out"
    r" of\b|\.\d|%)|\s+(?!draft|tok)\w)",
    re.I,
)

_DEPTHS = re.compile(r"\bd(\d{1,3})=(\d+)/(\d+)")

_LIST = re.compile(r"\b(\w+)=\[([\d,\s]+)\]")

_SHARES = re.compile(r"distribution[^{]{0,20}\{([^}]*)\}")

_SHARE = re.compile(r"(\d{1,3})['\"]?\s*:\s*['\"]?([\d.]+)\s*%")


def role_of(key: str, whole: bool = False) -> str | None:
    """What a key counts: `totalDraftTokensCount` is "drafted". Words before it are left out unless
    `whole`.
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key.strip()[:80]).lower()
    name = re.sub(r"[^a-z0-9]+", "_", name.replace("/", "_per_")).strip("_")
    if _GENERATED.fullmatch(name):
        return "generated"
    while True:
        for role, pattern in _ROLES.items():
            if pattern.fullmatch(name):
                return role
        _, more, name = name.partition("_")
        if not more or whole:
            return None


@dataclass
class Figures:
    """What a line, an object or a page counts, by role; `at` are counts by draft position."""

    own: dict[str, float] = field(default_factory=dict)
    at: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def put(self, role: str, value: float | None) -> None:
        """Keep the first figure of a role."""
        if value is not None:
            self.own.setdefault(role, value)

    def count(self, role: str) -> int | None:
        """A figure as a count."""
        return count(self.own.get(role))

    def named(self, key: str, text: str, after: str = "", whole: bool = False) -> None:
        """A `key = text` and what follows it: `%`, or `/ 904`."""
        role, value = role_of(key, whole), number(text)
        if after.startswith("/"):
            if "acc" in key.lower() or role == "drafted":
                self.put("accepted", count(text))
                self.put("drafted", count(after[1:].strip()))
        elif role in ("accepted", "rate") and value is not None and (after == "%" or "%" in key):
            self.put("rate", value / 100)
        elif role == "accepted" and "." in text:
            self.put("rate", value)
        elif role is not None:
            self.put(role, value)

    def observation(self, engine: str, kind: Kind, **known: Any) -> Observation | None:
        """What the figures say; None if they do not tell how many draft tokens were accepted, or
        how long a step is.
        """
        drafted, accepted, drafts = (
            self.count("drafted"),
            self.count("accepted"),
            self.count("drafts"),
        )
        rejected, at, tried = (
            self.count("rejected"),
            self.at.get("accepted"),
            self.at.get("drafted"),
        )
        if at and (drafts or tried):
            accepted = sum(at) if accepted is None else accepted
            drafts = tried[0] if tried else drafts
        else:
            at = tried = None
        if drafted is None and accepted is not None and rejected is not None:
            drafted = accepted + rejected
        if drafted == 0 and accepted is None:
            accepted = 0
        if (
            drafted is not None
            and accepted is not None
            and accepted > drafted + max(8, drafted // 50)
        ):
            return None  # these count something else
        block = self.count("block")
        depth = self.count("depth") or (block - 1 if block else None)
        if depth is not None and (
            depth > MOST_POSITIONS or (drafts and drafted and drafted > drafts * depth)
        ):
            depth = None
        length, rate, multiplier = (self.own.get(name) for name in ("length", "rate", "multiplier"))
        if length is not None and not 1 <= length <= MOST_POSITIONS:
            length = None
        if accepted is not None and (drafted is not None or drafts is not None):
            return Observation(
                engine=engine,
                kind=kind,
                definition=NAMED,
                num_speculative_tokens=depth,
                counts=Counts(
                    drafted=drafted,
                    accepted=accepted,
                    drafts=0 if drafted == 0 else drafts,
                    at_position=at,
                    tried_at_position=tried,
                    generated=self.count("generated"),
                ),
                printed=Printed(mean_acceptance_length=length if drafts is None else None),
                **known,
            )
        if length is not None and length < 1.005:
            rate = 0.0  # some rates are length / draft tokens
        if rate is not None and not 0 <= rate <= 1:
            rate = None
        if length is None and rate is None and multiplier is None:
            return None
        summary = kind is Kind.SUMMARY
        return Observation(
            engine=engine,
            kind=kind if summary else Kind.VALUE,
            definition=NAMED,
            num_speculative_tokens=depth,
            printed=Printed(
                weight=None if summary else 1.0,
                acceptance_rate=rate,
                mean_acceptance_length=length,
                multiplier=multiplier,
            ),
            **known,
        )


def figures_in(text: str) -> Figures:
    """The figures that a line of text names."""
    found = Figures()
    low = text.lower()
    for key, sign, value, after in _PAIR.findall(text):
        found.named(key.split()[-1] if sign == "=" else key, value, after.strip())
    for match in _OF.finditer(text):
        if "acc" in low[max(0, match.start() - 24) : match.end() + 24]:
            found.put("accepted", count(match[1]))
            found.put("drafted", count(match[2]))
    for value, noun in _NOUN.findall(text):
        found.put("drafted" if noun.lower() == "proposed" else noun.lower(), count(value))
    said = {
        ("drafted" if verb.lower() == "proposed" else verb.lower()): value
        for verb, value in _VERB.findall(text)
    }
    if len(said) > 1:  # "drafted 900 tokens, accepted 640"
        for role, value in said.items():
            found.put(role, count(value))
    depths = [(int(i), count(a), count(n)) for i, a, n in _DEPTHS.findall(text)]
    if depths and [i for i, _, _ in depths] == list(range(1, len(depths) + 1)):
        found.at = {
            "accepted": tuple(a or 0 for _, a, _ in depths),
            "drafted": tuple(n or 0 for *_, n in depths),
        }
    for key, value in _LIST.findall(text):
        put_by_position(found, key, value.replace(" ", "").strip(",").split(","))
    if shares := _SHARES.search(text):
        _spread(found, [(int(i), number(p) or 0.0) for i, p in _SHARE.findall(shares[1])])
    return found


def put_by_position(found: Figures, key: str, value: Any) -> None:
    """A list by draft position, such as `acceptedByDepth=[38, 21]`; a mapping counts from 1."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()
    match, own = BY_POSITION.search(name), counts(value)
    if match and own:
        found.at[match[1]] = (
            own[1:] if isinstance(value, Mapping) and not own[0] and len(own) > 1 else own
        )


def _spread(found: Figures, shares: Sequence[tuple[int, float]]) -> None:
    """Counts by position from the printed share of steps that accepted i tokens, in per cent."""
    k = max((i for i, _ in shares), default=0)
    drafted, accepted = found.count("drafted"), found.count("accepted")
    if not 0 < k <= MOST_POSITIONS or not drafted or drafted % k:
        return
    drafts = drafted // k
    rates = [sum(p for j, p in shares if j > i) / 100 for i in range(k)]
    found.own["drafts"] = drafts
    found.at["accepted"] = position_counts(drafts, rates, accepted)
