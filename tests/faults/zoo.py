"""The fault zoo: each fault damages a real file of a healthy checkpoint and names the finding it
must raise.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import checkpoint_quantized as q
from checkpoint_samples import (
    Arrays,
    edit_json,
    llama,
    read_safetensors,
    rewrite,
    write_safetensors,
    write_shards,
)

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Fault:
    """`make` builds a healthy checkpoint, `damage` breaks it; `manifest` is written in between if
    digests matter.
    """

    name: str
    finding: str
    damage: Callable[[Path], Any]
    make: Callable[[Path], Any] = llama
    options: dict[str, Any] = field(default_factory=dict)
    manifest: bool = False
    severity: str = "error"


def cut(name: str, count: int | None = None, share: float = 0.0) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        size = (folder / name).stat().st_size
        os.truncate(folder / name, size - (count if count is not None else int(size * share)))

    return damage


def overwrite(name: str, at: int, data: bytes) -> Callable[[Path], None]:
    """Write into a file; a negative position counts from its end."""

    def damage(folder: Path) -> None:
        with (folder / name).open("r+b") as stream:
            stream.seek(at, 2 if at < 0 else 0)
            stream.write(data)

    return damage


def flip(folder: Path) -> None:
    data = bytearray((folder / TWO).read_bytes())
    data[-100] ^= 0x10
    (folder / TWO).write_bytes(data)


def at_boundary(folder: Path) -> None:
    data = (folder / TWO).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    last = max(e["data_offsets"][0] for n, e in header.items() if n != "__metadata__")
    os.truncate(folder / TWO, 8 + length + last)


def swap(folder: Path) -> None:
    (folder / ONE).rename(folder / "x")
    (folder / TWO).rename(folder / ONE)
    (folder / "x").rename(folder / TWO)


def other_revision(folder: Path) -> None:
    other = folder.parent / "other"
    llama(other, seed=9)
    (folder / ONE).write_bytes((other / ONE).read_bytes())


def header(entries: dict[str, Any] | bytes, body: int = 0) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
        (folder / ONE).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(body))

    return damage


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def tensors(change: Callable[[Arrays], Any]) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, change)


def drop(*names: str) -> Callable[[Path], None]:
    """Drop tensors whose names contain one of `names`, from shards and index alike."""
    return tensors(lambda t: {k: v for k, v in t.items() if not any(n in k for n in names)})


def change(name: str, edit: Callable[[np.ndarray], None]) -> Callable[[Path], None]:
    def apply(t: Arrays) -> None:
        edit(t[name][1])

    return tensors(apply)


def put(name: str, dtype: str, array: np.ndarray) -> Callable[[Path], None]:
    def apply(t: Arrays) -> None:
        t[name] = (dtype, array)

    return tensors(apply)


def shift_norms(by: float) -> Callable[[Arrays], Arrays]:
    from checkpoint_samples import bf16

    def shift(t: Arrays) -> Arrays:
        def shifted(words: np.ndarray) -> np.ndarray:
            return bf16((words.astype(np.uint32) << 16).view(np.float32) + by)

        return {n: (v[0], shifted(v[1])) if "norm" in n else v for n, v in t.items()}

    return shift


def two_homes(folder: Path) -> None:
    first, second = read_safetensors(folder / ONE), read_safetensors(folder / TWO)
    name = next(iter(first))
    write_safetensors(folder / TWO, second | {name: first[name]})


def ghost(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.9.ghost.weight"] = ONE
    (folder / INDEX).write_text(json.dumps(index))


def token(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "tokenizer_config.json", **changes)


def pack(
    declaration: dict[str, Any], module: Callable[..., Arrays], **rest: Any
) -> Callable[[Path], Path]:
    return lambda folder: q.quantized_llama(folder, declaration, module, **rest)


def mtp(family: str, **rest: Any) -> Callable[[Path], Path]:
    return lambda folder: q.mtp_checkpoint(folder, family, **rest)


def pack_head(t: Arrays) -> Arrays:
    """The draft head's projections in GPTQ form, with nothing that declares them."""
    result: Arrays = {}
    for name, value in t.items():
        if name.startswith("mtp.layers") and value[1].ndim == 2:
            stem = name.removesuffix(".weight")
            result |= {f"{stem}.{p}": x for p, x in q.gptq_module(*value[1].shape).items()}
        else:
            result[name] = value
    return result


