"""`assay kv serve`: vLLM's own server with a codec in its KV cache, or with a tier of coded blocks
behind it.

The server is vLLM's, unchanged on disk. A folder on its PYTHONPATH makes assay's plug-in known to
it, an environment variable names the codec. What would give wrong numbers is refused before
anything starts, by the worker where only that can know; a server that answers although no worker
took the plug-in is ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.engines import require_local
from assay.engines.vllm.hooks import HOOK, REPORT
from assay.engines.vllm.path import packages, packages_alone
from assay.engines.vllm.scorer import find_python
from assay.environment import describe
from assay.errors import AssayError
from assay.runs import cache_dir
from assay.verdict import Metric, Report, Verdict
from assay_lab.kv.hook_plan import Mode, hook_spec
from assay_lab.kv.pages import BLOCK, CODEC, PAGES, refuse_wrapped
from assay_lab.kv.serve_checks import (
    ONE_RANK,
    UNSEEN,
    cannot_serve,
    check_checkpoint,
    check_full_attention,
    check_options,
    needs_history,
    option,
)
from assay_lab.options import ServePlan

_PLUGIN = """import importlib.metadata, importlib.util, json, sys
found = importlib.metadata.entry_points(group="vllm.general_plugins")
names = ("vllm", "torch", "scipy", *sys.argv[1:])
missing = [name for name in names if importlib.util.find_spec(name) is None]
print(json.dumps({"plugin": any(e.name == "assay" for e in found), "missing": missing}))
"""


_PAGED = """import importlib.util, pathlib, sys
folder = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
sys.exit("TQFullAttentionSpec" not in (folder / "v1" / "kv_cache_interface.py").read_text())
"""


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
    require_local(plan.model, plan.model, finding_id="kv.engine_load")
    refuse_wrapped(plan.codec)
    if plan.tier == "stream":
        return _tiered(plan)
    if plan.codec == CODEC:
        return _packed(plan)
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
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(plugin_folder()), os.environ.get("PYTHONPATH")))
        ),
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


_NOT_PACKED = UNSEEN | {
    "--hf-overrides": "the calibration is of the model as its config.json says",
    "--attention-config": "packed pages are read by a backend of their own",
    "--speculative-config": "drafted tokens that are rejected have been coded already",
    "--kv-transfer-config": "others would read codes as keys and values",
    "--attention-backend": "packed pages are read by a backend of their own",
    "--kv-cache-dtype-skip-layers": "every layer has packed pages",
}


def _packed(plan: ServePlan) -> Launch:
    """The command that serves from packed pages: compiled, with CUDA graphs and prefix caching as
    vLLM has them.
    """
    from assay_lab.kv.pages.source import source_of

    for name, why in (ONE_RANK | _NOT_PACKED).items():
        if option(plan.options, name) not in ((None, "1") if name in ONE_RANK else (None,)):
            raise cannot_serve(f"{name}: {why}", f"leave {name} out")
    for name, only in (("--block-size", str(BLOCK)), ("--kv-cache-dtype", "auto")):
        if option(plan.options, name) not in (None, only):
            raise cannot_serve(
                f"{name} {option(plan.options, name)}: packed pages take {only}",
                f"leave {name} out",
            )
    if plan.skip_layers or plan.streams != "kv" or plan.mode != Mode.INFORWARD:
        raise cannot_serve(
            "packed pages hold keys and values of all tokens in all layers",
            "leave out --skip-layers, --stream and --mode",
        )
    if plan.calibration is None:
        raise AssayError(
            "packed pages need a calibration",
            finding_id="kv.no_calibration",
            remedy=(
                "make one: assay kv calibrate MODEL --text FILE --out FILE, and give it by"
                " --calibration"
            ),
        )
    source_of(plan.calibration, plan.model)
    python = find_python(plan.python) or Path(sys.executable)
    environment = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(plugin_folder()), os.environ.get("PYTHONPATH")))
        ),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        PAGES: str(Path(plan.calibration).resolve()),
    }
    _check_plugin(python, environment)
    done = subprocess.run([str(python), "-c", _PAGED], capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssayError(
            f"the vLLM of {python} has no cache whose pages have a size of their own"
            " (TQFullAttentionSpec)",
            finding_id="kv.unsupported",
            remedy="serve packed pages with vLLM 0.25, for CUDA",
        )
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", plan.model]
    command += ["--attention-backend", "CUSTOM", "--block-size", str(BLOCK)]
    return Launch((*command, *plan.options), environment)


_NOT_TIERED = UNSEEN | {
    "--hf-overrides": "the key of a block stands for the model as its config.json says",
    "--quantization": "the key of a block stands for the checkpoint's weights as they are stored",
    "--data-parallel-size": "the tier needs scheduler and worker in one process",
    "--speculative-config": "drafted tokens that are rejected would be stored",
    "--kv-transfer-config": "the tier is vLLM's one KV connector",
    "--distributed-executor-backend": "the tier needs scheduler and worker in one process",
    "--kv-cache-dtype": "blocks are coded from the model's own numbers",
}


def _tiered(plan: ServePlan) -> Launch:
    """The command that serves with a tier: compiled, with CUDA graphs and prefix caching as vLLM
    has them.
    """
    harmless = {"--kv-cache-dtype": "auto", "--data-parallel-size": "1"} | dict.fromkeys(
        ONE_RANK, "1"
    )
    for name, why in (ONE_RANK | _NOT_TIERED).items():
        if option(plan.options, name) not in (None, harmless.get(name)):
            raise cannot_serve(f"{name}: {why}", f"leave {name} out")
    if plan.skip_layers or plan.streams != "kv":
        raise cannot_serve(
            "blocks hold keys and values of all layers", "leave out --skip-layers and --stream"
        )
    check_full_attention(plan.model)
    try:
        from assay_lab.kv.block_tables import tables_for
    except ImportError as error:
        raise AssayError(
            f"stored blocks need {error.name}, which is not installed",
            finding_id="kv.package_missing",
            remedy="pip install 'llm-assay[lab]'",
        ) from error

    size = int(plan.tier_size * 1e9)
    folder = None if plan.tier_dir is None else plan.tier_dir.resolve()
    if folder is not None:
        _check_room(folder, size)
    elif size > (memory := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
        raise AssayError(
            f"this machine has {memory / 1e9:.3g} GB of memory, the tier may take {size / 1e9:.3g}"
            " GB of it",
            finding_id="kv.tier_size",
            remedy="give less by --tier-size, or a folder by --tier-dir",
        )
    tables = tables_for(plan.model, plan.codec, plan.calibration, folder or cache_dir("kv-tables"))
    if size < tables.facts.token_bytes * _TIER_BLOCK:
        raise AssayError(
            f"a tier of {plan.tier_size:g} GB may not hold a single block: its {_TIER_BLOCK} tokens"
            f" have {tables.facts.token_bytes * _TIER_BLOCK / 1e6:.3g} MB before they are coded",
            finding_id="kv.tier_size",
            remedy="give more by --tier-size",
        )
    python = find_python(plan.python) or Path(sys.executable)
    environment = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(plugin_folder()), os.environ.get("PYTHONPATH")))
        ),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # else vLLM for CPU gives the worker a process of its own
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    _check_plugin(python, environment, "numba", "safetensors")
    extra = {
        "tables": str(tables.write(folder or cache_dir("kv-tables"))),
        "size": size,
        "folder": None if folder is None else str(folder),
        "block": _TIER_BLOCK,
    }
    transfer = {
        "kv_connector": "AssayTier",
        "kv_connector_module_path": "assay_lab.kv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", plan.model]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    return Launch((*command, *plan.options), environment)


_TIER_BLOCK = 128


def _check_room(folder: Path, size: int) -> None:
    """AssayError where the folder cannot be written, or its disk has less room than the tier may
    take.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        held = sum(path.stat().st_size for path in folder.rglob("*.block"))
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise AssayError(
            f"the tier cannot be kept in {folder}: {error.strerror}",
            finding_id="kv.unwritable",
            remedy="name a folder that can be written to by --tier-dir",
        ) from error
    if free + held < size:
        raise AssayError(
            f"the disk of {folder} has {free / 1e9:.3g} GB left, the tier may take"
            f" {size / 1e9:.3g} GB",
            finding_id="kv.tier_size",
            remedy="give less by --tier-size, or another folder by --tier-dir",
        )


