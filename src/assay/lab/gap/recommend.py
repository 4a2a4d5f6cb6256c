"""What would help, proposed from the attribution and measured on fresh windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from assay.errors import AssayError
from assay.lab.gap.bench import Bench
from assay.lab.gap.buckets import aligned, effect
from assay.lab.gap.phases import Attribution, attribute
from assay.lab.gap.plan import Configuration, Corners, span
from assay.lab.kv.lab import Measured
from assay.lab.kv.spec import KvSpec, Recipe, parse_spec, with_parameters

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
    """From the hottest groups of layers on the candidate, from the codec's bits, and another codec."""
    engine, codec = corners.plan.candidate, corners.plan.codec
    found: list[Proposal] = []
    more = with_more_bits(codec)
    if len(alone) > 1:
        hot = hot_layers(attribute(layers, corners.plan.groups, alone, joint), layers)
        found.append(
            Proposal(
                f"keep layers {span(hot)} exact", corners.with_codec(engine, skip_layers=hot, measured=2)
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
        found.append(Proposal("one bit more everywhere", corners.with_codec(engine, codec=more, measured=2)))
    if "fp8" not in codec:
        found.append(
            Proposal("fp8 instead", corners.with_codec(engine, codec="fp8", calibration=None, measured=2))
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
    """The same SPEC with one bit more in each stream; None where a codec has no bits, or no more."""
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
    bench: Bench, corners: Corners, proposed: Sequence[Proposal], found: dict[str, Measured]
) -> dict[str, str]:
    """The codec as it is, and each proposal, on the fresh windows; returns what could not be run, and why."""
    anchor = corners.candidate
    as_it_is = corners.with_codec(bench.plan.candidate, measured=2)
    found["as it is"] = bench.measure(as_it_is, anchor, "fresh")
    skipped: dict[str, str] = {}
    for proposal in proposed:
        try:
            found[proposal.action] = bench.measure(proposal.config, anchor, "fresh")
        except AssayError as error:
            skipped[proposal.action] = error.message
    return skipped


def judged(found: Sequence[Proposal], runs: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """`results.recommendations`: effect, bytes, and the saving against the codec as it is, the largest saving first.

    `helps` says that the saving in KL is separated from zero on fresh windows.
    """
    sums = aligned({name: m.seen for name, m in runs.items()})
    before = runs["as it is"].bytes
    entries = []
    for proposal in found:
        size = runs[proposal.action].bytes if proposal.action in runs else None
        if size is None or before is None:
            continue
        own = effect(sums[proposal.action])
        saving = effect(sums["as it is"] - sums[proposal.action])
        entries.append(
            {
                "action": proposal.action,
                "codec": proposal.config.codec,
                "skip_layers": list(proposal.config.skip_layers),
                "layer_codecs": {str(k): v for k, v in proposal.config.layer_codecs},
                "bytes_ratio": size.ratio,
                "bytes_ratio_before": before.ratio,
                "bytes_more": size.stored - before.stored,
                "kld": own.kl.value,
                "kld_lo": own.kl.lo,
                "kld_hi": own.kl.hi,
                "dnll": own.dnll.value,
                "lo": own.dnll.lo,
                "hi": own.dnll.hi,
                "saving_kld": saving.kl.to_json(),
                "helps": saving.kl.lo > 0,
                "windows": len(runs[proposal.action].seen),
            }
        )
    return sorted(entries, key=lambda e: -e["saving_kld"]["value"])
