"""A serialiser for LMCache's second-level storage (0.5): the same blocks, with a chunk as block."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import torch

from assay.errors import AssayError
from assay_lab.kv.block_tables import BlockTables
from assay_lab.kv.blocks import BlockCodec, block_bytes


class LmcacheSerde:
    """Serialiser and deserialiser of LMCache for chunks [2, layers, tokens, KV heads · head_dim],
    one process a model.

    LMCache does not say which place of a request a chunk has, so keys must be coded after RoPE (no
    prerope), and the sinks of every chunk stay exact. It stores as many bytes as
    `estimate_serialized_size` says, for a stream of any size: `ratio` times fewer than bf16. A
    chunk that needs more is an error there, and is not stored.
    """

    def __init__(self, codec: BlockCodec, ratio: float) -> None:
        if codec.facts.before_rope:
            raise AssayError(
                f"{codec.facts.spec} codes keys before RoPE, and LMCache does not say at which"
                " positions a chunk stands",
                finding_id="kv.unsupported",
                remedy="leave prerope out of the codec",
            )
        self._codec, self._ratio = codec, ratio

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Bytes that LMCache gives a chunk of this layout."""
        exact: int = sum(
            math.prod(s) * d.itemsize
            for s, d in zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        )
        return math.ceil(exact / self._ratio)

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Encode the tensor of `src` into the bytes of `dst`; the bytes used. AssayError where they
        do not suffice.
        """
        x = src.tensor.transpose(0, 1).cpu()
        data = self._codec.encode(x, first=0, key=self._key(key))
        room = dst.tensor.view(torch.uint8).flatten()
        if len(data) > room.numel():
            raise AssayError(
                f"a chunk takes {len(data):,} bytes, and a ratio of {self._ratio:g} leaves"
                f" {room.numel():,}",
                finding_id="kv.tier_size",
                remedy="give a smaller ratio",
            )
        room[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return len(data)

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Decode the bytes of `src` into the tensor of `dst`; BlockRefused for bytes that are not
        believed.
        """
        data = src.tensor.view(torch.uint8).flatten().cpu().numpy().tobytes()
        x = self._codec.decode([data[: block_bytes(data)]], [self._key(key)])
        dst.tensor.copy_(x.transpose(0, 1))

    def _key(self, key: Any) -> bytes:
        """A key of our own for all that names a chunk."""
        return hashlib.blake2b(repr(key).encode(), digest_size=32).digest()


def register_lmcache(name: str = "assay") -> None:
    """Make the serialiser known to LMCache: `"serde": {"type": "assay", "tables": FILE, "ratio":
    5}`.
    """
    from lmcache.v1.distributed.serde import AsyncSerdeProcessor, register_serde_factory

    def build(kwargs: dict[str, Any]) -> Any:
        codec = BlockCodec(
            BlockTables.read(Path(str(kwargs["tables"]))), int(kwargs.get("threads", 2))
        )
        serde = LmcacheSerde(codec, float(kwargs.get("ratio", 4.0)))
        return AsyncSerdeProcessor(serde, serde, max_workers=int(kwargs.get("max_workers", 1)))

    register_serde_factory(name, build)
