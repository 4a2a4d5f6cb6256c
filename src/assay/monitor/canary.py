"""One round of probes at a serving process: scored texts, greedy tokens, one short text, one tool
call, its counters.

A round never raises for what a server sends: the round says what it was. It asks for as much as a
budget of server time allows, and never more.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from statistics import median
from typing import Any, TypeVar

from assay.coherence.conversation import user
from assay.coherence.grading import grade
from assay.coherence.passages import passages
from assay.coherence.tools import answer_of, cases
from assay.engines import Capability, Reply, Request
from assay.engines.server.engine import ServerEngine
from assay.engines.server.http import Limits
from assay.engines.server.metrics import Metrics, parse_metrics
from assay.engines.server.wording import one_line
from assay.errors import AssayError, UsageError
from assay.monitor.change import LEARN, typical
from assay.speculation.health import Assessment, assess
from assay.speculation.live import ENOUGH_DRAFTS, between

T = TypeVar("T")

TEXT_TOKENS = 16
MOST_CHARS = 200
"""Most of an answer that is kept: none may fill the memory or the disk of a watch that runs for
months.
"""
GARBAGE_BITS = 3.0
"""Bits per byte of plain English at which a model predicts nothing: letters drawn at random cost
about 4.7.
"""
_TEXT = "Name three kinds of fruit and say in one sentence why people like each of them."
_COMPLETED = "Three kinds of fruit that many people like are"
_CHARS = 420
"""Characters of each fixed text that is scored: about a hundred tokens."""
_LIKELY = (
    "The capital of France is the city of",
    "One, two, three, four, five, six,",
    "Monday, Tuesday, Wednesday, Thursday,",
    "January, February, March, April, May,",
    "def add(a, b):\n    return a",
    "Roses are red, violets are",
    "The sun rises in the east and sets in the",
    "for i in range(10):\n    print(",
    "Once upon a",
    "10 + 10 = 20, 20 + 20 =",
    "A, B, C, D, E, F,",
    "The opposite of hot is",
)
_QUEUED = ("vllm:num_requests_waiting", "llamacpp:requests_deferred", "sglang:num_queue_reqs")
_RUNNING = ("vllm:num_requests_running", "llamacpp:requests_processing", "sglang:num_running_reqs")
_WRITTEN = (
    "vllm:generation_tokens_total",
    "llamacpp:tokens_predicted_total",
    "sglang:generation_tokens_total",
)
TRIES = 5
"""Times that a server is asked anew what it can do, where a time-out left that open."""
STILL = 3
"""Rounds without an answer while no token is written that make a busy server a hung one."""
SILENT = 10
"""The same where the server counts no tokens."""


class State(StrEnum):
    """What a round met."""

    OK = "ok"
    BUSY = "busy"
    """It lives and is at work, and had no time for the canary, or kept it waiting."""
    BROKEN = "broken"
    """It answers, and what it answers is garbage or an error; or it hangs."""
    DOWN = "down"
    """Nothing answers."""


@dataclass
class Round:
    """What one round measured. Values are by item; `cost_s` is the time of the server that the
    requests took.
    """

    state: State = State.OK
    reason: str = ""
    bits: dict[str, float] = field(default_factory=dict)
    """Bits per byte of the scored texts."""
    token_bits: dict[str, float] = field(default_factory=dict)
    """Bits of the greedy first tokens."""
    tokens: dict[str, str] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    label: str = ""
    """Label of the short text, as `assay grade` gives it; empty where it was not asked for."""
    head: str = ""
    latency_s: float | None = None
    """Median seconds until a first token."""
    cost_s: float = 0.0
    requests: int = 0
    queued: float | None = None
    running: float | None = None
    written: float | None = None
    """Tokens that the server has written since it started."""
    started: float | None = None
    """When the server's process began, where its metrics say so."""
    model: str = ""
    root: str = ""
    """What the server loaded under the model's name, where it says so."""
    listed: tuple[str, ...] = ()
    version: str = ""
    speculation: Assessment | None = None


