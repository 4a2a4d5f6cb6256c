"""Greedy continuations from a server, with the two likeliest tokens at each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.engines import Request
from assay.engines.scoring import GreedyStep
from assay.engines.server.errors import BadScores
from assay.engines.server.fields import as_number, as_object
from assay.engines.server.prompt_scores import token_id


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
