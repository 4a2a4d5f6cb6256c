"""Quantise SmolLM2 with one real library and save it: run inside that library's own environment.

    python quantisers.py KIND MODEL FOLDER

Called by `quantised_checkpoints.py`. Everything is round-to-nearest: what counts here are the
files, not the answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

GROUP = 64
"""SmolLM2's hidden size of 576 is no multiple of the usual 128."""


def auto_round(model: str, folder: Path, form: str, scheme: str = "W4A16", **rest: object) -> None:
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = {
        "iters": 0,
        "nsamples": 4,
        "seqlen": 64,
        "disable_opt_rtn": True,
        "device_map": "cpu",
    }
    quantiser = AutoRound(model, tokenizer, scheme=scheme, **settings, **rest)
    quantiser.quantize_and_save(str(folder), format=form)
    if not (
        folder / "config.json"
    ).exists():  # some formats are put into a folder named after model and scheme
        (inner,) = (path.parent for path in folder.glob("*/config.json"))
        for file in inner.iterdir():
            file.rename(folder / file.name)
        inner.rmdir()


def transformers_save(model: str, folder: Path, config: object, **rest: object) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    loaded.save_pretrained(folder, **rest)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def torchao(model: str, folder: Path, recipe: str) -> None:
    import torchao.quantization as ao
    from transformers import TorchAoConfig

    recipes: dict[str, Callable[[], object]] = {
        "int8": lambda: ao.Int8WeightOnlyConfig(),
        "int4": lambda: ao.IntxWeightOnlyConfig(
            weight_dtype=__import__("torch").int4,
            granularity=__import__("torchao").quantization.PerGroup(GROUP),
        ),
        "float8": lambda: ao.Float8WeightOnlyConfig(),
    }
    transformers_save(model, folder, TorchAoConfig(recipes[recipe]()))


def bitsandbytes(model: str, folder: Path, bits: int, double: bool = False) -> None:
    import torch
    from transformers import BitsAndBytesConfig

    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    transformers_save(model, folder, four if bits == 4 else BitsAndBytesConfig(load_in_8bit=True))


def hqq(model: str, folder: Path) -> None:
    import torch
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    # safetensors refuses tensors that share memory
    loaded.lm_head.weight = torch.nn.Parameter(loaded.lm_head.weight.detach().clone())
    loaded.config.tie_word_embeddings = False
    AutoHQQHFModel.quantize_model(
        loaded,
        quant_config=BaseQuantizeConfig(nbits=4, group_size=GROUP),
        compute_dtype=torch.bfloat16,
        device="cpu",
    )
    AutoHQQHFModel.save_to_safetensors(loaded, str(folder))
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def compressor(model: str, folder: Path, scheme: str, **rest: object) -> None:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"], **rest)
    oneshot(model=loaded, recipe=recipe)
    loaded.save_pretrained(folder, save_compressed=True)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def compressor_groups(
    model: str,
    folder: Path,
    bits: int,
    symmetric: bool = True,
    ignore: tuple[str, ...] = ("lm_head",),
) -> None:
    """Weight-only integers in groups that fit SmolLM2; the ready-made W4A16 scheme wants groups of
    128.
    """
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": GROUP,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    oneshot(model=loaded, recipe=QuantizationModifier(config_groups=groups, ignore=list(ignore)))
    loaded.save_pretrained(folder, save_compressed=True)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


_MIXED = {
    "model.layers.0.mlp.down_proj": {"bits": 8},
    "model.layers.1.self_attn.o_proj": {"bits": 16},
}

KINDS: dict[str, Callable[[str, Path], None]] = {
    "auto_round-w4": lambda m, f: auto_round(m, f, "auto_round", group_size=GROUP),
    "auto_round-w4-awq": lambda m, f: auto_round(m, f, "auto_round:auto_awq", group_size=GROUP),
    "auto_round-w3": lambda m, f: auto_round(m, f, "auto_round", bits=3, group_size=GROUP),
    "auto_round-w8": lambda m, f: auto_round(m, f, "auto_round", bits=8, group_size=GROUP),
    "auto_round-w2-asym": lambda m, f: auto_round(
        m, f, "auto_round", bits=2, group_size=GROUP, sym=False
    ),
    "auto_round-mixed": lambda m, f: auto_round(
        m, f, "auto_round", group_size=GROUP, layer_config=_MIXED
    ),
    "auto_round-mxfp4": lambda m, f: auto_round(m, f, "auto_round", scheme="MXFP4"),
    "auto_round-fp8": lambda m, f: auto_round(m, f, "auto_round", scheme="FP8_STATIC"),
    "auto_round-nvfp4-llmc": lambda m, f: auto_round(m, f, "llm_compressor", scheme="NVFP4"),
    "auto_gptq-w4": lambda m, f: auto_round(m, f, "auto_gptq", group_size=GROUP),
    "auto_awq-w4": lambda m, f: auto_round(m, f, "auto_awq", group_size=GROUP, sym=False),
    "torchao-int8": lambda m, f: torchao(m, f, "int8"),
    "torchao-int4": lambda m, f: torchao(m, f, "int4"),
    "torchao-float8": lambda m, f: torchao(m, f, "float8"),
    "bitsandbytes-nf4": lambda m, f: bitsandbytes(m, f, 4),
    "bitsandbytes-nf4-double": lambda m, f: bitsandbytes(m, f, 4, double=True),
    "bitsandbytes-int8": lambda m, f: bitsandbytes(m, f, 8),
    "hqq": hqq,
    "llmcompressor-fp8": lambda m, f: compressor(m, f, "FP8_DYNAMIC"),
    "llmcompressor-fp8-block": lambda m, f: compressor(m, f, "FP8_BLOCK"),
    "llmcompressor-w8a8": lambda m, f: compressor(m, f, "INT8"),
    "llmcompressor-nvfp4a16": lambda m, f: compressor(m, f, "NVFP4A16"),
    "llmcompressor-mxfp4": lambda m, f: compressor(m, f, "MXFP4A16"),
    "llmcompressor-w4a16": lambda m, f: compressor_groups(m, f, 4),
    "llmcompressor-w4a16-asym": lambda m, f: compressor_groups(m, f, 4, symmetric=False),
    "llmcompressor-w8a16-ignore": lambda m, f: compressor_groups(
        m, f, 8, ignore=("lm_head", "re:.*o_proj$")
    ),
}


if __name__ == "__main__":
    KINDS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
