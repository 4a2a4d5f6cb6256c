"""llama.cpp as a scoring engine, through llama-cpp-python: `gguf:FILE?kv=q8_0&threads=8`."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from assay.engines import read_options
from assay.engines.machine import Batches, choose_threads, memory_error
from assay.engines.scoring import (
    Engagement,
    GreedyStep,
    LogitRows,
    ScoreJob,
    ScoringAbility,
    ScoringPath,
    TokenizerFacts,
    Window,
    check_windows,
    top_two,
    vocabulary_sha256,
)
from assay.errors import AssayError, UsageError

if TYPE_CHECKING:
    import torch

# Of ggml's types, those that a KV cache may have, and their numbers (ggml.h).
CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
}


@dataclass(frozen=True)
class GgufSpec:
    """One GGUF file and how llama.cpp runs it."""

    model: str
    k: str = "f16"
    """Type of the K cache."""
    v: str = "f16"
    """Type of the V cache."""
    threads: int = 0
    """Threads; 0: as many as there are free cores."""
    ubatch: int = 512
    """Tokens that are computed at once."""
    gpu_layers: int = -1
    """Layers on the GPU, where llama.cpp was built for one and finds it; −1: all."""


def parse_spec(spec: str) -> GgufSpec:
    """Read `gguf:FILE?option=value&…`; `kv` sets `k` and `v`. UsageError on an unknown option or
    value.
    """
    known = ["kv", *(f.name for f in fields(GgufSpec)[1:])]
    model, given = read_options(
        spec,
        "gguf:",
        known,
        example="gguf:FILE, such as gguf:./model.Q4_K_M.gguf?kv=q8_0",
        what="file",
    )
    options: dict[str, str] = {}
    for name, value in given:
        options |= {"k": value, "v": value} if name == "kv" else {name: value}
    for name in ("k", "v"):
        if options.get(name, "f16") not in CACHE_TYPES:
            raise _usage(
                f"{spec!r}: unknown cache type {options[name]!r}",
                f"one of {', '.join(CACHE_TYPES)}",
            )
    return GgufSpec(
        model=model,
        k=options.get("k", "f16"),
        v=options.get("v", "f16"),
        threads=_number(spec, options, "threads", 0, 0),
        ubatch=_number(spec, options, "ubatch", 512, 1),
        gpu_layers=_number(spec, options, "gpu_layers", -1, -1),
    )


def _number(spec: str, options: dict[str, str], name: str, default: int, least: int) -> int:
    try:
        value = int(options.get(name, default))
    except ValueError:
        value = least - 1
    if value < least:
        raise _usage(
            f"{spec!r}: {name}={options[name]!r} is not a whole number", f"give {least} or more"
        )
    return value


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="fidelity.usage")


_last_errors: deque[str] = deque(maxlen=4)
_ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR of ggml.h


@cache
def load_library() -> Any:
    """The module `llama_cpp`, its log kept out of the terminal; AssayError where it is missing."""
    try:
        import llama_cpp
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise AssayError(
            f"gguf: needs llama-cpp-python, which cannot be loaded: {reason}",
            finding_id="fidelity.engine_missing",
            remedy="pip install 'llm-assay[gguf]'",
        ) from error
    llama_cpp.llama_log_set(_log_callback(llama_cpp), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache
def _log_callback(llama_cpp: Any) -> Any:
    """Keeps the last error lines. It lives as long as the process: the library holds only a pointer
    to it.
    """

    def keep(level: int, text: bytes, _user_data: Any) -> None:
        line = text.decode("utf-8", "replace").strip()
        if level == _ERROR_LEVEL and line:
            _last_errors.append(line)

    return llama_cpp.llama_log_callback(keep)


def load_model(spec: GgufSpec, *, vocabulary_only: bool = False) -> Any:
    """A handle of the model in `spec.model`; AssayError with llama.cpp's own reason where it cannot
    be loaded.
    """
    library = load_library()
    if not Path(spec.model).is_file():
        raise _cannot_load(spec, "there is no such file")
    parameters = library.llama_model_default_params()
    parameters.n_gpu_layers = spec.gpu_layers
    parameters.vocab_only = vocabulary_only
    _last_errors.clear()
    model = library.llama_model_load_from_file(spec.model.encode(), parameters)
    if not model:
        raise _cannot_load(spec, last_error())
    return model


def last_error() -> str:
    """The first of the last error lines that llama.cpp wrote, the one nearest to the cause."""
    return _last_errors[0] if _last_errors else "llama.cpp gave no reason"


def describe_model(library: Any, model: Any) -> dict[str, Any]:
    """Architecture and quantisation in llama.cpp's words, size in bytes, number of parameters."""
    buffer = ctypes.create_string_buffer(256)
    library.llama_model_desc(model, buffer, len(buffer))
    return {
        "description": buffer.value.decode("utf-8", "replace"),
        "model_bytes": int(library.llama_model_size(model)),
        "parameters": int(library.llama_model_n_params(model)),
    }


