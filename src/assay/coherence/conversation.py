"""A probe is a short conversation with the model, and checks of its answer; here is how many of
them are run at once.

A probe is a small frozen dataclass whose fields are its parameters. Its `talk` is a generator: it
yields the next step of the conversation and receives the reply. So the same probe runs against a
server, one thread a conversation, and against an engine in this process, many conversations in one
batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
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

    An interrupt does not wait for answers that nobody will read.
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
    return in_order(engine.generate, requests, parallel)


def in_order(
    ask: Callable[[Request], Reply], requests: Sequence[Request], parallel: int
) -> list[Reply]:
    """The replies to all requests, in their order, from `parallel` threads."""
    replies = dict(
        side_by_side([partial(_numbered, ask, i, r) for i, r in enumerate(requests)], parallel)
    )
    return [replies[i] for i in range(len(requests))]


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
    """One step of a conversation as a request: messages for a chat model, the raw prompt otherwise."""
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


# Run code that a model wrote, where it can do no harm: a subprocess without network, files or
# environment.
#
# The child runs isolated Python (`-I -S`) in an empty temporary directory with an empty
# environment, under limits of CPU time, memory, file size and processes, in a network namespace of
# its own where the kernel allows that. It is opt-in (`--run-code`) all the same: a sandbox made of
# these parts holds off accidents, not a determined attacker.


TIMEOUT_S = 5.0
_MEMORY_BYTES = 512 << 20
_OUTPUT_BYTES = 1 << 16
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000

# Limits hold no one off from deleting or emptying a file, and the one on processes does not hold
# for root. So the interpreter itself refuses to change anything of the system, to make a process,
# or to open a socket.
_GUARD = """
import os, sys
def _guard(event, arguments, refused=PermissionError,
           prefixes=("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "resource."),
           harmless=("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv"),
           writing=os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & writing:
        raise refused("writing a file is not allowed here")
    if event.startswith(prefixes) and event not in harmless:
        raise refused(event + " is not allowed here")
sys.addaudithook(_guard)
del _guard, os
"""

# Calls the function that was defined and compares it with the real sequence, whichever of the two
# usual starts it has.
_HARNESS = """
import sys
source = sys.stdin.read()
space = {"__name__": "answer"}
try:
    exec(compile(source, "answer", "exec"), space)
except SystemExit:
    pass  # a script may end so; what it defined is there
named = space.get("fibonacci") or next(
    (v for k, v in space.items() if "fib" in k.lower() and callable(v)), None)
if named is None:
    print("no function with fib in its name"); sys.exit(1)
values = [named(n) for n in range(1, 9)]
good = ([1, 1, 2, 3, 5, 8, 13, 21], [0, 1, 1, 2, 3, 5, 8, 13], [1, 2, 3, 5, 8, 13, 21, 34])
lists = [v for v in values if isinstance(v, (list, tuple))]
if values in good or (lists and len(lists) == 8 and list(lists[-1])[-1] in (13, 21)):
    print("right"); sys.exit(0)
print("wrong values: " + repr(values)[:200]); sys.exit(1)
"""


def run_fibonacci(source: str) -> AnswerCheck:
    """Whether `source` defines a function that returns Fibonacci numbers."""
    status, output = run_python(_HARNESS, source)
    # Status 0 alone would let code pass that ends the process before its values are compared.
    passed = status == 0 and output == "right"
    return AnswerCheck(
        "code_runs", passed, "" if passed else output or f"ended with status {status}"
    )


def run_python(program: str, stdin: str, timeout: float = TIMEOUT_S) -> tuple[int, str]:
    """Run `program` in the sandbox with `stdin`; returns its exit status and the end of what it
    printed.

    A child that runs into a limit ends with a status other than 0 and a line that says which.
    """
    # Output goes to a file of limited size: from a pipe, a flood would fill this process's memory.
    with (
        tempfile.TemporaryDirectory(prefix="assay-sandbox-") as folder,
        tempfile.TemporaryFile() as printed,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-c", _GUARD + program],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={},
            start_new_session=True,
            preexec_fn=_confine,
        )
        try:
            process.communicate(stdin.encode("utf-8", "replace"), timeout=timeout)
        except subprocess.TimeoutExpired:
            return 1, f"no end after {timeout:g} s"
        finally:
            # Whatever it started dies with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        output = printed.read(_OUTPUT_BYTES)
    if len(output) == _OUTPUT_BYTES:
        return 1, f"printed {_OUTPUT_BYTES >> 10} KiB or more"
    text = output.decode("utf-8", "replace").strip()
    if process.returncode < 0:
        return 1, f"killed by {signal.Signals(-process.returncode).name}"
    return process.returncode, text.splitlines()[-1][:200] if text else ""


def _confine() -> None:
    """Limits of the child, set between fork and exec."""
    import resource

    limits = {
        resource.RLIMIT_CPU: int(TIMEOUT_S) + 1,
        resource.RLIMIT_AS: _MEMORY_BYTES,
        resource.RLIMIT_FSIZE: _OUTPUT_BYTES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    # A network namespace of its own needs a user namespace; where the kernel refuses both, no
    # network is the best effort that a missing DNS configuration and the empty environment make.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
