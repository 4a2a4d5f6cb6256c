"""A causal language model of transformers as an engine: batched, seeded, and able to score."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from pickle import UnpicklingError
from threading import Lock
from types import TracebackType
from typing import Any

import huggingface_hub
import numpy as np
import torch
import transformers
from tqdm.std import tqdm  # type: ignore[import-untyped]

from assay.engines import (
    GIVEN_UP,
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
from assay.engines.hf.cache import (
    ATTENTION,
    cache_dtype,
    new_cache,
    register_attention,
    set_cache_dtype,
    token_bytes,
    with_cache,
)
from assay.engines.hf.tokenizer import read_tokenizer
from assay.engines.machine import (
    Batches,
    choose_device,
    give_back,
    memory_error,
    out_of_memory,
    use_threads,
)
from assay.engines.specs import HfSpec, parse_spec, transform_weights, weight_bytes
from assay.errors import AssayError, UsageError

MAX_ROWS = 48
"""Bound on the requests that run together."""
MAX_CACHED_TOKENS = 32_768
"""Bound on rows × longest row of one batch, in tokens: what the KV cache of the batch may hold."""
PREFILL_CHUNK = 1024
"""Prompt tokens of a row that one forward pass takes, so that activations stay small on long
prompts.
"""
_LOGITS_AT_ONCE = 2**25
"""Bound on tokens × vocabulary of the logits in memory (128 MiB as float32)."""
_HEAD = 512
"""How many of the likeliest tokens are looked at first; a sharp distribution needs no full sort."""

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

HUB_S = 5.0
"""Seconds that the Hub has to answer before a model is looked for in its cache alone."""


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
        spec = parse_spec(spec) if isinstance(spec, str) else spec
        require_local(f"hf:{spec.model}", spec.model)
        spec.refuse_what_is_not_there()
        kept_only = _hub_is_out_of_reach(spec.model)
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
                _refuse_made_up(spec.model, sorted(loading["missing_keys"]))
                set_cache_dtype(model, spec.kv_cache_dtype)
                model = _on_device(model.eval(), spec)
                size = (
                    transform_weights(model, spec.weights) if spec.weights else weight_bytes(model)
                )
        except AssayError:
            raise
        except (
            Exception
        ) as error:  # whatever a checkpoint of any kind makes transformers stumble over
            raise _cannot_load(spec, error) from error
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


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars, log lines and warnings of transformers, its converters, accelerate
    and the hub's client.

    Bars of all of them are tqdm's. transformers stays at its errors afterwards: a warning while a
    model scores would break assay's own progress.
    """
    transformers.utils.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    inner = tqdm.__init__
    tqdm.__init__ = partialmethod(inner, disable=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        tqdm.__init__ = inner


def _on_device(model: Any, spec: HfSpec) -> Any:
    """`model` on the device of `spec`; AssayError where this torch has none of that name, or it is
    full.
    """
    device = choose_device(spec.device)
    try:
        return model.to(device)
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # torch asserts that it was built for the device
        raise AssayError(
            f"cannot put the model {spec.model} on the device {device!r}: {_first_line(error)}",
            finding_id="fidelity.out_of_memory" if out_of_memory(error) else "fidelity.engine_load",
            remedy="name a device that is there and has room: ?device=cpu",
        ) from error


def _hub_is_out_of_reach(model: str) -> bool:
    """Whether `model` is a name on the Hub, which does not answer: its client would try each file
    again for minutes.

    AssayError where the Hub's cache on this machine does not hold the model either.
    """
    if Path(model).exists():
        return False
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        try:
            huggingface_hub.utils.get_session().head(
                huggingface_hub.constants.ENDPOINT, timeout=HUB_S
            )
            return False
        except Exception:  # its HTTP library differs between versions
            pass
    try:
        held = huggingface_hub.try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a name that the Hub could have
        held = None
    if not isinstance(held, str):
        raise AssayError(
            f"there is no folder {model} here, and the Hub cannot be reached to fetch a model of"
            " that name",
            finding_id="fidelity.engine_load",
            remedy="give the folder of a checkpoint: hf:PATH",
        )
    return True


def _cannot_load(spec: HfSpec, error: Exception) -> AssayError:
    """The error for a checkpoint that transformers cannot load, or that would have to run code of
    its own.
    """
    reason, finding = _first_line(error), "fidelity.engine_load"
    remedy = "give the folder of a checkpoint that transformers can load: hf:PATH"
    if out_of_memory(error):
        return memory_error(
            f"the weights of {spec.model}",
            choose_device(spec.device),
            "give a smaller type: ?dtype=bfloat16",
        )
    if isinstance(error, UnpicklingError):
        reason = (
            "a pickle file of it needs more than weights or is damaged, and assay runs no code of a"
            " checkpoint"
        )
        finding, remedy = "fidelity.code_refused", "convert it to safetensors where you trust it"
    elif "trust_remote_code" in str(error):
        reason = "it comes with code of its own (auto_map), which assay never runs"
        finding = "fidelity.code_refused"
        remedy = (
            "leave auto_map out where transformers knows the architecture, or compare a server that"
            " you trust with it"
        )
    elif isinstance(error, ImportError):  # a quantised checkpoint needs its quantiser's library
        finding, remedy = (
            "fidelity.engine_missing",
            "install the library that the checkpoint names, or score it with vllm:",
        )
    return AssayError(
        f"cannot load the model {spec.model}: {reason}", finding_id=finding, remedy=remedy
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _refuse_made_up(model: str, missing: list[str]) -> None:
    """AssayError where tensors are not in the checkpoint: transformers would fill them with random
    numbers.
    """
    if missing:
        raise AssayError(
            f"cannot load the model {model}: {len(missing)} of its tensors are not in the"
            f" checkpoint, such as {missing[0]}",
            finding_id="fidelity.engine_load",
            remedy=f"see what is there with assay verify {model}",
        )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: those of the generation config, and the tokenizer's own."""
    listed = model.generation_config.eos_token_id
    ids = set(listed) if isinstance(listed, list) else {listed}
    ids.add(tokenizer.eos_token_id)
    return frozenset(i for i in ids if i is not None)


# Generation. A row draws from its own generator, so its text does not depend on which other rows
# share the batch (up to the rounding of the logits themselves).


def plan_batches(
    prompt_tokens: Sequence[int],
    max_tokens: Sequence[int],
    *,
    max_rows: int = MAX_ROWS,
    max_cached_tokens: int = MAX_CACHED_TOKENS,
) -> Iterator[list[int]]:
    """Indices of the requests of each batch, in an order that wastes little on padding.

    Requests with equal limits and similar prompts run together. One that is too long for the bound
    runs alone.
    """
    order = sorted(
        range(len(prompt_tokens)), key=lambda i: (max_tokens[i], prompt_tokens[i]), reverse=True
    )
    batch: list[int] = []
    longest_prompt = longest_answer = 0
    for index in order:
        prompt = max(longest_prompt, prompt_tokens[index])
        answer = max(longest_answer, max_tokens[index])
        rows = len(batch) + 1
        if batch and (rows > max_rows or rows * (prompt + answer) > max_cached_tokens):
            yield batch
            batch, prompt, answer = [], prompt_tokens[index], max_tokens[index]
        batch.append(index)
        longest_prompt, longest_answer = prompt, answer
    if batch:
        yield batch


def draw_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """The next token of each row.

    `logits` is (B, V); `temperature`, `top_p` and `uniform` (in [0, 1)) are (B,). Temperature 0
    takes the likeliest token. Otherwise the token is drawn by inverting the cumulative distribution
    of the nucleus: the smallest set of likeliest tokens whose probabilities at that temperature sum
    to at least top_p (Holtzman et al., 2020). A row whose logits hold a NaN gives token 0, as
    sampling from nothing does in the engines of the field.
    """
    logits = logits.float()
    dead = logits.isnan().any(dim=-1)
    tokens = logits.argmax(dim=-1)
    sampled = (temperature > 0) & ~dead
    if sampled.any():
        rows = sampled.nonzero().squeeze(1)
        heat = temperature[rows, None].to(logits.dtype)
        tokens[rows] = _draw_nucleus(
            torch.softmax(logits[rows] / heat, dim=-1), top_p[rows], uniform[rows]
        )
    tokens[dead] = 0
    return tokens


def _draw_nucleus(probs: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`draw_tokens` for rows of probabilities (B, V) that sum to 1."""
    tokens = torch.empty(len(probs), dtype=torch.long, device=probs.device)
    open_rows = torch.arange(len(probs), device=probs.device)
    size = min(_HEAD, probs.shape[-1])
    while len(open_rows):
        whole = size == probs.shape[-1]
        value, index = probs[open_rows].topk(size, dim=-1)
        total = value.double().cumsum(dim=-1)
        enough = total >= top_p[open_rows, None].double()
        if whole:
            enough[:, -1] = True  # rounding must not leave a row without a nucleus
        done = enough[:, -1]
        last = enough.int().argmax(dim=-1)  # the first position at which the sum is large enough
        mass = total.gather(1, last[:, None]).squeeze(1)
        point = (uniform[open_rows].double() * mass)[:, None]
        rank = torch.minimum(torch.searchsorted(total, point, right=True).squeeze(1), last)
        tokens[open_rows[done]] = index.gather(1, rank[:, None]).squeeze(1)[done]
        open_rows = open_rows[~done]
        size = probs.shape[-1] if size >= 8 * _HEAD else min(8 * size, probs.shape[-1])
    return tokens


@dataclass
class Row:
    """One sequence: its prompt, how it is sampled, and what has been generated.

    `is_stop(tokens)` is asked after each token that is no end-of-text token. A row ends with the
    reason `stop` (an end-of-text token, which stays in `tokens`, or `is_stop`) or `length`.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    rng: np.random.Generator
    stop_ids: frozenset[int]
    is_stop: Callable[[list[int]], bool] | None = None
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, token: int) -> None:
        """Add the next token and see whether the row ends with it."""
        self.tokens.append(token)
        if token in self.stop_ids or (self.is_stop is not None and self.is_stop(self.tokens)):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"


def decode_batch(
    model: Any, rows: Sequence[Row], pad_id: int, deadline: float = float("inf")
) -> None:
    """Run all rows to their end, or until `deadline`. Prompts are padded on the left; finished rows
    leave the batch as it goes on.
    """
    if _given_up(rows, deadline):
        return
    device = next(model.parameters()).device
    width = max(len(row.prompt) for row in rows)
    ids = torch.tensor(
        [[pad_id] * (width - len(r.prompt)) + list(r.prompt) for r in rows], device=device
    )
    mask = torch.tensor(
        [[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in rows], device=device
    )
    cache = new_cache(model)
    live = list(rows)
    with torch.inference_mode():
        logits = _prefill(model, ids, mask, cache)
        while True:
            tokens = _next_tokens(logits, live)
            for row, token in zip(live, tokens.tolist(), strict=True):
                if row.finish_reason is None:
                    row.take(token)
            keep = [i for i, row in enumerate(live) if row.finish_reason is None]
            if not keep or _given_up([live[i] for i in keep], deadline):
                return
            if len(keep) <= 0.8 * len(
                live
            ):  # selecting copies the cache, so not for every row that ends
                index = torch.tensor(keep, device=device)
                cache.batch_select_indices(index)
                mask, tokens, live = mask[index], tokens[index], [live[i] for i in keep]
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
            logits = model(
                input_ids=tokens[:, None],
                attention_mask=mask,
                position_ids=mask.sum(dim=1, keepdim=True) - 1,
                **with_cache(model, cache),
                use_cache=True,
            ).logits[:, -1]


def _given_up(rows: Sequence[Row], deadline: float) -> bool:
    """Whether the time is over; then these rows end where they are."""
    if time.monotonic() <= deadline:
        return False
    for row in rows:
        row.finish_reason = GIVEN_UP
    return True


def _prefill(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits (B, V) after the last prompt token."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits: Any = None
    for start in range(0, ids.shape[1], PREFILL_CHUNK):
        end = start + PREFILL_CHUNK
        logits = model(
            input_ids=ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            **with_cache(model, cache),
            use_cache=True,
            logits_to_keep=1,
        ).logits
    last: torch.Tensor = logits[:, -1]
    return last


def _next_tokens(logits: torch.Tensor, live: Sequence[Row]) -> torch.Tensor:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)

    return draw_tokens(
        logits,
        column([row.temperature for row in live]),
        column([row.top_p for row in live]),
        column([float(row.rng.random()) for row in live]),
    )


def token_logprobs(model: Any, ids: tuple[int, ...]) -> tuple[float | None, ...]:
    """Natural log-probability of each token given those before it, in float32; None for the first."""
    device = next(model.parameters()).device
    tokens = torch.tensor([ids], device=device)
    vocabulary = model.get_input_embeddings().num_embeddings
    chunk = min(1024, max(16, _LOGITS_AT_ONCE // vocabulary))
    cache = new_cache(model)
    found: list[float | None] = [None]
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, chunk):
            end = min(start + chunk, len(ids) - 1)
            logits = model(
                input_ids=tokens[:, start:end], **with_cache(model, cache), use_cache=True
            ).logits[0]
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            found += logprobs.gather(1, tokens[0, start + 1 : end + 1, None]).squeeze(1).tolist()
    return tuple(found)
