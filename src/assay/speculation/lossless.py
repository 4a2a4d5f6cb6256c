"""Does speculation change the text? Compare a server with one that does not speculate.

Byte equality is the wrong question: two runs of the *same* server may part where two tokens are
nearly equal, since another batch shape rounds otherwise. So (1) greedy texts are compared up to
where they part, and the gap between the two candidate tokens is compared with the noise of the
log-probabilities that both servers give to the tokens they agree on; (2) sampled texts are
compared as distributions, by permuting which server they came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from assay.speculation.completions import Completions
from assay.speculation.partings import Parting, Tokens, noise_of, part
from assay.speculation.traffic import PROMPTS
from assay.verdict import Finding, Report, Severity, Table, Verdict, worst


def permutation_p(
    a: Sequence[Sequence[str]], b: Sequence[Sequence[str]], rounds: int = 2000, seed: int = 0
) -> float:
    """p-value for texts `a` and `b` having one distribution.

    Statistic: Σ over positions and tokens of (n_a / |a| − n_b / |b|)² / (n_a + n_b), a
    chi-square-like distance of the token counts at each position. Its null distribution comes from
    permuting which side a text is on, so texts, not tokens, are what is exchanged. (1 + at least as
    extreme) / (1 + rounds), Phipson and Smyth (2010).
    """
    texts = [*a, *b]
    width = max((len(t) for t in texts), default=0)
    columns = []
    for i in range(width):
        present = [t[i] if i < len(t) else None for t in texts]
        columns += [
            np.array([p == token for p in present], dtype=float) for token in dict.fromkeys(present)
        ]
    if not columns:
        return 1.0
    counts = np.array(columns)  # (position · token, text)
    weight = 1 / counts.sum(axis=1)
    side = np.array([1 / len(a)] * len(a) + [-1 / len(b)] * len(b))

    def distance(order: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        return float((weight * (counts @ order) ** 2).sum())

    observed = distance(side)
    rng = np.random.default_rng(seed)
    extreme = sum(distance(rng.permutation(side)) >= observed - 1e-12 for _ in range(rounds))
    return (1 + extreme) / (1 + rounds)


GREEDY_TOKENS = 96

SAMPLED_TOKENS = 12

ALPHA = 0.01

MIN_SAMPLES = 8


@dataclass(frozen=True)
class Lossless:
    """Where greedy texts part and why, and how likely the sampled texts are if both servers are the
    same.
    """

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
        """fail where a difference is real, inconclusive where noise may explain what was seen, else
        pass.
        """
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
            "partings": self.partings,
        }


def check_lossless(report: Report, url: str, other: str, *options: Any) -> Report:
    """`report` with the comparison of its server with the one without speculation. `options` are
    those of `measure`.
    """
    answer = measure(url, other, *options)
    return replace(
        report,
        verdict=worst([report.verdict, answer.verdict]),
        findings=[*_exactness(answer), *report.findings],
        results={**report.results, "lossless": answer.to_json()},
        blocks=[*report.blocks, _table(answer)],
    )


def measure(
    url: str,
    other: str,
    prompts: int = 6,
    samples: int = 48,
    api_key_env: str | None = None,
    timeout: float = 120.0,
) -> Lossless:
    """Compare the server at `url` (speculation on) with `other` (off)."""
    with ExitStack() as held:
        on, off = (
            held.enter_context(Completions.connect(u, api_key_env, timeout)) for u in (url, other)
        )
        texts = [PROMPTS[i % len(PROMPTS)] for i in range(prompts)]
        first, second, again = (
            [e.complete(text, GREEDY_TOKENS, 0.0, 0) for text in texts] for e in (on, off, off)
        )
        drawn = [_sampled(e, samples) for e in (on, off)]
    return judge_texts(first, second, again, (drawn[0], drawn[1]))


def judge_texts(
    on: Sequence[Tokens],
    off: Sequence[Tokens],
    again: Sequence[Tokens],
    drawn: tuple[Sequence[tuple[str, ...]], ...],
) -> Lossless:
    """Greedy texts with speculation, without, and without once more; `drawn` are sampled texts
    (with, without).
    """
    noise = noise_of([*zip(on, off, strict=True), *zip(again, off, strict=True)])
    partings = tuple(part(a, b, noise) for a, b in zip(on, off, strict=True))
    own = sum(part(a, b, noise).at is not None for a, b in zip(again, off, strict=True))
    samples = len(drawn[0])
    p_value = permutation_p(drawn[0], drawn[1]) if samples >= MIN_SAMPLES else None
    return Lossless(partings, own, noise, p_value, samples)


def _sampled(engine: Completions, count: int) -> list[tuple[str, ...]]:
    """Texts drawn at temperature 1, a different seed each, as tuples of tokens."""
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(
            lambda seed: engine.complete(PROMPTS[0], SAMPLED_TOKENS, 1.0, seed), range(1, count + 1)
        )
        return [t.texts for t in texts]


def _exactness(answer: Lossless) -> list[Finding]:
    figures = {k: v for k, v in answer.to_json().items() if k != "partings"}
    if answer.verdict is Verdict.PASS:
        return [
            Finding(
                "speculation.lossless",
                Severity.INFO,
                "no difference between speculation on and off beyond the engine's own noise",
                evidence=figures,
            )
        ]
    if answer.verdict is Verdict.INCONCLUSIVE:
        return [
            Finding(
                "speculation.lossless_undecided",
                Severity.WARNING,
                "greedy texts part, but only at near ties, which the engine's own noise explains",
                evidence=figures,
                remedies=("bound how far the distributions can be apart: `assay compare`",),
            )
        ]
    return [
        Finding(
            "speculation.not_lossless",
            Severity.ERROR,
            (
                f"{len(answer.real)} of {len(answer.partings)} greedy texts part where no tie"
                " explains it"
                if answer.real
                else f"sampled texts come from different distributions (p = {answer.p_value:.2g})"
            ),
            evidence=figures,
            causes=(
                (
                    "the verification writes wrong state (KV slots, recurrent state) for accepted"
                    " drafts"
                ),
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
        "Speculation on against off, greedy",
        ("prompt", "parts at", "on / off", "gap (nats)", "reading"),
        rows,
        frozenset({3}),
        note=f"noise {answer.noise:.4f} nats; sampled texts: p = {answer.p_value}",
    )
