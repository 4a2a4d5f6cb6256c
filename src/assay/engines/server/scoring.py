"""Log-probabilities of given tokens, by each of the routes that servers have for it.

Every route asks for the target tokens and no more of the distribution than is wanted, and checks
what came back: a server that takes the request and ignores what it asks for must be found out, or
its silence would turn into a score at chance level.
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

from assay.engines import Request, TokenScores
from assay.engines.scoring import GreedyStep
from assay.engines.server.http import (
    BadScores,
    NotFound,
    NotJson,
    RequestRefused,
    Transport,
    Unauthorized,
)
from assay.engines.server.messages import as_count, as_number, as_object, as_text

Source = str | tuple[int, ...]

_ROUNDING = 1e-3
"""How far above 0 a log-probability, or above 1 a sum of probabilities, may lie before it is no
rounding error any more.
"""


# The tokens of prompts: by what servers have to ask for them.


@dataclass(frozen=True)
class PromptScores:
    """What a server said of one prompt, as it said it: each token's log-probability, and the
    likeliest ids at each.
    """

    values: Sequence[Any]
    likely: Sequence[Mapping[int, Any]]
    ids: tuple[int, ...] | None


PromptRoute = Callable[[Transport, str, Sequence[Source], int], list[PromptScores]]
"""Scores several prompts in one request, with so many of the likeliest ids at each token."""


def by_prompt_logprobs(
    transport: Transport, model: str, sources: Sequence[Source], width: int = 0
) -> list[PromptScores]:
    """vLLM: completions with `prompt_logprobs`, which 0 asks for without alternatives."""
    fields = {"prompt_logprobs": width, "return_token_ids": True}
    found = []
    for choice, source in zip(_complete(transport, model, sources, fields), sources, strict=True):
        entries = choice.get("prompt_logprobs")
        if not isinstance(entries, list):
            raise BadScores("the server ignores prompt_logprobs: its answer holds none")
        ids = source if isinstance(source, tuple) else _ids(choice.get("prompt_token_ids"))
        if ids is not None:
            _same_count(len(ids), len(entries))
        likely = [_listed(entry) for entry in entries]
        if ids is not None:
            values = [row.get(token) for row, token in zip(likely, ids, strict=True)]
        else:
            values = [next(iter(row.values())) if len(row) == 1 else None for row in likely]
        found.append(PromptScores(values, likely, ids))
    return found


def by_echo(
    transport: Transport, model: str, sources: Sequence[Source], width: int = 0
) -> list[PromptScores]:
    """The legacy completions API: prompts echoed with their `logprobs`, and one generated token to
    cut off.
    """
    fields: dict[str, Any] = {"echo": True, "logprobs": max(1, width)}
    if width:
        fields["return_tokens_as_token_ids"] = True
    found = []
    for choice, source in zip(_complete(transport, model, sources, fields), sources, strict=True):
        held = as_object(choice.get("logprobs"))
        values, offsets, top = (
            held.get(k) for k in ("token_logprobs", "text_offset", "top_logprobs")
        )
        if not isinstance(values, list):
            raise BadScores(
                "the server ignores echo with logprobs: its answer holds no token_logprobs"
            )
        if isinstance(source, tuple):
            count = len(source)
        elif not as_text(choice.get("text")).startswith(source):
            raise BadScores("the server ignores echo: its answer does not begin with the prompt")
        elif isinstance(offsets, list) and len(offsets) == len(values):
            count = sum(1 for offset in offsets if (as_count(offset) or 0) < len(source))
        else:
            count = len(values) - 1
        _same_count(count, min(count, len(values)))
        named = top if isinstance(top, list) and len(top) >= count else [{}] * count
        likely = [
            {key: v for name, v in as_object(row).items() if (key := token_id(name)) is not None}
            for row in named[:count]
        ]
        ids = source if isinstance(source, tuple) else None
        found.append(PromptScores(values[:count], likely, ids))
    return found


def by_sglang(
    transport: Transport, model: str, sources: Sequence[Source], width: int = 0
) -> list[PromptScores]:
    """SGLang's native route: `/generate` with `input_token_logprobs` from the first token on.

    It can score given ids too, but one set for the whole prompt, which for ids chosen at each
    position would be thousands of ids at thousands of positions.
    """
    answers = []
    for source in sources:
        answer = transport.post_json(
            transport.endpoint.root + "/generate",
            {
                **({"text": source} if isinstance(source, str) else {"input_ids": list(source)}),
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
                **({"top_logprobs_num": width} if width else {}),
            },
        )
        answers.append(as_object(as_object(answer).get("meta_info")))
    found = []
    for meta, source in zip(answers, sources, strict=True):
        rows, top = meta.get("input_token_logprobs"), meta.get("input_top_logprobs")
        if not isinstance(rows, list) or not all(
            isinstance(row, list) and len(row) >= 2 for row in rows
        ):
            raise BadScores(
                "the server ignores return_logprob: its answer holds no input_token_logprobs"
            )
        if width and not (isinstance(top, list) and len(top) == len(rows)):
            raise BadScores(
                "the server ignores top_logprobs_num: its answer holds no input_top_logprobs"
            )
        ids = _ids([row[1] for row in rows])
        if isinstance(source, tuple) and ids != source:
            raise BadScores(f"{len(source)} tokens were sent, but the scores are those of others")
        likely = [
            {int(k): v for v, k, *_ in best or ()}
            for best in (top if width and top else [()] * len(rows))
        ]
        found.append(PromptScores([row[0] for row in rows], likely, ids))
    return found


def by_steps(transport: Transport, ids: Sequence[int]) -> list[float]:
    """Log-probabilities of the tokens of a row after its first, from llama.cpp's server, which
    scores no prompts.

    One request a token: the row up to it is the prompt, which the server has cached but for its
    end, and a bias on the token makes the server write it; the log-probability that is told is that
    of the model, before the bias.
    """
    url, found = transport.endpoint.root + "/completion", list[float]()
    for at in range(1, len(ids)):
        body = {
            "prompt": list(ids[:at]),
            "n_predict": 1,
            "n_probs": 1,
            "temperature": 0.0,
            "cache_prompt": True,
            "logit_bias": [[ids[at], 1000.0]],
            "samplers": ["temperature"],
        }
        rows = as_object(transport.post_json(url, body)).get("completion_probabilities")
        entry = as_object(rows[0] if isinstance(rows, list) and rows else None)
        value = as_number(entry.get("logprob"))
        if entry.get("id") != ids[at] or value is None or value > _ROUNDING:
            raise BadScores(
                "the server does not write a token that it is made to write, or does not say how"
                " likely it was"
            )
        found.append(value)
    return found


def score_prompts(
    transport: Transport, model: str, sources: Sequence[Source], route: PromptRoute
) -> list[TokenScores]:
    """Scores of the tokens of every source, in one request where the server answers each of them,
    else one by one.
    """
    try:
        found = route(transport, model, sources, 0)
    except (RequestRefused, BadScores, NotJson):
        if len(sources) == 1:
            raise
        found = [route(transport, model, [source], 0)[0] for source in sources]
    return [
        TokenScores(
            _checked(scores.values),
            len(scores.values),
            len(source.encode("utf-8", "replace")) if isinstance(source, str) else None,
            scores.ids,
        )
        for scores, source in zip(found, sources, strict=True)
    ]


def _complete(
    transport: Transport, model: str, sources: Sequence[Source], fields: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The choices of greedy completions of one token, a source each; an empty one where the only
    source has none.
    """
    prompts = [source if isinstance(source, str) else list(source) for source in sources]
    body = {
        "model": model,
        "prompt": prompts[0] if len(prompts) == 1 else prompts,
        "max_tokens": 1,
        "temperature": 0.0,
        **fields,
    }
    answer = as_object(transport.post_json(transport.endpoint.api + "/completions", body))
    choices = answer.get("choices")
    by_index = (
        {as_count(c.get("index", 0)): c for c in choices if isinstance(c, dict)}
        if isinstance(choices, list)
        else {}
    )
    if len(sources) > 1 and len(by_index) != len(sources):
        raise BadScores(f"{len(sources)} prompts were sent, {len(by_index)} answers came back")
    return [as_object(by_index.get(i)) for i in range(len(sources))]