@dataclass
class Budget:
    """Server time for the canary: a share of the time that passes, saved up for at most `saved_s`
    seconds.
    """

    load: float
    saved_s: float
    left: float = 0.0
    costs: dict[str, deque[float]] = field(default_factory=dict)
    spent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=240))
    """When and how much the last rounds took."""

    def earn(self, seconds: float) -> None:
        """Time passed. A clock that jumps gives no more than what may be saved up."""
        if seconds > 0:
            self.left = min(self.saved_s, self.left + self.load * seconds)

    def expected(self, kinds: Sequence[str]) -> float:
        """Seconds that requests of these kinds usually take."""
        return sum(typical(self.costs[k]) for k in kinds if k in self.costs)

    def took(self, kind: str, seconds: float) -> float:
        """Note the cost of a request; what is charged for it, which other people's load does not
        raise.
        """
        self.costs.setdefault(kind, deque(maxlen=20)).append(seconds)
        return min(seconds, typical(self.costs[kind]))

    def spend(self, seconds: float, now: float) -> None:
        """Charge for a round."""
        self.left -= seconds
        self.spent.append((now, seconds))

    def wait(self, needed: float) -> float:
        """Seconds until `needed` can be paid for."""
        return max(0.0, (min(needed, self.saved_s) - self.left) / self.load)

    def measured(self, now: float) -> float | None:
        """Share of the time since the oldest of the last rounds that the canary's requests took of
        the server.
        """
        if len(self.spent) < 2 or now <= self.spent[0][0]:
            return None
        return sum(cost for _, cost in list(self.spent)[1:]) / (now - self.spent[0][0])


