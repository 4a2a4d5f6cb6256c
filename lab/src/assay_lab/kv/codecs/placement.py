"""What goes around a codec: placements say on which tokens it works, wrappers change its values."""

from __future__ import annotations

from dataclasses import dataclass

from assay_lab.kv.codecs.base import BlockCoder, Capabilities, Codec
from assay_lab.kv.codecs.samples import LayerStream, Samples, Tables


@dataclass(frozen=True)
class Placement(Codec):
    """Where a codec works; it does not change values."""

    single_heads = True
    before_rope = False

    @property
    def capabilities(self) -> Capabilities:
        """A placement leaves each token alone; most are not in stored blocks."""
        return Capabilities(True, not_in_tier=f"{self.name} is around the codec")

    def exact_first(self) -> int:
        """Tokens at the start of a sequence that stay exact."""
        return 0

    def exact_last(self) -> int:
        """Tokens at the end of a sequence that stay exact."""
        return 0

    def skips(self, site: LayerStream) -> bool:
        """Whether the site stays exact altogether."""
        return False


@dataclass(frozen=True)
class Wrapper(Codec):
    """Changes what the codec inside sees, and undoes that."""

    single_heads = True

    @property
    def capabilities(self) -> Capabilities:
        """A wrapper leaves each token alone, and is not in stored blocks."""
        return Capabilities(True, not_in_tier=f"{self.name} is around the codec")

    def wrap(self, inner: Codec, samples: Samples) -> BlockCoder:
        """The coder of `inner` with this around it, fitted to `samples`."""
        raise NotImplementedError

    def rewrap(self, inner: Codec, site: LayerStream, tables: Tables) -> BlockCoder:
        """The same from kept tables, whose names begin with `inner.` where they are of the codec
        inside.
        """
        raise NotImplementedError


def inner_tables(tables: Tables) -> Tables:
    """The tables of the codec inside a wrapper."""
    return {
        name.removeprefix("inner."): t for name, t in tables.items() if name.startswith("inner.")
    }
