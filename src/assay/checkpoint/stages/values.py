"""`--values`: every stored value, read once."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

from assay.checkpoint.findings import found, warned
from assay.checkpoint.layout import Layout
from assay.checkpoint.options import Show
from assay.checkpoint.outcome import Outcome
from assay.checkpoint.structure import head_name, tied
from assay.checkpoint.tensors import Tensor

SIGNED_SCALES = frozenset({"auto-round", "gptq", "awq", "torchao", "hqq"})
"""Methods whose scales may be negative."""


def examine(outcome: Outcome, show: Show) -> None:
    """Scan the values of a local checkpoint, if that was asked for."""
    if not outcome.options.values:
        return
    if outcome.opened.layout is None:
        title = "--values needs the weights; they are on the Hub, not here"
        outcome.findings.append(warned("not_examined", title))
        return
    _scan(outcome, outcome.opened.layout, show)


def _scan(outcome: Outcome, layout: Layout, show: Show) -> None:
    from assay.checkpoint.gguf.values import check_block_scales, gguf_jobs
    from assay.checkpoint.values.duplicates import check_duplicates, check_tied
    from assay.checkpoint.values.judge import judge_values
    from assay.checkpoint.values.norms import check_norms
    from assay.checkpoint.values.scan import scan

    checkpoint = outcome.opened.checkpoint
    where = {name: layout.files[t.file].real for name, t in checkpoint.tensors.items()}
    jobs = [(t, where[n]) for n, t in checkpoint.tensors.items() if t.end <= layout.files[t.file].size]
    for gguf in outcome.ggufs:
        if not checkpoint.tensors:
            jobs.extend((t, layout.files[gguf.file].real) for t in gguf_jobs(gguf))
            outcome.add(check_block_scales(gguf, layout.files[gguf.file].real))
    outcome.scanned_bytes = sum(t.nbytes for t, _ in jobs)
    with show("scanning values", outcome.scanned_bytes) as progress:
        statistics, problems = scan(jobs, progress, outcome.options.workers)
    for name, reason in problems:
        title = f"cannot read the values of {name}: {reason}"
        outcome.findings.append(found("not_examined", title, tensor=name))
    method = outcome.declared.method if outcome.declared else None
    outcome.add(judge_values(statistics, signed_scales=method in SIGNED_SCALES))
    outcome.add(check_norms(statistics, str(checkpoint.text_config.get("model_type"))))
    same = _comparer(checkpoint.tensors, where)
    outcome.add(check_duplicates(statistics, same))
    by_name = {s.name: s for s in statistics}
    embedding = f"{checkpoint.prefix}embed_tokens.weight"
    outcome.add(check_tied(by_name, embedding, head_name(checkpoint), tied(checkpoint), same))


def _comparer(tensors: dict[str, Tensor], where: dict[str, Path]) -> Callable[[str, str], bool]:
    """A function that says whether two tensors hold the same bytes."""

    def same(one: str, two: str) -> bool:
        a, b = tensors.get(one), tensors.get(two)
        if a is None or b is None:
            return False
        return _bytes(where[one], a) == _bytes(where[two], b)

    return same


def _bytes(path: Path, tensor: Tensor) -> bytes:
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return view[tensor.start : tensor.end]