def _cannot_load(spec: GgufSpec, reason: str) -> AssayError:
    return AssayError(
        f"cannot load {spec.model}: {reason}",
        finding_id="fidelity.engine_load",
        remedy="give a GGUF file that this llama-cpp-python can load: gguf:FILE",
    )


_CELLS = 256
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
        parameters.n_ctx = sequences * -(-length // _CELLS) * _CELLS
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
        """Bytes of the cache that one token takes, from its serialised size after `tokens` tokens."""
        return float(self._library.llama_state_seq_get_size(self._context, 0)) / tokens


def tokenizer_facts(library: Any, model: Any) -> TokenizerFacts:
    """Facts of the vocabulary of `model`. `bos_id` is the start token, None where the model puts
    none before a text.
    """
    vocabulary = library.llama_model_get_vocab(model)
    count = int(library.llama_vocab_n_tokens(vocabulary))
    # Converters write the user's own tokens of SentencePiece vocabularies with spaces in place of
    # transformers' ▁.
    sentencepiece = library.llama_vocab_type(vocabulary) == library.LLAMA_VOCAB_TYPE_SPM
    pieces = {}
    for token in range(count):
        piece = library.llama_vocab_get_text(vocabulary, token).decode("utf-8", "surrogateescape")
        pieces[piece.replace(" ", "▁") if sentencepiece else piece] = token
    adds_bos = bool(library.llama_vocab_get_add_bos(vocabulary))
    return TokenizerFacts(
        sha256=vocabulary_sha256(pieces),
        vocab_size=count,
        bos_id=int(library.llama_vocab_bos(vocabulary)) if adds_bos else None,
        encode=lambda text: encode(library, vocabulary, text),
        decode=lambda ids: _decode(library, vocabulary, ids),
    )


def encode(library: Any, vocabulary: Any, text: str) -> list[int]:
    """Ids of `text` without a start token; names of special tokens within it count as those tokens."""
    raw = text.encode("utf-8", "surrogatepass")
    size = len(raw) + 8
    ids = (library.llama_token * size)()
    count = library.llama_tokenize(vocabulary, raw, len(raw), ids, size, False, True)
    if count < 0:
        raise ValueError(f"llama.cpp needs {-count} tokens for {len(raw)} bytes")
    return list(ids[:count])


def _decode(library: Any, vocabulary: Any, ids: Sequence[int]) -> str:
    """Text of `ids`, special tokens included; bytes that are no UTF-8 become the replacement
    character.
    """
    tokens = (library.llama_token * len(ids))(*ids)
    size = 16 * len(ids) + 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        count = library.llama_detokenize(vocabulary, tokens, len(ids), buffer, size, False, True)
        if count >= 0:
            return buffer.raw[:count].decode("utf-8", "replace")
        size = -count


_LOGIT_BYTES = 1 << 30
"""Bound on the logits of one batch: windows × scored tokens × vocabulary × 4. One window may exceed
it alone.
"""
_AT_ONCE = 8
"""Windows that run together where nobody says how many."""


class GgufScorer:
    """Scores windows with llama.cpp. Attention reads K and V from the cache on every path, prefill
    included.
    """

    def __init__(self, spec: GgufSpec, library: Any, model: Any) -> None:
        self.spec = spec
        self._library = library
        self._model = model
        self._engagement = Engagement()
        self._batches: Batches | None = None

    @classmethod
    def load(cls, spec: str) -> GgufScorer:
        """Load `gguf:FILE?…`; AssayError where llama-cpp-python is missing or cannot read the file."""
        parsed = parse_spec(spec)
        return cls(parsed, load_library(), load_model(parsed))

    @property
    def ability(self) -> ScoringAbility:
        """Every path, whole distributions, no states."""
        return ScoringAbility(
            frozenset(ScoringPath),
            states=False,
            reason="llama.cpp gives logits; its output head is quantised and applied inside",
        )

    @cached_property
    def tokenizer(self) -> TokenizerFacts:
        """Facts of the tokenizer in the file."""
        return tokenizer_facts(self._library, self._model)

    def describe(self) -> dict[str, Any]:
        """Engine, versions, model and number formats."""
        return {
            "engine": "gguf",
            "model": Path(self.spec.model).name,
            "llama_cpp_python": self._library.__version__,
            "kv_cache": {"k": self.spec.k, "v": self.spec.v},
            "ubatch": self.spec.ubatch,
            "gpu_layers": self.spec.gpu_layers if self._library.llama_supports_gpu_offload() else 0,
            "threads": self.spec.threads or choose_threads(),
            **describe_model(self._library, self._model),
        }

    def score_windows(self, windows: Sequence[Window], job: ScoreJob) -> Iterator[LogitRows]:
        """The rows of every window, in order; memory holds the logits of one batch."""
        length = check_windows(windows, job)
        if job.hook:
            raise UsageError(
                "llama.cpp takes no hooks",
                remedy="use hf: or vllm: for what changes the forward pass",
                finding_id="fidelity.usage",
            )
        scored = length - job.scored_from
        most = max(1, _LOGIT_BYTES // (4 * scored * self.tokenizer.vocab_size))
        batch = min(job.batch or _AT_ONCE, len(windows), most)
        self._batches = batches = self._batches.again(batch) if self._batches else Batches(batch)
        self._engagement = Engagement()
        read = 0.0

        def rows_of(part: Sequence[Window]) -> torch.Tensor:
            nonlocal read
            blocks = plan_blocks(length, job, max(1, self.spec.ubatch // len(part)))
            widest = max(hi - lo for lo, hi in blocks)
            try:
                context = Context(
                    self._library,
                    self._model,
                    self.spec,
                    sequences=len(part),
                    length=length,
                    block=widest,
                )
            except NoContext as error:
                if len(part) == 1:
                    raise
                raise MemoryError from error
            with context:
                rows = _score(context, part, job, blocks)
                read += (
                    len(part) * context.bytes_per_token(length - 1) * sum(hi for _, hi in blocks)
                )
            return rows

        def too_large(window: Window) -> AssayError:
            return memory_error(f"a single window of {length:,} tokens", "llama.cpp")

        for window, values in batches.run(windows, rows_of, too_large):
            notes = {"batch": batches.note()} if batches.halved else {}
            self._engagement = Engagement(bytes_read=int(read), notes=notes)
            yield LogitRows(window, job.scored_from, values)

    def generate_greedy(
        self, prefixes: Sequence[tuple[int, ...]], count: int
    ) -> list[list[GreedyStep]]:
        """`count` greedy tokens after each of the equally long prefixes, all in one batch through
        the cache.
        """
        import torch

        ids = np.array(prefixes, dtype=np.int32)
        length = ids.shape[1]
        steps: list[list[GreedyStep]] = []
        with Context(
            self._library,
            self._model,
            self.spec,
            sequences=len(prefixes),
            length=length + count,
            block=max(1, length - 1),
        ) as context:
            context.clear()
            if length > 1:
                context.read(ids[:, :-1], 0, logits=False)
            last = ids[:, -1:]
            for position in range(length - 1, length - 1 + count):
                rows = context.read(last, position, logits=True)
                if rows is None:
                    raise RuntimeError("llama.cpp gave no logits, though they were asked for")
                steps.append(top_two(torch.from_numpy(rows[:, 0])))
                last = np.array([[step.token] for step in steps[-1]], dtype=np.int32)
        return [list(row) for row in zip(*steps, strict=True)]

    def engagement(self) -> Engagement:
        """Bytes of the cache that attention has read."""
        return self._engagement

    def close(self) -> None:
        """Free the model."""
        if self._model:
            self._library.llama_model_free(self._model)
            self._model = None


def plan_blocks(length: int, job: ScoreJob, prefill: int) -> list[tuple[int, int]]:
    """The tokens lo … hi − 1 that each call reads, in order; the last token of a window predicts
    nothing.

    Prefill is cut into blocks of `prefill` tokens, which bounds the logits of one call. On the
    other paths so is the prefix; then come blocks of `job.chunk` tokens, or single ones.
    """
    last = length - 1
    prefix = last if job.path is ScoringPath.PREFILL else job.scored_from - 1
    step = 1 if job.path is ScoringPath.DECODE else job.chunk
    # A block is scored whole or not at all.
    edges = sorted(
        {
            *range(0, prefix, prefill),
            *range(prefix, last, step),
            min(job.scored_from - 1, last),
            last,
        }
    )
    return list(pairwise(edges))


def _score(
    context: Context, windows: Sequence[Window], job: ScoreJob, blocks: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Float32 logits [B, length − scored_from, V]."""
    import torch

    ids = np.array([w.tokens for w in windows], dtype=np.int32)
    first = job.scored_from - 1
    values = torch.empty(len(windows), ids.shape[1] - job.scored_from, context.vocab_size)
    context.clear()
    for lo, hi in blocks:
        rows = context.read(ids[:, lo:hi], lo, logits=lo >= first)
        if rows is not None:
            values[:, lo - first : hi - first] = torch.from_numpy(rows)
    return values
