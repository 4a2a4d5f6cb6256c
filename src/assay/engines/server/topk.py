"""The k likeliest ids beside each token of a prompt: what a server gives of a distribution.

With them a comparison can bound KL from below: ids that were scored on both sides stand for
themselves, all others are one bucket, and lumping never increases KL (the data-processing
inequality). That holds for any choice of ids; the bound is tightest where the reference chooses, as
its likely tokens carry most of the sum.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from assay.engines.server.errors import BadScores, NotFound, RequestRefused, Unauthorized
from assay.engines.server.fields import as_number, as_object
from assay.engines.server.http import Transport
from assay.engines.server.prompt_scores import (
    ROUNDING,
    PromptRoute,
    by_echo,
    by_prompt_logprobs,
    by_sglang,
    listed,
    require_same_count,
)


@dataclass(frozen=True)
class TopkLogprobs:
    """Natural log-probabilities at the tokens `first` … of a prompt, given all tokens before each.

    `target[i]` is that of token `first + i` itself; `rows[i]` maps ids to theirs, that token's
    among them. `chosen_by` says whose likeliest ids they are. A missing id is in the bucket of the
    rest; a value of −inf is one that the server rules out.
    """

    first: int
    target: tuple[float, ...]
    rows: tuple[Mapping[int, float], ...]
    chosen_by: Literal["reference", "candidate"]
    with_best: bool = False
    """Whether the candidate's own likeliest id was added to every row that the reference chose."""

    @property
    def lists_best(self) -> bool:
        """Whether the candidate's own likeliest id is among those of every row.

        It is where it was added, and where the candidate chose and lists anything besides the
        target token: a server whose list is named by text only, or empty, leaves that token alone.
        """
        listed = self.chosen_by == "candidate" and all(len(row) > 1 for row in self.rows)
        return self.with_best or listed


TopkRoute = Callable[[Transport, str, Sequence[int], Sequence[Sequence[int]], int], TopkLogprobs]
"""Scores the tokens `first` … of a prompt with the ids that are given for each, or with as many of
the server's own.
"""


def by_given_ids(
    transport: Transport,
    model: str,
    tokens: Sequence[int],
    topk: Sequence[Sequence[int]],
    first: int,
) -> TopkLogprobs:
    """vLLM from 0.32 on with model runner V2: the given ids of each row, through its tokens-in
    route.

    `prompt_logprobs` adds the candidate's own likeliest id, without which top-1 agreement would
    mostly stay open.
    """
    rows = [
        list(dict.fromkeys((token, *ids))) for token, ids in zip(tokens[first:], topk, strict=True)
    ]
    width = max(map(len, rows))
    answer = as_object(
        transport.post_json(
            transport.endpoint.root + "/inference/v1/generate",
            {
                "model": model,
                "token_ids": list(tokens),
                "sampling_params": {
                    "max_tokens": 1,
                    "temperature": 0.0,
                    "prompt_logprob_token_ids": [row + [-1] * (width - len(row)) for row in rows],
                    "prompt_logprob_start": first - 1,
                    "prompt_logprobs": 1,
                },
            },
        )
    )
    values = _array(answer.get("prompt_token_id_logprobs"), (len(rows), width))
    given: list[tuple[int, dict[int, Any]]] = [
        (row[0], dict(zip(row, map(float, found), strict=False)))
        for row, found in zip(rows, values, strict=True)
    ]
    own = answer.get("prompt_logprobs")
    if not isinstance(own, list):
        return _topk(first, given, "reference")
    require_same_count(len(tokens), len(own))
    both = [
        (token, listed(entry) | row) for (token, row), entry in zip(given, own[first:], strict=True)
    ]
    return _topk(first, both, "reference", with_best=all(map(listed, own[first:])))


