"""Read every stored value once, as the stage `--values` of `assay verify`."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

from assay.checkpoint.expectation import head_name, tied
from assay.checkpoint.findings import found, warned
from assay.checkpoint.layout import Layout
from assay.checkpoint.options import Show
from assay.checkpoint.state import VerifyState
from assay.checkpoint.tensors import Tensor

SIGNED_SCALES = frozenset({"auto-round", "gptq", "awq", "torchao", "hqq"})
"""Methods whose scales may be negative."""


def examine_values(state: VerifyState, show: Show) -> None:
    """Scan the values of a local checkpoint, if that was asked for."""
    if not state.options.values:
        return
    if state.opened.layout is None:
        title = "--values needs the weights; they are on the Hub, not here"
        state.findings.append(warned("not_examined", title))
        return
    _scan(state, state.opened.layout, show)


def _scan(state: VerifyState, layout: Layout, show: Show) -> None:
    from assay.checkpoint.gguf.values import check_block_scales, gguf_jobs
    from assay.checkpoint.values.duplicates import check_duplicates, check_tied
    from assay.checkpoint.values.judgement import judge_values
    from assay.checkpoint.values.norms import check_norms
    from assay.checkpoint.values.scan import scan

    checkpoint = state.opened.checkpoint
    where = {name: layout.files[t.file].real for name, t in checkpoint.tensors.items()}
    jobs = [
        (t, where[n]) for n, t in checkpoint.tensors.items() if t.end <= layout.files[t.file].size
    ]
    for gguf in state.stored.ggufs:
        if not checkpoint.tensors:
            jobs.extend((t, layout.files[gguf.file].real) for t in gguf_jobs(gguf))
            state.add(check_block_scales(gguf, layout.files[gguf.file].real))
    state.scanned_bytes = sum(t.nbytes for t, _ in jobs)
    with show("scanning values", state.scanned_bytes) as progress:
        statistics, problems = scan(jobs, progress, state.options.workers)
    for name, reason in problems:
        title = f"cannot read the values of {name}: {reason}"
        state.findings.append(found("not_examined", title, tensor=name))
    method = state.stored.declared.method if state.stored.declared else None
    state.add(judge_values(statistics, signed_scales=method in SIGNED_SCALES))
    state.add(check_norms(statistics, checkpoint.model_type))
    same = _comparer(checkpoint.tensors, where)
    state.add(check_duplicates(statistics, same))
    by_name = {s.name: s for s in statistics}
    embedding = f"{checkpoint.prefix}embed_tokens.weight"
    state.add(check_tied(by_name, embedding, head_name(checkpoint), tied(checkpoint), same))


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
