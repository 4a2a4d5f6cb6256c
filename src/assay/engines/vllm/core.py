"""vLLM in this process: runs windows through the engine, whose ranks keep the final states of the
wanted rows.

The engine's scheduler is stepped from here, so nothing else runs in it; prefix caching and
asynchronous scheduling are off, and model runner V1 is asked for, as its batch is what the ledger
reads. The model is in this process too where one GPU holds it; with tensor or pipeline parallelism
vLLM has a process for every rank (`assay.engines.vllm.worker`).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any, TypeVar

import numpy as np
import torch

from assay.engines import setup_facts
from assay.engines.device import Batches, memory_error, out_of_memory
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
    load_hook,
    to_host,
)
from assay.engines.tokenizer import tokenizer_facts
from assay.engines.vllm.head import HeadFile
from assay.engines.vllm.spec import VllmSpec
from assay.engines.vllm.start import REPORTS, forget_ranks, reason_of, start_llm
from assay.engines.vllm.steps import WINDOW
from assay.engines.vllm.window_plan import WindowPlan, batch_size, cache_reads, plan_window
from assay.engines.vllm.worker import Failure, merged
from assay.errors import AssayError, UsageError

_AT_ONCE = 64
"""Windows that run together by default: more make no GPU faster, and their states
need room too.
"""
_Taken = TypeVar("_Taken")


class VllmCore:
    """One engine. Not safe to use from two threads."""

    def __init__(self, spec: VllmSpec, llm: Any) -> None:
        """`llm` is a `vllm.LLM` as `start_llm` makes it."""
        self.spec = spec
        self._llm = llm
        self._job: ScoreJob | None = None
        self._passes = 1
        self._bytes_read = 0.0
        self._batches: Batches | None = None
        self._run = 0
        self._step_tokens: int | None = None
        self._heads: list[Head | HeadFile] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._deaths = _Deaths(llm) if spec.ranks > 1 else None
        self.ranks = self._all("facts")
        self.cache = _cache_of(self.ranks)

    @classmethod
    def start(cls, spec: VllmSpec) -> VllmCore:
        """Start the engine; AssayError with vLLM's own reason where that fails."""
        return cls(spec, start_llm(spec))

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        """What every rank answers to a call; the error of the first that has one."""
        try:
            answers: list[Any] = self._llm.collective_rpc("assay_call", args=(name, *arguments))
        except Exception as error:
            if self._deaths is None:
                raise
            raise self._lost(error) from error
        for answer in answers:
            if isinstance(answer, Failure):
                raise answer.error(self.spec.ranks)
        return answers

    def _call(self, name: str, *arguments: Any) -> Any:
        """The answer of the first rank of the last stage, which has the states."""
        return self._all(name, *arguments)[-self.spec.tensor_parallel]

    def _lost(self, error: BaseException) -> Exception:
        """What is known of a rank that died; `error` is what vLLM made of it."""
        if self._deaths is None:
            return error if isinstance(error, Exception) else RuntimeError(str(error))
        return self._deaths.error(error, self.spec)

    @cached_property
    def tokenizer(self) -> TokenizerFacts:
        """Facts of the tokenizer that lies beside the weights."""
        return tokenizer_facts(self._llm.get_tokenizer())

    @cached_property
    def head(self) -> Head:
        """The output head; checked against the engine's own logits when the first states come.

        Of several ranks it is put together in the main memory, which only storing a reference
        needs.
        """
        if self.spec.ranks == 1:
            return self._call("own_head")  # type: ignore[no-any-return]
        parts = sorted(
            (a for a in self._all("head_rows") if a is not None), key=lambda part: part[0]
        )
        first = parts[0][1]
        weight = torch.cat([head.weight for _, head in parts])
        bias = None if first.bias is None else torch.cat([head.bias for _, head in parts])
        return Head(weight, bias, softcap=first.softcap, scale=first.scale)

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
            "device": self.ranks[-1]["device"],
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
            **self._parallel(),
        }

    def memory(self) -> list[dict[str, int]]:
        """Bytes of the output heads that each rank holds, and the most memory it has used."""
        return self._all("memory")

    def _parallel(self) -> dict[str, Any]:
        """What several ranks add to the facts."""
        if self.spec.ranks == 1:
            return {}
        return {
            "tensor_parallel": self.spec.tensor_parallel,
            "pipeline_parallel": self.spec.pipeline_parallel,
            **({"unequal_memory": told} if (told := unequal(self.ranks)) else {}),
        }

    def begin(self, job: ScoreJob, length: int) -> int:
        """Get ready for windows of `length` tokens, with the hook of the job in place; how many of
        them run together.
        """
        longest = int(self._llm.llm_engine.vllm_config.model_config.max_model_len)
        if length > longest:
            raise self._too_little_room(length, longest)
        self.end()
        self._job, self._bytes_read, self._passes = job, 0.0, 1
        if job.hook:
            if not isinstance(job.hook, HookSpec):
                raise TypeError("a hook of vLLM is named, for it may run in another process")
            if self.spec.ranks > 1:
                refuse = getattr(load_hook(job.hook), "check_ranks", _no_ranks)
                refuse(self.spec.tensor_parallel, self.spec.pipeline_parallel)
            # By prefill nothing is fed after a prefix.
            prefix = length if job.path is ScoringPath.PREFILL else job.scored_from - 1
            self._passes = self._call("begin", job.hook, prefix, self.spec.enforce_eager)
        return job.batch or max(
            1, min(_AT_ONCE, self._room(_AT_ONCE, plan_window(length, job), length))
        )

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
        self._all("end")
        self._job = None
        return engagement

    def engagement(self) -> Engagement:
        """Cache bytes that attention has read since `begin`, and what the hook counted."""
        notes: dict[str, Any] = {"kv_bytes_per_token": self.cache["bytes_per_token"]}
        if self._batches and self._batches.size < self._batches.asked:
            notes["batch"] = self._batches.note()
        job, bytes_read = self._job, int(self._bytes_read)
        if job is None or not isinstance(job.hook, HookSpec):
            return Engagement(bytes_read=bytes_read, notes=notes)
        parts = [part for part in self._all("engagement") if part is not None]
        counted = (
            parts[0] if len(parts) == 1 else getattr(load_hook(job.hook), "merged", merged)(parts)
        )
        return Engagement(counted.fires, bytes_read, counted.per_layer, {**counted.notes, **notes})

    def score(self, windows: Sequence[Window]) -> list[torch.Tensor]:
        """States [length − scored_from, d] of each window, on the engine's device; of several ranks
        on the CPU.

        A batch that does not fit into memory is halved and tried again.
        """
        return self._scored(windows, lambda part: list(self._call("states")))

    def _scored(
        self, windows: Sequence[Window], take: Callable[[Sequence[Window]], list[_Taken]]
    ) -> list[_Taken]:
        """What `take` gives for each window of a batch that went through, of all batches."""
        if self._job is None:
            raise RuntimeError("score() before begin()")
        job, length = self._job, len(windows[0].tokens)
        plan = plan_window(length, job)
        batch = self._room(len(windows), plan, length)
        if not batch:
            raise self._too_long(plan, length)

        def scored(part: Sequence[Window]) -> list[_Taken]:
            try:
                self._score_batch(part, job, plan)
                return take(part)
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                raise _failed(error) from error

        def too_large(window: Window) -> AssayError:
            return memory_error(
                f"a single window of {length:,} tokens", torch.device(self.ranks[-1]["device"])
            )

        self._batches = self._batches.again(batch) if self._batches else Batches(batch)
        return [found for _, found in self._batches.run(windows, scored, too_large)]

    def _score_batch(self, windows: Sequence[Window], job: ScoreJob, plan: WindowPlan) -> None:
        """Run a batch; the ranks then hold its states."""
        self._run += 1
        keys = {
            self._run * 1_000_000 + i: np.asarray(w.tokens, np.int32) for i, w in enumerate(windows)
        }
        for index in range(self._passes):
            self._all("start", keys, job.scored_from - 1, plan.blocks, index)
            self._pass(keys, plan)
        self._all("finish")
        self._bytes_read += len(windows) * cache_reads(plan.blocks) * self.cache["bytes_per_token"]

    def _pass(self, keys: Mapping[int, Any], plan: WindowPlan) -> None:
        """Run all windows once through the engine."""
        engine = self._llm.llm_engine
        for key, tokens in keys.items():
            engine.add_request(
                str(key),
                {"prompt_token_ids": tokens[: plan.prompt].tolist()},
                _params(key, tokens, plan),
            )
        try:
            steps = 0
            while engine.has_unfinished_requests():
                lo, hi = plan.blocks[min(steps, len(plan.blocks) - 1)]
                self._cut_prompts_at(hi - lo, alone=len(keys) == 1)
                engine.step()
                steps += 1
        except BaseException as error:
            if self._deaths is not None and self._deaths.happened():
                raise self._lost(error) from error
            self._recover()
            raise
        self._done()

    def _done(self) -> None:
        """Nothing of a batch is under way any more."""
        self._all("unwatch")
        self._cut_prompts_at(0)

    def _cut_prompts_at(self, tokens: int, *, alone: bool = False) -> None:
        """Let the scheduler take at most so many tokens of every prompt in a step; 0 as many as
        fit.

        vLLM 0.32 cuts no prompt that is `alone`, so that then the whole step is cut.
        """
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        scheduler.scheduler_config.long_prefill_token_threshold = tokens
        if self._step_tokens is None:
            self._step_tokens = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = tokens if alone else self._step_tokens

    def _recover(self) -> None:
        """Drop what is left of a batch that failed half-way."""
        engine = self._llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        self._all("discard")
        self._done()

    def reduce(
        self, windows: Sequence[Window], references: Sequence[StateRows], target: str
    ) -> list[dict[str, torch.Tensor]]:
        """Statistics of each window against the states of a reference, computed where the engine
        is.

        `target` names a function by import path (`package.module:name`) that takes the rows of all
        windows of both sides and gives a dataclass of tensors for each; they come back by field
        name, on the CPU. The whole batch is copied there at once, so that the engine's device does
        not wait after every window. Ranks compute their shares of one window after the other, with
        a `VocabularyShard` as third argument.
        """
        if self._job is None:
            raise RuntimeError("reduce() before begin()")
        first = self._job.scored_from
        if self.spec.ranks == 1:
            module, _, name = target.partition(":")
            function = getattr(import_module(module), name)
            head = self.head
            rows = [
                StateRows(w, first, s, head)
                for w, s in zip(windows, self.score(windows), strict=True)
            ]
            return to_host([vars(found) for found in function(references, rows)])
        number = self._number(references[0].head)
        states = {reference.window.index: reference.states for reference in references}

        def take(part: Sequence[Window]) -> list[dict[str, torch.Tensor]]:
            return [
                self._reduced(i, w, first, states[w.index].cpu(), number, target)
                for i, w in enumerate(part)
            ]

        return self._scored(windows, take)

    def _reduced(self, place: int, *arguments: Any) -> dict[str, torch.Tensor]:
        """Statistics of a window of the batch, from its ranks, which must agree bit for bit."""
        found = [answer for answer in self._all("reduce", place, *arguments) if answer is not None]
        for other in found[1:]:
            if any(
                not torch.equal(values.nan_to_num(), other[name].nan_to_num())
                for name, values in found[0].items()
            ):
                raise _failed(RuntimeError("its ranks came to different sums"))
        return dict(found[0])

    def _number(self, head: Head | HeadFile) -> int:
        """The number under which the ranks have their rows of a reference's head; they read them
        from its file.
        """
        for number, known in enumerate(self._heads):
            if known is head:
                return number
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="assay-heads-")
        self._heads.append(head)
        number = len(self._heads) - 1
        file = (
            head
            if isinstance(head, HeadFile)
            else HeadFile.of(head, Path(self._folder.name), number)
        )
        self._all("keep_head", number, file)
        return number

    def greedy(self, prefixes: Sequence[tuple[int, ...]], count: int) -> list[list[GreedyStep]]:
        """`count` greedy tokens after each prefix, with vLLM's own log-probabilities of the two
        likeliest.
        """
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
        if self._folder is not None:
            self._folder.cleanup()
        if self.spec.ranks > 1:
            forget_ranks()
        llm.llm_engine.engine_core.shutdown()
        del llm
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()

    def _too_little_room(self, length: int, longest: int) -> UsageError:
        return UsageError(
            f"windows of {length} tokens do not fit into max_model_len={longest}",
            remedy=(
                f"write vllm:{Path(self.spec.model).name}?max_model_len={length}, or use shorter"
                " windows"
            ),
            finding_id="fidelity.usage",
        )

    def _too_long(self, plan: WindowPlan, length: int) -> AssayError:
        return AssayError(
            f"not one window of {length} tokens fits: a step holds {self.spec.batched_tokens:,}"
            f" tokens (this path needs {plan.largest:,}), the KV cache"
            f" {self.cache['cache_tokens']:,}",
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
    """The steps of one continuation of vLLM, whose log-probabilities are the true ones
    (`raw_logprobs`).
    """
    steps = []
    for token, entries in zip(output.token_ids, output.logprobs, strict=True):
        values = {int(key): float(entry.logprob) for key, entry in entries.items()}
        runner_up = max((key for key in values if key != token), key=lambda key: values[key])
        steps.append(GreedyStep(int(token), runner_up, values[token], values[runner_up]))
    return steps


def _cache_of(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The cache of all ranks together: each holds the heads and layers that it has, for as many
    tokens as the smallest.
    """
    return {
        **ranks[0],
        "cache_tokens": min(rank["cache_tokens"] for rank in ranks),
        "bytes_per_token": sum(rank["bytes_per_token"] for rank in ranks),
        "layers": sum(rank["layers"] for rank in ranks if not rank["tensor_rank"]),
    }


def unequal(ranks: Sequence[Mapping[str, Any]]) -> str:
    """One line where a rank's GPU has less memory than another's; else nothing."""
    memory = {rank["rank"]: rank["memory"] / 2**30 for rank in ranks if "memory" in rank}
    if not memory or max(memory.values()) - min(memory.values()) < 0.05 * max(memory.values()):
        return ""
    least, most = min(memory, key=lambda r: memory[r]), max(memory, key=lambda r: memory[r])
    return (
        f"rank {least} has {memory[least]:.1f} GiB of GPU memory, rank {most} {memory[most]:.1f}: "
        "the cache of all is as small as its"
    )


class _Deaths:
    """Notes which rank's process ended first: the others are ended after it."""

    def __init__(self, llm: Any) -> None:
        workers = llm.llm_engine.engine_core.engine_core.model_executor.workers
        self._processes = {worker.proc.sentinel: (worker.rank, worker.proc) for worker in workers}
        self._first: tuple[int, int | None] | None = None
        self._thread = Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        rank, process = self._processes[wait(list(self._processes))[0]]
        for _ in range(
            20
            # vLLM's own monitor may have asked for the status just now: then the first try finds
            # none
        ):
            process.join(0.1)
            if process.exitcode is not None:
                break
            sleep(0.05)
        self._first = (rank, process.exitcode)

    def happened(self) -> bool:
        """Whether a rank has ended; one that is about to is waited for."""
        self._thread.join(2.0)
        return self._first is not None

    def error(self, error: BaseException, spec: VllmSpec) -> AssayError:
        """One line that names the rank and what it said, or how it ended."""
        if not self.happened() or self._first is None:
            return _failed(error)
        rank, status = self._first
        told: dict[str, Any] = {}
        reports = sorted(Path(os.environ.get(REPORTS, "/nowhere")).glob("*.json"))
        if reports:
            file = next((f for f in reports if f.stem == str(rank)), reports[0])
            rank, told = int(file.stem), json.loads(file.read_text(encoding="utf-8"))
        how = told.get("message") or (
            f"its process was killed by signal {-status}"
            if status and status < 0
            else f"its process ended with status {status}"
        )
        if status == -9 and not told:
            how += " (the system may have run out of memory)"
        smaller = "use a smaller --batch, shorter windows or a smaller gpu_memory_utilization"
        return AssayError(
            f"rank {rank} of {spec.ranks} of vLLM ended while it scored:"
            f" {reason_of(RuntimeError(how))}",
            finding_id=told.get("finding_id") or "fidelity.engine_failed",
            remedy=told.get("remedy")
            or (
                smaller
                if told.get("memory") or status == -9
                else "run it again: what was scored so far is kept"
            ),
            evidence={"rank": rank, "status": status},
        )


def _no_ranks(tensor: int, stages: int) -> None:
    raise UsageError(
        f"this hook sees all heads and layers together, which {tensor} × {stages} ranks split",
        remedy="score with it on one GPU",
        finding_id="fidelity.usage",
    )


def _failed(error: BaseException) -> AssayError:
    return AssayError(
        f"vLLM failed while it scored: {reason_of(error)}",
        finding_id="fidelity.engine_failed",
        remedy=(
            "use a smaller batch or shorter windows; without enforce_eager=false there are no CUDA"
            " graphs to fail"
        ),
    )
