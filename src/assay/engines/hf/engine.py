"""transformers in this process as an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

import numpy as np
import torch
import transformers

from assay.engines import (
    Capability,
    CapabilityReport,
    Message,
    OnText,
    Reply,
    Request,
    TokenScores,
    read_calls,
    require_local,
    setup_facts,
)
from assay.engines.device import Batches, give_back, memory_error
from assay.engines.hf.cache import (
    ATTENTION,
    cache_dtype,
    register_attention,
    set_cache_dtype,
    token_bytes,
)
from assay.engines.hf.decoding import Row, decode_batch, plan_batches
from assay.engines.hf.loading import (
    cannot_load,
    hub_is_out_of_reach,
    on_device,
    quiet,
    refuse_made_up,
)
from assay.engines.hf.prompt_logprobs import token_logprobs
from assay.engines.hf.spec import HfSpec, parse_hf
from assay.engines.hf.tokenizer import read_tokenizer
from assay.engines.threads import use_threads
from assay.engines.transform import transform_weights, weight_bytes
from assay.errors import AssayError, UsageError

_PRESENT = (
    Capability.GENERATE,
    Capability.COMPLETIONS,
    Capability.SCORE,
    Capability.TOKENIZE,
    Capability.TOKEN_IDS_PROMPT,
    Capability.IGNORE_EOS,
)


_ABSENT = {
    Capability.STREAM: "a batch in this process answers in one piece",
    Capability.METRICS: "there is no server",
}


class HfEngine:
    """One model in this process. Calls from several threads take turns."""

    def __init__(
        self, spec: HfSpec, model: Any, tokenizer: Any, weight_bytes: int | None = None
    ) -> None:
        self.spec = spec
        self._model = model
        self._tokenizer = tokenizer
        self._weight_bytes = weight_bytes
        self._lock = Lock()
        self._eos = _eos_ids(model, tokenizer)

    @classmethod
    def load(cls, spec: str | HfSpec) -> HfEngine:
        """Load `hf:PATH?dtype=…`; AssayError where transformers cannot read the checkpoint, or
        would run code of its own.
        """
        spec = parse_hf(spec) if isinstance(spec, str) else spec
        require_local(f"hf:{spec.model}", spec.model)
        spec.refuse_what_is_not_there()
        kept_only = hub_is_out_of_reach(spec.model)
        use_threads(spec.threads)
        try:
            with quiet():
                tokenizer = read_tokenizer(spec.model, local_files_only=kept_only)
                model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                    spec.model,
                    local_files_only=kept_only,
                    dtype="auto" if spec.dtype == "auto" else getattr(torch, spec.dtype),
                    attn_implementation=(
                        register_attention() if spec.attention == ATTENTION else spec.attention
                    ),
                    output_loading_info=True,
                    trust_remote_code=False,
                    weights_only=True,
                )
                refuse_made_up(spec.model, sorted(loading["missing_keys"]))
                set_cache_dtype(model, spec.kv_cache_dtype)
                model = on_device(model.eval(), spec)
                size = (
                    transform_weights(model, spec.weights) if spec.weights else weight_bytes(model)
                )
        except AssayError:
            raise
        except Exception as error:  # any error that a checkpoint makes transformers raise
            raise cannot_load(spec, error) from error
        return cls(spec, model, tokenizer, size)

    @property
    def model(self) -> Any:
        """The model of transformers."""
        return self._model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        return self._tokenizer

    @property
    def capabilities(self) -> CapabilityReport:
        """What this engine can do; chat only where the tokenizer has a template."""
        present, absent = set(_PRESENT), dict(_ABSENT)
        if self._tokenizer.chat_template:
            present.add(Capability.CHAT)
        else:
            absent[Capability.CHAT] = "the tokenizer has no chat template"
        if "tools" in str(self._tokenizer.chat_template or ""):
            present.add(Capability.TOOLS)
        else:
            absent[Capability.TOOLS] = "the chat template takes no tools"
        return CapabilityReport(frozenset(present), absent, where=f"hf:{self.spec.model}")

    def describe(self) -> dict[str, Any]:
        """Engine, versions, model and number format."""
        return {
            "engine": "hf",
            "model": Path(self.spec.model).name,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": str(self._model.device),
            "threads": torch.get_num_threads(),
            "attention": self._model.config._attn_implementation,
            "weights": self.spec.weights or "as stored",
            "kv_cache_dtype": self._cache_name,
            "kv_bytes_per_token": token_bytes(self._model),
            "setup": setup_facts(self._model.config),
            "weight_bytes": self._weight_bytes,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "capabilities": self.capabilities.to_json(),
        }

    def generate(self, request: Request) -> Reply:
        """Answer one request; `generate_batch` is many times faster for many."""
        return self.generate_batch([request])[0]

    def generate_batch(
        self,
        requests: Sequence[Request],
        on_done: Callable[[], None] = lambda: None,
        *,
        deadline: float = float("inf"),
    ) -> list[Reply]:
        """Answer all requests, in order; `on_done` is called once for each as its batch ends.

        What is not written by `deadline` (of `time.monotonic`) ends there, with the finish reason
        `GIVEN_UP`.
        """
        prompts = [self._prompt_ids(request) for request in requests]
        replies: dict[int, Reply] = {}

        def answer(part: Sequence[int]) -> list[Row]:
            rows = [self._row(prompts[i], requests[i]) for i in part]
            decode_batch(self._model, rows, self._pad_id, deadline)
            return rows

        def too_large(index: int) -> AssayError:
            return memory_error(f"a prompt of {len(prompts[index]):,} tokens", self._model.device)

        with self._lock:
            limits = [request.max_tokens for request in requests]
            for batch in plan_batches([len(prompt) for prompt in prompts], limits):
                for index, row in Batches(len(batch)).run(batch, answer, too_large):
                    replies[index] = self._reply(row, requests[index])
                    on_done()
        return [replies[index] for index in range(len(requests))]

    def stream(self, request: Request, on_text: OnText | None = None) -> Reply:
        """Always refused: this engine does not stream."""
        self.capabilities.require(Capability.STREAM)
        return self.generate(request)

    def score(self, source: str | tuple[int, ...]) -> TokenScores:
        """Log-probabilities of the tokens of a text (with the tokenizer's own start token), or of
        given ids.
        """
        text = source if isinstance(source, str) else None
        ids = tuple(map(int, self._tokenizer(text)["input_ids"] if text is not None else source))
        if not ids:
            raise UsageError("an empty text has no tokens to score")
        with self._lock:
            one = Batches(1).run(
                [ids],
                lambda rows: [token_logprobs(self._model, row) for row in rows],
                lambda row: memory_error(f"a text of {len(row):,} tokens", self._model.device),
            )
            logprobs = next(one)[1]
        return TokenScores(
            logprobs, len(ids), len(text.encode()) if text is not None else None, ids
        )

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without special tokens added."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def close(self) -> None:
        """Drop the model and give its memory back."""
        self._model = None
        give_back()

    def __enter__(self) -> HfEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _cache_name(self) -> str:
        """The type in which the KV cache is held, by vLLM's name."""
        name = self.spec.kv_cache_dtype
        return str(cache_dtype(self._model)).removeprefix("torch.") if name == "auto" else name

    @property
    def _pad_id(self) -> int:
        pad = self._tokenizer.pad_token_id
        return int(pad) if pad is not None else min(self._eos, default=0)

    def _row(self, prompt: tuple[int, ...], request: Request) -> Row:
        return Row(
            prompt=prompt,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            rng=np.random.default_rng(request.seed),
            stop_ids=frozenset() if request.ignore_eos else self._eos,
            is_stop=self._stops_at(request.stop) if request.stop else None,
        )

    def _prompt_ids(self, request: Request) -> tuple[int, ...]:
        if isinstance(request.prompt, tuple):
            ids = request.prompt
        elif request.prompt is not None:
            ids = tuple(self._tokenizer(request.prompt)["input_ids"])
        else:
            self.capabilities.require(Capability.CHAT)
            if request.tools:
                self.capabilities.require(Capability.TOOLS)
            text = self._tokenizer.apply_chat_template(
                [_turn(message) for message in request.messages or ()],
                tools=[dict(tool) for tool in request.tools] or None,
                tokenize=False,
                add_generation_prompt=True,
            )
            ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise UsageError("an empty prompt has no token to continue from")
        return ids

    def _stops_at(self, stop: tuple[str, ...]) -> Callable[[list[int]], bool]:
        return lambda tokens: any(word in self._text(tokens) for word in stop)

    def _text(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _reply(self, row: Row, request: Request) -> Reply:
        text = self._text(row.tokens)
        cuts = [text.index(word) for word in request.stop if word in text]
        content = text[: min(cuts)] if cuts else text
        names = {str(tool["function"]["name"]) for tool in request.tools}
        read = read_calls(
            content, names, plain=False
        )  # what a server's parser reads: calls between marks
        return Reply(
            content=read.rest,
            tool_calls=read.calls,
            finish_reason="tool_calls" if read.calls else row.finish_reason,
            prompt_tokens=len(row.prompt),
            completion_tokens=len(row.tokens),
        )


def _turn(message: Message) -> dict[str, Any]:
    """One message in the form that chat templates take: arguments of a call as an object where they
    are JSON.
    """
    turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: those of the generation config, and the tokenizer's own."""
    listed = model.generation_config.eos_token_id
    ids = set(listed) if isinstance(listed, list) else {listed}
    ids.add(tokenizer.eos_token_id)
    return frozenset(i for i in ids if i is not None)
