"""What a coder predicts from: streams that the decoder has before it comes to the coder's own."""

from __future__ import annotations

from collections.abc import Mapping

from assay.errors import UsageError
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.codecs.samples import LayerStream
from assay_lab.kv.spec import Recipe
from assay_lab.kv.stream_coder import Coders, FittedCodec, Key


def predictors_of(
    recipe: Recipe, site: LayerStream, coded: Mapping[Key, FittedCodec], shape: CacheShape
) -> tuple[Key, ...]:
    """The streams that a site's coder predicts from, given the coders before it.

    UsageError where one of them is coded so that the decoder would not have it in time.
    """
    own = shape.windows[site.layer]
    found = []
    for key in recipe.predictor_keys(site):
        window = shape.windows[key[0]]
        if window is not None and (own is None or own > window):
            continue
        source = coded.get(key)
        if source is not None and not source.lossless:
            _check(recipe, site, key, source)
        found.append(key)
    return tuple(found)


def last_readers(coders: Coders) -> dict[Key, int]:
    """Every stream that another predicts from, with the last layer that does."""
    found: dict[Key, int] = {}
    for (layer, _), coder in coders.items():
        for source in coder.predictor_keys:
            found[source] = max(layer, found.get(source, layer))
    return found


def check_alone(fitted: FittedCodec, coded: Mapping[Key, FittedCodec]) -> None:
    """UsageError where a coder of blocks predicts from coded tokens, which are decoded one by
    one.
    """
    if fitted.granularity != 1 and any(
        key in coded and not coded[key].lossless for key in fitted.predictor_keys
    ):
        raise UsageError(
            f"{fitted.spec} in layer {fitted.site.layer}, stream {fitted.site.stream}, codes"
            f" {fitted.granularity} tokens together, but predicts from streams that are coded token"
            " by token",
            remedy="leave out what works on blocks, such as mean(of=block)",
            finding_id="kv.side",
        )


def _check(recipe: Recipe, site: LayerStream, key: Key, source: FittedCodec) -> None:
    here = (
        f"{recipe} in layer {site.layer}, stream {site.stream}, predicts from layer {key[0]},"
        f" stream {key[1]}"
    )
    ends = (source.exact_first, source.exact_last), (recipe.exact_first, recipe.exact_last)
    if source.granularity != 1 or ends[0] != ends[1]:
        raise UsageError(
            f"{here}, which must be coded token by token with the same sinks and recent tokens, not"
            f" by {source.spec}",
            remedy=(
                "give both streams the same wrappers, and codecs of single tokens such as pca or"
                " hadamard"
            ),
            finding_id="kv.side",
        )
    if key[1] == "k" and not source.before_rope:
        raise UsageError(
            f"{here}, whose keys are coded after RoPE",
            remedy="put prerope before the codec of the keys",
            finding_id="kv.side",
        )
