"""Small checkpoints with real names, shapes and file formats, written without any model library.

The name tables are typed from the published repositories, not taken from `assay.checkpoint`, so
that a wrong layout there shows as a finding on a healthy sample.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, tuple[str, np.ndarray]]
"""(dtype of the safetensors format, array of words) by tensor name."""

_WORDS = {
    "BF16": "<u2",
    "F16": "<f2",
    "F32": "<f4",
    "I32": "<i4",
    "U8": "u1",
    "I8": "i1",
    "F8_E4M3": "u1",
    "I64": "<i8",
    "BOOL": "u1",
    "F8_E8M0": "u1",
}

TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 words (truncated, which is enough here)."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2")


def normal(
    shape: tuple[int, ...], rng: np.random.Generator, scale: float = 0.02
) -> tuple[str, np.ndarray]:
    return "BF16", bf16(rng.normal(0, scale, shape))


def write_safetensors(path: Path, tensors: Arrays) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, bodies = 0, []
    for name, (dtype, array) in tensors.items():
        body = np.ascontiguousarray(array, _WORDS[dtype]).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [at, at + len(body)],
        }
        at += len(body)
        bodies.append(body)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(bodies))


def read_safetensors(path: Path) -> Arrays:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: (
            e["dtype"],
            np.frombuffer(
                data[8 + length + e["data_offsets"][0] : 8 + length + e["data_offsets"][1]],
                _WORDS[e["dtype"]],
            )
            .reshape(e["shape"])
            .copy(),
        )
        for name, e in header.items()
    }


def write_shards(folder: Path, tensors: Arrays, shards: int = 2) -> None:
    """model-0000x-of-0000n.safetensors with their index, or one model.safetensors."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    names = list(tensors)
    mapped = {}
    for i in range(shards):
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(folder / file, {n: tensors[n] for n in part})
        mapped.update(dict.fromkeys(part, file))
    total = sum(np.ascontiguousarray(a, _WORDS[d]).nbytes for d, a in tensors.values())
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": mapped},
    )


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; a value of `...` removes the key."""
    document = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            document.pop(key, None)
        else:
            document[key] = value
    write_json(path, document)


def fill(table: str, dims: dict[str, int], rng: np.random.Generator, dtype: str = "BF16") -> Arrays:
    """Tensors from lines `name dim dim`: dims are letters of `dims`, numbers, or products as `2*H`.

    Names that end in norm.weight are drawn around 1, everything else around 0.
    """
    tensors: Arrays = {}
    for line in table.strip().splitlines():
        if not line.strip():
            continue
        name, *sizes = line.split()
        shape = tuple(int(eval(s, {"__builtins__": {}}, dims)) for s in sizes)
        if "norm" in name:
            tensors[name] = ("BF16", bf16(1 + rng.normal(0, 0.05, shape)))
        else:
            tensors[name] = normal(shape, rng)
    return tensors


LLAMA_LAYER = """
model.layers.{i}.self_attn.q_proj.weight A H
model.layers.{i}.self_attn.k_proj.weight K H
model.layers.{i}.self_attn.v_proj.weight K H
model.layers.{i}.self_attn.o_proj.weight H A
model.layers.{i}.mlp.gate_proj.weight I H
model.layers.{i}.mlp.up_proj.weight I H
model.layers.{i}.mlp.down_proj.weight H I
model.layers.{i}.input_layernorm.weight H
model.layers.{i}.post_attention_layernorm.weight H
"""
ENDS = """
model.embed_tokens.weight V H
model.norm.weight H
lm_head.weight V H
"""
QWEN2_BIASES = """
model.layers.{i}.self_attn.q_proj.bias A
model.layers.{i}.self_attn.k_proj.bias K
model.layers.{i}.self_attn.v_proj.bias K
"""
QWEN3_NORMS = """
model.layers.{i}.self_attn.q_norm.weight D
model.layers.{i}.self_attn.k_norm.weight D
"""
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

SIZES = {"H": 64, "A": 64, "K": 32, "I": 128, "V": 320, "D": 16, "L": 4}


def layers(table: str, count: int) -> str:
    return "\n".join(table.strip().replace("{i}", str(i)) for i in range(count))


def config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes


def write_small_files(folder: Path, settings: dict[str, Any], vocab: int = 320) -> None:
    """config, generation config, tokenizer and template."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", settings)
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.7, "top_p": 0.9},
    )
    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {chr(0x4E00 + i): i + 3 for i in range(vocab - 5)}
    words[chr(0x4E00) + chr(0x4E01)] = vocab - 2
    added = [
        {"id": i, "content": t, "special": True} for t, i in (("<unk>", 0), ("<s>", 1), ("</s>", 2))
    ]
    added.append({"id": vocab - 1, "content": "<|user|>", "special": True})
    model = {"type": "BPE", "vocab": words, "merges": [[chr(0x4E00), chr(0x4E01)]]}
    write_json(folder / "tokenizer.json", {"version": "1.0", "added_tokens": added, "model": model})
    decoder = {str(e["id"]): {"content": e["content"], "special": True} for e in added}
    write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "added_tokens_decoder": decoder,
            "chat_template": TEMPLATE,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def llama(folder: Path, *, shards: int = 2, seed: int = 0, **changes: Any) -> Arrays:
    """A Llama of four layers; returns its tensors."""
    settings = config(**changes)
    write_small_files(folder, settings)
    count = settings["num_hidden_layers"]
    tensors = fill(ENDS + layers(LLAMA_LAYER, count), SIZES, np.random.default_rng(seed))
    if settings["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    write_shards(folder, tensors, shards)
    return tensors


def rewrite(folder: Path, change: Any, shards: int = 2) -> None:
    """Apply `change(tensors)` to a sample's weights and write them (and their index) anew."""
    files = sorted(folder.glob("model*.safetensors"))
    tensors: Arrays = {}
    for file in files:
        tensors |= read_safetensors(file)
        file.unlink()
    result = change(tensors)
    write_shards(folder, tensors if result is None else result, len(files) or shards)
