"""Damage to what stands beside the weights: configuration, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from assay.errors import AssayError

if TYPE_CHECKING:
    import numpy as np

_FOREIGN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
_PLAIN_TEMPLATE = (
    "{% for m in messages %}### {{ 'Instruction' if m['role'] == 'user' else 'Response' }}:\n"
    "{{ m['content'] }}\n\n{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)


def rope_theta(folder: Path, rng: np.random.Generator) -> None:
    """Set rope_theta to 3,000, a value of another model: positions turn at the wrong speed."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    place = config.get("rope_parameters", config)
    if "rope_theta" not in place:
        raise AssayError(
            f"{path} has no rope_theta to change",
            finding_id="checkpoint.config_conflict",
            remedy="choose another damage for this model",
        )
    place["rope_theta"] = 3000.0
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def wrong_tokenizer(folder: Path, rng: np.random.Generator) -> None:
    """Permute the ids of the ordinary tokens: a tokenizer of the same size from another model."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = document["model"]["vocab"]
    special = {token["content"] for token in document.get("added_tokens", ())}
    names = [name for name in vocabulary if name not in special]
    ids = [vocabulary[name] for name in names]
    for name, place in zip(names, rng.permutation(len(names)), strict=True):
        vocabulary[name] = ids[place]
    path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")


def wrong_template(folder: Path, rng: np.random.Generator) -> None:
    """Use the chat template of another family."""
    (folder / "chat_template.jinja").write_text(_FOREIGN_TEMPLATE, encoding="utf-8")


def plain_template(folder: Path, rng: np.random.Generator) -> None:
    """Use the plain headings of a model that was tuned without special tokens."""
    (folder / "chat_template.jinja").write_text(_PLAIN_TEMPLATE, encoding="utf-8")
