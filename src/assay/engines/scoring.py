"""Scoring of token windows: what a comparison asks of an engine, and the form in which it gets the
answer.

The common currency is the *final state*: what the output head is applied to, after the final norm,
[tokens, d]. Logits over the whole vocabulary are rebuilt from it by blocks of rows, so that memory
never holds windows × vocabulary and a stored reference is small. An engine that gives no states
gives logits of one window at a time.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from assay.errors import AssayError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from assay.engines import Engine


ROOM_FACTS = frozenset({"threads", "batch", "kv_cache_tokens", "unequal_memory"})
"""What an engine says of itself that follows from what a machine had free: it makes no other
engine, and no other number but for last bits."""


@dataclass(frozen=True)
class GreedyStep:
    """One token of a greedy continuation: the likeliest, the next likeliest, and their
    log-probabilities in nats.
    """

    token: int
    runner_up: int
    logprob: float
    runner_up_logprob: float

    @property
    def gap(self) -> float:
        """How far the likeliest lies above the next, in nats: also the difference of
        their logits.
        """
        return self.logprob - self.runner_up_logprob


@runtime_checkable
class GreedyGenerator(Protocol):
    """An engine that continues prefixes greedily."""

    def generate_greedy(
        self, prefixes: Sequence[tuple[int, ...]], count: int
    ) -> list[list[GreedyStep]]:
        """`count` tokens after each prefix, past any end of text. All prefixes are equally long."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """An engine that can write text of its own."""

    def sampler(self) -> tuple[Engine, tuple[int, ...]]:
        """What generates, and the ids that a text of its own begins after."""
        ...


def top_two(logits: torch.Tensor) -> list[GreedyStep]:
    """The steps that logits [B, V] make; the lower id wins a tie."""
    logprobs = logits.float().log_softmax(-1)
    best, token = logprobs.max(-1)
    others = logprobs.scatter(-1, token.unsqueeze(-1), float("-inf"))
    second, runner_up = others.max(-1)
    columns = (token, runner_up, best, second)
    return [GreedyStep(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on `device`. A GPU fetches it from pinned memory when its turn comes, without
    a wait.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(groups: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """The same tensors in the main memory: one copy for all of a type and device, as each copy
    waits for the device.
    """
    found = [dict(group) for group in groups]
    away: dict[tuple[torch.dtype, torch.device], list[tuple[int, str]]] = defaultdict(list)
    for i, group in enumerate(groups):
        for name, tensor in group.items():
            if tensor.device.type != "cpu":
                away[tensor.dtype, tensor.device].append((i, name))
    for places in away.values():
        copies = copied_together(
            [groups[i][name] for i, name in places], lambda joined: joined.cpu()
        )
        for (i, name), values in zip(places, copies, strict=True):
            found[i][name] = values
    return found


def copied_together(
    tensors: Sequence[torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """What one `copy` of all tensors of one type, joined, makes of each."""
    import torch

    parts = copy(torch.cat([tensor.reshape(-1) for tensor in tensors])).split(
        [t.numel() for t in tensors]
    )
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class ScoringPath(StrEnum):
    """How the tokens of a window go through the model."""

    PREFILL = "prefill"
    """All at once: one forward pass, which reads no cache."""
    CHUNKED = "chunked"
    """A prefix, then block after block: each block reads the cache of what came before."""
    DECODE = "decode"
    """A prefix, then token by token, teacher-forced: the cache is read as serving reads it."""


@dataclass(frozen=True)
class Window:
    """One passage of text that is scored: its token ids (start token included) and their hash."""

    index: int
    tokens: tuple[int, ...]

    @cached_property
    def sha256(self) -> str:
        """Hash of the token ids as little-endian 32-bit integers."""
        return hashlib.sha256(b"".join(t.to_bytes(4, "little") for t in self.tokens)).hexdigest()


@dataclass(frozen=True)
class HookSpec:
    """Something that takes part in the forward pass, by import path (`package.module:factory`) and
    plain settings.
    """

    target: str
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoreJob:
    """How windows are scored.

    Tokens `scored_from`… of every window are scored (at least 1: nothing comes before token 0). On
    the paths that read the cache the first `scored_from − 1` tokens are prefilled in one pass; the
    rest goes in blocks of `chunk` tokens, or one by one. `batch` windows run together; 0: as many
    as the engine finds room for.
    """

    path: ScoringPath = ScoringPath.PREFILL
    scored_from: int = 1
    chunk: int = 128
    batch: int = 4
    hook: HookSpec | EngineHook | None = None
    """An object goes into a model of this process only."""

    def __post_init__(self) -> None:
        for name, least in (("scored_from", 1), ("chunk", 1), ("batch", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, got {getattr(self, name)}")


class Head:
    """The output head: final states to logits, as the engine itself computes them.

    `weight` is [V, d], `bias` [V] or None. Logits are (h Wᵀ + b) · `scale`, then `softcap` · tanh(x
    / softcap) where there is a cap. The product runs in the type of the weight, as in the engine;
    its rounding is part of what the engine serves. Rows past the real vocabulary (padding) are not
    part of it.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        softcap: float | None = None,
        scale: float = 1.0,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.softcap = softcap
        self.scale = scale
        self.file: Path | None = None
        """A safetensors file that holds it as `weight` and `bias`, where it came from one: ranks
        read their rows of it.
        """
        self._elsewhere: dict[str, Head] = {}

    @property
    def vocab_size(self) -> int:
        """Entries of one row of logits."""
        return int(self.weight.shape[0])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Float32 logits [n, V] of states [n, d]."""
        return self.own_logits(states).float()

    def own_logits(self, states: torch.Tensor) -> torch.Tensor:
        """The same in the type of the weight, in which they are computed."""
        import torch

        states = states.to(device=self.weight.device, dtype=self.weight.dtype)
        logits = torch.nn.functional.linear(states, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def to(self, device: torch.device) -> Head:
        """The same head on another device; it is copied there once."""
        if device == self.weight.device:
            return self
        if str(device) not in self._elsewhere:
            bias = None if self.bias is None else self.bias.to(device)
            moved = Head(self.weight.to(device), bias, softcap=self.softcap, scale=self.scale)
            self._elsewhere[str(device)] = moved
        return self._elsewhere[str(device)]


@dataclass(frozen=True)
class VocabularyShard:
    """What one of several ranks has of a vocabulary: ids `first` … of the `vocab_size` that both
    sides know.

    The ranks' shards follow one another without a gap; one may be empty. Each rank's heads hold its
    rows alone, and only sums over them travel: `gather` gives a tensor of every rank, in the order
    of the ranks, as [ranks, …]; all ranks must call it equally often.
    """

    first: int
    vocab_size: int
    ranks: int
    gather: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StateRows:
    """Rows as final states [count, d] and the head that turns them into logits."""

    window: Window
    first: int
    states: torch.Tensor
    head: Head

    @property
    def vocab_size(self) -> int:
        """Entries of a row."""
        return self.head.vocab_size

    @property
    def device(self) -> torch.device:
        """Where its logits come from: where the head is."""
        return self.head.weight.device

    def to(self, device: torch.device) -> StateRows:
        """The same rows on another device."""
        return replace(self, states=to_device(self.states, device), head=self.head.to(device))

    def logits(self, lo: int, hi: int) -> torch.Tensor:
        """Float32 logits of the rows lo … hi − 1."""
        return self.head.logits(self.states[lo:hi])

    def own_logits(self, lo: int, hi: int) -> torch.Tensor:
        """Logits of the rows lo … hi − 1 in the type of the head."""
        return self.head.own_logits(self.states[lo:hi])


@dataclass(frozen=True)
class LogitRows:
    """Rows as logits [count, V], where an engine gives no states.

    `rest`: they are log-probabilities of a part of the distribution, −inf for every id that is not
    in it.
    """

    window: Window
    first: int
    values: torch.Tensor
    rest: bool = False

    @property
    def vocab_size(self) -> int:
        """Entries of a row."""
        return int(self.values.shape[1])

    @property
    def device(self) -> torch.device:
        """Where its logits are."""
        return self.values.device

    def to(self, device: torch.device) -> LogitRows:
        """The same rows on another device."""
        return replace(self, values=self.values.to(device))

    def logits(self, lo: int, hi: int) -> torch.Tensor:
        """Float32 logits of the rows lo … hi − 1."""
        return self.values[lo:hi].float()

    def own_logits(self, lo: int, hi: int) -> torch.Tensor:
        """Logits of the rows lo … hi − 1 as they are kept."""
        return self.values[lo:hi]


WindowRows = StateRows | LogitRows
"""The distributions of one window: row i is that of token `first + i`, given all tokens before it.
"""


@dataclass(frozen=True)
class TokenizerFacts:
    """What a comparison needs to know of a tokenizer.

    `sha256` is `vocabulary_sha256` of its pieces. `bos_id` is the start token that it puts before a
    text, None where it puts none (whether or not it names one). `encode` adds no special tokens.
    """

    sha256: str
    vocab_size: int
    bos_id: int | None
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def vocabulary_sha256(pieces: Mapping[str, int]) -> str:
    """Hash of a vocabulary: all (id, piece) in the order of ids. Equal hashes: an id means the same
    on both sides.
    """
    digest = hashlib.sha256()
    for piece, token in sorted(pieces.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token}\t{piece}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


@dataclass(frozen=True)
class ScoringAbility:
    """What an engine can give: by which paths, whole distributions or not, states or not."""

    paths: frozenset[ScoringPath]
    full_vocabulary: bool = True
    states: bool = True
    hooks: bool = False
    """Whether `ScoreJob.hook` may name an `EngineHook`."""
    reason: str = ""
    """Why something is missing."""


@dataclass(frozen=True)
class Engagement:
    """Proof of what took part in the numbers, counted while scoring.

    `fires` counts calls of the hook (None where there was none), `bytes_read` the cache bytes that
    attention read on the scored steps (None where it cannot be told), `per_layer` the fires of each
    layer.
    """

    fires: int | None = None
    bytes_read: int | None = None
    per_layer: Mapping[int, int] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that scores windows."""

    @property
    def tokenizer(self) -> TokenizerFacts:
        """The tokenizer's facts."""
        ...

    @property
    def ability(self) -> ScoringAbility:
        """What it can give."""
        ...

    def describe(self) -> dict[str, Any]:
        """What scored: kind, versions, model, number formats; plain JSON types, no path."""
        ...

    def score_windows(self, windows: Sequence[Window], job: ScoreJob) -> Iterator[WindowRows]:
        """The rows of every window, in order. All windows have the same length."""
        ...

    def engagement(self) -> Engagement:
        """What took part since the last call of `score_windows`."""
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...