def run_serve(plan: ServePlan, say: Callable[[str], None]) -> Report:
    """Print the command, and unless it is a dry run run it until it ends or is interrupted."""
    launch = launch_of(plan)
    say(str(launch))
    found = {} if plan.dry_run else _run(launch, plan.options)
    layers, tier = found.get("layers"), found.get("tier")
    results = {"codec": plan.codec, "mode": plan.mode, "layers": layers, "dry_run": plan.dry_run}
    headline, summary = (
        [Metric("codec", f"{plan.codec}, {plan.mode}")],
        f"{layers} layers were coded",
    )
    if plan.tier != "none":
        results |= {"mode": None, "tier": tier}
        headline = [Metric("codec", plan.codec)]
    if tier:
        headline += _tier_lines(tier)
        summary = f"{tier['requests_hit']} of {tier['requests']} requests had a stored prefix"
    return Report(
        command="kv serve",
        verdict=Verdict.PASS,
        subject={
            "model": plan.model,
            "command": list(launch.command),
            "environment": dict(launch.environment),
        },
        results=results,
        environment=describe(),
        headline=headline,
        summary="the command was printed, nothing was started" if plan.dry_run else summary,
    )


def _tier_lines(tier: Mapping[str, Any]) -> list[Metric]:
    lost = {
        n: tier[n]
        for n in ("refused", "missing", "dropped", "too_large", "write_failed", "not_encoded")
        if tier[n]
    }
    return [
        Metric(
            "stored",
            f"{tier['stored_blocks']:,} blocks, {tier['ratio']:.2f}× smaller than bf16;"
            f" {tier['evicted']:,} evicted",
        ),
        Metric(
            "loaded",
            f"{tier['loaded_tokens']:,} tokens in {tier['decode_s']:.3g} s;"
            f" {tier['recomputed_tokens']:,} computed again",
        ),
        Metric(
            "lost",
            ", ".join(f"{n.replace('_', ' ')} {count:,}" for n, count in lost.items()) or "nothing",
        ),
    ]