def by_likeliest(
    route: PromptRoute,
    transport: Transport,
    model: str,
    tokens: Sequence[int],
    topk: Sequence[Sequence[int]],
    first: int,
) -> TopkLogprobs:
    """The candidate's own likeliest ids, as many as the longest row has, by a route for the tokens
    of prompts.
    """
    (found,) = route(transport, model, [tuple(tokens)], max(map(len, topk)))
    rows = [
        (token, {**likely, token: value})
        for token, likely, value in zip(tokens, found.likely, found.values, strict=True)
    ]
    return _topk(first, rows[first:], "candidate")


_VLLM, _ECHO, _SGLANG = (
    partial(by_likeliest, route) for route in (by_prompt_logprobs, by_echo, by_sglang)
)


def topk_routes(kind: str) -> tuple[TopkRoute, ...]:
    """The routes to try at a server of this kind, best first."""
    return (_SGLANG, _ECHO) if kind == "sglang" else (by_given_ids, _VLLM, _ECHO)


def topk_logprobs(
    transport: Transport,
    model: str,
    tokens: Sequence[int],
    topk: Sequence[Sequence[int]],
    first: int,
    routes: Sequence[TopkRoute],
) -> tuple[TopkLogprobs, TopkRoute]:
    """Score by the first of `routes` that the server knows, and that route; BadScores with all
    reasons if none.
    """
    if first < 1 or len(tokens) - first != len(topk) or not topk:
        raise ValueError(
            f"{len(tokens)} tokens from {first} on need {len(tokens) - first} rows of ids"
        )
    reasons = []
    refusals: list[Unauthorized] = []
    for route in routes:
        try:
            return route(transport, model, tokens, topk, first), route
        except (
            Unauthorized
        ) as error:  # one route may be forbidden: vLLM's scale-out endpoints are off by default
            refusals.append(error)
            reasons.append(error.message)
        except (NotFound, RequestRefused, BadScores) as error:
            reasons.append(str(error.evidence.get("said") or error.message))
    if len(refusals) == len(routes):
        raise refusals[-1]
    raise BadScores("the server cannot score a prompt: " + "; ".join(reasons))


def _topk(
    first: int,
    rows: Sequence[tuple[int, Mapping[int, Any]]],
    chosen_by: Literal["reference", "candidate"],
    *,
    with_best: bool = False,
) -> TopkLogprobs:
    """Check that every row holds log-probabilities of one distribution, and its own token's among
    them.
    """
    clean: list[dict[int, float]] = []
    for i, (token, row) in enumerate(rows):
        values = {key: _logprob(value) for key, value in row.items()}
        checked = {key: value for key, value in values.items() if value is not None}
        if len(checked) < len(values) or token not in checked:
            raise BadScores(f"position {first + i} holds something that is no log-probability")
        if (
            max(checked.values()) > ROUNDING
            or math.fsum(map(math.exp, checked.values())) > 1 + ROUNDING
        ):
            raise BadScores(f"the probabilities at position {first + i} sum to more than 1")
        clean.append(checked)
    target = tuple(row[token] for (token, _), row in zip(rows, clean, strict=True))
    if not any(target):
        raise BadScores("all log-probabilities are exactly 0, as no model gives them")
    return TopkLogprobs(first, target, tuple(clean), chosen_by, with_best)


def _logprob(value: Any) -> float | None:
    """A log-probability; −inf as such, or as the large negative number that stands for
    it in JSON.
    """
    if value == -math.inf:
        return -math.inf
    number = as_number(value)
    return None if number is None else -math.inf if number <= -9999.0 else number


def _array(value: Any, shape: tuple[int, int]) -> Any:
    """The numpy file that an answer holds as base64, of the given shape."""
    if not isinstance(value, str):
        raise BadScores("the server ignores prompt_logprob_token_ids: its answer holds no scores")
    try:
        array = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, binascii.Error) as error:
        raise BadScores(f"the scores of the given ids cannot be read: {error}") from error
    if array.shape != shape or array.dtype.kind != "f":
        raise BadScores(f"scores of shape {shape} were asked for, {array.shape} came back")
    return array
