"""Which faults of a real checkpoint does vLLM's loader notice, and which does `assay verify`?

    python benchmarks/verify/verify_loaders.py VLLM_PYTHON [FAULT...]

Each fault is put into a copy of SmolLM2-135M-Instruct. vLLM (CPU) reads the config and loads the
weights with its own `get_model`, one copy after the other in one process; assay looks at the same
folders: structure, `--values`, and the digests against a manifest of the whole model. Writes
results/verify_loaders.json and .md.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from assay.checkpoint.options import VerifyOptions
from assay.checkpoint.verify import verify
from assay.demo.models import build_smollm2
from checkpoint_samples import Arrays, edit_json, read_safetensors, write_safetensors

RESULTS = Path(__file__).parent / "results" / "verify_loaders.json"
WEIGHTS = "model.safetensors"
GATE = "model.layers.3.mlp.gate_proj.weight"

LOAD = """
import json, os, sys
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

torch.accelerator.empty_cache = lambda: None  # as vLLM's own CPU runner does before it loads
begun = False
for folder in json.load(sys.stdin):
    try:
        config = EngineArgs(model=folder, enforce_eager=True, max_model_len=256, dtype="bfloat16").create_engine_config()
        with set_current_vllm_config(config):
            if not begun:
                init_distributed_environment(1, 0, "file://" + folder + ".rendezvous", 0, "gloo")
                initialize_model_parallel(1, 1)
                begun = True
            get_model(vllm_config=config)
        said = None
    except Exception as error:
        said = type(error).__name__ + ": " + " ".join(str(error).split())[:200]
    print("RESULT " + json.dumps([folder, said]), flush=True)
"""  # noqa: E501


def tensors(change: Callable[[Arrays], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        arrays = read_safetensors(folder / WEIGHTS)
        change(arrays)
        write_safetensors(folder / WEIGHTS, arrays)

    return damage


def bit(folder: Path) -> None:
    """One exponent bit of one weight, in place."""
    from assay.checkpoint.safetensors import read_header

    tensor = next(t for t in read_header(folder / WEIGHTS, WEIGHTS).tensors if t.name == GATE)
    with (folder / WEIGHTS).open("r+b") as stream:
        stream.seek(tensor.start + 2 * 1000 + 1)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 0x40]))


def hole(folder: Path) -> None:
    with (folder / WEIGHTS).open("r+b") as stream:
        stream.seek(-(8 << 20), 2)
        stream.write(bytes(4 << 20))


FAULTS: dict[str, Callable[[Path], Any]] = {
    "none": lambda f: None,
    "one exponent bit flipped": bit,
    "4 MiB of zeros": hole,
    "cut by one byte": lambda f: os.truncate(f / WEIGHTS, (f / WEIGHTS).stat().st_size - 1),
    "one matrix not stored": tensors(lambda t: t.pop(GATE)),
    "NaN in one row": tensors(lambda t: t[GATE][1][7].fill(0x7FC0)),
    "head untied and not stored": lambda f: edit_json(f / "config.json", tie_word_embeddings=False),
    "rope_theta of another model": lambda f: edit_json(
        f / "config.json",
        rope_theta=1e4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "head_dim of another model": lambda f: edit_json(f / "config.json", head_dim=32),
    "fewer layers configured": lambda f: edit_json(f / "config.json", num_hidden_layers=20),
    "web page as a shard": lambda f: (f / WEIGHTS).write_bytes(b"<!DOCTYPE html>" + b" " * 900),
    "vocab_size of another model": lambda f: edit_json(f / "config.json", vocab_size=32_000),
}


def in_vllm(python: str, folders: list[Path]) -> dict[str, str | None]:
    """What the loader says of each folder by its name; None where it loads."""
    environment = os.environ | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [python, "-c", LOAD],
        input=json.dumps(list(map(str, folders))),
        capture_output=True,
        text=True,
        env=environment,
        timeout=540,
        check=False,
    )
    rows = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if len(rows) != len(folders):
        sys.exit(f"vLLM came to {len(rows)} of {len(folders)} folders:\n{done.stderr[-3000:]}")
    return {Path(folder).name: said for folder, said in rows}


def in_assay(folder: Path, listing: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in (
        ("structure", VerifyOptions(allow_unverified=True, hashing="none")),
        ("values", VerifyOptions(allow_unverified=True, hashing="none", values=True)),
        ("digests", VerifyOptions(manifest=listing, digest_cache=False)),
    ):
        report = verify(str(folder), options)
        known = {f["id"] for other in found.values() for f in other["findings"]}
        found[name] = {
            "verdict": report.verdict.value,
            "findings": [
                {"id": f.id, "severity": f.severity.value, "title": f.title}
                for f in report.findings if f.id not in known and f.id != "checkpoint.unverified"
            ],
        }  # fmt: skip
    return found


def table(results: dict[str, Any]) -> str:
    lines = [
        "# Faults of SmolLM2-135M: who notices",
        "",
        "| fault | vLLM 0.32.0 loads it | assay | with `--values` | with digests |",
        "|---|---|---|---|---|",
    ]
    for name, row in results.items():
        said = row["vllm"]
        cells = ["yes" if said is None else f"no: {said.split(':')[0]}"]
        for stage in ("structure", "values", "digests"):
            ids = sorted(
                {
                    f["id"].removeprefix("checkpoint.")
                    for f in row["assay"][stage]["findings"]
                    if f["severity"] == "error"
                }
            )
            cells.append(", ".join(f"`{i}`" for i in ids) or "–")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    python, names = sys.argv[1], sys.argv[2:] or list(FAULTS)
    whole = build_smollm2()
    with tempfile.TemporaryDirectory() as place:
        listing = Path(place) / "manifest.json"
        verify(str(whole), VerifyOptions(write_manifest=listing, digest_cache=False))
        folders = {}
        for i, name in enumerate(names):
            folders[name] = Path(place) / f"fault-{i}"
            shutil.copytree(whole, folders[name])
            FAULTS[name](folders[name])
        theirs = in_vllm(python, list(folders.values()))
        results = {
            n: {"vllm": theirs[f.name], "assay": in_assay(f, listing)} for n, f in folders.items()
        }
    RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False).replace(place, "…") + "\n")
    RESULTS.with_suffix(".md").write_text(table(results).replace(place, "…"))
    print(table(results))


if __name__ == "__main__":
    main()
