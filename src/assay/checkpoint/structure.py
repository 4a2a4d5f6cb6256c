"""The tensors that index and config promise against those that are stored."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from assay.checkpoint.documents import INDEX
from assay.checkpoint.expected import FAMILIES, TIED_BY_DEFAULT, Dims, fused_experts
from assay.checkpoint.findings import SHOWN, found, noted, plural, some, unexamined, warned
from assay.checkpoint.quantization.declared import carrier, stored_kind, weight_shape
from assay.checkpoint.safetensors import layer_index
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.verdict import Finding, Severity

Shape = tuple[int, ...]
MAX_PIECES = 200_000
"""Layers times experts that are enumerated; the largest models have some 30,000."""


@dataclass(frozen=True)
class Expectation:
    """Shapes by tensor name, and who says so; `problem` says why there are none."""

    shapes: dict[str, Shape]
    origin: str
    problem: str = ""


def tied(checkpoint: Checkpoint) -> bool:
    """Whether the output head is the embedding: the text config's word, the top level's, the family's habit."""
    for config in (checkpoint.text_config, checkpoint.config):
        value = config.get("tie_word_embeddings")
        if value is not None:
            return bool(value)
    return checkpoint.model_type in TIED_BY_DEFAULT


def has_head(checkpoint: Checkpoint) -> bool:
    """Whether the architecture has an output head at all (an embedding model has none)."""
    names = checkpoint.config.get("architectures") or []
    return any("CausalLM" in n or "ConditionalGeneration" in n for n in names)


def expectation(checkpoint: Checkpoint) -> Expectation | None:
    """What the config promises, for a family that assay knows; None for any other."""
    layer, d = FAMILIES.get(checkpoint.model_type), Dims(checkpoint.text_config)
    if layer is None:
        return None
    if d.layers * max(d.experts, 1) > MAX_PIECES:
        problem = f"config.json promises {d.layers} layers of {d.experts} experts, more than assay counts"
        return Expectation({}, "config.json", problem)
    prefix = checkpoint.prefix
    shapes: dict[str, Shape] = {
        f"{prefix}embed_tokens.weight": (d["vocab_size"], d.hidden),
        f"{prefix}norm.weight": (d.hidden,),
    }
    for index in range(d.layers):
        pieces, at = layer(d, index), f"{prefix}layers.{index}."
        if any(p.startswith("gate_up_proj") for p in checkpoint.modules.get(f"{at}mlp.experts", {})):
            pieces = fused_experts(pieces, d)
        shapes.update((at + name, shape) for name, shape in pieces)
    if has_head(checkpoint) and not tied(checkpoint):
        shapes[head_name(checkpoint)] = (d["vocab_size"], d.hidden)
    if d.lacking:
        names = ", ".join(sorted(d.lacking))
        return Expectation({}, "config.json", f"config.json gives no {names} for a {checkpoint.model_type}")
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
    yield from _names(checkpoint)
    if promised is None or promised.problem:
        if promised is not None:
            title = f"{promised.problem}: the names and shapes of the tensors were not examined"
            yield unexamined(
                title, severity=Severity.WARNING, remedies=["take config.json from the original repository"]
            )
        yield from holes_among_peers(checkpoint)
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


