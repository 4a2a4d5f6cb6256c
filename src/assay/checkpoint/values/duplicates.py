"""Tensors that are equal and should not be, and a head that differs from its tied embedding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from assay.checkpoint.findings import SHOWN, found, plural, warned
from assay.checkpoint.tensors import layer_index, layer_role
from assay.checkpoint.values.statistics import Statistics
from assay.verdict import Finding

SameBytes = Callable[[str, str], bool]

_SHARED = ("embed_tokens", "lm_head", "shared_head", "wte", "token_embd", "output.weight")


def check_duplicates(statistics: Sequence[Statistics], same: SameBytes) -> Iterator[Finding]:
    """Matrices of one role that are equal in two layers; whole layers that repeat are only
    noted.
    """
    groups: dict[tuple[str, str, tuple[int, ...], str], list[Statistics]] = defaultdict(list)
    per_layer: dict[int, set[str]] = defaultdict(set)
    for s in statistics:
        if len(s.shape) < 2 or s.constant or any(part in s.name for part in _SHARED):
            continue
        groups[s.fingerprint, s.dtype, s.shape, layer_role(s.name)].append(s)
        index = layer_index(s.name)
        if index is not None:
            per_layer[index].add(layer_role(s.name))
    pairs = [
        (first.name, other.name)
        for (_, _, _, _), (first, *others) in groups.items()
        for other in others
        if not _packed_side(first.name) and same(first.name, other.name)
    ]
    copied: dict[tuple[int | None, int | None], list[tuple[str, str]]] = defaultdict(list)
    for pair in pairs:
        copied[layer_index(pair[0]), layer_index(pair[1])].append(pair)
    single = [
        pair
        for (a, b), found_pairs in copied.items()
        for pair in found_pairs
        if a is None or b is None or a == b or len(found_pairs) < 0.8 * len(per_layer[a])
    ]
    if single:
        title = f"{plural(len(single), 'tensor')} equal to another that it should differ from, "
        title += f"first {single[0][1]} and {single[0][0]}"
        causes = ["a conversion wrote one tensor under two names"]
        yield found(
            "tensor_duplicate", title, causes=causes, pairs=single[:SHOWN], count=len(single)
        )
    whole = [pair for pair in pairs if pair not in single]
    if whole:
        layers = sorted({(layer_index(a), layer_index(b)) for a, b in whole}, key=str)
        title = (
            f"{plural(len(layers), 'pair')} of whole layers are equal, first {layers[0][0]} and"
            f" {layers[0][1]}"
        )
        yield warned(
            "tensor_duplicate",
            title,
            causes=["a model grown by repeating layers, or a copied layer"],
            layers=layers,
        )


def _packed_side(name: str) -> bool:
    return name.endswith(
        ("qzeros", "g_idx", "weight_zero_point", "scales", "weight_scale", "weight_scale_inv")
    )


def check_tied(
    names: Mapping[str, Statistics], embedding: str, head: str, tied: bool, same: SameBytes
) -> Iterator[Finding]:
    """A head that is stored although it is tied must equal the embedding: engines drop one of the
    two.
    """
    if not tied or embedding not in names or head not in names:
        return
    one, two = names[embedding], names[head]
    if (
        one.shape == two.shape
        and one.dtype == two.dtype
        and not (one.fingerprint == two.fingerprint and same(embedding, head))
    ):
        title = f"tie_word_embeddings is true, but {head} is stored and differs from {embedding}"
        detail = "Engines that tie drop the stored head; others use it: they answer differently."
        yield found(
            "config_conflict",
            title,
            detail=detail,
            causes=["the flag was lost or set when fine-tuning"],
        )
