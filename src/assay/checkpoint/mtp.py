"""Is the multi-token-prediction head there, whole, and stored as the checkpoint declares?"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from assay.checkpoint.comparison import is_stored
from assay.checkpoint.declared import Declared
from assay.checkpoint.expectation import MAX_PIECES
from assay.checkpoint.mtp_families import FAMILIES, GENERIC, Family, announced_depth
from assay.checkpoint.opening import open_checkpoint
from assay.checkpoint.pieces import Dims, Shape, fused_experts
from assay.checkpoint.quantization import weights
from assay.checkpoint.schemes.registry import parse
from assay.checkpoint.storage import PLAIN, Kind
from assay.checkpoint.subject import Checkpoint

Status = Literal[
    "none", "ok", "absent", "partial", "dtype_conflict", "declared_quantized", "not_announced"
]


@dataclass(frozen=True)
class MtpReport:
    """What became of the head.

    `announced` is the number of layers the config promises, `present` the number of the head's
    tensors, `complete` whether all that the family owes are there (None where assay does not know
    its layout), `quantized` how its weights are stored, or None for plain ones.
    """

    status: Status
    family: str
    announced: int
    present: int
    complete: bool | None
    quantized: str | None
    key: str | None = None
    by_default: bool = False
    expected: int | None = None
    missing: tuple[str, ...] = ()
    wrong_shape: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)
    cast: tuple[str, ...] = ()
    """Those of `conflicts` whose tensors an engine finds under the name it looks for, and converts
    without a scale.
    """
    stray_file: str | None = None
    """A weight file with head tensors that the index does not name, so that no engine loads it."""
    checked_since: str | None = None

    def to_json(self) -> dict[str, object]:
        """`results.mtp`."""
        return {
            "announced": self.announced,
            "present": self.present,
            "complete": self.complete,
            "quantized": self.quantized,
            "status": self.status,
            "family": self.family,
            "expected": self.expected,
            "missing": list(self.missing[:50]),
            "key": self.key,
        }


def examine(source: str) -> MtpReport:
    """The head of the checkpoint at a path or `hub:ORG/NAME`, from headers and config alone.

    Raises AssayError if the checkpoint cannot be read.
    """
    checkpoint = open_checkpoint(str(source)).checkpoint
    return examine_checkpoint(checkpoint, parse(checkpoint))


def examine_checkpoint(checkpoint: Checkpoint, declared: Declared | None) -> MtpReport:
    """The head of an opened checkpoint."""
    family = _family(checkpoint)
    depth, key = announced_depth(family, checkpoint.text_config, checkpoint.config)
    by_default = depth is None and family.default > 0
    announced = family.default if depth is None else depth
    if family.forced is not None and (announced or depth is None):
        announced, by_default = family.forced, depth is None
    prefixes = head_prefixes(checkpoint, family, announced)
    present = [name for name in checkpoint.tensors if name.startswith(prefixes)]
    if not announced and any(".layers." in p for p in prefixes) and not _is_head(present):
        present = []  # ordinary layers beyond the configured number, which is another finding
    if by_default and family.forced is not None and not present:
        announced = 0  # forced by the engine, not promised by the config
    if not present:
        status: Status = "absent" if announced else "none"
        return MtpReport(
            status,
            family.name,
            announced,
            0,
            False if announced else None,
            None,
            key,
            by_default,
            stray_file=_stray(checkpoint, prefixes),
            checked_since=family.checked_since,
        )
    owed = _owed(checkpoint, family, announced or 1)
    missing = (
        [n for n in owed if not is_stored(checkpoint, n)]
        if owed
        else _unlike(checkpoint, prefixes, present)
    )
    wrong = {
        n: (t.shape, shape)
        for n, shape in owed.items()
        if (t := checkpoint.tensors.get(n)) and t.shape != shape and t.dtype in _UNPACKED
    }
    kinds, conflicts, cast = _storage(checkpoint, prefixes, declared)
    quantized = ", ".join(sorted(k for k in kinds if k is not Kind.PLAIN)) or None
    if missing or wrong:
        status = "partial"
    elif conflicts:
        status = "dtype_conflict"
    elif not announced:
        status = "not_announced"
    else:
        status = "declared_quantized" if quantized else "ok"
    return MtpReport(
        status,
        family.name,
        announced,
        len(present),
        not missing if owed or missing else None,
        quantized,
        key,
        by_default,
        len(owed) or None,
        tuple(missing),
        wrong,
        conflicts,
        cast,
        _stray(checkpoint, prefixes),
        family.checked_since,
    )


_UNPACKED = frozenset({"F32", "F16", "BF16", "F8_E4M3", "I8"})


def head_prefixes(
    checkpoint: Checkpoint, family: Family | None = None, depth: int | None = None
) -> tuple[str, ...]:
    """Beginnings of the head's tensor names; heads that count on after the last layer share the
    backbone's prefix.
    """
    family = family or _family(checkpoint)
    if depth is None:
        depth = (
            announced_depth(family, checkpoint.text_config, checkpoint.config)[0] or family.default
        )
    listed = family.prefixes(depth, checkpoint.dims("num_hidden_layers") or 0)
    return tuple(_placed(checkpoint, prefix) for prefix in listed)


def _placed(checkpoint: Checkpoint, name: str) -> str:
    return (
        checkpoint.prefix + name.removeprefix("model.")
        if name.startswith("model.layers.")
        else name
    )


def _is_head(names: list[str]) -> bool:
    """Whether names show what only a head has: an entry projection or norms of its own, or a place
    of its own.
    """
    marks = (".eh_proj.", ".enorm.", ".hnorm.", ".shared_head.")
    return any("mtp" in name or any(mark in name for mark in marks) for name in names)


def _family(checkpoint: Checkpoint) -> Family:
    if "MiMoForCausalLM" in (
        checkpoint.config.get("architectures") or ()
    ):  # vLLM goes by this name, not by the type
        return FAMILIES["mimo"]
    types = (checkpoint.model_type, checkpoint.config.get("model_type"))
    return next((FAMILIES[t] for t in types if t in FAMILIES), GENERIC)


def _owed(checkpoint: Checkpoint, family: Family, depth: int) -> dict[str, Shape]:
    """Names and shapes that the family owes; fused experts where the head stores them so."""
    d = Dims(checkpoint.text_config)
    if family.layout is None or depth * max(d.experts, 1) > MAX_PIECES:
        return {}
    prefixes = head_prefixes(checkpoint, family, depth)
    pieces = family.layout(d, depth)
    if any(
        ".experts.gate_up_proj" in name and name.startswith(prefixes) for name in checkpoint.tensors
    ):
        pieces = fused_experts(pieces, d)
    owed = {_placed(checkpoint, name): shape for name, shape in pieces}
    return {} if d.lacking else owed


_PARTS = {
    "attention": re.compile(r"attn|attention|mixer|qkv|[qk]_proj|delta|mamba|ssm"),
    "MLP": re.compile(r"mlp|ffn|expert|feed_forward|moe|mixer|down_proj|\bw[123]\b"),
}

_SHARED = re.compile(r"(self_attn|mlp|input_layernorm|post_attention_layernorm)\b")


def _unlike(checkpoint: Checkpoint, prefixes: tuple[str, ...], present: list[str]) -> list[str]:
    """What a head of unknown layout lacks: a block's attention and MLP, and what all layers of the
    backbone share.
    """
    start = f"{checkpoint.prefix}layers."
    backbone: dict[str, set[str]] = {}
    for module in checkpoint.modules:
        if module.startswith(start) and not (module + ".").startswith(prefixes):
            index, _, tail = module[len(start) :].partition(".")
            backbone.setdefault(index, set()).add(tail)
    shared = (
        {t for t in set.intersection(*backbone.values()) if _SHARED.match(t)} if backbone else set()
    )
    lacking = []
    for prefix in prefixes:
        own = [name.removeprefix(prefix) for name in present if name.startswith(prefix)]
        matrices = [name for name in own if "norm" not in name]
        counted = prefix.startswith(start)
        if counted or own:
            lacking += [
                f"{prefix}* ({part})"
                for part, names in _PARTS.items()
                if not any(map(names.search, matrices))
            ]
        if counted:
            modules = tuple(f".{name.rpartition('.')[0]}" for name in own)
            lacking += [
                prefix + tail
                for tail in sorted(shared)
                if not any(m.endswith(f".{tail}") for m in modules)
            ]
    return lacking


def _storage(
    checkpoint: Checkpoint, prefixes: tuple[str, ...], declared: Declared | None
) -> tuple[Counter[Kind], dict[str, str], tuple[str, ...]]:
    """How the head's weights are stored, where that contradicts the declaration, and where it is
    cast in silence.
    """
    kinds: Counter[Kind] = Counter()
    cast: list[str] = []
    conflicts: dict[str, str] = {}
    for module, kind, _ in weights(checkpoint):
        if not (module + ".").startswith(prefixes):
            continue
        kinds[kind] += 1
        accepted = declared.kinds(module) if declared is not None else PLAIN
        if kind is Kind.FP8_UNSCALED:
            conflicts[module] = "fp8 values without a scale"
            cast.append(module)
        elif (
            accepted is not None
            and kind not in accepted
            and not _engine_forgives(declared, module, kind)
        ):
            conflicts[module] = f"{kind} stored, {' or '.join(sorted(accepted))} declared"
            if kind in _SAME_NAME and accepted & _SAME_NAME:
                cast.append(module)
    return kinds, conflicts, tuple(cast)


# Stored as `weight` with the matrix's own shape, in any type: a loader finds such a tensor
# and converts it.
_SAME_NAME = frozenset({Kind.PLAIN, Kind.FP8, Kind.FP8_UNSCALED, Kind.INT8, Kind.MXFP8})


def _engine_forgives(declared: Declared | None, module: str, kind: Kind) -> bool:
    """ModelOpt leaves `mtp.fc` plain without saying so, and vLLM builds it unquantised for that
    reason.
    """
    return (
        declared is not None
        and declared.method == "modelopt"
        and (declared.algorithm or "").startswith("NVFP4")
        and module == "mtp.fc"
        and kind is Kind.PLAIN
    )


def _stray(checkpoint: Checkpoint, prefixes: tuple[str, ...]) -> str | None:
    for file in sorted(checkpoint.stray):
        header = checkpoint.headers.get(file)
        if header and any(t.name.startswith(prefixes) for t in header.tensors):
            return file
    return None
