"""Turn a GGUF file into an ordinary checkpoint: safetensors in bf16, tokenizer, chat template, generation config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from assay.errors import AssayError


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of `gguf` to `folder`, its quantised weights as bf16 values."""
    model, tokenizer = _load(gguf)
    # The weights are plain numbers now; what says otherwise would make a loader look for quantised ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.config.name_or_path = ""
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


def _load(gguf: Path) -> tuple[Any, Any]:
    try:
        import torch
        import transformers
        from transformers.utils import logging
    except ImportError as error:
        raise _missing(error) from error
    logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
        model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    except ImportError as error:
        raise _missing(error) from error
    finally:
        logging.enable_progress_bar()
    return model.to(torch.bfloat16), tokenizer


def _missing(error: ImportError) -> AssayError:
    return AssayError(
        f"building a model from GGUF needs packages that are not installed: {str(error).strip().splitlines()[0]}",
        finding_id="server.missing_package",
        remedy="install assay with its extra demo: pip install '.[demo]' in its checkout",
    )
