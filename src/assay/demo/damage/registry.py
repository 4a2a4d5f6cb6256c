"""The damages by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.demo.damage import files, weights
from assay.errors import UsageError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Damage:
    """One way to break a checkpoint. `apply` changes a copy in place, by the random numbers it is given."""

    name: str
    description: str
    apply: Callable[[Path, np.random.Generator], None]


_ALL = (
    Damage("random_blocks", "60 blocks of 4 KiB of the shard hold random bytes", weights.random_blocks),
    Damage("stuck_exponent_bit", "one exponent bit flipped in 64 KiB of one MLP", weights.stuck_exponent_bit),
    Damage("nan_row", "NaN in one row of one value projection", weights.nan_row),
    Damage("swapped_layers", "two layers exchanged", weights.swapped_layers),
    Damage("scaled_k", "every key projection times 3", weights.scaled_k),
    Damage("zeroed_layer", "the matrices of one layer are zero", weights.zeroed_layer),
    Damage("norm_plus_one", "1 added to every norm weight", weights.norm_plus_one),
    Damage("int2", "projections rounded to 2 bits", weights.int2),
    Damage("int3", "projections rounded to 3 bits, one scale per row", weights.int3),
    Damage(
        "shifted_scales",
        "4-bit projections read with the scales of the neighbouring row",
        weights.shifted_scales,
    ),
    Damage("rope_theta", "rope_theta 3,000", files.rope_theta),
    Damage("wrong_tokenizer", "vocabulary permuted", files.wrong_tokenizer),
    Damage("wrong_template", "chat template of another family", files.wrong_template),
    Damage("plain_template", "chat template without special tokens", files.plain_template),
)
DAMAGES = {damage.name: damage for damage in _ALL}


def damage_checkpoint(name: str, source: Path, target: Path, seed: int = 0) -> Path:
    """Copy the checkpoint `source` to the new folder `target` and damage the copy; returns `target`.

    Raises AssayError where the name, the source or the target will not do.
    """
    import numpy as np

    if name not in DAMAGES:
        raise UsageError(f"unknown damage {name!r}", remedy=f"one of {', '.join(DAMAGES)}")
    if not (source / "config.json").is_file():
        raise UsageError(
            f"{source} is no checkpoint: it holds no config.json", remedy="name the folder of a model"
        )
    if target.exists():
        raise UsageError(f"{target} is there already", remedy="name a new folder for the damaged copy")
    shutil.copytree(source, target)
    for path in target.iterdir():
        path.chmod(0o644)  # a checkpoint may be kept read-only
    DAMAGES[name].apply(target, np.random.default_rng(seed))
    return target
