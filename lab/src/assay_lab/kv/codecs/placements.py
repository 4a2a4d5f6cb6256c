"""Where a codec works: before RoPE, not on sinks, not on recent tokens, not in boundary layers."""

from __future__ import annotations

from dataclasses import dataclass

from assay_lab.kv.codecs.base import Capabilities
from assay_lab.kv.codecs.placement import Placement
from assay_lab.kv.codecs.samples import LayerStream


@dataclass(frozen=True)
class PreRope(Placement):
    """Keys are coded as they are before RoPE, which then is applied to what is decoded."""

    name = "prerope"
    summary = "keys before RoPE"
    before_rope = True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(token_by_token=True)


@dataclass(frozen=True)
class Sinks(Placement):
    """The first `n` tokens stay exact: attention sinks, whose keys are far from all others."""

    name = "sinks"
    summary = "first n tokens exact"
    n: int = 4

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(token_by_token=True)

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

    def skips(self, site: LayerStream) -> bool:
        return site.layer < self.first or site.layer >= site.layers - self.last
