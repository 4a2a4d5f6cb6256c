"""A model in several GGUF files: are all parts here, with the tensors that they announce?"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from assay.checkpoint.findings import SHOWN, found, plural, some
from assay.checkpoint.gguf.header import Gguf
from assay.verdict import Finding

_PART = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")

MAX_PARTS = 10_000


def check_splits(ggufs: Sequence[Gguf], siblings: Iterable[str]) -> Iterator[Finding]:
    """Findings on the parts among `ggufs`; `siblings` are the names of all files that lie here."""
    here = set(siblings)
    groups: dict[tuple[str, int], list[Gguf]] = defaultdict(list)
    for gguf in ggufs:
        count = gguf.metadata.get("split.count")
        named = _PART.match(gguf.file)
        if named and type(count) is int and 1 < count <= MAX_PARTS:
            groups[named[1], count].append(gguf)
    for (stem, count), parts in groups.items():
        names = [f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
        lost = [n for n in names if n not in here]
        if lost:
            title = f"{plural(len(lost), 'part')} of {count} missing: {some(lost)}"
            yield found("shard_missing", title, paths=lost[:SHOWN])
            continue
        yield from _together(stem, parts, count)


def _together(stem: str, parts: Sequence[Gguf], count: int) -> Iterator[Finding]:
    for part in parts:
        number, named = part.metadata.get("split.no"), _PART.match(part.file)
        if named and type(number) is int and number + 1 != int(named[2]):
            title = f"{part.file} says that it is part {number + 1} of {count}"
            yield found("index_mismatch", title, path=part.file, says=number + 1)
    announced = {t for p in parts if type(t := p.metadata.get("split.tensors.count")) is int}
    stored = sum(len(p.tensors) for p in parts)
    if len(parts) == count and len(announced) == 1 and not any(p.faults for p in parts):
        (total,) = announced
        if total != stored:
            title = f"the parts of {stem} announce {total} tensors and hold {stored}"
            yield found("index_mismatch", title, announced=total, stored=stored)
