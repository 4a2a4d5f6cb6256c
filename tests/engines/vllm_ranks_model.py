"""A tiny Llama that two ranks can share: 4 heads, 2 KV heads, and a vocabulary that no padding
fits.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from assay.engines.scoring import Window

VOCAB, LENGTH = 333, 40
WINDOWS = [Window(i, tuple((7 * i + 5 * j * j + j) % 320 for j in range(LENGTH))) for i in range(4)]


def make_model(folder: Path, heads: int = 4, kv_heads: int = 2, layers: int = 4) -> Path:
    """A checkpoint with a byte tokenizer of 320 entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {f"<{i}>": 256 + i for i in range(64)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer, raw.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<63>").save_pretrained(
        folder
    )
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=32 * heads,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        eos_token_id=319,
        bos_token_id=None,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.5 if "lm_head" in name else 0.08)
    model.save_pretrained(folder)
    return folder
