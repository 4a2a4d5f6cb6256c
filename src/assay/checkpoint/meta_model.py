"""Names and shapes from transformers' own meta-device model, for families that assay has no layout of.

Needs the `hf` extra. The model is built without memory for its weights and without running code of the checkpoint.
"""

from __future__ import annotations

import re
from typing import Any

from assay.checkpoint.structure import Expectation
from assay.checkpoint.subject import Checkpoint

_COUNTS = re.compile(r"layers|experts|depth|blocks|stages")
MAX_COUNT = 1024
"""Largest number of layers or experts of a config that is built: each costs time, though no memory for weights."""


def meta_expectation(checkpoint: Checkpoint) -> Expectation | None:
    """What transformers would allocate for this config; None if it does not know the type or renames on load."""
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    kind = config.pop("model_type", None)
    if not isinstance(kind, str) or config.get("auto_map") or not _sane(config):
        return None
    try:
        return _expect(checkpoint, kind, config)
    except Exception:
        # Hundreds of model classes read this config, each with errors of its own. What cannot be built says nothing
        # about the tensors.
        return None


def _sane(config: dict[str, Any], depth: int = 0) -> bool:
    """Bounds on what the meta model has to enumerate, nested configs included."""
    for key, value in config.items():
        if isinstance(value, dict):
            if depth > 4 or not _sane(value, depth + 1):
                return False
        elif type(value) is int and _COUNTS.search(key) and abs(value) > MAX_COUNT:
            return False
    return True


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
    optional = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or []]
    tied = set(
        getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or []
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
