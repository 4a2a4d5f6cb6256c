"""The tier of stored blocks: what it keeps, and what of it an engine's pages get back, whatever
happens in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import AssayError
from assay_lab.kv.block_errors import BlockRefused
from assay_lab.kv.blocks import BlockCodec
from assay_lab.kv.tier import store as tier_store
from assay_lab.kv.tier.lmcache import LmcacheSerde
from assay_lab.kv.tier.scheduler import Load, Save, TierScheduler, keys_of
from assay_lab.kv.tier.store import BlockStore
from assay_lab.kv.tier.transfer import TierWorker
from kv.tier_samples import LAYERS, WIDTH, drawn, sample, turned

PAGE, BLOCK = 8, 16


def name(i: int) -> bytes:
    return bytes([i]) * 32


@pytest.fixture(params=["memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "tier" if request.param == "disk" else None


def test_the_least_recently_used_blocks_go_when_the_tier_is_full(folder: Path | None) -> None:
    store = BlockStore(folder, 100)
    for i in range(3):
        assert store.put(name(i), bytes(30))
    assert store.get(name(0)) == bytes(30)
    assert store.put(name(3), bytes(40))
    assert [name(i) in store for i in range(4)] == [True, False, True, True]
    assert store.total == 100 and store.counters.evicted == 1
    assert not store.put(name(4), bytes(101))
    assert store.counters.too_large == 1 and store.total == 100
    assert store.put(name(3), bytes(10)) and store.total == 70
    store.discard(name(0))
    assert store.get(name(0)) is None and store.total == 40
    store.clear()
    assert len(store) == 0 == store.total and name(2) not in store


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60), st.sampled_from("pgd")), max_size=40)
)
def test_the_tier_never_holds_more_than_it_may(steps: list[tuple[int, int, str]]) -> None:
    store = BlockStore(None, 100)
    held: dict[bytes, bytes] = {}
    for key, size, what in steps:
        if what == "p":
            store.put(name(key), bytes([key]) * size)
            held[name(key)] = bytes([key]) * size
        elif what == "d":
            store.discard(name(key))
        elif (data := store.get(name(key))) is not None:
            assert data == held[name(key)]
        assert store.total == sum(len(held[k]) for k in store._sizes) <= 100


def test_another_process_finds_what_was_stored_and_nothing_half_written(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, 1000)
    store.put(name(1), b"one")
    store.put(name(2), b"two")
    (tmp_path / "aa.tables").write_bytes(b"tables")
    whole = store._path(name(1))
    # What a process that was killed while it wrote has left, and what another one is writing.
    left = whole.parent / f".{whole.name}.x1"
    left.write_bytes(b"on")
    os.utime(left, (time.time() - 3600,) * 2)
    fresh = whole.parent / f".{whole.name}.x2"
    fresh.write_bytes(b"o")
    again = BlockStore(tmp_path, 1000)
    assert len(again) == 2 and again.get(name(1)) == b"one"
    assert not left.exists() and fresh.exists() and (tmp_path / "aa.tables").exists()
    # A process that has been running all the while finds what others store, and misses what others
    # let go.
    again.put(name(3), b"three")
    assert name(3) in store and store.get(name(3)) == b"three"
    again.discard(name(3))
    assert name(3) not in store and store.get(name(3)) is None
    assert BlockStore(tmp_path, 3).total == 3


def test_a_folder_that_cannot_be_written_loses_blocks_and_nothing_else(
    tmp_path: Path, monkeypatch
) -> None:
    store = BlockStore(tmp_path, 1000)
    store.put(name(1), b"one")

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tier_store, "write_atomically", full)
    assert not store.put(name(2), b"two")
    assert store.counters.write_failed == 1 and store.get(name(1)) == b"one"
    assert name(2) not in store and store.total == 3


def test_a_key_names_all_tokens_before_it_and_the_tables() -> None:
    tokens = list(range(50))
    keys = keys_of(tokens, 16, b"tables")
    assert len(keys) == 3 and keys_of(tokens, 16, b"tables", keys[:2]) == keys
    assert keys_of([*tokens[:20], 99, *tokens[21:]], 16, b"tables")[0] == keys[0]
    assert keys_of([*tokens[:20], 99, *tokens[21:]], 16, b"tables")[1:] != keys[1:]
    assert keys_of([99, *tokens[1:]], 16, b"tables")[2] != keys[2]
    assert not set(keys_of(tokens, 16, b"others")) & set(keys)


class Fake:
    """Pages of an engine: [layers, 2, pages · PAGE, width]."""

    target = None

    def __init__(self) -> None:
        self.x = torch.full((LAYERS, 2, 64 * PAGE, WIDTH), -7.0, dtype=torch.bfloat16)

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.cat([self.x[:, :, p * PAGE : (p + 1) * PAGE] for p in pages], dim=2).clone()

    def write(self, slots: np.ndarray, x: torch.Tensor) -> None:
        self.x[:, :, torch.from_numpy(slots)] = x


class Engine:
    """An engine in small: one step computes a prompt, whose pages a request has; `model` says what
    they hold.
    """

    def __init__(
        self, folder: Path | None, most: int = 10**7, codec: BlockCodec | None = None
    ) -> None:
        self.codec = codec or BlockCodec(sample().tables, 2)
        self.store = BlockStore(folder, most)
        self.pages = Fake()
        self.planner = TierScheduler(self.store, self.codec.tables.digest, BLOCK, PAGE)
        self.mover = TierWorker(self.store, self.codec, self.pages, BLOCK, PAGE)
        self.count = 0

    def model(self, tokens: Sequence[int]) -> torch.Tensor:
        """Keys after RoPE and values of a prompt, each token's from all before it."""
        x = (
            drawn(70, 11)[:, :, : len(tokens)]
            + torch.tensor(np.cumsum(tokens) % 7)[None, None, :, None] * 0.1
        )
        return turned(self.codec, x, 0).bfloat16()

    def serve(self, tokens: list[int], local: int = 0) -> tuple[int, torch.Tensor]:
        """How many tokens came from the tier, and what the request's pages hold in the end."""
        self.count += 1
        request = f"r{self.count}"
        need = -(-len(tokens) // PAGE)
        pages = list(range(self.count % 3, self.count % 3 + need))[::-1]
        whole = self.model(tokens)
        where = torch.tensor([pages[i // PAGE] * PAGE + i % PAGE for i in range(len(tokens))])
        external = self.planner.match(request, tokens, local)
        load = self.planner.allocated(request, pages, external)
        computed = local + external
        saves = self.planner.step(request, computed, len(tokens), pages, again=True)
        failed = self.mover.load(load) if load else []
        self.pages.x[:, :, where[:local]] = whole[:, :, :local]
        failed += self.mover.settle()
        if failed:  # this step computes from what was not filled, the next one from there on
            self.pages.x[:, :, where[computed:]] = 77.0
            self.mover.save(saves)
            self.mover.flush()
            computed = min(pages.index(page) for page in failed) * PAGE
            saves = self.planner.step(request, computed, len(tokens), pages, again=True)
        self.pages.x[:, :, where[computed:]] = whole[:, :, computed:]
        self.mover.save(saves)
        self.mover.flush()
        self.planner.finished(request)
        return computed - local, self.pages.x[:, :, where]


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found.float() - wanted.float()).square().mean()) < 0.02 * float(
        wanted.float().square().mean()
    )


PROMPT = [int(i) for i in np.random.default_rng(0).integers(0, 1000, 70)]


def test_a_prompt_that_returns_is_loaded_but_for_what_must_be_computed(folder: Path | None) -> None:
    engine = Engine(folder)
    loaded, exact = engine.serve(PROMPT)
    assert loaded == 0 and engine.store.counters.stored_blocks == 4
    loaded, found = engine.serve(PROMPT)
    assert loaded == 64 and close(found, exact) and not torch.equal(found, exact)
    assert torch.equal(found[:, :, :4], exact[:, :, :4]) and torch.equal(
        found[:, :, 64:], exact[:, :, 64:]
    )
    # Behind another start nothing is the same, and of a prompt that is stored to its end a page is
    # computed again.
    assert engine.serve([1, *PROMPT[1:]])[0] == 0
    assert engine.serve(PROMPT[:64])[0] == 56
    # What the engine still holds itself is not touched, and the rest comes back.
    assert engine.serve(PROMPT, local=24)[0] == 40
    assert engine.serve([*PROMPT[:40], *PROMPT[:30]])[0] == 32
    counters = engine.store.counters.to_json()
    assert counters["requests"] == 6 and counters["requests_hit"] == 4 and counters["ratio"] > 3
    assert counters["refused"] == counters["missing"] == counters["recomputed_tokens"] == 0


def test_a_tier_on_a_disk_outlives_its_process(tmp_path: Path) -> None:
    exact = Engine(tmp_path).serve(PROMPT)[1]
    loaded, found = Engine(tmp_path).serve(PROMPT)
    assert loaded == 64 and close(found, exact)
    other = BlockCodec(sample(seed=1).tables, 1)
    assert Engine(tmp_path, codec=other).serve(PROMPT)[0] == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "swapped"])
