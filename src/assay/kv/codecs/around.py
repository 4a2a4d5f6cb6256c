"""A coder around a coder: what wrappers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from assay.kv.codec import BlockCoder, Parts, Tables, damaged
from assay.kv.payload import join_fields, split_fields

if TYPE_CHECKING:
    import torch


class Around(BlockCoder):
    """Codes of the wrapper (`own_parts` tensors, of fixed size) stand before those of the coder inside."""

    own_parts = 0

    def __init__(self, inner: BlockCoder) -> None:
        super().__init__(inner.site)
        self.inner = inner
        self.granularity, self.block_tokens = inner.granularity, inner.block_tokens
        self.exact_last = inner.exact_last

    @property
    def tables(self) -> Tables:
        """Those of the coder inside, under `inner.`."""
        return {f"inner.{name}": table for name, table in self.inner.tables.items()}

    @property
    def table_bytes(self) -> int:
        """Its own tables and what the coder inside counts."""
        own = sum(int(t.nbytes) for name, t in self.tables.items() if not name.startswith("inner."))
        return own + self.inner.table_bytes

    def own_fields(self, own: Parts) -> list[torch.Tensor]:
        """The wrapper's codes as fields of bytes."""
        return []

    def own_sizes(self, tokens: int) -> list[int]:
        """Bytes of each of these fields."""
        return []

    def own_from(self, fields: Sequence[torch.Tensor], tokens: int) -> Parts:
        """The wrapper's codes from their fields."""
        return ()

    def pack(self, parts: Parts) -> list[bytes]:
        """The wrapper's fields, then the payload of the coder inside."""
        inside = self.inner.pack(parts[self.own_parts :])
        fields = self.own_fields(parts[: self.own_parts])
        if not fields:
            return inside
        return [own + rest for own, rest in zip(join_fields(fields), inside, strict=True)]

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        """The other way round."""
        sizes = self.own_sizes(tokens)
        size = sum(sizes)
        if any(len(payload) < size for payload in payloads):
            raise damaged(f"a block is shorter than the {size} bytes that come before its codes")
        own = self.own_from(split_fields([p[:size] for p in payloads], sizes), tokens) if sizes else ()
        return (*own, *self.inner.unpack([p[size:] for p in payloads], tokens))
