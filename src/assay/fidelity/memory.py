"""Peak memory of a comparison: predicted before anything is loaded, and measured.

Reference and candidates are in memory one after the other: the reference's states go to the disk as
they are scored, and it is closed before the first candidate is opened. Only an engine that gives no
states (gguf:) stays open beside the candidates.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.engines.device import choose_device, free_memory, window_bytes, windows_at_once
from assay.engines.hf.spec import parse_hf
from assay.engines.scoring import ScoringPath
from assay.engines.vllm.spec import parse_vllm
from assay.errors import AssayError
from assay.fidelity.metrics.token_statistics import BLOCK_BYTES, CACHE_BYTES
from assay.fidelity.model_size import read_checkpoint
from assay.fidelity.names import label_of
from assay.fidelity.plan import Plan
from assay.fidelity.store.manifest import read_manifest
from assay.fidelity.store.reader import stored_path
from assay.progress import Progress

_LIBRARIES, _BUFFERS = 150 << 20, 150 << 20
"""Bytes of transformers, which is not loaded yet when memory is predicted, and of the tokenizer,
the text and the buffers of kernels: as measured with SmolLM2 on a CPU."""


@dataclass(frozen=True)
class Side:
    """Bytes that one side takes on its device, from its checkpoint's headers.

    `weights` as they are held, `stored` beside them while they are converted to another type,
    `head` a copy of the reference's output head, which is written to the disk or read from it,
    `window` one window at work (final states, activations, KV cache), of which `windows` run
    together, `logits` the rows of both sides at once, `cache` a KV cache that is reserved.
    """

    label: str
    device: str
    weights: int
    stored: int = 0
    head: int = 0
    window: int = 0
    windows: int = 1
    logits: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """The peak: while it is loaded, or while it scores."""
        work = 2 * self.head + self.windows * self.window + self.logits + self.cache
        return self.weights + max(self.stored, work)

    @property
    def least(self) -> int:
        """What it cannot do without: one window at a time, and no more logits and cache than there
        is room for.
        """
        return self.weights + self.head + self.window


@dataclass(frozen=True)
class Memory:
    """What a comparison takes. `base` is what this process holds before it, `free` what is free
    beside that, by device.
    """

    sides: Sequence[Side]
    base: int
    free: dict[str, int]
    before: int = 0
    """The most bytes that this process had held on the CPU until then."""
    together: bool = False
    """Whether the reference stays in memory beside a candidate."""
    unknown: Sequence[str] = ()
    """Sides whose size is unknown before they are opened."""
    elsewhere: bool = False
    """Whether an engine runs in a process of its own, whose memory is not measured here."""

    def peak(self, device: str, *, least: bool = False) -> int:
        """Bytes at the peak on a device, what the process holds already included."""
        own = [side.least if least else side.total for side in self.sides if side.device == device]
        whole = own[0] + max(own[1:], default=0) if self.together and own else max(own, default=0)
        return whole + (self.base if device == "cpu" else 0)

    def available(self, device: str) -> int:
        """Bytes that it may take there, in the same terms as `peak`."""
        return self.free[device] + (self.base if device == "cpu" else 0)

    @property
    def tightest(self) -> str:
        """The device that is filled most."""
        return max(self.free, key=lambda d: self.peak(d) / max(1, self.available(d)), default="cpu")

    def require(self) -> None:
        """AssayError where even one window at a time does not fit on a device."""
        for device in self.free:
            needed, there = self.peak(device, least=True), self.available(device)
            if needed > there:
                side = max((s for s in self.sides if s.device == device), key=lambda s: s.least)
                beside = " beside the reference" if self.together else ""
                raise AssayError(
                    f"{side.label}{beside} needs {_gib(needed)} on {device}, weights"
                    f" {_gib(side.weights)}, and {_gib(there)} can be taken",
                    finding_id="fidelity.memory",
                    remedy=(
                        "give a smaller type (?dtype=bfloat16), a quantised checkpoint, a shorter"
                        " --length, or more GPUs (vllm:MODEL?tensor_parallel=N)"
                    ),
                    evidence={"needed": needed, "available": there, **asdict(side)},
                )

    def line(self) -> str:
        """The prediction in one line; empty where nothing is known."""
        if not self.sides:
            return ""
        device = self.tightest
        own = {
            side.label: f"{side.label} {_gib(side.total)}"
            for side in self.sides
            if side.device == device
        }
        how = (", together" if self.together else ", one after the other") if len(own) > 1 else ""
        parts = ", ".join(own.values())
        unknown = (
            f"; not known before it is opened: {', '.join(self.unknown)}" if self.unknown else ""
        )
        return (
            f"memory: about {_gib(self.peak(device))} at the peak on {device} of"
            f" {_gib(self.available(device))} that can be taken ({parts}{how}){unknown}"
        )

    def to_json(self) -> dict[str, Any]:
        """`results.memory`, in bytes, of the device that is filled most."""
        device = self.tightest
        return {
            "device": device,
            "predicted": self.peak(device) if self.sides else None,
            "available": self.available(device) if self.free else None,
            "measured_peak": None if self.elsewhere else measured_peak(device, self.before),
            "together": self.together,
            "unknown": list(self.unknown),
            "sides": [asdict(side) | {"total": side.total} for side in self.sides],
        }


def measured_peak(device: str, before: int = 0) -> int | None:
    """The most bytes that this process has held on a device; on a CPU None where that is no more
    than `before`.
    """
    if device.startswith("cuda"):
        return int(sys.modules["torch"].cuda.max_memory_reserved(device)) or None
    most = _held("VmHWM")
    return most if most > before else None


def resident() -> int:
    """Bytes that this process holds now, with those that it will hold beside the models."""
    return _held("VmRSS") + _BUFFERS + (0 if "transformers" in sys.modules else _LIBRARIES)


def _held(key: str) -> int:
    """Bytes of memory by Linux's name: VmRSS now, VmHWM at most. Elsewhere the most, which a
    parent's may hide.
    """
    try:
        return 1024 * int(
            Path("/proc/self/status").read_text(encoding="ascii").split(f"{key}:")[1].split()[0]
        )
    except (OSError, ValueError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most * (1 if sys.platform == "darwin" else 1024)


def predict_memory(plan: Plan) -> Memory:
    """What the comparison will take, by side. Nothing is loaded; a side whose files are not here is
    `unknown`.
    """
    sides, unknown = [], []
    free: dict[str, int] = {}
    head = _stored_head(plan.reference)
    if plan.ray:  # whose nodes hold the engines
        return Memory(
            (),
            resident(),
            {},
            unknown=[label_of(s, plan.sides) for s in plan.sides],
            elsewhere=True,
        )
    for spec in (plan.reference, *plan.sides):
        if spec.startswith(("run:", "pack:", "http://", "https://")):
            continue
        label = label_of(spec, plan.sides)
        try:
            side = _side(spec, label, plan, head, free)
        except (
            AttributeError,
            TypeError,
            ValueError,
            ArithmeticError,
            RuntimeError,
        ):  # GPT-2's names, no such GPU
            side = None
        if side is None:
            unknown.append(label)
            continue
        sides.append(side)
        head = head or side.head
    return Memory(
        sides,
        resident(),
        free,
        before=measured_peak("cpu") or 0,
        together=plan.reference.startswith("gguf:"),
        unknown=unknown,
        elsewhere=any(spec.startswith("vllm:") for spec in (plan.reference, *plan.sides)),
    )


def estimate_memory(plan: Plan, progress: Progress) -> Memory:
    """Predict what the comparison will take and print it; AssayError where it cannot fit."""
    memory = predict_memory(plan)
    memory.require()
    if memory.sides:
        with progress(memory.line(), 0):
            pass
    return memory


def _side(spec: str, label: str, plan: Plan, head: int, free: dict[str, int]) -> Side | None:
    """One side; `head` is the reference's output head, 0 for the reference itself."""
    kind = spec.partition(":")[0]
    if kind == "gguf":
        path = Path(spec.partition("?")[0].removeprefix("gguf:")).expanduser()
        free.setdefault("cpu", free_memory("cpu"))
        return Side(label, "cpu", path.stat().st_size) if path.is_file() else None
    if kind not in ("hf", "vllm"):
        return None
    parsed: Any = parse_hf(spec) if kind == "hf" else parse_vllm(spec)
    device = choose_device(getattr(parsed, "device", "auto"))
    checkpoint = read_checkpoint(parsed.model, parsed.dtype)
    if checkpoint is None:
        return None
    there = free.setdefault(device, free_memory(device))
    place = "cuda" if device.startswith("cuda") else "cpu"
    logits = 2 * (BLOCK_BYTES[place] + CACHE_BYTES[place])
    if kind == "vllm":
        ranks, shards = (
            (int(parsed.ranks), int(parsed.tensor_parallel)) if place == "cuda" else (1, 1)
        )
        # On a CPU ranks share its memory. A pipeline's last stage has the head alone.
        weights = checkpoint.weights // ranks
        cache = int(parsed.kv_cache_gib * 2**30) // ranks or (2**30 if place == "cpu" else 0)
        if place == "cuda" and not cache:  # vLLM takes its share of the GPU whole
            cache = max(0, int(parsed.gpu_memory_utilization * there) - weights)
        return Side(
            label,
            device,
            weights,
            head=(head or checkpoint.head) // shards,
            logits=logits,
            cache=cache,
        )
    prefill = plan.job.path is ScoringPath.PREFILL
    config, size = checkpoint.config, checkpoint.size
    window = window_bytes(
        config,
        size,
        plan.length,
        plan.job,
        0 if prefill else checkpoint.token_bytes(parsed.kv_cache_dtype),
        eager=parsed.attention == "eager",
    )
    windows = plan.batch or windows_at_once(
        place, plan.length, plan.job, window, there - checkpoint.weights
    )
    return Side(
        label,
        device,
        checkpoint.weights,
        checkpoint.stored if checkpoint.converted else 0,
        head or checkpoint.head,
        window,
        min(windows, plan.windows),
        logits,
    )


def _stored_head(spec: str) -> int:
    """Bytes of the output head of a stored reference, 0 of anything else."""
    try:
        folder = stored_path(spec) if spec.startswith("run:") else Path()
        return (
            read_manifest(folder).head.stored.bytes
            if spec.startswith("run:") and folder.is_dir()
            else 0
        )
    except AssayError:  # said when it is opened
        return 0


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
