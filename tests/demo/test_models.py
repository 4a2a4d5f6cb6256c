"""The real models: ordinary checkpoints that say what they should, and the natural fault of one of
them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from assay.demo.models import build_gemma3
from assay.engines import Request
from assay.engines.hf.engine import HfEngine

pytestmark = pytest.mark.engine


def test_smollm2_is_an_ordinary_checkpoint(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["rope_parameters"]["rope_theta"] == 100_000
    assert "quantization_config" not in config
    generation = json.loads((smollm2 / "generation_config.json").read_text())
    tokenizer = json.loads((smollm2 / "tokenizer.json").read_text())
    # A server stops a chat at this token.
    assert generation["eos_token_id"] == tokenizer["model"]["vocab"]["<|im_end|>"]
    assert "<|im_start|>" in (smollm2 / "chat_template.jinja").read_text()
    assert (smollm2 / "model.safetensors").stat().st_size > 250e6


@pytest.mark.slow
def test_gemma_without_bos_stutters_and_with_it_writes(gemma3: Path) -> None:
    asked = [
        Request(prompt=text, max_tokens=40)
        for text in ("The history of the Roman Empire begins", "Water is a chemical substance that")
    ]
    with HfEngine.load(f"hf:{gemma3}") as sane:
        assert sane.score("Rome").token_ids[0] == 2  # type: ignore[index]
        good = [reply.content for reply in sane.generate_batch(asked)]
    with HfEngine.load(f"hf:{build_gemma3(add_bos=False)}") as stuttering:
        assert stuttering.score("Rome").token_ids[0] != 2  # type: ignore[index]
        bad = [reply.content for reply in stuttering.generate_batch(asked)]
    for with_bos, without in zip(good, bad, strict=True):
        assert len(set(with_bos.split())) > 12
        assert len(set(without.split())) < len(set(with_bos.split())) / 2
