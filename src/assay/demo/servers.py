"""Real servers on a free port of this machine, which never outlive the block that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from assay.cache import cache_dir
from assay.errors import AssayError

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
    from assay.demo.vllm_env import vllm_python

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
    gguf: Path, binary: Path, *, max_model_len: int = 2048, streams: int = 8, extra_args: Sequence[str] = ()
) -> Iterator[Server]:
    """Serve a GGUF file with llama.cpp's own server, built from its sources (see benchmarks/build_llama_cpp.sh)."""
    command = [
        str(binary), "-m", str(gguf), "--host", "127.0.0.1", "--jinja", "--metrics",
        "-c", str(max_model_len * streams), "-np", str(streams), "--alias", gguf.stem, *extra_args,
    ]  # fmt: skip
    with _serve(command, {}, name=f"llama-{gguf.stem}", model=gguf.stem, ready="/health") as server:
        yield server


@contextlib.contextmanager
def _serve(
    command: list[str], settings: Mapping[str, str], *, name: str, model: str, ready: str
) -> Iterator[Server]:
    if shutil.which(command[0]) is None:
        raise AssayError(
            f"{command[0]} cannot be run",
            finding_id="server.start_failed",
            remedy="install it, or build it first",
        )
    port = free_port()
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
