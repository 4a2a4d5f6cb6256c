"""Log-probabilities of given tokens, by each of the routes that servers have for it.

Every route checks what came back: a server that takes the request and ignores what it asks for must be found out,
or its silence would turn into a score at chance level.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from assay.engines.base import Request, TokenScores
from assay.engines.scoring import GreedyStep, ScoreJob, Window
from assay.engines.server.errors import BadScores, NotFound, RequestRefused, Unauthorized
from assay.engines.server.http import Transport
from assay.engines.server.messages import as_count, as_number, as_object, as_text, first_choice

Source = str | tuple[int, ...]
ScoreRoute = Callable[[Transport, str, Source], TokenScores]

_ROUNDING = 1e-3
"""How far above 0 a log-probability may lie before it is no rounding error any more."""


def by_prompt_logprobs(transport: Transport, model: str, source: Source) -> TokenScores:
    """vLLM: a completion with `prompt_logprobs`, which 0 asks for without alternatives."""
    choice = complete(transport, model, source, {"prompt_logprobs": 0, "return_token_ids": True})
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list):
        raise BadScores("the server ignores prompt_logprobs: its answer holds none")
    ids = source if isinstance(source, tuple) else _ids(choice.get("prompt_token_ids"))
    if ids is not None and len(ids) != len(entries):
        raise BadScores(f"the prompt has {len(ids)} tokens, but {len(entries)} log-probabilities came back")
    values = [_entry(as_object(entry), ids[i] if ids else None) for i, entry in enumerate(entries)]
    return TokenScores(_checked(values), len(values), _bytes(source), ids)


def by_echo(transport: Transport, model: str, source: Source) -> TokenScores:
    """The legacy completions API: the prompt echoed with its `logprobs`, and one generated token to cut off."""
    choice = complete(transport, model, source, {"echo": True, "logprobs": 1})
    held = as_object(choice.get("logprobs"))
    values, offsets = held.get("token_logprobs"), held.get("text_offset")
    if not isinstance(values, list):
        raise BadScores("the server ignores echo with logprobs: its answer holds no token_logprobs")
    if isinstance(source, tuple):
        count = len(source)
    elif not as_text(choice.get("text")).startswith(source):
        raise BadScores("the server ignores echo: its answer does not begin with the prompt")
    elif isinstance(offsets, list) and len(offsets) == len(values):
        count = sum(1 for offset in offsets if (as_count(offset) or 0) < len(source))
    else:
        count = len(values) - 1
    if len(values) < count:
        raise BadScores(f"the prompt has {count} tokens, but {len(values)} log-probabilities came back")
    return TokenScores(
        _checked(values[:count]), count, _bytes(source), source if isinstance(source, tuple) else None
    )


def by_sglang(transport: Transport, model: str, source: Source) -> TokenScores:
    """SGLang's native route: `/generate` with `input_token_logprobs` from the first token on."""
    rows = sglang_meta(transport, source).get("input_token_logprobs")
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) >= 2 for row in rows):
        raise BadScores("the server ignores return_logprob: its answer holds no input_token_logprobs")
    ids = _ids([row[1] for row in rows])
    if isinstance(source, tuple) and ids != source:
        raise BadScores(f"{len(source)} tokens were sent, but the scores are those of others")
    return TokenScores(_checked([row[0] for row in rows]), len(rows), _bytes(source), ids)


def complete(
    transport: Transport, model: str, source: str | Sequence[int], fields: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The first choice of a greedy completion of one token, asked for with more `fields`; empty if there is none."""
    body = {
        "model": model,
        "prompt": source if isinstance(source, str) else list(source),
        "max_tokens": 1,
        "temperature": 0.0,
        **fields,
    }
    return first_choice(as_object(transport.post_json(transport.endpoint.api + "/completions", body))) or {}


def sglang_meta(transport: Transport, source: str | Sequence[int], **fields: Any) -> Mapping[str, Any]:
    """`meta_info` of SGLang's native route for one token after `source`, log-probabilities from its first token on."""
    answer = transport.post_json(
        transport.endpoint.root + "/generate",
        {
            **({"text": source} if isinstance(source, str) else {"input_ids": list(source)}),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            **fields,
        },
    )
    return as_object(as_object(answer).get("meta_info"))


def _entry(entry: Mapping[str, Any], token: int | None) -> Any:
    """The log-probability of the prompt's own token in one position of `prompt_logprobs`."""
    if token is not None:
        return as_object(entry.get(str(token))).get("logprob")
    return as_object(next(iter(entry.values()))).get("logprob") if len(entry) == 1 else None


def _checked(values: Sequence[Any]) -> tuple[float | None, ...]:
    """`values` with the first one dropped, which nothing precedes; raises unless they can be log-probabilities."""
    if len(values) < 2:
        raise BadScores("a text of at least two tokens is needed to score anything")
    numbers = [as_number(value) for value in values[1:]]
    finite = [n for n in numbers if n is not None]
    if len(finite) < len(numbers):
        raise BadScores(
            f"{len(numbers) - len(finite)} of {len(numbers)} log-probabilities are no finite numbers"
        )
    if max(finite) > _ROUNDING:
        raise BadScores(f"a log-probability of {max(finite):.3g} is above 0")
    if not any(finite):
        raise BadScores("all log-probabilities are exactly 0, as no model gives them")
    return (None, *finite)


def _ids(values: Any) -> tuple[int, ...] | None:
    ids = [as_count(value) for value in values] if isinstance(values, list) else [None]
    return tuple(i for i in ids if i is not None) if None not in ids else None


def _bytes(source: Source) -> int | None:
    return len(source.encode("utf-8", "replace")) if isinstance(source, str) else None


# -----------------------------------------------------------------------------
# Log-probabilities of a few chosen ids at every position of a prompt: what a server can give of a distribution.
#
# With them a comparison can bound KL from below: ids that were scored on both sides stand for themselves, all others
# are one bucket, and lumping never increases KL (the data-processing inequality). That holds for any choice of ids; the
# bound is tightest where the reference chooses, as its likely tokens carry most of the sum.

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


# -----------------------------------------------------------------------------
# Greedy continuations by a server, with the two likeliest tokens at each step.


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
    if not (isinstance(tokens, list) and isinstance(tops, list) and len(tokens) == len(tops) == count):
        raise BadScores(f"{count} greedy tokens with their likeliest ids were asked for, others came back")
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


# -----------------------------------------------------------------------------
# Engines that give log-probabilities of a few ids at each position and no distributions: what a comparison asks of them.


@runtime_checkable
class IdScorer(Protocol):
    """A candidate that can be bounded, but not measured over its whole vocabulary."""

    @property
    def ids(self) -> int:
        """How many ids are scored at each position, that of the token that came among them."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """Entries of its vocabulary, where it says so."""
        ...

    def describe(self) -> dict[str, Any]:
        """What scored: kind, version, model; plain JSON types, no path."""
        ...

    def require(self, job: ScoreJob, length: int) -> None:
        """AssayError with the reason where it cannot score windows of `length` tokens as `job` asks."""
        ...

    def score_ids(self, window: Window, chosen: Sequence[Sequence[int]], first: int) -> ChosenScores:
        """Log-probabilities at the tokens `first` … of a window, of the chosen ids or of its own likeliest."""
        ...

    def tokenize(self, text: str) -> Sequence[int]:
        """Token ids of a text, without special tokens; AssayError where it cannot."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; empty where it cannot tell."""
        ...

    def read_texts(self, ids: Sequence[int]) -> bool:
        """Get the texts of many single tokens at once, so that `decode` knows them; False where it cannot."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...
