"""A stand-in for vLLM: the parts of it that assay touches, with a toy model whose states are known
in closed form.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from assay.engines.vllm.steps import WINDOW
from assay.engines.vllm.worker import ScoringExtension

VOCAB, WIDTH, BLOCK = 50, 8, 16


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import vllm` give what the scorer imports from it."""

    class MoveDirectionality(enum.Enum):
        UNIDIRECTIONAL = 1
        SWAP = 2

    class LogitsProcessor:
        pass

    vllm = ModuleType("vllm")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    vllm.__version__ = "0"  # type: ignore[attr-defined]
    processors = ModuleType("vllm.v1.sample.logits_processor")
    processors.LogitsProcessor = LogitsProcessor  # type: ignore[attr-defined]
    processors.MoveDirectionality = MoveDirectionality  # type: ignore[attr-defined]
    for name, module in {
        "vllm": vllm,
        "vllm.v1": ModuleType("vllm.v1"),
        "vllm.v1.sample": ModuleType("vllm.v1.sample"),
        "vllm.v1.sample.logits_processor": processors,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "assay.engines.vllm.forcing", raising=False)


class UnquantizedEmbeddingMethod:
    """The name by which the head is known to be plain."""


class ToyModel:
    """State of position p: the mean of the embeddings of tokens 0 … p. The head has 14 rows of
    padding.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=generator)
        self.lm_head = SimpleNamespace(
            weight=torch.randn(64, WIDTH, generator=generator),
            quant_method=UnquantizedEmbeddingMethod(),
        )
        self.logits_processor = SimpleNamespace(org_vocab_size=VOCAB, soft_cap=None, scale=1.0)

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        return (states @ self.lm_head.weight.T)[:, :VOCAB]

    def state(self, tokens: Any) -> torch.Tensor:
        return self.embedding[torch.as_tensor(np.asarray(tokens)).long()].mean(0)

    def states(self, tokens: Any) -> torch.Tensor:
        return torch.stack([self.state(tokens[: i + 1]) for i in range(len(tokens))])


class Runner:
    """A model runner of V1: packs the requests of a step, and keeps what it computed until it
    samples.
    """

    def __init__(self, model: ToyModel, tokens: int) -> None:
        self.model = model
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[], token_ids_cpu=np.zeros((64, 512), np.int32))
        self.execute_model_state: Any = None
        spec = SimpleNamespace(block_size=BLOCK)
        groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])]
        self.kv_cache_config = SimpleNamespace(num_blocks=tokens // BLOCK, kv_cache_groups=groups)
        raw = torch.zeros(tokens * 10, dtype=torch.uint8)
        self.kv_caches = [raw.view(2, -1)[0], raw.view(2, -1)[1]]
        backend = SimpleNamespace(get_name=lambda: "TOY")
        self.attn_groups = [[SimpleNamespace(backend=backend)]]
        self.before_step: Callable[[int], None] = lambda requests: None

    def get_model(self) -> ToyModel:
        return self.model

    def execute_model(self, scheduler_output: Any) -> None:
        if self.execute_model_state is not None:
            raise RuntimeError("sample_tokens() must be called first")
        counts = scheduler_output.num_scheduled_tokens
        self.before_step(len(counts))
        rows = []
        for row, name in enumerate(self.input_batch.req_ids):
            lo, hi = (
                self.requests[name].num_computed_tokens,
                self.requests[name].num_computed_tokens + counts[name],
            )
            rows += [
                self.model.state(self.input_batch.token_ids_cpu[row, : i + 1])
                for i in range(lo, hi)
            ]
        # CUDA graphs pad a batch: rows that belong to nobody.
        padded = torch.cat([torch.stack(rows), torch.full((3, WIDTH), torch.nan)])
        self.execute_model_state = SimpleNamespace(hidden_states=padded)


class Engine:
    """An LLM with its engine: scheduler, runner, greedy sampler with the forcing processor."""

    def __init__(
        self, cache_tokens: int = 4096, max_model_len: int = 512, budget: int = 8192
    ) -> None:
        from assay.engines.vllm.forcing import TeacherForcing

        self.model = ToyModel()
        self.runner = Runner(self.model, cache_tokens)
        self.worker = type("Worker", (ScoringExtension,), {})()
        self.worker.model_runner = self.runner
        self.forcing = TeacherForcing(None, torch.device("cpu"), False)
        self.budget = budget
        self.steps: list[dict[str, int]] = []
        self.llm_engine = self
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=max_model_len)
        )
        self.scheduler = SimpleNamespace(
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            max_num_scheduled_tokens=budget,
        )
        self.engine_core = SimpleNamespace(engine_core=self)
        self.output_processor = SimpleNamespace(request_states={})
        self.force = True

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        request = SimpleNamespace(
            prompt=prompt["prompt_token_ids"],
            generated=[],
            sampling_params=params,
            num_computed_tokens=0,
        )
        name += "-suffix"  # as vLLM makes names its own
        self.runner.requests[name] = self.output_processor.request_states[name] = request
        batch = self.runner.input_batch
        row = len(batch.req_ids)
        batch.req_ids.append(name)
        batch.token_ids_cpu[row, : len(request.prompt)] = request.prompt
        if self.force:
            self._tell(added=[(row, params, request.prompt, request.generated)])

    def _tell(self, **update: Any) -> None:
        self.forcing.update_state(
            SimpleNamespace(**{"removed": [], "added": [], "moved": [], **update})
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self.runner.requests)

    def abort_request(self, names: list[str], internal: bool) -> None:
        for name in names:
            self._remove(name)

    def _remove(self, name: str) -> None:
        """Take a request out; the last of the batch moves into its row."""
        batch = self.runner.input_batch
        row, last = batch.req_ids.index(name), len(batch.req_ids) - 1
        self._tell(removed=[row])
        if row != last:
            batch.req_ids[row] = batch.req_ids[last]
            batch.token_ids_cpu[row] = batch.token_ids_cpu[last]
            self._tell(moved=[(last, row, _one_way())])
        batch.req_ids.pop()
        del self.runner.requests[name], self.output_processor.request_states[name]

    def step(self) -> None:
        counts, left = {}, min(self.budget, self.scheduler.max_num_scheduled_tokens)
        threshold = self.scheduler.scheduler_config.long_prefill_token_threshold
        threshold *= len(self.runner.requests) > 1  # as vLLM 0.32 has it
        for name in self.runner.input_batch.req_ids:
            request = self.runner.requests[name]
            wanted = len(request.prompt) + len(request.generated) - request.num_computed_tokens
            counts[name] = min(wanted, threshold or wanted, left)
            left -= counts[name]
        self.steps.append(counts)
        self.runner.execute_model(SimpleNamespace(num_scheduled_tokens=counts))
        states = self.runner.execute_model_state.hidden_states
        self.runner.execute_model_state = None
        ends = np.cumsum([counts[name] for name in self.runner.input_batch.req_ids]) - 1
        sampled = self.forcing.apply(
            self.model.compute_logits(states[torch.from_numpy(ends)])
        ).argmax(-1)
        for row, name in enumerate(list(self.runner.input_batch.req_ids)):
            request = self.runner.requests[name]
            request.num_computed_tokens += counts[name]
            length = len(request.prompt) + len(request.generated)
            if request.num_computed_tokens == length:
                request.generated.append(int(sampled[row]))
                self.runner.input_batch.token_ids_cpu[row, length] = int(sampled[row])
        for name, request in list(self.runner.requests.items()):
            if len(request.generated) == request.sampling_params.max_tokens:
                self._remove(name)


def _one_way() -> Any:
    return sys.modules["vllm.v1.sample.logits_processor"].MoveDirectionality.UNIDIRECTIONAL  # type: ignore[attr-defined]


__all__ = ["BLOCK", "VOCAB", "WIDTH", "WINDOW", "Engine", "ToyModel", "install"]
