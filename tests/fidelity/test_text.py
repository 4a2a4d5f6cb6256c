"""Sources of text, windows, sampled text."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.engines import Capability, CapabilityReport, MissingCapability, Reply, Request
from assay.errors import AssayError, UsageError
from assay.fidelity.text.own import generate_text
from assay.fidelity.text.sources import read_text
from assay.fidelity.windows import Cut, available_windows, blocks_of, cut_windows, places_of


def test_files_are_joined_in_order_and_hashed(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst \xc3\xa4\r\n")
    text = read_text([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")])
    assert text.text == "second\n\nfirst ä\r\n"
    assert text.sources == ("b.txt", "a.txt")
    assert text.sha256 == hashlib.sha256(b"second\n\nfirst \xc3\xa4\r\n").hexdigest()
    assert read_text([str(tmp_path / "*.txt")]).text == "first ä\r\n\n\nsecond"


def test_a_file_may_have_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "really?[x].txt").write_text("here", encoding="utf-8")
    assert read_text([str(tmp_path / "really?[x].txt")]).text == "here"


def test_jsonl_gives_its_field(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl"
    rows = [{"text": "one", "body": "eins"}, {"text": "two\u2028lines", "body": "zwei"}]
    path.write_text(
        "\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n", encoding="utf-8"
    )
    assert read_text([str(path)]).text == "one\n\ntwo\u2028lines"
    assert read_text([f"{path}?field=body"]).text == "eins\n\nzwei"
    assert read_text([f"{tmp_path}/*.jsonl?field=body"]).text == "eins\n\nzwei"


def test_default_is_the_documentation_of_python() -> None:
    text = read_text()
    assert text.sources == ("pydoc",)
    assert len(text.text) > 300_000
    assert "assert" in text.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "cannot read"),
        ("latin.txt", b"caf\xe9", "byte 3 is 0xe9"),
        ("empty.txt", b" \n", "holds no text"),
        ("bad.jsonl", b'{"text": "a"}\n{oops}', "line 2 is not JSON"),
        ("list.jsonl", b'["a"]', "it is no object"),
        ("other.jsonl", b'{"content": "a"}', "fields: content"),
    ],
)
def test_unusable_files_are_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(AssayError, match=message) as caught:
        read_text([str(path)])
    assert name in caught.value.message
    assert caught.value.remedy


def test_other_unusable_sources(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("same", encoding="utf-8")
    (tmp_path / "b.txt").write_text("same", encoding="utf-8")
    with pytest.raises(AssayError, match="same text"):
        read_text([str(tmp_path / "*.txt")])
    with pytest.raises(AssayError, match="is a folder"):
        read_text([str(tmp_path)])
    with pytest.raises(AssayError, match="no file matches"):
        read_text([str(tmp_path / "*.md")])
    with pytest.raises(UsageError, match=r"only \.jsonl"):
        read_text([f"{tmp_path / 'a.txt'}?field=x"])
    with pytest.raises(UsageError, match="cannot be mixed"):
        read_text(["self", str(tmp_path / "a.txt")])


def test_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(AssayError, match="needs the package datasets"):
        read_text(["datasets:wikitext"])

    def load_dataset(name: str, config: str | None, split: str) -> dict[str, list[str]]:
        if name != "wikitext":
            raise FileNotFoundError(f"{name} is not on this machine\nlong story")
        return {"text": ["", f"{config} {split}", "more"]}

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read_text(["datasets:wikitext?config=raw&split=dev"]).text == "raw dev\n\nmore"
    assert read_text(["datasets:wikitext?config=raw"]).text == "raw test\n\nmore"
    with pytest.raises(AssayError, match=r"c4 is not on this machine$"):
        read_text(["datasets:c4"])
    with pytest.raises(AssayError, match="cannot be loaded: 'body'"):
        read_text(["datasets:wikitext?field=body"])
    with pytest.raises(UsageError, match="unknown option 'part'"):
        read_text(["datasets:wikitext?part=x"])


def test_windows_with_and_without_a_start_token() -> None:
    ids = list(range(100, 125))
    plain = cut_windows(ids, Cut(length=10), None)
    assert [w.tokens for w in plain] == [tuple(range(100, 110)), tuple(range(110, 120))]
    started = cut_windows(ids, Cut(length=10), 1)
    assert [w.tokens for w in started] == [(1, *range(100, 109)), (1, *range(109, 118))]
    assert Cut(length=10).scored_from == 1


def test_llama_cpp_protocol_swaps_the_start_token_in() -> None:
    cut = Cut(length=10, protocol="second-half")
    windows = cut_windows(list(range(100, 125)), cut, 1)
    assert [w.tokens for w in windows] == [(1, *range(101, 110)), (1, *range(111, 120))]
    assert cut.scored_from == 6  # as llama-perplexity: 4 of 10 tokens, 255 of 512
    assert 512 - Cut(length=512, protocol="second-half").scored_from == 255
    assert cut_windows(list(range(100, 125)), cut, None)[0].tokens[0] == 100


def test_windows_are_hashed_by_their_ids() -> None:
    window = cut_windows([1, 2, 3, 70_000], Cut(length=4), None)[0]
    assert window.sha256 == hashlib.sha256(np.array([1, 2, 3, 70_000], "<u4").tobytes()).hexdigest()
    again = cut_windows([1, 2, 3, 70_000, 5], Cut(length=4), None)[0]
    assert again.sha256 == window.sha256
    assert cut_windows([1, 2, 3, 70_001], Cut(length=4), None)[0].sha256 != window.sha256


def test_counts_of_the_issue_for_smollm2() -> None:
    """113,108 tokens of Python's topics, 312,144 of WikiText-2 test; its tokenizer puts no start
    token.
    """
    assert available_windows(113_108, Cut(), None) == 110
    assert available_windows(312_144, Cut(), None) == 304


@given(
    count=st.integers(0, 300),
    length=st.integers(2, 40),
    protocol=st.sampled_from(["all", "second-half"]),
    bos=st.sampled_from([None, 7]),
    extra=st.integers(0, 9),
    skip=st.integers(0, 3),
)
def test_windows_never_overlap_and_are_as_many_as_announced(
    count: int, length: int, protocol: str, bos: int | None, extra: int, skip: int
) -> None:
    cut = Cut(length, protocol, skip=skip)  # type: ignore[arg-type]
    cut = Cut(length, cut.protocol, stride=cut.text_tokens(bos) + extra, skip=skip)
    ids = list(range(1000, 1000 + count))
    available = available_windows(count, cut, bos)
    if available == 0:
        with pytest.raises(AssayError, match=f"has {count:,} tokens"):
            cut_windows(ids, cut, bos)
        return
    windows = cut_windows(ids, cut, bos)
    assert len(windows) == available
    assert all(len(w.tokens) == length for w in windows)
    text = [t for w in windows for t in w.tokens if t >= 1000]
    assert len(text) == len(set(text))
    assert text == sorted(text) or protocol == "all"
    # One more window would not have fitted.
    used = (available + skip) * cut.step(bos)
    assert count - used < cut.text_tokens(bos)
    assert cut_windows(ids, cut, bos, 1) == windows[:1]


@given(available=st.integers(40, 2000), share=st.floats(0.1, 1.0))
def test_any_first_part_of_the_windows_is_spread_over_the_text(
    available: int, share: float
) -> None:
    count = max(8, round(share * available))
    places = places_of(10 * available, Cut(length=10), None, count)
    gaps = np.diff([-1, *sorted(places), available])
    assert len(set(places)) == count
    assert gaps.max() <= 3 * available / count + 1
    assert places_of(10 * available, Cut(length=10), None, count // 2) == places[: count // 2]
    skipped = places_of(10 * available, Cut(length=10, skip=count // 2), None, count - count // 2)
    assert skipped == places[count // 2 :]


@pytest.mark.parametrize(
    ("places", "blocks"),
    [
        (range(7), [0, 1, 2, 3, 4, 5, 6]),
        (range(16), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]),
    ],
)
def test_neighbouring_windows_make_one_block_and_no_fewer_than_eight(
    places: range, blocks: list[int]
) -> None:
    assert blocks_of(list(places)) == blocks
    assert len(set(blocks_of(list(range(64))))) == 16
    assert len(set(blocks_of(list(range(0, 320, 5))))) == 64


def test_too_short_says_how_many_tokens_there_are() -> None:
    with pytest.raises(
        AssayError, match="has 1,000 tokens, one window of 1,024 needs 1,023"
    ) as caught:
        cut_windows(list(range(1000)), Cut(), 0)
    assert caught.value.finding_id == "fidelity.text_too_short"
    with pytest.raises(AssayError, match="after the 2 that are skipped"):
        cut_windows(list(range(1500)), Cut(skip=2), None)


def test_overlapping_stride_is_refused() -> None:
    with pytest.raises(UsageError, match="overlap"):
        cut_windows(list(range(100)), Cut(length=10, stride=5), None)


class Writer:
    """Writes its seed, as many tokens as asked for."""

    def __init__(self, capabilities: frozenset[Capability], empty: bool = False) -> None:
        self.capabilities = CapabilityReport(capabilities)
        self.empty = empty
        self.requests: list[Request] = []

    def generate(self, request: Request) -> Reply:
        self.requests.append(request)
        count = 0 if self.empty else request.max_tokens
        return Reply(
            content=f"text {request.seed}", finish_reason="length", completion_tokens=count
        )


ABLE = frozenset({Capability.TOKEN_IDS_PROMPT, Capability.IGNORE_EOS})


def test_sampled_text_is_as_long_as_asked_and_on_policy() -> None:
    engine = Writer(ABLE)
    text = generate_text(engine, start=(3,), tokens=2100, per_text=100, seed=5)  # type: ignore[arg-type]
    assert text.text.split("\n\n") == [f"text {i}" for i in range(5, 26)]
    assert text.sources == ("self",)
    assert {(r.prompt, r.temperature, r.ignore_eos) for r in engine.requests} == {((3,), 1.0, True)}


def test_sampled_text_needs_an_engine_that_writes() -> None:
    with pytest.raises(MissingCapability):
        generate_text(Writer(frozenset()), start=(3,), tokens=10)  # type: ignore[arg-type]
    with pytest.raises(AssayError, match="wrote no text"):
        generate_text(Writer(ABLE, empty=True), start=(3,), tokens=10)  # type: ignore[arg-type]
