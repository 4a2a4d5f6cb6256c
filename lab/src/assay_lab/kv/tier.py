"""A tier of stored blocks in memory or on a disk: limited in size, the least recently used go
first.

A block is one file, written under another name and then renamed, so that a reader sees all of it or
nothing. A tier without a folder lives and ends with its process. What `assay_lab.kv.connector` does
with the parts of an engine is decided here: which blocks of a request come back, which leave, and
that one that is gone or not believed is computed again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from assay.errors import AssayError
from assay.runs import write_atomically
from assay_lab.kv.blocks import (
    BlockCodec,
    BlockDamaged,
    BlockRefused,
    BlockTables,
    alone,
    block_bytes,
    block_tokens,
)

_LOG = logging.getLogger("assay.kv")

_SUFFIX = ".block"
_TOGETHER = 2048
"""Tokens that an encoder on a device takes at once."""
_LEFT_S = 60.0
"""Age of an unfinished file that nobody writes any more."""


@dataclass
class Counters:
    """What a tier did. Blocks, tokens, bytes and seconds since it was opened; `exact_bytes` are
    those blocks had in bf16.

    A block that is `missing` was let go between match and load; one that was `refused` is damaged
    or of other tables. `recomputed_tokens` had been promised and were computed again. `dropped`:
    not stored, since as many waited as may, or because they were computed while pages before them
    had been lost.
    """

    stored_blocks: int = 0
    stored_tokens: int = 0
    stored_bytes: int = 0
    exact_bytes: int = 0
    encode_s: float = 0.0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    decode_s: float = 0.0
    requests: int = 0
    requests_hit: int = 0
    refused: int = 0
    missing: int = 0
    recomputed_tokens: int = 0
    evicted: int = 0
    too_large: int = 0
    write_failed: int = 0
    dropped: int = 0
    not_encoded: int = 0

    def to_json(self) -> dict[str, float]:
        """By name, and the two ratios that follow."""
        found: dict[str, float] = asdict(self)
        found["ratio"] = self.exact_bytes / self.stored_bytes if self.stored_bytes else 0.0
        found["decode_gb_s"] = self.loaded_bytes / self.decode_s / 1e9 if self.decode_s else 0.0
        return found


class BlockStore:
    """Blocks by key, at most `most` bytes of them, in `folder` or in memory. Safe to use from
    threads.

    Several processes may share a folder: each finds what the others wrote, and each keeps to its
    own `most`.
    """

    def __init__(self, folder: Path | None, most: int) -> None:
        self.folder, self.most = folder, most
        self.counters = Counters()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._memory: dict[bytes, bytes] = {}
        self._total = 0
        self._lock = threading.RLock()
        self._readers = ThreadPoolExecutor(8, "assay-kv-read")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._find(folder)

    def _find(self, folder: Path) -> None:
        """What an earlier process left, oldest first; what it was writing when it ended goes."""
        found = []
        for path in folder.rglob("*"):
            with suppress(OSError, ValueError):
                if path.suffix == _SUFFIX:
                    status = path.stat()
                    found.append((status.st_mtime_ns, bytes.fromhex(path.stem), status.st_size))
                elif _SUFFIX in path.name and path.stat().st_mtime < time.time() - _LEFT_S:
                    path.unlink()
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self._total += size
        self._make_room(0)

    @property
    def total(self) -> int:
        """Bytes of all blocks."""
        return self._total

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            if key in self._sizes:
                return self.folder is None or self._path(key).exists()
        return self.folder is not None and self._path(key).exists()

    def get(self, key: bytes) -> bytes | None:
        """The bytes of a block, which is then the most recently used; None where it is not there or
        cannot be read.
        """
        data = None
        if self.folder is not None:  # several threads read at once
            path = self._path(key)
            with suppress(OSError):
                data = path.read_bytes()
                path.touch()
        with self._lock:
            data = self._memory.get(key) if self.folder is None else data
            if data is None:
                self._forget(key)
            else:
                self._note(key, len(data))
            return data

    def get_all(self, keys: Sequence[bytes]) -> list[bytes]:
        """Blocks up to the first one that `get` does not have."""
        found = (
            map(self.get, keys)
            if self.folder is None or len(keys) < 2
            else self._readers.map(self.get, keys)
        )
        return [
            data for data in takewhile(lambda data: data is not None, found) if data is not None
        ]

    def put(self, key: bytes, data: bytes) -> bool:
        """Keep a block; older ones go until there is room. False where it is larger than the tier
        or cannot be written.
        """
        with self._lock:
            if len(data) > self.most:
                self.counters.too_large += 1
                return False
            self._forget(key)
            self._make_room(len(data))
            if self.folder is None:
                self._memory[key] = data
            else:
                path = self._path(key)
                try:
                    path.parent.mkdir(exist_ok=True)
                    write_atomically(path, data)
                except OSError:
                    self.counters.write_failed += 1
                    return False
            self._note(key, len(data))
            return True

    def discard(self, key: bytes) -> None:
        """Let a block go, wherever it is."""
        with self._lock:
            if self.folder is not None:
                with suppress(OSError):
                    self._path(key).unlink(missing_ok=True)
            self._forget(key)

    def clear(self) -> None:
        """Let every block go that this process knows."""
        with self._lock:
            for key in list(self._sizes):
                self.discard(key)

    def _note(self, key: bytes, size: int) -> None:
        self._total += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._sizes.move_to_end(key)

    def _forget(self, key: bytes) -> None:
        self._total -= self._sizes.pop(key, 0)
        self._memory.pop(key, None)

    def _make_room(self, size: int) -> None:
        while self._sizes and self._total + size > self.most:
            self.discard(next(iter(self._sizes)))
            self.counters.evicted += 1

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return (self.folder or Path()) / name[:2] / f"{name}{_SUFFIX}"


def keys_of(
    tokens: Sequence[int], block: int, seed: bytes, known: Sequence[bytes] = ()
) -> list[bytes]:
    """The key of each whole block of `block` tokens: BLAKE2b of the key before it and its token
    ids, from `seed` on.

    `known` are the first ones, where they were found before. A key thus names all tokens up to the
    end of its block.
    """
    keys, begin = list(known), block * len(known)
    ids = np.asarray(tokens[begin:], "<u4").tobytes()
    for at in range(0, len(ids) - 4 * block + 1, 4 * block):
        own = ids[at : at + 4 * block]
        keys.append(
            hashlib.blake2b(own, digest_size=32, key=keys[-1] if keys else _seed(seed)).digest()
        )
    return keys


def _seed(seed: bytes) -> bytes:
    return hashlib.blake2b(seed, digest_size=32).digest()


# What of each request is in the tier, what comes back, and what leaves: the scheduler's side of a
# connector.


@dataclass(frozen=True)
class Load:
    """Tokens `lo` … `hi` − 1 of a request come back into its pages; `keys` are those of all its
    blocks up to `hi`.
    """

    request: str
    keys: tuple[bytes, ...]
    lo: int
    hi: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Save:
    """One block leaves: tokens `first` … of a request, which fill `pages`."""

    key: bytes
    first: int
    pages: tuple[int, ...]
    request: str = ""


@dataclass
class _Followed:
    tokens: Sequence[int]
    seed: bytes
    keys: list[bytes]
    pages: list[int]
    done: int = 0


class Planner:
    """Follows requests by id. A page is the engine's unit of `page` tokens, a block of the tier is
    `block` of them.

    `seed` is what keys begin with: tables that blocks were not coded with never match.
    """

    def __init__(self, store: BlockStore, seed: bytes, block: int, page: int) -> None:
        self.store, self.seed, self.block, self.page = store, seed, block, page
        self._requests: dict[str, _Followed] = {}
        self._found: dict[str, tuple[int, int]] = {}

    def match(self, request: str, tokens: Sequence[int], local: int, salt: str = "") -> int:
        """How many tokens behind the first `local` ones the tier has, in whole pages; one token is
        always left to compute.
        """
        followed = self._requests.get(request)
        if followed is None:
            followed = _Followed(tokens, self.seed + salt.encode(), [], [])
            self._requests[request] = followed
            self.store.counters.requests += 1
        followed.tokens = tokens
        self._name(followed, len(tokens))
        count = 0
        while count < len(followed.keys) and followed.keys[count] in self.store:
            count += 1
        hi = min(count * self.block, (len(tokens) - 1) // self.page * self.page)
        self._found[request] = local, hi
        return max(0, hi - local)

    def allocated(self, request: str, pages: Sequence[int], external: int) -> Load | None:
        """The request has its pages; what comes back into them, where `external` tokens were
        promised.
        """
        followed = self._requests.get(request)
        if followed is None:
            return None
        followed.pages = list(pages)
        local, _ = self._found.pop(request, (0, 0))
        if not external:
            return None
        self.store.counters.requests_hit += 1
        hi = local + external
        keys = followed.keys[: -(-hi // self.block)]
        return Load(request, tuple(keys), local, hi, tuple(pages))

    def step(
        self, request: str, before: int, after: int, pages: Sequence[int], *, again: bool
    ) -> list[Save]:
        """A step computes tokens `before` … `after` − 1 in further `pages` (all of them, with
        `again`): what leaves.
        """
        followed = self._requests.get(request)
        if followed is None:
            return []
        followed.pages = list(pages) if again else [*followed.pages, *pages]
        # Of tokens that are sampled while the step runs, ids come later.
        known = min(after, len(followed.tokens)) // self.block
        start = min(followed.done, before // self.block)
        followed.done = max(known, start)
        self._name(followed, known * self.block)
        per = self.block // self.page
        return [
            Save(
                followed.keys[i],
                i * self.block,
                tuple(followed.pages[i * per : (i + 1) * per]),
                request,
            )
            for i in range(start, known)
            if len(followed.pages) >= (i + 1) * per and followed.keys[i] not in self.store
        ]

    def finished(self, request: str) -> None:
        """Forget a request."""
        self._requests.pop(request, None)
        self._found.pop(request, None)

    def _name(self, followed: _Followed, tokens: int) -> None:
        if len(followed.keys) < tokens // self.block:
            whole = tokens // self.block * self.block
            followed.keys = keys_of(
                list(followed.tokens[:whole]), self.block, followed.seed, followed.keys
            )


class Pages(Protocol):
    """The engine's cache. Tensors are [layers, 2, tokens, KV heads · head_dim].

    `target` is where a device may write tokens itself, by slot (`assay_lab.kv.blocks_gpu.Target`);
    None where `write` must be used.
    """

    target: Any

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of what whole pages hold, on any device."""
        ...

    def write(self, slots: NDArray[np.int64], x: torch.Tensor) -> None:
        """Put tokens into slots: page · tokens of a page + place."""
        ...


