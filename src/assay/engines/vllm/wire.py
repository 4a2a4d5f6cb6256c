"""What goes between assay and a worker: JSON lines, and tensors in safetensors files beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import Engagement, Head, HookSpec, ScoreJob, ScoringPath, Window

if TYPE_CHECKING:
    import torch


def job_to_json(job: ScoreJob) -> dict[str, Any]:
    """A job as plain JSON types."""
    return asdict(job)


def job_from_json(data: Mapping[str, Any]) -> ScoreJob:
    """Read what `job_to_json` wrote."""
    hook = data["hook"]
    return ScoreJob(**{**data, "path": ScoringPath(data["path"]), "hook": HookSpec(**hook) if hook else None})


def windows_to_json(windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Windows as plain JSON types."""
    return [{"index": w.index, "tokens": list(map(int, w.tokens))} for w in windows]


def windows_from_json(data: Sequence[Mapping[str, Any]]) -> list[Window]:
    """Read what `windows_to_json` wrote."""
    return [Window(w["index"], tuple(w["tokens"])) for w in data]


def engagement_from_json(data: Mapping[str, Any]) -> Engagement:
    """Read `asdict(engagement)`, whose layer numbers JSON turned into text."""
    return Engagement(**{**data, "per_layer": {int(k): v for k, v in data["per_layer"].items()}})


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to one file, on the CPU."""
    from safetensors.torch import save_file

    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def load_tensors(path: Path, *, keep: bool = False) -> dict[str, torch.Tensor]:
    """Read what `save_tensors` wrote into memory, and remove the file unless it is to be kept."""
    from safetensors.torch import load

    tensors: dict[str, torch.Tensor] = load(path.read_bytes())
    if not keep:
        path.unlink()
    return tensors


def save_head(path: Path, head: Head) -> dict[str, Any]:
    """Write the tensors of a head; returns the rest of it as JSON."""
    tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
    save_tensors(path, tensors)
    return {"softcap": head.softcap, "scale": head.scale}


def load_head(path: Path, rest: Mapping[str, Any], *, keep: bool = False) -> Head:
    """Read what `save_head` wrote."""
    tensors = load_tensors(path, keep=keep)
    return Head(tensors["weight"], tensors.get("bias"), **rest)
