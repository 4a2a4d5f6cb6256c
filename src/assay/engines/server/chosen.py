"""Log-probabilities of a few chosen ids at every position of a prompt: what a server can give of a distribution.

With them a comparison can bound KL from below: ids that were scored on both sides stand for themselves, all others
are one bucket, and lumping never increases KL (the data-processing inequality). That holds for any choice of ids; the
bound is tightest where the reference chooses, as its likely tokens carry most of the sum.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from assay.engines.server.errors import BadScores, NotFound, RequestRefused, Unauthorized
from assay.engines.server.fields import as_count, as_number, as_object
from assay.engines.server.scoring import complete, sglang_meta
from assay.engines.server.transport import Transport

_ROUNDING = 1e-3
"""How far above 0 a log-probability, or above 1 a sum of probabilities, may lie before it is no rounding error."""


@dataclass(frozen=True)
class ChosenScores:
    """Natural log-probabilities at the tokens `first` … of a prompt, given all tokens before each.

    `gold[i]` is that of token `first + i` itself; `rows[i]` maps ids to theirs, that token's among them. `chosen_by`
    says whose likely ids they are. A missing id is in the bucket of the rest; a value of −inf is one that the server
    rules out.
    """

    first: int
    gold: tuple[float, ...]
    rows: tuple[Mapping[int, float], ...]
    chosen_by: Literal["reference", "candidate"]
    with_best: bool = False
    """Whether the candidate's own likeliest id was added to every row that the reference chose."""

    @property
    def lists_best(self) -> bool:
        """Whether the candidate's own likeliest id is among those of every row.

        It is where it was added, and where the candidate chose and lists anything besides the token that came: a
        server whose list is named by text only, or empty, leaves that token alone.
        """
        listed = self.chosen_by == "candidate" and all(len(row) > 1 for row in self.rows)
        return self.with_best or listed


Chosen = Sequence[Sequence[int]]
"""Ids to score, one row for each scored token."""
ChosenRoute = Callable[[Transport, str, Sequence[int], Chosen, int], ChosenScores]