def test_a_damaged_block_is_computed_again_and_counted_and_never_read(
    tmp_path: Path, damage: str
) -> None:
    engine = Engine(tmp_path)
    exact = engine.serve(PROMPT)[1]
    keys = keys_of(PROMPT, BLOCK, engine.codec.tables.digest)
    path = engine.store._path(keys[1])
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 4
        path.write_bytes(bytes(raw))
    elif damage == "cut":
        path.write_bytes(bytes(raw[:-9]))
    elif damage == "swapped":
        path.write_bytes(engine.store._path(keys[2]).read_bytes())
    match = TierScheduler.match

    def then_gone(self: TierScheduler, *given: object) -> int:
        found = match(self, *given)  # type: ignore[arg-type]
        path.unlink()
        return found

    if damage == "gone":  # evicted by another process between match and load
        engine.planner.match = then_gone.__get__(engine.planner)  # type: ignore[method-assign]
    loaded, found = engine.serve(PROMPT)
    assert loaded == 16
    assert close(found[:, :, :16], exact[:, :, :16]) and torch.equal(
        found[:, :, 16:], exact[:, :, 16:]
    )
    counters = engine.store.counters
    assert (counters.refused, counters.missing) == ((0, 1) if damage == "gone" else (1, 0))
    assert counters.recomputed_tokens == 48
    # It was stored anew.
    engine.planner.match = match.__get__(engine.planner)  # type: ignore[method-assign]
    assert engine.serve(PROMPT)[0] == 64