def _names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Tensors named as another architecture would name them, which no engine maps into this one.

    vLLM 0.32 maps `model.language_model.` for the text-only forms of Qwen3.5 and Gemma 4, and for no others.
    """
    config, prefix = checkpoint.config, checkpoint.prefix
    names = config.get("architectures") or []
    text_only = names and all(n.endswith("ForCausalLM") for n in names) and checkpoint.text_config is config
    if not text_only or config.get("auto_map") or config.get("vision_config") or config.get("quantization"):
        return
    if prefix == "model.language_model." and checkpoint.model_type.startswith(("qwen3_5", "gemma4")):
        return
    known = checkpoint.model_type in FAMILIES
    if "language_model." in prefix or (known and prefix not in {"", "model."}):
        title = f"config.json says {names[0]}, a text-only model, but the tensors are named {prefix}*"
        causes = [
            "the language model was taken out of a multimodal one, and only the config was changed",
            "the names were left as a training wrapper gave them",
        ]
        detail = "No engine maps these names into that architecture: it stops, or leaves all weights random."
        remedies = ["rename the tensors to model.*, or restore the multimodal config.json"]
        yield found("config_conflict", title, detail=detail, causes=causes, remedies=remedies, prefix=prefix)


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


def _wrong_shapes(checkpoint: Checkpoint, promised: Expectation) -> Iterator[tuple[str, tuple[Shape, Shape]]]:
    for name, shape in promised.shapes.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None or tensor.shape == shape:
            continue
        module, _, parameter = name.rpartition(".")
        params = checkpoint.modules.get(module, {})
        packed = stored_kind(params) is None or weight_shape(params) is None
        if not (parameter == "weight" and len(shape) == 2 and packed):  # a scheme checks what is packed
            yield name, (tensor.shape, shape)


def holes_among_peers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """For an unknown architecture: layers that count up with a gap, or one layer that lacks a part of its peers."""
    suffixes: dict[int, set[str]] = defaultdict(set)
    for module in checkpoint.modules:
        head, marker, rest = module.partition("layers.")
        index, _, tail = rest.partition(".")
        if marker and head == checkpoint.prefix and index.isdecimal() and len(index) < 7:
            suffixes[int(index)].add(tail)
    count = checkpoint.dims("num_hidden_layers")
    if not suffixes or not count:
        return
    gaps = [i for i in range(count) if i not in suffixes]
    if gaps:
        title = f"{plural(len(gaps), 'layer')} of {count} not stored: {some(map(str, gaps))}"
        yield found("tensor_missing", title, layers=gaps[:SHOWN], causes=["a shard is missing"])
    holes = [
        f"{checkpoint.prefix}layers.{at}.{tail}"
        for at, lost in lost_parts(suffixes, 4).items()
        for tail in lost
    ]
    if holes:
        title = f"{plural(len(holes), 'module')} that the other layers have not stored: {some(holes)}"
        yield found("tensor_missing", title, modules=holes[:SHOWN], causes=["a shard is missing or was cut"])


def lost_parts(layers: dict[int, set[str]], least: int) -> dict[int, list[str]]:
    """What a single layer lacks of the parts that at least half of its peers have; needs `least` layers."""
    forms = Counter(frozenset(parts) for parts in layers.values())
    lost: dict[int, list[str]] = {}
    for index, own in layers.items() if len(layers) >= least else ():
        fuller = [form for form in forms if own < form]
        if forms[frozenset(own)] == 1 and sum(forms[f] for f in fuller) >= len(layers) // 2 and fuller:
            lost[index] = sorted(fuller[0] - own)
    return lost


# -----------------------------------------------------------------------------
# `model.safetensors.index.json` against the shards, both ways.

_NUMBERED = re.compile(r"^(.*?)-(\d{5})-of-(\d{5})\.safetensors$")


def loaded_files(checkpoint: Checkpoint) -> set[str]:
    """The weight files that a loader reads: those that the index names, or `model.safetensors`."""
    return set((checkpoint.weight_map or {"": "model.safetensors"}).values())


def check_index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings on the index, on the numbering of shards and on tensors stored twice."""
    index, mapped = checkpoint.document(INDEX), checkpoint.weight_map
    if isinstance(index, BrokenDocument):
        yield found("index_mismatch", f"{INDEX} cannot be read: {index.reason}", path=INDEX)
    elif index is not None and mapped is None:
        yield found("index_mismatch", f"{INDEX} has no weight_map of names to files", path=INDEX)
    yield from _doubled(checkpoint)
    yield from _numbering(checkpoint) if mapped is None else _against_shards(checkpoint, mapped)


