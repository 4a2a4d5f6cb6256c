"""What goes around a codec: placements say on which tokens it works, wrappers change its values."""

from __future__ import annotations

from dataclasses import dataclass

from assay_lab.kv.codecs.base import BlockCoder, Codec
from assay_lab.kv.codecs.samples import Samples, Site, Tables


@dataclass(frozen=True)
class Placement(Codec):
    """Where a codec works; it does not change values."""

    single_heads = True
    before_rope = False

    def exact_first(self) -> int:
        """Tokens at the start of a sequence that stay exact."""
        return 0

    def exact_last(self) -> int:
        """Tokens at the end of a sequence that stay exact."""
        return 0

    def skips(self, site: Site) -> bool:
        """Whether the site stays exact altogether."""
        return False


@dataclass(frozen=True)
class Wrapper(Codec):
    """Changes what the codec inside sees, and undoes that."""

    single_heads = True

    def wrap(self, inner: Codec, samples: Samples) -> BlockCoder:
        """The coder of `inner` with this around it, fitted to `samples`."""
        raise NotImplementedError

    def rewrap(self, inner: Codec, site: Site, tables: Tables) -> BlockCoder:
        """The same from kept tables, whose names begin with `inner.` where they are of the codec
        inside.
        """
        raise NotImplementedError


def inner_tables(tables: Tables) -> Tables:
    """The tables of the codec inside a wrapper."""
    return {
        name.removeprefix("inner."): t for name, t in tables.items() if name.startswith("inner.")
    }
