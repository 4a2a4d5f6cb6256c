"""`assay kv serve`: vLLM's own server with a codec in its KV cache.

The server is vLLM's, unchanged on disk. A folder on its PYTHONPATH makes assay's plug-in known to it, an environment
variable names the codec. What would give wrong numbers is refused before anything starts, by the worker where only
that can know; a server that answers although no worker took the plug-in is ended.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import assay
from assay.cache import cache_dir
from assay.engines.vllm.placement import find_python
from assay.engines.vllm.plugin import HOOK, REPORT
from assay.environment import describe
from assay.errors import AssayError
from assay.kv.hook import Mode
from assay.kv.hooks import hook_spec
from assay.kv.serve_checks import check_checkpoint, check_options, needs_history, option
from assay.verdict import Metric, Report, Verdict

_PLUGIN = """import importlib.metadata, importlib.util, json
found = importlib.metadata.entry_points(group="vllm.general_plugins")
missing = [name for name in ("vllm", "torch", "scipy") if importlib.util.find_spec(name) is None]
print(json.dumps({"plugin": any(e.name == "assay" for e in found), "missing": missing}))
"""


@dataclass(frozen=True)
class ServePlan:
    """What is served. `options` are vLLM's own."""

    model: str
    codec: str
    mode: str = Mode.INFORWARD.value
    calibration: str | None = None
    streams: str = "kv"
    skip_layers: tuple[int, ...] = ()
    python: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A command and what its environment needs beside that of this process."""

    command: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return f"{given} {shlex.join(self.command)}"


def launch_of(plan: ServePlan) -> Launch:
    """The command that serves; UsageError or AssayError for what cannot work."""
    if plan.mode == Mode.SNAPSHOT:
        raise AssayError(
            "snapshot needs every request twice, which no server has",
            finding_id="kv.unsupported",
            remedy="serve with --mode inforward or decode",
        )
    history = needs_history(plan.codec, plan.mode)
    check_options(plan.options, history=history)
    check_checkpoint(plan.model)
    context = int(option(plan.options, "--max-model-len") or _context(plan.model))
    hook = hook_spec(
        "vllm",
        codec=plan.codec,
        mode=plan.mode,
        length=context,
        calibration=plan.calibration,
        streams=plan.streams,
        skip_layers=plan.skip_layers,
        measure_windows=0,
    )
    python = find_python(plan.python) or Path(sys.executable)
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(plugin_folder()), os.environ.get("PYTHONPATH")))),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        HOOK: json.dumps({"target": hook.target, "config": dict(hook.config)}),
    }
    _check_plugin(python, environment)
    command = [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        plan.model,
        "--enforce-eager",
    ]
    command += ["--no-async-scheduling"]
    if history:
        command.append("--no-enable-prefix-caching")
    return Launch((*command, *plan.options), environment)


def run_serve(plan: ServePlan, say: Callable[[str], None], *, dry_run: bool = False) -> Report:
    """Print the command, and unless `dry_run` run it until it ends or is interrupted."""
    launch = launch_of(plan)
    say(str(launch))
    layers: int | None = None
    if not dry_run:
        layers = _run(launch, plan.options)
    return Report(
        command="kv serve",
        verdict=Verdict.PASS,
        subject={
            "model": plan.model,
            "command": list(launch.command),
            "environment": dict(launch.environment),
        },
        results={"codec": plan.codec, "mode": plan.mode, "layers": layers, "dry_run": dry_run},
        environment=describe(),
        headline=[Metric("codec", f"{plan.codec}, {plan.mode}")],
        summary="the command was printed, nothing was started" if dry_run else f"{layers} layers were coded",
    )


def plugin_folder() -> Path:
    """A folder in the cache that holds assay alone, with the metadata by which vLLM finds its plug-in."""
    folder = cache_dir("vllm-plugin")
    link = folder / "assay"
    package = Path(assay.__file__).parent
    if link.is_symlink() and link.resolve() != package.resolve():
        link.unlink()
    if not link.is_symlink():
        link.symlink_to(package, target_is_directory=True)
    metadata = folder / f"assay-{assay.__version__}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: assay\nVersion: {assay.__version__}\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nassay = assay.engines.vllm.plugin:register\n"
    )
    return folder


def _check_plugin(python: Path, environment: Mapping[str, str]) -> None:
    """AssayError unless that Python would load the plug-in."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "assay" not in allowed.split(","):
        raise AssayError(
            f"VLLM_PLUGINS={allowed} keeps assay's plug-in out",
            finding_id="kv.plugin_missing",
            remedy="unset VLLM_PLUGINS, or add assay to it",
        )
    done = subprocess.run(
        [str(python), "-c", _PLUGIN],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    if not found.get("plugin"):
        raise AssayError(
            f"{python} does not find assay's plug-in: {done.stderr.strip()[-200:] or 'it is not among its entry points'}",
            finding_id="kv.plugin_missing",
            remedy="name a Python that has vLLM with --python",
        )
    if found["missing"]:
        raise AssayError(
            f"{python} lacks {', '.join(found['missing'])}",
            finding_id="kv.package_missing",
            remedy=f"{python} -m pip install {' '.join(found['missing'])}",
        )


def _run(launch: Launch, options: Sequence[str]) -> int:
    """Run the server until it ends; the number of coded layers. AssayError where it failed or served without a codec."""
    with tempfile.TemporaryDirectory(prefix="assay-kv-serve-") as folder:
        report = Path(folder) / "hook.json"
        environment = {**os.environ, **launch.environment, REPORT: str(report)}
        # stdout is for the report.
        process = subprocess.Popen(launch.command, env=environment, stdout=sys.stderr)
        try:
            _await_hook(process, report, options)
            status = process.wait()
        except KeyboardInterrupt:
            status = 0
        finally:
            _end(process)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    if "error" in found:
        raise AssayError(found["error"], finding_id="kv.unsupported", remedy=found["remedy"] or "")
    if status or "layers" not in found:
        raise AssayError(
            f"vLLM's server ended with status {status}",
            finding_id="kv.serve_failed",
            remedy="read what it printed last",
            evidence={"status": status},
        )
    return int(found["layers"])


def _await_hook(process: subprocess.Popen[bytes], report: Path, options: Sequence[str]) -> None:
    """Return when a worker has reported; AssayError if the server answers before one has."""
    address = option(options, "--host") or "127.0.0.1", int(option(options, "--port") or 8000)
    while process.poll() is None and not report.exists():
        try:
            socket.create_connection(address, timeout=1).close()
            answers = True
        except OSError:
            answers = False
        if answers and not report.exists() and process.poll() is None:
            raise AssayError(
                "the server answers although no worker of it loaded assay's plug-in: its numbers would be those of the "
                "exact cache",
                finding_id="kv.plugin_missing",
                remedy="look whether its worker starts with another environment, and whether the port was taken before",
            )
        time.sleep(0.5)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _context(model: str) -> int:
    """Tokens that the model has room for, 4,096 where its configuration is not at hand."""
    config = Path(model) / "config.json"
    if not config.exists():
        return 4096
    return int(json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings", 4096))
