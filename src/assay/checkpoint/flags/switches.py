"""Options that need one another, or that exclude one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from assay.checkpoint.findings import found, warned
from assay.checkpoint.flags.command import ServeArgs
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding

_NEEDS = (
    ("--enable-auto-tool-choice", "--tool-call-parser"),
    ("--enable-log-outputs", "--enable-log-requests"),
)
"""Each first option needs the second; the engine stops without it."""
_SILENT = (
    ("--tool-call-parser", "--enable-auto-tool-choice", "tool calls stay text in the answers"),
    ("--lora-modules", "--enable-lora", "the engine loads no adapter"),
    ("--max-lora-rank", "--enable-lora", "the engine loads no adapter"),
)
"""Each first option does nothing without the second."""
_EXCLUDES = (("--enable-per-request-metrics", "--disable-log-stats"),)

_FAMILIES: dict[str, tuple[str, ...]] = {
    "llama3_json": ("llama",),
    "llama4_json": ("llama",),
    "llama4_pythonic": ("llama",),
    "mistral": ("mistral", "mixtral", "pixtral", "ministral", "voxtral"),
    "qwen3_coder": ("qwen",),
    "qwen3_xml": ("qwen",),
    "qwen3_json": ("qwen",),
    "granite": ("granite",),
    "granite4": ("granite",),
    "granite-20b-fc": ("granite", "gpt_bigcode"),
    "internlm": ("internlm",),
    "jamba": ("jamba",),
    "phi4_mini_json": ("phi",),
    "glm45": ("glm",),
    "glm47": ("glm",),
    "minimax_m2": ("minimax",),
    "minimax_m3": ("minimax",),
    "gemma4": ("gemma",),
    "functiongemma": ("gemma",),
    "openai": ("gpt_oss",),
    "seed_oss": ("seed_oss",),
    "apertus": ("apertus",),
    "olmo3": ("olmo",),
    "lfm2": ("lfm",),
    "mimo": ("mimo", "qwen"),
    "kimi_k2": ("kimi", "deepseek"),
    "kimi_k3": ("kimi",),
}
"""Beginnings of the model types whose tool calls a parser reads. Parsers of formats that many
families share (`hermes`, `pythonic`, `xlam`) are not here.
"""


def lint_switches(checkpoint: Checkpoint, args: ServeArgs) -> Iterator[Finding]:
    """Findings on options that are given without what they need."""
    given = args.options
    for option, needed in _NEEDS:
        if option in given and needed not in given:
            title = f"{option} needs {needed}, and the engine stops without it"
            yield found("flag_rejected", title, flag=option, needs=needed)
    for option, needed, effect in _SILENT:
        if option in given and needed not in given:
            title = f"{option} does nothing without {needed}: {effect}"
            yield warned("flag_ignored", title, remedies=[f"add {needed}"], flag=option)
    for option, other in _EXCLUDES:
        if option in given and other in given:
            title = f"{option} and {other} exclude one another"
            yield found("flag_rejected", title, flag=option, other=other)
    yield from _parser(checkpoint, given.get("--tool-call-parser"))
    yield from _speculative(args.structure("--speculative-config"))


def _parser(checkpoint: Checkpoint, parser: str | None) -> Iterator[Finding]:
    families, kind = _FAMILIES.get(parser or ""), checkpoint.config.get("model_type") or ""
    types = {kind, checkpoint.model_type} - {""}
    if families and types and not any(t.startswith(families) for t in types):
        title = f"--tool-call-parser {parser} reads the tool calls of {families[0]} models"
        title += f", this model is {kind}"
        remedies = ["choose the parser that the model card names"]
        yield warned("config_conflict", title, remedies=remedies, flag="--tool-call-parser")


def _speculative(settings: dict[str, Any] | None) -> Iterator[Finding]:
    if settings is None:
        return
    count = settings.get("num_speculative_tokens")
    if count is not None and (type(count) is not int or count < 1):
        title = f"num_speculative_tokens {count} is not a whole number above 0"
        yield found("flag_rejected", title, flag="--speculative-config", value=count)
