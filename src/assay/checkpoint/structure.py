"""The tensors that the config promises against those that are stored."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from assay.checkpoint.expected import FAMILIES, TIED_BY_DEFAULT, Dims, with_fused_experts
from assay.checkpoint.findings import SHOWN, found, noted, plural, some, warned
from assay.checkpoint.quantization.declared import carrier, stored_kind, weight_shape
from assay.checkpoint.safetensors import Tensor, layer_index
from assay.checkpoint.subject import INDEX, BrokenDocument, Checkpoint
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


# -----------------------------------------------------------------------------
# `model.safetensors.index.json` against the shards, both ways.

_NUMBERED = re.compile(r"^(.*?)-(\d{5})-of-(\d{5})\.safetensors$")


def weight_map(checkpoint: Checkpoint) -> dict[str, str] | None:
    """Shard by tensor name as the index has it, or None if there is no usable index."""
    index = checkpoint.document(INDEX)
    mapped = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(mapped, dict) or not all(isinstance(v, str) for v in mapped.values()):
        return None
    return mapped


def loaded_files(checkpoint: Checkpoint) -> set[str]:
    """The weight files that a loader reads: those that the index names, or `model.safetensors`."""
    return set((weight_map(checkpoint) or {"": "model.safetensors"}).values())


def check_index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings on the index, on the numbering of shards and on tensors stored twice."""
    index = checkpoint.document(INDEX)
    mapped = weight_map(checkpoint)
    if isinstance(index, BrokenDocument):
        yield found("index_mismatch", f"{INDEX} cannot be read: {index.reason}", path=INDEX)
    elif index is not None and mapped is None:
        yield found("index_mismatch", f"{INDEX} has no weight_map of names to files", path=INDEX)
    yield from _numbering(checkpoint, mapped)
    yield from _doubled(checkpoint)
    if mapped is not None:
        yield from _against_shards(checkpoint, mapped)


def _numbering(checkpoint: Checkpoint, mapped: dict[str, str] | None) -> Iterator[Finding]:
    series: dict[tuple[str, str], set[int]] = defaultdict(set)
    for file in checkpoint.files:
        if numbered := _NUMBERED.match(file):
            series[numbered[1], numbered[3]].add(int(numbered[2]))
    for (stem, total), present in series.items():
        if mapped is not None or "/" in stem:
            continue
        lost = [
            f"{stem}-{i:05d}-of-{total}.safetensors" for i in range(1, int(total) + 1) if i not in present
        ]
        if lost and len(lost) <= 100_000:
            yield found(
                "shard_missing", f"{plural(len(lost), 'shard')} missing: {some(lost)}", paths=lost[:SHOWN]
            )
        if int(total) > 1:
            title = f"{total} shards of {stem}, but no {INDEX} that says what is in them"
            yield found("index_mismatch", title, causes=["the index was not downloaded"], path=INDEX)


def _doubled(checkpoint: Checkpoint) -> Iterator[Finding]:
    where: dict[str, list[str]] = defaultdict(list)
    for file, header in checkpoint.headers.items():
        if file not in checkpoint.stray:
            for tensor in header.tensors:
                where[tensor.name].append(file)
    doubled = {name: files for name, files in where.items() if len(set(files)) > 1}
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
        yield found(
            "index_mismatch",
            f"{INDEX} names files outside the folder: {some(outside)}",
            paths=outside[:SHOWN],
        )
    shards = Counter({f: count for f, count in files.items() if f not in outside})
    lost = sorted(s for s in shards if s not in checkpoint.files)
    if lost:
        count = sum(shards[s] for s in lost)
        title = f"{plural(len(lost), 'shard')} missing with {plural(count, 'tensor')}: {some(lost)}"
        remedies = ["download the missing shards again"]
        yield found("shard_missing", title, remedies=remedies, paths=lost[:SHOWN], tensors=count)
    actual = {t.name: file for file, header in checkpoint.headers.items() for t in header.tensors}
    readable = {f for f, h in checkpoint.headers.items() if h.tensors or not h.faults}
    names = {f: {t.name for t in checkpoint.headers[f].tensors} for f in readable}
    elsewhere = {
        n: actual[n] for n, f in mapped.items() if n in actual and f in readable and n not in names[f]
    }
    if elsewhere:
        name = next(iter(elsewhere))
        title = (
            f"{plural(len(elsewhere), 'tensor')} not in the shard that the index names, "
            f"first {name} (index: {mapped[name]}, really: {elsewhere[name]})"
        )
        causes = ["two shards were swapped or renamed", "the index belongs to another save"]
        yield found("index_mismatch", title, causes=causes, tensors=list(elsewhere)[:SHOWN])
    nowhere = [n for n, f in mapped.items() if n not in actual and f in readable]
    if nowhere:
        title = f"{plural(len(nowhere), 'tensor')} named by the index and in no shard: {some(nowhere)}"
        causes = ["a shard of another revision", "tensors were dropped without rewriting the index"]
        yield found("index_mismatch", title, causes=causes, tensors=nowhere[:SHOWN], count=len(nowhere))
    unnamed = [
        t.name for f in shards if f in readable for t in checkpoint.headers[f].tensors if t.name not in mapped
    ]
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
    if not (lost or nowhere or unnamed):
        yield from _total_size(checkpoint, shards)


