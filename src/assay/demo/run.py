"""The demo: a real server, whole and broken, checked by the same command; and the damage that
breaks a checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


import contextlib
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec

from assay.coherence.check import run_check
from assay.coherence.options import CheckOptions
from assay.demo import vllm_python, vllm_server
from assay.demo.models import build_smollm2
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Finding, Report, Severity, Verdict

_FOREIGN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
_PLAIN_TEMPLATE = (
    "{% for m in messages %}### {{ 'Instruction' if m['role'] == 'user' else 'Response' }}:\n"
    "{{ m['content'] }}\n\n{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)


def rope_theta(folder: Path, rng: np.random.Generator) -> None:
    """Set rope_theta to 3,000, a value of another model: positions turn at the wrong speed."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    place = config.get("rope_parameters", config)
    if "rope_theta" not in place:
        raise AssayError(
            f"{path} has no rope_theta to change",
            finding_id="checkpoint.config_conflict",
            remedy="choose another damage for this model",
        )
    place["rope_theta"] = 3000.0
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def wrong_tokenizer(folder: Path, rng: np.random.Generator) -> None:
    """Permute the ids of the ordinary tokens: a tokenizer of the same size from another model."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    special = {token["content"] for token in document.get("added_tokens", ())}
    names = [name for name in vocabulary if name not in special]
    ids = [vocabulary[name] for name in names]
    for name, place in zip(names, rng.permutation(len(names)), strict=True):
        vocabulary[name] = ids[place]
    path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")


def wrong_template(folder: Path, rng: np.random.Generator) -> None:
    """Use the chat template of another family."""
    (folder / "chat_template.jinja").write_text(_FOREIGN_TEMPLATE, encoding="utf-8")


def plain_template(folder: Path, rng: np.random.Generator) -> None:
    """Use the plain headings of a model that was tuned without special tokens."""
    (folder / "chat_template.jinja").write_text(_PLAIN_TEMPLATE, encoding="utf-8")


# Tensors of a safetensors checkpoint as writable arrays over the files themselves, without torch.
#
# Layout of a file (safetensors format): 8 bytes, the little-endian length N of the header; N bytes
# of JSON `{name: {dtype, shape, data_offsets}}`; then the body, to which the offsets are relative.


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order of name; AssayError where there are none."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise AssayError(
            f"{folder} holds no safetensors file",
            finding_id="checkpoint.shard_missing",
            remedy="give the folder of a checkpoint in the safetensors format",
        )
    return found


def read_header(shard: Path) -> tuple[int, dict[str, Any]]:
    """Where the body of a shard begins, in bytes, and its header."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return 8 + length, {name: entry for name, entry in header.items() if name != "__metadata__"}


def bf16_tensors(folder: Path) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Every bf16 tensor as (name, bit patterns); what is written to the array is written to the
    file.
    """
    import numpy as np

    for shard in shards(folder):
        start, header = read_header(shard)
        for name, entry in header.items():
            if entry["dtype"] == "BF16":
                shape = tuple(entry["shape"])
                offset = start + entry["data_offsets"][0]
                yield (
                    name,
                    np.memmap(shard, dtype=np.dtype("<u2"), mode="r+", offset=offset, shape=shape),
                )


def bf16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Values of bf16 bit patterns; a bf16 is the upper half of a float32."""
    import numpy as np

    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bit patterns of the nearest bf16 values, ties to even. For finite values."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype(np.uint16)


# Damage to the numbers: each function changes the tensors of a checkpoint in place.

_LAYER = re.compile(r"\.layers\.(\d+)\.")
BLOCKS, BLOCK_BYTES = 60, 4096


