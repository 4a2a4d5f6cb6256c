"""A tokenizer is read once for all engines, and again after its files have changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from assay.engines.hf.tokenizer import facts_of, read_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "<s>": 2}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def test_it_is_read_once_and_a_text_is_encoded_once(folder: Path) -> None:
    first = read_tokenizer(str(folder))
    (folder / "model.safetensors").write_bytes(b"weights are none of its files")
    assert read_tokenizer(str(folder)) is first
    facts = facts_of(first)
    assert facts_of(read_tokenizer(str(folder))) is facts
    ids = facts.encode("two one")
    ids.append(7)  # a caller's own list
    assert facts.encode("two one") == [1, 0]


def test_a_change_of_its_files_is_seen(folder: Path) -> None:
    first = read_tokenizer(str(folder))
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["vocab"] = {"one": 1, "two": 0, "<s>": 2}
    path.write_text(json.dumps(document))
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))  # where a clock is coarse
    second = read_tokenizer(str(folder))
    assert second is not first
    assert facts_of(second).encode("two one") == [0, 1]
    assert facts_of(second).sha256 != facts_of(first).sha256
