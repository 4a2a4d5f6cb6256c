"""llama.cpp's file of log-probabilities (`llama-perplexity --kl-divergence-base FILE`), both ways.

Layout, little-endian (tools/perplexity/perplexity.cpp):

    8 bytes   "_logits_"
    u32       n_ctx, tokens of a window
    i32       n_vocab
    i32       n_chunk, number of windows
    i32       tokens [n_chunk, n_ctx]
    then for every window the rows of its second half, tokens n_ctx/2 + 1 … n_ctx − 1,
    each of 2 ⌈V/2⌉ + 4 u16:
              f32 scale, f32 min_log_prob, u16 q [V] (one more where V is odd);
              log p(v) = scale · q(v) + min_log_prob

Logits more than 16 below the largest are raised to that; q has 65,536 steps. Taken at their word
the raised ones would add up to V · e⁻¹⁶ (0.5 % of the mass for 50,000 entries), so `rows` makes
them one bucket; llama.cpp leaves them out of KL. Where a model has a start token, llama.cpp puts it
in place of the first token of each window when it scores; the file keeps the token of the text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from assay.engines.scoring import LogitRows, Window, WindowRows
from assay.errors import AssayError

if TYPE_CHECKING:
    pass


_MAGIC = b"_logits_"


_HEADER = struct.Struct("<Iii")


_DEPTH = 16.0
"""How far below the largest logit others are kept apart, in nats."""


_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class BaseFile:
    """A file of log-probabilities. `tokens` is [windows, length] as in the file."""

    path: Path
    vocab_size: int
    tokens: NDArray[np.int32]

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return int(self.tokens.shape[1])

    @property
    def scored_from(self) -> int:
        """Index of the first scored token."""
        return self.length // 2 + 1

    @property
    def rows_per_window(self) -> int:
        """Scored tokens of a window."""
        return self.length - self.scored_from

    def windows(self, bos_id: int | None) -> tuple[Window, ...]:
        """The windows as they were scored: with the start token of the model in front, where it has
        one.
        """
        ids = self.tokens.copy()
        if bos_id is not None:
            ids[:, 0] = bos_id
        return tuple(Window(i, tuple(row)) for i, row in enumerate(ids.tolist()))

    def log_probs(self, index: int) -> NDArray[np.float32]:
        """Log-probabilities [rows_per_window, V] of one window as the file gives them, raised ones
        included.
        """
        return self._decoded(index)[0]

    def rows(self, windows: Sequence[Window]) -> Iterator[LogitRows]:
        """The rows of the given windows, one window in memory at a time.

        Raised entries are −∞, one bucket of the rest, but for the target token: its log-probability
        is then an upper bound.
        """
        import torch

        for window in windows:
            values, raised = self._decoded(window.index)
            gold = np.array(window.tokens[self.scored_from :])
            raised[np.arange(len(gold)), gold] = False
            values[raised] = -np.inf
            yield LogitRows(window, self.scored_from, torch.from_numpy(values), rest=True)

    def _decoded(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Log-probabilities of one window, and which of them stand for anything below."""
        width = _row_width(self.vocab_size)
        count = self.rows_per_window
        start = len(_MAGIC) + _HEADER.size + 4 * self.tokens.size + index * count * width * 2
        raw = np.fromfile(self.path, dtype="<u2", count=count * width, offset=start).reshape(
            count, width
        )
        scale, lowest = np.ascontiguousarray(raw[:, :4]).view("<f4").T
        steps = raw[:, 4 : 4 + self.vocab_size]
        values: NDArray[np.float32] = steps.astype(np.float32)
        values *= scale[:, None]
        values += lowest[:, None]
        cut = scale * 65535 > 0.999 * _DEPTH  # else step 0 is the smallest logit itself
        return values, (steps == 0) & cut[:, None]


