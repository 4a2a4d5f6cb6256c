"""Proof that a tokenizer built from a GGUF file gives the file's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.engines.gguf.library import load_library, load_model
from assay.engines.gguf.spec import GgufSpec
from assay.engines.gguf.tokenizer import encode
from assay.errors import AssayError
from assay.extras import install

PROBE = """The history of Caesar's Roman Empire begins in 27 BC; it wasn't built in a day, they'd say.
def area(radius: float) -> float:
    # indented by four spaces,\tand a tab
    return 3.14159 * radius ** 2    if radius > 0 else 0.0


罗马帝国的历史 東京は日本の首都です Привет, мир! العربية naïve café — “quotes”
🙂🚀👩‍🔬 1234567890 2026-11-29 0x1F 1,000,000.50
<div class="a">x</div>  two,   three,        eight spaces\u00a0and none.
"""  # noqa: E501
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
    """What made the ids of the probe text that a tokenizer was compared with, and how many they
    are.
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
        remedy=install("gguf"),
    )
