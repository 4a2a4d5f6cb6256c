"""A head as files that vLLM loads with `{"method": "eagle3", "model": DIR}`: config.json and model.safetensors.

The target's embedding is not stored: vLLM shares it. `training.json` says of which target the head is, by its sizes
and its tokens, so that a head is refused beside another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from assay.engines.scoring import vocabulary_sha256
from assay.errors import AssayError
from assay.lab.heads.model import Head, HeadConfig
from assay.runs import write_atomically

ARCHITECTURE = "LlamaForCausalLMEagle3"


def target_facts(folder: Path) -> dict[str, str]:
    """What names a target: the sizes in its config, and the hash of its tokens and their ids.

    The bytes of tokenizer.json differ between releases of transformers that write the same tokenizer.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = {k: config.get(k) for k in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")}
    try:
        held = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = held["model"]["vocab"]
        tokens = dict(vocab) if isinstance(vocab, dict) else {t: i for i, (t, _) in enumerate(vocab)}
        tokens |= {t["content"]: t["id"] for t in held.get("added_tokens") or ()}
        digest = vocabulary_sha256(tokens)
    except (OSError, ValueError, KeyError, TypeError):
        digest = ""
    return {"sizes": json.dumps(sizes, sort_keys=True), "vocabulary": digest, "name": folder.name}


def write_head(
    folder: Path, head: Head, training: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> int:
    """Write the files; returns the bytes of the weights. AssayError where they cannot be written."""
    c = head.config
    config = {
        "architectures": [ARCHITECTURE], "model_type": "llama", "torch_dtype": str(dtype).removeprefix("torch."),
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim,
        "vocab_size": c.vocab_size, "draft_vocab_size": c.draft_vocab_size, "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta}, "max_position_embeddings": c.max_position_embeddings, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "target_hidden_size": c.hidden_size,
        "num_target_layers": c.target_layers,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(c.aux_layers), "use_aux_hidden_state": True},
    }  # fmt: skip
    tensors = {n: p.detach().to("cpu", dtype).contiguous() for n, p in head.named_parameters()}
    if c.draft_vocab_size < c.vocab_size:  # vLLM 0.32 knows no map where there is nothing to map
        known = torch.zeros(c.vocab_size, dtype=torch.bool)
        known[head.draft_ids.cpu()] = True
        tensors |= {"d2t": head.d2t.cpu().contiguous(), "t2d": known}
    body = save(tensors, metadata={"format": "pt"})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
        write_atomically(folder / "model.safetensors", body)
        write_atomically(folder / "training.json", json.dumps(training, indent=1) + "\n")
    except OSError as error:
        raise cannot_write(folder, error) from error
    return len(body)


def cannot_write(path: Path, error: OSError, after: str = "") -> AssayError:
    """The error for a disk that is full, or a folder that cannot be written."""
    return AssayError(
        f"{path} cannot be written: {error.strerror or error}{after}",
        finding_id="speculation.head_unwritable",
        remedy="make room or name another folder; the same command goes on from its last checkpoint",
    )


def read_head(folder: Path, target: Path | None = None) -> Head:
    """The head in `folder`, in float32. AssayError where it is none of this layout, incomplete, or of another target."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError) as error:
        raise _no_head(folder, f"cannot be read: {error}") from error
    except Exception as error:  # what safetensors raises for a damaged file is a class of its own
        raise _no_head(folder, f"holds no readable weights: {error}") from error
    if config.get("architectures") != [ARCHITECTURE]:
        raise _no_head(folder, f"is no EAGLE-3 head of Llama's layout, but {config.get('architectures')}")
    eagle = config.get("eagle_config") or {}
    fields = {n: config[n] for n in HeadConfig.__dataclass_fields__ if n in config}
    aux = tuple(eagle.get("eagle_aux_hidden_state_layer_ids") or ())
    if target is not None:
        _same_target(folder, config, target)
    try:
        head = Head(
            HeadConfig(**fields, aux_layers=aux, target_layers=config["num_target_layers"]),
            tensors.pop("d2t", torch.tensor(0)) + torch.arange(config["draft_vocab_size"]),
        )
        tensors.pop("t2d", None)
        missing, extra = head.load_state_dict({n: t.float() for n, t in tensors.items()}, strict=False)
    except (KeyError, TypeError, RuntimeError) as error:
        raise _no_head(
            folder, f"does not fit its own config: {' '.join(str(error).split())[:200]}"
        ) from error
    if lost := [n for n in missing if n != "d2t"]:
        raise _no_head(folder, f"has no {lost[0]}" + (f" and {len(lost) - 1} more" if lost[1:] else ""))
    if extra:
        raise _no_head(folder, f"has a tensor that the layout does not know: {extra[0]}")
    return head


def _same_target(folder: Path, config: Mapping[str, Any], target: Path) -> None:
    own = json.loads((target / "config.json").read_text(encoding="utf-8"))
    for name, mine, theirs in (
        ("vocab_size", config.get("vocab_size"), own.get("vocab_size")),
        ("hidden_size", config.get("target_hidden_size"), own.get("hidden_size")),
        ("num_hidden_layers", config.get("num_target_layers"), own.get("num_hidden_layers")),
    ):
        if mine and theirs and mine != theirs:
            raise _no_head(folder, f"is for a target with {name} {mine}, and {target.name} has {theirs}")
    try:
        trained = json.loads((folder / "training.json").read_text(encoding="utf-8"))["target"]
    except (OSError, ValueError, KeyError):
        return
    own_vocabulary = target_facts(target)["vocabulary"]
    if own_vocabulary and trained.get("vocabulary") not in (None, "", own_vocabulary):
        raise _no_head(
            folder, f"was trained with the tokenizer of {trained['name']}, and {target.name} has another"
        )


def _no_head(folder: Path, why: str) -> AssayError:
    return AssayError(
        f"the head {folder} {why}",
        finding_id="speculation.head_mismatch",
        remedy="name the head of this target, or make one: assay heads train MODEL --out DIR",
    )
