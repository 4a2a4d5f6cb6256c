"""The KV connector of vLLM that keeps full blocks entropy-coded in a tier, and brings them back by
prefix.

`vllm serve MODEL --kv-transfer-config '{"kv_connector": "AssayTier", "kv_connector_module_path":
"assay_lab.kv.connector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
"kv_connector_extra_config": {"tables": FILE, …}}'`; `assay kv serve --tier stream` writes that
line. Decisions are made in `assay_lab.kv.tier`; here are vLLM's calls and pages. How a backend
lays out a page is found by writing into one: CPU attention packs keys for its instructions.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from assay.engines.vllm.hooks import REPORT
from assay.engines.vllm.start import let_numba_be_looked_into
from assay.errors import AssayError
from assay_lab.kv.block_tables import BlockTables, weights_digest
from assay_lab.kv.blocks import BlockCodec
from assay_lab.kv.tier.scheduler import Load, Save, TierScheduler
from assay_lab.kv.tier.store import BlockStore, write_counters
from assay_lab.kv.tier.transfer import TierWorker

let_numba_be_looked_into()
_LOG = logging.getLogger("assay.kv")

BLOCK = 128
"""Tokens of a block by default."""


@dataclass
class Work(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker does in a step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass(frozen=True)
class _Shared:
    """What scheduler and worker of one process have in common."""

    store: BlockStore
    codec: BlockCodec


_OPEN: dict[str, _Shared] = {}


def _shared(extra: Mapping[str, Any]) -> _Shared:
    key = repr(sorted(extra.items()))
    if key not in _OPEN:
        folder = extra.get("folder")
        tables = BlockTables.read(Path(extra["tables"]))
        store = BlockStore(Path(folder) if folder else None, int(extra["size"]))
        _OPEN[key] = _Shared(store, BlockCodec(tables, int(extra.get("threads", 2))))
    return _OPEN[key]


class AssayTier(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the top of the file. Extra configuration: tables, size (bytes), folder, block (tokens),
    threads, report.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        report = extra.get("report") or os.environ.get(REPORT)
        self._report = Path(report) if report else None
        try:
            shared = _shared(extra)
            self._store, self._codec = shared.store, shared.codec
            self._spec = _check(vllm_config, kv_cache_config, self._codec)
        except AssayError as error:
            if self._report is not None:
                self._report.write_text(
                    json.dumps({"error": error.message, "remedy": error.remedy})
                )
            raise
        page = self._spec.block_size
        self._block = -(-int(extra.get("block", BLOCK)) // page) * page
        self._planner = TierScheduler(self._store, self._codec.tables.digest, self._block, page)
        self._loads: list[Load] = []
        self._failed: set[int] = set()
        self._mover: TierWorker | None = None
        self._told = 0.0

    # Scheduler.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens behind the computed ones that the tier has; they are loaded before the step
        runs.
        """
        if (
            request.lora_request is not None
            or request.mm_features
            or getattr(request, "prompt_embeds", None) is not None
        ):
            return 0, False  # token ids do not say all of what such a cache is made of
        how = request.sampling_params
        if how is not None and how.prompt_logprobs is not None:
            return 0, False  # tokens that are not computed have no log-probabilities
        salt = request.cache_salt or ""
        return (
            self._planner.match(
                request.request_id, request.all_token_ids, num_computed_tokens, salt
            ),
            False,
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Remember what is loaded in the next step."""
        load = self._planner.allocated(
            request.request_id, blocks.get_block_ids()[0], num_external_tokens
        )
        if load is not None:
            self._loads.append(load)

    def build_connector_meta(self, scheduler_output: Any) -> Work:
        """Loads and saves of a step."""
        work, self._loads = Work(self._loads), []
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            before = new.num_computed_tokens
            after = before + scheduled[new.req_id]
            work.saves += self._planner.step(
                new.req_id, before, after, new.block_ids[0], again=True
            )
        cached = scheduler_output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            before = cached.num_computed_tokens[i]
            pages: Sequence[int] = (cached.new_block_ids[i] or ([],))[0]
            again = name in cached.resumed_req_ids
            work.saves += self._planner.step(
                name, before, before + scheduled[name], pages, again=again
            )
        return work

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Its blocks may be freed: what left was copied."""
        self._planner.finished(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """The same."""
        return self.request_finished(request, block_ids)

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The caches of all layers, by name."""
        modules = self._vllm_config.compilation_config.static_forward_context
        facts = self._codec.facts
        pages = VllmPages(
            {_layer_of(n): (modules[n], c) for n, c in kv_caches.items()}, self._spec, facts.layers
        )
        codec, encoder = self._codec, None
        if pages.device.type == "cuda":
            from assay_lab.kv.blocks_gpu import GpuBlockCodec
            from assay_lab.kv.encode_gpu import GpuEncoder

            codec = GpuBlockCodec(codec.tables, pages.device, min(16, os.cpu_count() or 1))
            codec.warm(self._block)
            encoder = GpuEncoder(codec)
            encoder.warm(self._block)
        self._mover = TierWorker(
            self._store, codec, pages, self._block, self._spec.block_size, encoder=encoder
        )
        self._tell(now=True)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Decode what this step needs."""
        work = self._get_connector_metadata()
        for load in work.loads:
            self._failed.update(self._workers().load(load))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is loaded, or on its way before the step on the device."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks leave after the step, all layers together."""

    def wait_for_save(self) -> None:
        """Copy out what became full in this step, whose loads have ended or soon will."""
        if self._mover is not None and self.has_connector_metadata():
            self._failed.update(self._mover.settle())
            self._mover.save(self._get_connector_metadata().saves)
        self._tell()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that vLLM must compute again."""
        if self._mover is not None:
            self._failed.update(self._mover.settle())
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        """Store what has left, and say what there was."""
        if self._mover is not None:
            self._mover.flush()
            self._mover.close()
            self._tell(now=True)

    def reset_cache(self) -> bool:
        """Let every block go."""
        self._store.clear()
        return True

    def _workers(self) -> TierWorker:
        if self._mover is None:
            raise RuntimeError("vLLM has not registered its caches")
        return self._mover

    def _tell(self, *, now: bool = False) -> None:
        """Write the counters, at most once a second."""
        if (
            self._report is not None
            and self._mover is not None
            and (now or time.monotonic() > self._told + 1)
        ):
            self._told = time.monotonic()
            facts = self._codec.facts
            write_counters(
                self._report,
                self._store,
                layers=facts.layers,
                spec=facts.spec,
                block_tokens=self._block,
                decoder=self._workers().codec.device.type,
            )


class VllmPages:
    """vLLM's pages of one group of layers [pages, KV heads, tokens of a page, 2 · head_dim],
    however they are laid out.
    """

    def __init__(
        self, layers: Mapping[int, tuple[Any, torch.Tensor]], spec: Any, count: int
    ) -> None:
        if sorted(layers) != list(range(count)):
            raise _refused(
                f"vLLM has caches of layers {sorted(layers)}, the tables are of {count}",
                "calibrate this model",
            )
        self._layers = [layers[i] for i in range(count)]
        self._heads, self._dim, self._size = spec.num_kv_heads, spec.head_size, spec.block_size
        self._places = self._probe()
        self.target = self._target() if self.device.type == "cuda" else None

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self._places.device

    def _probe(self) -> torch.Tensor:
        """The place in a flat page of each of [2, tokens, heads · head_dim]: every bit of its
        number is written and read.
        """
        module, cache = self._layers[0]
        count = 2 * self._size * self._heads * self._dim
        numbers = torch.arange(count, device=cache.device).view(
            2, self._size, self._heads, self._dim
        )
        slots = torch.arange(self._size, device=cache.device)
        found = torch.zeros(count, dtype=torch.long, device=cache.device)
        for bit in range(count.bit_length()):
            page = torch.zeros_like(cache[:1])
            k, v = ((numbers >> bit) & 1).to(cache.dtype)
            module.impl.do_kv_cache_update(module, k.contiguous(), v.contiguous(), page, slots)
            found += (page.reshape(-1) > 0.5).long() << bit
        places = torch.empty_like(found)
        places[found] = torch.arange(count, device=cache.device)
        if len(found.unique()) != count:
            raise _refused(
                "vLLM's attention backend keeps a page in a way that cannot be read back",
                "choose another",
            )
        return places

    def _target(self) -> Any:
        """Where a kernel writes tokens itself; None where channels of a head are not side by
        side, or layers differ.
        """
        from assay_lab.kv.blocks_gpu import Target

        caches = [cache for _, cache in self._layers]
        first, size = caches[0], caches[0].element_size()
        where = torch.zeros((), dtype=torch.long, device=self.device)
        for count, step in zip(first.shape[1:], first.stride()[1:], strict=True):
            where = where[..., None] + torch.arange(count, device=self.device) * step
        lies = where.reshape(-1)[self._places].view(2, self._size, self._heads, self._dim)
        apart = [cache.data_ptr() - first.data_ptr() for cache in caches]
        alike = all(
            (c.dtype, c.shape, c.stride()) == (first.dtype, first.shape, first.stride())
            for c in caches
        )
        dense = bool((lies == lies[..., :1] + torch.arange(self._dim, device=self.device)).all())
        if not alike or not dense or any(n % size for n in apart):
            _LOG.warning(
                "loaded blocks are copied into vLLM's pages layer by layer: %s lays them out in"
                " another way",
                first.stride(),
            )
            return None
        offsets = torch.tensor([n // size for n in apart], device=self.device)
        table = (offsets[:, None, None, None] + lies[..., 0]).flatten(0, 1).contiguous()
        return Target(first, table, first.stride(0))

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """See `assay_lab.kv.tier.transfer.Pages`."""
        some = self._sent(torch.tensor(pages))
        parts = []
        for _, cache in self._layers:
            flat = cache[some].reshape(len(pages), -1)[:, self._places]
            parts.append(flat.view(len(pages), 2, self._size, -1).transpose(0, 1).flatten(1, 2))
        return torch.stack(parts)

    def write(self, slots: NDArray[np.int64], x: torch.Tensor) -> None:
        """See `assay_lab.kv.tier.transfer.Pages`."""
        where = self._sent(torch.from_numpy(slots))
        for (module, cache), rows in zip(self._layers, x, strict=True):
            k, v = rows.to(cache.device, cache.dtype).view(2, -1, self._heads, self._dim)
            module.impl.do_kv_cache_update(module, k.contiguous(), v.contiguous(), cache, where)

    def _sent(self, numbers: torch.Tensor) -> torch.Tensor:
        """On the device, without waiting for it."""
        return (
            numbers.pin_memory().to(self.device, non_blocking=True)
            if self.device.type == "cuda"
            else numbers
        )


def _check(vllm_config: Any, kv_cache_config: Any, codec: BlockCodec) -> Any:
    """The cache's specification; AssayError for one that blocks of these tables do not fit."""
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise _refused(
            "a block that is not believed must be computed again",
            '"kv_load_failure_policy": "recompute"',
        )
    parallel = vllm_config.parallel_config
    if parallel.world_size != 1 or (parallel.distributed_executor_backend or "uni") != "uni":
        raise _refused(
            "the tier needs scheduler and worker in one process",
            "leave out the options of parallelism",
        )
    if vllm_config.speculative_config is not None:
        raise _refused(
            "drafted tokens that are rejected would be stored", "leave out --speculative-config"
        )
    groups = kv_cache_config.kv_cache_groups
    spec: Any = groups[0].kv_cache_spec if len(groups) == 1 else None
    if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
        raise _refused(
            "the cache is not that of full attention in every layer", "serve it without a tier"
        )
    facts = codec.facts
    if (len(groups[0].layer_names), spec.num_kv_heads, spec.head_size) != (
        facts.layers,
        facts.kv_heads,
        facts.head_dim,
    ):
        raise _refused(
            f"the tables are of {facts.layers} layers with {facts.kv_heads} KV heads of"
            f" {facts.head_dim} channels",
            "calibrate this model",
        )
    if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise _refused(f"the cache holds {spec.dtype}", "leave out --kv-cache-dtype")
    if weights_digest(Path(vllm_config.model_config.model)) != facts.model:
        raise _refused(
            "the tables are of other weights than those that are served", "calibrate this model"
        )
    return spec


def _layer_of(name: str) -> int:
    numbers = re.findall(r"\.(\d+)\.", name)
    if len(numbers) != 1:
        raise _refused(f"{name} does not say which layer it is of", "serve it without a tier")
    return int(numbers[0])


def _refused(what: str, remedy: str) -> AssayError:
    return AssayError(
        f"stored blocks do not fit: {what}", finding_id="kv.unsupported", remedy=remedy
    )
