"""A serve command as settings that can be put back to safe values, one by one, and made a command
again.

The tables say for each engine what the known-coherent baseline sets instead of an option, and why.
What is in no table stays as it is where it names the model, the server or its log; every other
option is left out of the baseline.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from assay.checkpoint.flags.table import known_options
from assay.checkpoint.flags.versions import TABLED
from assay.errors import UsageError

CONTEXT = 8000
"""Tokens of context in the baseline, as in the rollback that `assay check` prints."""
ENGINES = ("vllm", "llama.cpp", "template")
_OWN_PORT = ("--host", "127.0.0.1", "--port", "{port}")
_LLAMA_OWN = ("--metrics", "--verbosity", "4", *_OWN_PORT)
"""The doctor needs llama.cpp's counters, and the log in which it names its settings."""
_VLLM_MODULE = "vllm.entrypoints.openai.api_server"

Kind = Literal["text", "speed", "draft", "parallel", "adapter", "prefix"]


@dataclass(frozen=True)
class Safe:
    """What the baseline does with an option: `words` in its place (none: leave it out), and why.

    `suspicion` weighs how often it is the culprit: search begins with the heaviest. `needed`: a
    model may not load without it, so it is kept where the baseline cannot start.
    """

    reason: str
    words: tuple[str, ...] = ()
    suspicion: float = 1.0
    needed: bool = False
    kind: Kind = "text"


@dataclass(frozen=True)
class Setting:
    """One option, or variable of the environment, that differs from the baseline."""

    name: str
    value: str | None
    words: tuple[str, ...]
    safe: Safe
    implicit: bool = False
    """The engine's own default, which the command does not spell out."""

    @property
    def safe_value(self) -> str:
        """What the baseline has instead, in words."""
        return " ".join(self.safe.words) or "left out"