class Encoder(Protocol):
    """Encodes several blocks of the same length at once, where their keys and values are."""

    def encode(
        self, x: torch.Tensor, firsts: Sequence[int], keys: Sequence[bytes], ready: Any = None
    ) -> list[bytes]:
        """Of [layers, 2, tokens, width], which is there behind the CUDA event `ready`."""
        ...


class Mover:
    """Blocks to and from the engine's pages: the worker's side of a connector.

    Blocks are encoded in a thread of low priority, by the codec or by an `encoder` of the engine's
    device. At most `waiting` of them wait for it: by default what takes 1 GiB.
    """

    def __init__(
        self, store: BlockStore, codec: BlockCodec, pages: Pages, block: int, page: int, waiting: int = 0,
        encoder: Encoder | None = None,
    ) -> None:  # fmt: skip
        self.store, self.codec, self.pages, self.block, self.page = store, codec, pages, block, page
        self._waiting = waiting or max(8, (1 << 30) // (block * codec.facts.token_bytes))
        self._pending: dict[bytes, Future[None]] = {}
        self._encoder = encoder
        self._unsettled: list[tuple[Load, list[bytes], int, Any]] = []
        self._doubtful_steps, self._lost_from = 0, dict[str, int]()
        self._pool = ThreadPoolExecutor(1, "assay-kv-encode", _in_the_background)

    def load(self, load: Load) -> list[int]:
        """Decode what was promised into its pages; the pages that were not filled, because a block
        is gone or not believed.

        A device may still be at it: what turns out later, `settle` says.
        """
        counters = self.store.counters
        start, first = time.perf_counter(), load.lo // self.block
        keys = load.keys[first:]
        blocks = self.store.get_all(keys)
        counters.missing += len(blocks) < len(keys)
        hi = load.lo
        # Which one is refused, then whether a good checksum stands over a stream that no encoder
        # wrote.
        for deep in (False, True, None):
            try:
                hi = self._fill(load, keys, blocks)
                break
            except BlockRefused:
                blocks = self._believed(keys, blocks, decode=deep) if deep is not None else []
            except torch.OutOfMemoryError as error:
                _LOG.warning(
                    "no memory to decode stored blocks, so they are computed again: %s", error
                )
                blocks = []
        hi = max(hi, load.lo)
        if hi > load.lo:
            counters.loaded_blocks += len(blocks)
            self._count(hi - load.lo)
        counters.decode_s += time.perf_counter() - start
        return self._lost(load, hi, load.hi)

    def settle(self) -> list[int]:
        """Wait for what a device decodes; the pages of blocks that were no code of their tables,
        and of those behind them.
        """
        counters, failed = self.store.counters, list[int]()
        unsettled, self._unsettled = self._unsettled, []
        for load, blocks, hi, decoding in unsettled:
            good, seconds = decoding.wait()
            counters.decode_s += seconds
            if good < len(blocks):
                first = load.lo // self.block
                counters.loaded_blocks -= len(blocks) - good
                self._believed(load.keys[first + good :], blocks[good : good + 1], decode=True)
                filled = max(load.lo, (first + good) * self.block)
                self._count(filled - hi)
                failed += self._lost(load, filled, hi)
        return failed

    def _count(self, tokens: int) -> None:
        self.store.counters.loaded_tokens += tokens
        self.store.counters.loaded_bytes += tokens * self.codec.facts.token_bytes

    def _lost(self, load: Load, lo: int, hi: int) -> list[int]:
        """The pages of tokens that were promised and are computed again; the step that was to have
        them stores nothing.
        """
        if lo >= hi:
            return []
        self.store.counters.recomputed_tokens += hi - lo
        self._doubtful_steps = 2
        self._lost_from[load.request] = min(lo, self._lost_from.get(load.request, lo))
        return list(load.pages[lo // self.page : -(-hi // self.page)])

    def _fill(self, load: Load, keys: Sequence[bytes], blocks: list[bytes]) -> int:
        """Decode blocks into pages, the next ones while an engine still takes the last; up to which
        token pages are filled.
        """
        done = load.lo // self.block * self.block
        if any(block_tokens(data) != self.block for data in blocks):
            raise BlockDamaged(f"a block has another number of tokens than {self.block}")
        if not blocks:
            return load.lo
        end, into = (
            min(load.hi, done + len(blocks) * self.block),
            getattr(self.codec, "decode_into", None),
        )
        if into is not None and (target := self.pages.target) is not None:
            slots = np.full(len(blocks) * self.block, -1)
            slots[load.lo - done : end - done] = self._slots(load.pages, load.lo, end)
            decoding = into(target, slots, blocks, keys[: len(blocks)])
            self._unsettled.append((load, blocks, end, decoding))
            return end
        for x in self.codec.decode_groups(blocks, keys[: len(blocks)]):
            lo, hi = max(load.lo, done), min(load.hi, done + x.shape[2])
            if hi > lo:
                self.pages.write(self._slots(load.pages, lo, hi), x[:, :, lo - done : hi - done])
            done += x.shape[2]
        return min(load.hi, done)

    def _believed(
        self, keys: Sequence[bytes], blocks: Sequence[bytes], *, decode: bool
    ) -> list[bytes]:
        """The blocks before the first one that is not believed."""
        good: list[bytes] = []
        for key, data in zip(keys, blocks, strict=False):
            if not self._good(key, data, decode=decode):
                break
            good.append(data)
        return good

    def save(self, saves: Iterable[Save]) -> None:
        """Copy what leaves out of its pages, and encode it later. To be called once a step, behind
        `settle`.
        """
        saves = self._beyond_doubt(saves)
        self._pending = {key: future for key, future in self._pending.items() if not future.done()}
        taken: dict[bytes, Save] = {}
        for save in saves:
            if save.key in self._pending or save.key in taken:
                continue
            if len(self._pending) + len(taken) >= self._waiting:
                self.store.counters.dropped += 1
                continue
            taken[save.key] = save
        if not taken:
            return
        all_ = list(taken.values())
        try:
            x = self.pages.read([page for save in all_ for page in save.pages])
        except torch.OutOfMemoryError:
            self.store.counters.dropped += len(all_)
            return
        ready, together = None, 1
        if self._encoder is None:
            x = x.cpu()
        else:
            together = max(1, _TOGETHER // self.block)
            if x.is_cuda:
                ready = torch.cuda.Event()
                ready.record()
        for at, part in zip(
            range(0, len(all_), together), x.split(self.block * together, dim=2), strict=True
        ):
            some = all_[at : at + together]
            future = self._pool.submit(self._encode, some, part, ready)
            self._pending |= dict.fromkeys((save.key for save in some), future)

    def _beyond_doubt(self, saves: Iterable[Save]) -> list[Save]:
        """Without what a step computed behind pages that were not filled, or the next one, which
        may have been scheduled before.

        What the engine computes again, from the first token that was lost on, is good.
        """
        if not self._doubtful_steps:
            return list(saves)
        self._doubtful_steps -= 1
        good, again = [], set[str]()
        for save in saves:
            if not self._doubtful_steps and save.first <= self._lost_from.get(save.request, -1):
                again.add(save.request)
            if save.request in again:
                good.append(save)
            else:
                self.store.counters.dropped += 1
        if not self._doubtful_steps:
            self._lost_from.clear()
        return good

    def flush(self) -> None:
        """Wait until all that left is stored."""
        for future in list(self._pending.values()):
            future.result()

    def close(self) -> None:
        """Finish what is being encoded, and leave the rest."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _encode(self, saves: Sequence[Save], x: torch.Tensor, ready: Any) -> None:
        counters, start = self.store.counters, time.perf_counter()
        firsts, keys = [save.first for save in saves], [save.key for save in saves]
        try:
            blocks = self._blocks(x, firsts, keys, ready)
        except AssayError:  # NaN or infinity: nothing that could be given back
            if len(saves) == 1:
                counters.not_encoded += 1
                return
            for save, part in zip(saves, x.split(self.block, dim=2), strict=True):
                self._encode([save], part, ready)
            return
        for key, data in zip(keys, blocks, strict=True):
            if self.store.put(key, data):
                counters.stored_blocks += 1
                counters.stored_tokens += self.block
                counters.stored_bytes += len(data)
                counters.exact_bytes += self.block * self.codec.facts.token_bytes
        counters.encode_s += time.perf_counter() - start

    def _blocks(
        self, x: torch.Tensor, firsts: Sequence[int], keys: Sequence[bytes], ready: Any
    ) -> list[bytes]:
        if self._encoder is not None:
            try:
                return self._encoder.encode(x, firsts, keys, ready)
            except AssayError:
                raise
            except Exception as error:
                _LOG.warning(
                    "blocks are encoded on the CPU from here on, since the device's encoder"
                    " failed: %r",
                    error,
                )
                self._encoder = None
        parts = zip(x.cpu().split(self.block, dim=2), firsts, keys, strict=True)
        return [self.codec.encode(part, first=first, key=key) for part, first, key in parts]

    def _good(self, key: bytes, data: bytes, *, decode: bool = False) -> bool:
        try:
            head = self.codec.check(data, key)
            if head.tokens != self.block:
                raise BlockDamaged(f"a block has {head.tokens} tokens, not {self.block}")
            if decode:
                self.codec.decode([data])
        except BlockRefused as refused:
            self.store.counters.refused += 1
            self.store.discard(key)
            _LOG.warning("a stored block is not believed, and computed again: %s", refused)
            return False
        return True

    def _slots(self, pages: Sequence[int], lo: int, hi: int) -> NDArray[np.int64]:
        places = np.arange(lo, hi)
        return np.asarray(pages, np.int64)[places // self.page] * self.page + places % self.page


def _in_the_background() -> None:
    alone()
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def write_counters(path: Path, store: BlockStore, **more: object) -> None:
    """Keep counters in a file, for whoever started the engine."""
    held = {"blocks": len(store), "bytes": store.total, "size": store.most}
    with suppress(OSError):
        write_atomically(path, json.dumps({**more, "tier": {**store.counters.to_json(), **held}}))


# LMCache (0.5): serialisers of its second-level storage, the same blocks with a chunk as block.


class LmcacheSerde:
    """Serialiser and deserialiser of LMCache for chunks [2, layers, tokens, KV heads · head_dim],
    one process a model.

    LMCache does not say where in a request a chunk stands, so keys must be coded after RoPE (no
    prerope), and the sinks of every chunk stay exact. It stores as many bytes as
    `estimate_serialized_size` says, whatever a stream takes: `ratio` times fewer than bf16. A chunk
    that needs more is an error there, and is not stored.
    """

    def __init__(self, codec: BlockCodec, ratio: float) -> None:
        if codec.facts.before_rope:
            raise AssayError(
                f"{codec.facts.spec} codes keys before RoPE, and LMCache does not say at which"
                " positions a chunk stands",
                finding_id="kv.unsupported",
                remedy="leave prerope out of the codec",
            )
        self._codec, self._ratio = codec, ratio

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Bytes that LMCache gives a chunk of this layout."""
        exact: int = sum(
            math.prod(s) * d.itemsize
            for s, d in zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        )
        return math.ceil(exact / self._ratio)

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Encode the tensor of `src` into the bytes of `dst`; the bytes used. AssayError where they
        do not suffice.
        """
        x = src.tensor.transpose(0, 1).cpu()
        data = self._codec.encode(x, first=0, key=self._key(key))
        room = dst.tensor.view(torch.uint8).flatten()
        if len(data) > room.numel():
            raise AssayError(
                f"a chunk takes {len(data):,} bytes, and a ratio of {self._ratio:g} leaves"
                f" {room.numel():,}",
                finding_id="kv.tier_size",
                remedy="give a smaller ratio",
            )
        room[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return len(data)

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Decode the bytes of `src` into the tensor of `dst`; BlockRefused for bytes that are not
        believed.
        """
        data = src.tensor.view(torch.uint8).flatten().cpu().numpy().tobytes()
        x = self._codec.decode([data[: block_bytes(data)]], [self._key(key)])
        dst.tensor.copy_(x.transpose(0, 1))

    def _key(self, key: Any) -> bytes:
        """A key of our own for all that names a chunk."""
        return hashlib.blake2b(repr(key).encode(), digest_size=32).digest()


def register_lmcache(name: str = "assay") -> None:
    """Make the serialiser known to LMCache: `"serde": {"type": "assay", "tables": FILE, "ratio":
    5}`.
    """
    from lmcache.v1.distributed.serde import AsyncSerdeProcessor, register_serde_factory

    def build(kwargs: dict[str, Any]) -> Any:
        codec = BlockCodec(
            BlockTables.read(Path(str(kwargs["tables"]))), int(kwargs.get("threads", 2))
        )
        serde = LmcacheSerde(codec, float(kwargs.get("ratio", 4.0)))
        return AsyncSerdeProcessor(serde, serde, max_workers=int(kwargs.get("max_workers", 1)))

    register_serde_factory(name, build)
