"""Engines: what runs a language model, one module or package each; here is what every one of them
offers.

An engine is a server behind HTTP, or a library in this process: a few verbs, and a statement of
what it can do. A verb of assay asks `engine.capabilities.require(...)` for what it needs and gets a
clear refusal where that is missing; no engine falls back silently to something weaker.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable
from urllib.parse import parse_qsl

from assay.errors import AssayError, UsageError


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool as the model wrote it; `arguments` is the raw text, which need not be
    valid JSON.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True)
class Message:
    """One turn of a conversation, in the roles of the OpenAI chat API."""

    role: str
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One generation. Exactly one of `messages` (chat) and `prompt` (text or token ids, completed
    as it is) is set.

    `tools` are OpenAI tool schemas. `ignore_eos` asks for exactly `max_tokens` tokens where the
    engine can. `extra` is passed through as it is (for a server: more fields of the JSON body).
    """

    messages: tuple[Message, ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("a request needs exactly one of messages and prompt")
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if self.tools and self.messages is None:
            raise ValueError("tools need messages, not a prompt")


@dataclass(frozen=True)
class Timing:
    """When the pieces of one streamed reply arrived, in seconds of one monotonic clock.

    `chunk_times` are the arrivals of the chunks that carried text; the first and the last of them
    are `first_token` and `last_token`. `first_chunk_tokens` counts the tokens that had arrived at
    `first_token` (a speculating server sends several at once); `first_chunk_source` says how it is
    known: from the server's usage counts, by tokenizing the text, or assumed to be 1. `finished` is
    when the reply was complete, trailing usage included.
    """

    started: float
    first_token: float
    last_token: float
    first_chunk_tokens: int
    chunk_times: tuple[float, ...]
    first_chunk_source: Literal["usage", "tokenize", "assumed"] = "assumed"
    finished: float | None = None

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.first_token - self.started

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the last."""
        return self.last_token - self.first_token

    def decode_tokens_per_s(self, completion_tokens: int) -> float | None:
        """Decode speed: (n − tokens in the first chunk) / (t_last − t_first); None where there was
        no decode.
        """
        tokens = completion_tokens - self.first_chunk_tokens
        if tokens <= 0 or self.decode_seconds <= 0.0:
            return None
        return tokens / self.decode_seconds

    def time_per_output_token(self, completion_tokens: int) -> float | None:
        """Mean inter-token latency in seconds, the inverse of the decode speed."""
        speed = self.decode_tokens_per_s(completion_tokens)
        return None if speed is None else 1.0 / speed


GIVEN_UP = "given_up"
"""The finish reason of a reply that was not waited for to its end."""


@dataclass(frozen=True)
class Reply:
    """What an engine answered. Token counts are the engine's own (None where it does not say).

    `reasoning_field` is the field in which a server sent the reasoning (`reasoning` or
    `reasoning_content`). `token_logprobs` are those of the generated tokens, where they were asked
    for and came.
    """

    content: str
    finish_reason: str | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    timing: Timing | None = None
    raw_usage: Mapping[str, Any] = field(default_factory=dict)
    reasoning_field: str | None = None
    token_logprobs: tuple[float, ...] | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class TextPiece:
    """One piece of a streamed reply as it arrives, and the field it belongs to."""

    field: Literal["content", "reasoning", "tool_call"]
    text: str


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities (natural log) of given tokens, each under the tokens before it.

    `token_logprobs` has one entry for each token; the first is None, as nothing comes before it.
    `bytes` is the number of UTF-8 bytes of the text that the scored tokens cover, None where it is
    not known.
    """

    token_logprobs: tuple[float | None, ...]
    token_count: int
    bytes: int | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def scored(self) -> tuple[float, ...]:
        """The log-probabilities without the first token's missing one."""
        return tuple(value for value in self.token_logprobs if value is not None)

    @property
    def nll(self) -> float:
        """Negative log-likelihood of all scored tokens, in nats."""
        return -sum(self.scored)

    @property
    def bits_per_byte(self) -> float | None:
        """NLL in bits divided by the bytes scored; None where the bytes are not known."""
        if not self.bytes:
            return None
        return self.nll / (self.bytes * math.log(2.0))


class Capability(StrEnum):
    """What an engine may be able to do."""

    GENERATE = "generate"
    """Write text by any route."""
    CHAT = "chat"
    """Apply its own chat template to messages."""
    COMPLETIONS = "completions"
    """Continue a raw prompt."""
    STREAM = "stream"
    """Send the reply piece by piece."""
    STREAM_USAGE = "stream_usage"
    """Count tokens at the end of a stream."""
    CONTINUOUS_USAGE = "continuous_usage"
    """Count tokens with every chunk of a stream."""
    LOGPROBS = "logprobs"
    """Log-probabilities of the tokens it generates."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """Log-probabilities of the tokens of a prompt, asked for directly."""
    ECHO = "echo"
    """Log-probabilities of the tokens of a prompt, by echoing it."""
    SCORE = "score"
    """Log-probabilities of given tokens by any route."""
    TOKENIZE = "tokenize"
    """Text to token ids."""
    TOKEN_IDS_PROMPT = "token_ids_prompt"
    """Take a prompt as token ids."""
    TOOLS = "tools"
    """Accept tools and answer with tool calls."""
    METRICS = "metrics"
    """Expose Prometheus metrics."""
    IGNORE_EOS = "ignore_eos"
    """Go on past the end-of-text token."""


class MissingCapability(AssayError):
    """The engine cannot do what a verb needs; `capability` says what."""

    def __init__(
        self, capability: Capability, reason: str, *, needed_for: str = "", where: str = ""
    ) -> None:
        subject = where or "this engine"
        purpose = f", needed for {needed_for}" if needed_for else ""
        super().__init__(
            f"{subject} has no {capability.value}{purpose}: {reason}",
            finding_id="server.missing_capability",
            remedy="use an engine that has it, or leave out what needs it",
            evidence={"capability": capability.value, "reason": reason},
        )
        self.capability = capability
        self.reason = reason


@dataclass(frozen=True)
class CapabilityReport:
    """What an engine can do, and for each thing it cannot, why not."""

    present: frozenset[Capability]
    absent: Mapping[Capability, str] = field(default_factory=dict)
    where: str = ""
    """Names the engine in a refusal, such as its URL."""
    unfinished: frozenset[Capability] = frozenset()
    """Those of the absent whose probe did not end (a time-out, a cut stream), so that nothing is
    known of them.
    """

    def __contains__(self, capability: object) -> bool:
        return capability in self.present

    def reason(self, capability: Capability) -> str | None:
        """Why the capability is absent; None where it is present."""
        if capability in self.present:
            return None
        return self.absent.get(capability, "not probed")

    def require(self, capability: Capability, needed_for: str = "") -> None:
        """Raise `MissingCapability` unless the engine can do it."""
        reason = self.reason(capability)
        if reason is not None:
            raise MissingCapability(capability, reason, needed_for=needed_for, where=self.where)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON types."""
        return {
            "present": sorted(c.value for c in self.present),
            "absent": {c.value: why for c, why in sorted(self.absent.items())},
        }


OnText = Callable[[TextPiece], None]
"""Called with each piece of a streamed reply, on the thread that streams."""


@runtime_checkable
class Engine(Protocol):
    """The verbs of an engine. All may be called from several threads at once."""

    @property
    def capabilities(self) -> CapabilityReport:
        """What this engine can do."""
        ...

    def describe(self) -> dict[str, Any]:
        """What answered: kind, version, model, settings that were sent; plain JSON types, no
        secret.
        """
        ...

    def generate(self, request: Request) -> Reply:
        """Answer in one piece, without timing."""
        ...

    def stream(self, request: Request, on_text: OnText | None = None) -> Reply:
        """Answer piece by piece; the reply carries its timing."""
        ...

    def score(self, source: str | tuple[int, ...]) -> TokenScores:
        """Log-probabilities of the tokens of a text, or of given token ids, in one pass."""
        ...

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without special tokens added."""
        ...

    def close(self) -> None:
        """Give back what the engine holds (connections, memory)."""
        ...


def score_all(engine: Engine, sources: Sequence[str | tuple[int, ...]]) -> list[TokenScores]:
    """Scores of several texts or rows of ids, together where the engine has `score_many`."""
    many = getattr(engine, "score_many", None)
    return list(many(sources)) if many else [engine.score(source) for source in sources]


# What of a model's configuration changes its numbers, as an engine has it after loading.
#
# Two engines that serve one checkpoint should agree on all of it; where they do not, they serve
# different models.

_PLAIN = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "hidden_act",
    "hidden_activation",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_bias",
    "partial_rotary_factor",
)


def setup_facts(config: Any) -> dict[str, Any]:
    """Plain JSON of a transformers configuration: RoPE, sliding window, soft caps, norms, sizes;
    absent ones left out.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {name: getattr(text, name, None) for name in _PLAIN}
    found["rope"] = _rope(text)
    if getattr(text, "use_sliding_window", True):
        found["sliding_window"] = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    # A list of layers that are all alike is what its absence says too.
    found["layer_types"] = list(kinds) if kinds and set(kinds) != {"full_attention"} else None
    return {name: _plain(value) for name, value in sorted(found.items()) if value is not None}


def setup_differences(
    reference: Mapping[str, Any], candidate: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """What both report and do not agree on."""
    return {
        name: (reference[name], candidate[name])
        for name in reference
        if name in candidate and reference[name] != candidate[name]
    }


def _rope(text: Any) -> dict[str, Any] | None:
    """One form of what releases of transformers keep as `rope_parameters`, or as `rope_theta` and
    `rope_scaling`.
    """
    given = getattr(text, "rope_parameters", None)
    rope = dict(given) if given else {**(getattr(text, "rope_scaling", None) or {})}
    if "rope_theta" not in rope and not any(isinstance(v, Mapping) for v in rope.values()):
        rope["rope_theta"] = getattr(text, "rope_theta", None)
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    if rope.get("rope_type", "default") == "default":
        rope.pop("rope_type", None)
    rope = {k: v for k, v in rope.items() if v is not None}
    return rope or None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    # 10000 and 10000.0 are one number.
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


# How an engine is written on the command line: `PREFIX:WHAT?option=value&…`.

Options = tuple[tuple[str, str], ...]
"""Names and values, in the order in which they were written."""


def full_spec(spec: str) -> str:
    """An engine as it is written in full: a folder or name alone is a model of transformers,
    `hf:MODEL`.
    """
    return spec if _KIND.match(spec) or not spec else f"hf:{spec}"


def with_options(spec: str, *, device: str, threads: int | str) -> str:
    """`spec` with `?device=` and `&threads=` where its kind of engine has them and it does not say;
    `auto` adds nothing.
    """
    head, _, given = spec.partition("?")
    known = {"hf": ("device", "threads"), "gguf": ("threads",)}.get(head.partition(":")[0], ())
    written = {option.partition("=")[0] for option in given.split("&")}
    added = [
        f"{name}={value}"
        for name, value in (("device", device), ("threads", threads))
        if name in known and name not in written and value != "auto"
    ]
    return f"{head}?{'&'.join(filter(None, [given, *added]))}" if added else spec


_KIND = re.compile(r"[A-Za-z][\w+.-]*:")


def require_local(spec: str, path: str, *, finding_id: str = "fidelity.engine_load") -> None:
    """AssayError where `path` is written as one on this machine and nothing is there."""
    if path.startswith((".", "/")) and not Path(path).exists():
        raise AssayError(
            f"{spec}: there is no {path}",
            finding_id=finding_id,
            remedy="check the path; a relative one starts from the folder you are in",
        )


def read_options(
    spec: str,
    prefix: str,
    known: Sequence[str],
    *,
    example: str,
    what: str = "model",
    shown: str = "",
) -> tuple[str, Options]:
    """What stands between `prefix` and the question mark, and the options after it.

    UsageError where nothing stands there, where a question mark ends the spec, and where an option
    is not `known`. `what` names the thing in the first of these, `example` is a spec to follow;
    `shown` stands for a spec that must not be printed as it is.
    """
    shown = shown or spec
    body, mark, query = spec.removeprefix(prefix).partition("?")
    pairs = tuple(parse_qsl(query, keep_blank_values=True))
    unknown = next((name for name, _ in pairs if name not in known), None)
    if not body:
        problem, remedy = f"names no {what}", f"write {example}"
    elif mark and not pairs:
        problem, remedy = "ends in a '?' without options", f"write {example}"
    elif unknown is not None:
        problem, remedy = f"has the unknown option {unknown!r}", f"options are {', '.join(known)}"
    else:
        # No shell expands a ~ that stands after a colon.
        return str(Path(body).expanduser()) if body.startswith("~") else body, pairs
    raise UsageError(f"{shown!r} {problem}", remedy=remedy, finding_id="fidelity.usage")


# Tool calls as models write them into their text: read where they are whole, recognised where they
# are not.
#
# A model writes a call as text, between marks of its family or as plain JSON; a server's parser
# turns that into `tool_calls`. `read_calls` does the same for an engine without such a parser.
# `call_remains` says whether a text that should have become a call still holds parts of one: marks
# of a family, a cut or mangled JSON object, a Python call.


# Marks between which a family writes the JSON of one call or of several: Hermes and Qwen, Mistral,
# Llama 3.
_BETWEEN = (
    re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL),
    re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL),
    re.compile(r"<\|python_tag\|>\s*(\{.*\})(?:<\|eom_id\|>)?", re.DOTALL),
)
_FENCED = re.compile(r"\A\s*```(?:json|tool_call|xml)?\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)

# Marks that no answer to a person holds: Hermes, Mistral, Llama 3, Kimi, DeepSeek, Harmony,
# Qwen3-Coder, MiniMax, GLM.
_MARKS = re.compile(
    r"</?tool_call>?|<tool_cal|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_calls?_(?:section_)?(?:begin|end)\|>"
    r"|<\|tool_call_argument_begin\|>|<｜tool[▁_]|<\|tool▁|to=functions\.\w|<\|constrain\|>|<\|call\|>"
    r"|</?function(?:_call|=\w+)>|<parameter=|<(?:minimax:)?invoke name=|<arg_key>|</?arg_value>"
)
# `"arguments": {…` is a part of a call wherever it stands, a schema that was offered and is echoed
# is none.
_ARGUMENTS = re.compile(
    r"[\"'](?:arguments|parameters)[\"']\s*:\s*[\"']?\s*\{(?!\s*[\"']type[\"'])"
)
_INLINE_CODE = re.compile(r"(?<!`)`[^`\n]+`(?!`)")
EXCERPT = 160
"""Characters of a text that show the parts of a call."""


@dataclass(frozen=True)
class CallText:
    """Whole calls that a text holds, the text around them, and whether marks of a family stood
    around them.
    """

    calls: tuple[ToolCall, ...]
    rest: str
    marked: bool


def read_calls(text: str, names: Collection[str], *, plain: bool = True) -> CallText:
    """The whole calls of the tools `names` that `text` holds.

    Between marks they may stand anywhere; as plain JSON (read unless `plain` is False) the text
    must be nothing else, but for a code fence around it.
    """
    for pattern in _BETWEEN:
        pieces = pattern.findall(text)
        calls = tuple(call for piece in pieces for call in _calls_of(piece, names))
        if calls and len(calls) >= len(pieces):
            return CallText(_numbered(calls), pattern.sub("", text).strip(), marked=True)
    if plain:
        fenced = _FENCED.match(text)
        calls = tuple(_calls_of(fenced.group(1) if fenced else text, names))
        if calls:
            return CallText(_numbered(calls), "", marked=False)
    return CallText((), text, marked=False)


def call_remains(text: str, names: Collection[str]) -> str:
    """The place in `text` where parts of a call of one of `names` stand; empty where there are
    none.

    Whole calls in plain JSON are no remains (`read_calls` reads them), nor is a name or a mark
    quoted as code.
    """
    if not text.strip() or (read_calls(text, names).calls and not _MARKS.search(text)):
        return ""
    prose = _INLINE_CODE.sub(lambda found: " " * len(found.group()), text)
    called = "|".join(re.escape(name) for name in names) or r"(?!)"
    patterns = (
        _MARKS,
        _ARGUMENTS,
        re.compile(rf"[\"']name[\"']\s*:\s*[\"'](?:{called})[\"'](?!\s*,\s*[\"']description[\"'])"),
        re.compile(rf"\A\s*\[?\s*(?:{called})\s*\((?:[^()\n]|\([^()\n]*\))*\)?\s*\]?\s*\Z"),
    )
    starts = [found.start() for pattern in patterns if (found := pattern.search(prose))]
    if not starts:
        return ""
    first = max(0, min(starts) - 20)
    return text[first : first + EXCERPT]


def _calls_of(piece: str, names: Collection[str]) -> Iterator[ToolCall]:
    """The calls in one piece of JSON: an object, a list of objects, or an object a line; none where
    one is not whole.
    """
    values: list[Any] = []
    piece, decoder, at = piece.strip(), json.JSONDecoder(), 0
    try:
        while at < len(piece):
            value, at = decoder.raw_decode(piece, at)
            values += value if isinstance(value, list) else [value]
            at += len(piece[at:]) - len(piece[at:].lstrip(" \t\r\n;,"))
    except (ValueError, RecursionError):
        return
    found = [_call_of(value, names) for value in values]
    if all(found):
        yield from (call for call in found if call is not None)


def _call_of(value: Any, names: Collection[str]) -> ToolCall | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, dict):
        return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
    return ToolCall(value["name"], arguments) if isinstance(arguments, str) else None


def _numbered(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call.name, call.arguments, f"call_{i}") for i, call in enumerate(calls))
