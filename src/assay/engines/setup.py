"""How a model is set up, as facts that two engines can be compared by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PLAIN = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "hidden_act",
    "hidden_activation",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_bias",
    "partial_rotary_factor",
)


def setup_facts(config: Any) -> dict[str, Any]:
    """Plain JSON of a transformers configuration: RoPE, sliding window, soft caps, norms, sizes;
    absent ones left out.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {name: getattr(text, name, None) for name in _PLAIN}
    found["rope"] = _rope(text)
    if getattr(text, "use_sliding_window", True):
        found["sliding_window"] = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    # A list of layers that are all alike is what its absence says too.
    found["layer_types"] = list(kinds) if kinds and set(kinds) != {"full_attention"} else None
    return {name: _plain(value) for name, value in sorted(found.items()) if value is not None}


def setup_differences(
    reference: Mapping[str, Any], candidate: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """What both report and do not agree on."""
    return {
        name: (reference[name], candidate[name])
        for name in reference
        if name in candidate and reference[name] != candidate[name]
    }


def _rope(text: Any) -> dict[str, Any] | None:
    """One form of what releases of transformers keep as `rope_parameters`, or as `rope_theta` and
    `rope_scaling`.
    """
    given = getattr(text, "rope_parameters", None)
    rope = dict(given) if given else {**(getattr(text, "rope_scaling", None) or {})}
    if "rope_theta" not in rope and not any(isinstance(v, Mapping) for v in rope.values()):
        rope["rope_theta"] = getattr(text, "rope_theta", None)
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if rope.get("rope_type", "default") == "default":
        rope.pop("rope_type", None)
    rope = {k: v for k, v in rope.items() if v is not None}
    return rope or None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    # 10000 and 10000.0 are one number.
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
