"""Compare `model.safetensors.index.json` with the shards, both ways."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import PurePosixPath

from assay.checkpoint.documents import INDEX
from assay.checkpoint.findings import SHOWN, found, noted, plural, some, warned
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.verdict import Finding

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
            f"{stem}-{i:05d}-of-{total}.safetensors"
            for i in range(1, int(total) + 1)
            if i not in present
        ]
        if lost:
            title = f"{plural(len(lost), 'shard')} missing: {some(lost)}"
            yield found("shard_missing", title, paths=lost[:SHOWN])
        if int(total) > 1:
            title = f"{total} shards of {stem}, but no {INDEX} that says what is in them"
            yield found(
                "index_mismatch", title, causes=["the index was not downloaded"], path=INDEX
            )


def _doubled(checkpoint: Checkpoint) -> Iterator[Finding]:
    where: dict[str, set[str]] = defaultdict(set)
    for file, header in checkpoint.headers.items():
        for tensor in header.tensors if file not in checkpoint.stray else ():
            where[tensor.name].add(file)
    doubled = {name: sorted(files) for name, files in where.items() if len(files) > 1}
    if doubled:
        name, files = next(iter(doubled.items()))
        title = (
            f"{plural(len(doubled), 'tensor')} stored in two shards, first {name}"
            f" ({' and '.join(files)})"
        )
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
        title = (
            f"{plural(len(elsewhere), 'tensor')} not in the shard that the index names, first"
            f" {name} "
        )
        title += f"(index: {mapped[name]}, really: {actual[name]})"
        causes = ["two shards were swapped or renamed", "the index belongs to another save"]
        yield found("index_mismatch", title, causes=causes, tensors=elsewhere[:SHOWN])
    nowhere = [n for n, f in mapped.items() if n not in actual and f in shards]
    if nowhere:
        title = (
            f"{plural(len(nowhere), 'tensor')} named by the index and in no shard: {some(nowhere)}"
        )
        causes = ["a shard of another revision", "tensors were dropped without rewriting the index"]
        yield found(
            "index_mismatch", title, causes=causes, tensors=nowhere[:SHOWN], count=len(nowhere)
        )
    unnamed = [t.name for f in files if f in shards for t in shards[f] if t.name not in mapped]
    if unnamed:
        title = (
            f"{plural(len(unnamed), 'tensor')} in the shards that the index does not name:"
            f" {some(unnamed)}"
        )
        yield found("index_mismatch", title, tensors=unnamed[:SHOWN], count=len(unnamed))
    if checkpoint.stray:
        unlisted = sorted(checkpoint.stray)
        title = (
            f"{plural(len(unlisted), 'weight file')} that the index does not name: {some(unlisted)}"
        )
        detail = "Engines load the files of the index only, so these tensors take no part."
        yield warned("index_mismatch", title, detail=detail, paths=unlisted[:SHOWN])
    total = (checkpoint.object(INDEX).get("metadata") or {}).get("total_size")
    stored = sum(
        t.nbytes for f in files if f in checkpoint.headers for t in checkpoint.headers[f].tensors
    )
    if total is not None and stored and int(total) != stored and not (lost or nowhere or unnamed):
        title = f"the index says {int(total)} bytes of tensors, the shards hold {stored}"
        detail = (
            "Some exporters count tied or packed weights differently; engines do not read this"
            " figure."
        )
        yield noted("index_mismatch", title, detail=detail, total_size=int(total), stored=stored)
