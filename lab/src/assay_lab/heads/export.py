"""Heads as files that vLLM loads.

An EAGLE-3 head is config.json and model.safetensors, for `{"method": "eagle3", "model": DIR}`; the
target's embedding is not stored, as vLLM shares it. An MTP layer is served from its target's own
checkpoint, so DIR becomes that: the target's files as hard links (copies on another file system),
mtp.safetensors with the layer alone, an index over both, and a config that names MiMo's
architecture, for `vllm serve DIR` with `{"method": "mtp"}`. `training.json` says of which target a
head is, by its sizes and its tokens, so that a head is refused beside another.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from assay.engines.scoring import vocabulary_sha256
from assay.errors import AssayError
from assay.runs import write_atomically
from assay_lab.heads.model import AnyHead, Head, HeadConfig, MtpHead

ARCHITECTURE, MTP_ARCHITECTURE = "LlamaForCausalLMEagle3", "MiMoForCausalLM"
LAYER, MTP_FILE = "model.mtp_layers.0.", "mtp.safetensors"


def target_facts(folder: Path) -> dict[str, str]:
    """What names a target: the sizes in its config, and the hash of its tokens and their ids.

    The bytes of tokenizer.json differ between releases of transformers that write the same
    tokenizer.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = {
        k: config.get(k) for k in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    }
    try:
        held = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = held["model"]["vocab"]
        tokens = (
            dict(vocab) if isinstance(vocab, dict) else {t: i for i, (t, _) in enumerate(vocab)}
        )
        tokens |= {t["content"]: t["id"] for t in held.get("added_tokens") or ()}
        digest = vocabulary_sha256(tokens)
    except (OSError, ValueError, KeyError, TypeError):
        digest = ""
    return {"sizes": json.dumps(sizes, sort_keys=True), "vocabulary": digest, "name": folder.name}


def write_head(
    folder: Path,
    head: AnyHead,
    training: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    target: Path | None = None,
) -> int:
    """Write the files; returns the bytes of the head's weights. AssayError where they cannot be
    written.

    `target` is the folder of the target's checkpoint, which becomes part of an MTP head's.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(head, MtpHead):
            assert target is not None
            body = _write_mtp(folder, head, target, dtype)
        else:
            body = _write_eagle3(folder, head, dtype)
        write_atomically(folder / "training.json", json.dumps(training, indent=1) + "\n")
    except OSError as error:
        raise cannot_write(folder, error) from error
    return len(body)


def _write_eagle3(folder: Path, head: Head, dtype: torch.dtype) -> bytes:
    c = head.config
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "max_position_embeddings": c.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "target_hidden_size": c.hidden_size,
        "num_target_layers": c.target_layers,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(c.aux_layers),
            "use_aux_hidden_state": True,
        },
    }
    tensors = {n: p.detach().to("cpu", dtype).contiguous() for n, p in head.named_parameters()}
    if c.draft_vocab_size < c.vocab_size:  # vLLM 0.32 knows no map where there is nothing to map
        known = torch.zeros(c.vocab_size, dtype=torch.bool)
        known[head.draft_ids.cpu()] = True
        tensors |= {"d2t": head.d2t.cpu().contiguous(), "t2d": known}
    body: bytes = save(tensors, metadata={"format": "pt"})
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_atomically(folder / "model.safetensors", body)
    return body


def _write_mtp(folder: Path, head: MtpHead, target: Path, dtype: torch.dtype) -> bytes:
    """The target's checkpoint with the layer, as one of MiMo's.

    transformers and vLLM know no model type `mimo` without code from the hub, and vLLM goes by the
    architecture; so the type stays Qwen2's, and transformers loads the folder as the target.
    """
    tensors = {
        f"{LAYER}{_stored_name(n)}": p.detach().to("cpu", dtype).contiguous()
        for n, p in head.named_parameters()
    }
    body: bytes = save(tensors, metadata={"format": "pt"})
    index: dict[str, str] = {}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    for file in sorted(p for p in target.iterdir() if p.suffix in _PARTS and p.name not in _OWN):
        place = folder / file.name
        if place.resolve() != file.resolve():
            _linked(file.resolve(), place)
        if file.suffix == ".safetensors":
            with safe_open(place, framework="pt") as held:
                index |= dict.fromkeys(held.keys(), file.name)
            with place.open("rb") as begin:  # eight bytes say how long the header is
                size += place.stat().st_size - 8 - int.from_bytes(begin.read(8), "little")
    index |= dict.fromkeys(tensors, MTP_FILE)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": [MTP_ARCHITECTURE], "num_nextn_predict_layers": 1}
    whole = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
    write_atomically(folder / MTP_FILE, body)
    write_atomically(folder / "model.safetensors.index.json", json.dumps(whole, indent=1) + "\n")
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
    return body


_PARTS = (".safetensors", ".json", ".jinja", ".txt", ".model")
_OWN = ("config.json", "training.json", "model.safetensors.index.json", MTP_FILE)
"""Files of an MTP head's folder that are the target's, by suffix, and those that are its own."""


def _linked(file: Path, place: Path) -> None:
    partial = place.with_name(place.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        os.link(file, partial)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, partial)
    partial.replace(place)


def _stored_name(name: str) -> str:
    return name.removeprefix("midlayer.")


def cannot_write(path: Path, error: OSError, after: str = "") -> AssayError:
    """The error for a disk that is full, or a folder that cannot be written."""
    return AssayError(
        f"{path} cannot be written: {error.strerror or error}{after}",
        finding_id="speculation.head_unwritable",
        remedy=(
            "make room or name another folder; the same command goes on from its last checkpoint"
        ),
    )


def read_head(folder: Path, target: Path | None = None) -> AnyHead:
    """The head in `folder`, in float32. AssayError where it is of no known layout, incomplete, or
    of another target.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        mtp = config.get("architectures") == [MTP_ARCHITECTURE]
        tensors = load_file(folder / (MTP_FILE if mtp else "model.safetensors"))
    except (OSError, ValueError) as error:
        said = (
            f"{error.filename}: {error.strerror}"
            if isinstance(error, OSError) and error.filename
            else error
        )
        raise _no_head(folder, f"cannot be read: {said}") from error
    except Exception as error:  # what safetensors raises for a damaged file is a class of its own
        raise _no_head(folder, f"holds no readable weights: {error}") from error
    if not mtp and config.get("architectures") != [ARCHITECTURE]:
        raise _no_head(
            folder,
            "is neither an EAGLE-3 head of Llama's layout nor MiMo's MTP, but"
            f" {config.get('architectures')}",
        )
    if target is not None:
        _same_target(folder, config, target)
    try:
        head = _empty_mtp(config) if mtp else _empty_eagle3(config, tensors)
        own = {
            n: tensors.pop(f"{LAYER}{_stored_name(n)}" if mtp else n, None)
            for n in dict(head.named_parameters())
        }
        head.load_state_dict({n: t.float() for n, t in own.items() if t is not None}, strict=False)
    except (KeyError, TypeError, RuntimeError) as error:
        raise _no_head(
            folder, f"does not fit its own config: {' '.join(str(error).split())[:200]}"
        ) from error
    if lost := [n for n, t in own.items() if t is None]:
        raise _no_head(
            folder, f"has no {lost[0]}" + (f" and {len(lost) - 1} more" if lost[1:] else "")
        )
    if tensors:
        raise _no_head(folder, f"has a tensor that the layout does not know: {next(iter(tensors))}")
    return head


