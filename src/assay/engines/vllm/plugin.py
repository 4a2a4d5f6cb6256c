"""Entry point `vllm.general_plugins`: puts a hook on keys and values into a vLLM that serves.

vLLM calls `register` in each of its processes, sometimes more than once. Without the environment variable
`ASSAY_VLLM_HOOK` it does nothing; with it (`{"target": "package.module:factory", "config": {…}}`), the hook is put in
place as soon as a worker has loaded its model, and a model that cannot be hooked ends the start. What came of it is
written into the file that `ASSAY_VLLM_HOOK_REPORT` names, if any: `{"layers": 30}`, or the `error` and its `remedy`.
"""

from __future__ import annotations

import json
import os
from functools import wraps
from pathlib import Path
from typing import Any

from assay.engines.scoring import HookSpec
from assay.errors import AssayError, UsageError

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
        try:
            worker.assay_hooks = _hooked(spec, worker)
        except AssayError as error:
            _report({"error": error.message, "remedy": error.remedy})
            raise
        _report({"layers": len(worker.assay_hooks.engagement().per_layer)})
        return loaded

    load_model.assay_hook = spec  # type: ignore[attr-defined]
    Worker.load_model = load_model


def _hooked(spec: HookSpec, worker: Any) -> Any:
    from assay.engines.vllm.kv_hook import KvHooks
    from assay.engines.vllm.steps import Steps

    config, runner = worker.vllm_config, worker.model_runner
    if config.parallel_config.tensor_parallel_size > 1:
        raise UsageError(
            "with tensor parallelism every worker has a part of the heads, which a codec must see together",
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
        spec, runner.get_model(), eager=config.model_config.enforce_eager, steps=Steps(runner, prefix=None)
    )


def _report(found: dict[str, Any]) -> None:
    if path := os.environ.get(REPORT):
        Path(path).write_text(json.dumps(found), encoding="utf-8")
