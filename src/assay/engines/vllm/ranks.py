"""What runs in every rank of an engine of vLLM: it watches the steps, keeps the final states and
takes statistics of them.

vLLM mixes `ScoringExtension` into its workers. With tensor parallelism each rank of the last
pipeline stage sees the same final states and holds its rows of the output heads; of what it
computes only sums go to the others (`assay.fidelity.metrics.shards`), so that no rank ever has a whole
head or a whole row of logits.

A rank that fails in the middle of a collective call would leave the others waiting for it. It
writes why into a file that the engine's process reads, and ends; vLLM then ends the rest.
"""

from __future__ import annotations

import json
import os
import resource
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assay.engines.machine import out_of_memory
from assay.engines.scoring import (
    Engagement,
    Head,
    HookSpec,
    ScoreJob,
    ScoringPath,
    StateRows,
    VocabularyShard,
    Window,
    to_device,
    to_host,
)
from assay.engines.vllm.hooks import WINDOW, KvHooks, Steps, around_steps
from assay.engines.vllm.start import REPORTS
from assay.errors import AssayError, UsageError

# Which tokens of a window each step feeds, and which row of a step's states belongs to which of
# them.
#
# vLLM packs the requests of a step one after the other: request r of the batch has `count` rows,
# that of its tokens `start`, `start + 1`, … A window is scored only if every wanted row came
# exactly once, each step fed exactly the tokens that were planned, and the tokens fed were the
# window's own.


@dataclass(frozen=True)
class WindowPlan:
    """How one window of `length` tokens goes through the engine.

    The first `prompt` tokens are the prompt of the request; those that follow are generated, each
    forced to be the window's own. `blocks` are the (first, past the last) tokens of each step; the
    last token of a window predicts nothing and is never fed.
    """

    prompt: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def largest(self) -> int:
        """Tokens of the largest step."""
        return max(hi - lo for lo, hi in self.blocks)


def plan_window(length: int, job: ScoreJob) -> WindowPlan:
    """The plan of a window of `length` tokens.

    Prefill: everything in one step. Chunked: the prefix (`scored_from − 1` tokens) in one step,
    then blocks of `job.chunk`, all of it the prompt. Decode: the prefix is the prompt (the first
    token, where there is none: a request cannot be empty), then one token a step.
    """
    last, prefix = length - 1, job.scored_from - 1
    if job.path is ScoringPath.PREFILL:
        return WindowPlan(last, ((0, last),))
    if job.path is ScoringPath.CHUNKED:
        edges = sorted({0, prefix, *range(prefix, last, job.chunk), last})
        return WindowPlan(last, tuple(pairwise(edges)))
    prompt = max(1, prefix)
    return WindowPlan(prompt, ((0, prompt), *((i, i + 1) for i in range(prompt, last))))


