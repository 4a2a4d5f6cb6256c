"""Lines, objects and pages that no engine's own parser knows, read by the names of their
figures.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from assay.speculation.observation import Kind, Observation
from assay.speculation.parsers.base import Line, Parser, Sample, StartUp
from assay.speculation.parsers.counts import count
from assay.speculation.parsers.figures import (
    BY_POSITION,
    DRAFTING,
    NAMES_DRAFTING,
    Figures,
    figures_in,
    put_by_position,
    role_of,
)
from assay.speculation.parsers.registry import read_metrics

_PROMPT = re.compile(r"\bprompts?['\"]?\s*[:=]\s*['\"]")

_ONE_REQUEST = re.compile(
    r"\b(?:req(?:uest)?|rid|job|task|chatcmpl|eos(?:_reason)?|finish(?:_reason)?|stop_?reason"
    r"|(?:prompt|completion|new)_tokens)\b|chatcmpl-",
    re.I,
)
"""Words of a line about one request: its figures are added up, also where they happen to rise."""
_SINCE_START = re.compile(r"\b(?:cumulative|so far|since|lifetime|running total)\b", re.I)
_NOUN = re.compile(r"drafts?|proposals?|num_drafts", re.I)
"""Keys that orders and letters have too."""
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


# Settings that engines print alike.
_START_UP = (
    StartUp(
        "draft_vocab",
        ("vocab",),
        re.compile(
            r"(?:draft|target).{0,200}vocab"
            r".{0,200}(?:not compatible|incompatible|mismatch|must match)",
            re.I,
        ),
    ),
    StartUp(
        "sparse_method",
        ("speculative",),
        re.compile(
            r"(?:speculative_(?:config|algorithm)|method)\W.{0,80}?"
            r"\b((?:n-?gram|suffix|prompt_lookup|lookup)\w*)",
            re.I,
        ),
    ),
    StartUp(
        "depth",
        ("speculative", "num_spec", "draft-max", "draft-n-max"),
        re.compile(
            r"(?:num_speculative_tokens|num_spec_tokens|speculative_num_steps"
            r"|--(?:spec-)?draft(?:-n)?-max|--spec-draft-n-max|--num[-_]speculative[-_]tokens)"
            r"['\"]?[=: ]\s*(\d{1,4})\b"
        ),
    ),
    StartUp(
        "quantization", ("quantization=",), re.compile(r"\b(quantization='?(?!None)[\w-]+)'?[,)\s]")
    ),
    StartUp(
        "temperature",
        ("temperature",),
        re.compile(
            r"(?:default.{0,40}sampling param|SamplingParams\().{0,400}?"
            r"['\"]?temperature['\"]?[:=] ?([\d.]+)",
            re.I,
        ),
    ),
    StartUp(
        "kv_cache_dtype", ("kv_cache_dtype=",), re.compile(r"\b(kv_cache_dtype='?[\w-]+)'?[,)\s]")
    ),
)


_METRIC_WORDS = (
    "draft",
    "specul",
    "spec_",
    "mtp",
    "eagle",
    "medusa",
    "dflash",
    "nextn",
    "ngram",
    "lookahead",
    "propos",
)


class NamedParser(Parser):
    """Lines, objects and pages that no other parser knows."""

    fallback = 2
    engine = UNKNOWN
    metric_words = _METRIC_WORDS
    also = tuple({name for name, *_ in FORMS} - {"llama.cpp", "vllm"})
    needles = ("accept", "acc=", "acc:", "#acc", "mtp_avg_token_per_step")
    company = (*DRAFTING, "tokens accepted")

    heads = ("DFlash Stats:",)
    start_up = _START_UP

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
        if _ONE_REQUEST.search(text) and not _SINCE_START.search(text):
            shape = ""
        found = figures_in(text).observation(
            engine,
            kind,
            time=line.time,
            replica=line.replica,
            stream=f"{line.process} {shape}" if shape else "",
        )
        return None if found is None else (found,)

    def document(self, value: Mapping[str, Any]) -> Iterable[Observation]:
        """The counts in an object whose keys name drafting."""
        names = any(NAMES_DRAFTING.search(k) and not _NOUN.fullmatch(k) for k in value)
        own = named_object(value) if names else None
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
                or read_metrics().match(name)
                or name.endswith(("_bucket", "_sum"))
            ):
                continue
            group = tuple(
                v
                for k, v in sorted(sample.labels.items())
                if k not in ("depth", "position", "pos", "k")
            )
            place = count(sample.labels.get("depth", sample.labels.get("position")))
            role, by = role_of(name.rpartition(":")[2]), BY_POSITION.search(name)
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


def named_object(value: Mapping[str, Any]) -> Observation | None:
    """The counts in an object that is known to be about drafting."""
    found = Figures()
    for key, item in value.items():
        if isinstance(item, int | float) and not isinstance(item, bool):
            found.named(key, str(item), whole=True)
        elif isinstance(item, list | Mapping):
            put_by_position(found, key, item)
    return found.observation(UNKNOWN, Kind.REQUEST)


def _only_grow(own: Sequence[Observation]) -> bool:
    """Whether no counter ever falls, over at least two lines: then they count since start."""
    pairs = list(pairwise(own))
    return bool(pairs) and all(
        not b.counts.fell_below(a.counts)
        and (a.counts.generated is None or a.counts.generated < (b.counts.generated or 0))
        and (a.counts.drafted or a.counts.drafts or 0) < (b.counts.drafted or b.counts.drafts or 0)
        for a, b in pairs
    )


def _repeats(o: Observation, of: Sequence[Observation]) -> bool:
    """Whether `o` is the total of all the others (at least two)."""
    if o.kind is not Kind.REQUEST or not o.counts.drafted or len(of) < 3:
        return False
    others = [p for p in of if p is not o]
    return all(
        getattr(o.counts, name) == sum(getattr(p.counts, name) or 0 for p in others)
        for name in ("drafted", "accepted")
    )