def _numbering(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Numbered shards without an index: are all of them here?"""
    series: dict[tuple[str, str], set[int]] = defaultdict(set)
    for file in checkpoint.files:
        numbered = _NUMBERED.match(file)
        if numbered and "/" not in file:
            series[numbered[1], numbered[3]].add(int(numbered[2]))
    for (stem, total), present in series.items():
        lost = [
            f"{stem}-{i:05d}-of-{total}.safetensors" for i in range(1, int(total) + 1) if i not in present
        ]
        if lost:
            title = f"{plural(len(lost), 'shard')} missing: {some(lost)}"
            yield found("shard_missing", title, paths=lost[:SHOWN])
        if int(total) > 1:
            title = f"{total} shards of {stem}, but no {INDEX} that says what is in them"
            yield found("index_mismatch", title, causes=["the index was not downloaded"], path=INDEX)


def _doubled(checkpoint: Checkpoint) -> Iterator[Finding]:
    where: dict[str, set[str]] = defaultdict(set)
    for file, header in checkpoint.headers.items():
        for tensor in header.tensors if file not in checkpoint.stray else ():
            where[tensor.name].add(file)
    doubled = {name: sorted(files) for name, files in where.items() if len(files) > 1}
    if doubled:
        name, files = next(iter(doubled.items()))
        title = f"{plural(len(doubled), 'tensor')} stored in two shards, first {name} ({' and '.join(files)})"
        causes = ["shards of two revisions or two saves lie in one folder"]
        remedies = ["delete the shards that do not belong to this revision"]
        evidence = dict(list(doubled.items())[:SHOWN])
        yield found("tensor_duplicate", title, causes=causes, remedies=remedies, tensors=evidence)


def _against_shards(checkpoint: Checkpoint, mapped: dict[str, str]) -> Iterator[Finding]:
    files = Counter(mapped.values())
    outside = sorted(f for f in files if PurePosixPath(f).is_absolute() or ".." in f.split("/"))
    if outside:
        title = f"{INDEX} names files outside the folder: {some(outside)}"
        yield found("index_mismatch", title, paths=outside[:SHOWN])
    lost = sorted(f for f in files if f not in outside and f not in checkpoint.files)
    if lost:
        count = sum(files[s] for s in lost)
        title = f"{plural(len(lost), 'shard')} missing with {plural(count, 'tensor')}: {some(lost)}"
        remedies = ["download the missing shards again"]
        yield found("shard_missing", title, remedies=remedies, paths=lost[:SHOWN], tensors=count)
    actual = {t.name: file for file, header in checkpoint.headers.items() for t in header.tensors}
    shards = {f: h.tensors for f, h in checkpoint.headers.items() if h.tensors or not h.faults}
    names = {f: {t.name for t in tensors} for f, tensors in shards.items()}
    elsewhere = [n for n, f in mapped.items() if n in actual and f in shards and n not in names[f]]
    if elsewhere:
        name = elsewhere[0]
        title = f"{plural(len(elsewhere), 'tensor')} not in the shard that the index names, first {name} "
        title += f"(index: {mapped[name]}, really: {actual[name]})"
        causes = ["two shards were swapped or renamed", "the index belongs to another save"]
        yield found("index_mismatch", title, causes=causes, tensors=elsewhere[:SHOWN])
    nowhere = [n for n, f in mapped.items() if n not in actual and f in shards]
    if nowhere:
        title = f"{plural(len(nowhere), 'tensor')} named by the index and in no shard: {some(nowhere)}"
        causes = ["a shard of another revision", "tensors were dropped without rewriting the index"]
        yield found("index_mismatch", title, causes=causes, tensors=nowhere[:SHOWN], count=len(nowhere))
    unnamed = [t.name for f in files if f in shards for t in shards[f] if t.name not in mapped]
    if unnamed:
        title = (
            f"{plural(len(unnamed), 'tensor')} in the shards that the index does not name: {some(unnamed)}"
        )
        yield found("index_mismatch", title, tensors=unnamed[:SHOWN], count=len(unnamed))
    if checkpoint.stray:
        unlisted = sorted(checkpoint.stray)
        title = f"{plural(len(unlisted), 'weight file')} that the index does not name: {some(unlisted)}"
        detail = "Engines load the files of the index only, so these tensors take no part."
        yield warned("index_mismatch", title, detail=detail, paths=unlisted[:SHOWN])
    total = (checkpoint.object(INDEX).get("metadata") or {}).get("total_size")
    stored = sum(t.nbytes for f in files if f in checkpoint.headers for t in checkpoint.headers[f].tensors)
    if total is not None and stored and int(total) != stored and not (lost or nowhere or unnamed):
        title = f"the index says {int(total)} bytes of tensors, the shards hold {stored}"
        detail = "Some exporters count tied or packed weights differently; engines do not read this figure."
        yield noted("index_mismatch", title, detail=detail, total_size=int(total), stored=stored)


# -----------------------------------------------------------------------------
# Names and shapes from transformers' own meta-device model, for families that assay has no layout of.
#
# Needs the `hf` extra. The model is built without memory for its weights and without running code of the checkpoint.

_COUNTS = re.compile(r"layers|experts|depth|blocks|stages")
MAX_COUNT, MAX_MODULES = 1024, 40_000
"""Largest number of layers or experts of a config that is built, and of both multiplied: each costs time."""


def meta_expectation(checkpoint: Checkpoint) -> Expectation | None:
    """What transformers would allocate for this config; None if it does not know the type or renames on load."""
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    kind = config.pop("model_type", None)
    if not kind or config.get("auto_map") or not _sane(config):
        return None
    try:
        return _expect(checkpoint, kind, config)
    except Exception:
        # Hundreds of model classes read this config, each with errors of its own. What cannot be built says nothing
        # about the tensors.
        return None


def _sane(config: dict[str, Any], depth: int = 0) -> bool:
    """Bounds on what the meta model has to enumerate, nested configs included."""
    counts = {k: v for k, v in config.items() if type(v) is int and _COUNTS.search(k)}
    layers = max((v for k, v in counts.items() if "experts" not in k), default=1)
    experts = max((v for k, v in counts.items() if "experts" in k), default=1)
    if max(counts.values(), default=0) > MAX_COUNT or layers * max(experts, 1) > MAX_MODULES:
        return False
    return depth <= 4 and all(_sane(v, depth + 1) for v in config.values() if isinstance(v, dict))


def _expect(checkpoint: Checkpoint, kind: str, config: dict[str, Any]) -> Expectation | None:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        if get_checkpoint_conversion_mapping(kind):
            return None  # stored under other names than the model's own
    except ImportError:
        pass
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    optional = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or []]
    tied = set(
        getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or []
    )
    shapes = {
        name: tuple(value.shape)
        for name, value in model.state_dict().items()
        if name not in tied and not any(p.search(name) for p in optional)
    }
    own = next((n for n in shapes if n.endswith("embed_tokens.weight")), "")
    if own and own.removesuffix("embed_tokens.weight") != checkpoint.prefix:
        return None
    return Expectation(shapes, f"transformers {transformers.__version__}")
