"""Keys, queries and values of a running vLLM, captured for a calibration.

The engine may run in a worker, so the hook writes the tensors into a file when it has seen all
windows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors.torch import load, save_file

from assay.engines.scoring import Engagement, HookSpec, ScoreJob, ScoringEngine, Window
from assay.engines.vllm.kv_hooks import HookContext
from assay.engines.vllm.steps import Request
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay_lab.kv.cache_bytes import NOTE
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.sampler import Sampler, kept_per_window
from assay_lab.kv.vllm.hook import check_cache

if TYPE_CHECKING:
    import torch


class VllmCapture:
    """A hook that changes nothing and keeps what `Sampler` wants of `windows` windows of `length`
    tokens.
    """

    placement: Literal["pre_rope"] = "pre_rope"

    def __init__(self, length: int, keep: int, windows: int, out: str) -> None:
        self._length, self._keep, self._windows, self._out = length, keep, windows, Path(out)
        self._running: tuple[Request, ...] | None = None
        self._fires: dict[int, int] = {}
        self._seen = 0

    def bind(self, model: Any, context: HookContext) -> None:
        """Remember the model's cache, rotation and output projections."""
        self._context = context
        shape = cache_shape(model)
        check_cache(shape, context)
        self._sampler = Sampler(shape, self._length, self._keep)
        self._rotary = Rotary.of_config(model.config, self._length)
        self._output = {
            layer: _weight(module, shape.query_heads * shape.head_dim)
            for layer, module in context.attentions.items()
        }

    def on_query(self, layer: int, q: torch.Tensor, positions: torch.Tensor) -> None:
        """Queries [tokens, heads, head_dim] before RoPE."""
        if requests := self._requests():
            for request in requests:
                self._sampler.on_queries(layer, _rows(q, request))

    def on_kv(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tokens, kv_heads, head_dim], as they are."""
        if requests := self._requests():
            for request in requests:
                self._sampler.on_states(layer, "k", _rows(k, request))
                self._sampler.on_states(layer, "v", _rows(v, request))
            self._fires[layer] = self._fires.get(layer, 0) + 1
        return k, v

    def commit(self) -> None:
        """A batch went through; with the last one the file is written."""
        self._seen = len(self._sampler.positions)
        if self._seen == self._windows:
            tensors = self._sampler.tensors(self._rotary, self._output)
            save_file(
                {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, self._out
            )

    def discard(self) -> None:
        """A batch failed half-way: what it left cannot be told from the rest."""
        if len(self._sampler.positions) != self._seen:
            raise AssayError(
                "a batch of calibration text did not fit into memory",
                finding_id="fidelity.engine_failed",
                remedy="use a smaller --batch or shorter windows",
            )

    def engagement(self) -> Engagement:
        """Calls by layer, and the shape of the cache."""
        notes = {NOTE: {"cache": self._sampler.shape.to_json()}}
        return Engagement(sum(self._fires.values()), None, dict(self._fires), notes)

    def _requests(self) -> tuple[Request, ...] | None:
        """The requests of the step; AssayError unless each is a whole window."""
        requests = self._context.steps.requests
        if requests is not None and requests is not self._running:
            if any(r.start or r.end != self._length - 1 for r in requests):
                raise AssayError(
                    "calibration text goes through in one pass, but vLLM cut it",
                    finding_id="fidelity.engine_failed",
                    remedy="raise max_num_batched_tokens, or use shorter windows",
                )
            self._running = requests
            self._sampler.begin(len(requests))
        return requests


def capture_in_vllm(
    engine: ScoringEngine,
    windows: Sequence[Window],
    *,
    tokens: int,
    batch: int,
    progress: Progress = NO_PROGRESS,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors of a calibration of about `tokens` samples, and the shape of the cache as JSON."""
    length = len(windows[0].tokens)
    with tempfile.TemporaryDirectory(prefix="assay-capture-") as folder:
        out = Path(folder) / "samples.safetensors"
        config = {
            "length": length,
            "keep": kept_per_window(tokens, len(windows), length),
            "windows": len(windows),
            "out": str(out),
        }
        job = ScoreJob(batch=batch, hook=HookSpec("assay_lab.kv.vllm.capture:VllmCapture", config))
        with progress("capturing keys, values and queries", len(windows)) as advance:
            for _ in engine.score_windows(windows, job):
                advance()
        return load(out.read_bytes()), dict(engine.engagement().notes[NOTE]["cache"])


def _rows(x: torch.Tensor, request: Request) -> torch.Tensor:
    """A request's rows of [tokens, heads, d] as [1, heads, its tokens, d]."""
    return x[request.offset : request.offset + request.count].transpose(0, 1).unsqueeze(0)


def _weight(attention: Any, width: int) -> torch.Tensor:
    """The output projection [hidden, H·d] of an attention, in any form its kernel keeps:
    its image of unit vectors.
    """
    import torch

    parameter = next(attention.parameters())
    with torch.inference_mode():
        unit = torch.eye(width, dtype=_floating(parameter), device=parameter.device)
        image = attention.o_proj(unit)[0] - attention.o_proj(torch.zeros_like(unit[:1]))[0]
    return image.mT.float().cpu()


def _floating(parameter: torch.Tensor) -> torch.dtype:
    import torch

    return (
        parameter.dtype
        if parameter.dtype in (torch.bfloat16, torch.float16)
        else torch.get_default_dtype()
    )
