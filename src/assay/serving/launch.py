"""Launch a configuration: a free port, a log, ready by health and by a first token, and nothing left at any exit."""

from __future__ import annotations

import contextlib
import fcntl
import json
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from assay.engines.ray_scorer import Actor, Needs, Pool
from assay.engines.ray_worker import Opened, Refusal, Worker, _answer, _function, model_files
from assay.environment import describe, measured_on
from assay.errors import AssayError, UsageError
from assay.options import DoctorOptions
from assay.progress import Progress
from assay.runs import cache_dir
from assay.serving.command import ServeCommand
from assay.serving.search import Configuration
from assay.serving.symptoms import Observation
from assay.verdict import Finding, Report

START_SECONDS = 600.0
LEAST_DISK = 64 << 20
"""Bytes that must be free for logs."""
_EXCERPT = 400
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


class StartFailed(Exception):
    """The server did not come up. `kind`: `memory`, `refused` (it does not take the command), `died` or `silent`."""

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
    """A server that answers. `alive` says whether it still runs; `seconds` is what its start took."""

    url: str
    log: Path
    pid: int
    seconds: float
    alive: Callable[[], bool]
    ends: Callable[[], bool]


_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|bad_alloc|cannot allocate memory|failed to allocate|no available memory for|"
    r"not enough memory|free memory on device|larger than the maximum number of tokens|unable to allocate|ENOMEM|"
    r"insufficient memory|exceeds? (?:the )?available memory|memory .{0,30}is less than", re.IGNORECASE,
)  # fmt: skip
_REFUSED = re.compile(
    r"unrecogni[sz]ed argument|error: argument|invalid argument|unknown (?:argument|option|flag)|usage:|ValidationError|"
    r"not supported|unsupported|ValueError|NotImplementedError|no such option", re.IGNORECASE,
)  # fmt: skip
_PORT = re.compile(r"address already in use|EADDRINUSE|couldn't bind|failed to bind", re.IGNORECASE)
_TELLING = re.compile(r"error|exception|fatal|failed|cannot|abort|out of memory", re.IGNORECASE)


def require_program(command: ServeCommand) -> None:
    """AssayError where the program is not there."""
    name = command.start[0]
    if name.rpartition("/")[2] in ("docker", "podman", "kubectl", "ssh", "srun"):
        raise UsageError(
            f"a server behind {name} cannot be launched with other settings: its options are not the engine's",
            remedy="run assay doctor inside the container or on the node, or name a script by --command-template",
        )
    if shutil.which(name, path=command.environment.get("PATH")) is None:
        raise AssayError(
            f"there is no program {name} here",
            finding_id="server.start_failed",
            remedy="install it, or name it by its path",
        )


