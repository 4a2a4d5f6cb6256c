"""vLLM's attention over packed pages: a backend of its plug-in interface (`CUSTOM`).

Tokens are coded as they are written. One decoded token reads pages as they are. A prompt of which
something is in the cache already (a later chunk, a cached prefix) has its pages unpacked into a
workspace that all layers share, which FlashAttention reads. A prompt that is new as a whole is read
exactly, by FlashAttention too. Every step leaves pages in the same state, whichever way it read.
"""

# mypy: disable-error-code="misc"

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
import vllm
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from assay.engines.vllm.hooks import report
from assay.errors import AssayError
from assay_lab.kv.pages import BLOCK, PAGES, launch
from assay_lab.kv.pages.layout import Layout, StreamTables, layout_of, together
from assay_lab.kv.pages.source import source_of


def register() -> None:
    """Make the backend vLLM's `CUSTOM`, and have its layers ask for pages of its size; AssayError
    in a vLLM without such.
    """
    try:
        # TurboQuant's class is the one whose pages have a size of their own.
        from vllm.v1.kv_cache_interface import TQFullAttentionSpec
    except ImportError as error:
        raise AssayError(
            f"vLLM {vllm.__version__} has no cache whose pages have a size of their own"
            " (TQFullAttentionSpec)",
            finding_id="kv.unsupported",
            remedy="use packed pages with vLLM 0.25, for CUDA",
        ) from error
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.PagesBackend")
    if hasattr(Attention.get_kv_cache_spec, "assay"):
        return
    inner = Attention.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, vllm_config: VllmConfig) -> Any:
        if self.attn_backend.get_name() != PagesBackend.get_name():
            return inner(self, vllm_config)
        return TQFullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size,
            dtype=torch.uint8,
            tq_slot_size=layout_of(self.num_kv_heads, self.head_size, BLOCK).slot,
        )

    get_kv_cache_spec.assay = True  # type: ignore[attr-defined]
    Attention.get_kv_cache_spec = get_kv_cache_spec


class PagesBackend(AttentionBackend):
    """Its cache is [pages, page's tokens, heads, slot] bytes, in which each page is laid out as
    `Layout` says.
    """

    accept_output_buffer = True
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        """Under this name vLLM finds it again."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Pages of one size."""
        return [BLOCK]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Those whose quarter is a power of two of at least 16."""
        return [64, 128]

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Others would read pages as keys and values."""
        return False

    @staticmethod
    def get_impl_cls() -> type[PagesImpl]:
        """What attends."""
        return PagesImpl

    @staticmethod
    def get_builder_cls() -> type[PagesBuilder]:
        """What prepares a step."""
        return PagesBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """In bytes."""
        return (
            num_blocks,
            block_size,
            num_kv_heads,
            layout_of(num_kv_heads, head_size, block_size).slot,
        )


@dataclass(frozen=True)
class Prompts:
    """Prompts that are read at once, requests `first` … `first + requests` − 1, whose queries are
    `rows` of the step.

    `queries` and `keys` [requests + 1] say where each begins in those rows and in its keys: the
    step's own where `fresh` (nothing of them was in the cache), else the workspace's.
    `longest_query` and `longest` are the most tokens of one.
    """

    fresh: bool
    first: int
    requests: int
    rows: slice
    queries: torch.Tensor
    keys: torch.Tensor
    longest_query: int
    longest: int


@dataclass
class PagesMetadata:
    """A step: decodes first, then prompts."""

    positions: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    tokens: int
    decodes: int
    prompts: list[Prompts]


