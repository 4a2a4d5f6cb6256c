"""The reference store: round trip, resuming, and every kind of damage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from assay.engines.scoring import Head, Window
from assay.errors import AssayError
from assay.fidelity.store.manifest import StoreHeader
from assay.fidelity.store.reader import Store, open_store
from assay.fidelity.store.writer import StoreWriter

LENGTH, FIRST, WIDTH, VOCAB = 12, 3, 16, 50
HEADER = StoreHeader(
    engine={"engine": "hf", "model": "tiny", "dtype": "float32"},
    tokenizer={"sha256": "ab" * 32, "vocab_size": VOCAB, "bos_id": None},
    text={"sources": ["a.txt"], "sha256": "cd" * 32},
    path="prefill",
    scored_from=FIRST,
    length=LENGTH,
    dtype="float32",
    environment={"python": "3.11"},
)


def head(seed: int = 0, dtype: torch.dtype = torch.float32) -> Head:
    weight = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return Head(weight, torch.linspace(-1, 1, VOCAB).to(dtype), softcap=30.0, scale=0.5)


def window(index: int) -> Window:
    return Window(index, tuple((index * 7 + i) % VOCAB for i in range(LENGTH)))


def states(index: int) -> torch.Tensor:
    return torch.randn(LENGTH - FIRST, WIDTH, generator=torch.Generator().manual_seed(100 + index))


def write(folder: Path, count: int = 3, header: StoreHeader = HEADER) -> Store:
    writer = StoreWriter(folder, header, head())
    for i in range(count):
        writer.add(window(i), states(i))
    return writer.finish()


def test_round_trip_is_exact(tmp_path: Path) -> None:
    write(tmp_path)
    store = open_store(tmp_path)
    assert store.windows == tuple(window(i) for i in range(3))
    assert store.header == HEADER
    for i, rows in enumerate(store.rows(store.windows)):
        assert rows.window == window(i)
        assert rows.first == FIRST
        assert torch.equal(rows.states, states(i))
        assert torch.equal(rows.logits(1, 4), head().logits(states(i)[1:4]))
    store.verify()


def test_sixteen_bits_round_once(tmp_path: Path) -> None:
    store = write(tmp_path, header=replace(HEADER, dtype="bfloat16"))
    assert torch.equal(store.states(1).states, states(1).to(torch.bfloat16))
    # 2 d bytes for a state; names, token ids and padding are most of so small a file.
    assert store.size.tokens == 3 * (LENGTH - FIRST)
    assert 2 * WIDTH < store.size.bytes_per_token < 2 * WIDTH + 300 / (LENGTH - FIRST)
    assert store.size.head_bytes > 4 * VOCAB * WIDTH
    files = list((tmp_path / "states").iterdir())
    assert store.size.states_bytes == sum(f.stat().st_size for f in files)


def test_bytes_per_token_of_real_windows(tmp_path: Path) -> None:
    header = replace(HEADER, length=1024, scored_from=1, dtype="bfloat16")
    writer = StoreWriter(tmp_path, header, Head(torch.zeros(10, 576)))
    writer.add(Window(0, tuple(range(1024))), torch.zeros(1023, 576))
    per_token = writer.finish().size.bytes_per_token
    assert 2 * 576 + 4 < per_token < 2 * 576 + 4.3  # the state and the id


def test_equal_content_is_stored_once(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    names = [sorted(p.relative_to(tmp_path / x) for p in (tmp_path / x).rglob("*.*")) for x in "ab"]
    assert names[0] == names[1]
    assert len(list((tmp_path / "a" / "head").iterdir())) == 1


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, HEADER, head())
    writer.add(window(0), states(0))
    writer.add(window(2), states(2))
    with pytest.raises(AssayError, match=r"not finished: it holds 2 windows"):
        open_store(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}

    again = StoreWriter(tmp_path, replace(HEADER, environment={"python": "3.12"}), head())
    assert again.kept == 2
    assert [again.has(window(i)) for i in range(3)] == [True, False, True]
    again.add(window(0), torch.zeros(LENGTH - FIRST, WIDTH))  # already there: not written again
    again.add(window(1), states(1))
    store = again.finish()
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert [w.index for w in store.windows] == [0, 1, 2]
    assert torch.equal(store.states(0).states, states(0))


def test_a_damaged_window_is_scored_again(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / open_store(tmp_path)._entry(1).stored.file
    path.write_bytes(path.read_bytes()[:-1])
    writer = StoreWriter(tmp_path, HEADER, head())
    assert [writer.has(window(i)) for i in range(3)] == [True, False, True]
    writer.add(window(1), states(1))
    writer.finish().verify()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"engine": {"engine": "hf", "model": "other"}}, "the engine's dtype, the engine's model"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"text": {}, "path": "decode"}, "text, path"),
        ({"tokenizer": {"sha256": "00"}}, "tokenizer"),
    ],
)
def test_another_reference_is_never_overwritten(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    write(tmp_path)
    content = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(AssayError, match=f"differs in {named}"):
        StoreWriter(tmp_path, replace(HEADER, **change), head())
    assert (tmp_path / "manifest.json").read_bytes() == content


def test_what_a_machine_has_free_makes_no_other_reference(tmp_path: Path) -> None:
    def of(**facts: object) -> StoreHeader:
        return replace(HEADER, engine={**HEADER.engine, **facts})

    write(tmp_path, 2, of(threads=2, batch={"windows": 4}))
    assert StoreWriter(tmp_path, of(threads=1, batch={"windows": 1, "asked": 4}), head()).kept == 2
    assert StoreWriter(tmp_path, of(kv_cache_tokens=1_024), head()).kept == 2


def test_another_head_or_window_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(AssayError, match="the output head"):
        StoreWriter(tmp_path, HEADER, head(seed=1))
    with pytest.raises(AssayError, match="window 1"):
        StoreWriter(tmp_path, HEADER, head()).add(Window(1, window(0).tokens), states(0))
    store = open_store(tmp_path)
    with pytest.raises(AssayError, match="other tokens"):
        list(store.rows([Window(1, window(0).tokens)]))
    with pytest.raises(AssayError, match="no window 3, only 3"):
        list(store.rows([window(3)]))


def test_states_of_another_shape_are_refused(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, HEADER, head())
    with pytest.raises(ValueError, match="window 0"):
        writer.add(window(0), states(0)[1:])


def use_all(folder: Path) -> None:
    store = open_store(folder)
    for rows in store.rows(store.windows):
        rows.logits(0, 1)


def test_one_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    write(tmp_path, count=2)
    generator = torch.Generator().manual_seed(1)
    for path in sorted(p for p in tmp_path.rglob("*") if p.is_file()):
        content = path.read_bytes()
        for position in torch.randint(len(content) * 8, (40,), generator=generator).tolist():
            changed = bytearray(content)
            changed[position // 8] ^= 1 << position % 8
            path.write_bytes(changed)
            with pytest.raises(AssayError) as caught:
                use_all(tmp_path)
            assert path.name in caught.value.message
            assert caught.value.remedy
        path.write_bytes(content)
    use_all(tmp_path)


@pytest.mark.parametrize("kind", ["head", "states", "tokens"])
def test_missing_and_short_files_are_named(tmp_path: Path, kind: str) -> None:
    write(tmp_path)
    path = next((tmp_path / kind).iterdir())
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(AssayError, match=r"damaged: it has [\d,]+ bytes in place of") as caught:
        use_all(tmp_path)
    assert path.name in caught.value.message
    path.unlink()
    with pytest.raises(AssayError, match="cannot be read") as caught:
        use_all(tmp_path)
    assert path.name in caught.value.message


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(AssayError, match="no stored reference"):
        open_store(tmp_path)
    with pytest.raises(AssayError, match="no stored reference"):
        open_store(tmp_path / "missing")
    write(tmp_path)
    path = tmp_path / "manifest.json"
    newer = json.loads(path.read_text(encoding="utf-8")) | {"version": 2}
    path.write_text(json.dumps(newer), encoding="utf-8")
    with pytest.raises(AssayError, match=r"assay-reference 2, this assay reads assay-reference 1"):
        open_store(tmp_path)
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(AssayError, match="not what assay wrote"):
        open_store(tmp_path)


def test_a_header_must_make_sense() -> None:
    with pytest.raises(ValueError, match="int8"):
        replace(HEADER, dtype="int8")
    with pytest.raises(ValueError, match="nothing to score"):
        replace(HEADER, scored_from=LENGTH)
