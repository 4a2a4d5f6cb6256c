"""Where the difference sits, and what difference would be there anyway."""

from __future__ import annotations

import json
import re
import statistics
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from assay.engines.scoring import (
    Engagement,
    GreedyGenerator,
    GreedyStep,
    HookSpec,
    ScoreJob,
    ScoringEngine,
    StateRows,
    Window,
)
from assay.errors import AssayError
from assay.fidelity.metrics import window_statistics
from assay.fidelity.score import ReferenceRows, Spreads, WindowObservation, measure
from assay.progress import Progress
from assay.runs import write_atomically
from assay.stats import ClusterEstimate, cluster_ratio

if TYPE_CHECKING:
    import torch


# What difference would be there anyway: the reference against itself, against rounding, against its
# own storage.
#
# No candidate can be told from the reference below these; a KL within twice the largest of them is
# not ranked.


FLOOR_WINDOWS = 4
"""Windows that each floor is measured on."""


@dataclass(frozen=True)
class Floors:
    """Mean KL in nats; None where it was not or cannot be measured.

    `self_kld`: scored again at another batch size. `storage_bf16`: against its own states in 16
    bits. `rounding_bf16`: under noise of one bf16 rounding unit after every layer.
    """

    self_kld: float | None = None
    storage_bf16: float | None = None
    rounding_bf16: float | None = None

    @property
    def largest(self) -> float:
        """The largest that is known, 0 where none is."""
        return max((v for v in asdict(self).values() if v is not None), default=0.0)

    def to_json(self) -> dict[str, float | None]:
        """Plain JSON types."""
        return asdict(self)


def measure_floors(
    engine: ScoringEngine,
    reference: ReferenceRows,
    windows: Sequence[Window],
    job: ScoreJob,
    seed: int,
    progress: Progress,
) -> Floors:
    """All floors that the engine can give, on the first windows."""
    some = windows[:FLOOR_WINDOWS]
    with progress("measuring floors", 3) as advance:
        again = replace(job, batch=2 if job.batch == 1 else 1)
        own = _mean_kl(_apart(engine, reference, some, again))
        advance()
        storage = _mean_kl(
            window_statistics(rows, _in_bf16(rows)).kl
            for rows in reference.rows(some)
            if isinstance(rows, StateRows)
        )
        advance()
        rounding = None
        if engine.ability.hooks:
            # The noise is what an equivalent kernel with another order of bf16 operations may show
            # (the idea is that of exllamav3's qbench).
            noise = HookSpec(
                "assay.fidelity.breakdown:RoundingNoise", {"sigma": 2.0**-9, "seed": seed}
            )
            rounding = _mean_kl(_apart(engine, reference, some, replace(job, hook=noise)))
        advance()
    return Floors(own, storage, rounding)


def _in_bf16(rows: StateRows) -> StateRows:
    import torch

    return replace(rows, states=rows.states.to(torch.bfloat16).to(rows.states.dtype))


def _apart(
    engine: ScoringEngine, reference: ReferenceRows, windows: Sequence[Window], job: ScoreJob
) -> Iterator[torch.Tensor]:
    """KL of the tokens of each window between the reference and what the engine scores now."""
    import torch

    if isinstance(engine, Spreads):
        yield from (
            torch.tensor(w.kl) for w in measure(reference.rows(windows), engine, windows, job)
        )
        return
    for rows, own in zip(reference.rows(windows), engine.score_windows(windows, job), strict=True):
        yield window_statistics(rows, own).kl


def _mean_kl(kl: Iterable[torch.Tensor]) -> float | None:
    import torch

    parts = list(kl)
    finite = torch.cat(parts) if parts else torch.empty(0)
    finite = finite[finite.isfinite()]
    return float(finite.mean()) if finite.numel() else None


