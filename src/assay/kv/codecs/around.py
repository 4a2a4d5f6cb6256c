"""A coder around a coder: what wrappers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from assay.kv.codec import BlockCoder, Parts, Stage, Tables, damaged
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

    def enter(self, x: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        """The wrapper's codes of blocks x (float32), and what the coder inside sees of them."""
        raise NotImplementedError

    def leave(self, own: Parts, values: torch.Tensor) -> torch.Tensor:
        """What the coder inside gave back, with the wrapper undone."""
        raise NotImplementedError

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        """The wrapper's codes, then those of the coder inside."""
        own, inside = self.enter(x.float())
        return (*own, *self.inner.quantise(inside, side))

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        """The other way round."""
        return self.leave(parts[: self.own_parts], self.inner.dequantise(parts[self.own_parts :], side))

    def stages(self, x: torch.Tensor, side: torch.Tensor | None = None) -> list[Stage]:
        """Those of the coder inside, seen from outside."""
        own, inside = self.enter(x.float())
        return [replace(s, decoded=self.leave(own, s.decoded)) for s in self.inner.stages(inside, side)]

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
