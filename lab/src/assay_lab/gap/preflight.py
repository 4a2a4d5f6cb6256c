"""Checks before the first run: the candidate's turn comes late, after all that needs the
reference.
"""

from __future__ import annotations

from collections.abc import Iterable

from assay.engines.specs import check_spec
from assay.engines.vllm.spec import parse_vllm
from assay.errors import AssayError, UsageError
from assay_lab.gap.engine_steps import engine_name
from assay_lab.kv.hook_plan import path_of
from assay_lab.kv.serve_checks import check_full_attention, known_architecture


def preflight(spec: str, length: int, modes: Iterable[str], *, codec: bool) -> None:
    """AssayError for an engine that could not be opened, or that takes no codec: a name, an option,
    a kind of model, too little room for windows of `length` tokens, an option of which one of the
    `modes` shows nothing.

    What only a loaded model shows is refused by its hook: see `must_be_tried`.
    """
    for mode in modes:
        check_spec(spec, path_of(mode))
    name = engine_name(spec, codec=codec)
    if name.kind != "vllm":
        return
    options = parse_vllm(spec)
    if options.max_model_len < length:
        raise UsageError(
            f"{spec}: windows of {length} tokens do not fit into"
            f" max_model_len={options.max_model_len}",
            remedy=f"write max_model_len={length}, or --length {options.max_model_len}",
            finding_id="gap.usage",
        )
    if not codec:
        return
    if options.batched_tokens < length - 1:  # the last token predicts nothing and is not fed
        raise UsageError(
            f"{spec}: a step of {options.batched_tokens} tokens would cut a window of {length}"
            " tokens, and a block of a codec",
            remedy=f"leave out max_num_batched_tokens, or write {length}",
            finding_id="gap.usage",
        )
    if not options.enforce_eager:
        raise AssayError(
            f"{spec}: compiled models and CUDA graphs run no codec",
            finding_id="kv.unsupported",
            remedy="leave out enforce_eager=false",
        )
    check_full_attention(name.model)


def must_be_tried(spec: str) -> bool:
    """Whether only a loaded model shows that its attention takes a codec."""
    name = engine_name(spec)
    return name.kind == "vllm" and not known_architecture(name.model)