def no_scales(t: Arrays) -> Arrays:
    return {n: v for n, v in t.items() if not n.endswith(("weight_scale", "weight_scale_inv"))}


def one(t: Arrays, name: str, value: float, dtype: str = "F16") -> None:
    array = (t[name][1].astype(np.uint32) << 16).view(np.float32).astype(np.float16)
    array[3, 5] = value
    t[name] = (dtype, array)


GATE, Q1 = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.self_attn.q_proj.weight"
V = {"values": True}


def serve(args: str, **rest: Any) -> dict[str, Any]:
    return {"serve_args": args} | rest


FAULTS = (
    Fault("bit flipped in a body", "digest_mismatch", flip, manifest=True),
    Fault("cut by one byte", "truncated", cut(TWO, 1)),
    Fault("cut by a tenth", "truncated", cut(TWO, share=0.1)),
    Fault("cut at a tensor boundary", "truncated", at_boundary),
    Fault("cut inside the header", "truncated", lambda f: os.truncate(f / ONE, 300)),
    Fault("empty shard", "truncated", lambda f: os.truncate(f / ONE, 0)),
    Fault(
        "bytes after the last tensor", "header_invalid", lambda f: (f / ONE).open("ab").write(b"xx")
    ),
    Fault(
        "hole of zeros, by digest",
        "digest_mismatch",
        overwrite(TWO, -9000, bytes(8192)),
        manifest=True,
    ),
    Fault(
        "hole of zeros, by value", "tensor_constant", overwrite(TWO, -9000, bytes(8192)), options=V
    ),
    Fault("shards swapped", "index_mismatch", swap),
    Fault("shard of another revision", "digest_mismatch", other_revision, manifest=True),
    Fault("shard deleted", "shard_missing", lambda f: (f / TWO).unlink()),
    Fault(
        "shard deleted, by manifest", "shard_missing", lambda f: (f / TWO).unlink(), manifest=True
    ),
    Fault("index deleted", "index_mismatch", lambda f: (f / INDEX).unlink()),
    Fault("index is no JSON", "index_mismatch", lambda f: (f / INDEX).write_text("{")),
    Fault("index names a missing tensor", "index_mismatch", ghost),
    Fault("one tensor in two shards", "tensor_duplicate", two_homes),
    Fault(
        "web page as a shard",
        "header_invalid",
        lambda f: (f / ONE).write_bytes(b"<!DOCTYPE html>" + b" " * 900),
    ),
    Fault(
        "LFS pointer as a shard",
        "header_invalid",
        lambda f: (f / ONE).write_bytes(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
        ),
    ),
    Fault("eight zero bytes first", "header_invalid", overwrite(ONE, 0, bytes(8))),
    Fault("header of 2^60 bytes", "header_invalid", overwrite(ONE, 0, struct.pack("<Q", 1 << 60))),
    Fault("header nested deeply", "header_invalid", header(b"[" * 100_000)),
    Fault(
        "negative offsets",
        "header_invalid",
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
    ),
    Fault(
        "overlapping tensors",
        "header_invalid",
        header(
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
            },
            8,
        ),
    ),
    Fault(
        "shape against bytes",
        "header_invalid",
        header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, 8),
    ),
    Fault(
        "name twice in a header",
        "tensor_duplicate",
        header(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
            4,
        ),
    ),
    Fault("tensor dropped", "tensor_missing", drop("layers.2.mlp.up_proj")),
    Fault("head dropped, untied", "tensor_missing", drop("lm_head")),
    Fault("vocab_size of another model", "tensor_shape", config(vocab_size=400)),
    Fault("intermediate_size of another model", "tensor_shape", config(intermediate_size=256)),
    Fault("head_dim changed", "config_conflict", config(head_dim=32)),
    Fault("fewer layers configured", "config_conflict", config(num_hidden_layers=3)),
    Fault("heads that cannot be grouped", "config_conflict", config(num_key_value_heads=3)),
    Fault(
        "rope type against rope_type",
        "config_conflict",
        config(rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2.0}),
    ),
    Fault("yarn without factor", "config_conflict", config(rope_scaling={"rope_type": "yarn"})),
    Fault(
        "rope_theta twice",
        "config_conflict",
        config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    ),
    Fault(
        "config.json is no JSON", "config_conflict", lambda f: (f / "config.json").write_text("{,")
    ),
    Fault(
        "top_p of two",
        "config_conflict",
        lambda f: edit_json(f / "generation_config.json", top_p=2),
    ),
    Fault(
        "float16 config on bfloat16 weights",
        "config_conflict",
        config(torch_dtype="float16"),
        severity="warning",
    ),
    Fault("eos outside the embedding", "tokenizer_conflict", config(eos_token_id=9999)),
    Fault("eos not in the vocabulary", "tokenizer_conflict", token(eos_token="<|nowhere|>")),
    Fault("tokenizer cut off", "tokenizer_conflict", cut("tokenizer.json", share=0.5)),
    Fault(
        "template that does not parse",
        "chat_template_invalid",
        token(chat_template="{% for m in messages %}"),
    ),
    Fault("template without messages", "chat_template_invalid", token(chat_template="hello")),
    Fault(
        "AWQ claimed on plain weights", "quantization_conflict", config(quantization_config=q.AWQ)
    ),
    Fault(
        "packed and not declared",
        "quantization_conflict",
        config(quantization_config=...),
        pack(q.GPTQ, q.gptq_module),
    ),
    Fault(
        "declared 8 bits, packed 4",
        "quantization_conflict",
        config(quantization_config=q.GPTQ | {"bits": 8}),
        pack(q.GPTQ, q.gptq_module),
    ),
    Fault(
        "declared groups of 64, packed 32",
        "quantization_conflict",
        config(quantization_config=q.AWQ | {"group_size": 64}),
        pack(q.AWQ, q.awq_module),
    ),
    Fault(
        "AWQ layout declared GPTQ",
        "quantization_conflict",
        config(quantization_config=q.GPTQ),
        pack(q.AWQ, q.awq_module),
    ),
    Fault(
        "AutoRound without packing_format on AWQ layout",
        "quantization_conflict",
        config(
            quantization_config={k: v for k, v in q.AUTO_ROUND.items() if k != "packing_format"}
        ),
        pack(q.AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, q.awq_module),
    ),
    Fault(
        "FP8 without scales",
        "quantization_conflict",
        tensors(no_scales),
        pack(q.CT_FP8, q.fp8_module),
    ),
    Fault(
        "FP8 tiles of another size",
        "quantization_conflict",
        config(quantization_config=q.FP8_BLOCK | {"weight_block_size": [16, 16]}),
        pack(q.FP8_BLOCK, lambda o, i: q.fp8_module(o, i, 32)),
    ),
    Fault(
        "one projection left plain",
        "quantization_conflict",
        lambda f: None,
        pack(q.W4A16, q.packed_module, only=lambda m: not m.endswith("1.self_attn.k_proj")),
    ),
    Fault(
        "scale of a weight that went",
        "orphan_scale",
        drop("layers.1.mlp.up_proj.qweight"),
        pack(q.GPTQ, q.gptq_module),
    ),
    Fault(
        "scale beside a plain weight",
        "orphan_scale",
        put("model.layers.1.mlp.up_proj.weight_scale", "F32", np.array([0.1])),
    ),
    Fault("draft head absent", "mtp_missing", lambda f: None, mtp("qwen3_5", head=False)),
    Fault(
        "draft head absent, layer layout",
        "mtp_missing",
        lambda f: None,
        mtp("deepseek_v3", head=False),
    ),
    Fault(
        "draft head with 10 of 15 tensors",
        "mtp_partial",
        drop("mtp.layers.0.self_attn.q_proj", "mtp.layers.0.self_attn.k_proj", "mtp.layers.0.mlp"),
        mtp("qwen3_5"),
    ),
    Fault("draft head partial, GLM", "mtp_partial", drop("layers.4.eh_proj"), mtp("glm4_moe")),
    Fault("draft head packed, not declared", "mtp_dtype", tensors(pack_head), mtp("qwen3_5")),
    Fault(
        "draft head not announced",
        "config_conflict",
        config(mtp_num_hidden_layers=0),
        mtp("qwen3_5"),
        severity="warning",
    ),
    Fault(
        "EAGLE-3 entry of the wrong width",
        "draft_mismatch",
        lambda f: None,
        lambda f: q.eagle3(f, 128),
    ),
    Fault(
        "EAGLE-3 map of the wrong length",
        "draft_mismatch",
        lambda f: None,
        lambda f: q.eagle3(f, draft_vocab=90),
    ),
    Fault(
        "overflow to Inf in float16",
        "nonfinite",
        tensors(lambda t: one(t, GATE, np.inf)),
        options=V,
    ),
    Fault("NaN in one row", "nonfinite", change(GATE, lambda a: a[7].fill(0x7FC0)), options=V),
    Fault("tensor all zero", "tensor_constant", change(GATE, lambda a: a.fill(0)), options=V),
    Fault(
        "tensor of one value", "tensor_constant", change(GATE, lambda a: a.fill(0x3C00)), options=V
    ),
    Fault(
        "flipped exponent bit",
        "tensor_scale",
        change(GATE, lambda a: a.__setitem__((3, 3), 0x7E00)),
        options=V,
    ),
    Fault(
        "tensor scaled by 2^10",
        "tensor_scale",
        change(GATE, lambda a: a.__iadd__(10 << 7)),
        options=V,
    ),
    Fault(
        "flood of denormals", "tensor_scale", change(GATE, lambda a: a.__iand__(0x807F)), options=V
    ),
    Fault(
        "one tensor under two names",
        "tensor_duplicate",
        tensors(lambda t: t.__setitem__(Q1, t["model.layers.2.self_attn.q_proj.weight"])),
        options=V,
    ),
    Fault("norms stored as w - 1", "norm_convention", tensors(shift_norms(-1)), options=V),
    Fault("norms stored as 1 + w", "norm_convention", tensors(shift_norms(1)), mtp("qwen3_5"), V),
    Fault(
        "scales all zero",
        "tensor_scale",
        tensors(lambda t: t["model.layers.1.mlp.up_proj.scales"][1].fill(0)),
        pack(q.GPTQ, q.gptq_module),
        V,
    ),
    Fault(
        "awq_marlin on AutoRound",
        "flag_ignored",
        lambda f: None,
        pack(q.AUTO_ROUND, lambda o, i: q.gptq_module(o, i, g_idx=False)),
        serve("--quantization awq_marlin"),
        severity="warning",
    ),
    Fault(
        "gptq on AWQ", "flag_rejected", lambda f: None, pack(q.AWQ, q.awq_module), serve("-q gptq")
    ),
    Fault(
        "bitsandbytes in vLLM 0.32",
        "flag_rejected",
        lambda f: None,
        pack(q.BNB4, q.bnb4_module),
        serve(""),
    ),
    Fault("unknown flag", "flag_unknown", lambda f: None, options=serve("--enable-turbo-mode")),
    Fault(
        "e5m2 on FlashAttention",
        "kv_dtype_conflict",
        lambda f: None,
        options=serve("--kv-cache-dtype fp8_e5m2 --attention-backend FLASH_ATTN"),
    ),
    Fault(
        "fp8 KV on Triton below 8.9",
        "kv_dtype_conflict",
        lambda f: None,
        options=serve("--kv-cache-dtype fp8 --attention-backend TRITON_ATTN", capability=8.6),
    ),
    Fault(
        "fp8 KV without scales",
        "kv_dtype_conflict",
        lambda f: None,
        options=serve("--kv-cache-dtype fp8"),
        severity="warning",
    ),
    Fault(
        "speculation with a head that is not there",
        "mtp_missing",
        lambda f: None,
        options=serve("""--speculative-config '{"method":"mtp","num_speculative_tokens":1}'"""),
    ),
)