class RoundingNoise:
    """Multiplies what each decoder layer puts out by 1 + σ · N(0, 1), from a fixed seed."""

    passes = 1

    def __init__(self, sigma: float, seed: int) -> None:
        self.sigma = sigma
        self.seed = seed
        self._fires = 0

    @contextmanager
    def attach(self, model: Any) -> Iterator[None]:
        """Hook every decoder layer; undone on leaving."""
        import torch

        generator = torch.Generator(device=model.device).manual_seed(self.seed)

        def noisy(module: Any, inputs: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            noise = torch.randn(
                hidden.shape, generator=generator, device=hidden.device, dtype=torch.float32
            )
            changed = (hidden.float() * (1 + self.sigma * noise)).to(hidden.dtype)
            self._fires += 1
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        handles = [layer.register_forward_hook(noisy) for layer in model.get_decoder().layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def new_cache(self, batch: int, index: int) -> None:
        """The engine's own."""
        return

    def after_prefix(self, cache: Any) -> None:
        """Nothing to do."""

    def discard(self) -> None:
        """Nothing is kept of a batch."""

    def engagement(self) -> Engagement:
        """How often the noise was added."""
        return Engagement(fires=self._fires)


# Where it sits: by depth in the context, by the confidence of the reference, by kind of token; and
# where greedy texts part.


CONFIDENCE_EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0 + 1e-9)
DEPTH_BINS = 8


@dataclass(frozen=True)
class Bin:
    """One part of the tokens: its name, how many they are, mean KL and mean ΔNLL by window, top-1
    share.
    """

    name: str
    tokens: int
    kl: ClusterEstimate
    dnll: ClusterEstimate
    top1: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "tokens": self.tokens,
            "kld": {"mean": self.kl.value, "lo": self.kl.interval.lo, "hi": self.kl.interval.hi},
            "dnll": {
                "value": self.dnll.value,
                "lo": self.dnll.interval.lo,
                "hi": self.dnll.interval.hi,
            },
            "top1": self.top1,
        }


def by_depth(seen: Sequence[WindowObservation]) -> list[Bin]:
    """Equal parts of the window, by how many tokens come before."""
    first, length = seen[0].first, seen[0].tokens.size
    edges = np.linspace(first, length, min(DEPTH_BINS, length - first) + 1).astype(int)
    return _bins(
        seen,
        [f"{lo}–{hi - 1}" for lo, hi in pairwise(edges)],
        lambda w: np.searchsorted(edges, np.arange(w.first, w.tokens.size), side="right") - 1,
    )


def by_confidence(seen: Sequence[WindowObservation]) -> list[Bin]:
    """By the reference's largest probability: how sure it was of what comes."""
    names = [f"{lo:.1f}–{min(hi, 1.0):.1f}" for lo, hi in pairwise(CONFIDENCE_EDGES)]
    return _bins(
        seen,
        names,
        lambda w: np.searchsorted(CONFIDENCE_EDGES, np.nan_to_num(w.conf), side="right") - 1,
    )


def by_class(seen: Sequence[WindowObservation], class_of: Callable[[int], str]) -> list[Bin]:
    """By the kind of target token; `class_of` names it from the id."""
    ids = np.unique(np.concatenate([w.tokens for w in seen]))
    classes = {int(i): class_of(int(i)) for i in ids}
    names = sorted(set(classes.values()))
    place = {name: k for k, name in enumerate(names)}
    table = np.array([place[classes[int(i)]] for i in ids])
    return _bins(seen, names, lambda w: table[np.searchsorted(ids, w.tokens[w.first :])])


def worst_tokens(
    seen: Sequence[WindowObservation],
    decode: Callable[[Sequence[int]], str],
    count: int = 10,
    context: int = 24,
) -> list[dict[str, Any]]:
    """The tokens of largest KL, each with the text before it."""
    rows = []
    for w in seen:
        kl = np.where(w.finite, w.kl, -np.inf)
        for i in np.argsort(kl)[::-1][:count]:
            if w.finite[i]:
                rows.append((float(kl[i]), w, int(i)))
    rows.sort(key=lambda row: -row[0])
    return [
        {
            "kld": kl,
            "window": w.index,
            "position": w.first + i,
            "token": decode([int(w.tokens[w.first + i])]),
            "before": decode(
                [int(t) for t in w.tokens[max(0, w.first + i - context) : w.first + i]]
            ),
            "p_reference": float(w.p_ref[i]),
            "p_candidate": float(w.p_cand[i]),
        }
        for kl, w, i in rows[:count]
    ]


def _bins(
    seen: Sequence[WindowObservation],
    names: Sequence[str],
    place: Callable[[WindowObservation], NDArray[np.int64]],
) -> list[Bin]:
    """Sums of each bin and window; bins without tokens are left out."""
    size = len(names)
    sums = {name: np.zeros((len(seen), size)) for name in ("n", "kl", "dnll", "top1")}
    for row, w in enumerate(seen):
        some = w.finite & np.isfinite(w.kl)
        where = place(w)[some]
        sums["n"][row] = np.bincount(where, minlength=size)
        for name in ("kl", "dnll", "top1"):
            values = np.asarray(getattr(w, name), np.float64)[some]
            sums[name][row] = np.bincount(where, weights=values, minlength=size)
    return [
        Bin(
            name,
            int(sums["n"][:, k].sum()),
            cluster_ratio(sums["kl"][:, k], sums["n"][:, k]),
            cluster_ratio(sums["dnll"][:, k], sums["n"][:, k]),
            float(sums["top1"][:, k].sum() / sums["n"][:, k].sum()),
        )
        for k, name in enumerate(names)
        if sums["n"][:, k].sum() > 0
    ]


