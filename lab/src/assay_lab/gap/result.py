"""What a decomposition came to: effects, floors, checks and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from assay.stats import Interval, percent_change
from assay_lab.gap.buckets import Amount, Decomposition, Effect, aligned, effect
from assay_lab.gap.checks import Check
from assay_lab.gap.floors import Floors, Repeated
from assay_lab.gap.phases.layers import Attribution
from assay_lab.gap.phases.noise import NoiseCurve
from assay_lab.gap.phases.residuals import StreamResidual
from assay_lab.gap.plan import GapPlan
from assay_lab.gap.proposals import Proposal
from assay_lab.kv.measured import Measured

CAUSE_SHARE = 0.05
"""Of the total, in KL: a bucket below it is not called a cause, however sure its sign is."""


@dataclass(frozen=True)
class CodecGap:
    """The codec's effect on each engine, each against itself, and the difference of the
    differences.
    """

    reference: Effect
    candidate: Effect
    gap: Effect

    def to_json(self) -> dict[str, Any]:
        """As `results.codec_gap`: ΔNLL, KL, and what each engine loses in percent of perplexity."""
        return {
            **self.gap.to_json(),
            "reference": {**self.reference.to_json(), "dppl_pct": dppl(self.reference.dnll)},
            "candidate": {**self.candidate.to_json(), "dppl_pct": dppl(self.candidate.dnll)},
        }


@dataclass
class GapResult:
    """What was found. Phases that were not run are absent; `skipped` says why others gave
    nothing.
    """

    plan: GapPlan
    decomposition: Decomposition
    floors: Floors
    codec_gap: CodecGap | None
    repeats_kl: Repeated | None
    repeats_nll: Repeated | None
    same: bool
    setup: Mapping[str, tuple[Any, Any]]
    text: Mapping[str, Any]
    engines: Mapping[str, Mapping[str, Any]]
    checks: Sequence[Check] = ()
    bytes: Mapping[str, Any] | None = None
    switches: Sequence[Mapping[str, Any]] = ()
    residuals: Sequence[StreamResidual] = ()
    noise: Mapping[str, NoiseCurve] = field(default_factory=dict)
    noise_ratio: Sequence[Mapping[str, Any]] = ()
    matched: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Attribution] = field(default_factory=dict)
    harness: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    recommendations: Sequence[Mapping[str, Any]] = ()
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def causes(self) -> list[str]:
        """Buckets and parts with at least 5 % of the total's KL that it tells from zero,
        Holm-adjusted, and that exceed twice the difference of an engine from itself.

        The largest come first; a part comes after its bucket where both are as large.
        """
        floor = 2 * self.floors.repeat_kl
        every = [b for top in self.decomposition.buckets for b in (top, *top.parts)]
        found = [
            b
            for b in every
            if b.separated and b.effect.kl.value > floor and (b.share_kl or 0.0) >= CAUSE_SHARE
        ]
        return [b.name for b in sorted(found, key=lambda b: -b.effect.kl.value)]

    @property
    def repeats(self) -> bool:
        """Whether the total that was measured on its own is the sum of the buckets."""
        return bool(
            self.repeats_kl and self.repeats_kl.ok and self.repeats_nll and self.repeats_nll.ok
        )

    def to_json(self) -> dict[str, Any]:
        """The object `results` of `assay gap`."""
        d, left = self.decomposition, None
        if d.repeatability and self.repeats_kl and self.repeats_nll:
            left = {
                **d.repeatability.to_json(),
                "closed": self.repeats,
                "shown": {"dnll": self.repeats_nll.shown, "kl": self.repeats_kl.shown},
                "bound": {"dnll": self.repeats_nll.bound, "kl": self.repeats_kl.bound},
            }
        return {
            "codec": self.plan.codec,
            "mode": self.plan.mode,
            "base_mode": self.plan.base,
            "windows": d.windows,
            "tokens": d.tokens,
            "total": {
                **d.total.to_json(),
                "dppl_pct": dppl(d.total.dnll),
                "measured_apart": left is not None,
            },
            "total_by_path": d.by_path,
            "buckets": d.buckets,
            "repeatability": left,
            "closure": left,
            "checks": [asdict(check) for check in self.checks],
            "causes": self.causes,
            "codec_gap": self.codec_gap,
            "orders": d.orders,
            "floors": self.floors,
            "setup_differences": self.setup,
            "self_test": self.same,
            "switches": self.switches,
            "bytes": self.bytes,
            "residual": {"streams": self.residuals},
            "noise": {**self.noise, "ratio": self.noise_ratio, "matched": self.matched},
            "layers": self.layers,
            "harness": self.harness,
            "calibration": self.calibration,
            "recommendations": self.recommendations,
            "phases": self.plan.phases,
            "skipped": self.skipped,
            "text": {**self.text, "length": self.plan.length, "scored": "second-half"},
            "engines": self.engines,
        }


def dppl(amount: Amount) -> dict[str, float]:
    """A mean ΔNLL as a change of perplexity in percent."""
    found = percent_change(Interval(amount.value, amount.lo, amount.hi))
    return {
        name: x if math.isfinite(x) else math.nan
        for name, x in zip(("value", "lo", "hi"), (found.value, found.lo, found.hi), strict=True)
    }


def judged(found: Sequence[Proposal], runs: Mapping[str, Measured]) -> list[dict[str, Any]]:
    """`results.recommendations`: effect, bytes, and the saving against the codec as it is, the
    largest saving first.

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