def healthy() -> dict[str, Callable[[Path], Any]]:
    """Checkpoints of different kinds with nothing wrong."""
    kinds: dict[str, Callable[[Path], Any]] = {
        "llama": llama,
        "tied": lambda f: llama(f, tie_word_embeddings=True),
        "one file": lambda f: llama(f, shards=1),
        "qwen3": q.qwen3,
        "gptq": pack(q.GPTQ, q.gptq_module),
        "awq": pack(q.AWQ, q.awq_module),
        "auto-round": pack(q.AUTO_ROUND, lambda o, i: q.gptq_module(o, i, g_idx=False)),
        "auto-round awq": pack(
            q.AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, q.awq_module
        ),
        "w4a16": pack(q.W4A16, q.packed_module),
        "fp8": pack(q.CT_FP8, q.fp8_module),
        "fp8 tiles": pack(q.FP8_BLOCK, lambda o, i: q.fp8_module(o, i, 32)),
        "nvfp4": pack(q.MODELOPT_NVFP4, q.nvfp4_module),
        "bitsandbytes": pack(q.BNB4, q.bnb4_module),
        "eagle3": q.eagle3,
    }
    return kinds | {f"mtp {name}": mtp(name) for name in q.FAMILIES}


__all__ = ["FAULTS", "Fault", "healthy", "write_shards"]