def batch_size(
    wanted: int,
    plan: WindowPlan,
    length: int,
    *,
    step_tokens: int,
    sequences: int,
    cache_tokens: int,
    block: int,
) -> int:
    """Windows that can run side by side without a step being cut or a request being put off; 0 if
    not even one.

    A step holds at most `step_tokens` tokens, the cache `cache_tokens` in blocks of `block`.
    """
    room = cache_tokens // (-(-length // block) * block)
    return max(0, min(wanted, sequences, step_tokens // plan.largest, room))


def cache_reads(blocks: Sequence[tuple[int, int]]) -> int:
    """Tokens of earlier steps that attention reads in all steps: each step reads what came before
    it.
    """
    return sum(lo for lo, _ in blocks)


@dataclass(frozen=True)
class Fed:
    """What one request had in one step: its window, the first position, the token ids that were
    fed.
    """

    window: int
    start: int
    tokens: Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Moves:
    """Rows `source` of a step's states go to rows `target` of the batch's buffer; both int64 [n]."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]


@dataclass
class RowLedger:
    """Books the rows of a batch of windows (all of one length). Row `first` … `length − 2` of each
    are wanted.

    The buffer of the batch has `rows` rows a window, in the order of `windows`: token ids by window
    key.
    """

    windows: Mapping[int, NDArray[np.int32]]
    first: int
    blocks: tuple[tuple[int, int], ...]
    _slots: dict[int, int] = field(init=False)
    _seen: NDArray[np.int32] = field(init=False)
    _steps: dict[int, list[tuple[int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self._slots = {key: slot for slot, key in enumerate(self.windows)}
        self._seen = np.zeros((len(self.windows), self.rows), np.int32)
        self._steps = {key: [] for key in self.windows}

    @property
    def rows(self) -> int:
        """Wanted rows of one window."""
        return self.blocks[-1][1] - self.first

    def book(self, step: Sequence[Fed]) -> Moves:
        """Book one step, its requests in the order of the batch; AssayError for what was not asked
        for.
        """
        source: list[NDArray[np.int64]] = []
        target: list[NDArray[np.int64]] = []
        offset = 0
        for fed in step:
            count = len(fed.tokens)
            if fed.window not in self.windows:
                raise _wrong(f"a request of another run was scheduled (window {fed.window})")
            own = self.windows[fed.window][fed.start : fed.start + count]
            if len(own) != count or not np.array_equal(own, np.asarray(fed.tokens)):
                raise _wrong(
                    f"window {fed.window} was fed other tokens than its own at position"
                    f" {fed.start}: the forced token was not taken"
                )
            self._steps[fed.window].append((fed.start, fed.start + count))
            lo = max(fed.start, self.first)
            hi = min(fed.start + count, self.first + self.rows)
            if lo < hi:
                slot = self._slots[fed.window]
                self._seen[slot, lo - self.first : hi - self.first] += 1
                source.append(np.arange(lo, hi) - fed.start + offset)
                target.append(np.arange(lo, hi) - self.first + slot * self.rows)
            offset += count
        empty = np.zeros(0, np.int64)
        return Moves(
            np.concatenate(source) if source else empty, np.concatenate(target) if target else empty
        )

    def check(self) -> None:
        """AssayError unless every wanted row came once, in exactly the planned steps."""
        for key, slot in self._slots.items():
            missing, doubled = int((self._seen[slot] == 0).sum()), int((self._seen[slot] > 1).sum())
            if missing or doubled:
                raise _wrong(
                    f"window {key}: {missing} rows are missing and {doubled} came more than once"
                )
            if tuple(self._steps[key]) != self.blocks:
                raise _wrong(
                    f"window {key} went through in {len(self._steps[key])} steps instead of"
                    f" {len(self.blocks)}, beginning with {self._steps[key][:3]} instead of"
                    f" {list(self.blocks[:3])}"
                )


def _wrong(what: str) -> AssayError:
    return AssayError(
        f"vLLM did not run the windows as asked: {what}",
        finding_id="fidelity.engine_failed",
        remedy=(
            "use a smaller batch, so that the KV cache holds it, and no other requests in the same"
            " engine"
        ),
    )


# What runs in every rank.


OnStep = Callable[[list[Fed], torch.Tensor], None]
"""Called after each step with what every request of the batch was fed, in order, and the final
states [tokens, d].
"""

_PLAIN = frozenset({"UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"})
_CHECKED_ROWS = 16


@dataclass(frozen=True)
class Place:
    """Where a rank stands: number `tensor_rank` of the `tensor_ranks` of pipeline stage `stage`."""

    rank: int = 0
    tensor_rank: int = 0
    tensor_ranks: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def ranks(self) -> int:
        """All ranks of the engine."""
        return self.tensor_ranks * self.stages

    @property
    def scores(self) -> bool:
        """Whether it is of the last stage, which alone has final states and an output head."""
        return self.stage == self.stages - 1

    def shard(self, vocab: int) -> tuple[int, int]:
        """Rows of an output head that is held whole by every rank: an even share, from … to."""
        each = -(-vocab // self.tensor_ranks)
        return min(vocab, each * self.tensor_rank), min(vocab, each * (self.tensor_rank + 1))


@dataclass(frozen=True)
class Failure:
    """An error of a rank in parts, as it travels; a rank never raises through vLLM, which would
    keep its words alone.
    """

    rank: int
    kind: str
    message: str
    facts: Mapping[str, Any]

    def error(self, ranks: int) -> AssayError:
        """The error itself, with the number of the rank in it."""
        message = f"rank {self.rank} of {ranks}: {self.message}"
        if self.kind == "bug":
            smaller = "use a smaller --batch or shorter windows, or run it again with --debug"
            return AssayError(message, finding_id="fidelity.engine_failed", remedy=smaller)
        return (UsageError if self.kind == "UsageError" else AssayError)(message, **self.facts)


@dataclass(frozen=True)
class HeadFile:
    """An output head in a safetensors file (`weight` [V, d] and perhaps `bias` [V]), of which each
    rank reads its rows.
    """

    path: str
    vocab_size: int
    softcap: float | None
    scale: float

    @classmethod
    def of(cls, head: Head, folder: Path, number: int) -> HeadFile:
        """The file that the head came from, or one that is written into `folder` now."""
        path = head.file
        if path is None:
            from safetensors.torch import save_file

            path = folder / f"head-{number}.safetensors"
            parts = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
            save_file({name: t.detach().cpu().contiguous() for name, t in parts.items()}, path)
        return cls(str(path), head.vocab_size, head.softcap, head.scale)

    def rows(self, lo: int, hi: int, device: torch.device) -> Head:
        """Rows lo … hi − 1, or as many of them as there are."""
        from safetensors import safe_open

        lo, hi = min(lo, self.vocab_size), min(hi, self.vocab_size)
        with safe_open(self.path, framework="pt") as file:
            found = {name: file.get_slice(name)[lo:hi].to(device) for name in file.keys()}  # noqa: SIM118
        return Head(found["weight"], found.get("bias"), softcap=self.softcap, scale=self.scale)


class ScoringExtension:
    """What vLLM's worker gets (`worker_extension_cls`): one method for `collective_rpc`, which
    calls those of its `Rank`.
    """

    model_runner: Any
    _assay: Rank

    def assay_call(self, name: str, *arguments: Any) -> Any:
        """Call a method of this rank; with several ranks an error comes back as a `Failure`."""
        rank = self.__dict__.get("_assay")
        if rank is None:
            rank = self._assay = Rank(self.model_runner, place_of(self))
        method = getattr(rank, name)
        if rank.place.ranks == 1:
            return method(*arguments)
        try:
            return method(*arguments)
        except AssayError as error:
            facts = {
                "finding_id": error.finding_id,
                "remedy": error.remedy,
                "evidence": error.evidence,
            }
            return Failure(rank.place.rank, type(error).__name__, error.message, facts)
        except Exception as error:
            if name in ("finish", "reduce"):  # the others may wait for it
                rank.leave(error)
            return Failure(rank.place.rank, "bug", words_of(error), {})


def place_of(worker: Any) -> Place:
    """Where a worker of vLLM stands."""
    parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    if parallel is None or parallel.world_size == 1:
        return Place()
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor, stages = get_tp_group(), get_pp_group()
    return Place(
        worker.rank,
        tensor.rank_in_group,
        tensor.world_size,
        stages.rank_in_group,
        stages.world_size,
    )


class Rank:
    """One rank: a model runner, the hook in its layers, and the batch that it is at."""

    def __init__(self, runner: Any, place: Place) -> None:
        self.runner = runner
        self.place = place
        self._head: Head | None = None
        self._head_checked = False
        self._heads: dict[int, Head] = {}
        self._vocabularies: dict[int, int] = {}
        self._hooks: KvHooks | None = None
        self._unwatch: Callable[[], None] = lambda: None
        self._ledger: RowLedger | None = None
        self._windows = 0
        self._buffer: torch.Tensor | None = None
        self._error: AssayError | None = None
        self.gather: Callable[[torch.Tensor], torch.Tensor] = _gather
        if place.stage and runner.intermediate_tensors is None:
            # vLLM makes them when it measures memory, which its CPU build leaves out where the
            # cache's size is given.
            runner.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )

    @property
    def model(self) -> Any:
        """The model, or the layers of it that this rank has."""
        return self.runner.get_model()

    @property
    def head(self) -> Head:
        """Its rows of the engine's output head."""
        if self._head is None:
            self._head = output_head(self.model, self.place)
        return self._head

    def facts(self) -> dict[str, Any]:
        """Where it stands, and what it has reserved for K and V, from the memory that it really
        allocated.
        """
        runner = self.runner
        groups = runner.kv_cache_config.kv_cache_groups
        block = groups[0].kv_cache_spec.block_size if groups else 1
        tokens = runner.kv_cache_config.num_blocks * block
        device = next((p.device for p in parameters(self.model)), torch.device("cpu"))
        found = {
            **vars(self.place),
            "device": str(device),
            "block_size": block,
            "cache_tokens": tokens,
            "bytes_per_token": _allocated(runner.kv_caches) / tokens if tokens else 0.0,
            "layers": sum(len(group.layer_names) for group in groups),
            "attention_backend": ", ".join(
                sorted({g.backend.get_name() for groups in runner.attn_groups for g in groups})
            ),
        }
        if device.type == "cuda":
            found["memory"] = torch.cuda.get_device_properties(device).total_memory
        return found

    def memory(self) -> dict[str, int]:
        """Bytes of output heads that this rank holds, the engine's and references', and the most
        memory it has used.
        """
        held = {}
        for head in (self.head, *self._heads.values()) if self.place.scores else ():
            for tensor in (head.weight, head.bias):
                if tensor is not None:
                    held[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"heads": sum(held.values()), "peak": peak}

    # What scoring asks for, in this order.

    def begin(self, hook: HookSpec | None, prefix: int, eager: bool) -> int:
        """Put a hook on keys and values in place; how often it has to see a batch."""
        self.end()
        if hook is None:
            return 1
        share = (self.place.tensor_rank, self.place.tensor_ranks)
        steps = Steps(self.runner, prefix)
        self._hooks = KvHooks(hook, self.model, eager=eager, steps=steps, share=share)
        return self._hooks.passes

    def start(
        self, keys: Mapping[int, Any], first: int, blocks: tuple[tuple[int, int], ...], index: int
    ) -> None:
        """Begin pass `index` over a batch: token ids by key, of which rows from `first` on are
        wanted.
        """
        if self._hooks:
            self._hooks.start_pass(index)
        self._ledger, self._buffer, self._error = RowLedger(keys, first, blocks), None, None
        self._windows = len(keys)
        self.watch(self._keep)

    def watch(self, on_step: OnStep) -> None:
        """Hand the states of every step to `on_step`, until `unwatch`."""
        runner = self.runner

        def step(run: Callable[[], Any], scheduled: Any) -> Any:
            try:
                output = run()
            except Exception as error:
                if self.place.ranks > 1:
                    self.leave(error)
                raise
            if self.place.scores and runner.execute_model_state is not None:
                on_step(_fed(runner, scheduled), runner.execute_model_state.hidden_states)
            return output

        self._unwatch = around_steps(runner, step)

    def _keep(self, step: list[Fed], states: torch.Tensor) -> None:
        assert self._ledger is not None
        try:
            moves = self._ledger.book(step)
        except AssayError as error:
            if self.place.ranks == 1:
                raise
            self._error = (
                self._error or error
            )  # the step goes on: other ranks may be in the middle of theirs
            return
        if self._buffer is None:
            self._buffer = states.new_empty(self._windows * self._ledger.rows, states.shape[-1])
        if len(moves.source):
            source, target = (
                to_device(torch.from_numpy(m), states.device) for m in (moves.source, moves.target)
            )
            self._buffer.index_copy_(0, target, states.index_select(0, source))

    def unwatch(self) -> None:
        """Take the watch off again; what was around the method before it stays."""
        self._unwatch()
        self._unwatch = lambda: None

    def finish(self) -> None:
        """The batch went through: every wanted row came once, the hook fired in every layer, the
        head is the engine's.
        """
        if self._error:
            raise self._error
        if self.place.scores and self._ledger:
            self._ledger.check()
        if self._hooks:
            self._hooks.commit()
        if not self.place.scores:
            return
        if self._buffer is None:
            raise RuntimeError("no step gave states")
        if not self._head_checked:
            check_head(self.model, self.head, self.place, self._buffer[:_CHECKED_ROWS])
            self._head_checked = True

    def states(self) -> list[torch.Tensor] | None:
        """States [rows, d] of each window; with several ranks on the CPU, and of one rank alone."""
        if self._buffer is None or self.place.tensor_rank or not self.place.scores:
            return None
        buffer = self._buffer if self.place.ranks == 1 else self._buffer.cpu()
        return list(buffer.view(self._windows, -1, buffer.shape[-1]))

    def keep_head(self, number: int, file: HeadFile) -> None:
        """Read this rank's rows of a reference's head; those that are the engine's own are not held
        twice.
        """
        if not self.place.scores:
            return
        own = self.head
        lo = first_row(self.model, self.place)
        head = file.rows(lo, lo + own.vocab_size, own.weight.device)
        self._vocabularies[number] = min(file.vocab_size, whole_vocabulary(self.model))
        if _equal(head.weight, own.weight) and _equal(head.bias, own.bias):
            head = Head(own.weight, own.bias, softcap=head.softcap, scale=head.scale)
        self._heads[number] = head

    def reduce(
        self,
        place: int,
        window: Window,
        first: int,
        reference: torch.Tensor,
        head: int,
        target: str,
    ) -> dict[str, torch.Tensor] | None:
        """Statistics of the window at a place of the batch against states of a reference, on the
        CPU; all ranks must call it.
        """
        if not self.place.scores or self._buffer is None:
            return None
        module, _, name = target.partition(":")
        own = self._buffer.view(self._windows, -1, self._buffer.shape[-1])[place]
        sides = [
            [StateRows(window, first, s, h)]
            for s, h in ((reference, self._heads[head]), (own, self.head))
        ]
        shards: tuple[VocabularyShard, ...] = ()
        if self.place.tensor_ranks > 1:
            lo, ranks = first_row(self.model, self.place), self.place.tensor_ranks
            shards = (VocabularyShard(lo, self._vocabularies[head], ranks, self.gather),)
        found = getattr(import_module(module), name)(*sides, *shards)
        return to_host([vars(found[0])])[0]

    def own_head(self) -> Head:
        """Its rows of the head where they are; of use only where the rank is in the caller's
        process.
        """
        return self.head

    def head_rows(self) -> tuple[int, Head] | None:
        """Its rows of the engine's head on the CPU, and the first of them: a reference's head is
        stored once, whole.
        """
        if not self.place.scores:
            return None
        head = self.head
        bias = None if head.bias is None else head.bias.cpu()
        return first_row(self.model, self.place), Head(
            head.weight.cpu(), bias, softcap=head.softcap, scale=head.scale
        )

    def engagement(self) -> Engagement | None:
        """What the hook counted, None where there is none."""
        return self._hooks.engagement() if self._hooks else None

    def end(self) -> None:
        """Take the hook off, and forget the batch."""
        if self._hooks:
            self._hooks.remove()
        self._hooks, self._ledger, self._buffer, self._error = None, None, None, None

    def discard(self) -> None:
        """Forget a batch, or a step, that failed between the model and the sampler."""
        if self._hooks:
            self._hooks.discard()
        self.runner.execute_model_state = None
        self._buffer = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def leave(self, error: Exception) -> None:
        """Say why in a file, and end this process."""
        folder = os.environ.get(REPORTS)
        if folder:
            told = error.message if isinstance(error, AssayError) else words_of(error)
            found = {
                "message": told,
                "memory": isinstance(error, RuntimeError) and out_of_memory(error),
                "remedy": getattr(error, "remedy", None),
                "finding_id": getattr(error, "finding_id", None),
            }
            (Path(folder) / f"{self.place.rank}.json").write_text(
                json.dumps(found), encoding="utf-8"
            )
        os._exit(1)


def words_of(error: BaseException) -> str:
    """Kind and message of an error; where it came from, if it has no message."""
    frames = traceback.extract_tb(error.__traceback__)
    where = (
        f"in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno}"
        if frames
        else ""
    )
    return f"{type(error).__name__}: {str(error) or where}"


def parameters(model: Any) -> Iterable[torch.Tensor]:
    """The parameters of a model; none where it is no module."""
    return model.parameters() if hasattr(model, "parameters") else ()


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of every rank of this stage, [ranks, …], in the order of the ranks."""
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    parts = [torch.empty_like(tensor) for _ in range(group.world_size)]
    dist.all_gather(parts, tensor.contiguous(), group=group.device_group)
    return torch.stack(parts)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))


# The output head as vLLM has it: with tensor parallelism a rank holds rows of the vocabulary,
# padded to a multiple of 64.


def whole_vocabulary(model: Any) -> int:
    """Entries of the whole head, its padding left out."""
    return int(model.logits_processor.org_vocab_size)


def first_row(model: Any, place: Place) -> int:
    """The id of the first row that this rank has."""
    size, indices = whole_vocabulary(model), getattr(model.lm_head, "shard_indices", None)
    if place.tensor_ranks == 1:
        return 0
    return (
        place.shard(size)[0] if indices is None else min(size, int(indices.org_vocab_start_index))
    )


def output_head(model: Any, place: Place = Place()) -> Head:
    """This rank's rows of the head of `model`, padding cut off. AssayError where there is none in
    plain numbers.
    """
    linear = getattr(model, "lm_head", None)
    processor = getattr(model, "logits_processor", None)
    if linear is None or processor is None:
        raise _no_head(model, "it has no lm_head with a logits processor")
    method = type(getattr(linear, "quant_method", None)).__name__
    if method not in _PLAIN or linear.weight.dim() != 2 or not linear.weight.numel():
        raise _no_head(model, f"its output head is quantised or packed ({method})")
    if processor.soft_cap is not None and processor.scale != 1.0:
        raise _no_head(model, "it both caps and scales its logits")
    size, lo = whole_vocabulary(model), first_row(model, place)
    indices = getattr(linear, "shard_indices", None)
    if place.tensor_ranks == 1 or indices is None:
        rows = slice(*place.shard(size))
    else:
        rows = slice(0, min(size, int(indices.org_vocab_end_index)) - lo)
    bias = getattr(linear, "bias", None)
    return Head(
        linear.weight.detach()[rows],
        None if bias is None else bias.detach()[rows],
        softcap=processor.soft_cap,
        scale=float(processor.scale),
    )


def check_head(model: Any, head: Head, place: Place, states: torch.Tensor) -> None:
    """Compare the head with the engine's own logits on some states [n, d]; AssayError where they
    differ.

    The engine gathers its logits of these few rows, as it does for every token that it samples.
    """
    own = model.compute_logits(states)
    if own is None:  # gathered by another rank
        return
    lo, whole = first_row(model, place), own.shape[-1]
    own = own[..., lo : lo + head.vocab_size].float()
    rebuilt = head.logits(states)
    finite = torch.isfinite(own)
    largest = float(own[finite].abs().max()) if finite.any() else 0.0
    tolerance = (
        max(4 * float(torch.finfo(states.dtype).eps), 1e-5) * largest
    )  # float32 sums in another order
    difference = float((own - rebuilt)[finite].abs().max()) if finite.any() else 0.0
    if (
        whole != whole_vocabulary(model)
        or own.shape != rebuilt.shape
        or not difference <= tolerance
    ):
        raise AssayError(
            f"the logits of {type(model).__name__} cannot be rebuilt from its final states: they"
            f" differ by {difference:.3g}",
            finding_id="fidelity.no_head",
            remedy="compare it through another engine (hf:, gguf:)",
            evidence={"max_difference": difference, "tolerance": tolerance},
        )


def _no_head(model: Any, why: str) -> AssayError:
    return AssayError(
        f"the logits of {type(model).__name__} cannot be rebuilt from its final states: {why}",
        finding_id="fidelity.no_head",
        remedy="compare it through another engine (hf:, gguf:)",
    )


def _fed(runner: Any, scheduler_output: Any) -> list[Fed]:
    """What each request of the step was fed, in the order in which their rows lie."""
    step = []
    for row, request_id in enumerate(runner.input_batch.req_ids):
        request = runner.requests[request_id]
        start, count = (
            request.num_computed_tokens,
            scheduler_output.num_scheduled_tokens[request_id],
        )
        window = (request.sampling_params.extra_args or {}).get(WINDOW, -1)
        tokens = runner.input_batch.token_ids_cpu[row, start : start + count]
        step.append(Fed(window, start, tokens.copy()))
    return step


def _allocated(tensors: Iterable[Any]) -> int:
    """Bytes behind the tensors; layers may share one allocation, and some keep a list of tensors."""
    storages: dict[int, int] = {}
    for entry in tensors:
        for tensor in entry if isinstance(entry, list | tuple) else (entry,):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def merged(parts: Sequence[Engagement | None]) -> Engagement:
    """The engagement of all ranks of a model, whose layers or heads they share; a layer fires once
    however many have it.
    """
    fires: dict[int, int] = {}
    notes: dict[str, Any] = {}
    found = [part for part in parts if part is not None]
    for part in found:
        for layer, count in part.per_layer.items():
            fires[layer] = max(count, fires.get(layer, 0))
        notes |= part.notes
    return Engagement(sum(fires.values()) if found else None, None, fires, notes)
