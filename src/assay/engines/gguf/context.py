"""A context of llama.cpp: its cells, what is read into them, and its tokenizer."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from assay.engines.threads import choose_threads
from assay.errors import AssayError

if TYPE_CHECKING:
    pass
from assay.engines.gguf.library import last_error
from assay.engines.gguf.spec import CACHE_TYPES, GgufSpec

CELLS = 256
"""llama.cpp pads the cache of a sequence to a multiple of this."""


class NoContext(AssayError):
    """There is no memory for a context, or llama.cpp does not make one of its kind."""


class Context:
    """A KV cache for `sequences` windows of `length` tokens. Freed on leaving the `with` block."""

    def __init__(
        self, library: Any, model: Any, spec: GgufSpec, *, sequences: int, length: int, block: int
    ) -> None:
        self._library = library
        self._sequences = sequences
        vocabulary = library.llama_model_get_vocab(model)
        self.vocab_size = int(library.llama_vocab_n_tokens(vocabulary))
        parameters = library.llama_context_default_params()
        parameters.n_seq_max = sequences
        parameters.n_ctx = sequences * -(-length // CELLS) * CELLS
        parameters.n_batch = sequences * block
        parameters.n_ubatch = min(spec.ubatch, parameters.n_batch)
        parameters.n_threads = parameters.n_threads_batch = spec.threads or choose_threads()
        parameters.type_k, parameters.type_v = CACHE_TYPES[spec.k], CACHE_TYPES[spec.v]
        self._context = library.llama_init_from_model(model, parameters)
        if not self._context:
            raise NoContext(
                f"llama.cpp cannot make a context for {sequences} windows of {length} tokens:"
                f" {last_error()}",
                finding_id="fidelity.engine_load",
                remedy="use shorter windows; a quantised V cache needs flash attention",
            )
        self._batch = library.llama_batch_init(sequences * block, 0, 1)

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)

    def clear(self) -> None:
        """Forget everything that was read."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def read(
        self, tokens: NDArray[np.int32], position: int, *, logits: bool
    ) -> NDArray[np.float32] | None:
        """Read `tokens` [B, n] at the positions from `position` on; logits [B, n, V] after each of
        them if asked for.

        The array is llama.cpp's own and is overwritten by the next call.
        """
        sequences, count = tokens.shape
        total = sequences * count
        batch = self._batch
        batch.n_tokens = total
        as_array = np.ctypeslib.as_array
        as_array(batch.token, (total,))[:] = tokens.ravel()
        as_array(batch.pos, (total,))[:] = np.tile(np.arange(position, position + count), sequences)
        as_array(batch.n_seq_id, (total,))[:] = 1
        as_array(batch.logits, (total,))[:] = logits
        for i in range(total):
            batch.seq_id[i][0] = i // count
        status = self._library.llama_decode(self._context, batch)
        if status != 0:
            raise AssayError(
                f"llama.cpp failed at token {position}: status {status}, {last_error()}",
                finding_id="fidelity.engine_failed",
                remedy="use shorter windows or a smaller batch",
            )
        if not logits:
            return None
        rows: NDArray[np.float32] = as_array(
            self._library.llama_get_logits(self._context), (sequences, count, self.vocab_size)
        )
        return rows

    def bytes_per_token(self, tokens: int) -> float:
        """Bytes of the cache that one token takes, from its serialised size after
        `tokens` tokens.
        """
        return float(self._library.llama_state_seq_get_size(self._context, 0)) / tokens
