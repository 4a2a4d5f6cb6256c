"""Launch a configuration: a free port, a log, ready by health and by a first token, and nothing
left at any exit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.errors import AssayError, UsageError
from assay.runs import cache_dir
from assay.serving.command import ServeCommand

START_SECONDS = 600.0
LEAST_DISK = 64 << 20
"""Bytes that must be free for logs."""
_EXCERPT = 400
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


class StartFailed(Exception):
    """The server did not come up. `kind`: `memory`, `refused` (it does not take the command),
    `died` or `silent`.
    """

    def __init__(self, kind: str, said: str, log: Path) -> None:
        super().__init__(said)
        self.kind, self.said, self.log = kind, said, log


def free_port() -> int:
    """A port of the loopback interface that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Running:
    """A server that answers. `alive` says whether it still runs; `seconds` is what its
    start took.
    """

    url: str
    log: Path
    pid: int
    seconds: float
    alive: Callable[[], bool]
    ends: Callable[[], bool]


_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|bad_alloc|cannot allocate memory|failed to allocate|no"
    r" available memory for|"
    r"not enough memory|free memory on device|larger than the maximum number of tokens|unable to"
    r" allocate|ENOMEM|"
    r"insufficient memory|exceeds? (?:the )?available memory|memory .{0,30}is less than",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"unrecogni[sz]ed argument|error: argument|invalid argument|unknown"
    r" (?:argument|option|flag)|usage:|ValidationError|"
    r"not supported|unsupported|ValueError|NotImplementedError|no such option",
    re.IGNORECASE,
)
_PORT = re.compile(r"address already in use|EADDRINUSE|couldn't bind|failed to bind", re.IGNORECASE)
_TELLING = re.compile(r"error|exception|fatal|failed|cannot|abort|out of memory", re.IGNORECASE)


def require_program(command: ServeCommand) -> None:
    """AssayError where the program is not there."""
    name = command.start[0]
    if name.rpartition("/")[2] in ("docker", "podman", "kubectl", "ssh", "srun"):
        raise UsageError(
            f"a server behind {name} cannot be launched with other settings: its options are not"
            " the engine's",
            remedy=(
                "run assay doctor inside the container or on the node, or name a script by"
                " --command-template"
            ),
        )
    if shutil.which(name, path=command.environment.get("PATH")) is None:
        raise AssayError(
            f"there is no program {name} here",
            finding_id="server.start_failed",
            remedy="install it, or name it by its path",
        )


def gpus() -> str | None:
    """Name, driver and memory of the GPUs, one a line, as nvidia-smi says; None where there is
    none.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
        ]
        return (
            subprocess.run(
                query, capture_output=True, text=True, timeout=20, check=False
            ).stdout.strip()
            or None
        )
    return None


def require_disk(folder: Path) -> None:
    """AssayError where logs would fill the disk: a server that cannot write its log fails in its
    own ways.
    """
    free = shutil.disk_usage(folder).free
    if free < LEAST_DISK:
        raise AssayError(
            f"only {free >> 20} MiB are free in {folder}, where the logs of the servers go",
            finding_id="server.disk_full",
            remedy="make room, or name another folder by ASSAY_CACHE",
        )


@contextlib.contextmanager
def alone(seconds: float, say: Callable[[str], None]) -> Iterator[None]:
    """Wait for another doctor on the same devices: two would take each other's memory and speed for
    faults.
    """
    devices = re.sub(r"\W+", "-", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    with (cache_dir("locks") / f"doctor-{devices}.lock").open("a+") as file:
        until, told = time.monotonic() + seconds, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                file.seek(0)
                other = file.read().strip() or "unknown"
                if time.monotonic() > until:
                    raise AssayError(
                        f"another doctor (process {other}) is at work on these devices",
                        finding_id="server.busy",
                        remedy="wait for it, or choose other devices by CUDA_VISIBLE_DEVICES",
                    ) from None
                if not told:
                    say(
                        f"another doctor (process {other}) is at work on these devices: waiting"
                        " for it"
                    )
                    told = True
                time.sleep(0.5)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextlib.contextmanager
def launched(
    command: ServeCommand,
    active: Sequence[str] | frozenset[str],
    log: Path,
    *,
    timeout: float = START_SECONDS,
    health: str = "/health",
    api_key: str | None = None,
    lock: Path | None = None,
    port: int = 0,
    model: str | None = None,
) -> Iterator[Running]:
    """Run a configuration for as long as the block lasts, at `port` (0: a free one); StartFailed
    where it does not answer.

    `model` is asked for the first token; by default the first that the server lists.

    While it starts, and while it ends, the file `lock` is held: two servers that measure the free
    memory of one device at one moment take each other's memory for their own.
    """
    for attempt in range(1 if port else 3):
        held = contextlib.ExitStack()
        if not held.enter_context(_holding(lock, timeout)):
            held.close()
            raise StartFailed("silent", f"{lock} is held by another for {timeout:.0f} s", log)
        at = port or free_port()
        words, began = command.words(active, at), time.monotonic()
        env = {**os.environ, **command.variables(active)}
        child = subprocess.Popen(
            [sys.executable, "-S", "-E", str(_SUPERVISOR), str(log), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
            bufsize=0,
        )
        watched = _Watched(child)
        try:
            try:
                _await(watched, f"http://127.0.0.1:{at}", log, timeout, health, api_key, model)
            except StartFailed as failed:
                if attempt < 2 and not port and failed.kind == "died" and _PORT.search(failed.said):
                    continue  # another program took the port between the choice and the start
                raise
            finally:
                held.close()
            seconds = time.monotonic() - began
            yield Running(
                f"http://127.0.0.1:{at}", log, watched.pid, seconds, watched.alive, watched.ends
            )
            with _holding(lock, timeout):
                watched.stop()
            return
        finally:
            watched.stop()


@contextlib.contextmanager
def _holding(lock: Path | None, seconds: float) -> Iterator[bool]:
    """Wait for a lock file in the order of asking, at most so long, and hold it; yields whether it
    is held.
    """
    if lock is None:
        yield True
        return
    held, done = threading.Event(), threading.Event()

    def hold() -> (
        None
    ):  # flock cannot wait for a limited time, and asking again and again never gets a turn
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            held.set()
            done.wait()

    threading.Thread(target=hold, daemon=True).start()
    try:
        yield held.wait(seconds)
    finally:
        done.set()


class _Watched:
    """The supervisor's end of the pipe: what it has said, and the request to end."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self._unread = b""
        self.pid = 0
        self.status: int | None = None
        self.failed = ""

    def _listen(self) -> None:
        """Take what was said. Read from the descriptor: what a buffer holds, `select`
        does not see.
        """
        assert self._child.stdout is not None
        out = self._child.stdout.fileno()
        while select.select([out], [], [], 0)[0]:
            if not (raw := os.read(out, 4096)):
                self.status = self.status if self.status is not None else self._child.poll() or 0
                break
            self._unread += raw
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            word, _, rest = line.decode("utf-8", "replace").partition(" ")
            match word:
                case "started":
                    self.pid = int(rest)
                case "ended":
                    self.status = int(rest)
                case "failed":
                    self.failed, self.status = rest, 127

    def alive(self) -> bool:
        """Whether the server still runs."""
        if self.status is None:
            self._listen()
        return self.status is None

    def ends(self, seconds: float = 1.5) -> bool:
        """Whether the server ends within a moment: the supervisor looks ten times a second."""
        until = time.monotonic() + seconds
        while self.alive() and time.monotonic() < until:
            time.sleep(0.05)
        return not self.alive()

    def stop(self) -> None:
        """End the server and all that it started; waits until they are gone."""
        with contextlib.suppress(OSError):
            if self._child.stdin:
                self._child.stdin.close()
        for last in (False, True):
            try:
                self._child.wait(timeout=30)
                break
            except subprocess.TimeoutExpired:
                if not last:
                    self._child.terminate()
        if self._child.stdout:
            self._child.stdout.close()


