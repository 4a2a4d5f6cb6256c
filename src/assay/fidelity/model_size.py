"""The size of a model, read from the headers of its checkpoint."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


_TYPES = {name: _FLOATS[kind] for kind, name in _NAMES.items()}


@dataclass(frozen=True)
class Checkpoint:
    """What the headers of a checkpoint say: bytes as they are stored and as they are held, `size`
    those of one number.
    """

    config: Any
    size: int
    stored: int
    weights: int
    head: int
    converted: bool
    """Whether it is held in another type than it is stored in."""

    def token_bytes(self, cache_dtype: str) -> int:
        """Bytes of keys and values of one token in all layers."""
        heads = getattr(self.config, "num_attention_heads", None)
        if not heads:
            return 0
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        groups = getattr(self.config, "num_key_value_heads", None) or heads
        size = self.size if cache_dtype == "auto" else 1 if cache_dtype.startswith("fp8") else 2
        return int(2 * groups * width * self.config.num_hidden_layers * size)


def read_checkpoint(model: str, dtype: str = "auto") -> Checkpoint | None:
    """Sizes of a checkpoint that transformers would load, from `config.json` and the safetensors
    headers; None where they are not here or cannot be read (opening it says why)."""
    from safetensors import SafetensorError, safe_open

    folder = Path(model).expanduser() if Path(model).expanduser().is_dir() else _cached(model)
    try:
        whole = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else None
        if folder is None or not isinstance(whole, dict):
            return None
        config = SimpleNamespace(**{**whole, **(whole.get("text_config") or {})})
        named = whole.get("dtype") or whole.get("torch_dtype") or getattr(config, "dtype", None)
        stored = weights = head = 0
        wanted = str((named or "") if dtype == "auto" else dtype).removeprefix("torch.")
        size = _TYPES.get(wanted, 0)
        converted = False
        tied = bool(getattr(config, "tie_word_embeddings", False))
        for file in _weight_files(folder):
            with safe_open(file, "np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    if tied and name.endswith("lm_head.weight"):
                        continue
                    part = tensors.get_slice(name)
                    kind, count = part.get_dtype(), prod(part.get_shape())
                    own = (
                        count * _FLOATS[kind] if kind in _FLOATS else (count * _bits(kind) + 7) // 8
                    )
                    if (
                        not size and kind in _FLOATS
                    ):  # a configuration that names no type: that of the weights
                        size, wanted = _FLOATS[kind], _NAMES[kind]
                    held = count * size if kind in _FLOATS else own
                    converted |= kind in _FLOATS and _NAMES.get(kind) != wanted
                    stored, weights = stored + own, weights + held
                    if name.endswith(("lm_head.weight", "embed_tokens.weight", "wte.weight")):
                        head = held
        return Checkpoint(config, size or 2, stored, weights, head, converted) if weights else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError):
        return None


def _weight_files(folder: Path) -> list[Path]:
    """The files that are loaded: `model.safetensors`, else those of the index, else all; a copy in
    another layout may lie beside.
    """
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.is_file():
        return [one]
    if index.is_file():
        return [
            folder / name
            for name in sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        ]
    return sorted(folder.glob("*.safetensors"))


def _bits(kind: str) -> int:
    """Bits of one number of a type that is no plain float: `I32` has 32, `F8_E4M3` 8."""
    found = re.match(r"[A-Z]+(\d+)", kind)
    return _BITS.get(kind, int(found[1]) if found else 8)


def _cached(model: str) -> Path | None:
    """The folder of a model of the Hub in its cache on this machine."""
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(model, "config.json")
    except ValueError:
        return None
    return Path(found).parent if isinstance(found, str) else None
