"""Entry point `vllm.general_plugins`: puts a hook on keys and values into a vLLM that serves.

vLLM calls `register` in each of its processes, sometimes more than once. Without the environment variable
`ASSAY_VLLM_HOOK` it does nothing; with it (`{"target": "package.module:factory", "config": {…}}`), the hook is put in
place as soon as a worker has loaded its model, and a model that cannot be hooked ends the start.
"""

from __future__ import annotations

import json
import os
from functools import wraps
from typing import Any

from assay.engines.scoring import HookSpec
from assay.errors import UsageError

HOOK = "ASSAY_VLLM_HOOK"


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
    """Have every worker of this process hook its model, if a hook is asked for."""
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
        worker.assay_hooks = _hooked(spec, worker)
        return loaded

    load_model.assay_hook = spec  # type: ignore[attr-defined]
    Worker.load_model = load_model


def _hooked(spec: HookSpec, worker: Any) -> Any:
    from assay.engines.vllm.kv_hook import KvHooks

    config = worker.vllm_config
    if config.parallel_config.tensor_parallel_size > 1:
        raise UsageError(
            "with tensor parallelism every worker has a part of the heads, which a codec must see together",
            remedy="serve with --tensor-parallel-size 1",
            finding_id="kv.usage",
        )
    return KvHooks(spec, worker.model_runner.get_model(), eager=config.model_config.enforce_eager)
