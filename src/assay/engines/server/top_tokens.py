"""The likeliest tokens at each step of an answer, by their text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.engines.server.fields import as_number, as_object


@dataclass(frozen=True)
class TopToken:
    """One generated token, its log-probability (natural log), and those of the likeliest tokens
    there, by text.
    """

    text: str
    logprob: float
    likely: Mapping[str, float]

    def gap(self, other: str) -> float:
        """How much more likely this token was than `other`, in nats; than the last one listed where
        that is not.
        """
        listed = [value for text, value in self.likely.items() if text != self.text]
        return self.logprob - self.likely.get(other, min(listed, default=-math.inf))

    @property
    def top_gap(self) -> float:
        """How much more likely it was than the runner-up; infinite where none is listed."""
        return self.logprob - max(
            (value for text, value in self.likely.items() if text != self.text), default=-math.inf
        )


def read_top(choice: Mapping[str, Any]) -> tuple[TopToken, ...]:
    """The tokens of an answer with the likeliest at each, in the chat or the completions shape;
    empty without them.
    """
    held = as_object(choice.get("logprobs"))
    content = held.get("content")
    rows: list[tuple[Any, Any, dict[str, Any]]] = []
    if isinstance(content, list):
        for item in map(as_object, content):
            top = item.get("top_logprobs")
            named = map(as_object, top if isinstance(top, list) else ())
            rows.append(
                (
                    item.get("token"),
                    item.get("logprob"),
                    {str(t.get("token")): t.get("logprob") for t in named},
                )
            )
    else:
        columns = [held.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")]
        if all(isinstance(column, list) for column in columns):
            rows = [(t, v, dict(as_object(top))) for t, v, top in zip(*columns, strict=False)]
    found = []
    for text, value, top in rows:
        number = as_number(value)
        if not isinstance(text, str) or number is None:
            return ()
        listed = {k: n for k, v in top.items() if (n := as_number(v)) is not None}
        found.append(TopToken(text, number, listed | {text: number}))
    return tuple(found)
