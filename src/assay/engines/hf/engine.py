"""A causal language model of transformers as an engine: batched, seeded, and able to score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

from assay.engines.base import Capability, CapabilityReport, OnText, Reply, Request, TokenScores
from assay.engines.hf.batching import plan_batches
from assay.engines.hf.caches import cache_dtype, set_cache_dtype, token_bytes
from assay.engines.hf.packages import missing_package
from assay.engines.hf.spec import HfSpec, parse_spec
from assay.engines.hf.weights import transform_weights, weight_bytes
from assay.engines.options import require_local
from assay.engines.setup import setup_facts
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
    Capability.TOOLS: "transformers writes tool calls as text and parses none",
    Capability.METRICS: "there is no server",
}


class HfEngine:
    """One model in this process. Calls from several threads take turns."""

    def __init__(self, spec: HfSpec, model: Any, tokenizer: Any, weight_bytes: int | None = None) -> None:
        self.spec = spec
        self._model = model
        self._tokenizer = tokenizer
        self._weight_bytes = weight_bytes
        self._lock = Lock()
        self._eos = _eos_ids(model, tokenizer)

    @classmethod
    def load(cls, spec: str | HfSpec) -> HfEngine:
        """Load `hf:PATH?dtype=…`; AssayError where transformers is missing or cannot read the checkpoint."""
        spec = parse_spec(spec) if isinstance(spec, str) else spec
        try:
            import torch
            import transformers
        except ImportError as error:
            raise missing_package(f"hf:{spec.model}", error.name) from error
        from assay.engines.hf.attention import register

        require_local(f"hf:{spec.model}", spec.model)
        spec.refuse_what_is_not_there()
        transformers.utils.logging.disable_progress_bar()  # loading takes a second, its bar many lines of a log
        dtype = "auto" if spec.dtype == "auto" else getattr(torch, spec.dtype)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(spec.model)
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                spec.model,
                dtype=dtype,
                attn_implementation=spec.attention or register(),
                output_loading_info=True,
            )
            _refuse_made_up(spec.model, sorted(loading["missing_keys"]))
            set_cache_dtype(model, spec.kv_cache_dtype)
            model = _on_device(model.eval(), spec)
            size = transform_weights(model, spec.weights) if spec.weights else weight_bytes(model)
        except ImportError as error:  # a quantised checkpoint needs its quantiser's library
            raise AssayError(
                f"cannot load the model {spec.model}: {str(error).strip().partition(chr(10))[0]}",
                finding_id="fidelity.engine_missing",
                remedy="install the library that the checkpoint names, or score it with vllm:",
            ) from error
        except (OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise AssayError(
                f"cannot load the model {spec.model}: {reason}",
                finding_id="fidelity.engine_load",
                remedy="give the folder of a checkpoint that transformers can load: hf:PATH",
            ) from error
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
        return CapabilityReport(frozenset(present), absent, where=f"hf:{self.spec.model}")

    def describe(self) -> dict[str, Any]:
        """Engine, versions, model and number format."""
        import torch
        import transformers

        return {
            "engine": "hf",
            "model": Path(self.spec.model).name,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": self.spec.device,
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
        self, requests: Sequence[Request], on_done: Callable[[], None] = lambda: None
    ) -> list[Reply]:
        """Answer all requests, in order; `on_done` is called once for each as its batch ends."""
        from assay.engines.hf.decoding import Row, decode_batch

        rows: list[Row] = [self._row(request) for request in requests]
        limits = [row.max_tokens for row in rows]
        with self._lock:
            for batch in plan_batches([len(row.prompt) for row in rows], limits):
                decode_batch(self._model, [rows[i] for i in batch], self._pad_id)
                for _ in batch:
                    on_done()
        return [self._reply(row, request) for row, request in zip(rows, requests, strict=True)]

    def stream(self, request: Request, on_text: OnText | None = None) -> Reply:
        """Always refused: this engine does not stream."""
        self.capabilities.require(Capability.STREAM)
        return self.generate(request)

    def score(self, source: str | tuple[int, ...]) -> TokenScores:
        """Log-probabilities of the tokens of a text (with the tokenizer's own start token), or of given ids."""
        from assay.engines.hf.scoring import token_logprobs

        text = source if isinstance(source, str) else None
        ids = tuple(map(int, self._tokenizer(text)["input_ids"] if text is not None else source))
        if not ids:
            raise UsageError("an empty text has no tokens to score")
        with self._lock:
            logprobs = token_logprobs(self._model, ids)
        return TokenScores(logprobs, len(ids), len(text.encode()) if text is not None else None, ids)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without special tokens added."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def close(self) -> None:
        """Drop the model, so that its memory can be given back."""
        self._model = None

    def __enter__(self) -> HfEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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

    def _row(self, request: Request) -> Any:
        import numpy as np

        from assay.engines.hf.decoding import Row

        return Row(
            prompt=self._prompt_ids(request),
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
            messages = [{"role": m.role, "content": m.content or ""} for m in request.messages or ()]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise UsageError("an empty prompt has no token to continue from")
        return ids

    def _stops_at(self, stop: tuple[str, ...]) -> Callable[[list[int]], bool]:
        return lambda tokens: any(word in self._text(tokens) for word in stop)

    def _text(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _reply(self, row: Any, request: Request) -> Reply:
        text = self._text(row.tokens)
        cuts = [text.index(word) for word in request.stop if word in text]
        return Reply(
            content=text[: min(cuts)] if cuts else text,
            finish_reason=row.finish_reason,
            prompt_tokens=len(row.prompt),
            completion_tokens=len(row.tokens),
        )


def _on_device(model: Any, spec: HfSpec) -> Any:
    """`model` on the device of `spec`; AssayError where this torch has none of that name, or it is full."""
    try:
        return model.to(spec.device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).strip().partition("\n")[0]
        raise AssayError(
            f"cannot put the model {spec.model} on the device {spec.device!r}: {reason}",
            finding_id="fidelity.engine_load",
            remedy="name a device that is there and has room: ?device=cpu",
        ) from error


def _refuse_made_up(model: str, missing: list[str]) -> None:
    """AssayError where tensors are not in the checkpoint: transformers would fill them with random numbers."""
    if missing:
        raise AssayError(
            f"cannot load the model {model}: {len(missing)} of its tensors are not in the checkpoint, such as {missing[0]}",
            finding_id="fidelity.engine_load",
            remedy=f"see what is there with assay verify {model}",
        )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: those of the generation config, and the tokenizer's own."""
    listed = model.generation_config.eos_token_id
    ids = set(listed) if isinstance(listed, list) else {listed}
    ids.add(tokenizer.eos_token_id)
    return frozenset(i for i in ids if i is not None)
