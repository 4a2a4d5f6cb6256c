"""A converted tokenizer is held against the file it was made from: equal ones pass, one without
merges is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from assay.demo import tokenizer_proof
from assay.demo.tokenizer_proof import PROBE, prove_tokenizer
from assay.errors import AssayError
from assay.runs import cache_dir

TEXTS = [
    PROBE,
    "the cat sat on the mat, and the other cat sat there too " * 3,
    "def f(x):\n    return x\n" * 3,
]
QWEN2 = tokenizer_proof._QWEN2


@pytest.fixture(autouse=True)
def without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise AssayError("gguf: needs llama-cpp-python", finding_id="fidelity.engine_missing")

    monkeypatch.setattr(tokenizer_proof, "load_library", missing)


def trained(pattern: str) -> Any:
    """A byte-level BPE tokenizer of 600 pieces, as converters build it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def write(path: Path, model: str, pieces: list[str], **facts: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(pieces)
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A GGUF file with a tokenizer, and the folder into which the same has been converted."""
    folder = tmp_path_factory.mktemp("converted")
    tokenizer = trained(QWEN2)
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    file = write(
        folder / "model.gguf",
        "gpt2",
        pieces,
        tokenizer_pre="qwen2",
        token_merges=[" ".join(pair) for pair in model["merges"]],
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return file, folder


def loaded(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def test_the_same_tokenizer_passes(converted: tuple[Path, Path]) -> None:
    file, folder = converted
    proof = prove_tokenizer(loaded(folder), file)
    assert proof.by == "its vocabulary"
    assert proof.tokens == len(loaded(folder)(PROBE)["input_ids"]) < len(PROBE)
    assert proof.chars_per_token == pytest.approx(len(PROBE) / proof.tokens)


def change(folder: Path, to: Path, alter: Any) -> Any:
    for file in folder.glob("*.json"):
        (to / file.name).write_bytes(file.read_bytes())
    document = json.loads((to / "tokenizer.json").read_text())
    alter(document)
    (to / "tokenizer.json").write_text(json.dumps(document))
    return loaded(to)


def test_a_tokenizer_that_was_saved_without_merges_is_refused(
    converted: tuple[Path, Path], tmp_path: Path
) -> None:
    file, folder = converted
    bare = change(folder, tmp_path, lambda document: document["model"].update(merges=[]))
    with pytest.raises(
        AssayError, match=r"converted from model\.gguf is not the file's own"
    ) as caught:
        prove_tokenizer(bare, file)
    assert caught.value.finding_id == "checkpoint.tokenizer_conflict"
    assert caught.value.evidence["tokens"] > 1.5 * caught.value.evidence["expected"]


@pytest.mark.parametrize(
    "pattern",
    [r"\p{N}+|\p{L}+|[^\p{L}\p{N}]", QWEN2.replace(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{L}+")],
    ids=["another", "words without their space"],
)
def test_another_pre_tokenizer_is_refused(
    converted: tuple[Path, Path], tmp_path: Path, pattern: str
) -> None:
    file, folder = converted

    def alter(document: Any) -> None:
        document["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}

    with pytest.raises(AssayError, match="is not the file's own"):
        prove_tokenizer(change(folder, tmp_path, alter), file)


def test_sentencepiece_merges_by_score_with_the_users_own_tokens_first(tmp_path: Path) -> None:
    """By hand: `ab` scores above `bc`, `▁▁` is the user's own, é is made of bytes."""
    pieces = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "bc",
        "ab",
        "abc",
        "▁▁",
        "▁a",
    ]
    scores = [0.0] * 257 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, 0.0, -4.0]
    kinds = [2] + [6] * 256 + [1] * 7 + [4] + [1]
    file = write(
        tmp_path / "spm.gguf",
        "llama",
        pieces,
        token_scores=scores,
        token_types=kinds,
        add_space_prefix=False,
    )
    encode = tokenizer_proof._own_encoder(file)[1]
    named = [pieces[i] for i in encode("abc  a é")]
    assert named == ["abc", "▁▁", "a", "▁", "<0xC3>", "<0xA9>"]
    assert [pieces[i] for i in encode("bc a")] == ["bc", "▁a"]


def test_what_cannot_be_read_is_not_taken_for_proven(
    tmp_path: Path, converted: tuple[Path, Path]
) -> None:
    file = write(
        tmp_path / "odd.gguf", "gpt2", ["a", "b"], tokenizer_pre="tekken", token_merges=["a b"]
    )
    with pytest.raises(AssayError, match="gpt2 with pre-tokenizer tekken") as caught:
        prove_tokenizer(loaded(converted[1]), file)
    assert caught.value.finding_id == "checkpoint.not_examined"


@pytest.mark.engine
@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_real_tokenizer_of_either_kind_is_proven(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    (file,) = (cache_dir("gguf") / name).glob("*.gguf")
    assert prove_tokenizer(loaded(folder), file).chars_per_token > 1.5