def by_given_ids(
    transport: Transport, model: str, tokens: Sequence[int], chosen: Chosen, first: int
) -> ChosenScores:
    """vLLM from 0.32 on with model runner V2: the given ids of each row, through its tokens-in route.

    `prompt_logprobs` adds the candidate's own likeliest id, without which top-1 agreement would mostly stay open.
    """
    rows = [list(dict.fromkeys((token, *ids))) for token, ids in zip(tokens[first:], chosen, strict=True)]
    width = max(map(len, rows))
    answer = transport.post_json(
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
    values = _array(as_object(answer).get("prompt_token_id_logprobs"), (len(rows), width))
    given: list[tuple[int, dict[int, Any]]] = [
        (row[0], dict(zip(row, map(float, found), strict=False)))
        for row, found in zip(rows, values, strict=True)
    ]
    own = as_object(answer).get("prompt_logprobs")
    if not isinstance(own, list):
        return _scores(first, given, "reference")
    _same_count(own, tokens)
    both = [(token, _listed(entry) | row) for (token, row), entry in zip(given, own[first:], strict=True)]
    return _scores(first, both, "reference", with_best=all(map(_listed, own[first:])))


def by_top_logprobs(
    transport: Transport, model: str, tokens: Sequence[int], chosen: Chosen, first: int
) -> ChosenScores:
    """vLLM: `prompt_logprobs` gives each prompt token and the candidate's own most likely ids."""
    entries = complete(transport, model, tokens, {"prompt_logprobs": max(map(len, chosen))}).get(
        "prompt_logprobs"
    )
    if not isinstance(entries, list):
        raise BadScores("the server ignores prompt_logprobs: its answer holds none")
    _same_count(entries, tokens)
    rows = [(token, _listed(entry)) for token, entry in zip(tokens[first:], entries[first:], strict=True)]
    return _scores(first, rows, "candidate")


def by_sglang_top(
    transport: Transport, model: str, tokens: Sequence[int], chosen: Chosen, first: int
) -> ChosenScores:
    """SGLang's native route: each prompt token and the candidate's own most likely ids.

    It can score given ids too, but one set for the whole prompt, which for ids chosen at each position would be
    thousands of ids at thousands of positions.
    """
    meta = sglang_meta(transport, tokens, top_logprobs_num=max(map(len, chosen)))
    own, top = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
    if not isinstance(own, list) or not isinstance(top, list):
        raise BadScores("the server ignores top_logprobs_num: its answer holds no input_top_logprobs")
    _same_count(own, tokens)
    _same_count(top, tokens)
    rows = []
    for token, (value, key, *_), best in zip(tokens[first:], own[first:], top[first:], strict=True):
        if key != token:
            raise BadScores(f"{len(tokens)} tokens were sent, but the scores are those of others")
        rows.append((token, {int(k): v for v, k, *_ in best or ()} | {token: value}))
    return _scores(first, rows, "candidate")


def by_echo_top(
    transport: Transport, model: str, tokens: Sequence[int], chosen: Chosen, first: int
) -> ChosenScores:
    """The completions API: the prompt echoed with `logprobs`, tokens named by id where the server can."""
    fields = {"echo": True, "logprobs": max(map(len, chosen)), "return_tokens_as_token_ids": True}
    held = as_object(complete(transport, model, tokens, fields).get("logprobs"))
    own, top = held.get("token_logprobs"), held.get("top_logprobs")
    if not isinstance(own, list) or len(own) < len(tokens):
        raise BadScores("the server ignores echo with logprobs: its answer holds too few token_logprobs")
    if not isinstance(top, list) or len(top) < len(tokens):
        top = [{}] * len(tokens)
    rows = []
    for i in range(first, len(tokens)):
        named = {token_id(name): value for name, value in as_object(top[i]).items()}
        rows.append((tokens[i], {k: v for k, v in named.items() if k is not None} | {tokens[i]: own[i]}))
    return _scores(first, rows, "candidate")


def routes_for(kind: str) -> tuple[ChosenRoute, ...]:
    """The routes to try at a server of this kind, best first."""
    if kind == "sglang":
        return (by_sglang_top, by_echo_top)
    return (by_given_ids, by_top_logprobs, by_echo_top)


def score_chosen(
    transport: Transport,
    model: str,
    tokens: Sequence[int],
    chosen: Chosen,
    first: int,
    routes: Sequence[ChosenRoute],
) -> tuple[ChosenScores, ChosenRoute]:
    """Score by the first of `routes` that the server knows, and that route; BadScores with all reasons if none."""
    if first < 1 or len(tokens) - first != len(chosen) or not chosen:
        raise ValueError(f"{len(tokens)} tokens from {first} on need {len(tokens) - first} rows of ids")
    reasons = []
    refusals: list[Unauthorized] = []
    for route in routes:
        try:
            return route(transport, model, tokens, chosen, first), route
        except (
            Unauthorized
        ) as error:  # a server may forbid one route only: vLLM's scale-out endpoints are off
            refusals.append(error)
            reasons.append(error.message)
        except (NotFound, RequestRefused, BadScores) as error:
            reasons.append(str(error.evidence.get("said") or error.message))
    if len(refusals) == len(routes):
        raise refusals[-1]
    raise BadScores("the server cannot score a prompt: " + "; ".join(reasons))


def _scores(
    first: int,
    rows: Sequence[tuple[int, Mapping[int, Any]]],
    chosen_by: Literal["reference", "candidate"],
    *,
    with_best: bool = False,
) -> ChosenScores:
    """Check that every row holds log-probabilities of one distribution, and its own token's among them."""
    clean: list[dict[int, float]] = []
    gold: list[float] = []
    for i, (token, row) in enumerate(rows):
        values = {key: _logprob(value) for key, value in row.items()}
        if any(value is None for value in values.values()) or token not in values:
            raise BadScores(f"position {first + i} holds something that is no log-probability")
        checked = {key: value for key, value in values.items() if value is not None}
        if max(checked.values()) > _ROUNDING or math.fsum(map(math.exp, checked.values())) > 1 + _ROUNDING:
            raise BadScores(f"the probabilities at position {first + i} sum to more than 1")
        clean.append(checked)
        gold.append(checked[token])
    if not any(gold):
        raise BadScores("all log-probabilities are exactly 0, as no model gives them")
    return ChosenScores(first, tuple(gold), tuple(clean), chosen_by, with_best)


def _listed(entry: Any) -> dict[int, Any]:
    """Ids and values of one position of vLLM's `prompt_logprobs`."""
    return {int(k): as_object(v).get("logprob") for k, v in as_object(entry).items() if k.isdecimal()}


def _logprob(value: Any) -> float | None:
    """A log-probability; −inf as such, or as the large negative number that stands for it in JSON."""
    if value == -math.inf:
        return -math.inf
    number = as_number(value)
    return None if number is None else -math.inf if number <= -9999.0 else number


def _same_count(entries: Sequence[Any], tokens: Sequence[int]) -> None:
    if len(entries) != len(tokens):
        raise BadScores(
            f"the prompt has {len(tokens)} tokens, but {len(entries)} log-probabilities came back"
        )


def token_id(name: str) -> int | None:
    """`token_id:123` is token 123; a text names no id."""
    kind, _, number = name.partition(":")
    return as_count(int(number)) if kind == "token_id" and number.isdecimal() else None


def _array(value: Any, shape: tuple[int, int]) -> Any:
    """The numpy file that an answer holds as base64, of the given shape."""
    import numpy as np

    if not isinstance(value, str):
        raise BadScores("the server ignores prompt_logprob_token_ids: its answer holds no scores")
    try:
        array = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, binascii.Error) as error:
        raise BadScores(f"the scores of the given ids cannot be read: {error}") from error
    if array.shape != shape or array.dtype.kind != "f":
        raise BadScores(f"scores of shape {shape} were asked for, {array.shape} came back")
    return array
