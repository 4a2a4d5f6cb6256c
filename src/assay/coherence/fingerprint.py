"""The fingerprint of one model on one server: taken, written and read.

A fingerprint holds, for prompts cut in the middle of prose, how many tokens each has, the greedy
next token and the likeliest tokens with their probabilities; and the bits per byte of fixed texts,
where a server can score. Cuts are at fixed places, so at many of them two continuations are about
equally likely: there a small change of the weights moves most probability.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from assay.coherence.passages import passages
from assay.coherence.record import from_fields
from assay.errors import AssayError
from assay.files import json_of
from assay.runs import write_atomically
from assay.verdict import jsonable

FORMAT = "assay-identity/1"
WIDTH = 5
CUTS = 12
"""Prompts that end inside each fixed text."""
ROUNDING = 0.25
"""Nats between the two likeliest tokens that rounding can turn: two steps of bf16 at a logit of 16
to 32.
"""
STRANGE_TEXTS = (
    "naïve café — “quoted” … 中文 русский עברית 🙂🙃",
    "    indented\t\ttabs\n\n\nlines  double  spaces",
    "0123456789 3.14159 1,000,000 1e-9",
    "def f(x):\n    return {'a': [x ** 2, None]}",
    "<|im_start|>user </s> [INST] <pad>",
    "supercalifragilisticexpialidocious Donaudampfschifffahrt",
)


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
class Fingerprint:
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
def texts_digest() -> str:
    """Digest of all texts that a server is asked."""
    return hashlib.sha256(json.dumps([prompts(), passages(), STRANGE_TEXTS]).encode()).hexdigest()[
        :32
    ]


def write_fingerprint(found: Fingerprint, path: Path) -> None:
    """Write a reference file; AssayError where that cannot be."""
    try:
        write_atomically(path, json.dumps(found.to_json(), ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        raise AssayError(
            f"cannot write the reference {path.name}: {error.strerror}",
            finding_id="coherence.reference",
            remedy="name another file",
        ) from error


def read_fingerprint(path: Path) -> Fingerprint:
    """Read a reference file, or the result of `assay check --json`, whose scores alone are
    compared; AssayError else.
    """
    remedy = "make one of the trusted server: assay check URL --identity-out FILE"

    def unusable(why: str) -> AssayError:
        return AssayError(
            f"the reference {path.name} {why}", finding_id="coherence.reference", remedy=remedy
        )

    try:
        document = json_of(path)
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
            Fingerprint,
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
        found.texts != texts_digest()
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


def _of_check(document: Mapping[str, Any]) -> Fingerprint:
    alone = {
        p["passage"]: float(p["nats"])
        for p in document["results"]["bits_per_byte"]["passages"]
        if not p["depth"]
    }
    nats = tuple(alone[f"p{i:02d}"] for i in range(len(passages())))
    server = document["subject"].get("server") or {}
    kind, model = str(server.get("kind")), str(document["subject"].get("model"))
    return Fingerprint(
        model,
        f"{kind} {server.get('version') or ''}".strip(),
        kind,
        "",
        nats=nats,
        texts=texts_digest(),
    )