def plugin_folder() -> Path:
    """A folder in the cache with assay and the laboratory alone, and the metadata by which vLLM
    finds their plug-ins.
    """
    places = "".join(str(path.resolve()) for path in packages().values())
    return packages_alone(
        cache_dir("vllm-plugin") / hashlib.sha256(places.encode()).hexdigest()[:12]
    )


def _check_plugin(python: Path, environment: Mapping[str, str], *more: str) -> None:
    """AssayError unless that Python would load the plug-in."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "assay" not in allowed.split(","):
        raise AssayError(
            f"VLLM_PLUGINS={allowed} keeps assay's plug-in out",
            finding_id="kv.plugin_missing",
            remedy="unset VLLM_PLUGINS, or add assay to it",
        )
    done = subprocess.run(
        [str(python), "-c", _PLUGIN, *more],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    if not found.get("plugin"):
        raise AssayError(
            f"{python} does not find assay's plug-in:"
            f" {done.stderr.strip()[-200:] or 'it is not among its entry points'}",
            finding_id="kv.plugin_missing",
            remedy="name a Python that has vLLM with --python",
        )
    if found["missing"]:
        raise AssayError(
            f"{python} lacks {', '.join(found['missing'])}",
            finding_id="kv.package_missing",
            remedy=f"{python} -m pip install {' '.join(found['missing'])}",
        )


def _run(launch: Launch, options: Sequence[str]) -> dict[str, Any]:
    """Run the server until it ends; what its worker reported. AssayError where it failed or served
    without a codec.
    """
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
        found: dict[str, Any] = (
            json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        )
    if "error" in found:
        raise AssayError(found["error"], finding_id="kv.unsupported", remedy=found["remedy"] or "")
    if status or "layers" not in found:
        raise AssayError(
            f"vLLM's server ended with status {status}",
            finding_id="kv.serve_failed",
            remedy="read what it printed last",
            evidence={"status": status},
        )
    return found


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
                "the server answers although no worker of it loaded assay's plug-in: its numbers"
                " would be those of the exact cache",
                finding_id="kv.plugin_missing",
                remedy=(
                    "look whether its worker starts with another environment, and whether the port"
                    " was taken before"
                ),
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
