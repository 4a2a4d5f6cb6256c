"""What a coder predicts from: streams that the decoder has before it comes to the coder's own.

A codec names the streams it wants (`Codec.sides`). Of these it gets what the decoder really has: the reconstruction of
coded tokens, the exact ones of a stream that is not coded. A sliding layer has dropped old tokens that a full layer
still codes, so it is no side of that one. Keys are handed over before RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from assay.errors import AssayError, UsageError
from assay.kv.codec import Site
from assay.kv.track import Coders, Key

if TYPE_CHECKING:
    from assay.kv.fitted import FittedCodec
    from assay.kv.model import CacheShape
    from assay.kv.spec import Recipe


def sides_of(
    recipe: Recipe, site: Site, coded: Mapping[Key, FittedCodec], shape: CacheShape
) -> tuple[Key, ...]:
    """The streams that a site's coder predicts from, given the coders before it.

    UsageError where one of them is coded so that the decoder would not have it in time.
    """
    own = shape.windows[site.layer]
    found = []
    for key in recipe.sides(site):
        window = shape.windows[key[0]]
        if window is not None and (own is None or own > window):
            continue
        side = coded.get(key)
        if side is not None and not side.lossless:
            _check(recipe, site, key, side)
        found.append(key)
    return tuple(found)


def refuse_sides(coders: Coders, where: str) -> None:
    """AssayError where a coder predicts and `where` has no way to hand it what it predicts from."""
    if any(coder.sides for coder in coders.values()):
        raise AssayError(
            f"{where} does not hand codecs what they predict from",
            finding_id="kv.unsupported",
            remedy="use pca with predict=none there; a model of transformers takes it as it is: `assay kv eval`",
        )


def _check(recipe: Recipe, site: Site, key: Key, side: FittedCodec) -> None:
    here = (
        f"{recipe} in layer {site.layer}, stream {site.stream}, predicts from layer {key[0]}, stream {key[1]}"
    )
    ends = (side.exact_first, side.exact_last), (recipe.exact_first, recipe.exact_last)
    if side.granularity != 1 or ends[0] != ends[1]:
        raise UsageError(
            f"{here}, which must be coded token by token with the same sinks and recent tokens, not by {side.spec}",
            remedy="give both streams the same wrappers, and codecs of single tokens such as pca or hadamard",
            finding_id="kv.side",
        )
    if key[1] == "k" and not side.before_rope:
        raise UsageError(
            f"{here}, whose keys are coded after RoPE",
            remedy="put prerope before the codec of the keys",
            finding_id="kv.side",
        )
