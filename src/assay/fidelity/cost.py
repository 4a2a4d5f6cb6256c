"""What a comparison costs: the time that it may take, and its peak memory, predicted before
anything is loaded.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from assay.engines.machine import choose_device, free_memory, window_bytes, windows_at_once
from assay.engines.scoring import ScoreJob, ScoringEngine, ScoringPath
from assay.engines.specs import parse_spec
from assay.engines.vllm.start import parse_spec as parse_vllm
from assay.errors import AssayError
from assay.fidelity.metrics import BLOCK_BYTES, CACHE_BYTES, window_statistics
from assay.fidelity.plan import Plan, cut_windows, label_of
from assay.fidelity.store import read_manifest, stored_path
from assay.progress import Progress, span
from assay.stats.equivalence import MIN_WINDOWS
from assay.verdict import Finding, Severity, Verdict

# Time: how much of the plan fits, what each stage took, and what was left out.


LEAST_LENGTH = 128
"""Tokens of a passage: a shorter one shows next to nothing of a context."""
WANTED_WINDOWS = 16
"""Passages are shortened before there are fewer of them than this."""
RESERVE = 0.1
"""Share of the budget that is kept for the statistics and the report, and for what takes longer
than expected.
"""


@dataclass
class Budget:
    """A clock over the stages of one run. `seconds` is None where the time is not limited."""

    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)
    expected: dict[str, float] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    left_out: list[dict[str, str]] = field(default_factory=list)
    """What was not measured: `what`, and what the verdict can therefore not say (`unknown`)."""
    too_small: bool = False
    """Whether nothing could be measured in the time."""

    @classmethod
    def of(cls, minutes: float | None, quick: bool, quick_minutes: float) -> Budget:
        """The budget that the options `--budget` and `--quick` name."""
        minutes = minutes if minutes is not None else quick_minutes if quick else None
        return cls(None if minutes is None else 60 * minutes)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def left(self) -> float:
        """Seconds that may still be measured in; infinite without a limit."""
        return float("inf") if self.seconds is None else self.seconds * (1 - RESERVE) - self.spent

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of what is done inside as that of a stage."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.took[name] = self.took.get(name, 0.0) + time.monotonic() - began

    def leave_out(self, what: str, unknown: str) -> None:
        """Note what is not measured, once."""
        if all(item["what"] != what for item in self.left_out):
            self.left_out.append({"what": what, "unknown": unknown})

    def nothing_fits(self, needed: str) -> OutOfTime:
        """The error for a budget in which nothing can be answered; `needed` says what the least
        would take.
        """
        self.too_small = True
        self.leave_out(needed, "anything: nothing was compared")
        return OutOfTime(
            self.findings()[0].title,
            finding_id="fidelity.budget",
            remedy="give it more time: --budget MINUTES",
        )

    def size(
        self,
        a_token: float,
        windows: int,
        length: int,
        *,
        opening: float = 0.0,
        share: float = 1.0,
        least: int = LEAST_LENGTH,
    ) -> tuple[int, int]:
        """(windows, length) of what fits, where a token costs `a_token` seconds on all sides
        together.

        `opening` are the seconds in which further engines are opened, `share` is that of the time,
        `least` the shortest passage. OutOfTime where not even the least fits.
        """
        found = size_for(share * (self.left() - opening), a_token, windows, length, least)
        if found is None:
            few, short = min(MIN_WINDOWS, windows), min(length, least)
            needed, there = (
                span(opening + a_token * short * few),
                span(max(0.0, share * (self.left() - opening) + opening)),
            )
            raise self.nothing_fits(
                f"{few} passages of {short} tokens take about {needed} on all sides, and {there}"
                " are left for them"
            )
        return found

    def together(self, window_seconds: float) -> int:
        """How many windows run together, so that the clock is looked at often enough: 8 at most."""
        return max(1, min(8, int(0.06 * (self.seconds or 0) / max(window_seconds, 1e-9))))

    def note_size(self, wanted: tuple[int, int], fitting: tuple[int, int]) -> None:
        """Note that (windows, length) were cut to what fits."""
        (windows, length), (some, short) = wanted, fitting
        if short < length:
            self.leave_out(
                f"contexts beyond {short:,} tokens",
                f"what happens in contexts of more than {short:,} tokens",
            )
        if some < windows:
            self.leave_out(
                f"{windows - some} of {windows} passages",
                "differences that fewer passages cannot resolve",
            )

    def tell(self, expected: Mapping[str, float], progress: Progress) -> None:
        """Print the expected time of every stage and of all, and what is left out."""
        self.expected = dict(expected)
        stages = ", ".join(f"{name} {span(seconds)}" for name, seconds in self.expected.items())
        without = (
            "; left out: " + ", ".join(item["what"] for item in self.left_out)
            if self.left_out
            else ""
        )
        total = self.spent + sum(self.expected.values())
        with progress(f"expected: about {span(total)} in all ({stages}){without}", 0):
            pass

    def affords(self, what: str, unknown: str, seconds: float) -> bool:
        """Whether there is time for something that takes so many seconds; what is not afforded is
        noted.
        """
        if seconds <= self.left():
            return True
        self.leave_out(what, unknown)
        return False

    def findings(self) -> list[Finding]:
        """What the budget left out, and what the verdict can therefore not say."""
        if not self.left_out or self.seconds is None:
            return []
        what = ", ".join(item["what"] for item in self.left_out)
        if self.too_small:
            title = f"a budget of {span(self.seconds)} is too small for any answer: {what}"
        else:
            title = f"the budget of {span(self.seconds)} left out {what}"
        unknown = "; ".join(dict.fromkeys(item["unknown"] for item in self.left_out))
        return [
            Finding(
                "fidelity.budget",
                Severity.WARNING if self.too_small else Severity.INFO,
                title,
                f"The verdict does not say: {unknown}.",
                evidence={
                    "budget_s": self.seconds,
                    "left_out": [item["what"] for item in self.left_out],
                },
                remedies=("give it more time: --budget MINUTES",),
            )
        ]

    def results(self) -> dict[str, Any]:
        """`results.times`, where the time is limited: other runs give the same results again."""
        return {} if self.seconds is None else {"times": self.to_json()}

    def to_json(self) -> dict[str, Any]:
        """What was expected, what it took, and what was left out."""
        return {
            "seconds": self.spent,
            "budget_s": self.seconds,
            "expected_s": self.expected,
            "stages_s": self.took,
            "left_out": self.left_out,
        }


# How much fits.


WORTH_MEASURING = 8192
"""Tokens of all sides together from which on the time of a run without a budget is told: it takes a
while.
"""


@dataclass(frozen=True)
class Pace:
    """What a token of a window costs in seconds: to score it by one engine, and to compare two rows
    of it.
    """

    score: float
    compare: float


def measure_pace(engine: ScoringEngine, plan: Plan, text: str) -> Pace:
    """The engine's own speed, on short windows of the text; the first call, which warms up, is not
    counted.

    Windows that are fed token by token run together, as they will: one at a time would seem too
    slow.
    """
    prefill, tokenizer = plan.path == ScoringPath.PREFILL, engine.tokenizer
    together = 1 if prefill else plan.batch or 8
    length = min(plan.length, LEAST_LENGTH if prefill else LEAST_LENGTH // 2)
    cut = replace(plan.cut, length=length)
    windows = cut_windows(
        tokenizer.encode(text[: 40 * length * (together + 2)]), cut, tokenizer.bos_id
    )
    job = ScoreJob(
        ScoringPath(plan.path),
        scored_from=cut.scored_from,
        chunk=min(plan.chunk, length),
        batch=together,
    )
    warm = list(engine.score_windows(windows[:1], job))
    some = windows[:together]
    began = time.perf_counter()
    rows = list(engine.score_windows(some, job))
    scored = time.perf_counter()
    window_statistics(warm[0], rows[0])
    compared = time.perf_counter()
    side_by_side = getattr(engine, "workers", 1)
    return Pace(
        (scored - began) / (length * len(some)) / side_by_side,
        (compared - scored) / length / side_by_side,
    )


def size_for(
    seconds: float, a_token: float, windows: int, length: int, least: int = LEAST_LENGTH
) -> tuple[int, int] | None:
    """(windows, length) of what fits into `seconds` where one token of a window costs `a_token` on
    all sides together.

    Passages are halved while fewer than 16 of them fit. None where 8 of the shortest do not fit.
    """
    shortest = min(length, least)
    while True:
        fit = min(windows, int(seconds / (a_token * length))) if seconds > 0 else 0
        if fit >= min(windows, WANTED_WINDOWS) or length // 2 < shortest:
            return (fit, length) if fit >= min(MIN_WINDOWS, windows) else None
        length //= 2


class OutOfTime(AssayError):
    """The budget is too small for any answer."""

    verdict = Verdict.INCONCLUSIVE

    def to_finding(self) -> Finding:
        """A warning: nothing is wrong with the subject."""
        return replace(super().to_finding(), severity=Severity.WARNING)


# Peak memory of a comparison: predicted from the headers of the checkpoints before anything is
# loaded, and measured.
#
# Reference and candidates are in memory one after the other: the reference's states go to the disk
# as they are scored, and it is closed before the first candidate is opened. Only an engine that
# gives no states (gguf:) stays open beside the candidates.


_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TYPES = {name: _FLOATS[kind] for kind, name in _NAMES.items()}
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
    """Sides whose size nobody knows before they are opened."""
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


def predict(plan: Plan) -> Memory:
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


def foretell(plan: Plan, progress: Progress) -> Memory:
    """Predict what the comparison will take and print it; AssayError where it cannot fit."""
    memory = predict(plan)
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
    parsed: Any = parse_spec(spec) if kind == "hf" else parse_vllm(spec)
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


@dataclass(frozen=True)
class Checkpoint:
    """What the headers of a checkpoint say: bytes as they are stored and as they are held, `size`
    those of one number.
    """

    config: Any
    size: int
    stored: int
    weights: int
    head: int
    converted: bool
    """Whether it is held in another type than it is stored in."""

    def token_bytes(self, cache_dtype: str) -> int:
        """Bytes of keys and values of one token in all layers."""
        heads = getattr(self.config, "num_attention_heads", None)
        if not heads:
            return 0
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        groups = getattr(self.config, "num_key_value_heads", None) or heads
        size = self.size if cache_dtype == "auto" else 1 if cache_dtype.startswith("fp8") else 2
        return int(2 * groups * width * self.config.num_hidden_layers * size)


def read_checkpoint(model: str, dtype: str = "auto") -> Checkpoint | None:
    """Sizes of a checkpoint that transformers would load, from `config.json` and the safetensors
    headers; None where they are not here or cannot be read (opening it says why)."""
    from safetensors import SafetensorError, safe_open

    folder = Path(model).expanduser() if Path(model).expanduser().is_dir() else _cached(model)
    try:
        whole = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
        if folder is None or not isinstance(whole, dict):
            return None
        config = SimpleNamespace(**{**whole, **(whole.get("text_config") or {})})
        named = whole.get("dtype") or whole.get("torch_dtype") or getattr(config, "dtype", None)
        stored = weights = head = 0
        wanted = str((named or "") if dtype == "auto" else dtype).removeprefix("torch.")
        size = _TYPES.get(wanted, 0)
        converted = False
        tied = bool(getattr(config, "tie_word_embeddings", False))
        for file in _weight_files(folder):
            with safe_open(file, "np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    if tied and name.endswith("lm_head.weight"):
                        continue
                    part = tensors.get_slice(name)
                    kind, count = part.get_dtype(), prod(part.get_shape())
                    own = (
                        count * _FLOATS[kind] if kind in _FLOATS else (count * _bits(kind) + 7) // 8
                    )
                    if (
                        not size and kind in _FLOATS
                    ):  # a configuration that names no type: that of the weights
                        size, wanted = _FLOATS[kind], _NAMES[kind]
                    held = count * size if kind in _FLOATS else own
                    converted |= kind in _FLOATS and _NAMES.get(kind) != wanted
                    stored, weights = stored + own, weights + held
                    if name.endswith(("lm_head.weight", "embed_tokens.weight", "wte.weight")):
                        head = held
        return Checkpoint(config, size or 2, stored, weights, head, converted) if weights else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError):
        return None


def _weight_files(folder: Path) -> list[Path]:
    """The files that are loaded: `model.safetensors`, else those of the index, else all; a copy in
    another layout may lie beside.
    """
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.is_file():
        return [one]
    if index.is_file():
        return [
            folder / name
            for name in sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        ]
    return sorted(folder.glob("*.safetensors"))


def _bits(kind: str) -> int:
    """Bits of one number of a type that is no plain float: `I32` has 32, `F8_E4M3` 8."""
    found = re.match(r"[A-Z]+(\d+)", kind)
    return _BITS.get(kind, int(found[1]) if found else 8)


def _cached(model: str) -> Path | None:
    """The folder of a model of the Hub in its cache on this machine."""
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(model, "config.json")
    except ValueError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