def _total_size(checkpoint: Checkpoint, shards: Counter[str]) -> Iterator[Finding]:
    metadata = checkpoint.object(INDEX).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    stored = sum(t.nbytes for f in shards if f in checkpoint.headers for t in checkpoint.headers[f].tensors)
    if isinstance(total, int | float) and stored and int(total) != stored:
        title = f"the index says {int(total)} bytes of tensors, the shards hold {stored}"
        detail = "Some exporters count tied or packed weights differently; engines do not read this figure."
        yield noted("index_mismatch", title, detail=detail, total_size=int(total), stored=stored)


# -----------------------------------------------------------------------------
# A separate draft (EAGLE, EAGLE-3) against the target it is to draft for.


def is_draft(checkpoint: Checkpoint) -> bool:
    """Whether this is an EAGLE-style draft: it says so, or has its entry projection and vocabulary maps."""
    names = checkpoint.config.get("architectures") or []
    named = any(isinstance(n, str) and "eagle" in n.lower() for n in names)
    return named or _named(checkpoint, "fc.weight") is not None or _named(checkpoint, "d2t") is not None


def _named(checkpoint: Checkpoint, name: str) -> Tensor | None:
    return checkpoint.tensors.get(name) or checkpoint.tensors.get(f"model.{name}")


def aux_layers(config: dict[str, Any]) -> int:
    """How many of the target's hidden states EAGLE-3 concatenates (3 unless the config lists them)."""
    count = config.get("num_aux_hidden_states")
    if type(count) is int and count > 0:
        return count
    eagle = config.get("eagle_config")
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None
    ids = ids or config.get("eagle_aux_hidden_state_layer_ids")
    return len(ids) if isinstance(ids, list) and ids else 3


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """EAGLE-3 maps a smaller draft vocabulary and reads several hidden states; EAGLE reads one."""
    names = str(checkpoint.config.get("architectures")).lower()
    return (
        "eagle3" in names or _named(checkpoint, "d2t") is not None or "draft_vocab_size" in checkpoint.config
    )


def check_draft(draft: Checkpoint, target: Checkpoint | None) -> Iterator[Finding]:
    """Findings on a draft's own shapes, and on the pair where the target is known."""
    config = draft.config
    hidden, vocab = draft.dims("hidden_size"), draft.dims("vocab_size")
    target_hidden = config.get("target_hidden_size") or hidden
    if target is not None:
        yield from _pair(draft, target)
        target_hidden = config.get("target_hidden_size") or target.dims("hidden_size") or hidden
        vocab = target.dims("vocab_size") or vocab
    entry = _named(draft, "fc.weight")
    if entry is not None and hidden and type(target_hidden) is int and len(entry.shape) == 2:
        count = aux_layers(config)
        wanted = target_hidden * count if is_eagle3(draft) else hidden + target_hidden
        if entry.shape != (hidden, wanted):
            parts = (
                f"{count} hidden states of {target_hidden}"
                if is_eagle3(draft)
                else "embedding and hidden state"
            )
            title = f"fc.weight is {list(entry.shape)}; {parts} need {[hidden, wanted]}"
            causes = ["the draft was trained for another target or for other auxiliary layers"]
            yield found("draft_mismatch", title, causes=causes, tensor=entry.name, shape=entry.shape)
    yield from _attention(draft, hidden)
    yield from _vocabulary(draft, vocab)