class PagesBuilder(AttentionMetadataBuilder[PagesMetadata]):
    """Prepares steps; CUDA graphs take batches of single tokens whole."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagesMetadata:
        """What all layers of a step share; nothing waits for the GPU."""
        cam = common_attn_metadata
        decodes, prefills, _, _ = split_decodes_and_prefills(cam, decode_threshold=1)
        if cam.positions is None:
            raise RuntimeError("packed pages need positions: set VLLM_USE_V2_MODEL_RUNNER=0")
        prompts: list[Prompts] = []
        if prefills:
            ends = cam.query_start_loc_cpu[: decodes + prefills + 1].tolist()
            lengths = cam.seq_lens_cpu_upper_bound[: decodes + prefills].tolist()
            room = workspace_tokens(self.vllm_config)
            for first, end, fresh in together(ends, lengths, decodes, room):
                queries = cam.query_start_loc[first : end + 1] - ends[first]
                keys = queries
                if not fresh:
                    keys = torch.zeros_like(queries)
                    torch.cumsum(cam.seq_lens[first:end], 0, dtype=keys.dtype, out=keys[1:])
                prompts.append(Prompts(
                    fresh, first, end - first, slice(ends[first], ends[end]), queries, keys,
                    max(ends[i + 1] - ends[i] for i in range(first, end)), max(lengths[first:end]),
                ))  # fmt: skip
        return PagesMetadata(
            cam.positions,
            cam.slot_mapping,
            cam.block_table_tensor,
            cam.query_start_loc,
            cam.seq_lens,
            cam.num_actual_tokens,
            decodes,
            prompts,
        )


def workspace_tokens(config: VllmConfig) -> int:
    """Tokens that the workspace holds: those of the longest request, or of many short ones."""
    return max(int(config.model_config.max_model_len), 32768)


class PagesImpl(AttentionImpl[PagesMetadata]):
    """Attention of one layer over its pages."""

    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        for given, what in (
            (alibi_slopes, "ALiBi"),
            (sliding_window, "a sliding window"),
            (logits_soft_cap, "capped logits"),
            (attn_type != AttentionType.DECODER, f"attention of the kind {attn_type}"),
            (kv_sharing_target_layer_name, "another layer's cache"),
            (more.get("sinks") is not None, "learnt sinks"),
        ):
            if given:
                raise ValueError(f"packed pages do not do {what}: serve without them")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        if self.num_heads // self.num_kv_heads > 16:
            raise ValueError("packed pages take up to 16 query heads for a KV head")
        self.kv_cache_dtype = kv_cache_dtype
        config = get_current_vllm_config()
        if config.parallel_config.tensor_parallel_size > 1:
            raise ValueError("packed pages take tensor_parallel_size=1")
        self._config = config
        self._longest = int(config.model_config.max_model_len)
        self._tables: launch.LayerTables | None = None
        self._flash = _flash(head_size, scale)

    def _ready(self, layer: Any, device: torch.device) -> launch.LayerTables:
        """Tables of this layer; made when vLLM first runs the model, before it measures memory or
        captures graphs.
        """
        if self._tables is None:
            from vllm.model_executor.models.utils import extract_layer_index

            layout = layout_of(self.num_kv_heads, self.head_size, BLOCK)
            number = extract_layer_index(layer.layer_name)
            self._tables = _layer(self._config, number, layout, self._longest, device)
            _workspace(self._config, self.num_kv_heads, self.head_size, device)
            _check_once(
                layout, self.num_heads // self.num_kv_heads, self._config.model_config.dtype, device
            )
            report({"layers": number + 1})
        return self._tables

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagesMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values into pages, and attend. All are [tokens, heads,
        head_dim].
        """
        tables = self._ready(layer, query.device)
        if attn_metadata is None:
            return output.fill_(0)
        m = attn_metadata
        n = m.tokens
        q, out = query[:n], output[:n]
        k_new, v_new = key[:n], value[:n]
        turned = launch.prepare(
            q,
            k_new,
            v_new,
            m.positions[:n],
            kv_cache,
            m.slots[:n],
            m.starts,
            tables,
            self.scale,
            requests=m.decodes,
        )
        if m.decodes:
            launch.attend(
                turned,
                q,
                k_new,
                v_new,
                out,
                kv_cache,
                m.table,
                m.starts,
                m.lengths,
                tables,
                self.scale,
                requests=m.decodes,
                longest=self._longest,
            )
        for p in m.prompts:
            k, v = key[p.rows], value[p.rows]
            if not p.fresh:
                k, v = _workspace(self._config, self.num_kv_heads, self.head_size, query.device)
                launch.unpack(
                    k, v, p.keys, kv_cache, m.table, m.lengths, tables,
                    first=p.first, requests=p.requests, longest=p.longest,
                )  # fmt: skip
            self._flash(q[p.rows], k, v, p, out[p.rows])
        return output


def _layer(
    config: VllmConfig, number: int, layout: Layout, positions: int, device: torch.device
) -> launch.LayerTables:
    """Tables of a layer on the GPU, from the calibration that the environment names."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        source = source_of(os.environ[PAGES], config.model_config.model)
        if source.key not in _TABLES:
            _TABLES[source.key] = source.tables()
        at = (source.key, positions, device)
        if at not in _TRIG:
            _TRIG[at] = source.trigonometry(positions).to(device)
    found = _TABLES[source.key][number]
    return launch.LayerTables.of(layout, found["k"], found["v"], _TRIG[at])


_TABLES: dict[str, list[dict[str, StreamTables]]] = {}
"""Those of all layers, by calibration and model."""
_TRIG: dict[tuple[str, int, torch.device], torch.Tensor] = {}
"""One table for all layers of a model."""
_WORKSPACE: dict[tuple[int, int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
"""Keys and values [tokens, heads, d] of prompts whose pages are unpacked, for one layer after the
other.
"""


def _workspace(
    config: VllmConfig, heads: int, d: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The workspace; made when vLLM first runs the model, before it measures memory."""
    at = (heads, d, device)
    if at not in _WORKSPACE:
        size = (workspace_tokens(config), heads, d)
        k, v = (torch.zeros(size, dtype=config.model_config.dtype, device=device) for _ in "kv")
        _WORKSPACE[at] = k, v
    return _WORKSPACE[at]


@lru_cache(maxsize=8)
def _check_once(layout: Layout, group: int, dtype: torch.dtype, device: torch.device) -> None:
    """Hold the kernels against the reference on this GPU, before anything is served: without PTX
    where it goes wrong with it.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        try:
            return launch.check(layout, group, dtype, device)
        except AssayError:
            launch.ASM = False
        try:
            launch.check(layout, group, dtype, device)
        except AssayError as error:
            report({"error": error.message, "remedy": error.remedy})
            raise


def _flash(head_size: int, scale: float) -> Callable[..., None]:
    """FlashAttention into `out`, causal, the last query of a prompt at its last key; ValueError
    where vLLM has none.
    """
    from vllm.v1.attention.backends import fa_utils

    if not fa_utils.is_flash_attn_varlen_func_available():
        raise ValueError("packed pages need vLLM's FlashAttention, which this platform has not")
    version = fa_utils.get_flash_attn_version(head_size=head_size)
    more = {} if version is None else {"fa_version": version}

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: Prompts, out: torch.Tensor
    ) -> None:
        fa_utils.flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=p.queries,
            cu_seqlens_k=p.keys,
            max_seqlen_q=p.longest_query,
            max_seqlen_k=p.longest,
            softmax_scale=scale,
            causal=True,
            **more,
        )

    return attend
