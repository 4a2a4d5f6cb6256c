"""A probe's conversation with the model, run once or many at a time.

A probe is a small frozen dataclass whose fields are its parameters. Its `talk` is a generator: it
yields the next step of the conversation and receives the reply. So the same probe runs against a
server, one thread a conversation, and against an engine in this process, many conversations in one
batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from assay.coherence.record import AnswerCheck
from assay.engines import GIVEN_UP, Capability, Engine, Message, Reply, Request
from assay.errors import AssayError


@dataclass(frozen=True)
class Step:
    """One question. `messages` for a chat model, `prompt` for one that only continues text."""

    messages: tuple[Message, ...]
    prompt: str
    max_tokens: int
    tools: tuple[dict[str, Any], ...] = ()


Talk = Generator[Step, Reply, None]


@dataclass(frozen=True)
class Context:
    """What a probe may need to know of the subject."""

    chat: bool = True
    token_budget: float = 1.0
    """Factor on the length limit of every answer, for models that reason at length."""
    thinking: bool = True


class Probe(Protocol):
    """One kind of text that a sane model can write."""

    @property
    def name(self) -> str:
        """Stable name in results."""

    @property
    def title(self) -> str:
        """What a person reads."""

    @property
    def needs(self) -> frozenset[Capability]:
        """Capabilities without which the probe is skipped."""

    @property
    def variants(self) -> Sequence[str]:
        """Forms that are asked once each, greedily; empty for a probe that is sampled several
        times.
        """

    def talk(self, context: Context, variant: str) -> Talk:
        """The conversation; every reply of it is graded."""

    def check(self, replies: Sequence[Reply], variant: str) -> tuple[AnswerCheck, ...]:
        """Checks of the answer beyond its form."""


def user(text: str) -> Message:
    """A turn of the user."""
    return Message(role="user", content=text)


def answer_text(reply: Reply) -> str:
    """The text in which the answer is looked for: the content, or the reasoning where there is
    none.
    """
    return reply.content if reply.content.strip() else reply.reasoning


# The sampling of the field's coherence tool, so that results compare.
TEMPERATURE = 0.7
TOP_P = 0.9


@dataclass(frozen=True)
class Sampling:
    """How the text of one conversation is drawn. Temperature 0 is greedy."""

    temperature: float
    top_p: float = 1.0
    seed: int | None = None


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Task:
    """One conversation to run."""

    probe: Probe
    variant: str
    sampling: Sampling


@dataclass
class Outcome:
    """How a conversation went: its replies so far, the tools that were offered, and the error that
    ended it early.
    """

    task: Task
    replies: list[Reply] = field(default_factory=list)
    tools: set[str] = field(default_factory=set)
    error: AssayError | None = None

    def add(self, reply: Reply, step: Step) -> None:
        """Take the reply to one step."""
        self.replies.append(reply)
        self.tools |= {str(tool["function"]["name"]) for tool in step.tools}


@runtime_checkable
class BatchEngine(Protocol):
    """An engine that answers many requests at once faster than one after another."""

    def generate_batch(
        self, requests: Sequence[Request], *, deadline: float = float("inf")
    ) -> list[Reply]:
        """Answer all requests, in order; what is not written by `deadline` has the finish reason
        `GIVEN_UP`.
        """


def run_tasks(
    engine: Engine,
    tasks: Sequence[Task],
    context: Context,
    *,
    parallel: int,
    on_done: Callable[[Outcome], None],
    deadline: float = float("inf"),
) -> None:
    """Run every conversation and hand each outcome to `on_done` as it ends (always on the calling
    thread).

    An engine with `generate_batch` gets the open requests of all conversations as one batch, round
    after round; any other gets `parallel` threads. A conversation that fails ends with its error;
    the others go on. After `deadline` (by `time.monotonic`) nothing more is begun, and what still
    runs is not waited for.
    """
    if isinstance(engine, BatchEngine):
        outcomes = _batched(engine, tasks, context, deadline)
    else:
        work = [partial(_converse, engine, task, context) for task in tasks]
        outcomes = side_by_side(work, parallel, deadline)
    for outcome in outcomes:
        on_done(outcome)


Result = TypeVar("Result")


def side_by_side(
    work: Sequence[Callable[[], Result]], parallel: int, deadline: float = float("inf")
) -> Iterator[Result]:
    """Results of `work` as they come, from `parallel` threads; what is not there by `deadline` is
    given up.

    An interrupt does not wait for answers that are not read any more.
    """
    pool = ThreadPoolExecutor(max_workers=max(1, parallel))
    waiting: set[Future[Result]] = {pool.submit(call) for call in work}
    try:
        while waiting:
            left = deadline - time.monotonic()
            done, waiting = wait(waiting, max(0.0, left) if left < 1e9 else None, FIRST_COMPLETED)
            if not done:
                return
            for future in done:
                yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def generate_all(
    engine: Engine, requests: Sequence[Request], parallel: int, deadline: float = float("inf")
) -> list[Reply]:
    """Answer independent requests, in order, the fastest way the engine has; what takes longer than
    `deadline` is left out.
    """
    if isinstance(engine, BatchEngine):
        replies = engine.generate_batch(requests, deadline=deadline)
        return [reply for reply in replies if reply.finish_reason != GIVEN_UP]
    return in_order(engine.generate, requests, parallel, deadline)


def in_order(
    ask: Callable[[Request], Reply],
    requests: Sequence[Request],
    parallel: int,
    deadline: float = float("inf"),
) -> list[Reply]:
    """The replies to the requests, in their order, from `parallel` threads; what is not there by
    `deadline` is left out.
    """
    work = [partial(_numbered, ask, i, r) for i, r in enumerate(requests)]
    replies = dict(side_by_side(work, parallel, deadline))
    return [replies[i] for i in range(len(requests)) if i in replies]


def _numbered(ask: Callable[[Request], Reply], number: int, request: Request) -> tuple[int, Reply]:
    return number, ask(request)


def _converse(engine: Engine, task: Task, context: Context) -> Outcome:
    outcome = Outcome(task)
    talk = task.probe.talk(context, task.variant)
    try:
        step = next(talk)
        while True:
            reply = engine.generate(to_request(step, task.sampling, context))
            outcome.add(reply, step)
            step = talk.send(reply)
    except StopIteration:
        pass
    except AssayError as error:
        outcome.error = error
    return outcome


def _batched(
    engine: BatchEngine, tasks: Sequence[Task], context: Context, deadline: float
) -> Iterator[Outcome]:
    open_talks: list[tuple[Outcome, Talk, Step]] = []
    for task in tasks:
        talk = task.probe.talk(context, task.variant)
        open_talks.append((Outcome(task), talk, next(talk)))
    while open_talks and time.monotonic() < deadline:
        requests = [to_request(step, out.task.sampling, context) for out, _, step in open_talks]
        still_open = []
        replies = engine.generate_batch(requests, deadline=deadline)
        for (outcome, talk, step), reply in zip(open_talks, replies, strict=True):
            if reply.finish_reason == GIVEN_UP:
                continue
            outcome.add(reply, step)
            try:
                still_open.append((outcome, talk, talk.send(reply)))
            except StopIteration:
                yield outcome
        open_talks = still_open


def to_request(step: Step, sampling: Sampling, context: Context) -> Request:
    """One step of a conversation as a request: messages for a chat model, the raw prompt
    otherwise.
    """
    return Request(
        messages=step.messages if context.chat else None,
        prompt=None if context.chat else step.prompt,
        max_tokens=max(1, round(step.max_tokens * context.token_budget)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        tools=step.tools if context.chat else (),
        extra={} if context.thinking else {"chat_template_kwargs": {"enable_thinking": False}},
    )