UNKNOWN = Safe("no table knows it: the baseline leaves it out")
_VLLM: Mapping[str, Safe] = {
    "--kv-cache-dtype": Safe(
        "a KV cache with fewer bits loses what some models need", suspicion=6, needed=True
    ),
    "--calculate-kv-scales": Safe(
        "scales taken from one short text may not fit another", suspicion=3
    ),
    "--quantization": Safe(
        "the engine reads the method from the checkpoint", suspicion=4, needed=True
    ),
    "--speculative-config": Safe(
        "a draft can be dead, or change the text by a faulty verification",
        suspicion=4,
        kind="draft",
    ),
    "--enable-prefix-caching": Safe(
        "a cached prefix can be read back wrong", ("--no-enable-prefix-caching",), 2, kind="prefix"
    ),
    "--no-enforce-eager": Safe(
        "compiled kernels and CUDA graphs can be wrong where eager is right",
        ("--enforce-eager",),
        1.5,
    ),
    "--compilation-config": Safe("compiled kernels can be wrong where eager is right", suspicion=2),
    "--optimization-level": Safe("compiled kernels can be wrong where eager is right", suspicion=2),
    # vLLM does not support to turn it off where it is the default: it may crash, or write wrong
    # text.
    "--enable-chunked-prefill": Safe("the engine's own choice", suspicion=0.2),
    "--no-enable-chunked-prefill": Safe(
        "vLLM warns that it may write wrong text without it", suspicion=2
    ),
    "--async-scheduling": Safe(
        "steps that overlap can read what is not written yet", ("--no-async-scheduling",), 1
    ),
    "--tensor-parallel-size": Safe(
        "parts of the weights can be put together wrongly", needed=True, kind="parallel"
    ),
    "--pipeline-parallel-size": Safe(
        "parts of the model can be put together wrongly", needed=True, kind="parallel"
    ),
    "--data-parallel-size": Safe("replicas can differ", kind="parallel"),
    "--enable-expert-parallel": Safe("experts can be routed wrongly", needed=True, kind="parallel"),
    "--max-model-len": Safe(
        "a long context costs memory and may leave the model's window",
        ("--max-model-len", str(CONTEXT)),
        0.5,
    ),
    "--rope-scaling": Safe("positions that are scaled wrongly", suspicion=4),
    "--rope-theta": Safe(
        "another base of the positions than the model was trained with", suspicion=5
    ),
    "--hf-overrides": Safe("it changes what the checkpoint says of itself", suspicion=4),
    "--tokenizer": Safe("a tokenizer that does not belong to the checkpoint", suspicion=6),
    "--tokenizer-mode": Safe("another tokenizer than the checkpoint's", suspicion=2),
    "--chat-template": Safe("a template that does not belong to the checkpoint", suspicion=5),
    "--generation-config": Safe("stop tokens come from the checkpoint's own", suspicion=1),
    "--override-generation-config": Safe(
        "sampling or stop tokens other than the checkpoint's", suspicion=3
    ),
    "--dtype": Safe(
        "the checkpoint's own type: float16 overflows where bfloat16 does not",
        suspicion=3,
        needed=True,
    ),
    "--enable-lora": Safe("the base model alone", kind="adapter"),
    "--lora-modules": Safe("the base model alone", suspicion=2, kind="adapter"),
    "--max-loras": Safe("the base model alone", suspicion=0.2, kind="adapter"),
    "--max-lora-rank": Safe("the base model alone", suspicion=0.2, kind="adapter"),
    "--reasoning-parser": Safe("a parser can take the text away", suspicion=2),
    "--tool-call-parser": Safe("a parser can take the text away", suspicion=1.5),
    "--enable-auto-tool-choice": Safe("it needs the parser of the tool calls", suspicion=0.5),
    "--attention-backend": Safe("the engine's own choice for this machine", suspicion=2),
    "--max-num-seqs": Safe(
        "few requests at once leave batching little to mix up", ("--max-num-seqs", "2"), 1
    ),
    "--max-num-batched-tokens": Safe("the engine's own size of a step", suspicion=1),
    "--block-size": Safe("the engine's own size of a block", suspicion=1),
    "--cpu-offload-gb": Safe("everything stays on the device", suspicion=1, needed=True),
    "--kv-transfer-config": Safe("a cache that comes from elsewhere", suspicion=3),
}
_LLAMA: Mapping[str, Safe] = {
    "--cache-type-k": Safe("a KV cache with fewer bits loses what some models need", suspicion=6),
    "--cache-type-v": Safe("a KV cache with fewer bits loses what some models need", suspicion=5),
    "--flash-attn": Safe(
        "attention in its plain form; a quantised V cache needs it",
        ("--flash-attn", "auto"),
        1,
        needed=True,
    ),
    "--model-draft": Safe(
        "a draft can be dead, or cost more than it saves", suspicion=4, kind="draft"
    ),
    "--spec-type": Safe(
        "a draft can be dead, or cost more than it saves", suspicion=3, kind="draft"
    ),
    "--spec-default": Safe(
        "a draft can be dead, or cost more than it saves", suspicion=3, kind="draft"
    ),
    "--cpu-mask": Safe("every core of the machine", suspicion=2),
    "--rope-freq-base": Safe(
        "another base of the positions than the model was trained with", suspicion=6
    ),
    "--rope-freq-scale": Safe("positions that are scaled wrongly", suspicion=5),
    "--rope-scale": Safe("positions that are scaled wrongly", suspicion=5),
    "--rope-scaling": Safe("positions that are scaled wrongly", suspicion=4),
    "--yarn-orig-ctx": Safe("positions that are scaled wrongly", suspicion=2),
    "--override-kv": Safe("it changes what the file says of itself", suspicion=5),
    "--chat-template": Safe("a template that does not belong to the model", suspicion=5),
    "--chat-template-file": Safe("a template that does not belong to the model", suspicion=5),
    "--lora": Safe("the base model alone", suspicion=2, kind="adapter"),
    "--lora-scaled": Safe("the base model alone", suspicion=2, kind="adapter"),
    "--lora-init-without-apply": Safe("the base model alone", suspicion=1, kind="adapter"),
    "--n-gpu-layers": Safe("the CPU's kernels are the plain ones", ("--n-gpu-layers", "0"), 1),
    "--parallel": Safe(
        "one request at a time leaves batching nothing to mix up", ("--parallel", "1"), 1
    ),
    "--ctx-size": Safe(
        "a long context costs memory and may leave the model's window",
        ("--ctx-size", str(CONTEXT)),
        0.5,
    ),
    "--cache-reuse": Safe("cached chunks can be read back wrong", suspicion=2),
    "--context-shift": Safe("a window that moves forgets and renumbers", suspicion=2),
    "--reasoning-format": Safe("a parser can take the text away", suspicion=2),
}
_SHORT: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "-q": "--quantization",
        "-tp": "--tensor-parallel-size",
        "-pp": "--pipeline-parallel-size",
        "-O": "--optimization-level",
        "-dp": "--data-parallel-size",
        "-sc": "--speculative-config",
        "-ep": "--enable-expert-parallel",
        "-cc": "--compilation-config",
    },
    "llama.cpp": {
        "-ctk": "--cache-type-k",
        "-ctv": "--cache-type-v",
        "-fa": "--flash-attn",
        "-md": "--model-draft",
        "-ngl": "--n-gpu-layers",
        "--gpu-layers": "--n-gpu-layers",
        "-np": "--parallel",
        "-c": "--ctx-size",
        "-m": "--model",
        "--spec-draft-model": "--model-draft",
        "-hfd": "--model-draft",
        "--hf-repo-draft": "--model-draft",
        "-t": "--threads",
        "--spec-draft-hf": "--model-draft",
        "-tb": "--threads-batch",
        "-a": "--alias",
        "-b": "--batch-size",
        "-ub": "--ubatch-size",
        "-hf": "--hf-repo",
        "-mu": "--model-url",
        "-hff": "--hf-file",
        "-lv": "--verbosity",
        "--log-verbosity": "--verbosity",
        "-v": "--verbose",
        "-s": "--seed",
        "-C": "--cpu-mask",
        "-lm": "--load-mode",
        "-nkvo": "--no-kv-offload",
        "-kvu": "--kv-unified",
        "-no-kvu": "--no-kv-unified",
        "-cb": "--cont-batching",
        "-nocb": "--no-cont-batching",
        "-nr": "--no-repack",
        "-ot": "--override-tensor",
        "-ngld": "--n-gpu-layers-draft",
        "-ctkd": "--cache-type-k-draft",
        "-ctvd": "--cache-type-v-draft",
        "-td": "--threads-draft",
        "-cram": "--cache-ram",
    },
}
_TOGETHER: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "--lora-modules": r"--enable-lora|--max-loras|--max-lora-rank|--max-cpu-loras|--lora-dtype",
        "--tool-call-parser": r"--enable-auto-tool-choice",
    },
    "llama.cpp": {
        "--model-draft": r"--spec-.+|--draft-.+|--.+-draft",
        "--spec-type": r"--spec-.+",
        "--cpu-mask": r"--cpu-strict",
        "--lora": r"--lora-init-without-apply",
    },
}
"""Options that mean nothing without another one, which they are joined to: one setting."""
# What names the model or the server and does not change the text; `--port` and `--host` are the
# doctor's own.
_FIXED: Mapping[str, frozenset[str]] = {
    "vllm": frozenset(
        {
            "--model",
            "--served-model-name",
            "--api-key",
            "--trust-remote-code",
            "--download-dir",
            "--revision",
            "--seed",
            "--gpu-memory-utilization",
            "--kv-cache-memory-bytes",
            "--uvicorn-log-level",
            "--disable-log-requests",
            "--device",
            "--disable-log-stats",
            "--enable-log-requests",
            "--no-enable-log-requests",
            "--root-path",
            "--swap-space",
            "--load-format",
            "--distributed-executor-backend",
            "--max-logprobs",
            "--response-role",
            "--ssl-keyfile",
            "--ssl-certfile",
            "--task",
            "--runner",
        }
    ),
    "llama.cpp": frozenset(
        {
            "--model",
            "--hf-repo",
            "--hf-file",
            "--alias",
            "--api-key",
            "--threads",
            "--threads-batch",
            "--jinja",
            "--metrics",
            "--no-warmup",
            "--log-file",
            "--verbose",
            "--verbosity",
            "--seed",
            "--props",
            "--slots",
            "--no-webui",
            "--no-ui",
            "--model-url",
            "--offline",
            "--log-colors",
            "--threads-http",
        }
    ),
    "template": frozenset(
        {
            "--model",
            "-m",
            "--api-key",
            "--model-path",
            "--model-id",
            "--checkpoint",
            "--served-model-name",
        }
    ),
}
_SWITCHES_LLAMA = frozenset(
    {
        "--jinja",
        "--metrics",
        "--no-warmup",
        "--verbose",
        "--props",
        "--slots",
        "--no-webui",
        "--context-shift",
        "--no-context-shift",
        "--lora-init-without-apply",
        "--mlock",
        "--no-mmap",
        "--cont-batching",
        "--no-cont-batching",
        "--swa-full",
        "--no-jinja",
        "--kv-unified",
        "--no-kv-offload",
        "--embedding",
        "--reranking",
        "--check-tensors",
        "--special",
    }
)
_SAFE_VALUES = {
    "--kv-cache-dtype": {"auto"},
    "--tensor-parallel-size": {"1"},
    "--pipeline-parallel-size": {"1"},
    "--dtype": {"auto"},
    "--data-parallel-size": {"1"},
    "--cache-type-k": {"f16"},
    "--cache-type-v": {"f16"},
    "--parallel": {"1"},
    "--flash-attn": {"auto"},
    "--n-gpu-layers": {"0"},
    "--max-num-seqs": {"1", "2"},
}
_SAFE_SWITCHES = frozenset(
    {"--enforce-eager", "--no-enable-prefix-caching", "--no-async-scheduling", "--no-context-shift"}
)
_VARIABLES_KEPT = re.compile(
    r"CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES|PATH|LD_LIBRARY_PATH|PYTHON\w*|HF_\w+|HOME|VLLM_LOGGING\w*|"
    r"VLLM_CPU_KVCACHE_SPACE|VLLM_NO_USAGE_STATS|DO_NOT_TRACK|OMP_WAIT_POLICY|VLLM_CACHE_ROOT|XDG_\w+|\w*(?:KEY|TOKEN)"
)

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.IGNORECASE)