def gpus() -> str | None:
    """Name, driver and memory of the GPUs, one a line, as nvidia-smi says; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.strip() or None
    return None


def require_disk(folder: Path) -> None:
    """AssayError where logs would fill the disk: a server that cannot write its log fails in its own ways."""
    free = shutil.disk_usage(folder).free
    if free < LEAST_DISK:
        raise AssayError(
            f"only {free >> 20} MiB are free in {folder}, where the logs of the servers go",
            finding_id="server.disk_full",
            remedy="make room, or name another folder by ASSAY_CACHE",
        )


@contextlib.contextmanager
def alone(seconds: float, say: Callable[[str], None]) -> Iterator[None]:
    """Wait for another doctor on the same devices: two would take each other's memory and speed for faults."""
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
                    say(f"another doctor (process {other}) is at work on these devices: waiting for it")
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
    """Run a configuration for as long as the block lasts, at `port` (0: a free one); StartFailed where it does not answer.

    `model` is asked for the first token; by default the first that the server lists.

    While it starts, and while it ends, the file `lock` is held: two servers that measure the free memory of one device
    at one moment take each other's memory for their own.
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
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True, bufsize=0,
        )  # fmt: skip
        watched = _Watched(child)
        try:
            try:
                _await(watched, f"http://127.0.0.1:{at}", log, timeout, health, api_key, model)
            except StartFailed as failed:
                if attempt < 2 and not port and failed.kind == "died" and _PORT.search(failed.said):
                    continue  # somebody took the port between the choice and the start
                raise
            finally:
                held.close()
            seconds = time.monotonic() - began
            yield Running(f"http://127.0.0.1:{at}", log, watched.pid, seconds, watched.alive, watched.ends)
            with _holding(lock, timeout):
                watched.stop()
            return
        finally:
            watched.stop()


@contextlib.contextmanager
def _holding(lock: Path | None, seconds: float) -> Iterator[bool]:
    """Wait for a lock file in the order of asking, at most so long, and hold it; yields whether it is held."""
    if lock is None:
        yield True
        return
    held, done = threading.Event(), threading.Event()

    def hold() -> None:  # flock cannot wait for a limited time, and asking again and again never gets a turn
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
        """Take what was said. Read from the descriptor: what a buffer holds, `select` does not see."""
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
    watched: _Watched, url: str, log: Path, timeout: float, health: str, api_key: str | None, model: str | None
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
                        answer.status_code == 404 and client.get(f"{url}/v1/models").status_code == 200
                    )
                if healthy and _first_token(client, url, max(5.0, deadline - time.monotonic()), log, model):
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
        answer = client.post(url + path, json={"model": model, "max_tokens": 1, **body}, timeout=timeout)
        if answer.status_code in (401, 403):
            raise StartFailed("refused", "the server asks for a key: name its variable by --api-key-env", log)
        if answer.status_code == 200 and answer.json().get("choices"):
            return True
    return False


def _failure(watched: _Watched, log: Path) -> StartFailed:
    if watched.failed:
        return StartFailed("refused", watched.failed, log)
    status, tail = watched.status or 0, tail_of(log)
    end = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
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
    """The line in which a server says what went wrong: one that names memory, else the last error, else the last line."""
    lines = [line.strip() for line in tail_of(log).splitlines() if line.strip()]
    for pattern in (_MEMORY, _TELLING):
        if found := [line for line in lines if pattern.search(line)]:
            return found[-1][-_EXCERPT:]
    return lines[-1][-_EXCERPT:] if lines else "it said nothing"


# -----------------------------------------------------------------------------
# Starts that run on other machines: what is asked for, what comes back, and who does it (`assay.serving.launch`).


@dataclass(frozen=True)
class Asked:
    """One start, as a process on another machine is asked for it. `left`: seconds of the budget."""

    command: ServeCommand
    options: DoctorOptions
    configuration: Configuration
    index: int
    number: int
    rules: Collection[str]
    symptom: frozenset[str]
    baseline: Observation | None
    left: float


@dataclass(frozen=True)
class Answered:
    """What such a start showed (None: out of time), and how a failing baseline compares with a trusted engine."""

    observation: Observation | None
    compared: Sequence[Report]
    compared_itself: bool
    notices: Sequence[Finding]

    @property
    def version(self) -> str:
        """Kind and version of the server, as it names itself; empty where it named none."""
        facts = self.observation.facts if self.observation else {}
        return f"{facts.get('kind', '')} {facts['version']}" if facts.get("version") else ""


class Cluster(Protocol):
    """Where starts run that do not run here. `size`: how many at the same time."""

    @property
    def size(self) -> int:
        """Starts at the same time."""

    def starts(self, asked: Sequence[Asked]) -> Iterator[Answered]:
        """What each start showed, in their order; AssayError where one cannot be had."""

    def facts(self) -> dict[str, Any]:
        """What the report says of it."""

    def findings(self) -> list[Finding]:
        """What was lost on the way."""


# -----------------------------------------------------------------------------
# Starts on a Ray cluster: a worker launches a configuration on its node and asks it there.
#
# The doctor decides and keeps what was measured, as it does without Ray; a worker gives one start at a time.
# What the doctor hands over and gets back is its own affair: workers find its function by import path.


_START = "assay.serving.doctor:start_elsewhere"
_READ = frozenset({".py", ".sh", ".json", ".jinja", ".gguf", ".safetensors", ".yaml", ".yml", ".toml"})
"""Suffixes of files that a command reads; another file that it names may be one that it writes."""
_ENGINES = ("vllm", "torch", "transformers", "sglang", "llama_cpp_python")
_OF_ENGINES = re.compile(r"(VLLM|HF|TORCH|TRITON|CUDA|NCCL|GGML|LLAMA|OMP|MKL)_(?!VISIBLE_DEVICES)")
_PARALLEL = re.compile(r"--?(?:(?:tensor|pipeline|data)-parallel-size|tp|pp|dp|tp-size)[ =](\d+)")


class StartWorker(Worker):
    """A process that launches servers, one at a time."""

    def __init__(self, threads: int) -> None:
        # A server takes as many threads as it would without Ray, which sets this variable in its workers.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._node = ""

    def hello(self) -> tuple[str, dict[str, Any]]:
        """The node, and what has to agree before anything is launched."""
        self._node, software = super().hello()
        return self._node, software

    def open(self, spec: str) -> Any:
        """Be where the command was given, with its engine's variables; what the machine and the command's files are."""

        def opened() -> tuple[dict[str, Any], dict[str, Any]]:
            asked = json.loads(spec)
            if not Path(asked["folder"]).is_dir():
                raise AssayError(
                    f"there is no folder {asked['folder']} there, in which the command was given",
                    finding_id="fidelity.other_setup",
                    remedy="run the doctor in a folder that all nodes have",
                )
            os.chdir(asked["folder"])
            os.environ.update(asked["environment"])
            os.environ["ASSAY_SUPERVISOR_APART"] = "1"
            there, gpu = describe(), kinds_of_gpus()
            machine = {name: there[name] for name in ("platform", "cpu", "cpu_count")}
            setup = {"platform": there["platform"], "gpu": gpu} if gpu else machine  # whose host does not matter
            return {"machine": setup, **of_command(asked["words"], asked["model"])}, machine | {"gpu": gpu}

        return _answer(opened)

    def run(self, spec: str, target: str, *given: Any) -> Any:
        """`target(*given)`, by import path, and the node that it ran on."""
        return _answer(lambda: (self._node, _function(target)(*given)))


def kinds_of_gpus() -> str | None:
    """The kinds of the node's GPUs, as the driver lists them: to ask CUDA itself would take memory of a GPU."""
    found = set()
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        found |= set(re.findall(r"Model:\s*(.+)", file.read_text(errors="replace")))
    return ", ".join(sorted(found)) or None


