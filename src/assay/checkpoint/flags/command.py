"""A `vllm serve` command line as the engine's own parser reads it."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from assay.checkpoint.flags.engines import other_engine
from assay.checkpoint.flags.table import known_options
from assay.errors import UsageError

_ALIASES = {
    "-q": "--quantization",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-sc": "--speculative-config",
    "-ep": "--enable-expert-parallel",
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
    "-O": "--optimization-level",
}

_SERVER = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True)
class ServeArgs:
    """A parsed command line: values by canonical option (None for a switch), and unknown
    options.
    """

    options: dict[str, str | None] = field(default_factory=dict)
    unknown: dict[str, str | None] = field(default_factory=dict)
    """Unknown options with the closest known one, if any is close."""
    model: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Variables set in front of the command (`VLLM_X=1 vllm serve …`)."""
    engine: str | None = None
    """The engine whose command this is, if it is not vLLM's; nothing of it was read then."""

    def get(self, name: str) -> str | None:
        """The value of an option."""
        return self.options.get(name)

    def structure(self, name: str) -> dict[str, Any] | None:
        """A JSON value such as --speculative-config's, with dotted parts
        (`--speculative-config.method mtp`) merged.

        None if the option was not given. Raises UsageError if it is not a JSON object.
        """
        found: dict[str, Any] = {}
        given = False
        if (text := self.options.get(name)) is not None:
            given = True
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{name} is not JSON: {str(error)[:80]}") from error
            if not isinstance(value, dict):
                raise UsageError(f"{name} is not a JSON object")
            found.update(value)
        for option, text in self.options.items():
            if option.startswith(name + ".") and text is not None:
                given = True
                found[option.removeprefix(name + ".").replace("-", "_")] = _scalar(text)
        return found if given else None


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def parse(command: str) -> ServeArgs:
    """Read the text given to --serve-args, with or without `vllm serve MODEL` in front."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(
            f"cannot read --serve-args: {error}", remedy="balance its quotes"
        ) from error
    if engine := other_engine(command):
        return ServeArgs(engine=engine)
    environment: dict[str, str] = {}
    while words and (assigned := re.fullmatch(r"([A-Z_][A-Z0-9_]*)=(.*)", words[0])):
        environment[assigned[1]] = assigned[2]
        words = words[1:]
    for start in (["vllm", "serve"], ["python", "-m", _SERVER], ["python3", "-m", _SERVER]):
        if words[: len(start)] == start:
            words = words[len(start) :]
    options: dict[str, str | None] = {}
    unknown: dict[str, str | None] = {}
    model: str | None = None
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not re.match(r"-{1,2}[A-Za-z]", word):
            model = model or word
            continue
        flag, equals, value = word.partition("=")
        if level := re.fullmatch(r"-O=?(\d)", word):
            options["--optimization-level"] = level[1]
            continue
        name = _canonical(flag)
        if name is None:
            close = difflib.get_close_matches(
                flag.replace("_", "-"), known_options(), n=1, cutoff=0.75
            )
            unknown[flag] = close[0] if close else None
            if not equals and position < len(words) and not words[position].startswith("-"):
                position += 1
            continue
        kind = known_options().get(name.split(".")[0], "value")
        if equals:
            options[name] = value
        elif kind == "switch" and "." not in name:
            options[name] = None
        elif position < len(words) and not words[position].startswith("--"):
            options[name] = words[position]
            position += 1
            while kind == "many" and position < len(words) and not words[position].startswith("-"):
                position += 1
        else:
            options[name] = None
    return ServeArgs(options, unknown, model or options.get("--model"), environment)


def _canonical(flag: str) -> str | None:
    """The option that the engine takes `flag` for: aliases, underscores, unambiguous abbreviations,
    dotted parts.
    """
    known = known_options()
    if flag in _ALIASES:
        return _ALIASES[flag]
    base, dot, rest = flag.partition(".")
    base = "--" + base[2:].replace("_", "-") if base.startswith("--") else _ALIASES.get(base, base)
    if base in known:
        return f"{base}.{rest}" if dot else base
    if base.startswith("--"):
        longer = [option for option in known if option.startswith(base)]
        if len(longer) == 1:
            return f"{longer[0]}.{rest}" if dot else longer[0]
    return None
