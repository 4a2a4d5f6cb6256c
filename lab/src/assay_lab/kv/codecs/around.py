"""A coder around a coder: it changes what the one inside sees, and undoes that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from assay_lab.kv.codecs.base import BlockCoder, Parts, Stage
from assay_lab.kv.codecs.fields import Field, join_fields, split_fields
from assay_lab.kv.codecs.samples import Tables
from assay_lab.kv.codecs.stream import damaged


class Around(BlockCoder):
    """Codes of the wrapper (`own_parts` tensors, of fixed size) come before those of the coder
    inside.
    """

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

    def quantise(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> Parts:
        """The wrapper's codes, then those of the coder inside."""
        own, inside = self.enter(x.float())
        return (*own, *self.inner.quantise(inside, predictors))

    def dequantise(self, parts: Parts, predictors: torch.Tensor | None = None) -> torch.Tensor:
        """The other way round."""
        return self.leave(
            parts[: self.own_parts], self.inner.dequantise(parts[self.own_parts :], predictors)
        )

    def stages(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> list[Stage]:
        """Those of the coder inside, seen from outside."""
        own, inside = self.enter(x.float())
        return [
            replace(s, decoded=self.leave(own, s.decoded))
            for s in self.inner.stages(inside, predictors)
        ]

    def layout(self, tokens: int) -> list[Field]:
        """The fields of the wrapper's own codes."""
        return []

    def pack(self, parts: Parts) -> list[bytes]:
        """The wrapper's fields, then the payload of the coder inside."""
        inside = self.inner.pack(parts[self.own_parts :])
        if not self.own_parts:
            return inside
        own = join_fields(self.layout(0), parts[: self.own_parts])
        return [front + rest for front, rest in zip(own, inside, strict=True)]

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        """The other way round."""
        fields = self.layout(tokens)
        size = sum(field.size for field in fields)
        if any(len(payload) < size for payload in payloads):
            raise damaged(f"a block is shorter than the {size} bytes that come before its codes")
        own = split_fields(fields, [payload[:size] for payload in payloads])
        return (*own, *self.inner.unpack([payload[size:] for payload in payloads], tokens))
