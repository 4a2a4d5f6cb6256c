"""The `vllm serve` flags that fit a checkpoint, as one command."""

from __future__ import annotations

import shlex

from assay.checkpoint.mtp.examine import MtpReport
from assay.checkpoint.quantization.declared import Declared
from assay.checkpoint.quantization.kv import KvCache
from assay.checkpoint.serving.quant_flags import resolve
from assay.checkpoint.serving.versions import Version
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
    words = ["vllm", "serve", model]
    notes: list[str] = []
    if declared is not None:
        outcome = resolve(
            declared.method, None, algorithm=declared.algorithm,
            model_type=str(checkpoint.config.get("model_type")), version=version,
        )  # fmt: skip
        if outcome.status == "accepted":
            notes.append(
                f"leave --quantization out: the engine reads {declared.method} and uses {outcome.method}"
            )
        else:
            notes.append(outcome.reason)
    if cache.declared:
        notes.append(f"leave --kv-cache-dtype out: auto takes the {cache.declared} scheme of the checkpoint")
    if mtp.status in {"ok", "declared_quantized"}:
        words += [
            "--speculative-config",
            f'{{"method":"mtp","num_speculative_tokens":{max(mtp.announced, 1)}}}',
        ]
    if mtp.status in {"absent", "partial", "dtype_conflict"}:
        notes.append("no --speculative-config: the head would draft nothing that is accepted")
    if mtp.announced and declared is not None:
        words += ["--model-loader-extra-config", '{"enable_weights_track":true}']
        notes.append("enable_weights_track makes a head that the checkpoint does not fill loud at load")
    return {"command": shlex.join(words), "notes": notes}