def _empty_eagle3(config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Head:
    fields = {n: config[n] for n in HeadConfig.__dataclass_fields__ if n in config}
    aux = tuple((config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ())
    tensors.pop("t2d", None)
    return Head(
        HeadConfig(**fields, aux_layers=aux, target_layers=config["num_target_layers"]),
        tensors.pop("d2t", torch.tensor(0)) + torch.arange(config["draft_vocab_size"]),
    )


def _empty_mtp(config: Mapping[str, Any]) -> MtpHead:
    fields = {n: config[n] for n in HeadConfig.__dataclass_fields__ if n in config}
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    theta = (config.get("rope_parameters") or {}).get("rope_theta") or config.get(
        "rope_theta", 10_000.0
    )
    fields |= {
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "draft_vocab_size": config["vocab_size"],
        "aux_layers": (layers,),
        "target_layers": layers,
        "rope_theta": float(theta),
        "kind": "mtp",
    }
    return MtpHead(HeadConfig(**fields))


def _same_target(folder: Path, config: Mapping[str, Any], target: Path) -> None:
    own = json.loads((target / "config.json").read_text(encoding="utf-8"))
    for name, mine, theirs in (
        ("vocab_size", config.get("vocab_size"), own.get("vocab_size")),
        (
            "hidden_size",
            config.get("target_hidden_size", config["hidden_size"]),
            own.get("hidden_size"),
        ),
        (
            "num_hidden_layers",
            config.get("num_target_layers", config["num_hidden_layers"]),
            own.get("num_hidden_layers"),
        ),
    ):
        if mine and theirs and mine != theirs:
            raise _no_head(
                folder, f"is for a target with {name} {mine}, and {target.name} has {theirs}"
            )
    try:
        trained = json.loads((folder / "training.json").read_text(encoding="utf-8"))["target"]
    except (OSError, ValueError, KeyError):
        return
    own_vocabulary = target_facts(target)["vocabulary"]
    if own_vocabulary and trained.get("vocabulary") not in (None, "", own_vocabulary):
        raise _no_head(
            folder,
            f"was trained with the tokenizer of {trained['name']}, and {target.name} has another",
        )


def _no_head(folder: Path, why: str) -> AssayError:
    return AssayError(
        f"the head {folder} {why}",
        finding_id="speculation.head_mismatch",
        remedy="name the head of this target, or make one: assay heads train MODEL --out DIR",
    )