@dataclass(frozen=True)
class ServeCommand:
    """A command, read: what is always there, and what differs from the baseline."""

    engine: str
    start: tuple[str, ...]
    environment: Mapping[str, str]
    fixed: tuple[str, ...]
    settings: tuple[Setting, ...]
    model: str | None = None
    port_words: tuple[str, ...] = ("--port", "{port}")
    always: tuple[str, ...] = ()
    """What the baseline adds to every configuration."""

    def words(self, active: Collection[str], port: int | str) -> list[str]:
        """The command with the settings named `active` as given and the others at their safe
        values.
        """
        found = [*self.start, *self.fixed, *self.always]
        for setting in self.settings:
            if not _is_variable(setting):
                found += setting.words if setting.name in active else setting.safe.words
        return [word.replace("{port}", str(port)) for word in (*found, *self.port_words)]

    def variables(self, active: Collection[str]) -> dict[str, str]:
        """The environment in front of the command."""
        extra = {
            s.name: s.value or "" for s in self.settings if _is_variable(s) and s.name in active
        }
        return {**self.environment, **extra}

    def text(self, active: Collection[str]) -> str:
        """The command as a person types it, with the port left out."""
        words = [w for w in self.words(active, "PORT") if w]
        tail = [w.replace("{port}", "PORT") for w in self.port_words]
        if tail and words[-len(tail) :] == tail:
            words = words[: -len(tail)]
        for at, word in enumerate(words[:-1]):  # a report is passed on
            if word == "--api-key":
                words[at + 1] = "API_KEY"
        variables = [
            f"{name}={'SECRET' if _SECRET.search(name) else shlex.quote(value)}"
            for name, value in self.variables(active).items()
        ]
        return " ".join([*variables, shlex.join(words)])

    def asked(self, active: Collection[str]) -> str | None:
        """The name to ask for: that of the first adapter where one is loaded, else what the server
        lists first.
        """
        lora = next(
            (s for s in self.settings if s.name == "--lora-modules" and s.name in active), None
        )
        if lora is None or len(lora.words) < 2:
            return None
        first = lora.words[1]
        if first.startswith("{"):
            with suppress(ValueError):
                return str(json.loads(first).get("name"))
        return first.partition("=")[0]


