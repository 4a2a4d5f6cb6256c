"""Compare the promised tensors with the stored ones: names and shapes."""

from __future__ import annotations

from collections.abc import Iterator

from assay.checkpoint.comparison import Comparison, Wrong
from assay.checkpoint.families import FAMILIES
from assay.checkpoint.findings import SHOWN, found, plural, some
from assay.checkpoint.subject import Checkpoint
from assay.checkpoint.tensors import layer_index
from assay.verdict import Finding


def check_structure(checkpoint: Checkpoint, compared: Comparison) -> Iterator[Finding]:
    """Findings on names, missing tensors and wrong shapes."""
    yield from _names(checkpoint)
    if compared.missing:
        yield _missing(list(compared.missing), compared.origin)
    if compared.wrong:
        yield _misshapen(compared.wrong)


def _misshapen(wrong: Wrong) -> Finding:
    name, (stored, wanted) = next(iter(wrong.items()))
    title = f"{plural(len(wrong), 'tensor')} of another shape than the config says, first {name}: "
    title += f"{list(stored)} stored, {list(wanted)} expected"
    evidence = {n: {"stored": s, "expected": w} for n, (s, w) in list(wrong.items())[:SHOWN]}
    causes = [
        "config.json belongs to another size of this model",
        "the tensor was resized without the config",
    ]
    return found("tensor_shape", title, causes=causes, tensors=evidence, count=len(wrong))


def _names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Tensors named as another architecture would name them, which no engine maps into this one.

    vLLM 0.32 maps `model.language_model.` for the text-only forms of Qwen3.5 and Gemma 4, and for
    no others.
    """
    config, prefix = checkpoint.config, checkpoint.prefix
    names = config.get("architectures") or []
    text_only = (
        names and all(n.endswith("ForCausalLM") for n in names) and checkpoint.text_config is config
    )
    if (
        not text_only
        or config.get("auto_map")
        or config.get("vision_config")
        or config.get("quantization")
    ):
        return
    if prefix == "model.language_model." and checkpoint.model_type.startswith(
        ("qwen3_5", "gemma4")
    ):
        return
    known = checkpoint.model_type in FAMILIES
    if "language_model." in prefix or (known and prefix not in {"", "model."}):
        title = (
            f"config.json says {names[0]}, a text-only model, but the tensors are named {prefix}*"
        )
        causes = [
            "the language model was taken out of a multimodal one, and only the config was changed",
            "the names were left as a training wrapper gave them",
        ]
        detail = (
            "No engine maps these names into that architecture: it stops, or leaves all weights"
            " random."
        )
        remedies = ["rename the tensors to model.*, or restore the multimodal config.json"]
        yield found(
            "config_conflict", title, detail=detail, causes=causes, remedies=remedies, prefix=prefix
        )


def _missing(missing: list[str], origin: str) -> Finding:
    layers = sorted({i for n in missing if (i := layer_index(n)) is not None})
    causes = ["a shard is missing or was cut", "the checkpoint was saved without them"]
    title = f"{plural(len(missing), 'tensor')} that {origin} promises not stored: {some(missing)}"
    if len(missing) == 1 and missing[0].endswith("lm_head.weight"):
        title = "lm_head.weight is not stored, and tie_word_embeddings is not true"
        causes = [
            "tie_word_embeddings was lost from config.json; then the head is the embedding",
            "the head was dropped; a loader fills it with random numbers",
        ]
    remedies = ["download the checkpoint again, or correct config.json"]
    return found(
        "tensor_missing",
        title,
        causes=causes,
        remedies=remedies,
        tensors=missing[:SHOWN],
        count=len(missing),
        layers=layers[:SHOWN],
    )
