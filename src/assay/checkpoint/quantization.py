"""Compare the declared quantisation with every module's stored tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.checkpoint.declared import Declared
from assay.checkpoint.documents import SIDECARS
from assay.checkpoint.expectation import expectation
from assay.checkpoint.findings import SHOWN, found, plural, some, unexamined, warned
from assay.checkpoint.matching import FUSED
from assay.checkpoint.packed import disagreement
from assay.checkpoint.storage import PACKED_KINDS, Kind, fused_kind, stored_kind
from assay.checkpoint.subject import Checkpoint
from assay.checkpoint.tensors import Params, layer_index
from assay.verdict import Finding

# Small projections that decide which expert or state is used; every tool leaves them in full
# precision.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "gate_inp", "wg"})

_OTHER_TOWERS = re.compile(
    r"(^|\.)(visual|vision\w*|audio\w*|multi_modal\w*|mm_\w*|embed_vision|connector)\."
)

_FUSED_EXPERTS = ("gate_up_proj", "down_proj", "gate_proj", "up_proj", "w13", "w2")


def weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Kind, Params]]:
    """(module, how it is stored, its parameters) of every weight that a quantiser may touch, MTP
    modules included.
    """
    for module, params in checkpoint.modules.items():
        kind = stored_kind(params)
        if kind is not None and (kind is not Kind.PLAIN or _is_linear(module, params)):
            yield module, kind, params
        if module.endswith("experts"):
            for stem in _FUSED_EXPERTS:
                fused = fused_kind(params, stem)
                if fused is not None:
                    yield f"{module}.{stem}", fused, {}


def _is_linear(module: str, params: Params) -> bool:
    last = module.rpartition(".")[2]
    if (
        last in _ROUTERS
        or last == "head"
        or "norm" in last
        or "embed" in last
        or _OTHER_TOWERS.search(module)
    ):
        return False
    inside = layer_index(module + ".") is not None or "mtp" in module
    return inside and len(params["weight"].shape) == 2


def check_quantization(
    checkpoint: Checkpoint, declared: Declared | None, draft: tuple[str, ...] = ()
) -> Iterator[Finding]:
    """Findings on the declaration against the backbone's tensors.

    Names that begin with a prefix of `draft` belong to a draft head, which `mtp` judges.
    """
    stored = [w for w in weights(checkpoint) if not (w[0] + ".").startswith(draft)]
    kinds = Counter(kind for _, kind, _ in stored)
    packed = {k: n for k, n in kinds.items() if k in PACKED_KINDS}
    yield from _missing_parts(stored, declared)
    yield from _unwanted_parts(stored, declared)
    yield from _split_groups(stored, declared)
    yield from _routers(checkpoint)
    yield from _unmapped_names(checkpoint)
    if declared is not None:
        yield from _sidecars(checkpoint, declared)
        if declared.unexamined:
            title = f"{declared.unexamined}; its tensors were not examined"
            remedies = ["compare the served model with its reference: assay compare"]
            yield unexamined(
                title, remedies=remedies, method=declared.method, source=declared.source
            )
        promised = expectation(checkpoint)
        yield from _disagreements(declared, stored, packed, promised.shapes if promised else {})
    elif set(packed) == {Kind.HQQ}:
        title = f"{packed[Kind.HQQ]} modules in HQQ's own format, which no config declares"
        detail = (
            "Each module carries its settings; the hqq library reads them, other engines find no"
            " weights."
        )
        yield warned("quantization_conflict", title, detail=detail, stored=packed)
    elif packed:
        names = ", ".join(f"{n} × {k}" for k, n in packed.items())
        title = f"tensors are quantised ({names}), but no file declares a quantisation"
        remedies = ["restore quantization_config in config.json from the original repository"]
        yield found("quantization_conflict", title, remedies=remedies, stored=packed)


def _disagreements(
    declared: Declared,
    stored: list[tuple[str, Kind, Params]],
    packed: Mapping[Kind, int],
    promised: Mapping[str, tuple[int, ...]],
) -> Iterator[Finding]:
    plain: list[str] = []
    excluded: list[str] = []
    other: dict[str, tuple[Kind, str]] = {}
    shapes: dict[str, str] = {}
    for module, kind, params in stored:
        accepted = declared.kinds(module)
        if accepted is None:
            continue
        if kind in accepted or (kind is Kind.FP8_UNSCALED and Kind.FP8 in accepted):
            problem = declared.geometry(module, params) if params else None
            shape = promised.get(f"{module}.weight")
            if problem is None and shape is not None and params:
                problem = disagreement(kind, params, declared.bits_of(module), shape)
            if problem:
                shapes[module] = problem
        elif kind is Kind.PLAIN:
            plain.append(module)
        elif accepted == {Kind.PLAIN}:
            excluded.append(module)
        else:
            other[module] = (kind, " or ".join(sorted(accepted)))
    source, method = declared.source, declared.method
    if plain and not packed:
        title = f"{source} declares {method}, but no tensor is quantised"
        causes = ["the config of a quantised repository was copied to plain weights"]
        remedies = ["remove quantization_config, or download the quantised weights"]
        evidence: dict[str, Any] = {"method": method, "plain": plain[:SHOWN], "count": len(plain)}
        yield found("quantization_conflict", title, causes=causes, remedies=remedies, **evidence)
        return
    if other:
        module, (kind, wanted) = next(iter(other.items()))
        title = (
            f"{plural(len(other), 'module')} stored otherwise than {method} says, first {module}: "
        )
        title += f"{kind} stored, {wanted} declared"
        causes = [f"the declaration in {source} belongs to another export of this model"]
        if method == "auto-round" and kind is Kind.AWQ:
            causes.insert(
                0,
                "packing_format is missing or wrong: without it AutoRound's GPTQ layout is assumed",
            )
        yield _conflict(
            title, {m: {"stored": k, "declared": w} for m, (k, w) in other.items()}, causes
        )
    if plain:
        title = f"{plural(len(plain), 'module')} declared {method} and stored plain: {some(plain)}"
        causes = ["the modules were left out when quantising and not put on the ignore list"]
        yield _conflict(title, plain, causes, [f"add them to the ignore list in {source}"])
    if excluded:
        title = (
            f"{plural(len(excluded), 'module')} on the ignore list and stored quantised:"
            f" {some(excluded)}"
        )
        yield _conflict(title, excluded, remedies=[f"take them off the ignore list in {source}"])
    if shapes:
        module, problem = next(iter(shapes.items()))
        title = (
            f"{plural(len(shapes), 'module')} packed otherwise than bits and group size say, first"
            f" {module}: {problem}"
        )
        causes = [f"bits or group_size in {source} is not what the tensors were packed with"]
        yield _conflict(title, shapes, causes, bits=declared.bits, group_size=declared.group_size)


def _conflict(
    title: str,
    modules: list[str] | Mapping[str, Any],
    causes: Sequence[str] = (),
    remedies: Sequence[str] = (),
    **evidence: Any,
) -> Finding:
    """A `quantization_conflict` with the first of its modules."""
    shown = modules[:SHOWN] if isinstance(modules, list) else dict(list(modules.items())[:SHOWN])
    return found(
        "quantization_conflict",
        title,
        causes=causes,
        remedies=remedies,
        modules=shown,
        count=len(modules),
        **evidence,
    )


_PARTS: Mapping[Kind, tuple[tuple[str, ...], ...]] = {
    Kind.GPTQ: (("scales",), ("qzeros",)),
    Kind.AWQ: (("scales",), ("qzeros",)),
    Kind.PACKED: (("weight_scale",),),
    Kind.NVFP4_PACKED: (("weight_scale",), ("weight_global_scale",)),
    Kind.NVFP4: (("weight_scale",), ("weight_scale_2",)),
    Kind.INT8: (("weight_scale", "SCB", "scale", "scales"),),
    Kind.FP8_UNSCALED: (("weight_scale", "weight_scale_inv", "scale"),),
    Kind.BNB4: (("weight.absmax",), ("weight.quant_map",)),
    Kind.HQQ: (("scale", "scale_q"), ("zero", "zero_q")),
    Kind.TORCHAO: (
        ("_weight_scale", "_weight_scale_and_zero", "_weight_block_scale", "weight_scale"),
    ),
}
"""Parameters that a stored kind cannot be read without; each tuple names alternatives."""


def _missing_parts(
    stored: list[tuple[str, Kind, Params]], declared: Declared | None
) -> Iterator[Finding]:
    lacking: dict[str, str] = {}
    for module, kind, params in stored:
        if not params or kind is Kind.PLAIN:
            continue
        for alternatives in _PARTS.get(kind, ()):
            if not any(a in params for a in alternatives):
                lacking[module] = alternatives[0]
        if declared is not None and kind in (declared.kinds(module) or ()):
            lacking.update((module, part) for part in declared.needs(module) if part not in params)
    if lacking:
        module, part = next(iter(lacking.items()))
        title = f"{plural(len(lacking), 'quantised weight')} without its {part}, first {module}"
        causes = ["the scales were dropped when the checkpoint was saved or converted"]
        detail = "An engine fills a missing scale with one or with uninitialised memory."
        yield _conflict(title, lacking, causes, detail=detail)


def _unwanted_parts(
    stored: list[tuple[str, Kind, Params]], declared: Declared | None
) -> Iterator[Finding]:
    if declared is None:
        return
    extra = [
        f"{m}.{p}"
        for m, kind, params in stored
        if kind is not Kind.PLAIN
        for p in declared.unwanted(m)
        if p in params
    ]
    if extra:
        title = (
            f"{plural(len(extra), 'zero-point')} of weights that are declared symmetric:"
            f" {some(extra)}"
        )
        causes = ["the scheme in the declaration is not the one that was used"]
        detail = "An engine drops them, and reads every weight as if its zero-point were 0."
        yield found(
            "orphan_scale",
            title,
            detail=detail,
            causes=causes,
            tensors=extra[:SHOWN],
            count=len(extra),
        )


def _split_groups(
    stored: list[tuple[str, Kind, Params]], declared: Declared | None
) -> Iterator[Finding]:
    """Engines fuse q, k, v and gate, up into one matrix: they must be stored alike."""
    bits = declared.bits_of if declared is not None else lambda module: None
    kinds = {
        module: (kind, None if kind is Kind.PLAIN else bits(module)) for module, kind, _ in stored
    }
    split = []
    for module, kind in kinds.items():
        parent, _, last = module.rpartition(".")
        for first, *rest in FUSED.values():
            if last == first and {kinds.get(f"{parent}.{p}", kind) for p in rest} - {kind}:
                split.append(f"{parent}.({'|'.join((first, *rest))})")
    if split and (declared is None or declared.method != "mlx"):  # which fuses nothing
        title = f"{plural(len(split), 'fused group')} stored in more than one way: {some(split)}"
        yield _conflict(
            title,
            split,
            detail="Engines load these projections as one matrix with one quantisation.",
        )


def _routers(checkpoint: Checkpoint) -> Iterator[Finding]:
    names = [
        module
        for module, params in checkpoint.modules.items()
        if module.rpartition(".")[2] in {*_ROUTERS, "weights_proj"}
        and stored_kind(params) in PACKED_KINDS - {Kind.MLX}
    ]
    if names:
        title = f"{plural(len(names), 'router')} stored quantised: {some(names)}"
        detail = (
            "Engines build the matrix that chooses the experts in full precision, and find no"
            " weight for it."
        )
        remedies = ["leave routers (gate, shared_expert_gate) out when quantising"]
        references = ["https://github.com/vllm-project/llm-compressor/issues/69"]
        yield warned(
            "quantization_conflict",
            title,
            detail=detail,
            remedies=remedies,
            references=references,
            modules=names[:SHOWN],
            count=len(names),
        )


def _unmapped_names(checkpoint: Checkpoint) -> Iterator[Finding]:
    names = [
        f"{module}.{stem}_packed"
        for module, params in checkpoint.modules.items()
        if module.endswith("experts")
        for stem in _FUSED_EXPERTS
        if f"{stem}_packed" in params
    ]
    if names:
        title = (
            f"{plural(len(names), 'fused expert tensor')} packed under names that no engine maps:"
            f" {some(names)}"
        )
        references = ["https://github.com/vllm-project/llm-compressor/issues/2939"]
        yield warned("quantization_conflict", title, references=references, tensors=names[:SHOWN])


def _sidecars(checkpoint: Checkpoint, declared: Declared) -> Iterator[Finding]:
    for name in SIDECARS:
        other = checkpoint.object(name) if name != declared.source else {}
        shared = declared.raw.keys() & other.keys() & {"bits", "group_size", "sym", "desc_act"}
        differing = {
            k: (declared.raw[k], other[k]) for k in sorted(shared) if declared.raw[k] != other[k]
        }
        if differing:
            title = (
                f"{declared.source} and {name} declare different quantisations ({some(differing)})"
            )
            yield found("quantization_conflict", title, differing=differing)
