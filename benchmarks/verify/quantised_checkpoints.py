"""Does `assay verify` stay silent on real quantised checkpoints, and speak up when they are
damaged?

    python benchmarks/verify/quantised_checkpoints.py [KIND...] [--fixtures]

SmolLM2 is quantised by the real libraries on the CPU (`quantisers.py`), each in a virtual
environment of its own below assay's cache (AutoRound, torchao, bitsandbytes and HQQ share one;
llm-compressor's pin of compressed-tensors needs another; 4 GB together). Every export is verified
as it is, values included, and then with one fault at a time. Kinds that are not named keep the
results they have. `--fixtures` writes names, types and shapes of the exports, and what they
declare, as the fixtures of the tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from assay.checkpoint.opening import open_checkpoint
from assay.checkpoint.options import VerifyOptions
from assay.checkpoint.verify import verify
from assay.demo import locked, run_pip
from assay.demo.models import build_smollm2
from assay.runs import cache_dir
from assay.verdict import Finding, Severity

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from checkpoint.export_faults import EXPORT_FAULTS, Edit  # noqa: E402
from quantisers import KINDS  # noqa: E402

FIXTURES = HERE.parents[1] / "tests" / "checkpoint" / "exports"
TORCH = "torch==2.13.0"
ENVIRONMENTS = {
    "round": ("auto-round==0.16.1", "torchao==0.18.0", "hqq==0.2.8.post1", "bitsandbytes==0.50.2"),
    "compressor": ("llmcompressor==0.14.0.1",),
}


def environment(kind: str) -> Path:
    """The Python that has the library of a kind; its environment is made on the first call."""
    name = "compressor" if kind.startswith("llmcompressor") else "round"
    folder = cache_dir("quantisers") / name
    python = folder / "bin" / "python"
    with locked(f"quantisers-{name}"):
        if not (folder / ".ready").exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            for wanted in ([TORCH], [TORCH, *ENVIRONMENTS[name]]):
                run_pip(["install", *wanted], log_name=f"quantisers-{name}.log", python=python)
            (folder / ".ready").touch()
    return python


def export(kind: str) -> tuple[Path, float | None]:
    """The export's folder, and how long it took if it was made now."""
    folder = cache_dir("quantisers") / "exports" / kind
    if (folder / "config.json").exists():
        return folder, None
    shutil.rmtree(folder, ignore_errors=True)
    settings = os.environ | {
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [
        str(environment(kind)),
        str(HERE / "quantisers.py"),
        kind,
        str(build_smollm2()),
        str(folder),
    ]
    start = time.perf_counter()
    log = cache_dir("logs") / f"quantise-{kind}.log"
    with log.open("w") as stream:
        subprocess.run(command, check=True, env=settings, stdout=stream, stderr=subprocess.STDOUT)
    return folder, time.perf_counter() - start


def findings(folder: Path, **options: Any) -> list[Finding]:
    asked = VerifyOptions(allow_unverified=True, hashing="none", **options)
    return [f for f in verify(str(folder), asked).findings if f.id != "checkpoint.unverified"]


def damaged(source: Path, edit: Edit, folder: Path) -> None:
    """A copy of an export with a fault: linked where nothing changes."""
    for file in source.iterdir():
        if file.suffix == ".safetensors" and edit.renamed:
            shutil.copy(file, folder / file.name)
            _rename(folder / file.name, edit.renamed)
        elif file.is_file() and file.name not in {"config.json", "quantization_config.json"}:
            os.link(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(edit.config))


def _rename(file: Path, renamed: dict[str, str]) -> None:
    with file.open("r+b") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = stream.read(length)
        for old, new in renamed.items():
            header = header.replace(f'"{old}"'.encode(), f'"{new}"'.encode())
        stream.seek(8)
        stream.write(header)


def examine(kind: str) -> dict[str, Any]:
    folder, seconds = export(kind)
    config = json.loads((folder / "config.json").read_text())
    names = set(open_checkpoint(str(folder)).checkpoint.tensors)
    healthy = findings(folder, values=True)
    faults: dict[str, Any] = {}
    for fault in EXPORT_FAULTS:
        edit = fault.edit(config, names)
        if edit is None:
            continue
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            damaged(folder, edit, Path(temporary))
            raised = findings(Path(temporary), serve_args=fault.serve_args)
        hit = any(
            f.id == f"checkpoint.{fault.finding}" and f.severity.value == fault.severity
            for f in raised
        )
        faults[fault.name] = {
            "wanted": fault.finding,
            "found": hit,
            "raised": sorted({f.id for f in raised}),
        }
    return {
        "kind": kind,
        "method": config.get("quantization_config", {}).get("quant_method"),
        "tensors": len(names),
        "seconds": seconds,
        "healthy_errors": [f.title for f in healthy if f.severity is Severity.ERROR],
        "healthy_warnings": [f.title for f in healthy if f.severity is Severity.WARNING],
        "faults": faults,
    }


def fixture(kind: str) -> dict[str, Any]:
    """Names, types and shapes, layer by layer where they are the same, and the files that declare a
    quantisation.
    """
    folder, _ = export(kind)
    tensors = open_checkpoint(str(folder)).checkpoint.tensors
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for tensor in tensors.values():
        layer = re.search(r"\.layers\.(\d+)\.", tensor.name)
        pattern = tensor.name.replace(layer[0], ".layers.*.") if layer else tensor.name
        groups[pattern, tensor.dtype, tensor.shape].append(int(layer[1]) if layer else -1)
    return {
        "config": json.loads((folder / "config.json").read_text()),
        "tensors": [
            {"name": name, "dtype": dtype, "shape": list(shape)}
            | ({} if layers == [-1] else {"layers": spans(layers)})
            for (name, dtype, shape), layers in sorted(groups.items())
        ],
    }


def listed(export: dict[str, Any]) -> str:
    """A fixture as text with one tensor a line."""
    tensors = ",\n".join("  " + json.dumps(entry) for entry in export["tensors"])
    return (
        f'{{"config": {json.dumps(export["config"], indent=1)},\n "tensors": [\n{tensors}\n ]}}\n'
    )


def spans(layers: list[int]) -> list[list[int]]:
    """`[0, 1, 2, 4]` as `[[0, 2], [4, 4]]`."""
    found: list[list[int]] = []
    for layer in sorted(layers):
        if found and layer == found[-1][1] + 1:
            found[-1][1] = layer
        else:
            found.append([layer, layer])
    return found


def table(rows: list[dict[str, Any]]) -> str:
    names = [f.name for f in EXPORT_FAULTS]
    lines = [
        "# Real quantised checkpoints of SmolLM2-135M-Instruct",
        "",
        (
            "`·` the fault has no meaning for this format; a number counts findings on the whole"
            " export."
        ),
        "",
        "| export | errors on the whole | warnings | " + " | ".join(names) + " |",
        "|---" * (len(names) + 3) + "|",
    ]
    for row in rows:
        marks = [
            (
                "·"
                if name not in row["faults"]
                else "found"
                if row["faults"][name]["found"]
                else "MISSED"
            )
            for name in names
        ]
        cells = [
            row["kind"],
            str(len(row["healthy_errors"])),
            str(len(row["healthy_warnings"])),
            *marks,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    kinds = [a for a in sys.argv[1:] if not a.startswith("--")] or list(KINDS)
    if "--fixtures" in sys.argv:
        FIXTURES.mkdir(exist_ok=True)
        for kind in kinds:
            (FIXTURES / f"{kind}.json").write_text(listed(fixture(kind)), encoding="utf-8")
        return
    results = HERE / "results"
    store = results / "quantised_checkpoints.json"
    known = {row["kind"]: row for row in json.loads(store.read_text())} if store.exists() else {}
    for kind in kinds:
        known[kind] = examine(kind)
        print(json.dumps(known[kind]), flush=True)
    rows = [known[kind] for kind in sorted(known)]
    store.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (results / "quantised_checkpoints.md").write_text(table(rows), encoding="utf-8")
    missed = [(r["kind"], n) for r in rows for n, f in r["faults"].items() if not f["found"]]
    if missed or any(r["healthy_errors"] for r in rows):
        sys.exit(f"missed: {missed}")


if __name__ == "__main__":
    main()
