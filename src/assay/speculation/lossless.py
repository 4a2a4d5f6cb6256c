"""Does speculation change the text? Two servers of the same model, one with it and one without.

Byte equality is the wrong question: two runs of the *same* server may part where two tokens are a hair apart, since
another batch shape rounds otherwise. So (1) greedy texts are compared up to where they part, and the gap between
the two candidate tokens is held against the noise of the log-probabilities that both servers give to the tokens they
agree on; (2) sampled texts are compared as distributions, by permuting which server they came from.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from assay.speculation.completions import Completions
from assay.speculation.permutation import permutation_p
from assay.speculation.requests import PROMPTS
from assay.speculation.ties import Parting, noise_of, part
from assay.verdict import Finding, Report, Severity, Table, Verdict, worst

if TYPE_CHECKING:
    from assay.speculation.examine import Options

GREEDY_TOKENS = 96
SAMPLED_TOKENS = 12
ALPHA = 0.01
MIN_SAMPLES = 8


@dataclass(frozen=True)
class Lossless:
    """Where greedy texts part and why, and how likely the sampled texts are if both servers are the same."""

    partings: tuple[Parting, ...]
    own_partings: int
    noise: float
    p_value: float | None
    samples: int

    @property
    def real(self) -> list[Parting]:
        """Partings that no noise explains."""
        return [p for p in self.partings if p.real]

    @property
    def verdict(self) -> Verdict:
        """fail where a difference is real, inconclusive where noise may explain what was seen, else pass."""
        if self.real or (self.p_value is not None and self.p_value < ALPHA):
            return Verdict.FAIL
        parted = any(p.at is not None for p in self.partings)
        return Verdict.INCONCLUSIVE if parted else Verdict.PASS

    def to_json(self) -> dict[str, Any]:
        """The object `results.lossless`."""
        return {
            "verdict": self.verdict.value,
            "prompts": len(self.partings),
            "identical": sum(p.at is None for p in self.partings),
            "ties": sum(p.at is not None and not p.real for p in self.partings),
            "real": len(self.real),
            "own_partings": self.own_partings,
            "noise": self.noise,
            "sampled_p_value": self.p_value,
            "samples": self.samples,
            "partings": [p.to_json() for p in self.partings],
        }


def check_lossless(report: Report, url: str, options: Options) -> Report:
    """`report` with the comparison of its server with the one without speculation."""
    if options.lossless is None:
        return report
    answer = measure(url, options.lossless, options)
    return replace(
        report,
        verdict=worst([report.verdict, answer.verdict]),
        findings=[*_findings(answer), *report.findings],
        results={**report.results, "lossless": answer.to_json()},
        blocks=[*report.blocks, _table(answer)],
    )


def measure(url: str, other: str, options: Options) -> Lossless:
    """Compare the server at `url` (speculation on) with `other` (off)."""
    with ExitStack() as held:
        on, off = (held.enter_context(Completions.connect(u, options)) for u in (url, other))
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(options.prompts)]
        first, second, again = (
            [e.complete(p, GREEDY_TOKENS, 0.0, 0) for p in prompts] for e in (on, off, off)
        )
        drawn = [_sampled(e, options.samples) for e in (on, off)]
    noise = noise_of([*zip(first, second, strict=True), *zip(again, second, strict=True)])
    partings = tuple(part(a, b, noise) for a, b in zip(first, second, strict=True))
    own = sum(part(a, b, noise).at is not None for a, b in zip(again, second, strict=True))
    p_value = permutation_p(drawn[0], drawn[1]) if options.samples >= MIN_SAMPLES else None
    return Lossless(partings, own, noise, p_value, options.samples)


def _sampled(engine: Completions, count: int) -> list[tuple[str, ...]]:
    """Texts drawn at temperature 1, a different seed each, as tuples of tokens."""
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(
            lambda seed: engine.complete(PROMPTS[0], SAMPLED_TOKENS, 1.0, seed), range(1, count + 1)
        )
        return [t.texts for t in texts]


def _findings(answer: Lossless) -> list[Finding]:
    figures = {k: v for k, v in answer.to_json().items() if k != "partings"}
    if answer.verdict is Verdict.PASS:
        return [
            Finding(
                "speculation.lossless", Severity.INFO,
                "no difference between speculation on and off beyond the engine's own noise", evidence=figures,
            )
        ]  # fmt: skip
    if answer.verdict is Verdict.INCONCLUSIVE:
        return [
            Finding(
                "speculation.lossless_undecided", Severity.WARNING,
                "greedy texts part, but only at near ties, which the engine's own noise explains", evidence=figures,
                remedies=("assay compare bounds how far the distributions can be apart",),
            )
        ]  # fmt: skip
    return [
        Finding(
            "speculation.not_lossless",
            Severity.ERROR,
            f"{len(answer.real)} of {len(answer.partings)} greedy texts part where no tie explains it"
            if answer.real
            else f"sampled texts come from different distributions (p = {answer.p_value:.2g})",
            evidence=figures,
            causes=(
                "the verification writes wrong state (KV slots, recurrent state) for accepted drafts",
                "the servers do not run the same model or the same sampling settings",
            ),
            remedies=(
                "check that both servers have the same arguments but for speculation",
                "assay compare ON OFF",
            ),
            references=("https://github.com/vllm-project/vllm/issues/46834",),
        )
    ]


def _table(answer: Lossless) -> Table:
    rows = [
        (
            str(i + 1),
            "identical" if p.at is None else f"token {p.at}",
            "" if p.at is None else f"{p.on!r} / {p.off!r}",
            "" if p.gap is None else f"{p.gap:.4f}",
            "" if p.at is None else ("real" if p.real else "tie"),
        )
        for i, p in enumerate(answer.partings)
    ]
    return Table(
        "Speculation on against off, greedy", ("prompt", "parts at", "on / off", "gap (nats)", "reading"), rows,
        frozenset({3}), note=f"noise {answer.noise:.4f} nats; sampled texts: p = {answer.p_value}",
    )  # fmt: skip
