"""GGUF files written by hand, byte by byte as the format prescribes, and read again by the `gguf`
package in a test.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ALIGNMENT = 32


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type and value of a metadata pair: u32, f32, bool, string, or an array of one of them."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    bodies = [value(entry) for entry in item]
    return (
        struct.pack("<I", 9)
        + bodies[0][:4]
        + struct.pack("<Q", len(bodies))
        + b"".join(b[4:] for b in bodies)
    )


Row = tuple[str, tuple[int, ...], int, bytes]
"""name, dims (fastest first), type, data"""


def gguf(metadata: dict[str, Any], rows: Sequence[Row], version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(rows), len(metadata))
    head += b"".join(text(k) + value(v) for k, v in metadata.items())
    table, body = b"", b""
    for name, dims, kind, data in rows:
        table += text(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        table += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % ALIGNMENT)
    head += table
    return head + bytes(-len(head) % ALIGNMENT) + body


TOKENS = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(61))]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": 3,
    "llama.embedding_length": 32,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 64,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


def llama_rows(blocks: int = 3) -> list[Row]:
    """A small Llama: Q8_0 matrices, F32 norms, F16 embedding."""
    q8 = bytes([0x00, 0x2C, *range(1, 33)])  # scale 2^-4, 32 quants
    rows: list[Row] = [
        (
            "token_embd.weight",
            (32, 64),
            1,
            struct.pack("<2048e", *[j / 2048 - 0.5 for j in range(2048)]),
        )
    ]
    for i in range(blocks):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            rows.append((f"blk.{i}.{part}.weight", (32, 32), 8, q8 * 32))
        for part in ("attn_norm", "ffn_norm"):
            rows.append(
                (
                    f"blk.{i}.{part}.weight",
                    (32,),
                    0,
                    struct.pack("<32f", *[1.0 + j / 99 for j in range(32)]),
                )
            )
    rows.append(
        ("output_norm.weight", (32,), 0, struct.pack("<32f", *[1.0 - j / 99 for j in range(32)]))
    )
    return rows


def write(path: Path, rows: Sequence[Row] | None = None, **changes: Any) -> Path:
    """A whole file; a change of `...` drops a key. Keys are written with `__` for the dot."""
    metadata = METADATA | {k.replace("__", "."): v for k, v in changes.items()}
    metadata = {k: v for k, v in metadata.items() if v is not ...}
    path.write_bytes(gguf(metadata, llama_rows() if rows is None else rows))
    return path


def split(folder: Path, parts: int = 3) -> list[Path]:
    """The model in several files, as `llama-gguf-split` writes them."""
    rows = llama_rows()
    paths = []
    for i in range(parts):
        own = rows[i * len(rows) // parts : (i + 1) * len(rows) // parts]
        metadata = (METADATA if i == 0 else {"general.architecture": "llama"}) | {
            "split.no": i, "split.count": parts, "split.tensors.count": len(rows)
        }  # fmt: skip
        path = folder / f"tiny-{i + 1:05d}-of-{parts:05d}.gguf"
        path.write_bytes(gguf(metadata, own))
        paths.append(path)
    return paths
