"""Log-probabilities of given tokens, by each of the routes that servers have for it.

Every route checks what came back: a server that takes the request and ignores what it asks for must be found out,
or its silence would turn into a score at chance level.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from assay.engines.base import TokenScores
from assay.engines.server.errors import BadScores
from assay.engines.server.fields import as_count, as_number, as_object, as_text, first_choice
from assay.engines.server.transport import Transport

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
