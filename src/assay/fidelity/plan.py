"""The options of a comparison and of a stored reference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from assay.engines import full_spec, with_options
from assay.engines.scoring import ScoreJob, ScoringPath
from assay.errors import UsageError
from assay.fidelity.names import printable
from assay.fidelity.windows import Cut
from assay.options import Options, RayOptions, RunTime, declared_options, option

PROTOCOLS = ("all", "second-half")
"""`all`: every token but the first is scored. `second-half`: only the second half of each window
(llama.cpp).
"""


@dataclass(frozen=True)
class ThreadOptions(Options):
    """With how many threads models run on a CPU."""

    _: KW_ONLY
    threads: int = option(
        0, "Threads of hf: and gguf: engines; auto: the cores that are free.", lo=0, form="auto"
    )


@dataclass(frozen=True)
class Passages(ThreadOptions):
    """What is scored, and how: the options that `compare` and `reference` share."""

    AREA = "fidelity"

    _: KW_ONLY
    text: tuple[str, ...] = option(
        (),
        "File, glob, FILE.jsonl, datasets:NAME, or self; may be given again. Left out: the English"
        " of Python's own documentation.",
        metavar="SOURCE",
    )
    windows: int = option(64, "Passages that are scored.", lo=1)
    length: int = option(1024, "Tokens of a passage.", lo=8)
    path: str = option(
        "prefill", "How windows are fed; decode reads the KV cache.", choices=tuple(ScoringPath)
    )
    scored: str = option(
        "all", "All tokens but the first, or the second half of a window.", choices=PROTOCOLS
    )
    chunk: int = option(128, "Tokens of a block on the chunked path.", lo=1)
    batch: int = option(
        0,
        "Windows that run together; auto: as many as fit in memory and still make it faster.",
        lo=0,
        form="auto",
    )
    device: str = option("auto", "Device of hf: engines; auto: the GPU where there is one.")
    seed: int = option(
        0, "Seed of the bootstrap, of noise and of sampled text.", lo=0, hi=2**63 - 1
    )
    floors: bool = option(True, "Do not measure the floors.")


@dataclass(frozen=True)
class MarginOptions(Options):
    """Within which margins a difference is accepted: fractions (0.01 is 1 %), of the
    mean KL nats.
    """

    _: KW_ONLY
    margin_ppl: float = option(0.01, "ACCEPT: Δppl within ± this.", form="fraction")
    margin_top1: float = option(0.95, "ACCEPT: top-1 agreement at least this.", form="fraction")
    margin_kl: float = option(0.010, "ACCEPT: mean KL at most this, in nats.", lo=0)
    marginal_ppl: float = option(0.03, "MARGINAL: Δppl within ± this.", form="fraction")
    marginal_top1: float = option(0.85, "MARGINAL: top-1 agreement at least this.", form="fraction")
    marginal_kl: float = option(0.030, "MARGINAL: mean KL at most this, in nats.", lo=0)
    allow_marginal: bool = option(False, "MARGINAL passes: exit code 0.", apart=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.margin_ppl <= self.marginal_ppl < 1:
            raise self.usage(
                "margins of perplexity must satisfy 0 < ACCEPT ≤ MARGINAL < 100 %, "
                f"got {self.margin_ppl:.3%} and {self.marginal_ppl:.3%}",
                "give --margin-ppl and --marginal-ppl together",
            )
        if not 0 < self.marginal_top1 <= self.margin_top1 <= 1:
            raise self.usage(
                "top-1 margins must satisfy 0 < MARGINAL ≤ ACCEPT ≤ 100 %, "
                f"got {self.marginal_top1:.3%} and {self.margin_top1:.3%}",
                "give --margin-top1 and --marginal-top1 together",
            )
        if not 0 < self.margin_kl <= self.marginal_kl:
            raise self.usage(
                f"margins of KL must satisfy 0 < ACCEPT ≤ MARGINAL, got {self.margin_kl:g} and"
                f" {self.marginal_kl:g} nats",
                "give --margin-kl and --marginal-kl together",
            )


@dataclass(frozen=True)
class TimeOptions(RunTime):
    """How long a run over passages may take."""

    _: KW_ONLY
    all: bool = option(
        False,
        "Score every passage, even after the verdict is certain; a number given by --windows does"
        " so too.",
        apart=True,
    )

    @classmethod
    def read(cls, given: Mapping[str, Any], where: str = "") -> dict[str, Any]:
        """The values that were given. Who asks for a number of windows without a budget gets as
        many.
        """
        values = super().read(given, where)
        if "windows" in values and values.get("budget") is None and not values.get("quick"):
            values.setdefault("all", True)
        return values


QUICK_MINUTES = 3.0
"""What `--quick` stands for."""


@dataclass(frozen=True)
class Plan(RayOptions, TimeOptions, MarginOptions, Passages):
    """A comparison of candidates with a reference."""

    VERB = "compare"

    reference: str
    candidates: tuple[str, ...]
    _: KW_ONLY
    greedy: int = option(
        0,
        "Also let both sides generate N tokens greedily; 64 show most differences.",
        metavar="N",
        lo=0,
    )
    routing: bool = option(
        False, "Mixtures of experts: which tokens change experts, and how much of KL that makes up."
    )
    draws: int = option(10_000, "Samples of the bootstrap.", lo=100, listed=False)
    control: str = option("", "Engine that no candidate may be worse than.", metavar="ENGINE")
    control_margin: float = option(
        0.10, "Share of the control's difference that a candidate may add.", form="fraction", lo=0
    )
    keep: bool = option(False, "Keep the scored windows after the run.", apart=True)
    rows: Path | None = option(
        None,
        "Also write one row per window into a Parquet file, for assay table.",
        metavar="FILE.parquet",
        apart=True,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference", self._placed(self.reference))
        if self.control:
            object.__setattr__(self, "control", self._placed(self.control))
        object.__setattr__(self, "candidates", tuple(map(self._placed, self.candidates)))
        super().__post_init__()
        if not self.candidates:
            raise usage_error(
                "a comparison needs at least one candidate", "name one after the reference"
            )
        if self.routing and self.ray:
            raise usage_error(
                "routers are read in this process only", "leave out --ray, or --routing"
            )
        if (self.control,) == self.candidates:
            raise usage_error(
                "the control is the candidate itself", "name another engine with --control"
            )
        if twice := next((c for c in self.candidates if self.candidates.count(c) > 1), None):
            raise usage_error(
                f"the candidate {printable(twice)} is given twice", "name every candidate once"
            )

    @property
    def sides(self) -> tuple[str, ...]:
        """Everything that is scored against the reference: the candidates, then the control where
        it is none of them.
        """
        return tuple(dict.fromkeys((*self.candidates, *filter(None, (self.control,)))))

    def _placed(self, spec: str) -> str:
        """An engine written in full, with the device and the threads that the options name, unless
        it names its own.
        """
        return with_options(full_spec(spec), device=self.device, threads=self.threads or "auto")

    @property
    def job(self) -> ScoreJob:
        """How windows are scored."""
        return ScoreJob(
            ScoringPath(self.path),
            scored_from=self.cut.scored_from,
            chunk=self.chunk,
            batch=self.batch,
        )

    @property
    def cut(self) -> Cut:
        """How the text is cut into windows."""
        return Cut(self.length, "all" if self.scored == "all" else "second-half")

    @property
    def sha256(self) -> str:
        """Hash of what decides the numbers."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class RerunOptions(RayOptions):
    """What may differ when a comparison is run again."""

    VERB, AREA = "rerun", "fidelity"

    allow_marginal: bool = option(False, "MARGINAL passes: exit code 0.", apart=True)
    keep: bool = option(False, "Keep the scored windows after the run.", apart=True)


@dataclass(frozen=True)
class ReferenceOptions(RayOptions, Passages):
    """A reference that is scored once and stored."""

    VERB = "reference"

    engine: str
    out: Path = option(help="Folder of the store, or file with --format llama.cpp.")
    _: KW_ONLY
    dtype: str = option(
        "engine",
        "Type of the stored states; engine: as the engine has them.",
        choices=("engine", "bfloat16", "float16", "float32"),
    )
    format: str = option(
        "assay",
        "assay (final states), or llama.cpp (its file of log-probabilities).",
        choices=("assay", "llama.cpp"),
    )

    @property
    def plan(self) -> Plan:
        """What is scored, as a comparison of the engine with itself."""
        passages = {
            name: getattr(self, name)
            for name in {**declared_options(Passages), **declared_options(RayOptions)}
        }
        return Plan(reference=self.engine, candidates=(self.engine,), **passages)


def usage_error(message: str, remedy: str) -> UsageError:
    """The error for options of a comparison that do not go together."""
    return UsageError(message, remedy=remedy, finding_id="fidelity.usage")
