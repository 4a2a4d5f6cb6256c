"""The `vllm serve` flags that fit a checkpoint, as one command."""

from __future__ import annotations

import shlex

from assay.checkpoint.declared import Declared
from assay.checkpoint.draft import draft_kind
from assay.checkpoint.flags.quantization import MIN_CAPABILITY, resolve
from assay.checkpoint.flags.versions import Version
from assay.checkpoint.kv_cache import KvCache
from assay.checkpoint.mtp import MtpReport
from assay.checkpoint.subject import Checkpoint


def advise(
    checkpoint: Checkpoint,
    model: str,
    declared: Declared | None,
    cache: KvCache,
    mtp: MtpReport,
    version: Version | None,
) -> dict[str, object]:
    """`{command, notes}`: flags are named only where the checkpoint gives a reason for them."""
    if draft_kind(checkpoint) is not None:
        return _draft(checkpoint, model)
    words = ["vllm", "serve", model]
    notes: list[str] = []
    if declared is not None:
        outcome = resolve(
            declared.method,
            None,
            algorithm=declared.algorithm,
            model_type=checkpoint.config.get("model_type"),
            version=version,
        )
        if outcome.status == "accepted":
            notes.append(
                f"leave --quantization out: the engine reads {declared.method} and uses"
                f" {outcome.method}"
            )
            if outcome.method in MIN_CAPABILITY:
                notes.append(
                    f"{outcome.method} needs a CUDA compute capability of"
                    f" {MIN_CAPABILITY[outcome.method]}"
                )
        else:
            notes.append(outcome.reason)
    if cache.declared and (cache.layers or cache.dynamic):
        notes.append(
            f"leave --kv-cache-dtype out: auto takes the {cache.declared} scheme of the checkpoint"
        )
    elif cache.declared:
        words += ["--kv-cache-dtype", "bfloat16"]
        notes.append(
            f"the {cache.declared} KV cache that is declared has no scales: auto would use 1.0 for"
            " them"
        )
    if mtp.status in {"ok", "declared_quantized"} and mtp.announced:
        settings = f'{{"method":"mtp","num_speculative_tokens":{max(mtp.announced, 1)}}}'
        words += ["--speculative-config", settings]
    if mtp.status in {"absent", "partial", "dtype_conflict"}:
        notes.append("no --speculative-config: the head would draft nothing that is accepted")
    if mtp.announced and declared is not None:
        words += ["--model-loader-extra-config", '{"enable_weights_track":true}']
        notes.append(
            "enable_weights_track makes a head that the checkpoint does not fill loud at load"
        )
    return {"command": shlex.join(words), "notes": notes}


def _draft(checkpoint: Checkpoint, model: str) -> dict[str, object]:
    """A draft is served beside its target."""
    settings = (
        f'{{"method":"{draft_kind(checkpoint)}","model":"{model}","num_speculative_tokens":3}}'
    )
    notes = [
        "a draft cannot be served alone: TARGET is the model that it was trained for",
        "hold the pair together first: assay verify TARGET --serve-args with this command",
    ]
    return {
        "command": shlex.join(["vllm", "serve", "TARGET", "--speculative-config", settings]),
        "notes": notes,
    }
