"""Stored blocks in memory or on a disk: limited in size, the least recently used go first.

A block is one file, written under another name and then renamed, so that a reader sees all of it or
nothing. A store without a folder ends with its process.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from assay.runs import write_atomically

_SUFFIX = ".block"
_LEFT_S = 60.0
"""Age of an unfinished file whose writer is gone."""


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


def write_counters(path: Path, store: BlockStore, **more: object) -> None:
    """Keep counters in a file, for whoever started the engine."""
    held = {"blocks": len(store), "bytes": store.total, "size": store.most}
    with suppress(OSError):
        write_atomically(path, json.dumps({**more, "tier": {**store.counters.to_json(), **held}}))
