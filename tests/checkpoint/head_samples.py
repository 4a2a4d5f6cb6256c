"""Checkpoints with draft heads as headers alone: names, types and shapes, no bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from assay.checkpoint.safetensors import Header
from assay.checkpoint.subject import Checkpoint
from assay.checkpoint.tensors import DTYPE_BITS, Tensor
from checkpoint_quantized import MTP_SIZES, mtp_family
from checkpoint_samples import ENDS

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""(dtype, shape) by tensor name."""


def rows(table: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for line in table.strip().splitlines():
        if line.strip():
            name, *sizes = line.split()
            yield name, tuple(int(eval(s, {"__builtins__": {}}, MTP_SIZES)) for s in sizes)


def family(name: str) -> tuple[dict[str, Any], Shapes, Shapes]:
    """(config, tensors of the backbone, tensors of the head)."""
    config, body, head = mtp_family(name)
    backbone = {n: ("BF16", shape) for n, shape in rows(ENDS + body)}
    return config, backbone, {n: ("BF16", shape) for n, shape in rows(head)}


def checkpoint(config: dict[str, Any], *files: Shapes) -> Checkpoint:
    """A checkpoint of one shard per mapping; the config is all that can be read of it."""
    text = json.dumps(config).encode()
    headers = {}
    for number, shapes in enumerate(files):
        name, at, listed = f"part-{number}.safetensors", 0, []
        for tensor, (dtype, shape) in shapes.items():
            bits = DTYPE_BITS[dtype]
            for dimension in shape:
                bits *= dimension
            listed.append(Tensor(tensor, dtype, shape, name, at, at + bits // 8))
            at += bits // 8
        headers[name] = Header(name, at, 0, tuple(listed))
    sizes = {"config.json": len(text)} | {name: header.size for name, header in headers.items()}
    return Checkpoint("folder", sizes, lambda name: text, headers)