# What kind of text a token is part of, told from its decoded text alone.


class TokenClass(StrEnum):
    """Classes of tokens, as a breakdown lists them."""

    WORDS = "words"
    """Letters of the Latin script, with what holds words together (' - .)."""
    DIGITS = "digits"
    """Numbers, with the marks within them."""
    PUNCTUATION = "punctuation"
    """Marks and symbols of prose."""
    CODE = "code"
    """What prose does not have: operators, brackets other than (), names such as snake_case and
    camelCase.
    """
    OTHER_SCRIPTS = "other scripts"
    """Letters of any other script, also a part of a character (a lone byte of UTF-8)."""
    SPECIAL = "whitespace and special"
    """White space, control characters, and tokens such as <|endoftext|>."""


# A whole token in angle brackets or brackets of a kind that tokenizers use for themselves, and byte
# tokens.
_SPECIAL = re.compile(
    r"<\|[^|<>]*\|>|</?[a-z_]+\d*>|\[(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|/?INST)\]|<0x[0-9A-F]{2}>"
)
_CODE_MARKS = frozenset("{}[]<>=_\\|^~@#$&`*+")
_CODE_PAIRS = ("()", "::", "//", "/*", "--", "();", ").", "')", '")', "('", '("', "/>", "%s", "%d")
_CAMEL = re.compile(r"[a-z][A-Z]|[A-Z]{2,}[a-z]{2,}")
_NUMBER_MARKS = frozenset(".,:/-+%")


@lru_cache(maxsize=1 << 16)
def token_class(text: str) -> TokenClass:
    """The class of one token, given as its decoded text (leading space included)."""
    core = text.strip()
    if not core or _SPECIAL.fullmatch(core) or all(_is_control(c) for c in core):
        return TokenClass.SPECIAL
    if any(_is_foreign(c) for c in core):
        return TokenClass.OTHER_SCRIPTS
    letters = any(c.isalpha() for c in core)
    digits = any(c.isnumeric() for c in core)
    if letters:
        return TokenClass.CODE if _is_name(core, digits) else TokenClass.WORDS
    if digits:
        whole = all(c.isnumeric() or c in _NUMBER_MARKS for c in core)
        return TokenClass.DIGITS if whole else TokenClass.CODE
    marked = any(c in _CODE_MARKS for c in core) or any(pair in core for pair in _CODE_PAIRS)
    # A run of one mark (----, ****, ####) is a rule or a heading in prose; two of them are an
    # operator.
    run = len(core) > 2 and len(set(core)) == 1
    return TokenClass.CODE if marked and not run else TokenClass.PUNCTUATION


def token_classes(texts: Iterable[str]) -> list[TokenClass]:
    """The classes of many tokens."""
    return [token_class(text) for text in texts]


def _is_name(core: str, digits: bool) -> bool:
    """Whether something with Latin letters is code rather than a word or a part of one."""
    return digits or any(c in _CODE_MARKS for c in core) or "(" in core or bool(_CAMEL.search(core))


def _is_foreign(c: str) -> bool:
    """A letter or a mark outside the Latin script, or the sign for a broken character."""
    if c == "\ufffd":
        return True
    category = unicodedata.category(c)
    if category[0] not in "LM":
        return False
    if ord(c) < 0x250:
        return False
    # Combining marks (category M) up to U+036F belong to Latin; other letters say their script in
    # their name.
    return not (0x300 <= ord(c) < 0x370 or "LATIN" in unicodedata.name(c, ""))


