"""From one engine to another by steps of one change each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlencode

from assay.engines import full_spec
from assay.errors import UsageError

# Options that are switched alone, in this order, and the part of the bucket `engine` that each
# becomes.
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


def engine_name(spec: str, *, codec: bool = True, reference: bool = False) -> EngineName:
    """Take a spec apart; UsageError where it is no engine that a gap can have on this side."""
    kind, _, rest = full_spec(spec).partition(":")
    model, _, query = rest.partition("?")
    # llama.cpp gives logits and no states: others can be compared with a kept reference, it cannot
    # be one.
    known = ("hf", "vllm") if codec or reference else ("hf", "vllm", "gguf")
    if kind not in known:
        if codec:
            why, remedy = (
                "takes no codec in its KV cache",
                "write hf:MODEL or vllm:MODEL, or leave --codec out",
            )
        elif kind == "gguf":
            why, remedy = "gives no states that could be kept as a reference", "name it second"
        else:
            why, remedy = (
                "does not run in process",
                "write hf:MODEL, vllm:MODEL or gguf:FILE, or use assay compare",
            )
        raise UsageError(f"{spec!r} {why}", remedy=remedy, finding_id="gap.usage")
    if not model:
        raise UsageError(
            f"{spec!r} names no model", remedy=f"write {kind}:PATH", finding_id="gap.usage"
        )
    return EngineName(kind, model, tuple(parse_qsl(query, keep_blank_values=True)))


@dataclass(frozen=True)
class Step:
    """One change, and the engine it leads to. `name` is a part of the bucket `engine`."""

    name: str
    engine: str


def engine_steps(
    reference: str, candidate: str, dtypes: tuple[str | None, str | None] = (None, None)
) -> list[Step]:
    """Steps from the reference to the candidate; the last leads to the candidate as it was written.

    Within one kind of engine every option that differs is a step of its own. Between kinds the
    number format is changed first, in the reference's engine, where `dtypes` (those that both
    report) differ; then options that only the reference has are left out one by one; then the
    engine changes (`engine.kernels`); then, in the candidate's engine, the checkpoint where it is
    another, and the candidate's own options one by one.
    """
    here, there = (engine_name(spec, codec=False) for spec in (reference, candidate))
    found: list[Step] = []

    def go(option: str, value: str | None) -> None:
        nonlocal here
        if here.get(option) != value:
            here = here.with_option(option, value)
            taken = [step.name for step in found]
            name = f"engine.{_SWITCHES[option]}"
            found.append(Step(name if name not in taken else f"{name}.{here.kind}", str(here)))

    if here.kind == there.kind:
        for option in _SWITCHES:
            go(option, there.get(option))
        rest = replace(here, model=there.model)
        if rest != here:
            found.append(Step("engine.model", str(rest)))
        if sorted(rest.options) != sorted(there.options):
            found.append(Step("engine.settings", candidate))
        if not found:
            return [Step("engine.none", candidate)]
    else:
        if dtypes[1] and dtypes[0] != dtypes[1]:
            go("dtype", dtypes[1])
        own = ("attention", "attention_backend", "weights", "quantization", "kv_cache_dtype")
        for option in own:
            go(option, None)
        model = here.model if there.kind in ("hf", "vllm") else there.model
        options = tuple((k, v) for k, v in there.options if k not in own)
        here = EngineName(there.kind, model, options)
        found.append(Step("engine.kernels", str(here)))
        if model != there.model:
            here = replace(here, model=there.model)
            found.append(Step("engine.model", str(here)))
        for option in own:
            go(option, there.get(option))
    return [*found[:-1], replace(found[-1], engine=candidate)]
