"""Which blocks of each request are in the tier, come back or leave: the scheduler's side of a
connector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from assay_lab.kv.tier.store import BlockStore


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


class TierScheduler:
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
