"""What would make a gap smaller, measured on fresh windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from assay.errors import AssayError
from assay_lab.gap.configuration import Configuration, Corners, span
from assay_lab.gap.phases.layers import Attribution, attribute
from assay_lab.gap.run_cache import RunCache
from assay_lab.kv.measured import Measured
from assay_lab.kv.spec import KvSpec, Recipe, parse_spec, with_parameters

HOT_SHARE = 0.15
"""Share of the layers that is called hot, at least one group."""


@dataclass(frozen=True)
class Proposal:
    """Something that could be done instead, in words and as a configuration."""

    action: str
    config: Configuration


def proposals(
    corners: Corners, alone: Mapping[str, Measured], joint: Measured, layers: int
) -> list[Proposal]:
    """From the hottest groups of layers on the candidate, from the codec's bits, and another
    codec.
    """
    engine, codec = corners.plan.candidate, corners.plan.codec
    found: list[Proposal] = []
    more = with_more_bits(codec)
    if len(alone) > 1:
        hot = hot_layers(attribute(layers, corners.plan.groups, alone, joint), layers)
        found.append(
            Proposal(
                f"keep layers {span(hot)} exact",
                corners.with_codec(engine, skip_layers=hot, measured=2),
            )
        )
        if more:
            special = tuple((layer, more) for layer in hot)
            found.append(
                Proposal(
                    f"one bit more in layers {span(hot)}",
                    corners.with_codec(engine, layer_codecs=special, measured=2),
                )
            )
    if more:
        found.append(
            Proposal("one bit more everywhere", corners.with_codec(engine, codec=more, measured=2))
        )
    if "fp8" not in codec:
        found.append(
            Proposal(
                "fp8 instead", corners.with_codec(engine, codec="fp8", calibration=None, measured=2)
            )
        )
    return found


def hot_layers(attribution: Attribution, layers: int) -> tuple[int, ...]:
    """The layers of the hottest groups, up to about a seventh of all."""
    chosen: list[int] = []
    for part in attribution.hottest():
        if chosen and len(chosen) + len(part.layers) > max(1, HOT_SHARE * layers):
            break
        chosen += part.layers
    return tuple(sorted(chosen))


def with_more_bits(codec: str) -> str | None:
    """The same SPEC with one bit more in each stream; None where a codec has no bits, or no
    more.
    """
    spec = parse_spec(codec)
    try:
        k, v = (None if r is None else _one_more(r) for r in (spec.k, spec.v))
    except AssayError:
        return None
    more = str(KvSpec(k, v))
    return None if more == str(spec) else more


def _one_more(recipe: Recipe) -> Recipe:
    names = {f.name for f in fields(recipe.codec)}
    if "bits" not in names:
        return recipe
    return Recipe(recipe.around, with_parameters(recipe.codec, {"bits": recipe.codec.bits + 1}))  # type: ignore[attr-defined]


def measure_proposals(
    run_cache: RunCache, corners: Corners, proposed: Sequence[Proposal], found: dict[str, Measured]
) -> dict[str, str]:
    """The codec as it is, and each proposal, on the fresh windows; returns what could not be run,
    and why.
    """
    anchor = corners.candidate
    as_it_is = corners.with_codec(run_cache.plan.candidate, measured=2)
    found["as it is"] = run_cache.measure(as_it_is, anchor, "fresh")
    skipped: dict[str, str] = {}
    for proposal in proposed:
        try:
            found[proposal.action] = run_cache.measure(proposal.config, anchor, "fresh")
        except AssayError as error:
            skipped[proposal.action] = error.message
    return skipped
