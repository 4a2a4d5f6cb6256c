"""Figures that are named: `drafted=35 accepted=29`, `Draft: 511 / 904 tokens accepted`, one figure
a line, keys of a JSON object, names on a metrics page. One vocabulary reads them all, whoever wrote
them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from assay.speculation.parsers import Line, Parser, Sample, count, counts, number
from assay.speculation.record import MOST_POSITIONS, Kind, Observation, fell, position_counts

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
_AT = re.compile(
    r"(accepted|drafted)(?:_tokens)?_(?:by_depth|by_position|per_pos(?:ition)?)(?:_total)?$"
)

_NUMBER = r"(?:nan|n/a|\d[\d,]{0,20}(?:\.\d{0,20})?)"
_PAIR = re.compile(
    r"([A-Za-z#][\w/#"
    rf" ().%-]{{0,60}}?)[\"']?\s{{0,9}}([=:])\s*[\"']?({_NUMBER})(?![\w:])\s*(%|/\s*\d[\d,]{{0,20}})?(?![\w:])",
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
_PROMPT = re.compile(r"\bprompts?['\"]?\s*[:=]\s*['\"]")
_LONGEST = 4096

FORMS = (
    ("xinfer", re.compile(r"\bDFlash Stats:"), Kind.TOTAL),
    ("xinfer", re.compile(r"\bDFlash v\d Speculation:"), Kind.REQUEST),
    ("omlx", re.compile(r"\bMTP(?:\[\d+\])? (?:finish=|accepted=)|\bvlm_mtp stats:"), Kind.REQUEST),
    ("atom", re.compile(r"\[MTP Stats Interval\]"), Kind.WINDOW),
    ("atom", re.compile(r"\[MTP Stats\s*\]"), Kind.TOTAL),
    ("exllamav3", re.compile(r"\bMetrics \(ID: "), Kind.REQUEST),
    ("llama.cpp", re.compile(r"\bpred=\s*\d+ draft=\s*\d+ acc="), Kind.REQUEST),
    (
        "vllm",
        re.compile(r"\bspec(?:ulative)?[ _-]?decod(?:e|ing)[ _-]metrics\b", re.I),
        Kind.WINDOW,
    ),
)
"""Lines whose writer is known, and whether its counts are of a request, of an interval or since
start.
"""
UNKNOWN = "other"
"""The engine of figures that say what they count but not who counted."""


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
            return None  # whatever these count, it is not this
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
                definition="named",
                drafted=drafted,
                accepted=accepted,
                drafts=0 if drafted == 0 else drafts,
                accepted_per_position=at,
                drafts_per_position=tried,
                generated=self.count("generated"),
                num_speculative_tokens=depth,
                mean_acceptance_length=length if drafts is None else None,
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
            definition="named",
            weight=None if summary else 1.0,
            acceptance_rate=rate,
            mean_acceptance_length=length,
            num_speculative_tokens=depth,
            multiplier=multiplier,
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
        _by_position(found, key, value.replace(" ", "").strip(",").split(","))
    if shares := _SHARES.search(text):
        _spread(found, [(int(i), number(p) or 0.0) for i, p in _SHARE.findall(shares[1])])
    return found


def _by_position(found: Figures, key: str, value: Any) -> None:
    """A list by draft position, such as `acceptedByDepth=[38, 21]`; a mapping counts from 1."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()
    match, own = _AT.search(name), counts(value)
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


