"""Names of the matrices that engines fuse: an ignore list may use either the whole or its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Parts by the name of the whole. Engines build the whole, so its parts must be quantised alike."""

_WHOLE = {part: whole for whole, parts in FUSED.items() for part in parts}


def listed(module: str, hits: Callable[[str], bool]) -> bool:
    """Whether a list names a module: itself, the whole that it is a part of, or all the parts that it is made of.

    `hits(name)` is the list's own way of matching one name.
    """
    if hits(module):
        return True
    parent, dot, last = module.rpartition(".")
    if last in _WHOLE and hits(f"{parent}{dot}{_WHOLE[last]}"):
        return True
    parts = FUSED.get(last)
    return parts is not None and all(hits(f"{parent}{dot}{part}") for part in parts)
