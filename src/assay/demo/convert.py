"""A GGUF file as an ordinary checkpoint: safetensors in bf16, tokenizer, chat template, generation
config.
"""

from __future__ import annotations

from pathlib import Path

from assay.demo.tokenizer_proof import prove_tokenizer
from assay.errors import AssayError
from assay.extras import install


def convert(gguf: Path, folder: Path, *, turn_end: str | None = None) -> None:
    """Write the model of `gguf` to `folder`, its quantised weights as bf16 values.

    With `turn_end` a chat ends with that token, and generation with it or with the end of text that
    the GGUF names. AssayError where the tokenizer, loaded again, is not the file's own.
    """
    try:
        import transformers

        from assay.engines.hf.loading import quiet

        with quiet():
            _convert(gguf, folder, turn_end)
            saved = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ImportError as error:
        raise _missing(error) from error
    prove_tokenizer(saved, gguf)


def _convert(gguf: Path, folder: Path, turn_end: str | None) -> None:
    import torch
    import transformers

    place = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "trust_remote_code": False,
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    model = model.to(torch.bfloat16)
    ends = [tokenizer.eos_token_id]
    if turn_end is not None:
        tokenizer.eos_token = turn_end
        ends = list(dict.fromkeys([tokenizer.eos_token_id, *ends]))
        model.config.eos_token_id = tokenizer.eos_token_id
    # The weights are plain numbers now; what says otherwise would make a loader look for quantised
    # ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.config.name_or_path = ""
    model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


def _missing(error: ImportError) -> AssayError:
    return AssayError(
        "building a model from GGUF needs packages that are not installed:"
        f" {str(error).strip().splitlines()[0]}",
        finding_id="server.missing_package",
        remedy=install("demo"),
    )
