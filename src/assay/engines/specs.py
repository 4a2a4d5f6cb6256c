"""How an engine is written on the command line, read without torch; and the engine that is written
so, opened.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_type_hints

from assay.engines import read_options, require_local
from assay.engines.scoring import ScoringEngine, ScoringPath, TokenizerFacts, vocabulary_sha256
from assay.engines.server.engine import ServerCandidate
from assay.engines.server.http import without_credentials
from assay.errors import AssayError, UsageError
from assay.plugins import get, names

# How an engine in this process is written: `hf:PATH?dtype=float32&device=cpu`.


DTYPES = ("auto", "bfloat16", "float16", "float32")
"""Accepted values of `dtype`; `auto` is the type in which the checkpoint is stored."""

KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Accepted values of `kv_cache_dtype`, by vLLM's names; `auto` is the type of the model, `fp8` is
`fp8_e4m3`.
"""

_CONFIGS = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class HfSpec:
    """One model for transformers: a folder (or a name on the hub) and how to load it."""

    model: str
    dtype: str = "auto"
    device: str = "auto"
    """`auto` is the GPU where torch finds one, else the CPU."""
    attention: str = "sdpa"
    """`sdpa`, `eager`, … of transformers; `assay` is its own product for one new token (see
    `hf.cache`).
    """
    weights: str = ""
    """A transformation of the weights after loading, such as `polar(bits=4)`; empty: as stored."""
    kv_cache_dtype: str = "auto"
    """What the KV cache holds its keys and values in."""
    threads: int = 0
    """Threads of torch; 0: as many as there are free cores."""

    def refuse_path(self, path: ScoringPath) -> None:
        """AssayError where the scoring path does not read what `kv_cache_dtype` changes."""
        if path is ScoringPath.PREFILL and self.unread:
            raise AssayError(
                f"hf:{self.model}?kv_cache_dtype={self.kv_cache_dtype}: {self.unread}",
                finding_id="fidelity.missing_capability",
                remedy=(
                    "score by --path decode or chunked (assay kv: --mode decode; assay gap: --mode"
                    " decode --base-mode decode), or leave it out"
                ),
            )

    def refuse_what_is_not_there(self) -> None:
        """AssayError where a local model is no checkpoint, or torch knows no such device here;
        loads nothing.
        """
        path = Path(self.model)
        if path.is_file():
            problem = "it is a file"
        elif path.is_dir() and not any((path / name).is_file() for name in _CONFIGS):
            problem = "the folder holds no config.json"
        else:
            self._require_device()
            return
        raise AssayError(
            f"hf:{self.model} is no checkpoint: {problem}",
            finding_id="fidelity.engine_load",
            remedy="give the folder of a checkpoint that transformers can load: hf:PATH",
        )

    def _require_device(self) -> None:
        if self.device in ("auto", "cpu"):
            return
        import torch

        try:
            kind = torch.device(self.device).type
            problem = (
                "" if kind != "cuda" or torch.cuda.is_available() else "torch finds no GPU here"
            )
        except RuntimeError as error:
            problem = str(error).strip().partition("\n")[0]
        if problem:
            raise AssayError(
                f"hf:{self.model}: no device {self.device!r}: {problem}",
                finding_id="fidelity.engine_load",
                remedy="name a device that is there: ?device=cpu",
            )

    @property
    def unread(self) -> str:
        """Why the prefill path is no path for a cache of another type; empty for `auto`."""
        if self.kv_cache_dtype == "auto":
            return ""
        return (
            f"kv_cache_dtype={self.kv_cache_dtype} changes what is read from a KV cache, and the"
            " prefill path reads none"
        )


def parse_spec(spec: str) -> HfSpec:
    """Read `hf:MODEL?option=value&…`, or a plain MODEL; UsageError on an unknown option or value."""
    options: dict[str, Any] = {field.name: field.default for field in fields(HfSpec)[1:]}
    model, given = read_options(
        spec, "hf:", list(options), example="hf:PATH, such as hf:./model?dtype=float32"
    )
    options |= dict(given)
    for name, known in (("dtype", DTYPES), ("kv_cache_dtype", KV_CACHE_DTYPES)):
        if options[name] not in known:
            raise UsageError(
                f"{spec!r}: unknown {name} {options[name]!r}",
                remedy=f"one of {', '.join(known)}",
                finding_id="fidelity.usage",
            )
    if options["kv_cache_dtype"] == "fp8":
        options["kv_cache_dtype"] = "fp8_e4m3"
    if options["threads"] == "auto":
        options["threads"] = 0
    if not str(options["threads"]).isdecimal():
        raise UsageError(
            f"{spec!r}: threads={options['threads']} is not a whole number",
            remedy="write a number, or auto",
            finding_id="fidelity.usage",
        )
    options["threads"] = int(options["threads"])
    return HfSpec(model=model, **options)


