"""What assay adds to vLLM's worker (`worker_extension_cls`): states of every step, the head, hooks on K and V.

Nothing of vLLM is changed on disk; what is put around a method of the running model runner is taken off again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from assay.engines.vllm.ledger import Fed

if TYPE_CHECKING:
    import torch

WINDOW = "assay_window"
"""Key of `SamplingParams.extra_args`: the window that a request scores."""

OnStep = Callable[[list[Fed], "torch.Tensor"], None]
"""Called after each step with what every request of the batch was fed, in order, and the final states [tokens, d]."""


class ScoringExtension:
    """Methods for `collective_rpc`. Names begin with `assay_`, as vLLM refuses a name that its worker has."""

    model_runner: Any
    _before_watch: Any = None

    def assay_watch(self, on_step: OnStep) -> None:
        """Hand the states of every step to `on_step`, until `assay_unwatch`."""
        runner = self.model_runner
        self._before_watch = runner.__dict__.get("execute_model")
        inner = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            output = inner(scheduler_output, *args, **kwargs)
            state = runner.execute_model_state
            if state is not None:
                on_step(_fed(runner, scheduler_output), state.hidden_states)
            return output

        runner.execute_model = execute_model

    def assay_unwatch(self) -> None:
        """Take the watch off again; what was around the method before it stays."""
        self.model_runner.__dict__.pop("execute_model", None)
        if self._before_watch is not None:
            self.model_runner.execute_model = self._before_watch

    def assay_reset(self) -> None:
        """Forget a step that failed between the model and the sampler."""
        self.model_runner.execute_model_state = None

    def assay_model(self) -> Any:
        """The model itself; of use only where the worker is in the caller's process."""
        return self.model_runner.get_model()

    def assay_runner(self) -> Any:
        """The model runner, likewise."""
        return self.model_runner

    def assay_cache_facts(self) -> dict[str, Any]:
        """What the engine has reserved for K and V, from the memory that it really allocated."""
        runner = self.model_runner
        groups = runner.kv_cache_config.kv_cache_groups
        block = groups[0].kv_cache_spec.block_size if groups else 1
        tokens = runner.kv_cache_config.num_blocks * block
        return {
            "block_size": block,
            "cache_tokens": tokens,
            "bytes_per_token": _allocated(runner.kv_caches) / tokens if tokens else 0.0,
            "layers": sum(len(group.layer_names) for group in groups),
            "attention_backend": ", ".join(
                sorted({g.backend.get_name() for groups in runner.attn_groups for g in groups})
            ),
        }


def _fed(runner: Any, scheduler_output: Any) -> list[Fed]:
    """What each request of the step was fed, in the order in which their rows lie."""
    step = []
    for row, request_id in enumerate(runner.input_batch.req_ids):
        request = runner.requests[request_id]
        start, count = request.num_computed_tokens, scheduler_output.num_scheduled_tokens[request_id]
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
