"""What a user may set for `assay check`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from assay.coherence.needle import DEFAULT_LONGEST
from assay.coherence.probes import NAMES
from assay.options import RunTime, option

NEEDS = ("tools", "streaming", "reasoning", "json")
"""What `--need` may name."""


@dataclass(frozen=True)
class Plan(RunTime):
    """What to measure. Two runs compare if their plans agree."""

    VERB, AREA = "check", "server"

    samples: int = option(3, "Sampled texts per probe, beside a greedy one.", lo=1, hi=1000)
    seed: int = option(0, "First seed; recorded in the result.", lo=0, hi=2**62)
    concurrency: int = option(1, "Streams whose speed is measured at once.", lo=1, hi=512)
    parallel: int = option(8, "Probes that run at once.", lo=1, hi=512)
    repeats: int = option(5, "Timed rounds after the warm-up.", lo=3, hi=1000)
    only: tuple[str, ...] = option(
        (), "Run this probe only; may be given again.", flag="probe", metavar="NAME", choices=NAMES
    )
    longest_needle: int = option(
        DEFAULT_LONGEST,
        "Longest context that is searched for a needle, in tokens.",
        lo=256,
        hi=10_000_000,
    )
    token_budget: float = option(
        1.0, "Factor on every length limit, for models that reason at length.", lo=0.1, hi=100
    )
    thinking: bool = option(True, "Ask the chat template not to reason.")
    run_code: bool = option(False, "Run the code that the model wrote, in a sandbox.")
    run_code_unsafe: bool = option(
        False, "--run-code=unsafe: run it also where the sandbox is incomplete.", apart=True
    )
    throughput: bool = option(True, "Do not measure speed.")
    suite: str = option(
        "text",
        "What to ask: texts of all kinds, or exact tool calls and JSON.",
        choices=("text", "tools"),
    )
    margin_answers: float = option(
        0.01,
        "With a reference: share of right answers that may be lost and still be no worse.",
        form="fraction",
        metavar="PERCENT",
        lo=0,
        hi=1,
        apart=True,
    )
    need: tuple[str, ...] = option(
        (),
        "What the server must be able to do: tools, streaming, reasoning, json; with commas.",
        metavar="WHAT",
    )
    quick: bool = option(
        False, "One text per probe, in 60 s, or in 3 min on a slow server.", apart=True
    )
    all: bool = option(False, "Measure everything, even after the verdict is certain.", apart=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        named = tuple(
            dict.fromkeys(n.strip() for one in self.need for n in one.split(",") if n.strip())
        )
        if unknown := [name for name in named if name not in NEEDS]:
            raise self.usage(f"unknown need {unknown[0]!r}", f"one of {', '.join(NEEDS)}")
        object.__setattr__(self, "need", named)


@dataclass(frozen=True)
class CheckOptions(Plan):
    """A plan, how to reach the server, and what to compare it with."""

    model: str | None = option(
        None, "Model to ask; default: the first the server lists.", apart=True
    )
    reference: Path | None = option(
        None, "Result of an earlier healthy run (its --json) to compare with.", apart=True
    )
    reference_engine: str | None = option(
        None,
        "Trusted model to run here on the same prompts: hf:PATH.",
        metavar="ENGINE",
        apart=True,
    )
    api_key_env: str | None = option(
        None, "Environment variable that holds the API key.", metavar="NAME", apart=True
    )
    timeout: float = option(300.0, "Seconds that one answer may take.", lo=1, hi=86_400, apart=True)
    identity: Path | None = option(
        None,
        "Ask only whether it is the model of this reference (from --identity-out).",
        apart=True,
    )
    identity_out: Path | None = option(
        None, "Write a reference of this server for --identity, and ask nothing else.", apart=True
    )
    ready: bool = option(
        False, "Ask only for one short text, within 10 s: for a readiness probe.", apart=True
    )
    determinism: bool = option(
        False,
        "Ask only whether the same request gives the same answer, alone and in batches.",
        apart=True,
    )

    @property
    def exact(self) -> bool:
        """Whether tokens and probabilities are asked for, instead of texts."""
        return bool(self.identity or self.identity_out or self.determinism)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exact and (
            self.reference or self.reference_engine or self.only or self.suite != "text"
        ):
            raise self.usage(
                "--identity, --identity-out and --determinism ask no texts: they go with no"
                " reference, probe or suite",
                "run two commands",
            )
        if self.only and self.suite != "text":
            raise self.usage(
                "--suite tools asks its own cases, and no --probe", "leave one of them out"
            )
        if self.reference is not None and self.reference_engine is not None:
            raise self.usage(
                "give --reference or --reference-engine, not both", "leave one of them out"
            )