def of_command(words: Sequence[str], model: str | None) -> dict[str, dict[str, str]]:
    """The programs of a command, by version or digest, and the SHA-256 of the files that it reads on this machine."""
    programs, files = dict[str, str](), dict[str, str]()
    for word in words:
        if (there := shutil.which(word)) is None:
            continue
        beside = Path(there).parent.parent.glob("lib/python3*/site-packages/*.dist-info")
        versions = sorted(p.name.removesuffix(".dist-info") for p in beside if p.name.partition("-")[0] in _ENGINES)
        with Path(there).open("rb") as file:
            script = file.read(2) == b"#!"
        programs[word] = ", ".join(versions) or ("script" if script else _digest_of(there))
    named = [name for word in words for name in re.findall(r"[^\s\"',={}\[\]]+", word)]
    for name in dict.fromkeys([*named, *([model] if model else [])]):
        path = Path(name).expanduser()
        if name == model or (path.is_file() and path.suffix in _READ) or (path / "config.json").is_file():
            files |= {f"{name}: {file}": digest for file, digest in model_files(f"file:{name}").items()}
    return {"programs": programs, "files": files}


def _digest_of(path: str) -> str:
    return model_files(f"file:{path}").get(Path(path).name, "")


class Starts(Pool):
    """Workers of a doctor: one on each node, or one for as many GPUs as the command takes."""

    KIND = StartWorker
    AT_ONCE = 1
    AGAIN = "its start is repeated", "their starts were repeated"
    LEANER = ": without a GPU a start has a node to itself"
    TOO_MUCH = "start", ""

    def __init__(self, address: str, workers: int, progress: Progress, command: Any, key_env: str | None) -> None:
        super().__init__(address, workers, progress)
        everything = [setting.name for setting in command.settings]
        if "CUDA_VISIBLE_DEVICES" in command.variables(everything):
            raise UsageError("Ray chooses the GPUs of a start", remedy="leave CUDA_VISIBLE_DEVICES out of the command")
        words: list[str] = command.words(everything, "PORT")
        own = {name: value for name, value in os.environ.items() if name == key_env or _OF_ENGINES.match(name)}
        about = {"folder": str(Path.cwd()), "words": words, "model": command.model, "environment": own}
        self._words, self._model = words, command.model
        self.spec = json.dumps(about)

    def __enter__(self) -> Starts:
        super().__enter__()
        try:
            self._staff(self._needs_of(self.spec))
            self._agree(f"{self.spec} files", "this machine", of_command(self._words, self._model))
            self.each(self.spec)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _needs_of(self, spec: str) -> Needs:
        resources = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if any(found.get("GPU") for found in resources):
            kinds_of_gpus = 1
            for size in _PARALLEL.findall(" ".join(self._words)):
                kinds_of_gpus *= int(size)
            return Needs(1, 1, kinds_of_gpus)
        cpus = max(1, *(int(found.get("CPU", 0)) for found in resources))
        return Needs(cpus, cpus, 0)

    def _name(self, spec: str) -> str:
        return self._words[0].rpartition("/")[2]

    def _admit(self, actor: Actor, spec: str, opened: Any) -> Opened:
        if isinstance(opened, Refusal):
            raise opened.error(f"{actor.node}: ")
        setup, environment = opened
        self._agree(f"{spec} files", actor.node, setup)
        self._agree(spec, actor.node, setup)
        actor.opened.add(spec)
        measured_on(environment)
        return opened  # type: ignore[no-any-return]

    def starts(self, asked: Sequence[Any]) -> Iterator[Any]:
        """What each start showed, in their order. AssayError where one was lost too often, or servers differ."""
        units = [lambda one=one: ("run", (_START, one)) for one in asked]
        for node, answered in self.map(self.spec, units):
            if answered.version:
                self._agree(f"{self.spec} engine", node, {"engine": answered.version})
            yield answered
