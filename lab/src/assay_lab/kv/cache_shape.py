"""The shape of a model's KV cache, read from its configuration."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from assay.errors import AssayError


@dataclass(frozen=True)
class CacheShape:
    """Layers, KV heads and width of the cache; `windows` is the sliding window of each layer, None
    where full.
    """

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    architecture: str

    def of_rank(self, ranks: int) -> CacheShape:
        """What one of so many ranks has of it, each an even share of the heads."""
        return replace(self, kv_heads=self.kv_heads // ranks, query_heads=self.query_heads // ranks)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def cache_shape(model: Any) -> CacheShape:
    """The cache of a model of transformers; AssayError where it is not one of keys and values in
    every layer.
    """
    config = model.config.get_text_config()
    types = list(
        getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    )
    known = {"full_attention", "sliding_attention"}
    if other := sorted(set(types) - known):
        raise AssayError(
            f"{type(model).__name__} has layers of the kind {other[0]!r}, whose cache is not keys"
            " and values",
            finding_id="kv.unsupported",
            remedy="codecs take models whose every layer is full or sliding attention",
        )
    sliding = getattr(config, "sliding_window", None)
    heads = config.num_attention_heads
    return CacheShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        query_heads=heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        windows=tuple(sliding if kind == "sliding_attention" else None for kind in types),
        architecture=type(model).__name__,
    )