def _checked(values: Sequence[Any]) -> tuple[float | None, ...]:
    """`values` with the first one dropped, which nothing precedes; raises unless they can be
    log-probabilities.
    """
    if len(values) < 2:
        raise BadScores("a text of at least two tokens is needed to score anything")
    numbers = [as_number(value) for value in values[1:]]
    finite = [n for n in numbers if n is not None]
    if len(finite) < len(numbers):
        raise BadScores(
            f"{len(numbers) - len(finite)} of {len(numbers)} log-probabilities are no finite"
            " numbers"
        )
    if max(finite) > _ROUNDING:
        raise BadScores(f"a log-probability of {max(finite):.3g} is above 0")
    if not any(finite):
        raise BadScores("all log-probabilities are exactly 0, as no model gives them")
    return (None, *finite)


def _ids(values: Any) -> tuple[int, ...] | None:
    ids = [as_count(value) for value in values] if isinstance(values, list) else [None]
    return tuple(i for i in ids if i is not None) if None not in ids else None


def _listed(entry: Any) -> dict[int, Any]:
    """Ids and values of one position of vLLM's `prompt_logprobs`."""
    return {int(k): as_object(v).get("logprob") for k, v in as_object(entry).items() if _is_id(k)}


def _same_count(tokens: int, values: int) -> None:
    if tokens != values:
        raise BadScores(f"the prompt has {tokens} tokens, but {values} log-probabilities came back")


