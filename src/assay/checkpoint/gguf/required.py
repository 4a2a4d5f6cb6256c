"""The tensors that a GGUF model of an architecture must have, by the tables of the `gguf` package.

The tables say which tensors an architecture may have. The ones that every architecture with them
needs are asked for here; llama.cpp stops without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

from assay.checkpoint.findings import SHOWN, found, plural, some, unexamined
from assay.checkpoint.gguf.header import Gguf
from assay.verdict import Finding, Severity

_ONCE = ("token_embd", "output_norm")
_BLOCK: tuple[tuple[str, ...], ...] = (
    ("attn_norm", "attn_norm_2", "attn_post_norm", "post_attention_norm"),
    ("attn_q", "attn_qkv", "attn_q_a"),
    ("attn_k", "attn_qkv", "attn_kv_a_mqa"),
    ("attn_v", "attn_qkv", "attn_kv_a_mqa", "attn_k"),
    ("attn_output",),
    ("ffn_up", "ffn_up_exps", "ffn_up_shexp", "ffn_gate_up_exps"),
    ("ffn_down", "ffn_down_exps", "ffn_down_shexp"),
)
"""Parts of a block of attention and MLP; each tuple names alternatives."""
_GATED = frozenset(
    {"llama", "qwen2", "qwen2vl", "qwen3", "qwen3vl", "gemma", "gemma2", "gemma3", "mistral3"}
    | {"olmo2", "smollm3", "granite", "internlm2", "minicpm", "command-r", "cohere2", "exaone"}
)
"""Architectures whose dense MLP has a gate of its own."""
_BIASED = frozenset({"qwen2", "qwen2vl", "qwen2moe"})
"""Architectures whose query, key and value projections have biases, which the tables do not name.
"""
_OTHER_BLOCKS = ("ssm_", "time_mix", "shortconv", "channel_mix", "rwkv", "dec.", "enc.")
"""Tensors of architectures whose blocks differ from one another: only single tensors are asked for.
"""
MOST_BLOCKS = 10_000


@cache
def listed_tensors(architecture: str) -> frozenset[str] | None:
    """Names that an architecture may have, without numbers; None where the tables do not say."""
    if not find_spec("gguf"):
        return None
    from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES

    for kind, name in MODEL_ARCH_NAMES.items():
        if name == architecture and kind in MODEL_TENSORS:
            return frozenset(
                TENSOR_NAMES[tensor].removeprefix("blk.{bid}.") for tensor in MODEL_TENSORS[kind]
            )
    return None


def check_required(gguf: Gguf) -> Iterator[Finding]:
    """Findings on tensors that the architecture needs and the file has not."""
    listed = listed_tensors(gguf.architecture)
    if listed is None:
        yield _unlisted(gguf)
        return
    names = {t.name for t in gguf.tensors}
    missing = [f"{n}.weight" for n in _ONCE if n in listed and f"{n}.weight" not in names]
    if not any(name.startswith(_OTHER_BLOCKS) for name in listed):
        missing += _missing_parts(gguf, listed)
    if missing:
        kinds = sorted({name.partition(".")[2].partition(".")[2] or name for name in missing})
        title = f"{plural(len(missing), 'tensor')} that {gguf.architecture} needs not in"
        title += f" {gguf.file}: {some(missing)}"
        causes = ["the converter dropped them", "the file was made for another architecture"]
        yield found(
            "tensor_missing",
            title,
            causes=causes,
            tensors=missing[:SHOWN],
            kinds=kinds[:SHOWN],
            count=len(missing),
        )


def _missing_parts(gguf: Gguf, listed: frozenset[str]) -> list[str]:
    """Parts of blocks; a part that other blocks have is found by comparison with them."""
    count = min(gguf.setting("block_count"), MOST_BLOCKS) - gguf.setting("nextn_predict_layers")
    blocks = {i: n for i, n in gguf.blocks().items() if i < count and not _is_head(n)}
    wanted = [(f"{part}.weight" for part in parts) for parts in _BLOCK if set(parts) & listed]
    needed = [tuple(names) for names in wanted]
    sparse = any(name.startswith("ffn_down_exps") for names in blocks.values() for name in names)
    if gguf.architecture in _GATED and not sparse:
        needed.append(("ffn_gate.weight",))
    if gguf.architecture in _BIASED:
        fused = any("attn_qkv.bias" in names for names in blocks.values())
        needed += [] if fused else [(f"attn_{part}.bias",) for part in "qkv"]
    absent = [a for a in needed if not any(set(a) & names for names in blocks.values())]
    return [f"blk.{i}.{alternatives[0]}" for i in sorted(blocks) for alternatives in absent]


def _is_head(names: set[str]) -> bool:
    return any(name.startswith("nextn.") for name in names)


def _unlisted(gguf: Gguf) -> Finding:
    installed = find_spec("gguf") is not None
    reason = "the gguf package knows no such architecture" if installed else "gguf is not installed"
    title = f"the tensors of {gguf.architecture or gguf.file} were examined by patterns alone"
    remedies = [] if installed else ["install it: pip install gguf"]
    return unexamined(
        f"{title}: {reason}",
        severity=Severity.WARNING,
        remedies=remedies,
        decisive=installed,
        path=gguf.file,
    )
