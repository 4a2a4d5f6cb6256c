"""Real servers on a free port of this machine, which never outlive the block that started them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.demo.vllm_environment import vllm_python
from assay.errors import AssayError
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
        str(python or vllm_python()),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        served,
        "--max-model-len",
        str(max_model_len),
        "--enforce-eager",
        "--host",
        "127.0.0.1",
        *extra_args,
    ]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        # one rank kernel, ten seconds
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TORCHDYNAMO_DISABLE": "1",
        **(env or {}),
    }
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
    benchmarks/build/build_llama_cpp.sh).

    `alias` is the model's name to clients (default: the file's); port 0 takes a free one.
    """
    name = alias or gguf.stem
    command = [
        str(binary),
        "-m",
        str(gguf),
        "--host",
        "127.0.0.1",
        "--jinja",
        "--metrics",
        "-c",
        str(max_model_len * streams),
        "-np",
        str(streams),
        "--alias",
        name,
        *extra_args,
    ]
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
