"""What a GGUF file says about itself: layers, vocabulary, special tokens, template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from assay.checkpoint.findings import SHOWN, found, plural, some, unexamined, warned
from assay.checkpoint.gguf.header import Gguf
from assay.checkpoint.gguf.required import check_required, listed_tensors
from assay.checkpoint.gguf.types import TYPES
from assay.checkpoint.peers import lost_parts
from assay.checkpoint.rules.chat_template import template_problem
from assay.verdict import Finding


def check_gguf(gguf: Gguf) -> Iterator[Finding]:
    """Everything that a GGUF file says about itself."""
    for fault in gguf.faults:
        yield found(fault.id, fault.message, **fault.evidence)
    foreign = Counter(t.type for t in gguf.tensors if t.type not in TYPES)
    if foreign:
        whose = (
            "numbers of ik_llama.cpp's" if min(foreign) >= 97 else "of another engine or version"
        )
        types = ", ".join(map(str, sorted(foreign)))
        title = (
            f"{plural(foreign.total(), 'tensor')} of {gguf.file} not examined: types {types},"
            f" {whose}"
        )
        detail = "Their length is not known, so where they end was not checked either."
        yield unexamined(title, detail=detail, path=gguf.file, types=sorted(foreign))
    if not gguf.tensors or any(f.id == "header_invalid" for f in gguf.faults):
        return
    # A vision projector, an adapter or an importance matrix is no language model.
    whole = gguf.metadata.get("general.type", "model") == "model" and gguf.architecture not in {
        "clip",
        "imatrix",
    }
    if whole and gguf.metadata.get("split.count", 1) in (0, 1):
        yield from _blocks(gguf)
        yield from check_required(gguf)
        yield from _vocabulary(gguf)
    text = gguf.metadata.get("tokenizer.chat_template")
    if text is not None and (problem := template_problem(text)):
        yield found(
            "chat_template_invalid", f"the chat template in {gguf.file} {problem}", path=gguf.file
        )


def _blocks(gguf: Gguf) -> Iterator[Finding]:
    count, blocks = gguf.setting("block_count"), gguf.blocks()
    if not gguf.architecture:
        yield found("config_conflict", f"{gguf.file} does not name its architecture")
        return
    if not count or not blocks:
        return
    gaps = [i for i in range(min(count, 10_000)) if i not in blocks]
    if gaps and gaps != list(range(count - gguf.setting("nextn_predict_layers"), count)):
        title = (
            f"{plural(len(gaps), 'layer')} of {count} not in {gguf.file}: {some(map(str, gaps))}"
        )
        yield found("tensor_missing", title, layers=gaps[:SHOWN])
    if max(blocks) >= count:
        title = f"{gguf.file} says {count} layers, its tensors go on to layer {max(blocks)}"
        yield found("config_conflict", title, block_count=count, stored=max(blocks) + 1)
    ordinary = {
        i: names for i, names in blocks.items() if not any(n.startswith("nextn.") for n in names)
    }
    for index, lost in lost_parts(ordinary, 3).items():
        yield found(
            "tensor_missing",
            f"layer {index} of {gguf.file} lacks {some(lost)}",
            tensors=lost[:SHOWN],
        )
    embedded = any(t.name == "token_embd.weight" for t in gguf.tensors)
    if not embedded and listed_tensors(gguf.architecture) is None:
        yield found(
            "tensor_missing", f"{gguf.file} has no token_embd.weight", tensors=["token_embd.weight"]
        )


def _vocabulary(gguf: Gguf) -> Iterator[Finding]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    embedding = next((t for t in gguf.tensors if t.name == "token_embd.weight"), None)
    if not isinstance(tokens, list):
        yield warned("tokenizer_conflict", f"{gguf.file} has no vocabulary")
        return
    if embedding is not None and len(embedding.shape) == 2 and embedding.shape[1] != len(tokens):
        title = f"{gguf.file} has {len(tokens)} tokens and {embedding.shape[1]} rows of embedding"
        yield found("tokenizer_conflict", title, tokens=len(tokens), rows=embedding.shape[1])
    for key in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        value = gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(value) is int and value >= len(tokens):
            title = f"{key}_token_id {value} of {gguf.file} is outside its {len(tokens)} tokens"
            yield found("tokenizer_conflict", title, key=key, value=value)
    if gguf.metadata.get("tokenizer.ggml.model") == "gpt2" and not gguf.metadata.get(
        "tokenizer.ggml.pre"
    ):
        title = f"{gguf.file} names no pre-tokeniser: digits and apostrophes are split by a default"
        references = ["https://github.com/ggml-org/llama.cpp/pull/6920"]
        yield warned("tokenizer_conflict", title, references=references)
    for key in ("scores", "token_type"):
        values = gguf.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(values, list) and len(values) != len(tokens):
            title = (
                f"tokenizer.ggml.{key} of {gguf.file} has {len(values)} entries for {len(tokens)}"
                " tokens"
            )
            yield found("tokenizer_conflict", title)
