"""From a SPEC, a model and a calibration to the coders of every layer and stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from assay.errors import UsageError
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.calibration import Calibration
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.predictors import check_alone, predictors_of
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.spec import Recipe
from assay_lab.kv.stream_coder import FittedCodec, Key

if TYPE_CHECKING:
    import torch


RecipeOf = Callable[[int, str], "Recipe | None"]
"""The recipe of a layer and stream; None keeps it exact."""


@dataclass(frozen=True)
class CoderSet:
    """Coders by (layer, stream); what is not there stays exact."""

    by_stream: Mapping[Key, FittedCodec]

    @property
    def table_bytes(self) -> int:
        """Bytes of the calibration tables of all decoders."""
        return sum(coder.table_bytes for coder in self.by_stream.values())

    @property
    def lossless(self) -> bool:
        """Whether nothing can differ."""
        return all(coder.lossless for coder in self.by_stream.values())


@dataclass(frozen=True)
class LayerCoders:
    """What coders are fitted on: the model's cache, its rotary embedding, and a calibration where
    there is one.
    """

    shape: CacheShape
    rotary: Rotary | None = None
    calibration: Calibration | None = None
    _fitted: dict[Any, FittedCodec] = field(default_factory=dict, compare=False, repr=False)
    _decoded: dict[Key, tuple[FittedCodec, torch.Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Reconstructed samples of the latest layers, which coders after them predict from."""

    def fit(
        self,
        recipe: Recipe,
        layer: int,
        stream: str,
        coded: Mapping[Key, FittedCodec] | None = None,
    ) -> FittedCodec:
        """One coder, the same one if asked again; `coded` are those of the streams before it.

        AssayError where the recipe needs a calibration and there is none.
        """
        site, coded = self._site(layer, stream), coded or {}
        predictor_keys = predictors_of(recipe, site, coded, self.shape)
        key = (
            recipe,
            layer,
            stream,
            tuple((source, id(coded.get(source))) for source in predictor_keys),
        )
        if key not in self._fitted:
            fitted = recipe.fit(self._samples(recipe, site, coded, predictor_keys))
            check_alone(fitted, coded)
            self._fitted[key] = fitted
        return self._fitted[key]

    def _samples(
        self,
        recipe: Recipe,
        site: LayerStream,
        coded: Mapping[Key, FittedCodec],
        predictor_keys: Sequence[Key],
    ) -> Samples:
        if not self.calibration:
            return Samples(site)
        found = self.calibration.samples(site, before_rope=recipe.before_rope, rotary=self.rotary)
        predictors = self._predictors(coded, predictor_keys)
        if (
            predictors is not None
            and found.x is not None
            and self.rotary
            and found.x.shape[1] < predictors.shape[1]
        ):
            predictors = predictors[:, self.calibration.tensors["positions"] < self.rotary.length]
        return replace(found, predictors=predictors, predictor_keys=tuple(predictor_keys))

    def _predictors(
        self, coded: Mapping[Key, FittedCodec], predictor_keys: Sequence[Key]
    ) -> torch.Tensor | None:
        """What the decoder has of the samples of some streams, their heads one after the other,
        keys before RoPE.
        """
        import torch

        parts = [self._reconstructed(key, coded) for key in predictor_keys]
        return torch.cat(parts) if parts else None

    def _reconstructed(self, key: Key, coded: Mapping[Key, FittedCodec]) -> torch.Tensor:
        if self.calibration is None:
            raise ValueError("there are no samples to reconstruct")
        samples = self.calibration.samples(self._site(*key), before_rope=True, rotary=None)
        x, coder = samples.need_x("prediction"), coded.get(key)
        if coder is None or coder.lossless:
            return x
        known = self._decoded.get(key)
        if known is None or known[0] is not coder:
            back = coder.reconstruct(x, self._predictors(coded, coder.predictor_keys))
            if samples.positions is not None:
                back = back.where((samples.positions >= coder.exact_first)[:, None], x)
            # In bf16: what is learnt from them does not hang on their last digits.
            self._decoded[key] = (coder, back.bfloat16())
            for old in [k for k in self._decoded if k[0] < key[0] - 1]:
                del self._decoded[old]
        return self._decoded[key][1].float()

    def _site(self, layer: int, stream: str) -> LayerStream:
        return LayerStream(
            stream, layer, self.shape.layers, self.shape.kv_heads, self.shape.head_dim
        )

    def fit_all(
        self, recipe_of: RecipeOf, layers: Iterable[int] | None = None, streams: str = "kv"
    ) -> CoderSet:
        """Coders of the given layers (all by default) and streams, in an order in which each may
        predict from those before.
        """
        found: dict[Key, FittedCodec] = {}
        for layer in sorted(range(self.shape.layers) if layers is None else layers):
            for stream in sorted(streams):
                recipe = recipe_of(layer, stream)
                if recipe is not None:
                    found[layer, stream] = self.fit(recipe, layer, stream, found)
        return CoderSet(found)


def kept_layers(shape: CacheShape, skip: Sequence[int]) -> list[int]:
    """The layers that are coded; UsageError for one that does not exist, and where none is left."""
    require_layers(shape, skip)
    kept = [layer for layer in range(shape.layers) if layer not in skip]
    if not kept:
        raise UsageError(
            f"--skip-layers leaves none of the {shape.layers} layers to code",
            remedy="leave out at least one",
            finding_id="kv.usage",
        )
    return kept


def require_layers(shape: CacheShape, layers: Sequence[int]) -> None:
    """UsageError for a layer that the model has not."""
    wrong = [layer for layer in layers if not 0 <= layer < shape.layers]
    if wrong:
        raise UsageError(
            f"layer {wrong[0]} does not exist: the model has layers 0 to {shape.layers - 1}",
            remedy="give layers of the model to --skip-layers",
            finding_id="kv.usage",
        )
