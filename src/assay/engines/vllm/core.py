"""vLLM in this process: runs windows through the engine and keeps the final states of the wanted rows.

The engine's scheduler is stepped from here, so nothing else runs in it; prefix caching and asynchronous scheduling
are off, and model runner V1 is asked for, as its batch is what the ledger reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.engines.base import setup_facts
from assay.engines.hf.spec import tokenizer_facts
from assay.engines.machine import Batches, memory_error, out_of_memory
from assay.engines.scoring import (
    Engagement,
    GreedyStep,
    Head,
    HookSpec,
    ScoreJob,
    ScoringPath,
    StateRows,
    TokenizerFacts,
    Window,
    to_device,
    to_host,
)
from assay.engines.vllm.hooks import WINDOW, KvHooks, Steps
from assay.engines.vllm.start import VllmSpec, reason_of, start_llm
from assay.engines.vllm.steps import Fed, RowLedger, WindowPlan, batch_size, cache_reads, plan_window
from assay.errors import AssayError, UsageError

_PLAIN = frozenset({"UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"})


def output_head(model: Any) -> Head:
    """The head of `model`, its rows of padding cut off. AssayError where there is none in plain numbers."""
    linear = getattr(model, "lm_head", None)
    processor = getattr(model, "logits_processor", None)
    if linear is None or processor is None:
        raise _no_head(model, "it has no lm_head with a logits processor")
    method = type(getattr(linear, "quant_method", None)).__name__
    if method not in _PLAIN or linear.weight.dim() != 2 or not linear.weight.numel():
        raise _no_head(model, f"its output head is quantised or packed ({method})")
    if processor.soft_cap is not None and processor.scale != 1.0:
        raise _no_head(model, "it both caps and scales its logits")
    size = int(processor.org_vocab_size)
    bias = getattr(linear, "bias", None)
    return Head(
        linear.weight.detach()[:size],
        None if bias is None else bias.detach()[:size],
        softcap=processor.soft_cap,
        scale=float(processor.scale),
    )


def check_head(model: Any, head: Head, states: torch.Tensor) -> None:
    """Compare the head with the engine's own logits on some states [n, d]; AssayError where they differ."""
    own = model.compute_logits(states).float()
    rebuilt = head.logits(states)
    finite = torch.isfinite(own)
    tolerance = (
        4 * float(torch.finfo(states.dtype).eps) * float(own[finite].abs().max()) if finite.any() else 0.0
    )
    difference = float((own - rebuilt)[finite].abs().max()) if finite.any() else 0.0
    if own.shape != rebuilt.shape or not difference <= tolerance:
        raise AssayError(
            f"the logits of {type(model).__name__} cannot be rebuilt from its final states: they differ by {difference:.3g}",
            finding_id="fidelity.no_head",
            remedy="compare it through another engine (hf:, gguf:)",
            evidence={"max_difference": difference, "tolerance": tolerance},
        )


def _no_head(model: Any, why: str) -> AssayError:
    return AssayError(
        f"the logits of {type(model).__name__} cannot be rebuilt from its final states: {why}",
        finding_id="fidelity.no_head",
        remedy="compare it through another engine (hf:, gguf:)",
    )


_CHECKED_ROWS = 16
_AT_ONCE = 64
"""Windows that run together where nobody says how many: more make no GPU faster, and their states need room too."""


