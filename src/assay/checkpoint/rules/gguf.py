"""Rules on a GGUF file: vocabulary, layers, special tokens, template, draft head."""

from __future__ import annotations

import re
from collections.abc import Iterator

from assay.checkpoint.findings import SHOWN, found, plural, some, warned
from assay.checkpoint.gguf import Gguf
from assay.checkpoint.mtp import MtpReport
from assay.checkpoint.rules.tokenizer import template_problem
from assay.verdict import Finding

_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")


def check_gguf(gguf: Gguf) -> Iterator[Finding]:
    """Everything that a GGUF file says about itself."""
    for fault in gguf.faults:
        yield found(fault.id, fault.message, **fault.evidence)
    if not gguf.tensors or any(f.id == "header_invalid" for f in gguf.faults):
        return
    if gguf.metadata.get("split.count", 1) in {0, 1} and is_model(gguf):
        yield from _blocks(gguf)
        yield from _vocabulary(gguf)
    yield from _template(gguf)


def is_model(gguf: Gguf) -> bool:
    """Whether the file is a language model: a vision projector, an adapter or an importance matrix is not."""
    kind = gguf.metadata.get("general.type", "model")
    return kind == "model" and architecture(gguf) not in {"clip", "imatrix"}


def architecture(gguf: Gguf) -> str:
    """`general.architecture`, the prefix of the model's own keys."""
    return str(gguf.metadata.get("general.architecture") or "")


def setting(gguf: Gguf, key: str) -> int | None:
    """A natural number among the architecture's keys."""
    value = gguf.metadata.get(f"{architecture(gguf)}.{key}")
    return value if type(value) is int and value >= 0 else None


def _by_block(gguf: Gguf) -> dict[int, set[str]]:
    blocks: dict[int, set[str]] = {}
    for tensor in gguf.tensors:
        if matched := _BLOCK.match(tensor.name):
            blocks.setdefault(int(matched[1]), set()).add(matched[2])
    return blocks


def _blocks(gguf: Gguf) -> Iterator[Finding]:
    count, blocks = setting(gguf, "block_count"), _by_block(gguf)
    if not architecture(gguf):
        yield found("config_conflict", f"{gguf.file} does not name its architecture")
        return
    if not count or not blocks:
        return
    gaps = [i for i in range(min(count, 10_000)) if i not in blocks]
    draft = setting(gguf, "nextn_predict_layers") or 0
    if gaps and gaps != list(range(count - draft, count)):
        title = f"{plural(len(gaps), 'layer')} of {count} not in {gguf.file}: {some(map(str, gaps))}"
        yield found("tensor_missing", title, layers=gaps[:SHOWN])
    if max(blocks) >= count:
        title = f"{gguf.file} says {count} layers, its tensors go on to layer {max(blocks)}"
        yield found("config_conflict", title, block_count=count, stored=max(blocks) + 1)
    ordinary = {i: names for i, names in blocks.items() if not any(n.startswith("nextn.") for n in names)}
    for index, names in ordinary.items():
        fuller = [other for other in ordinary.values() if names < other]
        alike = sum(other == names for other in ordinary.values())
        if len(ordinary) >= 3 and alike == 1 and len(fuller) >= len(ordinary) // 2:
            lost = sorted(fuller[0] - names)
            yield found(
                "tensor_missing", f"layer {index} of {gguf.file} lacks {some(lost)}", tensors=lost[:SHOWN]
            )
    names = {t.name for t in gguf.tensors}
    if "token_embd.weight" not in names:
        yield found("tensor_missing", f"{gguf.file} has no token_embd.weight", tensors=["token_embd.weight"])


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
    if gguf.metadata.get("tokenizer.ggml.model") == "gpt2" and not gguf.metadata.get("tokenizer.ggml.pre"):
        title = f"{gguf.file} names no pre-tokeniser: digits and apostrophes are split by a default"
        references = ["https://github.com/ggml-org/llama.cpp/pull/6920"]
        yield warned("tokenizer_conflict", title, references=references)
    for key in ("scores", "token_type"):
        values = gguf.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(values, list) and len(values) != len(tokens):
            title = f"tokenizer.ggml.{key} of {gguf.file} has {len(values)} entries for {len(tokens)} tokens"
            yield found("tokenizer_conflict", title)


def _template(gguf: Gguf) -> Iterator[Finding]:
    text = gguf.metadata.get("tokenizer.chat_template")
    if text is not None and (problem := template_problem(text)):
        yield found("chat_template_invalid", f"the chat template in {gguf.file} {problem}", path=gguf.file)


def examine_gguf(gguf: Gguf) -> MtpReport:
    """The draft head of a GGUF file: the last `nextn_predict_layers` blocks, with their `nextn.*` tensors."""
    depth, count = setting(gguf, "nextn_predict_layers") or 0, setting(gguf, "block_count") or 0
    blocks = _by_block(gguf)
    heads = {i: names for i, names in blocks.items() if any(n.startswith("nextn.") for n in names)}
    present = sum(len(names) for names in heads.values())
    name = f"gguf {architecture(gguf)}"
    key = f"{architecture(gguf)}.nextn_predict_layers" if depth else None
    if not heads:
        return MtpReport("absent" if depth else "none", name, depth, 0, False if depth else None, None, key)
    wanted = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")
    missing = tuple(
        f"blk.{i}.{part}"
        for i in range(count - depth, count)
        for part in wanted
        if part not in blocks.get(i, set())
    )
    status = "not_announced" if not depth else "partial" if missing else "ok"
    return MtpReport(status, name, depth, present, not missing, None, key, expected=None, missing=missing)  # type: ignore[arg-type]
