"""A real vLLM server on the CPU with a chosen draft, and known requests to it: what the spec
benchmarks share.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from assay.demo import vllm_server
from assay.errors import AssayError
from assay.runs import cache_dir
from assay.speculation.traffic import PROMPTS

MODEL = "smollm2"
MAX_TOKENS = 96


@dataclass
class Run:
    """What one server left behind."""

    name: str
    started: bool
    log: Path
    responses: list[Any] = field(default_factory=list)
    before: str = ""
    after: str = ""
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("nan")


@contextmanager
def server(
    model: Path, speculative: dict[str, Any] | None, log: Path, name: str = MODEL
) -> Iterator[str | None]:
    """Serve `model` with vLLM on the CPU and yield its URL, or None if it refuses to start; its log
    goes to `log`.
    """
    arguments = ["--max-num-seqs", "4"]
    if speculative is not None:
        arguments += ["--per-request-spec-decode-metrics", "summary"]
        arguments += ["--speculative-config", json.dumps(speculative)]
    with ExitStack() as held:
        try:
            running = held.enter_context(
                vllm_server(
                    model,
                    name=name,
                    max_model_len=1024,
                    extra_args=arguments,
                    env={"VLLM_LOG_STATS_INTERVAL": "2"},
                )
            )
        except AssayError:
            shutil.copyfile(cache_dir("logs") / f"vllm-{name}.log", log)
            yield None
            return
        held.callback(shutil.copyfile, running.log, log)
        yield running.url


def run(
    name: str, model: Path, speculative: dict[str, Any] | None, folder: Path, requests: int = 8
) -> Run:
    """Start a server, send greedy requests one after the other, and keep its log, its pages and its
    responses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    with server(model, speculative, log) as url:
        result = Run(name, url is not None, log)
        if url is None:
            return result
        with httpx.Client(base_url=url, timeout=300) as client:
            _complete(client, "Warm up", 8)
            result.before = client.get("/metrics").text
            began = time.monotonic()
            result.responses = [
                _complete(client, PROMPTS[i % len(PROMPTS)], MAX_TOKENS) for i in range(requests)
            ]
            result.seconds = time.monotonic() - began
            result.tokens = sum(r["usage"]["completion_tokens"] for r in result.responses)
            time.sleep(2.5)  # the last window is logged after the last token
            result.after = client.get("/metrics").text
    return result


def _complete(client: httpx.Client, prompt: str, tokens: int) -> Any:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return client.post("/v1/completions", json=body).raise_for_status().json()


def make_draft(kind: str, source: Path, target: Path) -> Path:
    """A copy of the checkpoint as a draft: `layers:N` (the first N//2 and last layers), `int3`,
    `random`, `zeroed`, `embedding_only` (every other tensor is left out) or `no_weights` (no weight
    file).
    """
    if target.exists():
        return target
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    if kind.startswith("int"):
        from assay.demo.damage import damage_checkpoint

        damage_checkpoint(kind, source, partial)
    else:
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors"))
        _write_weights(kind, source, partial)
    return partial.rename(target)


def _write_weights(kind: str, source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    if kind == "no_weights":
        return
    if kind == "embedding_only":
        tensors = {n: t for n, t in tensors.items() if "embed_tokens" in n}
    elif kind == "zeroed":
        tensors = {n: torch.zeros_like(t) for n, t in tensors.items()}
    elif kind == "random":
        rng = np.random.default_rng(7)
        tensors = {
            n: torch.from_numpy(rng.normal(1.0 if t.ndim == 1 else 0.0, 0.02, t.shape)).to(t.dtype)
            for n, t in tensors.items()
        }
    elif kind.startswith("layers:"):
        tensors = _fewer_layers(tensors, target, int(kind.split(":")[1]))
    else:
        raise ValueError(f"unknown draft {kind!r}")
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )


def _fewer_layers(tensors: dict[str, Any], target: Path, keep: int) -> dict[str, Any]:
    """Drop layers from just before the end, where a model this deep is most redundant."""
    path = target / "config.json"
    config = json.loads(path.read_text())
    depth = config["num_hidden_layers"]
    kept = [*range(keep - 2), depth - 2, depth - 1]
    config["num_hidden_layers"] = keep
    path.write_text(json.dumps(config, indent=2))
    number = {f"model.layers.{old}.": f"model.layers.{new}." for new, old in enumerate(kept)}
    found = {}
    for name, tensor in tensors.items():
        if not name.startswith("model.layers."):
            found[name] = tensor
            continue
        prefix = ".".join(name.split(".")[:3]) + "."
        if prefix in number:
            found[number[prefix] + name.removeprefix(prefix)] = tensor
    return found
