"""What patterns over names tell of a checkpoint whose architecture has no tensor list.

Parts that all neighbours have, counts that the config gives, a head that is not tied, towers that
the config describes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from assay.checkpoint.findings import SHOWN, found, plural, some, warned
from assay.checkpoint.peers import holes_among_peers, lost_parts
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding

_SERIES = re.compile(r"^(.*?\.(?:layers?|blocks|h|resblocks|stages))\.(\d{1,6})\.(.+)$")
_EXPERT = re.compile(r"^(.*\bexperts)\.(\d{1,6})\.")
_STACKED = re.compile(r"\bexperts\.(gate_up_proj|down_proj|gate_proj|up_proj|w1|w2|w3|w13)\b")
_HEADS = ("lm_head", "output", "embed_out", "output_layer", "head", "score", "classifier")
_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOWERS: Mapping[str, re.Pattern[str]] = {
    "vision_config": re.compile(
        r"(^|\.)(visual|vis\w*|image\w*|vit|siglip|clip|patch\w*|encoder)\b"
    ),
    "audio_config": re.compile(r"(^|\.)(audio\w*|speech\w*|sound\w*|encoder)\b"),
}
_DEPTHS = ("depth", "num_hidden_layers", "num_layers", "encoder_layers", "n_layers")


def check_patterns(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings on the language model of an architecture without a tensor list."""
    yield from holes_among_peers(checkpoint)
    yield from _expert_counts(checkpoint)
    yield from _head(checkpoint)


def check_towers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings on the vision and audio towers that the config describes."""
    if all(n.endswith("ForCausalLM") for n in checkpoint.config.get("architectures") or ()):
        return
    for key, names in _TOWERS.items():
        settings = checkpoint.config.get(key)
        if isinstance(settings, dict) and settings:
            yield from _tower(checkpoint, key, settings, names)


def _tower(
    checkpoint: Checkpoint, key: str, settings: Mapping[str, Any], names: re.Pattern[str]
) -> Iterator[Finding]:
    own = [m for m in checkpoint.modules if names.search(m) and not _is_text(checkpoint, m)]
    tower = key.partition("_")[0]
    if not own:
        title = f"config.json describes a {tower} tower ({key}), and no tensor of it is stored"
        causes = ["the language model was exported alone, and the config was kept"]
        remedies = ["take the tower's tensors from the original repository"]
        # They may be stored under names that no pattern knows.
        yield warned("tensor_missing", title, causes=causes, remedies=remedies, key=key)
        return
    depth = next((v for k in _DEPTHS if type(v := settings.get(k)) is int and v > 0), None)
    for start, parts in _series(own).items():
        last = max(parts)
        gaps = [i for i in range(last + 1) if i not in parts]
        if depth is not None and len(parts) > 1 and last + 1 < depth and "merger" not in start:
            gaps += range(last + 1, min(depth, last + 1 + SHOWN))
        lost = [f"{start}.{at}.{tail}" for at, t in lost_parts(parts, 4).items() for tail in t]
        missing = [f"{start}.{i}" for i in gaps] + lost
        if missing:
            title = f"{plural(len(missing), 'part')} of the {tower} tower not stored: "
            yield found("tensor_missing", title + some(missing), modules=missing[:SHOWN])


def _is_text(checkpoint: Checkpoint, module: str) -> bool:
    return module.startswith(f"{checkpoint.prefix}layers.")


def _series(modules: list[str]) -> dict[str, dict[int, set[str]]]:
    """Parts by index of each numbered series among names."""
    series: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module in modules:
        if numbered := _SERIES.match(f".{module}"):
            series[numbered[1].lstrip(".")][int(numbered[2])].add(numbered[3])
    return series


def _expert_counts(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Stored experts of each layer against the number that the config gives."""
    key = next((k for k in _EXPERT_KEYS if checkpoint.dims(k)), None)
    count = checkpoint.dims(key) if key else None
    if not count:
        return
    stored: dict[str, set[int]] = defaultdict(set)
    for module in checkpoint.modules:
        if single := _EXPERT.match(f"{module}."):
            stored[single[1]].add(int(single[2]))
    counts = {place: len(numbers) for place, numbers in stored.items()}
    for name, tensor in checkpoint.tensors.items():
        if _STACKED.search(name) and len(tensor.shape) == 3:
            counts[name] = tensor.shape[0]
    wrong = {place: n for place, n in counts.items() if n < count and "shared" not in place}
    if wrong:
        place, number = next(iter(wrong.items()))
        title = f"{key} is {count}, and {place} holds {number} experts"
        causes = ["experts were pruned without changing config.json", "a shard is missing"]
        evidence = dict(list(wrong.items())[:SHOWN])
        yield found("tensor_missing", title, causes=causes, experts=evidence, count=len(wrong))


def _head(checkpoint: Checkpoint) -> Iterator[Finding]:
    """An output head that config.json does not tie to the embedding."""
    said = [c.get("tie_word_embeddings") for c in (checkpoint.text_config, checkpoint.config)]
    names = checkpoint.config.get("architectures") or ()
    generates = any("CausalLM" in n or "ConditionalGeneration" in n for n in names)
    if not generates or False not in said or True in said:
        return
    last = {module.rpartition(".")[2] for module in checkpoint.modules}
    if not last & set(_HEADS):
        title = "tie_word_embeddings is false, and no output head is stored"
        causes = ["the head was dropped; a loader fills it with random numbers"]
        yield found("tensor_missing", title, causes=causes, tensors=["lm_head.weight"])
