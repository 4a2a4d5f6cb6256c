"""Names and shapes of a model that transformers would build for a config."""

from __future__ import annotations

import re
from typing import Any

from assay.checkpoint.expectation import Expectation
from assay.checkpoint.subject import Checkpoint

_COUNTS = re.compile(r"layers|experts|depth|blocks|stages")

MAX_COUNT, MAX_MODULES = 1024, 40_000
"""Largest number of layers or experts of a config that is built, and of both multiplied: each costs
time.
"""


def meta_expectation(checkpoint: Checkpoint) -> Expectation | None:
    """What transformers would allocate for this config; None if it does not know the type or
    renames on load.
    """
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    kind = config.pop("model_type", None)
    if not kind or config.get("auto_map") or not _sane(config):
        return None
    try:
        return _expect(checkpoint, kind, config)
    except Exception:
        # Hundreds of model classes read this config, each with errors of its own. What cannot be
        # built says nothing about the tensors.
        return None


def _sane(config: dict[str, Any], depth: int = 0) -> bool:
    """Bounds on what the meta model has to enumerate, nested configs included."""
    counts = {k: v for k, v in config.items() if type(v) is int and _COUNTS.search(k)}
    layers = max((v for k, v in counts.items() if "experts" not in k), default=1)
    experts = max((v for k, v in counts.items() if "experts" in k), default=1)
    if max(counts.values(), default=0) > MAX_COUNT or layers * max(experts, 1) > MAX_MODULES:
        return False
    return depth <= 4 and all(_sane(v, depth + 1) for v in config.values() if isinstance(v, dict))


def _expect(checkpoint: Checkpoint, kind: str, config: dict[str, Any]) -> Expectation | None:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        if get_checkpoint_conversion_mapping(kind):
            return None  # stored under other names than the model's own
    except ImportError:
        pass
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    optional = [
        re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or []
    ]
    tied = set(
        getattr(model, "all_tied_weights_keys", None)
        or getattr(model, "_tied_weights_keys", None)
        or []
    )
    shapes = {
        name: tuple(value.shape)
        for name, value in model.state_dict().items()
        if name not in tied and not any(p.search(name) for p in optional)
    }
    own = next((n for n in shapes if n.endswith("embed_tokens.weight")), "")
    if own and own.removesuffix("embed_tokens.weight") != checkpoint.prefix:
        return None
    return Expectation(shapes, f"transformers {transformers.__version__}")