def _is_variable(setting: Setting) -> bool:
    return not setting.name.startswith("-")


def read_command(words: Sequence[str], template: str | None = None) -> ServeCommand:
    """Read a command line; UsageError where there is none. `template` is one of any other engine's,
    with {port} in it.
    """
    words = list(words)
    if template is not None:
        return _read_template(template, words)
    if len(words) == 1 and " " in words[0]:
        words = shlex.split(words[0])
    environment, words = _variables(words)
    if not words:
        raise UsageError(
            "no command was given", remedy="assay doctor -- vllm serve ./model --kv-cache-dtype fp8"
        )
    if words[0].rpartition("/")[2] in ("bash", "sh", "zsh") and "-c" in words[1:2]:
        raise UsageError(
            f"the settings are hidden in a text for {words[0]}",
            remedy="give the serve command itself, word by word",
        )
    if syntax := next(
        (w for w in words if w in ("&", "&&", "||", "|", ";", ">", "<", "2>&1")), None
    ):
        raise UsageError(
            f"the command has {syntax!r} in it, which only a shell understands",
            remedy="give the serve command alone",
        )
    engine, start, rest = _engine_of(words)
    if engine == "vllm" and any(word.partition("=")[0] == "--config" for word in rest):
        raise UsageError(
            "the settings in a file of --config cannot be left out one by one",
            remedy="write them as options of the command",
        )
    placed = any("{port}" in word for word in rest)
    if not placed:
        rest = _without(rest, {"--port", "--host"})
    port: tuple[str, ...] = (
        () if placed else ("--port", "{port}") if engine == "template" else _OWN_PORT
    )
    if engine == "llama.cpp" and not placed:
        port = _LLAMA_OWN
        rest = _without(rest, {"--metrics"})
        if {"-v", "--verbose", "-lv", "--verbosity", "--log-verbosity"} & set(rest):
            port = ("--metrics", *_OWN_PORT)
    return _divide(engine, start, rest, environment, port)