class EngineHook(Protocol):
    """What a hook may do while a model of transformers scores. All methods are called in this
    order.

    A hook that needs to see a batch more than once (to capture, then to replace) sets `passes`;
    rows come from the last pass. A hook that can forget a batch that did not fit into memory, so
    that it may run again by halves, has `discard()`.
    """

    passes: int

    def attach(self, model: Any) -> AbstractContextManager[None]:
        """Put the hook in place for one run of `score_windows`; leaving the context undoes it."""
        ...

    def new_cache(self, batch: int, index: int) -> Any | None:
        """The KV cache of the next batch on pass `index`, None for the engine's own."""
        ...

    def after_prefix(self, cache: Any) -> None:
        """The prefix of the batch has been prefilled into `cache`."""
        ...

    def engagement(self) -> Engagement:
        """What the hook counted."""
        ...


def load_hook(spec: HookSpec | EngineHook) -> Any:
    """The hook itself: its factory is imported and called with its settings. AssayError where that
    does not exist.
    """
    if not isinstance(spec, HookSpec):
        return spec
    module, _, attribute = spec.target.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise AssayError(
            f"the hook {spec.target} cannot be loaded: {error}",
            finding_id="fidelity.hook_missing",
            remedy="write package.module:factory of something that is installed",
        ) from error
    return factory(**spec.config)


def check_windows(windows: Sequence[Window], job: ScoreJob) -> int:
    """The common length of the windows; UsageError unless all are equally long and longer than
    `scored_from`.
    """
    lengths = {len(w.tokens) for w in windows}
    if len(lengths) != 1:
        raise UsageError(f"windows must be equally long, got lengths {sorted(lengths)}")
    length = lengths.pop()
    if length <= job.scored_from:
        raise UsageError(
            f"windows of {length} tokens leave nothing to score from token {job.scored_from} on",
            remedy="use longer windows or score from an earlier token",
        )
    return length
