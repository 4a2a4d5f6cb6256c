"""From one engine to another by steps of one change each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlencode

from assay.errors import UsageError

KINDS = ("hf", "vllm")
"""Engines that take codecs."""

# Options that are switched alone, in this order, and the part of the bucket `engine` that each becomes.
_SWITCHES: Mapping[str, str] = {
    "dtype": "rounding",
    "attention": "attention",
    "attention_backend": "attention",
    "weights": "weights",
    "quantization": "weights",
    "kv_cache_dtype": "cache",
    "enforce_eager": "compilation",
    "device": "device",
}


@dataclass(frozen=True)
class EngineName:
    """An engine as it is written, taken apart: `kind:model?options`."""

    kind: str
    model: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        query = urlencode(self.options, safe='(),=:{}"[]/')
        return f"{self.kind}:{self.model}" + (f"?{query}" if query else "")

    def get(self, option: str) -> str | None:
        """The value of an option, None where it is not given."""
        return dict(self.options).get(option)

    def with_option(self, option: str, value: str | None) -> EngineName:
        """The same with one option changed, or left out."""
        kept = [(k, v) for k, v in self.options if k != option]
        return replace(self, options=tuple(kept if value is None else [*kept, (option, value)]))


def engine_name(spec: str) -> EngineName:
    """Take a spec apart; UsageError where it is no engine that takes codecs. A folder is one of transformers."""
    kind, colon, rest = spec.partition(":")
    if not colon or (kind not in (*KINDS, "gguf", "run", "http", "https") and "/" in kind):
        kind, rest = "hf", spec
    if kind not in KINDS:
        raise UsageError(
            f"{spec!r} takes no codec in its KV cache: a gap needs an engine that does, on both sides",
            remedy="write hf:MODEL or vllm:MODEL",
            finding_id="gap.usage",
        )
    model, _, query = rest.partition("?")
    if not model:
        raise UsageError(f"{spec!r} names no model", remedy=f"write {kind}:PATH", finding_id="gap.usage")
    return EngineName(kind, model, tuple(parse_qsl(query, keep_blank_values=True)))


def full_spec(spec: str) -> str:
    """The spec with its kind in front: a folder alone is a model of transformers."""
    kind = engine_name(spec).kind
    return spec if spec.startswith(f"{kind}:") else f"{kind}:{spec}"


@dataclass(frozen=True)
class Step:
    """One change, and the engine it leads to. `name` is a part of the bucket `engine`."""

    name: str
    engine: str


def engine_steps(
    reference: str, candidate: str, dtypes: tuple[str | None, str | None] = (None, None)
) -> list[Step]:
    """Steps from the reference to the candidate; the last leads to the candidate as it was written.

    Within one kind of engine every option that differs is a step of its own. Between kinds the number format is
    changed first, in the reference's engine, where `dtypes` (those that both report) differ; what is left is
    `engine.kernels`.
    """
    here, there = engine_name(reference), engine_name(candidate)
    steps: list[Step] = []
    if here.kind != there.kind:
        if dtypes[1] and dtypes[0] != dtypes[1]:
            steps.append(Step("engine.rounding", str(here.with_option("dtype", dtypes[1]))))
        return [*steps, Step("engine.kernels", candidate)]
    for option, part in _SWITCHES.items():
        if here.get(option) != there.get(option):
            here = here.with_option(option, there.get(option))
            steps.append(Step(f"engine.{part}", str(here)))
    rest = replace(here, model=there.model)
    if rest != here:
        steps.append(Step("engine.model", str(rest)))
    if sorted(rest.options) != sorted(there.options):
        steps.append(Step("engine.settings", candidate))
    if not steps:
        return [Step("engine.none", candidate)]
    return [*steps[:-1], replace(steps[-1], engine=candidate)]
