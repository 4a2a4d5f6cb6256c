"""A tiny target that needs no download: a small Llama with a byte tokenizer, whose text a head can
learn in seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

TRAIN: dict[str, Any] = {
    "prompts": 96,
    "tokens": 40,
    "steps": 60,
    "batch_tokens": 1024,
    "draft_vocab": 300,
    "intermediate": 96,
    "depth": 3,
    "lr": 3e-3,
}


def make_tokenizer(folder: Path, words: str = "") -> None:
    """A byte tokenizer with 64 tokens of its own: 320 in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {f"<{words}{i}>": 256 + i for i in range(64)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer, raw.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=f"<{words}63>"
    ).save_pretrained(folder)


def make_experts(folder: Path, kind: str, *, layers: int = 2) -> Path:
    """A tiny random model whose layers are mixtures of experts: `mixtral` (2 of 4) or `qwen3_moe`
    (3 of 8, weights as they are).
    """
    make_tokenizer(folder)
    torch.manual_seed(5)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "eos_token_id": 319,
        "bos_token_id": None,
        "initializer_range": 0.3,
    }
    if kind == "mixtral":
        config = transformers.MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2)
    else:
        config = transformers.Qwen3MoeConfig(
            **shape,
            head_dim=8,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            norm_topk_prob=False,
        )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, tensor in model.named_parameters():  # the router of some begins as zeros
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(tensor, std=0.3)
    model.save_pretrained(folder)
    return folder


def make_target(
    folder: Path,
    *,
    hidden: int = 64,
    layers: int = 8,
    words: str = "",
    kind: str = "Llama",
    tied: bool = False,
) -> Path:
    """A small Llama, or Qwen2, with a byte tokenizer; `words` makes another tokenizer of the same
    size.
    """
    make_tokenizer(folder, words)
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=512,
        eos_token_id=319,
        bos_token_id=None,
        tie_word_embeddings=tied,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with (
        torch.no_grad()
    ):  # what follows a token is mostly its neighbour: a rule that a head can learn in seconds
        model.model.embed_tokens.weight.normal_(0, 0.3)
        if not tied:
            model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))
            model.lm_head.weight[319] = 0
        for name, p in model.named_parameters():  # Qwen2's, which begin as zeros
            if name.endswith(".bias"):
                p.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder
