"""What assay does inside each rank of vLLM: it watches steps, keeps states, reduces rows."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from assay.engines.device import out_of_memory
from assay.engines.scoring import (
    Engagement,
    Head,
    HookSpec,
    StateRows,
    VocabularyShard,
    Window,
    to_device,
    to_host,
)
from assay.engines.vllm.head import (
    HeadFile,
    check_head,
    first_row,
    output_head,
    parameters,
    whole_vocabulary,
    words_of,
)
from assay.engines.vllm.kv_hooks import KvHooks
from assay.engines.vllm.ledger import Fed, RowLedger
from assay.engines.vllm.place import Place, place_of
from assay.engines.vllm.start import REPORTS
from assay.engines.vllm.steps import WINDOW, Steps, around_steps
from assay.errors import AssayError, UsageError

OnStep = Callable[[list[Fed], torch.Tensor], None]
"""Called after each step with what every request of the batch was fed, in order, and the final
states [tokens, d].
"""


_CHECKED_ROWS = 16


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
        self.gather: Callable[[torch.Tensor], torch.Tensor] = gather
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
            "bytes_per_token": allocated(runner.kv_caches) / tokens if tokens else 0.0,
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
                on_step(fed_of(runner, scheduled), runner.execute_model_state.hidden_states)
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
        if equal(head.weight, own.weight) and equal(head.bias, own.bias):
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


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of every rank of this stage, [ranks, …], in the order of the ranks."""
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    parts = [torch.empty_like(tensor) for _ in range(group.world_size)]
    dist.all_gather(parts, tensor.contiguous(), group=group.device_group)
    return torch.stack(parts)


def equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two ranks hold the same tensor, or neither holds one."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))


def fed_of(runner: Any, scheduler_output: Any) -> list[Fed]:
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


def allocated(tensors: Iterable[Any]) -> int:
    """Bytes behind the tensors; layers may share one allocation, and some keep a list
    of tensors.
    """
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
