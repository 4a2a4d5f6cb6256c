"""More ways to break a checkpoint than assay's demo needs: those that end in floods, loops and
salads of other makes.

Each function changes a copy of a checkpoint in place, the same each time for one seed. What they
stand for: scales that are lost when a quantised checkpoint is loaded, fused tensors that are split
in the wrong order, layers that were never filled, bits that flip in the embedding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from assay.demo.bf16 import bf16_tensors, bf16_to_float32, float32_to_bf16
from assay.demo.damage import DAMAGES, damage_checkpoint

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def lost_scale(folder: Path, rng: np.random.Generator) -> None:
    """Every projection 64 times too small: a scale per tensor that was not applied."""
    _scale(folder, "_proj.weight", 1 / 64)


def double_scale(folder: Path, rng: np.random.Generator) -> None:
    """Every projection twice too large: a scale that was applied to some tensors once more."""
    _scale(folder, "_proj.weight", 2.0)


def large_v(folder: Path, rng: np.random.Generator) -> None:
    """Every value projection times 6: a cache of values read with the scale of the keys."""
    _scale(folder, "v_proj.weight", 6.0)


def large_k(folder: Path, rng: np.random.Generator) -> None:
    """Every key projection times 12."""
    _scale(folder, "k_proj.weight", 12.0)


def no_attention(folder: Path, rng: np.random.Generator) -> None:
    """The output of attention is zero in the upper half."""
    for name, bits in bf16_tensors(folder):
        if name.endswith("o_proj.weight") and _layer(name) >= 15:
            bits[...] = 0


def flat_attention(folder: Path, rng: np.random.Generator) -> None:
    """Keys of the lower two thirds are zero: attention is the same everywhere."""
    for name, bits in bf16_tensors(folder):
        if name.endswith("k_proj.weight") and _layer(name) < 20:
            bits[...] = 0


def half_filled(folder: Path, rng: np.random.Generator) -> None:
    """The matrices of the upper third are zero: the last shard was never filled."""
    for name, bits in bf16_tensors(folder):
        if bits.ndim == 2 and _layer(name) >= 20:
            bits[...] = 0


def zeroed_layers(folder: Path, rng: np.random.Generator) -> None:
    """Four layers in a row, anywhere but at the ends, are zero."""
    first = int(rng.integers(3, 22))
    for name, bits in bf16_tensors(folder):
        if bits.ndim == 2 and first <= _layer(name) < first + 4:
            bits[...] = 0


def hot_rows(folder: Path, rng: np.random.Generator) -> None:
    """An exponent bit flipped in eight rows of the embedding, which is the head as well: frequent
    tokens.
    """
    _flip_rows(folder, rng.integers(273, 3000, size=8))


def hot_bytes(folder: Path, rng: np.random.Generator) -> None:
    """The same in rows of single printable characters (ids 17 to 110 of this vocabulary)."""
    _flip_rows(folder, rng.integers(17, 111, size=8))


def swapped_gate(folder: Path, rng: np.random.Generator) -> None:
    """Gate and up projection exchanged in the middle third: a fused tensor split in the wrong
    order.
    """
    _exchange(folder, "gate_proj", "up_proj")


def swapped_kv(folder: Path, rng: np.random.Generator) -> None:
    """Keys and values exchanged in the middle third."""
    _exchange(folder, "k_proj", "v_proj")


def interleaved_rope(folder: Path, rng: np.random.Generator) -> None:
    """Rows of queries and keys in the order of the other convention of rotary positions."""
    for name, bits in bf16_tensors(folder):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = bits.reshape(-1, 2, 32, bits.shape[1])
            bits[...] = heads.transpose(0, 2, 1, 3).reshape(bits.shape).copy()


def plain_norms(folder: Path, rng: np.random.Generator) -> None:
    """Every norm weight 1: the norms were not in the file."""
    for name, bits in bf16_tensors(folder):
        if name.endswith("norm.weight"):
            bits[...] = 0x3F80


def noisy(folder: Path, rng: np.random.Generator) -> None:
    """Noise of a third of the spread of every projection."""
    for name, bits in bf16_tensors(folder):
        if name.endswith("_proj.weight"):
            values = bf16_to_float32(bits)
            spread = 0.33 * float(values.std())
            bits[...] = float32_to_bf16(
                values + spread * rng.standard_normal(values.shape, dtype=np.float32)
            )


def shuffled_layers(folder: Path, rng: np.random.Generator) -> None:
    """Two layers exchanged, anywhere."""
    low, high = sorted(rng.choice(np.arange(2, 28), 2, replace=False).tolist())
    pairs = {name: bits for name, bits in bf16_tensors(folder) if _layer(name) in (low, high)}
    for name, bits in pairs.items():
        if _layer(name) == low:
            other = pairs[name.replace(f".layers.{low}.", f".layers.{high}.")]
            bits[...], other[...] = other.copy(), bits.copy()


CORPUS_DAMAGES: dict[str, Callable[[Path, np.random.Generator], None]] = {
    function.__name__: function
    for function in (
        lost_scale,
        double_scale,
        large_v,
        large_k,
        no_attention,
        flat_attention,
        half_filled,
        zeroed_layers,
        hot_rows,
        hot_bytes,
        swapped_gate,
        swapped_kv,
        interleaved_rope,
        plain_norms,
        noisy,
        shuffled_layers,
    )
}


def damaged(name: str, source: Path, target: Path, seed: int) -> Path:
    """A damaged copy of `source` at `target`, by a name of either registry."""
    if name in DAMAGES:
        return damage_checkpoint(name, source, target, seed)
    import shutil

    shutil.copytree(source, target)
    for path in target.iterdir():
        path.chmod(0o644)
    CORPUS_DAMAGES[name](target, np.random.default_rng(seed))
    return target


def _flip_rows(folder: Path, rows: np.ndarray) -> None:
    for name, bits in bf16_tensors(folder):
        if "embed_tokens" in name:
            bits[rows] ^= 0x0200


def _scale(folder: Path, suffix: str, factor: float) -> None:
    for name, bits in bf16_tensors(folder):
        if name.endswith(suffix):
            bits[...] = float32_to_bf16(bf16_to_float32(bits) * np.float32(factor))


def _exchange(folder: Path, one: str, other: str) -> None:
    tensors = dict(_middle(folder))
    for name, bits in tensors.items():
        if one in name:
            partner = tensors[name.replace(one, other)]
            bits[...], partner[...] = partner.copy(), bits.copy()


def _middle(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    return ((name, bits) for name, bits in bf16_tensors(folder) if 10 <= _layer(name) < 20)


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[1]) if found else -1
