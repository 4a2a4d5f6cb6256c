"""Blocks to and from the engine's pages: the worker's side of a connector."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from assay.errors import AssayError
from assay_lab.kv.block_errors import BlockDamaged, BlockRefused
from assay_lab.kv.blocks import BlockCodec, block_tokens, pin_single_thread
from assay_lab.kv.tier.scheduler import Load, Save
from assay_lab.kv.tier.store import BlockStore

_LOG = logging.getLogger("assay.kv")
_TOGETHER = 2048
"""Tokens that an encoder on a device takes at once."""


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


class TierWorker:
    """Blocks to and from the engine's pages: the worker's side of a connector.

    Blocks are encoded in a thread of low priority, by the codec or by an `encoder` of the engine's
    device. At most `waiting` of them wait for it: by default what takes 1 GiB.
    """

    def __init__(
        self,
        store: BlockStore,
        codec: BlockCodec,
        pages: Pages,
        block: int,
        page: int,
        waiting: int = 0,
        encoder: Encoder | None = None,
    ) -> None:
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
        # Which one is refused, then whether a good checksum is that of a stream that no encoder
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
    pin_single_thread()
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
