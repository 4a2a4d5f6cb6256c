"""From a SPEC, a model and a calibration to the coders of every layer and stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.kv.calibration import Calibration, read_calibration
from assay.kv.codec import Samples, Site
from assay.kv.fitted import FittedCodec
from assay.kv.model import CacheShape
from assay.kv.rope import Rotary
from assay.kv.spec import Recipe
from assay.kv.track import Key

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
class Bench:
    """What coders are fitted on: the model's cache, its rotary embedding, and a calibration where there is one."""

    shape: CacheShape
    rotary: Rotary | None = None
    calibration: Calibration | None = None
    _fitted: dict[tuple[Recipe, int, str], FittedCodec] = field(
        default_factory=dict, compare=False, repr=False
    )

    def fit(self, recipe: Recipe, layer: int, stream: str) -> FittedCodec:
        """One coder, the same one if asked again. AssayError where the recipe needs a calibration and there is none."""
        key = (recipe, layer, stream)
        if key not in self._fitted:
            self._fitted[key] = self._fit(recipe, layer, stream)
        return self._fitted[key]

    def _fit(self, recipe: Recipe, layer: int, stream: str) -> FittedCodec:
        site = Site(stream, layer, self.shape.layers, self.shape.kv_heads, self.shape.head_dim)
        samples = Samples(site)
        if self.calibration:
            samples = self.calibration.samples(site, before_rope=recipe.before_rope, rotary=self.rotary)
        return recipe.fit(samples)

    def fit_all(
        self, recipe_of: RecipeOf, layers: Iterable[int] | None = None, streams: str = "kv"
    ) -> CoderSet:
        """Coders of the given layers (all by default) and streams."""
        found: dict[Key, FittedCodec] = {}
        for layer in range(self.shape.layers) if layers is None else layers:
            for stream in streams:
                recipe = recipe_of(layer, stream)
                if recipe is not None:
                    found[layer, stream] = self.fit(recipe, layer, stream)
        return CoderSet(found)


def kept_layers(shape: CacheShape, skip: Sequence[int]) -> list[int]:
    """The layers that are coded; UsageError for one that does not exist."""
    wrong = [layer for layer in skip if not 0 <= layer < shape.layers]
    if wrong:
        raise UsageError(
            f"layer {wrong[0]} does not exist: the model has layers 0 to {shape.layers - 1}",
            remedy="give layers of the model to --skip-layers",
            finding_id="kv.usage",
        )
    return [layer for layer in range(shape.layers) if layer not in skip]


def open_calibration(
    path: str | None, shape: CacheShape, text: Mapping[str, Any], windows: Sequence[str]
) -> Calibration | None:
    """The calibration in a file, checked against the model and the evaluation text; None without a file."""
    if path is None:
        return None
    calibration = read_calibration(Path(path))
    calibration.check_model(shape)
    calibration.check_text(text, windows)
    return calibration