def _is_control(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn", "Zs", "Zl", "Zp")


# Where the greedy continuations of two engines part, and whether that was a near tie.
#
# Both continue the first half of a window, each on its own. Up to the first token that differs they
# have read the same, so that there, and only there, their two likeliest tokens can be held against
# each other. Small gaps on both sides are a coin that rounding may turn; a wide one is a change of
# the model.


PREFIXES = 8
"""Windows that are continued."""
NEAR_TIE = 0.25
"""Nats: two units of a bf16 logit between 16 and 32. Gaps below this on both sides are a near tie.
"""


@dataclass(frozen=True)
class Continued:
    """Greedy continuations of one engine, or the reason why there are none."""

    steps: Sequence[Sequence[GreedyStep]] = ()
    reason: str = ""


@dataclass(frozen=True)
class Divergence:
    """One prefix: the index of the first token that differs (None where none does) and both sides'
    step there.
    """

    window: int
    first: int | None
    reference: GreedyStep | None = None
    candidate: GreedyStep | None = None

    @property
    def near_tie(self) -> bool:
        """Whether both were close to another token."""
        sides = (self.reference, self.candidate)
        return all(step is not None and step.gap < NEAR_TIE for step in sides)


@dataclass(frozen=True)
class Greedy:
    """The continuations of a candidate against those of the reference; `reason` says why there are
    none.
    """

    prefix_tokens: int
    tokens: int
    found: Sequence[Divergence] = ()
    texts: Callable[[int], str] = field(default=str, compare=False)
    reason: str = ""

    @property
    def diverged(self) -> Sequence[Divergence]:
        """The prefixes after which the two part."""
        return [d for d in self.found if d.first is not None]

    @property
    def median_first(self) -> float | None:
        """Median of the first difference over all prefixes, None where at least half of them never
        part.
        """
        if 2 * len(self.diverged) <= len(self.found):
            return None
        return statistics.median(self.tokens if d.first is None else d.first for d in self.found)

    def to_json(self) -> dict[str, Any]:
        """`results.greedy`."""
        if self.reason:
            return {"available": False, "reason": self.reason, "tokens": self.tokens}
        return {
            "available": True,
            "prefixes": len(self.found),
            "prefix_tokens": self.prefix_tokens,
            "tokens": self.tokens,
            "diverged": len(self.diverged),
            "near_ties": sum(d.near_tie for d in self.diverged),
            "near_tie_gap": NEAR_TIE,
            "median_first": self.median_first,
            "per_prefix": [
                {
                    "window": d.window,
                    "first": d.first,
                    "near_tie": d.near_tie if d.first is not None else None,
                    "reference": self._step(d.reference),
                    "candidate": self._step(d.candidate),
                }
                for d in self.found
            ],
        }

    def _step(self, step: GreedyStep | None) -> dict[str, Any] | None:
        if step is None:
            return None
        return asdict(step) | {
            "gap": step.gap,
            "text": self.texts(step.token),
            "runner_up_text": self.texts(step.runner_up),
        }


def prefixes_of(windows: Sequence[Window]) -> list[tuple[int, ...]]:
    """The first halves of the first windows."""
    return [w.tokens[: prefix_length(windows)] for w in windows[:PREFIXES]]


def prefix_length(windows: Sequence[Window]) -> int:
    """Tokens of a prefix."""
    return max(1, len(windows[0].tokens) // 2)


def continue_greedily(
    engine: object, windows: Sequence[Window], tokens: int, kept: Path | None
) -> Continued:
    """`tokens` greedy tokens after each prefix, read from `kept` where an interrupted run has them
    there.
    """
    if kept and kept.exists():
        rows = json.loads(kept.read_text(encoding="utf-8"))
        return Continued([[GreedyStep(*step) for step in row] for row in rows])
    if not isinstance(engine, GreedyGenerator):
        return Continued(
            reason="this engine offers no greedy continuation with its two likeliest tokens"
        )
    try:
        steps = engine.generate_greedy(prefixes_of(windows), tokens)
    except AssayError as error:  # the scores stand without it
        return Continued(reason=error.message)
    if kept:
        rows = [
            [[s.token, s.runner_up, s.logprob, s.runner_up_logprob] for s in row] for row in steps
        ]
        write_atomically(kept, json.dumps(rows))
    return Continued(steps)


def compare_greedy(
    reference: Continued,
    candidate: Continued,
    windows: Sequence[Window],
    tokens: int,
    texts: Callable[[int], str] = str,
) -> Greedy:
    """Where the candidate's continuations leave the reference's; `texts` gives the text of a token."""
    length = prefix_length(windows)
    if reason := " and ".join(
        f"{side}: {continued.reason}"
        for side, continued in (("reference", reference), ("candidate", candidate))
        if continued.reason
    ):
        return Greedy(length, tokens, reason=reason)
    found = []
    for window, own, other in zip(
        windows[:PREFIXES], reference.steps, candidate.steps, strict=True
    ):
        steps = enumerate(zip(own, other, strict=True))
        parted = ((i, a, b) for i, (a, b) in steps if a.token != b.token)
        found.append(Divergence(window.index, *next(parted, (None, None, None))))
    return Greedy(length, tokens, found, texts)
