"""Greedy requests of our own, and the speed of one server against another's."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.engines import Request
from assay.speculation.measured import Measured
from assay.stats import mean_interval

if TYPE_CHECKING:
    from assay.engines.server.engine import ServerEngine


PROMPTS: tuple[str, ...] = (
    "The lighthouse keeper had not spoken to anyone for three weeks when the boat finally",
    'def merge_sorted(left, right):\n    """Merge two sorted lists into one."""\n',
    "Rivers shape the land in two ways. First, they",
    "The recipe for a simple vegetable soup begins with",
    'class Stack:\n    """A stack backed by a list."""\n\n    def __init__(self):\n',
    "In the spring of that year the town council decided to",
    "To explain why the sky is blue, one has to start with",
    "SELECT customers.name, SUM(orders.total)\nFROM customers\n",
)

MAX_TOKENS = 128


@dataclass(frozen=True)
class Sent:
    """Requests that were answered, and the completion tokens that the server says it sent
    for them.
    """

    requests: int
    tokens: int


def send(engine: ServerEngine, requests: int, concurrency: int = 2, first: int = 0) -> Sent:
    """Send greedy requests over prose and code, and count the tokens that come back."""
    numbers = range(first, first + requests)
    wanted = [
        Request(prompt=PROMPTS[i % len(PROMPTS)], max_tokens=MAX_TOKENS, seed=i) for i in numbers
    ]
    with ThreadPoolExecutor(concurrency) as pool:
        replies = list(pool.map(engine.generate, wanted))
    return Sent(len(replies), sum(r.completion_tokens or 0 for r in replies))


def race(engine: ServerEngine, rival: ServerEngine, requests: int) -> tuple[Sent, Measured]:
    """The speed of `engine` over that of `rival` for the same requests, asked in turn, so that each
    round's quotient is taken under one load; with Student's interval over the rounds' logarithms.
    The first round warms both up.
    """
    sent = send(engine, 2)
    send(rival, 2)
    logs = []
    for round_ in range(max(2, requests // 2)):
        paces = {}
        for own in (engine, rival) if round_ % 2 else (rival, engine):
            began = time.perf_counter()
            got = send(own, 2, first=2 * round_)
            paces[own] = max(got.tokens, 1) / max(time.perf_counter() - began, 1e-9)
            if own is engine:
                sent = Sent(sent.requests + got.requests, sent.tokens + got.tokens)
        logs.append(math.log(paces[engine] / paces[rival]))
    interval = mean_interval(logs)
    return sent, Measured(math.exp(interval.value), math.exp(interval.lo), math.exp(interval.hi))
