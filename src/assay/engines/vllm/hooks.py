"""vLLM's plug-in of assay: it puts the hook that the environment names into each worker."""

from __future__ import annotations

import json
import os
from functools import wraps
from pathlib import Path
from typing import Any

from assay.engines.scoring import HookSpec
from assay.engines.vllm.kv_hooks import KvHooks
from assay.engines.vllm.steps import Steps
from assay.errors import AssayError, UsageError
from assay.plugins import load

HOOK = "ASSAY_VLLM_HOOK"


REPORT = "ASSAY_VLLM_HOOK_REPORT"


def hook_from_environment() -> HookSpec | None:
    """The hook that `ASSAY_VLLM_HOOK` names; UsageError where it cannot be read."""
    text = os.environ.get(HOOK)
    if not text:
        return None
    try:
        return HookSpec(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{HOOK} holds no hook: {error}",
            remedy='write {"target": "package.module:factory", "config": {}}',
            finding_id="kv.usage",
        ) from error


def register() -> None:
    """Have every worker of this process hook its model, if a hook is asked for; then what plug-ins
    add to vLLM.
    """
    for hook in load("assay.vllm_hooks").values():
        hook.register()
    spec = hook_from_environment()
    if spec is None:
        return
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker.load_model, "assay_hook"):
        return
    inner = Worker.load_model

    @wraps(inner)
    def load_model(worker: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = inner(worker, *args, **kwargs)
        try:
            worker.assay_hooks = _hooked(spec, worker)
        except AssayError as error:
            report({"error": error.message, "remedy": error.remedy})
            raise
        report({"layers": len(worker.assay_hooks.engagement().per_layer)})
        return loaded

    load_model.assay_hook = spec  # type: ignore[attr-defined]
    Worker.load_model = load_model


def _hooked(spec: HookSpec, worker: Any) -> Any:
    config, runner = worker.vllm_config, worker.model_runner
    if config.parallel_config.tensor_parallel_size > 1:
        raise UsageError(
            "with tensor parallelism every worker has a part of the heads, which a codec must see"
            " together",
            remedy="serve with --tensor-parallel-size 1",
            finding_id="kv.usage",
        )
    if not hasattr(runner, "requests"):
        raise UsageError(
            f"{type(runner).__module__} keeps its requests in another way than assay reads them",
            remedy="serve with VLLM_USE_V2_MODEL_RUNNER=0 in the environment",
            finding_id="kv.usage",
        )
    return KvHooks(
        spec,
        runner.get_model(),
        eager=config.model_config.enforce_eager,
        steps=Steps(runner, prefix=None),
    )


def report(found: dict[str, Any]) -> None:
    """Tell whoever started the server, in the file that it named."""
    if path := os.environ.get(REPORT):
        Path(path).write_text(json.dumps(found), encoding="utf-8")