def _variables(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    words, found = (
        [w for n, w in enumerate(words) if w != "env" or any("=" not in v for v in words[:n])],
        {},
    )
    while words and (assigned := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
        found[assigned[1]], words = assigned[2], words[1:]
    return found, words


def _engine_of(words: list[str]) -> tuple[str, tuple[str, ...], list[str]]:
    """The engine, the words that start it with its model, and the rest."""
    for at, word in enumerate(words[:12], 1):  # taskset, numactl and others may stand in front
        name = word.rpartition("/")[2]
        if name == "vllm" and words[at : at + 1] == ["serve"]:
            model = [w for w in words[at + 1 : at + 2] if not w.startswith("-")]
            end = at + 1 + len(model)
            return "vllm", tuple(words[:end]), words[end:]
        if word == _VLLM_MODULE:
            return "vllm", tuple(words[:at]), words[at:]
        if name.startswith("llama-server"):
            return "llama.cpp", tuple(words[:at]), words[at:]
    at = 1
    while at < len(words) and not words[at].startswith("-"):  # a script and its arguments
        at += 1
    return "template", tuple(words[:at]), words[at:]


def _without(words: Sequence[str], names: Collection[str]) -> list[str]:
    found, skip = [], False
    for word in words:
        if skip and not word.startswith("-"):
            skip = False
            continue
        skip = word in names
        if not skip and word.partition("=")[0] not in names:
            found.append(word)
    return found


def _read_template(template: str, words: Sequence[str]) -> ServeCommand:
    """`--command-template 'server --port {port} {settings}'`: the words after `--` are the
    settings.
    """
    parts = shlex.split(template)
    environment, parts = _variables(parts)
    if not parts or not any("{port}" in part for part in parts):
        raise UsageError(
            "--command-template names no {port}: the doctor chooses a free one",
            remedy="--command-template 'my-server --listen 127.0.0.1:{port} {settings}'",
        )
    at = parts.index("{settings}") if "{settings}" in parts else len(parts)
    before, after = tuple(parts[:at]), tuple(parts[at + 1 :])
    extra, words = _variables(words)
    return _divide("template", before, list(words), environment | extra, after)


def _groups(engine: str, rest: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """(canonical option, its words) in the order written; the last of several of one name counts,
    as engines do.
    """
    short, known = _SHORT.get(engine, {}), known_options() if engine == "vllm" else {}
    groups: dict[str, tuple[str, ...]] = {}
    at = 0
    while at < len(rest):
        word = rest[at]
        at += 1
        flag, equals, _ = word.partition("=")
        if not word.startswith("-"):
            groups[word] = (word,)
            continue
        name = short.get(flag, flag)
        base, dot, part = name.partition(".")
        if engine == "vllm" and base.startswith("--"):
            base = base.replace("_", "-")
            name = base + dot + part
        words = [word]
        switch = known.get(base) == "switch" or (engine == "llama.cpp" and name in _SWITCHES_LLAMA)
        if not equals and not (switch and not dot):
            while at < len(rest) and not re.match(r"-{1,2}[A-Za-z]", rest[at]):
                words.append(rest[at])
                at += 1
                if known.get(base) != "many" and engine == "vllm":
                    break
        if dot:  # dotted parts of one JSON value belong together
            groups[base] = (*groups.get(base, ()), *words)
        elif name == "--lora-modules" or (
            engine == "llama.cpp" and name in ("--override-kv", "--lora")
        ):
            groups[name] = (*groups.get(name, ()), *words)
        else:
            groups[name] = tuple(words)
    for leader, followers in _TOGETHER.get(engine, {}).items():
        if leader in groups:
            for name in [n for n in groups if n != leader and re.fullmatch(followers, n)]:
                groups[leader] = (*groups[leader], *groups.pop(name))
    return list(groups.items())


def _divide(
    engine: str,
    start: tuple[str, ...],
    rest: Sequence[str],
    environment: Mapping[str, str],
    port: tuple[str, ...],
) -> ServeCommand:
    table = {"vllm": _VLLM, "llama.cpp": _LLAMA}.get(engine, {})
    fixed: list[str] = []
    settings: list[Setting] = []
    groups = _groups(engine, rest)
    given = {name for name, _ in groups}
    model = start[-1] if engine == "vllm" and start[-2:-1] == ("serve",) else None
    for name, words in groups:
        value = " ".join(words[1:]) or (words[0].partition("=")[2] or None)
        if name in ("--model", "-m"):
            model = value
        keep = (
            name in _FIXED[engine]
            or name in _SAFE_SWITCHES
            or (value or "") in _SAFE_VALUES.get(name, ())
        )
        short_context = (
            name in ("--max-model-len", "--ctx-size")
            and (value or "").isdigit()
            and int(value or 0) <= CONTEXT
        )
        if keep or short_context or not name.startswith("-"):
            fixed += words
        else:
            settings.append(Setting(name, value, words, table.get(name, UNKNOWN)))
    for name, value in environment.items():
        if not _VARIABLES_KEPT.fullmatch(name):
            settings.append(Setting(name, value, (), Safe("the engine's own default", suspicion=2)))
    kept = {name: value for name, value in environment.items() if _VARIABLES_KEPT.fullmatch(name)}
    if engine == "vllm":
        settings += _defaults(given)
    return ServeCommand(engine, start, kept, tuple(fixed), tuple(settings), model, port)


def _defaults(given: Collection[str]) -> list[Setting]:
    """What vLLM does unasked and the baseline does not: CUDA graphs and the prefix cache."""
    found = []
    for name, opposite in (
        ("--no-enforce-eager", "--enforce-eager"),
        ("--enable-prefix-caching", "--no-enable-prefix-caching"),
    ):
        if name not in given and opposite not in given:
            found.append(Setting(name, "on by default", (), _VLLM[name], implicit=True))
    return found


def table_notice(command: ServeCommand, version: str | None) -> str:
    """What the tables do not cover, in one sentence; empty where they cover the engine."""
    if command.engine == "template":
        return (
            "no table for this engine: every option that does not name the model is left out of the"
            " baseline"
        )
    if (
        command.engine == "vllm"
        and version
        and not version.startswith(".".join(map(str, TABLED.parts[:2])))
    ):
        return f"no table for vLLM {version}: the one of {TABLED} is used"
    return ""
