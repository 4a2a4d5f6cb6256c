"""Checkpoints whose documents are changed one value at a time, and what verify makes of each."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkpoint_quantized as q
from assay.checkpoint import verify as verification
from assay.checkpoint.documents import TABLES
from assay.checkpoint.opening import Opened, open_checkpoint
from assay.checkpoint.options import VerifyOptions
from assay.checkpoint.subject import Checkpoint
from assay.report.html import render as as_html
from assay.report.markdown import render as as_markdown
from assay.report.prometheus import render as as_prometheus
from assay.verdict import Report
from checkpoint_samples import edit_json, llama
from faults.zoo import healthy

GONE = object()
VALUES: tuple[Any, ...] = (
    0,
    -1,
    1e308,
    10**9,
    10**39,
    math.nan,
    math.inf,
    "x",
    None,
    [],
    {},
    [[1]],
    {"a": {"b": [1]}},
    True,
    GONE,
)
MOST_S = 3.0

Path_ = tuple[str | int, ...]


def with_config(**changes: Any) -> Callable[[Path], Any]:
    def make(folder: Path) -> None:
        llama(folder)
        edit_json(folder / "config.json", **changes)

    return make


def with_sidecar(folder: Path) -> None:
    q.quantized_llama(folder, q.GPTQ, q.gptq_module)
    (folder / "quantize_config.json").write_text(json.dumps(q.GPTQ))


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "mscale": 1.0,
}
LONG = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 99,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}  # fmt: skip
DYNAMIC = q.GPTQ | {
    "dynamic": {"-:.*k_proj": {}, r"+:.*layers\.1\.mlp.*": {"bits": 8}},
    "modules_to_not_convert": ["x"],
}
SPARSE = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

KINDS: dict[str, Callable[[Path], Any]] = healthy() | {
    "yarn": with_config(rope_scaling=YARN),
    "longrope": with_config(rope_scaling=LONG),
    "llama3 rope": with_config(rope_scaling=LLAMA3),
    "rope a kind": with_config(rope_parameters={"full_attention": YARN}),
    "window": with_config(
        sliding_window=64, layer_types=["full_attention", "sliding_attention"] * 2
    ),
    "unknown family": with_config(model_type="brand_new", architectures=["BrandNewForCausalLM"]),
    "nested": with_config(
        text_config={"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4}
    ),
    "latent": with_config(
        model_type="deepseek_v3", n_routed_experts=4, moe_intermediate_size=32, **SPARSE
    ),
    "experts": with_config(
        model_type="qwen3_moe", num_experts=4, moe_intermediate_size=32, mlp_only_layers=[1]
    ),
    "hybrid": with_config(
        model_type="qwen3_next",
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        full_attention_interval=2,
    ),
    "mtp elsewhere": with_config(model_type="glm_moe_dsa", num_nextn_predict_layers=1),
    "mtp nested": with_config(model_type="inkling", mtp_config={"num_nextn_predict_layers": 1}),
    "gptq dynamic": with_config(quantization_config=DYNAMIC),
    "sidecar": with_sidecar,
    "mlx": with_config(quantization={"bits": 4, "group_size": 64, "lm_head": {"bits": 8}}),
    "mxfp8": with_config(
        quantization_config={"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    ),
    "modelopt per layer": with_config(
        quantization_config={
            "quant_method": "modelopt",
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "kv_cache_quant_algo": "FP8",
                "group_size": 16,
                "quantized_layers": {
                    "model.layers.0.mlp.up_proj": {"quant_algo": "FP8", "group_size": 16}
                },
            },
        }
    ),
    "torchao": with_config(
        quantization_config={
            "quant_method": "torchao",
            "quant_type": {
                "default": {
                    "_type": "X",
                    "_data": {"granularity": {"_type": "PerGroup", "_data": {"group_size": 32}}},
                }
            },
        }
    ),
    "hqq": with_config(
        quantization_config={
            "quant_method": "hqq",
            "skip_modules": ["lm_head"],
            "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}},
        }
    ),
    "dflash": with_config(
        architectures=["DFlashDraftModel"],
        num_target_layers=4,
        block_size=16,
        dflash_config={"target_layer_ids": [0, 1], "mask_token_id": 3},
    ),
    "speculators": with_config(
        architectures=["Eagle3Speculator"],
        speculators_model_type="eagle3",
        draft_vocab_size=96,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        transformer_layer_config={"hidden_size": 64, "vocab_size": 320},
    ),
}
"""Checkpoints of many kinds; not all of them are whole, for what counts is what a change of a value
does.
"""


def places(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Every place of a document, of long lists and objects the first entries only."""
    if at:
        yield at
    if isinstance(value, dict):
        many = len(value) > 60
        for key in list(value)[: 2 if many else None]:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 1)):
            yield from places(value[index], (*at, index))


def changed(document: Any, at: Path_, value: Any) -> Any:
    document = copy.deepcopy(document)
    inner = document
    for key in at[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return document


@dataclass(frozen=True)
class Subject:
    """An opened checkpoint whose documents are served from memory."""

    opened: Opened
    documents: dict[str, Any]

    def changes(self) -> Iterator[tuple[str, Path_]]:
        return ((name, at) for name, document in self.documents.items() for at in places(document))

    def examine(
        self, monkeypatch: Any, name: str = "", document: Any = None
    ) -> tuple[Report, float]:
        """The report with one document replaced, and the seconds that it took."""
        own = self.opened.checkpoint
        texts = {
            n: json.dumps(document if n == name else d).encode() for n, d in self.documents.items()
        }
        made = Checkpoint(
            own.kind, own.files, lambda n: texts.get(n) or own.read(n), own.headers, own.stray
        )
        monkeypatch.setattr(
            verification, "open_checkpoint", lambda *_: replace(self.opened, checkpoint=made)
        )
        began = time.process_time()
        options = VerifyOptions(
            hashing="none",
            allow_unverified=True,
            digest_cache=False,
            serve_args="--kv-cache-dtype fp8",
        )
        report = verification.verify("memory", options)
        return report, time.process_time() - began


def subject(kind: str, folder: Path) -> Subject:
    KINDS[kind](folder)
    documents = {
        p.name: json.loads(p.read_text()) for p in folder.glob("*.json") if p.name in TABLES
    }
    return Subject(open_checkpoint(str(folder)), documents)


def shown(report: Report) -> None:
    """Everything that a report is written as; none of it may stumble over a value."""
    json.dumps(report.to_json(), allow_nan=False)
    as_html(report)
    as_prometheus(report)
    as_markdown(report)


def said(report: Report) -> set[tuple[str, str]]:
    return {(f.id, f.title) for f in report.findings}
