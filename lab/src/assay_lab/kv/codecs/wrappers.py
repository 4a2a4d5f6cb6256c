"""Wrappers: what goes around a codec, in a SPEC before it, and where it works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from assay.errors import UsageError
from assay_lab.kv.codecs.base import BlockCoder, Codec, Parts, Stage
from assay_lab.kv.codecs.fields import (
    EXPONENT,
    Field,
    from_halves,
    join_fields,
    split_fields,
    to_halves,
)
from assay_lab.kv.codecs.placement import Placement, Wrapper, inner_tables
from assay_lab.kv.codecs.samples import Samples, Site, Tables, need_table
from assay_lab.kv.codecs.stream import damaged


class Around(BlockCoder):
    """Codes of the wrapper (`own_parts` tensors, of fixed size) stand before those of the coder
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

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        """The wrapper's codes, then those of the coder inside."""
        own, inside = self.enter(x.float())
        return (*own, *self.inner.quantise(inside, side))

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        """The other way round."""
        return self.leave(
            parts[: self.own_parts], self.inner.dequantise(parts[self.own_parts :], side)
        )

    def stages(self, x: torch.Tensor, side: torch.Tensor | None = None) -> list[Stage]:
        """Those of the coder inside, seen from outside."""
        own, inside = self.enter(x.float())
        return [
            replace(s, decoded=self.leave(own, s.decoded)) for s in self.inner.stages(inside, side)
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


# Removes the mean of every channel before coding: keys have channels far from zero, which waste
# levels.


@dataclass(frozen=True)
class Mean(Wrapper):
    """`of=calibration`: the mean of the samples, a table of fp16. `of=block`: of each block, fp16
    in its payload.
    """

    name = "mean"
    summary = "channel means removed"
    of: Literal["calibration", "block"] = "calibration"

    def wrap(self, inner: Codec, samples: Samples) -> BlockCoder:
        if self.of == "block":
            x = samples.x
            if x is not None:
                x = x.float() - x.float().mean(dim=1, keepdim=True)
            return BlockMeanCoder(inner.fit(replace(samples, x=x)))
        x = samples.need_x(str(self))
        half, exponent = to_halves(x.mean(dim=1)[None])
        mean = from_halves(half, exponent)[0].cpu()
        return MeanCoder(inner.fit(replace(samples, x=x - mean.to(x.device)[:, None])), mean)

    def rewrap(self, inner: Codec, site: Site, tables: Tables) -> BlockCoder:
        coder = inner.restore(site, inner_tables(tables))
        if self.of == "block":
            return BlockMeanCoder(coder)
        mean = torch.from_numpy(need_table(tables, "mean", str(self), site).astype("float32"))
        return MeanCoder(coder, mean)


class MeanCoder(Around):
    """x − mean goes inside; mean [heads, head_dim]."""

    def __init__(self, inner: BlockCoder, mean: torch.Tensor) -> None:
        super().__init__(inner)
        self._mean = mean

    @property
    def tables(self) -> Tables:
        values = self._mean.numpy()
        small = values.astype(np.float16) if np.abs(values).max(initial=0) < 65504 else values
        return {**super().tables, "mean": small}

    def enter(self, x: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        return (), x - self._mean.to(x.device)[:, None]

    def leave(self, own: Parts, values: torch.Tensor) -> torch.Tensor:
        return values + self._mean.to(values.device)[:, None]


class BlockMeanCoder(Around):
    """The mean of each block [blocks, heads, head_dim], as halves, before the codes inside."""

    own_parts = 2

    def __init__(self, inner: BlockCoder) -> None:
        super().__init__(inner)
        self.granularity = self.block_tokens

    def enter(self, x: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        half, exponent = to_halves(x.mean(dim=2))
        return (half, exponent), x - from_halves(half, exponent)[:, :, None]

    def leave(self, own: Parts, values: torch.Tensor) -> torch.Tensor:
        return values + from_halves(*own)[:, :, None].to(values.device)

    def layout(self, tokens: int) -> list[Field]:
        return [Field((self.site.heads, self.site.head_dim), torch.float16), EXPONENT]


# The largest values of every block kept beside the codes, so that they do not stretch the levels of
# the rest.
#
# Of each head and token the `n` values farthest from zero are stored as 16-bit floats with their
# channel, and the codec inside sees zeros in their place.


@dataclass(frozen=True)
class Outliers(Wrapper):
    """`n` values of each vector, 16 bits and ⌈log₂ head_dim⌉ bits each."""

    name = "outliers"
    summary = "largest values of each vector apart"
    n: int = 1

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UsageError(f"outliers(n={self.n}): n is at least 1", finding_id="kv.spec")

    def wrap(self, inner: Codec, samples: Samples) -> BlockCoder:
        x = samples.x
        if x is not None:
            x = x.float()
            x = x.scatter(-1, x.abs().topk(min(self.n, x.shape[-1]), dim=-1).indices, 0.0)
        return OutlierCoder(inner.fit(replace(samples, x=x)), self.n)

    def rewrap(self, inner: Codec, site: Site, tables: Tables) -> BlockCoder:
        return OutlierCoder(inner.restore(site, inner_tables(tables)), self.n)


class OutlierCoder(Around):
    """Own codes: channels and halves [blocks, heads, tokens, n], exponents [blocks]."""

    own_parts = 3

    def __init__(self, inner: BlockCoder, n: int) -> None:
        super().__init__(inner)
        self._n = min(n, self.site.head_dim)
        self._width = max(1, (self.site.head_dim - 1).bit_length())

    def enter(self, x: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        channels = x.abs().topk(self._n, dim=-1).indices
        return (channels, *to_halves(x.gather(-1, channels))), x.scatter(-1, channels, 0.0)

    def leave(self, own: Parts, values: torch.Tensor) -> torch.Tensor:
        channels, half, exponent = own
        # A damaged index must not point outside.
        places = channels.to(values.device).long().clamp_max(self.site.head_dim - 1)
        return values.scatter(-1, places, from_halves(half, exponent).to(values.device))

    def layout(self, tokens: int) -> list[Field]:
        shape = (self.site.heads, tokens, self._n)
        return [Field(shape, self._width), Field(shape, torch.float16), EXPONENT]


# Wrappers that say where a codec works: before RoPE, not on sinks, not on recent tokens, not in
# boundary layers.


@dataclass(frozen=True)
class PreRope(Placement):
    """Keys are coded as they are before RoPE, which then is applied to what is decoded."""

    name = "prerope"
    summary = "keys before RoPE"
    before_rope = True


@dataclass(frozen=True)
class Sinks(Placement):
    """The first `n` tokens stay exact: attention sinks, whose keys are far from all others."""

    name = "sinks"
    summary = "first n tokens exact"
    n: int = 4

    def exact_first(self) -> int:
        return self.n


@dataclass(frozen=True)
class Recent(Placement):
    """The last `n` tokens stay exact until newer ones come."""

    name = "recent"
    summary = "last n tokens exact"
    n: int = 64

    def exact_last(self) -> int:
        return self.n


@dataclass(frozen=True)
class Boundary(Placement):
    """The first and the last layers stay exact."""

    name = "boundary"
    summary = "first and last layers exact"
    first: int = 1
    last: int = 1

    def skips(self, site: Site) -> bool:
        return site.layer < self.first or site.layer >= site.layers - self.last


# Q-preconditioning: keys are coded where plain squared error is error of attention scores.
#
# With Σ the second moment of the queries that read a KV head and Σ + r · mean(diag Σ) · I = L Lᵀ,
# the rows x L are coded and decoded rows are multiplied by L⁻¹: ‖(x − x̂) L‖² = (x − x̂) (L Lᵀ) (x
# − x̂)ᵀ. L enlarges what queries look at.


@dataclass(frozen=True)
class QPrecond(Wrapper):
    """One Cholesky factor a layer and KV head, ridge `ridge` times the mean of the diagonal."""

    name = "qprecond"
    summary = "whitened by the queries' second moment"
    ridge: float = 1e-3

    def wrap(self, inner: Codec, samples: Samples) -> BlockCoder:
        sigma = samples.need_metric(str(self))
        mean = sigma.diagonal(dim1=1, dim2=2).mean(dim=1)
        eye = torch.eye(sigma.shape[-1], dtype=torch.float64)
        chol = torch.linalg.cholesky(sigma + self.ridge * mean[:, None, None] * eye).float()
        x = None if samples.x is None else samples.x.float() @ chol.to(samples.x.device)
        # What is inside sees a plain metric: it has been absorbed.
        return QPrecondCoder(inner.fit(replace(samples, x=x, metric=eye.expand_as(sigma))), chol)

    def rewrap(self, inner: Codec, site: Site, tables: Tables) -> BlockCoder:
        chol = torch.from_numpy(_square(need_table(tables, "chol", str(self), site), site.head_dim))
        return QPrecondCoder(inner.restore(site, inner_tables(tables)), chol)


class QPrecondCoder(Around):
    """x L goes inside; `chol` [heads, head_dim, head_dim], lower triangles, which alone are kept as
    a table.
    """

    def __init__(self, inner: BlockCoder, chol: torch.Tensor) -> None:
        super().__init__(inner)
        self._chol = chol
        eye = torch.eye(chol.shape[-1], dtype=torch.float64)
        self._inverse = torch.linalg.solve_triangular(chol.double(), eye, upper=False).float()

    @property
    def tables(self) -> Tables:
        rows, columns = np.tril_indices(self.site.head_dim)
        return {**super().tables, "chol": self._chol.numpy()[:, rows, columns]}

    def enter(self, x: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        return (), x @ self._chol.to(x.device)

    def leave(self, own: Parts, values: torch.Tensor) -> torch.Tensor:
        return values @ self._inverse.to(values.device)


def _square(triangles: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    full = np.zeros((triangles.shape[0], size, size), dtype=np.float32)
    rows, columns = np.tril_indices(size)
    full[:, rows, columns] = triangles
    return full
