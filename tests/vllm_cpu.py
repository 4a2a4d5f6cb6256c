"""vLLM on a CPU with as few imports of it as can be: each takes ten seconds of a core."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

from assay import demo
from assay.runs import cache_dir, write_atomically

ONE_PROCESS: dict[str, Any] = {
    "extra_args": ["--distributed-executor-backend", "uni"],
    "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
}
"""For `demo.vllm_server`: the engine is its own worker. (By itself vLLM binds a worker to cores,
which needs another process.)
"""
KEPT = cache_dir("tests")  # before a test moves the cache


def said_by_vllm(script: Path, asked: str = "") -> Any:
    """The JSON of the last line that `script` prints about vLLM itself, kept until the script, its
    input or vLLM change.
    """
    python = demo.vllm_python()
    key = json.dumps([demo.VERSION, script.read_text(encoding="utf-8"), asked])
    kept = KEPT / f"{script.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if not kept.exists():
        ran = subprocess.run(
            [str(python), str(script)],
            input=asked,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        write_atomically(kept, ran.stdout.splitlines()[-1])
    return json.loads(kept.read_text(encoding="utf-8"))
