"""Layers that lack what their neighbours have, for architectures without a tensor list."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from assay.checkpoint.findings import SHOWN, found, plural, some
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding


def holes_among_peers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """For an unknown architecture: layers that count up with a gap, or one layer that lacks a part
    of its peers.
    """
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
        title = (
            f"{plural(len(holes), 'module')} that the other layers have not stored: {some(holes)}"
        )
        yield found(
            "tensor_missing", title, modules=holes[:SHOWN], causes=["a shard is missing or was cut"]
        )


def lost_parts(layers: dict[int, set[str]], least: int) -> dict[int, list[str]]:
    """What a single layer lacks of the parts that at least half of its peers have; needs `least`
    layers.
    """
    forms = Counter(frozenset(parts) for parts in layers.values())
    lost: dict[int, list[str]] = {}
    for index, own in layers.items() if len(layers) >= least else ():
        fuller = [form for form in forms if own < form]
        if (
            forms[frozenset(own)] == 1
            and sum(forms[f] for f in fuller) >= len(layers) // 2
            and fuller
        ):
            lost[index] = sorted(fuller[0] - own)
    return lost
