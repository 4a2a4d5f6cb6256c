"""What the tests of watch share: clocks that are set by hand, a stub that scores as a model does,
replayed rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from assay.monitor.canary import Budget, Canary, Round, State
from assay.monitor.loop import Watch
from assay.monitor.options import WatchOptions
from stub_server import Exchange, StubServer, healthy


@dataclass
class Clock:
    """Seconds that pass only when somebody sleeps."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds


@dataclass
class model(healthy):
    """A stub that answers as one model does: every token of a prompt costs `nats`, greedy tokens
    depend on the prompt.
    """

    nats: float = 3.0
    word: str = ""
    calls: bool = True

    def __call__(self, e: Exchange) -> None:
        self.chunks = (self.word or f" word{len(str(e.body.get('prompt')))}",)
        super().__call__(e)

    def _completion_logprobs(self, e: Exchange, prompt: Any, choice: dict[str, Any]) -> None:
        super()._completion_logprobs(e, prompt, choice)
        for entry in choice.get("prompt_logprobs") or ():
            for value in (entry or {}).values():
                value["logprob"] = -self.nats
        if held := choice.get("logprobs"):
            held["token_logprobs"] = [None if v is None else -0.1 for v in held["token_logprobs"]]


def serve(stub: StubServer, **fields: Any) -> None:
    """Make the stub answer as `model(**fields)`, on both routes."""
    stub.on("POST /v1/completions", model(**fields)).on(
        "POST /v1/chat/completions", model(**fields)
    )


def watch_of(
    url: str, clock: Clock | None = None, said: list[str] | None = None, **options: Any
) -> Watch:
    """A watch with a clock of its own, whose canary asks `url`."""
    clock = clock or Clock()
    given = WatchOptions.of({"listen": "none", **options})
    canary = Canary(
        url,
        model=given.model,
        timeout=given.timeout,
        interval_s=given.interval,
        load=given.load,
        clock=clock,
    )
    lines: Callable[[str], None] = said.append if said is not None else lambda line: None
    return Watch(url, given, canary, say=lines, clock=clock, wall=lambda: 1.8e9 + clock())


def asked(watch: Watch, rounds: int) -> list[State]:
    """The states of so many rounds, a minute apart."""
    states = []
    for _ in range(rounds):
        states.append(watch.step().state)
        watch.clock.sleep(watch.wait())  # type: ignore[attr-defined]
    return states


def impatient(watch: Watch, seconds: float = 2.0) -> None:
    """From now on the open connection waits so long only; a server that is connected to anew is
    waited for as before.
    """
    engine = watch.canary.engine
    assert engine is not None
    limits = engine._transport.limits
    engine._transport.limits = replace(
        limits, connect_s=seconds, silence_s=seconds, total_s=seconds
    )


class Replayed:
    """A canary that asks nobody: scores with noise around fixed values."""

    def __init__(self, clock: Clock, noise: float = 0.0003, seed: int = 0) -> None:
        self.clock, self.noise, self.shift = clock, noise, 0.0
        self.budget = Budget(0.01, 6.0)
        self.rng = random.Random(seed)
        self.n = 0

    def round(self) -> Round:
        self.n += 1
        items = [(2 * self.n + i) % 12 for i in range(2)]
        found = Round(model="m", version="vllm 0.32.0", latency_s=0.1, cost_s=0.3, requests=8)
        found.bits = {
            f"p{i:02d}": 0.8 + i / 50 + self.shift + self.rng.gauss(0, self.noise) for i in items
        }
        found.tokens = {f"t{i:02d}": "x" for i in items}
        found.tools = {"tool": "right"}
        self.budget.spend(found.cost_s, self.clock())
        return found

    def wait(self) -> float:
        return 60.0

    def close(self) -> None:
        pass
