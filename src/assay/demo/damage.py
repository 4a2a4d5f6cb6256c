"""Ways to break a checkpoint, by name: each changes a copy in place."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.demo.bf16 import bf16_tensors, bf16_to_float32, float32_to_bf16, read_header, shards
from assay.errors import AssayError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
    """Add 1 to every norm weight: the convention of Gemma applied to a model that does
    not use it.
    """
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
    """Round every projection to 4 bits and read each group of 32 with the scale of the
    row before.
    """
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
