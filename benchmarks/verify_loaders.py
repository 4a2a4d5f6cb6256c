"""Which faults of a real checkpoint does vLLM's loader notice, and which does `assay verify`?

    python benchmarks/verify_loaders.py VLLM_PYTHON [FAULT...]

Each fault is put into a copy of SmolLM2-135M-Instruct. vLLM (CPU) loads it in a process of its own and writes 24 tokens
greedily; assay looks at the same folder, `--values` included, and at the digests against a manifest of the whole model.
Results are kept fault by fault in results/verify_loaders.json, so that a run can be continued.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from assay.checkpoint.report import build
from assay.checkpoint.verify import Options, verify
from assay.demo.models import build_smollm2
from checkpoint_samples import Arrays, edit_json, read_safetensors, write_safetensors

RESULTS = Path(__file__).parent / "results" / "verify_loaders.json"
WEIGHTS = "model.safetensors"
GATE = "model.layers.3.mlp.gate_proj.weight"

LOAD = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=256, max_num_seqs=1, dtype="bfloat16")
out = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=24))
print("RESULT " + json.dumps(out[0].outputs[0].text))
"""


def tensors(change: Callable[[Arrays], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        arrays = read_safetensors(folder / WEIGHTS)
        change(arrays)
        write_safetensors(folder / WEIGHTS, arrays)

    return damage


def bit(folder: Path) -> None:
    """One exponent bit of one weight, in place."""
    from assay.checkpoint.headers import read_header

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
        f / "config.json", rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    ),
    "end token outside the vocabulary": lambda f: [
        edit_json(f / n, eos_token_id=99_999) for n in ("config.json", "generation_config.json")
    ],
    "template that does not parse": lambda f: (f / "chat_template.jinja").write_text(
        "{% for m in messages %}"
    ),
}


def in_vllm(python: str, folder: Path) -> dict[str, Any]:
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(
        [python, "-c", LOAD, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
        check=False,
    )
    text = next((json.loads(x[7:]) for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    lines = [x for x in done.stderr.splitlines() if "Error" in x]
    return {
        "loads": text is not None, "text": text, "seconds": round(time.monotonic() - began, 1),
        "error": None if text is not None else (lines[-1][-200:] if lines else done.stderr[-200:]),
    }  # fmt: skip


def in_assay(folder: Path, listing: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in (
        ("structure", Options(allow_unverified=True, hashing="none")),
        ("values", Options(allow_unverified=True, hashing="none", values=True)),
        ("digests", Options(manifest=listing)),
    ):
        report = build(verify(str(folder), options))
        known = {f["id"] for other in found.values() for f in other["findings"]}
        found[name] = {
            "verdict": report.verdict.value,
            "findings": [
                {"id": f.id, "severity": f.severity.value, "title": f.title}
                for f in report.findings if f.id not in known and f.id != "checkpoint.unverified"
            ],
        }  # fmt: skip
    return found


def main() -> None:
    python, names = sys.argv[1], sys.argv[2:] or list(FAULTS)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    whole = build_smollm2()
    with tempfile.TemporaryDirectory() as place:
        listing = Path(place) / "manifest.json"
        verify(str(whole), Options(write_manifest=listing))
        for name in names:
            folder = Path(place) / "model"
            shutil.copytree(whole, folder)
            FAULTS[name](folder)
            results[name] = {"assay": in_assay(folder, listing), "vllm 0.32.0": in_vllm(python, folder)}
            RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
            print(name, json.dumps(results[name], ensure_ascii=False)[:600], flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