class Canary:
    """Asks the rounds. `clock` gives seconds that never go back."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key_env: str | None = None,
        timeout: float = 20.0,
        interval_s: float = 60.0,
        load: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url, self.clock, self.interval_s = url, clock, interval_s
        self._connect = partial(
            ServerEngine.connect,
            url,
            api_key_env=api_key_env,
            limits=Limits(
                connect_s=min(5.0, timeout),
                silence_s=timeout,
                total_s=timeout,
                max_bytes=8 << 20,
                retries=0,
            ),
        )
        self.budget = Budget(load, saved_s=10 * load * interval_s)
        self.engine: ServerEngine | None = None
        self.named, self.watched = model, ""
        """The model that the user named; else that of the baseline, which is asked as long as the
        server lists it.
        """
        self._turn = 0
        self._asked: dict[str, list[int]] = {}
        self._when: dict[str, list[int]] = {}
        self._round: set[tuple[str, int]] = set()
        self._still = 0
        self._again, self._tries = False, 0
        self._before: Round | None = None
        self._page = ("", 0.0)
        self._last = clock()

    @property
    def scores(self) -> bool:
        """Whether the server can score texts; only known once it has answered."""
        return self.engine is not None and Capability.SCORE in self.engine.capabilities

    def wait(self) -> float:
        """Seconds until the next round: the interval, or longer where the least round would take
        more than its share.
        """
        return max(self.interval_s, self.budget.wait(self.budget.expected(self._least())))

    def close(self) -> None:
        """Close the connections."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def round(self) -> Round:
        """Ask one round; the round's state tells what the server did."""
        now = self.clock()
        self.budget.earn(now - self._last)
        self._last = now
        self._round.clear()
        found = Round()
        try:
            self._ask(found)
        except UsageError:
            raise
        except AssayError as error:
            self._failed(found, error)
        except Exception as error:  # what a server sends must not end the watch
            found.state = State.BROKEN
            found.reason = (
                f"its answer cannot be read: {type(error).__name__}: {one_line(str(error))}"
            )
        if found.state is State.OK:
            self._still = 0
        self.budget.spend(found.cost_s, self.clock())
        self._before = found
        return found

    def _ask(self, found: Round) -> None:
        if self.engine is None:
            engine = self._found()
            try:
                unfinished = engine.capabilities.unfinished  # about a dozen tiny requests, once
            except BaseException:
                engine.close()
                raise
            self.engine = engine
            # A server that was busy when it was asked what it can do is asked again, a few times.
            self._again = bool(unfinished) and self._tries < TRIES
            self._tries += 1
        engine = self.engine
        found.model = one_line(engine.model, MOST_CHARS)
        found.version = one_line(
            f"{engine.identity.kind} {engine.identity.version or ''}", MOST_CHARS
        )
        cards = engine.cards()[:1000]
        found.listed = tuple(one_line(card.id, MOST_CHARS) for card in cards)
        roots = (card.root for card in cards if card.id == engine.model and card.root)
        found.root = one_line(next(roots, ""), MOST_CHARS)
        self._counters(found, engine)
        latencies = []
        for kind in self._chosen():
            began = self.clock()
            self._kinds()[kind](found, engine)
            took = self.clock() - began
            found.requests += 1
            found.cost_s += self.budget.took(kind, took)
            if kind == "token":
                latencies.append(took)
        if latencies:
            found.latency_s = median(latencies)
        self._judge(found)
        if self._again:
            self.close()

    def _found(self) -> ServerEngine:
        """Connect to the model that is watched, or to the first one where it is no longer
        listed.
        """
        engine = self._connect(model=self.named)
        if self.named or engine.model == self.watched or self.watched not in engine.listed():
            return engine
        engine.close()
        return self._connect(model=self.watched)

    # What is asked.

    def _kinds(self) -> Mapping[str, Callable[[Round, ServerEngine], None]]:
        return {"text": self._text, "score": self._score, "token": self._token, "tool": self._tool}

    def _least(self) -> list[str]:
        """The requests of every round: they show a garbage server at once."""
        return ["text", "token", "token", "token", *(["score"] if self.scores else [])]

    def _chosen(self) -> list[str]:
        """The least round, and what the budget allows beyond it."""
        chosen = self._least()
        left = self.budget.left - self.budget.expected(chosen)
        tools = self.engine is not None and Capability.TOOLS in self.engine.capabilities
        extras = [
            *(["tool"] if tools else []),
            *(["score"] * 3 if self.scores else []),
            *["token"] * 5,
        ]
        for kind in extras:
            # A kind whose cost is not known yet is asked once, for the budget to learn it.
            cost = self.budget.expected([kind])
            if cost <= left and (kind in self.budget.costs or kind not in chosen):
                chosen.append(kind)
                left -= cost
        return chosen

    def _next(self, kind: str, count: int) -> int:
        """Which of `count` items of a kind to ask now, each once a round.

        Half of the requests go to the first item that was not asked `LEARN` times yet, so that a
        first baseline is there after a few rounds; the others to the item that was asked longest
        ago, so that what is learnt is watched meanwhile.
        """
        asked = self._asked.setdefault(kind, [0] * count)
        last = self._when.setdefault(kind, [0] * count)
        self._turn += 1
        left = [i for i in range(count) if (kind, i) not in self._round] or list(range(count))
        fresh = [i for i in left if asked[i] < LEARN]
        known = [i for i in left if asked[i] >= LEARN]
        index = (
            fresh[0]
            if fresh and (sum(asked) % 2 or not known)
            else min(known, key=last.__getitem__)
        )
        asked[index] += 1
        last[index] = self._turn
        self._round.add((kind, index))
        return index

    def _extra(self, engine: ServerEngine, chat: bool) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if Capability.LOGPROBS in engine.capabilities:
            extra["logprobs"] = True if chat else 1
        if engine.identity.kind == "llama.cpp":
            # A prompt that is still in its cache would not be computed again.
            extra["cache_prompt"] = False
        return extra

    def _request(self, engine: ServerEngine, prompt: str, tokens: int, asked: str = "") -> Request:
        """A greedy request for the continuation of `prompt`, or of the chat question `asked` where
        it has no completions.
        """
        if Capability.COMPLETIONS in engine.capabilities:
            return Request(
                prompt=prompt, max_tokens=tokens, seed=0, extra=self._extra(engine, False)
            )
        question = asked or f"Continue this text, without repeating it: {prompt}"
        return Request(
            messages=(user(question),), max_tokens=tokens, seed=0, extra=self._extra(engine, True)
        )

    def _token(self, found: Round, engine: ServerEngine) -> None:
        """One greedy token: after a text that has one likely continuation, or in the middle of
        prose, in turn.
        """
        middles = [text[:160].rpartition(" ")[0] for text in passages()]
        prompts = [p for pair in zip(_LIKELY, middles, strict=True) for p in pair]
        index = self._next("token", len(prompts))
        reply = engine.generate(self._request(engine, prompts[index], 1))
        name = f"t{index:02d}"
        logprob = reply.token_logprobs[0] if reply.token_logprobs else None
        if logprob is not None and math.isfinite(logprob):
            found.token_bits[name] = -logprob / math.log(2.0)
        # A token less likely than all others together may give way to a rounding error.
        if logprob is None or logprob > math.log(0.5):
            found.tokens[name] = _said(reply)[:MOST_CHARS]

    def _text(self, found: Round, engine: ServerEngine) -> None:
        if Capability.CHAT in engine.capabilities:
            request = Request(
                messages=(user(_TEXT),),
                max_tokens=TEXT_TOKENS,
                seed=0,
                extra=self._extra(engine, True),
            )
        else:
            request = self._request(engine, _COMPLETED, TEXT_TOKENS)
        reply = engine.generate(request)
        found.label = grade(
            reply.content[:4096], reasoning=reply.reasoning[:4096], finish_reason="stop"
        ).label.value
        found.head = one_line(_said(reply), 120)

    def _score(self, found: Round, engine: ServerEngine) -> None:
        index = self._next("score", len(passages()))
        text = passages()[index][:_CHARS].rpartition(" ")[0]
        scores = engine.score(text)
        # The bytes of the whole text stand below: the baseline is of the same text, so the first
        # token does not matter.
        found.bits[f"p{index:02d}"] = scores.nll / (len(text.encode()) * math.log(2.0))

    def _tool(self, found: Round, engine: ServerEngine) -> None:
        case = cases()[0]
        answer = answer_of(case, engine.generate(case.request()))
        found.tools[case.key] = (
            f"parsed={answer.parsed} valid={answer.schema_valid} right={answer.right}"
        )

    def _counters(self, found: Round, engine: ServerEngine) -> None:
        """What the page of metrics says: queue, tokens written, start of the process, speculation
        since enough drafts.
        """
        if Capability.METRICS not in engine.capabilities:
            return
        try:
            page = engine.page("/metrics")
            metrics = parse_metrics(page)
        except (AssayError, ValueError):
            return
        found.queued, found.running, found.written = (
            _first(metrics, n) for n in (_QUEUED, _RUNNING, _WRITTEN)
        )
        found.started = metrics.total("process_start_time_seconds")
        before, since = self._page
        now = self.clock()
        if before:
            with suppress(AssayError, ValueError):
                live = between(before, page, now - since)
                if (
                    not live.reset
                    and (live.window.record.counts.drafts or live.window.record.counts.drafted or 0)
                    < 4 * ENOUGH_DRAFTS
                ):
                    return
                if not live.reset:
                    found.speculation = assess(live.window)
        self._page = (page, now)

    # What it says.

    def _judge(self, found: Round) -> None:
        """Garbage is told from a round by itself, with no baseline."""
        if found.label in ("degenerate", "empty"):
            found.state, found.reason = (
                State.BROKEN,
                f"its greedy text is {found.label}: {found.head!r}",
            )
        elif found.bits and min(found.bits.values()) > GARBAGE_BITS:
            bits = min(found.bits.values())
            found.state, found.reason = (
                State.BROKEN,
                f"plain English costs it {bits:.1f} bits per byte, as chance does",
            )
        elif found.queued:
            found.state, found.reason = State.BUSY, f"{found.queued:.0f} requests wait in its queue"

    def _failed(self, found: Round, error: AssayError) -> None:
        found.reason = one_line(error.message, 2 * MOST_CHARS)
        found.state = State.BROKEN
        status = error.evidence.get("status")
        if error.finding_id == "server.unreachable" or status == 502:
            found.state = State.DOWN
        elif error.finding_id == "server.stream_cut":
            found.state = State.DOWN if self._lives() is False else State.BROKEN
        elif error.finding_id == "server.rate_limited":
            found.state = State.BUSY
        elif error.finding_id == "server.timeout" or status in (503, 504):
            self._silent(found)
        if found.state is State.DOWN:
            self.close()  # what comes back may be another server

    def _silent(self, found: Round) -> None:
        """No answer in time. A busy server still writes tokens for others, or has not been silent
        for long.
        """
        lives = self._lives()
        if lives is not True:
            found.state = State.DOWN if lives is False else State.BROKEN
            if lives is None:
                found.reason = (
                    f"it hangs: its page of health does not answer either; {found.reason}"
                )
            return
        before = self._before
        counts = before is not None and found.written is not None and before.written is not None
        moved = counts and before is not None and found.written != before.written
        self._still = 0 if moved else self._still + 1
        found.state = State.BUSY
        if self._still >= (STILL if counts else SILENT):
            found.state = State.BROKEN
            nothing = "writes no token for anybody" if counts else "gives no answer"
            found.reason = f"it hangs: it {nothing} for {self._still} rounds; {found.reason}"

    def _lives(self) -> bool | None:
        """Whether its own page of health answers, or its list of models where it has none; None
        where that hangs too.
        """
        if self.engine is None:
            return True
        for page in ("/health", "/v1/models"):
            try:
                self.engine.page(page)
            except AssayError as error:
                if error.finding_id in ("server.not_found", "server.unauthorized"):
                    continue
                if error.finding_id == "server.timeout":
                    return None
                return error.finding_id not in (
                    "server.unreachable",
                    "server.stream_cut",
                    "server.failing",
                )
            return True
        return True


def _first(metrics: Metrics, names: Sequence[str]) -> float | None:
    return next((total for name in names if (total := metrics.total(name)) is not None), None)


def _said(reply: Reply) -> str:
    return reply.content or reply.reasoning