class VllmCore:
    """One engine. Not safe to use from two threads."""

    def __init__(self, spec: VllmSpec, llm: Any) -> None:
        """`llm` is a `vllm.LLM` as `start_llm` makes it."""
        self.spec = spec
        self._llm = llm
        self._job: ScoreJob | None = None
        self._hooks: KvHooks | None = None
        self._head_checked = False
        self._bytes_read = 0.0
        self._batches: Batches | None = None
        self.cache = self._call("assay_cache_facts")
        self._run = 0

    @classmethod
    def start(cls, spec: VllmSpec) -> VllmCore:
        """Start the engine; AssayError with vLLM's own reason where that fails."""
        return cls(spec, start_llm(spec))

    def _call(self, method: str, *args: Any) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]

    @cached_property
    def tokenizer(self) -> TokenizerFacts:
        """Facts of the tokenizer that lies beside the weights."""
        return tokenizer_facts(self._llm.get_tokenizer())

    @cached_property
    def head(self) -> Head:
        """The output head; checked against the engine's own logits when the first states come."""
        return output_head(self._call("assay_model"))

    def facts(self) -> dict[str, Any]:
        """Versions, model, number formats and cache as the engine has them."""
        import vllm

        config = self._llm.llm_engine.vllm_config
        model = config.model_config
        return {
            "engine": "vllm",
            "model": Path(self.spec.model).name,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": str(self.head.weight.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "kv_bytes_per_token": self.cache["bytes_per_token"],
            "kv_cache_tokens": self.cache["cache_tokens"],
            "attention_backend": self.cache["attention_backend"],
            "enforce_eager": bool(model.enforce_eager),
            "max_model_len": int(model.max_model_len),
            "seed": self.spec.seed,
            "args": dict(self.spec.args),
            "setup": setup_facts(model.hf_text_config),
        }

    def begin(self, job: ScoreJob, length: int) -> int:
        """Get ready for windows of `length` tokens, with the hook of the job in place; how many of them run together."""
        longest = int(self._llm.llm_engine.vllm_config.model_config.max_model_len)
        if length > longest:
            raise self._too_little_room(length, longest)
        self.end()
        self._job, self._bytes_read = job, 0.0
        if job.hook:
            if not isinstance(job.hook, HookSpec):
                raise TypeError("a hook of vLLM is named, for it may run in another process")
            # By prefill nothing is fed after a prefix.
            prefix = length if job.path is ScoringPath.PREFILL else job.scored_from - 1
            self._hooks = KvHooks(
                job.hook,
                self._call("assay_model"),
                eager=self.spec.enforce_eager,
                steps=Steps(self._call("assay_runner"), prefix),
            )
        return job.batch or max(1, min(_AT_ONCE, self._room(_AT_ONCE, plan_window(length, job), length)))

    def _room(self, wanted: int, plan: WindowPlan, length: int) -> int:
        """How many of `wanted` windows the engine has room for."""
        return batch_size(
            wanted,
            plan,
            length,
            step_tokens=self.spec.batched_tokens,
            sequences=self.spec.max_num_seqs,
            cache_tokens=self.cache["cache_tokens"],
            block=self.cache["block_size"],
        )

    def end(self) -> Engagement:
        """Take the hook off; what took part since `begin`."""
        engagement = self.engagement()
        if self._hooks:
            self._hooks.remove()
        self._hooks, self._job = None, None
        return engagement

    def engagement(self) -> Engagement:
        """Cache bytes that attention has read since `begin`, and what the hook counted."""
        notes: dict[str, Any] = {"kv_bytes_per_token": self.cache["bytes_per_token"]}
        if self._batches and self._batches.size < self._batches.asked:
            notes["batch"] = self._batches.note()
        if self._hooks:
            counted = self._hooks.engagement()
            return Engagement(
                counted.fires, int(self._bytes_read), counted.per_layer, {**counted.notes, **notes}
            )
        return Engagement(bytes_read=int(self._bytes_read), notes=notes)

    def score(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """States [length − scored_from, d] of each window, on the engine's device.

        A batch that does not fit into memory is halved and tried again.
        """
        if self._job is None:
            raise RuntimeError("score() before begin()")
        job, length = self._job, len(windows[0].tokens)
        plan = plan_window(length, job)
        batch = self._room(len(windows), plan, length)
        if not batch:
            raise self._too_long(plan, length)

        def states_of(part: Sequence[Window]) -> list[torch.Tensor]:
            try:
                return self._score_batch(part, job, plan)
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                raise _failed(error) from error

        def too_large(window: Window) -> AssayError:
            return memory_error(f"a single window of {length:,} tokens", self.head.weight.device)

        self._batches = self._batches.again(batch) if self._batches else Batches(batch)
        return [states for _, states in self._batches.run(windows, states_of, too_large)]

    def _score_batch(self, windows: Sequence[Window], job: ScoreJob, plan: WindowPlan) -> list[torch.Tensor]:
        self._run += 1
        keys = {self._run * 1_000_000 + i: np.asarray(w.tokens, np.int32) for i, w in enumerate(windows)}
        ledger = RowLedger(keys, job.scored_from - 1, plan.blocks)
        buffer: torch.Tensor | None = None

        def on_step(step: list[Fed], states: torch.Tensor) -> None:
            nonlocal buffer
            moves = ledger.book(step)
            if buffer is None:
                buffer = states.new_empty(len(windows) * ledger.rows, states.shape[-1])
            if len(moves.source):
                source, target = (
                    to_device(torch.from_numpy(m), states.device) for m in (moves.source, moves.target)
                )
                buffer.index_copy_(0, target, states.index_select(0, source))

        for index in range(self._hooks.passes if self._hooks else 1):
            if self._hooks:
                self._hooks.start_pass(index)
            final = not self._hooks or index == self._hooks.passes - 1
            self._pass(keys, plan, on_step if final else (lambda step, states: None))
        ledger.check()
        if self._hooks:
            self._hooks.commit()
        if buffer is None:
            raise _failed(RuntimeError("no step gave states"))
        if not self._head_checked:
            check_head(self._call("assay_model"), self.head, buffer[:_CHECKED_ROWS])
            self._head_checked = True
        self._bytes_read += len(windows) * cache_reads(plan.blocks) * self.cache["bytes_per_token"]
        return list(buffer.view(len(windows), ledger.rows, -1))

    def _pass(self, keys: Mapping[int, Any], plan: WindowPlan, on_step: Any) -> None:
        """Run all windows once through the engine."""
        engine = self._llm.llm_engine
        for key, tokens in keys.items():
            engine.add_request(
                str(key), {"prompt_token_ids": tokens[: plan.prompt].tolist()}, _params(key, tokens, plan)
            )
        self._call("assay_watch", on_step)
        try:
            steps = 0
            while engine.has_unfinished_requests():
                lo, hi = plan.blocks[min(steps, len(plan.blocks) - 1)]
                self._cut_prompts_at(hi - lo)
                engine.step()
                steps += 1
        except BaseException:
            self._recover()
            raise
        finally:
            self._call("assay_unwatch")
            self._cut_prompts_at(0)

    def _cut_prompts_at(self, tokens: int) -> None:
        """Let the scheduler take at most so many tokens of every prompt in a step; 0 as many as fit."""
        config = self._llm.llm_engine.engine_core.engine_core.scheduler.scheduler_config
        config.long_prefill_token_threshold = tokens

    def _recover(self) -> None:
        """Drop what is left of a batch that failed half-way."""
        if self._hooks:
            self._hooks.discard()
        engine = self._llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        self._call("assay_reset")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def reduce(
        self, windows: Sequence[Window], references: Sequence[StateRows], target: str
    ) -> list[dict[str, torch.Tensor]]:
        """Statistics of each window against the states of a reference, computed where the engine is.

        `target` names a function by import path (`package.module:name`) that takes the rows of all windows of both sides
        and gives a dataclass of tensors for each; they come back by field name, on the CPU. The whole batch is copied
        there at once, so that the engine's device does not wait after every window.
        """
        if self._job is None:
            raise RuntimeError("reduce() before begin()")
        module, _, name = target.partition(":")
        function = getattr(import_module(module), name)
        first, head = self._job.scored_from, self.head
        rows = [StateRows(w, first, s, head) for w, s in zip(windows, self.score(windows), strict=True)]
        return to_host([vars(found) for found in function(references, rows)])

    def greedy(self, prefixes: Sequence[tuple[int, ...]], count: int) -> list[list[GreedyStep]]:
        """`count` greedy tokens after each prefix, with vLLM's own log-probabilities of the two likeliest."""
        from vllm import SamplingParams

        longest = int(self._llm.llm_engine.vllm_config.model_config.max_model_len)
        if len(prefixes[0]) + count > longest:
            raise self._too_little_room(len(prefixes[0]) + count, longest)
        asked = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=2, detokenize=False
        )
        prompts = [{"prompt_token_ids": list(map(int, prefix))} for prefix in prefixes]
        answers = self._llm.generate(prompts, asked, use_tqdm=False)
        return [_steps(answer.outputs[0]) for answer in answers]

    def close(self) -> None:
        """Shut the engine down and give its memory back."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self.__dict__.pop("head", None)
        llm.llm_engine.engine_core.shutdown()
        del llm
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()

    def _too_little_room(self, length: int, longest: int) -> UsageError:
        return UsageError(
            f"windows of {length} tokens do not fit into max_model_len={longest}",
            remedy=f"write vllm:{Path(self.spec.model).name}?max_model_len={length}, or use shorter windows",
            finding_id="fidelity.usage",
        )

    def _too_long(self, plan: WindowPlan, length: int) -> AssayError:
        return AssayError(
            f"not one window of {length} tokens fits: a step holds {self.spec.batched_tokens:,} tokens (this path needs "
            f"{plan.largest:,}), the KV cache {self.cache['cache_tokens']:,}",
            finding_id="fidelity.engine_failed",
            remedy="set max_num_batched_tokens and kv_cache_gib, or use shorter windows",
        )


def _params(key: int, tokens: Any, plan: WindowPlan) -> Any:
    """Sampling parameters of one window: greedy, exactly the tokens that the plan generates."""
    from vllm import SamplingParams

    from assay.engines.vllm.forcing import FORCED

    forced = tokens[plan.prompt :].tolist()
    extra: dict[str, Any] = {WINDOW: key}
    if len(plan.blocks) > 1 and plan.prompt < len(tokens) - 1:
        extra[FORCED] = forced
    else:
        forced = forced[:1]
    return SamplingParams(
        temperature=0.0, max_tokens=len(forced), ignore_eos=True, detokenize=False, extra_args=extra
    )


def _steps(output: Any) -> list[GreedyStep]:
    """The steps of one continuation of vLLM, whose log-probabilities are the true ones (`raw_logprobs`)."""
    steps = []
    for token, entries in zip(output.token_ids, output.logprobs, strict=True):
        values = {int(key): float(entry.logprob) for key, entry in entries.items()}
        runner_up = max((key for key in values if key != token), key=lambda key: values[key])
        steps.append(GreedyStep(int(token), runner_up, values[token], values[runner_up]))
    return steps


def _failed(error: BaseException) -> AssayError:
    return AssayError(
        f"vLLM failed while it scored: {reason_of(error)}",
        finding_id="fidelity.engine_failed",
        remedy="use a smaller batch or shorter windows; without enforce_eager=false there are no CUDA graphs to fail",
    )