# Facts of a tokenizer of transformers, the same for every engine that has one.


def tokenizer_facts(tokenizer: Any) -> TokenizerFacts:
    """What a comparison needs of the tokenizer that lies beside the weights."""
    return TokenizerFacts(
        sha256=vocabulary_sha256(tokenizer.get_vocab()),
        vocab_size=len(tokenizer),
        bos_id=start_token(tokenizer),
        encode=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        decode=lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)),
    )


def start_token(tokenizer: Any) -> int | None:
    """The id that the tokenizer puts before a text; None where it puts none, even if it names one
    (SmolLM2).
    """
    bos: int | None = tokenizer.bos_token_id
    return bos if bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos] else None


def document_start(tokenizer: Any) -> int:
    """The id after which a text of the model's own begins.

    The start token where the tokenizer puts one before a text, else `<|endoftext|>`, with which
    models that have no start token separate documents, else the start or end token that it names.
    AssayError where it has none of these.
    """
    between = tokenizer.get_vocab().get("<|endoftext|>")
    for token in (start_token(tokenizer), between, tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise AssayError(
        "the tokenizer has no token that a text could begin after",
        finding_id="fidelity.text_unusable",
        remedy="give a file with --text",
    )


# The packages of the extra `hf`, asked for before anything costly is done.


def require_packages(what: str) -> None:
    """Raise AssayError where torch or transformers is not installed; imports neither. `what` needs
    them.
    """
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise AssayError(
                f"{what} needs {name}, which is not installed",
                finding_id="fidelity.engine_missing",
                remedy="pip install 'llm-assay[hf]'",
            )


# Weights changed after loading: what a quantisation would make of them, as
# `?weights=NAME(option=value)`.

# The group `assay.weights` holds functions `(model, **options) -> int` that change the linear
# layers of a loaded model in place and return the bytes that all its parameters would take as
# stored.


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters as they are held; tied ones count once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def transform_weights(model: Any, spec: str) -> int:
    """Apply `polar(bits=4)` or `int(bits=4, group=128)` to `model`; UsageError for what is not
    known.

    Returns the bytes that the weights would take as stored.
    """
    name, options = parse_transform(spec)
    try:
        return int(get("assay.weights", name)(model, **options))
    except TypeError as error:  # an option of the wrong kind
        raise UsageError(
            f"weights={spec}: {error}",
            remedy="look at the options in docs/compare.md",
            finding_id="fidelity.usage",
        ) from error


def parse_transform(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a transformation; UsageError for a name or an option that there is not."""
    name, options = _read(spec)
    function = get("assay.weights", name)
    known = list(inspect.signature(function).parameters.values())[1:]
    hints = get_type_hints(function)
    odd = next(
        (o for o, value in options.items() if o in hints and type(value) is not hints[o]), None
    )
    if odd:
        raise UsageError(
            f"weights={spec}: {odd} must be {hints[odd].__name__}, got {options[odd]!r}",
            remedy="look at the options in docs/compare.md",
            finding_id="fidelity.usage",
        )
    unknown = next((o for o in options if o not in {p.name for p in known}), None)
    missing = next((p.name for p in known if p.default is p.empty and p.name not in options), None)
    if unknown or missing:
        problem = f"unknown option {unknown!r}" if unknown else f"{missing} is missing"
        raise UsageError(
            f"weights={spec}: {problem}",
            remedy=f"options of {name} are {', '.join(p.name for p in known)}",
            finding_id="fidelity.usage",
        )
    return name, options


def _read(spec: str) -> tuple[str, dict[str, Any]]:
    try:
        call = ast.parse(spec, mode="eval").body
    except SyntaxError:
        call = None
    if isinstance(call, ast.Name):
        call = ast.Call(call, [], [])
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise UsageError(
            f"weights={spec!r} is not NAME(option=value, …)",
            remedy="write weights=polar(bits=4)",
            finding_id="fidelity.usage",
        )
    if get("assay.weights", call.func.id) is None:
        raise UsageError(
            f"weights={spec!r}: unknown transformation {call.func.id!r}",
            remedy=(
                f"one of {', '.join(names('assay.weights'))}, with options in parentheses:"
                " weights=int(bits=8)"
            ),
            finding_id="fidelity.usage",
        )
    try:
        return call.func.id, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except ValueError as error:
        raise UsageError(
            f"weights={spec!r}: options must be plain numbers or strings",
            remedy="write them like weights=int(bits=4,group=128)",
            finding_id="fidelity.usage",
        ) from error


# Open an engine.

# prefix: `module:class` with a `load(spec)`.
SCORERS = {
    "hf:": "assay.engines.hf.scorer:HfScorer",
    "vllm:": "assay.engines.vllm.scorer:VllmScorer",
    "gguf:": "assay.engines.gguf:GgufScorer",
}


# prefix: `module:function` that reads such a spec without loading anything.
_SPECS = {
    "hf:": "assay.engines.specs:parse_spec",
    "vllm:": "assay.engines.vllm.start:parse_spec",
    "gguf:": "assay.engines.gguf:parse_spec",
}


def added_engine(spec: str) -> Any:
    """The engine of another package that a spec `NAME:…` names, None where there is none."""
    name, colon, _ = spec.partition(":")
    return get("assay.engines", name) if colon and f"{name}:" not in SCORERS else None


def check_spec(spec: str, path: ScoringPath | None = None) -> None:
    """UsageError or AssayError for a spec that no engine could open: a typing error should not cost
    a scored reference.

    With `path` also for an option that changes nothing on that scoring path.
    """
    for prefix, target in _SPECS.items():
        if spec.startswith(prefix):
            module, _, name = target.partition(":")
            parsed = getattr(import_module(module), name)(spec)
            require_local(spec, parsed.model)
            if getattr(parsed, "weights", ""):
                import_module("assay.engines.specs").parse_transform(parsed.weights)
            if prefix == "hf:":
                parsed.refuse_what_is_not_there()
                if path:
                    parsed.refuse_path(path)
            return
    if spec.startswith(("run:", "pack:")):
        raise UsageError(
            f"{spec} is a stored reference, which has no model to score a candidate with",
            remedy=f"name it first: assay compare {spec} CANDIDATE…",
            finding_id="fidelity.usage",
        )
    if not is_server(spec) and added_engine(spec) is None:
        raise _unknown(spec)


_OPENERS: list[Callable[[str], ScoringEngine]] = []


@contextmanager
def opened_by(opener: Callable[[str], ScoringEngine]) -> Iterator[None]:
    """Have `opener` open the engines that are asked for inside."""
    _OPENERS.append(opener)
    try:
        yield
    finally:
        _OPENERS.pop()


def open_scorer(spec: str) -> ScoringEngine:
    """The scoring engine that `spec` names; UsageError for an unknown kind."""
    if _OPENERS and not is_server(spec):
        return _OPENERS[-1](spec)
    for prefix, target in SCORERS.items():
        if spec.startswith(prefix):
            if prefix == "hf:":
                require_packages(spec.partition("?")[0])
            module, _, name = target.partition(":")
            engine: ScoringEngine = getattr(import_module(module), name).load(spec)
            return engine
    if added := added_engine(spec):
        return cast("ScoringEngine", added.load(spec))
    if is_server(spec):
        raise AssayError(
            f"{without_credentials(spec)} gives log-probabilities of a few ids, from which no"
            " distribution can be rebuilt",
            finding_id="fidelity.missing_capability",
            remedy=(
                "run the engine in process (hf:MODEL, vllm:MODEL, gguf:FILE); assay compare takes a"
                " server as candidate"
            ),
        )
    raise _unknown(spec)


def _unknown(spec: str) -> UsageError:
    return UsageError(
        f"{spec!r} names no engine that scores whole distributions",
        remedy="write "
        + ", ".join(
            ("hf:MODEL", "vllm:MODEL", "gguf:FILE", *(f"{n}:…" for n in names("assay.engines")))
        )
        + ", run:DIR or pack:FILE; a candidate may be http://…",
        finding_id="fidelity.usage",
    )


def is_server(spec: str) -> bool:
    """Whether `spec` names a server."""
    return spec.startswith(("http://", "https://"))


def open_candidate(spec: str) -> ScoringEngine | ServerCandidate:
    """The engine that `spec` names: a server, or one that `open_scorer` opens."""
    return ServerCandidate.load(spec) if is_server(spec) else open_scorer(spec)
