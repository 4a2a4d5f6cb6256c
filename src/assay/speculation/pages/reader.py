"""From labelled values to observations: what fits together is read, what is doubtful is quoted."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.speculation.observation import (
    MOST_POSITIONS,
    Counts,
    Definition,
    Kind,
    Observation,
    Printed,
)
from assay.speculation.pages.cells import Figure, numbers_in, read_cell
from assay.speculation.pages.layout import Entry, entries
from assay.speculation.pages.words import (
    Meaning,
    Role,
    is_training,
    meaning,
    names_drafting,
    speaks_of_drafting,
    statistic_of,
)
from assay.speculation.rounding import position_counts

WORDS = Definition(
    "words", "figures of a table, list or text, read by the words that `read_from` quotes"
)
_LONGEST_STEP = 65.0
_SURELY_PER_CENT = 20.0
_TEXTS = frozenset(
    {"content", "text", "message", "messages", "prompt", "output", "completion", "choices"}
)
_DEPTH = 12
_ABOUT_ACCEPTANCE = re.compile(r"accept|\brate|\blen", re.I)


@dataclass
class Page:
    """Observations of a page, and the labelled values that could not be read."""

    observations: list[Observation] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


@dataclass
class _Run:
    """The figures of one run, with the words from which each came."""

    figures: dict[Role, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    words: list[str] = field(default_factory=list)
    doubtful: bool = False


def read_page(text: str) -> Page:
    """Read what a page of text says about drafts."""
    return _read(entries(text), speaks_of_drafting(text))


def read_json_page(value: Any) -> Page:
    """The same of a JSON value, by its keys."""
    found = list(_leaves(value, "", ""))
    keys = " ".join(dict.fromkeys(_keys(value)))
    return _read(found, speaks_of_drafting(keys.replace("_", " ")))


def _read(found: Sequence[Entry], about: bool) -> Page:
    """Observations of all runs; a label that does not name drafting needs a page that does."""
    peers: dict[str, list[Figure]] = defaultdict(list)
    for e in found:
        if figure := read_cell(e.value):
            peers[e.label].append(figure)
    page, runs = Page(), defaultdict[str, _Run](_Run)
    for e in found:
        known = meaning(e.label)
        if known is not None and known.statistic == "other":
            continue
        read = known and (known.sure or about) and _put(runs[e.run], e, known, peers)
        if not read and about and _ABOUT_ACCEPTANCE.search(e.label):
            page.unread.append(f"{e.label.strip()}: {e.value.strip()}"[:200])
    for run in runs.values():
        own = _observation(run, about)
        if own is not None:
            page.observations.append(own)
        else:
            page.unread += [w for w in run.words if about and _ABOUT_ACCEPTANCE.search(w)]
    page.observations = _without_total(page.observations)
    return page


def _put(run: _Run, e: Entry, known: Meaning, peers: Mapping[str, list[Figure]]) -> bool:
    """Add a value to its run; False if it cannot mean what its label says."""
    role = known.role
    if role in (Role.POSITIONS, Role.STEP_LENGTHS):
        listed = numbers_in(e.value)
        if not listed or len(listed) > 10 * MOST_POSITIONS:
            return False
        if role is Role.STEP_LENGTHS:
            whole = tuple(int(f.value) for f in listed if f.value == int(f.value))
            if len(whole) != len(listed) or min(whole) < 1 or max(whole) > _LONGEST_STEP:
                return False
            run.lengths = whole
        else:
            shares = [_share(f, known, listed) for f in listed[:MOST_POSITIONS]]
            if None in shares:
                return False
            run.rates |= {i: s for i, s in enumerate(shares) if s is not None}
        run.words.append(_quote(e))
        return True
    figure = read_cell(e.value)
    if figure is None:
        return False
    if role is Role.POSITION:
        share = _share(figure, known, [figure])
        if share is None or max(known.positions) >= MOST_POSITIONS:
            return False
        run.rates |= dict.fromkeys(known.positions, share)
    elif figure.of and role in (Role.RATE, Role.ACCEPTED, Role.DRAFTED):
        run.figures |= {Role.ACCEPTED: figure.of[0], Role.DRAFTED: figure.of[1]}
        if role is Role.RATE and figure.unit == "%":
            run.figures[Role.RATE] = figure.value / 100
    elif role is Role.RATE or (role is Role.ACCEPTED and figure.unit == "%"):
        share = _share(figure, known, peers[e.label])
        if share is None:
            return False
        run.figures.setdefault(Role.RATE, share)
    elif role in (Role.LENGTH, Role.MEAN_ACCEPTED):
        least = 1.0 if role is Role.LENGTH else 0.0
        if figure.unit in ("%", "x", "×") or not least <= figure.value <= _LONGEST_STEP:
            return False
        run.figures.setdefault(role, figure.value)
    elif figure.value != int(figure.value) or figure.unit in ("%", "x", "×"):
        return False
    else:
        run.figures.setdefault(role, figure.value)
    run.words.append(_quote(e))
    return True


def _quote(e: Entry) -> str:
    return f"{' '.join(e.label.split())}: {' '.join(e.value.split())} ({e.run.lstrip('.')})"[:200]


def _share(figure: Figure, known: Meaning, peers: Iterable[Figure]) -> float | None:
    """A rate as a fraction, from its unit or from what the same label holds elsewhere; None where
    it may be either.
    """
    value, highest = figure.value, max(f.value for f in peers)
    if figure.unit in ("x", "×") or value > 100:
        return None
    if figure.unit == "%" or known.percent:
        return value / 100
    if highest <= 1:
        return value
    return value / 100 if _SURELY_PER_CENT < highest <= 100 else None


def _observation(run: _Run, about: bool) -> Observation | None:
    """What a run says; None where its figures contradict each other or say nothing of
    acceptance.
    """
    own = run.figures
    length = own.get(Role.LENGTH, _length(own.get(Role.MEAN_ACCEPTED)))
    rate = own.get(Role.RATE)
    rates = tuple(run.rates[i] for i in range(len(run.rates)) if i in run.rates)
    rates = rates if len(rates) == len(run.rates) else ()
    known = {
        "engine": "other",
        "definition": WORDS,
        "num_speculative_tokens": _depth(own, rates),
        "source": "; ".join(run.words),
    }
    counts = _counts(run) if about else None
    if counts is not None:
        drafted, accepted = counts.drafted, counts.accepted
        if drafted is not None and accepted is not None:
            share = accepted / drafted if drafted else 0.0
            if accepted > drafted or (rate is not None and abs(share - rate) > 0.02):
                return None
        if counts.drafts and rates and counts.at_position is None:
            whole = drafted == counts.drafts * len(rates)
            at = position_counts(counts.drafts, rates, accepted, complete=whole)
            counts = replace(counts, at_position=at)
        printed = Printed(mean_acceptance_length=None if counts.drafts else length)
        return Observation(kind=Kind.SUMMARY, counts=counts, printed=printed, **known)  # type: ignore[arg-type]
    if rate is None and length is None and not rates:
        return None
    printed = Printed(
        acceptance_rate=rate, mean_acceptance_length=length, rates_per_position=rates or None
    )
    return Observation(kind=Kind.VALUE, printed=printed, **known)  # type: ignore[arg-type]


def _depth(own: Mapping[Role, float], rates: Sequence[float]) -> int | None:
    stated = int(own.get(Role.DEPTH, 0))
    return len(rates) or (stated if 0 < stated <= MOST_POSITIONS else None)


def _length(mean_accepted: float | None) -> float | None:
    """Tokens per step of a mean that may or may not count the bonus token; None where that
    decides.
    """
    if mean_accepted is None:
        return None
    if mean_accepted >= 1.6:
        return mean_accepted
    return 1 + mean_accepted if mean_accepted < 0.6 else None


def _counts(run: _Run) -> Counts | None:
    """Counts where accepted tokens have something to be compared with."""
    if run.lengths:
        deepest = max(run.lengths) - 1
        at = tuple(sum(n > i + 1 for n in run.lengths) for i in range(deepest))
        return Counts(
            drafts=len(run.lengths),
            accepted=sum(run.lengths) - len(run.lengths),
            at_position=at or None,
        )
    accepted, drafted, rejected, drafts = (
        None if (value := run.figures.get(role)) is None else int(value)
        for role in (Role.ACCEPTED, Role.DRAFTED, Role.REJECTED, Role.DRAFTS)
    )
    if drafted is None and accepted is not None and rejected is not None:
        drafted = accepted + rejected
    if accepted is None or (drafted is None and drafts is None):
        return None
    return Counts(accepted=accepted, drafted=drafted, drafts=drafts)


def _without_total(found: list[Observation]) -> list[Observation]:
    """Observations without one that repeats the sum of all others, or another word for word."""
    pairs = [(o.counts.accepted, o.counts.drafted) for o in found]
    for i, (accepted, drafted) in enumerate(pairs):
        others = [p for j, p in enumerate(pairs) if j != i]
        if drafted and len(others) > 1:
            sums = (sum(a or 0 for a, _ in others), sum(n or 0 for _, n in others))
            if sums == (accepted, drafted):
                return [o for j, o in enumerate(found) if j != i]
    return found


def _leaves(value: Any, run: str, key: str, depth: int = 0) -> Iterator[Entry]:
    """The labelled values in a JSON value; each object is a run, but statistics of one figure."""
    if depth > _DEPTH:
        return
    if isinstance(value, Mapping):
        if is_training(" ".join(map(str, value))):
            return
        for name, item in value.items():
            label = str(name)
            if label.lower() in _TEXTS and isinstance(item, str):
                continue
            statistic = statistic_of(label)
            if isinstance(item, Mapping):
                inner = any(statistic_of(str(n)) for n in item)
                yield from _leaves(item, run if inner else f"{run}.{label}", label, depth + 1)
            elif isinstance(item, list):
                yield from _of_list(item, run, label, depth)
            elif (text := _scalar(item)) is not None:
                if statistic in ("mean", "median") and names_drafting(key):
                    label = f"{key} {label}"
                if meaning(label) or names_drafting(label):
                    yield Entry(run or "the object", label, text)
    elif isinstance(value, list):
        yield from _of_list(value, run, key, depth)


def _of_list(items: list[Any], run: str, key: str, depth: int) -> Iterator[Entry]:
    known = meaning(key)
    if items and all(isinstance(i, int | float) and not isinstance(i, bool) for i in items):
        if known and known.role in (Role.POSITIONS, Role.STEP_LENGTHS, Role.RATE, Role.LENGTH):
            several = Role.STEP_LENGTHS if known.role is Role.LENGTH else Role.POSITIONS
            label = key if known.role in (Role.POSITIONS, Role.STEP_LENGTHS) else ""
            label = label or ("accept lengths" if several is Role.STEP_LENGTHS else "accept rates")
            yield Entry(run or "the object", label, str(items)[:100_000])
        return
    for i, item in enumerate(items):
        if isinstance(item, Mapping | list):
            yield from _leaves(item, f"{run}[{i}]", key, depth + 1)


def _scalar(item: Any) -> str | None:
    """A number, or a short text that begins with one, as text."""
    if isinstance(item, bool) or item is None:
        return None
    if isinstance(item, float):
        return f"{item:.12f}".rstrip("0").rstrip(".") if abs(item) < 1e12 else None
    if isinstance(item, int):
        return str(item) if 0 <= item < 10**15 else None
    return item if isinstance(item, str) and len(item) <= 40 and read_cell(item) else None


def _keys(value: Any, depth: int = 0) -> Iterator[str]:
    if depth > _DEPTH:
        return
    children = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping):
        yield from map(str, value)
    if isinstance(value, Mapping | list):
        for child in children:
            yield from _keys(child, depth + 1)