class NamedParser(Parser):
    """Lines, objects and pages that no other parser knows."""

    engine = UNKNOWN
    also = tuple({name for name, *_ in FORMS} - {"llama.cpp", "vllm"})
    needles = ("accept", "acc=", "acc:", "#acc", "mtp_avg_token_per_step")
    company = (*DRAFTING, "tokens accepted")

    def line(self, line: Line) -> Iterable[Observation] | None:
        """The counts that a line names."""
        text = line.text[:_LONGEST]
        if _PROMPT.search(text):
            return None  # what a user wrote is no evidence
        engine, kind = next(
            ((e, kind) for e, form, kind in FORMS if form.search(text)), (UNKNOWN, Kind.REQUEST)
        )
        # Lines of one shape come from one place: whether they count since start shows when all are
        # there.
        shape = re.sub(r"\d[\d.,:%]*", "0", text[:200]) if engine == UNKNOWN else ""
        found = figures_in(text).observation(
            engine, kind, time=line.time, replica=line.replica, stream=f"{line.process} {shape}"
        )
        return None if found is None else (found,)

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """The counts in an object whose keys name drafting."""
        own = named_object(value) if any(NAMES_DRAFTING.search(k) for k in value) else None
        return () if own is None else (own,)

    def samples(self, samples: Sequence[Sample]) -> Iterable[Observation]:
        """Totals since start: one for each set of labels."""
        groups: dict[tuple[str, ...], Figures] = defaultdict(Figures)
        at: dict[tuple[str, ...], dict[str, dict[int, int]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        for sample in samples:
            name = sample.name.lower()
            if (
                not NAMES_DRAFTING.search(name)
                or _OTHERS.match(name)
                or name.endswith(("_bucket", "_sum"))
            ):
                continue
            group = tuple(
                v
                for k, v in sorted(sample.labels.items())
                if k not in ("depth", "position", "pos", "k")
            )
            place = count(sample.labels.get("depth", sample.labels.get("position")))
            role, by = role_of(name.rpartition(":")[2]), _AT.search(name)
            if by and place is not None and count(sample.value) is not None:
                at[group][by[1]][place] = int(sample.value)
            elif role is not None:
                groups[group].put(role, sample.value)
        for group, own in groups.items():
            for role, by_place in at[group].items():
                own.at[role] = tuple(by_place[i] for i in sorted(by_place))
            where = "/".join(group)
            found = own.observation(
                UNKNOWN, Kind.TOTAL, stream=where, replica=where if len(groups) > 1 else None
            )
            if found is not None:
                yield found

    def settle(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        """Find out which lines count since start, and leave out what repeats the sum of others."""
        since_start = {o.engine for o in observations if o.kind is Kind.TOTAL}
        kept = [o for o in observations if o.kind is not Kind.WINDOW or o.engine not in since_start]
        by_stream: dict[tuple[str, str | None, str], list[Observation]] = defaultdict(list)
        for o in kept:
            by_stream[o.engine, o.replica, o.stream].append(o)
        settled: list[Observation] = []
        for (engine, _, stream), own in by_stream.items():
            if (
                engine == UNKNOWN
                and stream
                and all(o.kind is Kind.REQUEST for o in own)
                and _only_grow(own)
            ):
                own = [replace(o, kind=Kind.TOTAL) for o in own]
            settled += own
        return [o for o in settled if not _repeats(o, settled)]


_OTHERS = re.compile(r"(?:vllm|sglang|trtllm)[:_]|llamacpp[:_]spec_decode_num_")


def named_object(value: Mapping[str, Any]) -> Observation | None:
    """The counts in an object that is known to be about drafting."""
    found = Figures()
    for key, item in value.items():
        if isinstance(item, int | float) and not isinstance(item, bool):
            found.named(key, str(item), whole=True)
        elif isinstance(item, list | Mapping):
            _by_position(found, key, item)
    return found.observation(UNKNOWN, Kind.REQUEST)


def _only_grow(own: Sequence[Observation]) -> bool:
    """Whether no counter ever falls, over at least two lines: then they count since start."""
    pairs = list(pairwise(own))
    return bool(pairs) and all(
        not fell(a, b) and (a.drafted or a.drafts or 0) < (b.drafted or b.drafts or 0)
        for a, b in pairs
    )


def _repeats(o: Observation, of: Sequence[Observation]) -> bool:
    """Whether `o` is the total of all the others (at least two)."""
    if o.kind is not Kind.REQUEST or not o.drafted or len(of) < 3:
        return False
    others = [p for p in of if p is not o]
    return all(
        getattr(o, name) == sum(getattr(p, name) or 0 for p in others)
        for name in ("drafted", "accepted")
    )


_FIGURE = re.compile(
    rf"^\W*([A-Za-z#][\w /()%#.-]{{0,60}}?)[\"']?\s*[:=]\s*[\"']?({_NUMBER})\s*(%?)[\"',]*\s*$",
    re.I,
)
_POSITION = re.compile(
    r"^\W*(?:(pos(?:ition)?)|acceptance (?:rate )?at token)"
    r" (\d{1,3}):\s*(\d[\d.]*)\s*%?\s*(?:\((\d+)/(\d+)\))?\s*$",
    re.I,
)


@dataclass
class _Block:
    """The figures of one summary as they come in."""

    figures: Figures = field(default_factory=Figures)
    rates: dict[int, float] = field(default_factory=dict)
    exact: dict[int, int] = field(default_factory=dict)
    sglang: bool = False


class SummaryParser(Parser):
    """One figure a line, as `vllm bench serve`, vLLM's offline example and SGLang's benchmarks
    print them at the end.
    """

    engine = "vllm"
    also = ("sglang",)
    needles = ("accept",)
    company = (
        "acceptance",
        "accepted tokens",
        "accepted_tokens",
        "accept len",
        "accept_len",
        "accept_rate",
        "_accepted",
    )
    near = ("draft", "position ", "output", "predict", "backend:")

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def line(self, line: Line) -> Iterable[Observation] | None:
        """A figure; what it belongs to is known once all are there (`settle`)."""
        text = line.text
        if len(text) > 200:
            return None
        position = _POSITION.match(text)
        if position:
            return self._position(position)
        match = _FIGURE.match(text)
        role = role_of(match[1], whole=True) if match else None
        if not match or role is None:
            if text.strip().lower().startswith("backend:") and "sglang" in text.lower():
                self._blocks.append(_Block(sglang=True))
            return None
        if not self._blocks or (role in self._blocks[-1].figures.own and role != "length"):
            self._blocks.append(_Block())  # the same figure again: the summary of another run
        block = self._blocks[-1]
        block.sglang |= "accept length" in text.lower() or "(server)" in text
        block.figures.named(match[1], match[2], match[3], whole=True)
        return ()

    def _position(self, match: re.Match[str]) -> Iterable[Observation] | None:
        rate, index = number(match[3]), int(match[2])
        if not self._blocks or rate is None:
            return None
        block = self._blocks[-1]
        if match[4] and match[5]:
            block.exact[index] = count(match[4]) or 0
            rate = (count(match[4]) or 0) / max(1, count(match[5]) or 1)
        elif (match[1] and "%" not in match[0]) or rate > 1:
            rate /= 100  # positions are printed in per cent
        block.rates[index] = min(1.0, rate)
        return ()

    def settle(self, observations: Sequence[Observation]) -> Sequence[Observation]:
        """The summaries, beside what the log lines say."""
        return [
            *observations,
            *(o for i, b in enumerate(self._blocks) if (o := _summary(b, i)) is not None),
        ]


def _summary(block: _Block, index: int) -> Observation | None:
    found = block.figures.observation(
        "sglang" if block.sglang else "vllm", Kind.SUMMARY, stream=f"run {index}"
    )
    if found is None or not found.drafts or not found.drafted:
        return found
    k = found.drafted // found.drafts if found.drafted % found.drafts == 0 else None
    rates = [block.rates[i] for i in range(len(block.rates)) if i in block.rates]
    exact = tuple(block.exact[i] for i in range(len(block.exact)) if i in block.exact)
    positions = exact or position_counts(
        found.drafts, rates, found.accepted, complete=len(rates) == k
    )
    return replace(
        found,
        definition=f"{found.engine}_summary",
        num_speculative_tokens=k,
        accepted_per_position=positions or None,
    )
