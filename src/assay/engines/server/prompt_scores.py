"""Log-probabilities of the tokens of a prompt, by each route that a kind of server offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.engines import TokenScores
from assay.engines.server.errors import BadScores, NotJson, RequestRefused
from assay.engines.server.fields import as_count, as_number, as_object, as_text
from assay.engines.server.http import Transport

Source = str | tuple[int, ...]


ROUNDING = 1e-3
"""How far above 0 a log-probability, or above 1 a sum of probabilities, may lie before it is no
rounding error any more.
"""


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
            require_same_count(len(ids), len(entries))
        likely = [listed(entry) for entry in entries]
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
        require_same_count(count, min(count, len(values)))
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
        if entry.get("id") != ids[at] or value is None or value > ROUNDING:
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
    if max(finite) > ROUNDING:
        raise BadScores(f"a log-probability of {max(finite):.3g} is above 0")
    if not any(finite):
        raise BadScores("all log-probabilities are exactly 0, as no model gives them")
    return (None, *finite)


def _ids(values: Any) -> tuple[int, ...] | None:
    ids = [as_count(value) for value in values] if isinstance(values, list) else [None]
    return tuple(i for i in ids if i is not None) if None not in ids else None


def listed(entry: Any) -> dict[int, Any]:
    """Ids and values of one position of vLLM's `prompt_logprobs`."""
    return {int(k): as_object(v).get("logprob") for k, v in as_object(entry).items() if is_id(k)}


def require_same_count(tokens: int, values: int) -> None:
    """BadScores unless every token of a prompt has a value."""
    if tokens != values:
        raise BadScores(f"the prompt has {tokens} tokens, but {values} log-probabilities came back")


def token_id(name: str) -> int | None:
    """`token_id:123` is token 123; a text names no id."""
    kind, _, number = name.partition(":")
    return int(number) if kind == "token_id" and is_id(number) else None


def is_id(text: str) -> bool:
    """Whether `text` writes a token id; Python refuses to read thousands of digits."""
    return text.isascii() and text.isdecimal() and len(text) < 12
