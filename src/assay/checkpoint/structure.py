"""The tensors that the config promises against those that are stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from assay.checkpoint.blocks import Dims, with_fused_experts
from assay.checkpoint.families import FAMILIES, TIED_BY_DEFAULT
from assay.checkpoint.findings import SHOWN, found, plural, some
from assay.checkpoint.quantization.stored import carrier, stored_kind, weight_shape
from assay.checkpoint.subject import Checkpoint
from assay.checkpoint.tensors import layer_index
from assay.verdict import Finding

MAX_PIECES = 200_000
"""Layers times experts that are enumerated; the largest models have some 20,000."""


@dataclass(frozen=True)
class Expectation:
    """Shapes by tensor name, and who says so."""

    shapes: dict[str, tuple[int, ...]]
    origin: str


def tied(checkpoint: Checkpoint) -> bool:
    """Whether the output head is the embedding: the text config's word, the top level's, the family's habit."""
    for config in (checkpoint.text_config, checkpoint.config):
        value = config.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
    return checkpoint.text_config.get("model_type") in TIED_BY_DEFAULT


def has_head(checkpoint: Checkpoint) -> bool:
    """Whether the architecture has an output head at all (an embedding model has none)."""
    names = checkpoint.config.get("architectures") or []
    return any(isinstance(n, str) and ("CausalLM" in n or "ConditionalGeneration" in n) for n in names)


def expectation(checkpoint: Checkpoint) -> Expectation | None:
    """What the config promises, for a family that assay knows; None for any other."""
    config = checkpoint.text_config
    layer = FAMILIES.get(str(config.get("model_type")))
    d = Dims(config)
    if layer is None or not d.hidden or not d.layers or d.layers * max(d.experts, 1) > MAX_PIECES:
        return None
    prefix = checkpoint.prefix
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embed_tokens.weight": (d.int_or("vocab_size"), d.hidden),
        f"{prefix}norm.weight": (d.hidden,),
    }
    for index in range(d.layers):
        pieces = layer(d, index)
        at = f"{prefix}layers.{index}."
        if any(p.startswith("gate_up_proj") for p in checkpoint.modules.get(f"{at}mlp.experts", {})):
            pieces = with_fused_experts(pieces, d, d.experts, d.int_or("moe_intermediate_size"))
        shapes.update((at + name, shape) for name, shape in pieces)
    if has_head(checkpoint) and not tied(checkpoint):
        shapes[head_name(checkpoint)] = (d.int_or("vocab_size"), d.hidden)
    return Expectation(shapes, "config.json")


def head_name(checkpoint: Checkpoint) -> str:
    """Name of the output head as this checkpoint would store it."""
    for name in ("lm_head", "language_model.lm_head"):
        if name in checkpoint.modules:
            return f"{name}.weight"
    nested = checkpoint.prefix.startswith("language_model.")
    return "language_model.lm_head.weight" if nested else "lm_head.weight"


def check_structure(checkpoint: Checkpoint, promised: Expectation | None) -> Iterator[Finding]:
    """Missing tensors and wrong shapes; without an expectation, layers that lack what their peers have."""
    if promised is None:
        yield from _holes_among_peers(checkpoint)
        return
    missing = [name for name in promised.shapes if not is_stored(checkpoint, name)]
    if missing:
        yield _missing(checkpoint, missing, promised.origin)
    wrong = dict(_wrong_shapes(checkpoint, promised))
    if wrong:
        name, (stored, wanted) = next(iter(wrong.items()))
        title = f"{plural(len(wrong), 'tensor')} of another shape than the config says, first {name}: "
        title += f"{list(stored)} stored, {list(wanted)} expected"
        evidence = {n: {"stored": s, "expected": w} for n, (s, w) in list(wrong.items())[:SHOWN]}
        causes = [
            "config.json belongs to another size of this model",
            "the tensor was resized without the config",
        ]
        yield found("tensor_shape", title, causes=causes, tensors=evidence, count=len(wrong))


def is_stored(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a promised tensor is there, as it is or quantised."""
    if name in checkpoint.tensors:
        return True
    module, _, parameter = name.rpartition(".")
    params = checkpoint.modules.get(module, {})
    if parameter == "weight":
        return carrier(params) is not None
    return any(p.startswith(f"{parameter}_") for p in params)  # fused experts: gate_up_proj_blocks, …_packed


def _missing(checkpoint: Checkpoint, missing: list[str], origin: str) -> Finding:
    layers = sorted({i for n in missing if (i := layer_index(n)) is not None})
    causes = ["a shard is missing or was cut", "the checkpoint was saved without them"]
    title = f"{plural(len(missing), 'tensor')} that {origin} promises not stored: {some(missing)}"
    if len(missing) == 1 and missing[0].endswith("lm_head.weight"):
        title = "lm_head.weight is not stored, and tie_word_embeddings is not true"
        causes = [
            "tie_word_embeddings was lost from config.json; then the head is the embedding",
            "the head was dropped; a loader fills it with random numbers",
        ]
    remedies = ["download the checkpoint again, or correct config.json"]
    return found(
        "tensor_missing", title, causes=causes, remedies=remedies, tensors=missing[:SHOWN], count=len(missing),
        layers=layers[:SHOWN],
    )  # fmt: skip


def _wrong_shapes(
    checkpoint: Checkpoint, promised: Expectation
) -> Iterator[tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    for name, shape in promised.shapes.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None or tensor.shape == shape:
            continue
        module, _, parameter = name.rpartition(".")
        if parameter == "weight":
            params = checkpoint.modules.get(module, {})
            if len(shape) == 2 and (stored_kind(params) is None or weight_shape(params) is None):
                continue  # packed: its geometry is checked by its scheme
        yield name, (tensor.shape, shape)


def _holes_among_peers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """For an unknown architecture: layers that count up with a gap, or one layer that lacks a part of its peers."""
    suffixes: dict[int, set[str]] = defaultdict(set)
    for module in checkpoint.modules:
        head, marker, rest = module.partition("layers.")
        index, _, tail = rest.partition(".")
        if marker and head == checkpoint.prefix and index.isdigit() and len(index) < 7:
            suffixes[int(index)].add(tail)
    count = checkpoint.dims("num_hidden_layers")
    if not suffixes or not count or count > 2000:
        return
    gaps = [i for i in range(count) if i not in suffixes]
    if gaps:
        title = f"{plural(len(gaps), 'layer')} of {count} not stored: {some(map(str, gaps))}"
        yield found("tensor_missing", title, layers=gaps[:SHOWN], causes=["a shard is missing"])
    if len(suffixes) < 4:
        return
    holes: list[str] = []
    for at, own in suffixes.items():
        fuller = [other for other in suffixes.values() if own < other]
        alike = [i for i, other in suffixes.items() if other == own]
        if len(fuller) >= len(suffixes) // 2 and len(alike) == 1:
            lost = sorted(fuller[0] - own)
            holes.extend(f"{checkpoint.prefix}layers.{at}.{tail}" for tail in lost)
    if holes:
        title = f"{plural(len(holes), 'module')} that the other layers have not stored: {some(holes)}"
        yield found("tensor_missing", title, modules=holes[:SHOWN], causes=["a shard is missing or was cut"])
