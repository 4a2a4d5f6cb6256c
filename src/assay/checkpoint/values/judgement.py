"""Values that are no numbers, constant, holed, denormal, or of another scale."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from assay.checkpoint.findings import SHOWN, found, plural, some, warned
from assay.checkpoint.tensors import FLOATS, layer_role
from assay.checkpoint.values.statistics import Statistics
from assay.verdict import Finding

PEER_RATIO = 64.0
"""A weight whose rms is this far from the median of its peers in other layers was scaled, not
trained.
"""

MODEL_RATIO = 256.0
"""The same against all matrices of the model, where a role has fewer than three layers."""

OUTLIER, OUTLIER_RATIO = 1e3, 1e4
"""A largest value above both was damaged: trained weights reach a few hundred times their rms,
seldom more.
"""

_ZERO_POINTS = (
    "qzeros",
    "g_idx",
    "weight_zero_point",
    "weight_shape",
    "zero",
    "weight_g_idx",
    "zeros",
)

_SCALES = re.compile(r"(scale|scales|scale_inv|absmax|SCB|scale_2)$")

_NORM = re.compile(r"(norm|layernorm|ln_\w+)\.(weight|bias)$")

_EMBEDDING = re.compile(r"(embed\w*|lm_head|wte|shared_head\.head|token_embd|output)\.weight$")

_STATE = re.compile(r"(A_log|dt_bias|D|inv_freq|conv1d\.\w+|e_score_correction_bias|bias|sinks)$")


def is_norm(name: str) -> bool:
    """Whether a tensor is a normalisation weight."""
    return bool(_NORM.search(name))


def is_scale(name: str) -> bool:
    """Whether a tensor holds quantisation scales."""
    return bool(_SCALES.search(name))


def judge_values(
    statistics: Sequence[Statistics], signed_scales: bool = False
) -> Iterator[Finding]:
    """Findings on values. `signed_scales` allows negative scales (AutoRound's symmetric scheme uses
    them).
    """
    by_name = {s.name: s for s in statistics}
    yield from _nonfinite(statistics)
    yield from _constant(statistics)
    yield from _holes(statistics)
    yield from _denormal(statistics)
    yield from _scaled(by_name)
    yield from _scales(statistics, signed_scales)


def _nonfinite(statistics: Sequence[Statistics]) -> Iterator[Finding]:
    bad = [s for s in statistics if s.nan or s.inf]
    if not bad:
        return
    worst = max(bad, key=lambda s: s.nan + s.inf)
    row = ""
    if worst.first_bad is not None and len(worst.shape) > 1:
        row = f", first in row {worst.first_bad // math.prod(worst.shape[1:])}"
    title = f"{plural(len(bad), 'tensor')} with values that are no numbers, worst {worst.name}: "
    title += f"{worst.nan} NaN, {worst.inf} Inf of {worst.elements}{row}"
    causes = [
        "an overflow when converting to float16",
        "bytes damaged on disk",
        "a diverged training or calibration",
    ]
    evidence = {s.name: {"nan": s.nan, "inf": s.inf} for s in bad[:SHOWN]}
    detail = (
        "One such value turns whole logits into NaN, which engines print as token 0, often '!'."
    )
    yield found("nonfinite", title, detail=detail, causes=causes, tensors=evidence, count=len(bad))


def _constant(statistics: Sequence[Statistics]) -> Iterator[Finding]:
    flat = [s for s in statistics if s.constant and s.elements > 16 and not _may_be_constant(s)]
    zero = [s.name for s in flat if s.all_zero]
    other = [s.name for s in flat if not s.all_zero and not s.nan]
    if zero:
        title = f"{plural(len(zero), 'tensor')} all zero: {some(zero)}"
        causes = [
            "the file has a hole where the bytes should be",
            "the weight was never filled before saving",
        ]
        yield found("tensor_constant", title, causes=causes, tensors=zero[:SHOWN], count=len(zero))
    if other:
        title = f"{plural(len(other), 'tensor')} with one value throughout: {some(other)}"
        causes = ["the weight was never filled before saving"]
        yield found(
            "tensor_constant", title, causes=causes, tensors=other[:SHOWN], count=len(other)
        )


def _may_be_constant(s: Statistics) -> bool:
    """Zero points, biases, scalars and states may; so may norms of ones (zeros are judged here)."""
    if s.name.endswith(_ZERO_POINTS) or _STATE.search(s.name) or is_scale(s.name):
        return True
    if is_norm(s.name):
        return not s.all_zero or s.name.endswith(".bias")
    return len(s.shape) < 2


def _holes(statistics: Sequence[Statistics]) -> Iterator[Finding]:
    holed: dict[str, tuple[int, int]] = {}
    rows: dict[str, tuple[int, int]] = {}
    for s in statistics:
        if (
            s.hole is None
            or s.constant
            or len(s.shape) < 2
            or s.name.endswith(_ZERO_POINTS)
            or is_scale(s.name)
        ):
            continue
        start, length = s.hole
        width = math.prod(s.shape[1:])
        if not _EMBEDDING.search(s.name) or start % width or (start + length) % width:
            if not (_EMBEDDING.search(s.name) and start + length >= s.elements - width):
                holed[s.name] = s.hole
        elif start + length < s.elements:  # unused rows at the end only pad the vocabulary
            rows[s.name] = s.hole
    if holed:
        name, (start, length) = next(iter(holed.items()))
        title = (
            f"{plural(len(holed), 'tensor')} with a hole of zeros, first {name}: {length} values"
            f" from {start} on"
        )
        causes = ["a block of the file was never written (an interrupted download or copy)"]
        remedies = ["download the shard again"]
        evidence = {n: {"first": a, "length": b} for n, (a, b) in list(holed.items())[:SHOWN]}
        yield found(
            "tensor_constant",
            title,
            causes=causes,
            remedies=remedies,
            tensors=evidence,
            count=len(holed),
        )
    if rows:
        title = f"rows of zeros in the middle of {some(rows)}"
        yield warned(
            "tensor_constant",
            title,
            causes=["unused tokens, or a hole that fits whole rows"],
            tensors=rows,
        )


def _denormal(statistics: Sequence[Statistics]) -> Iterator[Finding]:
    def flooded(s: Statistics) -> bool:
        # float16 reaches only 6e-5 before it goes denormal, where small honest weights may lie.
        limit = {"F16": 0.5, "BF16": 0.01, "F32": 0.01, "F64": 0.01}.get(s.dtype)
        return limit is not None and s.elements > 64 and s.denormal_share > limit

    names = [s.name for s in statistics if flooded(s)]
    if names:
        title = f"{plural(len(names), 'tensor')} flooded with denormal values: {some(names)}"
        causes = ["bytes read as another type", "a scale was applied twice"]
        yield found("tensor_scale", title, causes=causes, tensors=names[:SHOWN], count=len(names))


def _scaled(by_name: Mapping[str, Statistics]) -> Iterator[Finding]:
    matrices = {
        n: s
        for n, s in by_name.items()
        if s.dtype in FLOATS
        and len(s.shape) >= 2
        and not s.constant
        and not is_scale(n)
        and not _STATE.search(n)
        and s.rms > 0
    }
    roles: dict[str, list[float]] = defaultdict(list)
    for name, s in matrices.items():
        roles[layer_role(name)].append(s.rms)
    overall = median(s.rms for s in matrices.values()) if matrices else 0.0
    strange: dict[str, str] = {}
    for name, s in matrices.items():
        peers = roles[layer_role(name)]
        usual, limit = (median(peers), PEER_RATIO) if len(peers) >= 3 else (overall, MODEL_RATIO)
        ratio = s.rms / usual
        if len(matrices) >= 3 and not 1 / limit < ratio < limit:
            strange[name] = f"its rms {s.rms:.3g} is {ratio:.3g} times that of its peers"
        elif s.absmax > OUTLIER and s.absmax > OUTLIER_RATIO * s.rms:
            strange[name] = (
                f"its largest value {s.absmax:.3g} is {s.absmax / s.rms:.3g} times its rms"
            )
    for name, s in by_name.items():
        if is_norm(name) and s.absmax > 1e5:
            strange[name] = f"its largest value is {s.absmax:.3g}"
    if strange:
        name, reason = next(iter(strange.items()))
        title = f"{plural(len(strange), 'tensor')} of another scale, first {name}: {reason}"
        causes = ["a flipped exponent bit", "a quantisation scale applied twice or not at all"]
        evidence = dict(list(strange.items())[:SHOWN])
        yield found("tensor_scale", title, causes=causes, tensors=evidence, count=len(strange))


def _scales(statistics: Sequence[Statistics], signed: bool) -> Iterator[Finding]:
    wrong: dict[str, str] = {}
    for s in statistics:
        if not is_scale(s.name) or s.dtype not in {*FLOATS, "F8_E4M3"} or not s.elements:
            continue
        if s.all_zero:
            wrong[s.name] = "all zero"
        elif s.negative_share and not signed:
            wrong[s.name] = f"{s.negative_share:.1%} negative"
        elif s.absmax > 1e5 or (s.rms and s.elements > 64 and s.absmax > 1e5 * float(_typical(s))):
            wrong[s.name] = f"as large as {s.absmax:.3g}"
    if wrong:
        name, reason = next(iter(wrong.items()))
        title = f"{plural(len(wrong), 'scale tensor')} out of range, first {name}: {reason}"
        causes = ["scales were never filled or were damaged"]
        yield found(
            "tensor_scale",
            title,
            causes=causes,
            tensors=dict(list(wrong.items())[:SHOWN]),
            count=len(wrong),
        )


def _typical(s: Statistics) -> float:
    return float(np.median(np.abs(s.sample))) or s.rms
