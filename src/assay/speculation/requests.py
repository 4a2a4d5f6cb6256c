"""Requests of our own: known traffic, so that what others send shows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from assay.engines.server import ServerEngine

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
    """Requests that were answered, and the completion tokens that the server says it sent for them."""

    requests: int
    tokens: int


def send(engine: ServerEngine, requests: int, concurrency: int = 2) -> Sent:
    """Send greedy requests over prose and code, and count the tokens that come back."""
    from assay.engines.base import Request

    wanted = [
        Request(prompt=PROMPTS[i % len(PROMPTS)], max_tokens=MAX_TOKENS, seed=i) for i in range(requests)
    ]
    with ThreadPoolExecutor(concurrency) as pool:
        replies = list(pool.map(engine.generate, wanted))
    return Sent(len(replies), sum(r.completion_tokens or 0 for r in replies))