def test_what_was_computed_behind_a_damaged_block_is_not_stored(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.serve(PROMPT[:40])
    path = engine.store._path(keys_of(PROMPT, BLOCK, engine.codec.tables.digest)[1])
    path.write_bytes(path.read_bytes()[:-9])
    loaded, found = engine.serve(
        PROMPT
    )  # computes two blocks behind the damaged one, and all of them again
    assert loaded == 16 and engine.store.counters.dropped == 2 and len(engine.store) == 4
    loaded, found = engine.serve(PROMPT)
    assert loaded == 64 and close(found, engine.model(PROMPT))
    # A step that an engine had scheduled before it knew: only what is computed again leaves.
    engine.mover._lost(Load("a", (), 0, 64, (0, 1, 2, 3)), 20, 64)
    saves = [Save(b"b", 64, (8, 9), "a"), Save(b"c", 0, (10, 11), "b")]
    assert engine.mover._beyond_doubt(saves) == engine.mover._beyond_doubt(saves) == []
    assert engine.mover._beyond_doubt(saves) == saves
    engine.mover._lost(Load("a", (), 0, 64, (0, 1, 2, 3)), 20, 64)
    saves = [Save(b"a", 16, (2, 3), "a"), *saves]
    assert (
        engine.mover._beyond_doubt(saves) == [] and engine.mover._beyond_doubt(saves) == saves[:2]
    )


def test_a_tier_that_is_too_small_serves_what_it_still_has(folder: Path | None) -> None:
    engine = Engine(folder)
    engine.serve(PROMPT)
    size = engine.store.total
    small = Engine(folder and folder / "small", most=size * 5 // 8)
    small.serve(PROMPT)
    assert small.store.counters.evicted > 0
    loaded, found = small.serve(
        PROMPT
    )  # its first blocks went first: nothing of the prefix is left
    assert loaded == 0 and torch.equal(found, small.model(PROMPT))
    assert small.store.total <= small.store.most


def test_blocks_that_do_not_fit_in_the_queue_or_are_no_numbers_are_dropped_and_counted() -> None:
    engine = Engine(None)
    engine.mover._waiting = 0
    engine.serve(PROMPT)
    assert engine.store.counters.dropped == 4 and len(engine.store) == 0
    engine.mover._waiting = 64
    engine.model = lambda tokens: torch.full(
        (LAYERS, 2, len(tokens), WIDTH), float("nan")
    ).bfloat16()  # type: ignore[method-assign]
    engine.serve(PROMPT)
    assert engine.store.counters.not_encoded == 4 and len(engine.store) == 0


class OneByOne(BlockCodec):
    """Gives each block by itself, as a device that decodes in groups."""

    def decode_groups(
        self, blocks: Sequence[bytes], keys: Sequence[bytes] | None = None
    ) -> Iterator[torch.Tensor]:
        for i, block in enumerate(blocks):
            yield self.decode([block], None if keys is None else [keys[i]])


class OnDevice:
    """An encoder of several blocks at once, in the place of a GPU's."""

    def __init__(self, codec: BlockCodec) -> None:
        self.codec, self.asked, self.fails = codec, [0], False

    def encode(
        self, x: torch.Tensor, firsts: Sequence[int], keys: Sequence[bytes], ready: object = None
    ) -> list[bytes]:
        self.asked.append(len(keys))
        if self.fails:
            raise RuntimeError("CUDA error")
        parts = zip(x.split(BLOCK, dim=2), firsts, keys, strict=True)
        return [self.codec.encode(part, first=first, key=key) for part, first, key in parts]


def test_groups_of_a_device_fill_the_same_pages_and_a_group_without_memory_is_computed_again() -> (
    None
):
    engine = Engine(None, codec=OneByOne(sample().tables, 1))
    engine.serve(PROMPT)
    wanted = engine.model(PROMPT)
    loaded, found = engine.serve(PROMPT, 2 * PAGE)
    assert (
        loaded == 48 and close(found, wanted) and torch.equal(found[:, :, 64:], wanted[:, :, 64:])
    )

    def out_of_memory(blocks: object, keys: object) -> Iterator[torch.Tensor]:
        raise torch.OutOfMemoryError("no memory")

    engine.codec.decode_groups = out_of_memory  # type: ignore[method-assign]
    _, found = engine.serve(PROMPT)
    assert torch.equal(found, wanted) and engine.store.counters.recomputed_tokens == 64


def test_an_encoder_of_the_device_takes_blocks_together_and_the_cpu_those_where_it_fails() -> None:
    engine = Engine(None)
    encoder = engine.mover._encoder = OnDevice(engine.codec)
    engine.serve(PROMPT)
    assert encoder.asked[1:] == [4] and engine.store.counters.stored_blocks == 4
    loaded, found = engine.serve(PROMPT)
    assert loaded == 64 and close(found, engine.model(PROMPT))
    engine.store.clear()
    encoder.fails = True
    engine.serve(PROMPT)
    assert len(engine.store) == 4 and engine.mover._encoder is None
    # One block of numbers that are none does not take the others with it.
    engine.store.clear()
    engine.mover._encoder, encoder.fails, whole = encoder, False, engine.model(PROMPT)
    whole[1, 0, 20] = float("inf")
    engine.model = lambda tokens: whole  # type: ignore[method-assign]
    engine.serve(PROMPT)
    assert engine.store.counters.not_encoded == 1 and len(engine.store) == 3


def test_tokens_that_are_generated_leave_when_their_block_is_full() -> None:
    engine = Engine(None)
    tokens = list(PROMPT[:20])
    engine.planner.match("r", tokens, 0)
    engine.planner.allocated("r", [5, 6, 7], 0)
    saves = engine.planner.step("r", 0, 20, [5, 6, 7], again=True)
    assert [(s.first, s.pages) for s in saves] == [(0, (5, 6))]
    # A token is sampled while its step runs, and known in the next one.
    tokens += PROMPT[20:31]
    assert engine.planner.step("r", 30, 32, [9], again=False) == []
    tokens += PROMPT[31:33]
    saves = engine.planner.step("r", 32, 33, [11], again=False)
    assert [(s.first, s.pages, s.key) for s in saves] == [
        (16, (7, 9), keys_of(PROMPT, BLOCK, engine.planner.seed)[1])
    ]
    assert engine.planner.step("other", 0, 99, [1], again=True) == []


def test_requests_of_another_salt_share_nothing() -> None:
    engine = Engine(None)
    engine.serve(PROMPT)
    assert engine.planner.match("a", PROMPT, 0, "salt") == 0
    assert engine.planner.match("b", PROMPT, 0) == 64


class Chunk:
    """What LMCache hands over (`MemoryObj`), as far as a serialiser sees it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shapes, self.dtypes = [tensor.shape], [tensor.dtype]


def test_chunks_of_lmcache_go_through_the_same_blocks() -> None:
    serde = LmcacheSerde(BlockCodec(sample("sinks(n=4)+pca(bits=2)").tables, 1), 2.5)
    x = drawn(64, 4).bfloat16().transpose(0, 1).contiguous()
    source = Chunk(x)
    room = Chunk(torch.zeros(serde.estimate_serialized_size(source), dtype=torch.uint8))
    assert room.tensor.numel() == 9831  # 2 · 12,288 bytes over 2.5, rounded up
    used = serde.serialize(source, room, "key")
    assert 0 < used < room.tensor.numel()
    back = Chunk(torch.zeros_like(x))
    serde.deserialize(room, back, "key")
    assert torch.equal(back.tensor[:, :, :4], x[:, :, :4]) and close(back.tensor, x)
    with pytest.raises(BlockRefused):
        serde.deserialize(room, back, "another")
    room.tensor[used // 2] ^= 1
    with pytest.raises(BlockRefused):
        serde.deserialize(room, back, "key")
    with pytest.raises(BlockRefused):
        serde.deserialize(Chunk(torch.zeros(900, dtype=torch.uint8)), back, "key")
    with pytest.raises(AssayError, match="ratio of 9"):
        LmcacheSerde(serde._codec, 9).serialize(
            source, Chunk(torch.zeros(900, dtype=torch.uint8)), "key"
        )
    with pytest.raises(AssayError, match="before RoPE"):
        LmcacheSerde(BlockCodec(sample().tables, 1), 2.5)
