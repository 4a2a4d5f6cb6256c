"""How long do 200 shards of headers take: a model of more than a terabyte, as sparse files, without
--values?

    python benchmarks/verify/verify_headers.py [RUNS]

The names, shapes and sizes are those of DeepSeek-V3 in bfloat16 (45,000 tensors), spread over 200
shards with their index, and a tokenizer of 128,000 tokens. Bodies are holes: nothing of them may be
read. Timed is the whole command, start of Python included, and the stages as `results.seconds`
gives them. Writes results/verify_headers.json.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from assay.checkpoint.expectation import expectation
from assay.checkpoint.subject import Checkpoint

RESULTS = Path(__file__).parent / "results" / "verify_headers.json"
SHARDS, VOCABULARY = 200, 129_280
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
}


def write(folder: Path) -> tuple[int, int]:
    """Write the model; (tensors, bytes)."""
    bare = Checkpoint("folder", {"config.json": 1}, lambda name: json.dumps(CONFIG).encode())
    promised = expectation(bare)
    assert promised is not None
    shapes = list(promised.shapes.items())
    mapped, total = {}, 0
    for i in range(SHARDS):
        file = f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, shape in shapes[i * len(shapes) // SHARDS : (i + 1) * len(shapes) // SHARDS]:
            size = 2
            for dimension in shape:
                size *= dimension
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            mapped[name], at = file, at + size
        raw = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(raw)) + raw)
            stream.truncate(8 + len(raw) + at)
        total += at
    documents = {
        "model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": mapped},
        "config.json": CONFIG,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "temperature": 0.6},
        "tokenizer.json": {
            "added_tokens": [],
            "model": {
                "type": "BPE",
                "merges": [],
                "vocab": {f"token{i}": i for i in range(VOCABULARY)},
            },
        },
        "tokenizer_config.json": {"eos_token": "token1", "chat_template": "{{ messages }}"},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    return len(shapes), total


def run(folder: Path) -> tuple[float, float, dict[str, Any]]:
    """(wall seconds, CPU seconds, report) of one command."""
    command = [sys.executable, "-m", "assay", "verify", str(folder), "--json", "--allow-unverified"]
    began, used = time.perf_counter(), cpu()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wall, busy = time.perf_counter() - began, cpu() - used
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0, report["findings"]
    return wall, busy, report


def cpu() -> float:
    """CPU seconds of all children so far: what the command takes on a machine that does nothing
    else.
    """
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as place:
        tensors, total = write(Path(place))
        measured = [run(Path(place)) for _ in range(runs)]
        on_disk = sum(p.stat().st_blocks * 512 for p in Path(place).iterdir())
    report = measured[0][2]
    assert report["results"]["tensors"] == tensors
    assert report["results"]["bytes"]["hashed"] == 0
    stages = {
        name: statistics.median(r["results"]["seconds"][name] for _, _, r in measured)
        for name in report["results"]["seconds"]
    }
    result = {
        "shards": SHARDS,
        "tensors": tensors,
        "model_bytes": total,
        "bytes_on_disk": on_disk,
        "runs": runs,
        "command_s": spread([wall for wall, _, _ in measured]),
        "command_cpu_s": spread([busy for _, busy, _ in measured]),
        "stage_s_median": stages,
        "goal_s": 2.0,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