def _attention(draft: Checkpoint, hidden: int | None) -> Iterator[Finding]:
    """EAGLE-3's first layer attends over embedding and hidden state side by side; EAGLE's over their projection."""
    for layer in ("midlayer", "layers.0"):
        query = _named(draft, f"{layer}.self_attn.q_proj.weight")
        if query is None or len(query.shape) != 2 or not hidden:
            continue
        wanted = 2 * hidden if is_eagle3(draft) else hidden
        if query.shape[1] != wanted:
            kind = "EAGLE-3" if is_eagle3(draft) else "EAGLE"
            title = f"{query.name} reads {query.shape[1]} values, the first layer of {kind} reads {wanted}"
            causes = ["the draft is of another kind than its config says", "its hidden size is another"]
            yield found("draft_mismatch", title, causes=causes, tensor=query.name, shape=query.shape)


def _vocabulary(draft: Checkpoint, vocab: int | None) -> Iterator[Finding]:
    small = draft.config.get("draft_vocab_size") or draft.dims("vocab_size")
    if type(small) is not int:
        return
    wanted = (("d2t", small), ("t2d", vocab), ("lm_head.weight", small))
    for name, length in wanted:
        tensor = _named(draft, name)
        if tensor is not None and length and tensor.shape[:1] != (length,):
            title = (
                f"{name} of the draft has {tensor.shape[0] if tensor.shape else 0} entries, it needs {length}"
            )
            causes = ["the draft belongs to another target or another draft vocabulary"]
            yield found("draft_mismatch", title, causes=causes, tensor=tensor.name, shape=tensor.shape)
    if vocab and small < vocab and _named(draft, "d2t") is None and is_eagle3(draft):
        title = f"the draft predicts {small} of {vocab} tokens, but has no d2t map"
        yield found("draft_mismatch", title, draft_vocab_size=small, vocab_size=vocab)


def _pair(draft: Checkpoint, target: Checkpoint) -> Iterator[Finding]:
    pairs = (
        ("vocab_size", draft.dims("vocab_size"), target.dims("vocab_size")),
        ("hidden_size", draft.config.get("target_hidden_size"), target.dims("hidden_size")),
    )
    for name, own, other in pairs:
        if type(own) is int and other and own != other:
            title = f"the draft is for a target with {name} {own}, this target has {other}"
            yield found(
                "draft_mismatch",
                title,
                causes=["the draft belongs to another model"],
                draft=own,
                target=other,
            )
    if "target_hidden_size" not in draft.config and not is_eagle3(draft):
        own, other = draft.dims("hidden_size"), target.dims("hidden_size")
        if own and other and own != other:
            title = f"the draft reads hidden states of {own}, the target gives {other}"
            yield found("draft_mismatch", title, draft=own, target=other)


# -----------------------------------------------------------------------------
# Names and shapes from transformers' own meta-device model, for families that assay has no layout of.
#
# Needs the `hf` extra. The model is built without memory for its weights and without running code of the checkpoint.

_COUNTS = re.compile(r"layers|experts|depth|blocks|stages")
MAX_COUNT = 1024
"""Largest number of layers or experts of a config that is built: each costs time, though no memory for weights."""


def meta_expectation(checkpoint: Checkpoint) -> Expectation | None:
    """What transformers would allocate for this config; None if it does not know the type or renames on load."""
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    kind = config.pop("model_type", None)
    if not isinstance(kind, str) or config.get("auto_map") or not _sane(config):
        return None
    try:
        return _expect(checkpoint, kind, config)
    except Exception:
        # Hundreds of model classes read this config, each with errors of its own. What cannot be built says nothing
        # about the tensors.
        return None


def _sane(config: dict[str, Any], depth: int = 0) -> bool:
    """Bounds on what the meta model has to enumerate, nested configs included."""
    for key, value in config.items():
        if isinstance(value, dict):
            if depth > 4 or not _sane(value, depth + 1):
                return False
        elif type(value) is int and _COUNTS.search(key) and abs(value) > MAX_COUNT:
            return False
    return True


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
