"""Shapes of packed weights: do bits, group size and the tensors agree?"""

from __future__ import annotations

from assay.checkpoint.tensors import Params


def gptq_shapes(params: Params, bits: int, group_size: int) -> str | None:
    """GPTQ: qweight [in·bits/32, out], scales [in/group, out], qzeros [in/group, out·bits/32],
    g_idx [in].
    """
    qweight, scales, zeros = (params[k].shape for k in ("qweight", "scales", "qzeros"))
    if not len(qweight) == len(scales) == len(zeros) == 2:
        return "qweight, scales and qzeros are not all matrices"
    width, out = qweight[0] * 32 // bits, scales[1]
    if qweight[1] != out:
        return f"qweight has {qweight[1]} columns, scales {out}"
    groups = _groups(width, group_size)
    if scales[0] != groups:
        return (
            f"{scales[0]} rows of scales; {width} inputs at {bits} bits in groups of {group_size}"
            f" need {groups}"
        )
    if zeros != (groups, (out * bits + 31) // 32):
        return f"qzeros is {list(zeros)}, {bits} bits need {[groups, (out * bits + 31) // 32]}"
    index = params.get("g_idx")
    if index is not None and index.shape not in {(width,), (0,)}:
        return f"g_idx has {list(index.shape)} entries, qweight packs {width} inputs at {bits} bits"
    return None


def awq_shapes(params: Params, bits: int, group_size: int) -> str | None:
    """AWQ: qweight [in, out·bits/32], scales [in/group, out], qzeros [in/group, out·bits/32]."""
    qweight, scales, zeros = (params[k].shape for k in ("qweight", "scales", "qzeros"))
    if not len(qweight) == len(scales) == len(zeros) == 2:
        return "qweight, scales and qzeros are not all matrices"
    width, out = qweight[0], scales[1]
    if qweight[1] * 32 // bits != out:
        return f"qweight packs {qweight[1] * 32 // bits} outputs at {bits} bits, scales have {out}"
    groups = _groups(width, group_size)
    if scales[0] != groups:
        return f"{scales[0]} rows of scales; {width} inputs in groups of {group_size} need {groups}"
    if zeros != (groups, qweight[1]):
        return f"qzeros is {list(zeros)}, should be {[groups, qweight[1]]}"
    return None


def mlx_shapes(params: Params, bits: int, group_size: int) -> str | None:
    """MLX: weight [out, in·bits/32] of 32-bit words, scales [out, in/group]; experts have one axis
    more.
    """
    words, scales = params["weight"].shape, params["scales"].shape
    if not words or words[:-1] != scales[:-1]:
        return f"weight is {list(words)}, its scales are {list(scales)}"
    if words[-1] * 32 != scales[-1] * group_size * bits:
        stored = words[-1] * 32 / max(scales[-1] * group_size, 1)
        return (
            f"{words[-1]} words and {scales[-1]} scales a row hold {stored:g} bits in groups of"
            f" {group_size}, not {bits}"
        )
    return None


def compressed(params: Params, bits: int, group_size: int | None) -> str | None:
    """compressed-tensors: weight_packed [out, in·bits/32] I32, weight_scale [out, in/group],
    weight_shape [2].
    """
    packed, scale = params["weight_packed"].shape, params["weight_scale"].shape
    if len(packed) != 2 or len(scale) != 2:
        return "weight_packed and weight_scale are not matrices"
    per_word = 32 // bits
    if packed[0] != scale[0]:
        return f"weight_packed has {packed[0]} rows, weight_scale {scale[0]}"
    if group_size and group_size > 0:
        width = packed[1] * per_word
        lowest, highest = -(-(width - per_word + 1) // group_size), -(-width // group_size)
        if not lowest <= scale[1] <= highest:
            return (
                f"{scale[1]} scales a row; {width} inputs at {bits} bits in groups of {group_size}"
                f" need {highest}"
            )
    return None


def halves(params: Params, group_size: int, weight: str = "weight") -> str | None:
    """Two 4-bit values a byte along the inputs: weight [out, in/2] U8, weight_scale [out,
    in/group].
    """
    packed, scale = (
        params[weight].shape,
        params["weight_scale"].shape if "weight_scale" in params else (),
    )
    if len(packed) != 2 or len(scale) != 2 or group_size < 1:
        return None
    wanted = (packed[0], packed[1] * 2 // group_size)
    return (
        None
        if scale == wanted
        else f"weight_scale is {list(scale)}, groups of {group_size} need {list(wanted)}"
    )


def blocks(params: Params, block: tuple[int, int]) -> str | None:
    """Block-scaled FP8: one scale per tile of `block` = (rows, columns)."""
    scale = next(
        (params[p] for p in ("weight_scale_inv", "weight_scale", "scale") if p in params), None
    )
    shape = params["weight"].shape
    if scale is None or len(shape) != 2 or len(scale.shape) != 2:
        return None
    wanted = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if scale.shape == wanted:
        return None
    return (
        f"scales are {list(scale.shape)}; a weight of {list(shape)} in tiles of {list(block)} needs"
        f" {list(wanted)}"
    )


def grouped(rows: int, width: int, scale: tuple[int, ...], group_size: int | None) -> str | None:
    """Scales of an unpacked weight [rows, width]: one a row, or one a group along the inputs."""
    groups = 1 if group_size is None else _groups(width, group_size)
    if len(scale) != 2 or scale == (rows, groups):
        return None
    per = f"groups of {group_size}" if group_size else "one scale a row"
    return f"scales are {list(scale)}; {rows} × {width} values with {per} need {[rows, groups]}"


def four_bit_blocks(params: Params) -> str | None:
    """bitsandbytes: two values a byte, one absmax a block of 32 to 4096 values, all blocks of one
    size.
    """
    packed, absmax = params["weight"].elements, params["weight.absmax"].elements
    if any(-(-2 * packed // size) == absmax for size in (32, 64, 128, 256, 512, 1024, 2048, 4096)):
        return None
    return f"{absmax} block scales for {2 * packed} values fit no block size"


def _groups(width: int, group_size: int) -> int:
    """Number of groups along the inputs; -1 means one for all."""
    return 1 if group_size <= 0 else -(-width // group_size)