def random_blocks(folder: Path, rng: np.random.Generator) -> None:
    """Overwrite `BLOCKS` blocks of the shard bodies with random bytes, as a bad download or disk
    leaves them.
    """
    files = shards(folder)
    for block in range(BLOCKS):
        shard = files[block % len(files)]
        start, _ = read_header(shard)
        size = shard.stat().st_size
        # Disks and downloads fail in whole sectors.
        first, last = -(-start // BLOCK_BYTES), size // BLOCK_BYTES - 1
        with shard.open("r+b") as file:
            file.seek(int(rng.integers(first, last + 1)) * BLOCK_BYTES)
            file.write(rng.bytes(BLOCK_BYTES))


def stuck_exponent_bit(folder: Path, rng: np.random.Generator) -> None:
    """Flip one exponent bit (a factor of 16) of 32,768 neighbouring weights in one MLP, as bad
    memory does.
    """
    for name, bits in _in_layer(folder, _depth(folder) // 3):
        if name.endswith("down_proj.weight"):
            flat = bits.reshape(-1)
            start = int(rng.integers(0, max(1, flat.size - 32_768)))
            flat[start : start + 32_768] ^= 0x0200


def nan_row(folder: Path, rng: np.random.Generator) -> None:
    """Write NaN over one row of one value projection."""
    for name, bits in _in_layer(folder, _depth(folder) // 2):
        if name.endswith("v_proj.weight"):
            bits[int(rng.integers(0, bits.shape[0]))] = 0x7FC0


def swapped_layers(folder: Path, rng: np.random.Generator) -> None:
    """Exchange all tensors of two layers, a sixth and two thirds of the way up."""
    depth = _depth(folder)
    low, high = dict(_in_layer(folder, depth // 6)), dict(_in_layer(folder, 2 * depth // 3))
    for name, bits in low.items():
        other = high[name.replace(f".layers.{depth // 6}.", f".layers.{2 * depth // 3}.")]
        bits[...], other[...] = other.copy(), bits.copy()


def scaled_k(folder: Path, rng: np.random.Generator) -> None:
    """Multiply every key projection by 3, as a lost or doubled scale of a quantised K does."""
    _change(folder, "k_proj.weight", lambda values: 3.0 * values)


def zeroed_layer(folder: Path, rng: np.random.Generator) -> None:
    """Zero all matrices of one layer, a third of the way up: a shard that was never filled."""
    for _, bits in _in_layer(folder, _depth(folder) // 3):
        if bits.ndim == 2:
            bits[...] = 0


def norm_plus_one(folder: Path, rng: np.random.Generator) -> None:
    """Add 1 to every norm weight: the convention of Gemma applied to a model that does not use it."""
    _change(folder, "norm.weight", lambda values: values + 1.0)


def int2(folder: Path, rng: np.random.Generator) -> None:
    """Round every projection to 2 bits, groups of 32 along the input, nearest value, no
    calibration.
    """
    _change(folder, "_proj.weight", lambda values: round_to_nearest(values, bits=2, group=32))


def int3(folder: Path, rng: np.random.Generator) -> None:
    """Round every projection to 3 bits, one scale per row, nearest value, no calibration."""
    _change(
        folder,
        "_proj.weight",
        lambda values: round_to_nearest(values, bits=3, group=values.shape[1]),
    )


def shifted_scales(folder: Path, rng: np.random.Generator) -> None:
    """Round every projection to 4 bits and read each group of 32 with the scale of the row before."""
    import numpy as np

    def misread(values: NDArray[np.float32]) -> NDArray[np.float32]:
        grouped = values.reshape(values.shape[0], -1, 32)
        scale = np.abs(grouped).max(axis=-1, keepdims=True) / 7
        scale[scale == 0] = 1.0
        rounded: NDArray[np.float32] = np.round(grouped / scale) * np.roll(scale, 1, axis=0)
        return rounded.reshape(values.shape)

    _change(folder, "_proj.weight", misread)


def round_to_nearest(values: NDArray[np.float32], *, bits: int, group: int) -> NDArray[np.float32]:
    """Asymmetric uniform quantisation and back: (rows, columns) in groups of `group` columns.

    Each group has 2**bits levels from its minimum to its maximum; the error is at most half a step.
    """
    import numpy as np

    grouped = values.reshape(values.shape[0], -1, group)
    low = grouped.min(axis=-1, keepdims=True)
    step = (grouped.max(axis=-1, keepdims=True) - low) / (2**bits - 1)
    step[step == 0] = 1.0
    rounded = low + np.round((grouped - low) / step) * step
    result: NDArray[np.float32] = rounded.reshape(values.shape).astype(np.float32)
    return result


def _change(
    folder: Path, suffix: str, function: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> None:
    """Apply `function` to the values of every tensor whose name ends in `suffix`."""
    for name, bits in bf16_tensors(folder):
        if name.endswith(suffix):
            bits[...] = float32_to_bf16(function(bf16_to_float32(bits)))


def _in_layer(folder: Path, layer: int) -> list[tuple[str, NDArray[np.uint16]]]:
    return [(name, bits) for name, bits in bf16_tensors(folder) if f".layers.{layer}." in name]


def _depth(folder: Path) -> int:
    """Number of transformer layers."""
    numbers = [int(m[1]) for name, _ in bf16_tensors(folder) if (m := _LAYER.search(name))]
    return 1 + max(numbers, default=0)


# The damages by name.


@dataclass(frozen=True)
class Damage:
    """One way to break a checkpoint. `apply` changes a copy in place, by the random numbers it is
    given.
    """

    name: str
    description: str
    apply: Callable[[Path, np.random.Generator], None]


_ALL = (
    Damage("random_blocks", "60 blocks of 4 KiB of the shard hold random bytes", random_blocks),
    Damage(
        "stuck_exponent_bit", "one exponent bit flipped in 64 KiB of one MLP", stuck_exponent_bit
    ),
    Damage("nan_row", "NaN in one row of one value projection", nan_row),
    Damage("swapped_layers", "two layers exchanged", swapped_layers),
    Damage("scaled_k", "every key projection times 3", scaled_k),
    Damage("zeroed_layer", "the matrices of one layer are zero", zeroed_layer),
    Damage("norm_plus_one", "1 added to every norm weight", norm_plus_one),
    Damage("int2", "projections rounded to 2 bits", int2),
    Damage("int3", "projections rounded to 3 bits, one scale per row", int3),
    Damage(
        "shifted_scales",
        "4-bit projections read with the scales of the neighbouring row",
        shifted_scales,
    ),
    Damage("rope_theta", "rope_theta 3,000", rope_theta),
    Damage("wrong_tokenizer", "vocabulary permuted", wrong_tokenizer),
    Damage("wrong_template", "chat template of another family", wrong_template),
    Damage("plain_template", "chat template without special tokens", plain_template),
)
DAMAGES = {damage.name: damage for damage in _ALL}


def damage_checkpoint(name: str, source: Path, target: Path, seed: int = 0) -> Path:
    """Copy the checkpoint `source` to the new folder `target` and damage the copy; returns
    `target`.

    Raises AssayError where the name, the source or the target will not do.
    """
    import numpy as np

    if name not in DAMAGES:
        raise UsageError(f"unknown damage {name!r}", remedy=f"one of {', '.join(DAMAGES)}")
    if not (source / "config.json").is_file():
        raise UsageError(
            f"{source} is no checkpoint: it holds no config.json",
            remedy="name the folder of a model",
        )
    if target.exists():
        raise UsageError(
            f"{target} is there already", remedy="name a new folder for the damaged copy"
        )
    shutil.copytree(source, target)
    for path in target.iterdir():
        path.chmod(0o644)  # a checkpoint may be kept read-only
    DAMAGES[name].apply(target, np.random.default_rng(seed))
    return target


# The demo: a real server, whole and broken, checked by the same command, side by side.


DAMAGE = "shifted_scales"
"""A fault whose texts a reader recognises as broken; random blocks leave NaN, and no text at all.
"""
PLAN: dict[str, Any] = {"quick": True, "token_budget": 0.5, "longest_needle": 512}
"""The quick plan, with answers half as long: they take most of the reference's time."""
BUDGET_S, STARTS = 140.0, 3.0
"""What a check may take, or so many times the start of its server where that is more: the measure
of a slow machine.
"""


def run_demo(
    progress: Progress = NO_PROGRESS, damage: str = DAMAGE
) -> tuple[Report, list[tuple[str, Report]]]:
    """Serve SmolLM2-135M with vLLM on the CPU, check it, damage a copy, and check that.

    Returns the report of the demo, which passes if the whole model passed and the damaged one
    failed, and the two reports with their titles. What it needs is installed and built on the first
    run; nothing is left running.
    """
    _require_packages()
    vllm_python(progress)
    model = build_smollm2(progress)
    with progress(
        "vLLM serves the model, then a broken copy: about 4 minutes on two quiet cores", 0
    ):
        pass
    pair = [("the model as it is", _checked(model, model, progress, "whole"))]
    if not pair[0][1].interrupted:
        with tempfile.TemporaryDirectory(prefix="assay-demo-") as folder:
            broken = damage_checkpoint(damage, model, Path(folder) / model.name)
            title = f"a broken copy: {DAMAGES[damage].description}"
            pair.append((title, _checked(broken, model, progress, "broken")))
    return _report([report for _, report in pair], damage), pair


def _require_packages() -> None:
    """The extra must be there before gigabytes are fetched for it."""
    missing = [name for name in ("torch", "transformers", "gguf") if find_spec(name) is None]
    if missing:
        raise AssayError(
            f"the demo needs packages that are not installed: {', '.join(missing)}",
            finding_id="server.missing_package",
            remedy="pip install 'llm-assay[demo]'",
        )


def _checked(model: Path, reference: Path, progress: Progress, which: str) -> Report:
    def named(what: str, steps: int) -> Any:
        return progress(f"{which}: {what}", steps)

    with contextlib.ExitStack() as stack:
        begun = time.monotonic()
        with named("starting vLLM (about 45 s)", 1) as advance:
            server = stack.enter_context(vllm_server(model, name=model.name))
            advance()
        budget = max(BUDGET_S, STARTS * (time.monotonic() - begun)) / 60
        options = CheckOptions(**PLAN, budget=budget, reference_engine=f"hf:{reference}")
        return run_check(server.url, options, named)


def _report(reports: Sequence[Report], damage: str) -> Report:
    """The report on the demo itself: it holds if the whole model passed and the damaged copy
    failed.
    """
    interrupted = any(report.interrupted for report in reports)
    verdicts = [report.verdict for report in reports]
    told_apart = verdicts == [Verdict.PASS, Verdict.FAIL]
    results = {
        which: report.to_json()["results"]["throughput"] | {"verdict": report.verdict.value}
        for which, report in zip(("whole", "broken"), reports, strict=False)
    }
    verdict, summary = Verdict.PASS, "The model as it is passed, and the broken copy failed."
    findings: tuple[Finding, ...] = ()
    if interrupted and not told_apart:
        verdict, findings = (
            Verdict.INCONCLUSIVE,
            (
                Finding(
                    "coherence.interrupted",
                    Severity.WARNING,
                    "interrupted: what was measured until then is shown",
                ),
            ),
        )
    elif not told_apart:
        said = " and ".join(v.value for v in verdicts)
        verdict, findings = (
            Verdict.FAIL,
            (
                Finding(
                    "coherence.demo",
                    Severity.ERROR,
                    f"the demo expected pass and fail, and got {said}",
                ),
            ),
        )
    return Report(
        command="demo",
        verdict=verdict,
        subject={
            "engine": reports[0].subject.get("server"),
            "model": reports[0].subject.get("model"),
        },
        findings=findings,
        results={**results, "damage": damage},
        summary=summary if told_apart else "",
        interrupted=interrupted,
    )