def open_base(path: Path) -> BaseFile:
    """Open a file of log-probabilities; AssayError where it is none, or cut short."""
    try:
        with path.open("rb") as file:
            magic, fixed = file.read(len(_MAGIC)), file.read(_HEADER.size)
            size = path.stat().st_size
    except OSError as error:
        raise _unusable_base(f"cannot read {path}: {error.strerror}") from error
    if magic != _MAGIC or len(fixed) != _HEADER.size:
        raise _unusable_base(
            f"{path} is no file of log-probabilities: it does not begin with {_MAGIC.decode()}"
        )
    length, vocab_size, count = _HEADER.unpack(fixed)
    if length < 4 or vocab_size < 1 or count < 1:
        raise _unusable_base(
            f"{path} claims {count} windows of {length} tokens and {vocab_size} vocabulary entries"
        )
    rows = count * (length - 1 - length // 2)
    expected = len(_MAGIC) + _HEADER.size + 4 * length * count + 2 * _row_width(vocab_size) * rows
    if size != expected:
        raise _unusable_base(
            f"{path} has {size:,} bytes, {count} windows of {length} tokens take {expected:,}: "
            + ("it is cut short" if size < expected else "there is something behind them")
        )
    tokens = np.fromfile(path, dtype="<i4", count=length * count, offset=len(_MAGIC) + _HEADER.size)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise _unusable_base(f"{path} holds token ids outside its vocabulary of {vocab_size}")
    return BaseFile(path, vocab_size, tokens.reshape(count, length))


def write_base(path: Path, windows: Sequence[Window], rows: Iterable[WindowRows]) -> BaseFile:
    """Write the rows of `windows` (in the same order, scored from the second half on) as llama.cpp
    would.

    The file appears when it is whole. ValueError where a window was scored from another token.
    """
    length = len(windows[0].tokens)
    ids = np.array([w.tokens for w in windows], dtype="<i4")
    part = path.with_name(path.name + ".part")
    vocab_size: int | None = None
    with part.open("wb") as file:
        for window, scored in zip(windows, rows, strict=True):
            if scored.window.sha256 != window.sha256 or scored.first != length // 2 + 1:
                raise ValueError(
                    f"window {window.index} was not scored from token {length // 2 + 1} on"
                )
            if vocab_size is None:
                vocab_size = scored.vocab_size
                file.write(_MAGIC + _HEADER.pack(length, vocab_size, len(windows)) + ids.tobytes())
            count = length - scored.first
            step = max(1, _BLOCK_BYTES // (4 * vocab_size))
            for lo in range(0, count, step):
                logits = scored.logits(lo, min(lo + step, count))[:, :vocab_size]
                file.write(encode_rows(logits.cpu().numpy()).tobytes())
    part.replace(path)
    return open_base(path)


def encode_rows(logits: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Logits [n, V] as rows of the file, u16 [n, 2 ⌈V/2⌉ + 4]."""
    count, vocab_size = logits.shape
    largest = logits.max(axis=1)
    lowest = np.maximum(logits.min(axis=1), largest - np.float32(_DEPTH))
    partition = np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)
    log_partition = np.log(partition).astype(np.float32)
    scale = (largest - lowest) / np.float32(65535)
    steps = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    encoded = np.zeros((count, _row_width(vocab_size)), dtype="<u2")
    facts = np.stack([scale, lowest - largest - log_partition], axis=1).astype("<f4")
    encoded[:, :4] = facts.view("<u2")
    above = np.maximum(logits - lowest[:, None], 0)
    encoded[:, 4 : 4 + vocab_size] = np.rint(above * steps[:, None]).astype(np.uint16)
    return encoded


def _row_width(vocab_size: int) -> int:
    """u16 values of one row."""
    return 2 * ((vocab_size + 1) // 2) + 4


def _unusable_base(message: str) -> AssayError:
    return AssayError(
        message,
        finding_id="fidelity.store_unusable",
        remedy="write it again: llama-perplexity -m MODEL -f TEXT --kl-divergence-base FILE",
    )
