"""The tensors that transformers would load for a config, compared with the stored ones.

The comparison runs in a process of its own (`meta_program`), within bounds on time and memory and
without network. It takes some seconds, so that its result is kept.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from assay.checkpoint.comparison import Comparison
from assay.checkpoint.expectation import tied
from assay.checkpoint.storage import Kind, carrier, fused_kind, stored_kind, weight_shape
from assay.checkpoint.subject import Checkpoint
from assay.runs import Kept, cache_path

_COUNTS = re.compile(r"layers|experts|depth|blocks|stages")

MAX_COUNT, MAX_MODULES = 1024, 40_000
"""Largest number of layers or experts of a config that is built, and of both multiplied: each costs
time.
"""
MAX_NAMES = 200_000
WALL_S = 150
PROGRAM = Path(__file__).with_name("meta_program.py")
LEFT_OVER = 0.1
"""Largest share of stored names that the model may leave unused: with more of them the checkpoint
has another layout, and what the model misses says nothing.
"""
_FUSED_EXPERTS = ("gate_up_proj", "down_proj", "gate_proj", "up_proj", "w13", "w2")
_KEPT_VARIABLES = frozenset(
    {"PATH", "HOME", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TMPDIR"}
    | {"SYSTEMROOT", "TEMP", "TMP"}
)


def compare_with_transformers(checkpoint: Checkpoint, draft: tuple[str, ...] = ()) -> Comparison:
    """Compare a checkpoint with the model that transformers would build for its config.

    Args:
        checkpoint: The checkpoint.
        draft: Beginnings of names that belong to a draft head, which transformers does not load.

    Returns:
        The comparison; its `problem` says why nothing could be compared.
    """
    config = checkpoint.config
    if not checkpoint.config.get("model_type") or not config.get("architectures"):
        return _unknown("config.json names no model type or no architecture")
    if not _sane(config):
        return _unknown("config.json promises more layers or experts than assay counts")
    stored = stored_names(checkpoint, draft)
    if len(stored) > MAX_NAMES:
        return _unknown(f"it holds more than {MAX_NAMES} tensors")
    return _judged(checkpoint, _answer({"config": dict(config), "stored": stored}), len(stored))


def _unknown(problem: str) -> Comparison:
    return Comparison("transformers", problem=problem)


def _judged(checkpoint: Checkpoint, answer: Mapping[str, Any], stored: int) -> Comparison:
    origin = str(answer.get("origin", "transformers"))
    if problem := answer.get("problem"):
        return Comparison(origin, problem=f"{origin}: {problem}")
    missing, unused = list(answer["missing"]), list(answer["unused"])
    if tied(checkpoint):
        missing = [name for name in missing if not name.endswith("lm_head.weight")]
    if missing and len(unused) > LEFT_OVER * stored:
        problem = f"{len(unused)} of {stored} names are not those of {origin}, such as {unused[0]}"
        return Comparison(origin, problem=problem)
    wrong = {name: (tuple(s), tuple(e)) for name, (s, e) in answer["wrong"].items()}
    return Comparison(origin, tuple(missing), wrong)


def stored_names(checkpoint: Checkpoint, draft: tuple[str, ...]) -> dict[str, list[int] | None]:
    """Names as an unquantised checkpoint has them, each with its shape, or None if it is packed."""
    names: dict[str, list[int] | None] = {}
    for module, params in checkpoint.modules.items():
        if draft and (module + ".").startswith(draft):
            continue
        kind = stored_kind(params)
        packed = kind not in {None, Kind.PLAIN}
        if packed and carrier(params) is not None:
            shape = weight_shape(params)
            names[f"{module}.weight"] = list(shape) if shape else None
        fused = module.endswith("experts")
        stems = [
            s for s in _FUSED_EXPERTS if fused and fused_kind(params, s) not in {None, "plain"}
        ]
        for stem in stems:
            names[f"{module}.{stem}"] = None
        for parameter, tensor in params.items():
            side = packed or parameter.startswith(tuple(f"{s}_" for s in stems))
            if not side or parameter.endswith("bias"):
                names.setdefault(f"{module}.{parameter}".lstrip("."), list(tensor.shape))
    return names


def _answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The program's answer: a kept one, or a new one, kept unless it failed."""
    text = json.dumps(request, sort_keys=True, default=str)
    key = [_version("transformers"), sha256(PROGRAM.read_bytes()).hexdigest(), text]
    folder = cache_path("tensor-lists")
    kept = Kept(folder) if folder else None
    if kept is not None and isinstance(known := kept.get(key), dict):
        return known
    answer = _run(text)
    if kept is not None and "origin" in answer:
        kept.put(key, answer)
    return answer


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _run(text: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k in _KEPT_VARIABLES}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(PROGRAM)],
            input=text.encode(),
            capture_output=True,
            timeout=WALL_S,
            check=False,
            env=environment,
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"problem": f"the model was not built within {WALL_S} s"}
    except (OSError, ValueError, IndexError):
        return {"problem": "the model could not be built within the bounds on time and memory"}
    return answer if isinstance(answer, dict) else {"problem": "the model could not be built"}


def _sane(config: Mapping[str, Any], depth: int = 0) -> bool:
    """Bounds on what the meta model has to enumerate, nested configs included."""
    counts = {k: v for k, v in config.items() if type(v) is int and _COUNTS.search(k)}
    layers = max((v for k, v in counts.items() if "experts" not in k), default=1)
    experts = max((v for k, v in counts.items() if "experts" in k), default=1)
    if max(counts.values(), default=0) > MAX_COUNT or layers * max(experts, 1) > MAX_MODULES:
        return False
    return depth <= 4 and all(_sane(v, depth + 1) for v in config.values() if isinstance(v, dict))