def _await(
    watched: _Watched,
    url: str,
    log: Path,
    timeout: float,
    health: str,
    api_key: str | None,
    model: str | None,
) -> None:
    import httpx

    deadline, pause = time.monotonic() + timeout, 0.1
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(timeout=5.0, headers=headers, trust_env=False) as client:
        healthy = False
        while time.monotonic() < deadline:
            if not watched.alive():
                raise _failure(watched, log)
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
                if not healthy:
                    answer = client.get(url + health)
                    healthy = answer.status_code == 200 or (
                        answer.status_code == 404
                        and client.get(f"{url}/v1/models").status_code == 200
                    )
                if healthy and _first_token(
                    client, url, max(5.0, deadline - time.monotonic()), log, model
                ):
                    return
            time.sleep(pause)
            pause = min(1.0, pause * 1.3)
    what = "answers no request" if healthy else "is not ready"
    raise StartFailed("silent", f"the server {what} after {timeout:.0f} s: {last_words(log)}", log)


def _first_token(client: object, url: str, timeout: float, log: Path, model: str | None) -> bool:
    """Whether a token comes: a server that says it is healthy may still answer nothing."""
    import httpx

    assert isinstance(client, httpx.Client)
    if model is None:
        models = client.get(f"{url}/v1/models")
        model = models.json()["data"][0]["id"] if models.status_code == 200 else "default"
    bodies: Mapping[str, dict[str, object]] = {
        "/v1/completions": {"prompt": "Hello"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    }
    for path, body in bodies.items():
        answer = client.post(
            url + path, json={"model": model, "max_tokens": 1, **body}, timeout=timeout
        )
        if answer.status_code in (401, 403):
            raise StartFailed(
                "refused", "the server asks for a key: name its variable by --api-key-env", log
            )
        if answer.status_code == 200 and answer.json().get("choices"):
            return True
    return False


def _failure(watched: _Watched, log: Path) -> StartFailed:
    if watched.failed:
        return StartFailed("refused", watched.failed, log)
    status, tail = watched.status or 0, tail_of(log)
    end = (
        f"was ended by {signal.Signals(-status).name}"
        if status < 0
        else f"ended with status {status}"
    )
    said = f"the server {end} before it answered: {last_words(log)}"
    if _PORT.search(tail):
        return StartFailed("died", f"{said} (address already in use)", log)
    if _MEMORY.search(tail) or status == -9:
        return StartFailed("memory", said, log)
    return StartFailed("refused" if _REFUSED.search(tail) or status == 2 else "died", said, log)


def tail_of(log: Path, size: int = 40_000, head: int = 0) -> str:
    """The end of a log, and its first `head` bytes, in which an engine tells its settings."""
    try:
        with log.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(0)
            first = file.read(head) if length > size + head else b""
            file.seek(max(0, length - size - (0 if first else head)))
            body = (first + b"\n[...]\n" if first else b"") + file.read()
            return body.decode("utf-8", "replace")
    except OSError:
        return ""


def last_words(log: Path) -> str:
    """The line in which a server says what went wrong: one that names memory, else the last error,
    else the last line.
    """
    lines = [line.strip() for line in tail_of(log).splitlines() if line.strip()]
    for pattern in (_MEMORY, _TELLING):
        if found := [line for line in lines if pattern.search(line)]:
            return found[-1][-_EXCERPT:]
    return lines[-1][-_EXCERPT:] if lines else "it said nothing"