def token_id(name: str) -> int | None:
    """`token_id:123` is token 123; a text names no id."""
    kind, _, number = name.partition(":")
    return int(number) if kind == "token_id" and _is_id(number) else None


def _is_id(text: str) -> bool:
    """Whether `text` writes a token id; Python refuses to read thousands of digits."""
    return text.isascii() and text.isdecimal() and len(text) < 12


# The k likeliest ids beside each token of a prompt: what a server can give of a distribution.
#
# With them a comparison can bound KL from below: ids that were scored on both sides stand for
# themselves, all others are one bucket, and lumping never increases KL (the data-processing
# inequality). That holds for any choice of ids; the bound is tightest where the reference chooses,
# as its likely tokens carry most of the sum.


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
    _same_count(len(tokens), len(own))
    both = [
        (token, _listed(entry) | row)
        for (token, row), entry in zip(given, own[first:], strict=True)
    ]
    return _topk(first, both, "reference", with_best=all(map(_listed, own[first:])))


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
            max(checked.values()) > _ROUNDING
            or math.fsum(map(math.exp, checked.values())) > 1 + _ROUNDING
        ):
            raise BadScores(f"the probabilities at position {first + i} sum to more than 1")
        clean.append(checked)
    target = tuple(row[token] for (token, _), row in zip(rows, clean, strict=True))
    if not any(target):
        raise BadScores("all log-probabilities are exactly 0, as no model gives them")
    return TopkLogprobs(first, target, tuple(clean), chosen_by, with_best)


def _logprob(value: Any) -> float | None:
    """A log-probability; −inf as such, or as the large negative number that stands for it in JSON."""
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


# Greedy continuations, with the two likeliest tokens at each step.


def greedy_request(prefix: tuple[int, ...], count: int) -> Request:
    """The request for `count` greedy tokens, each with the likeliest ids, named by number."""
    return Request(
        prompt=prefix,
        max_tokens=count,
        ignore_eos=True,
        extra={"logprobs": 2, "return_tokens_as_token_ids": True},
    )


def read_greedy(choice: Mapping[str, Any], count: int) -> list[GreedyStep]:
    """The steps in an answer to it; BadScores where they are not there, or not named by number."""
    held = as_object(choice.get("logprobs"))
    tokens, tops = held.get("tokens"), held.get("top_logprobs")
    if not (
        isinstance(tokens, list) and isinstance(tops, list) and len(tokens) == len(tops) == count
    ):
        raise BadScores(
            f"{count} greedy tokens with their likeliest ids were asked for, others came back"
        )
    steps = []
    for name, top in zip(tokens, tops, strict=True):
        token = token_id(name) if isinstance(name, str) else None
        values = {token_id(k): as_number(v) for k, v in as_object(top).items()}
        found = {k: v for k, v in values.items() if k is not None and v is not None}
        if token is None or token not in found or len(found) < 2:
            raise BadScores("the server does not name its likeliest tokens by id")
        runner_up = max((k for k in found if k != token), key=lambda k: found[k])
        steps.append(GreedyStep(token, runner_up, found[token], found[runner_up]))
    return steps


# The likeliest tokens at each step of an answer, by their text: what every server with logprobs can
# give.


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
