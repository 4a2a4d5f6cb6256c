"""What a comparison is: everything that can change its numbers, in one object that can be written
and hashed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from assay.engines import full_spec, with_options
from assay.engines.scoring import ScoreJob, ScoringPath, Window
from assay.engines.server.http import without_credentials
from assay.errors import AssayError, UsageError
from assay.options import Options, RayOptions, RunTime, declared_options, option

# Token ids cut into windows, the unit that is scored and resampled.
#
# Two protocols, both without overlap:
#
# `all`          A window of length L is the tokenizer's start token, where it puts one before a
# text, and the next
#                L − 1 tokens (L without one). Every token but the first is scored.
# `second-half`  llama.cpp's: the next L tokens, the first of them replaced by the start token;
# tokens L/2 + 1 … L − 1
#                are scored, so that every one has at least half a window of context.
#
# Neighbouring windows are alike (the KL of one tells that of the next). So `all` takes its windows
# from all over the text, in an order of which any first part is spread evenly: an interrupted run
# has seen the whole text, and a longer run keeps the windows of a shorter one. `second-half` takes
# them from the start, as llama.cpp does.

ScoredPart = Literal["all", "second-half"]


@dataclass(frozen=True)
class Cut:
    """How windows are cut. `stride` is in tokens of the text; None: one window begins where the
    last ended.

    `skip` windows of the order are passed over first, so that text for calibration and for
    evaluation can be kept apart.
    """

    length: int = 1024
    protocol: ScoredPart = "all"
    stride: int | None = None
    skip: int = 0

    def __post_init__(self) -> None:
        if self.length < 2:
            raise _usage(
                f"a window needs at least 2 tokens, got {self.length}", "use a larger --length"
            )
        if self.skip < 0:
            raise _usage(f"cannot skip {self.skip} windows", "skip 0 or more")

    @property
    def scored_from(self) -> int:
        """Index of the first token of a window that is scored."""
        return 1 if self.protocol == "all" else self.length // 2 + 1

    def text_tokens(self, bos_id: int | None) -> int:
        """Tokens of the text that one window takes."""
        return self.length - 1 if self.protocol == "all" and bos_id is not None else self.length

    def step(self, bos_id: int | None) -> int:
        """Tokens of the text from the start of one window to the next; UsageError where windows
        would overlap.
        """
        taken = self.text_tokens(bos_id)
        if self.stride is None:
            return taken
        if self.stride < taken:
            raise _usage(
                f"a stride of {self.stride} lets windows of {taken} tokens overlap",
                f"use {taken} or more: tokens that are counted twice are no new evidence",
            )
        return self.stride


def available_windows(token_count: int, cut: Cut, bos_id: int | None) -> int:
    """How many windows `token_count` tokens give, those that are skipped not counted."""
    taken = cut.text_tokens(bos_id)
    if token_count < taken:
        return 0
    return max(0, 1 + (token_count - taken) // cut.step(bos_id) - cut.skip)


def places_of(
    token_count: int, cut: Cut, bos_id: int | None, count: int | None = None
) -> list[int]:
    """Where in the text the first `count` windows of the order lie, in steps from its start."""
    available = available_windows(token_count, cut, bos_id)
    total = available + cut.skip if available else 0
    order = list(range(total))
    if cut.protocol == "all":
        # The cells whose multiple of the golden ratio has the smallest fraction: any first part of
        # them is spread evenly (the three-distance theorem: Sos, Ann. Univ. Sci. Budapest Eotvos 1
        # (1958) 127).
        order.sort(key=lambda cell: (cell * _GOLDEN) % 1.0)
    return order[cut.skip : cut.skip + (available if count is None else min(count, available))]


_GOLDEN = (5**0.5 - 1) / 2


def blocks_of(places: Sequence[int]) -> list[int]:
    """The cluster that each window belongs to, given where the windows lie: neighbours share what
    they are about.

    A cluster is up to four windows wide; less where that would leave fewer than eight clusters of
    as many windows.
    """
    width = min(4, max(1, len(places) // 8))
    return [place // width for place in places]


def cut_windows(
    token_ids: Sequence[int], cut: Cut, bos_id: int | None, count: int | None = None
) -> list[Window]:
    """`count` windows (all of them by default, fewer where there are fewer), numbered from 0; see
    `places_of`.

    AssayError where the text is too short for one.
    """
    taken, step = cut.text_tokens(bos_id), cut.step(bos_id)
    available = available_windows(len(token_ids), cut, bos_id)
    if available == 0:
        raise _too_short(len(token_ids), taken, cut)
    windows = []
    for index, place in enumerate(places_of(len(token_ids), cut, bos_id, count)):
        start = place * step
        ids = [int(i) for i in token_ids[start : start + taken]]
        if bos_id is not None:
            ids = [bos_id, *(ids if cut.protocol == "all" else ids[1:])]
        windows.append(Window(index, tuple(ids)))
    return windows


def _too_short(token_count: int, taken: int, cut: Cut) -> AssayError:
    needed = f"one window of {cut.length:,} needs {taken:,}"
    if cut.skip:
        needed += f" after the {cut.skip} that are skipped"
    return AssayError(
        f"the text has {token_count:,} tokens, {needed}",
        finding_id="fidelity.text_too_short",
        remedy="give more text or a smaller --length",
        evidence={"tokens": token_count, "window": cut.length, "skipped_windows": cut.skip},
    )


# What an engine or a text on the command line stands for: how it is named, and whether it has
# changed.

_PREFIXES = ("hf:", "vllm:", "gguf:", "run:", "pack:", "jsonl:", "datasets:")


def label_of(spec: str, among: Sequence[str] = ()) -> str:
    """A short name without folders: `hf:model?dtype=float32`. Where two would be equal, their
    number is added.
    """
    label = _short(spec)
    same = [other for other in among if _short(other) == label]
    return label if len(same) < 2 else f"{label} #{same.index(spec) + 1}"


def _short(spec: str) -> str:
    if "://" in spec:
        return printable(spec)
    head, mark, options = spec.partition("?")
    prefix = next((p for p in _PREFIXES if head.startswith(p)), "")
    kept = "&".join(_without_folders(option) for option in options.split("&"))
    return f"{prefix}{Path(head.removeprefix(prefix)).name}{mark}{kept}"


def _without_folders(option: str) -> str:
    """`python=/a/b/python` as `python=python`: a folder of this machine has no place in a result."""
    name, mark, value = option.partition("=")
    return f"{name}={Path(value).name}" if mark and Path(value).is_absolute() else option


def printable(spec: str) -> str:
    """A spec without a user and a password, which the URL of a server may hold."""
    head, mark, options = spec.partition("?")
    return f"{without_credentials(head)}{mark}{options}" if "://" in head else spec


def fingerprint(spec: str) -> str:
    """Hash of a spec and of name, size and time of the files it names; of the spec alone where it
    names none.

    Two ways to write one path, or the same options in another order, have the same fingerprint.
    """
    head, mark, options = spec.partition("?")
    prefix = next((p for p in _PREFIXES if head.startswith(p)), "")
    head = head.removeprefix(prefix)
    head = str(Path(head).expanduser()) if head.startswith("~") else head
    whole = Path(head).exists()
    canonical = (
        f"{prefix}{Path(head).resolve()}{mark}{'&'.join(sorted(options.split('&')))}"
        if whole
        else spec
    )
    digest = hashlib.sha256(canonical.encode())
    paths = [Path(head)] if whole else [Path(p) for p in sorted(glob.glob(head))]  # noqa: PTH207 - takes absolute patterns
    for path in paths:
        files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
        for file in files:
            facts = file.stat()
            digest.update(f"{file.name}\t{facts.st_size}\t{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


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
    """Within which margins a difference is accepted: fractions (0.01 is 1 %), of the mean KL nats."""

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
            raise _usage(
                "a comparison needs at least one candidate", "name one after the reference"
            )
        if self.routing and self.ray:
            raise _usage("routers are read in this process only", "leave out --ray, or --routing")
        if (self.control,) == self.candidates:
            raise _usage(
                "the control is the candidate itself", "name another engine with --control"
            )
        if twice := next((c for c in self.candidates if self.candidates.count(c) > 1), None):
            raise _usage(
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


def read_plan(path: Path, overrides: Mapping[str, Any]) -> Plan:
    """The plan in a TOML file, with what the command line says on top; UsageError names what is
    wrong in it.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _usage(
            f"cannot read the plan {path}: {error.strerror}", "give a TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _usage(
            f"{path} is not TOML: {error}", "see docs/compare.md for an example"
        ) from error
    return plan_from(data, overrides, where=str(path))


def plan_from(data: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> Plan:
    """A plan from plain data, such as a TOML file or the plan echoed in a result; `overrides` win."""
    values = Plan.read(data, where) | Plan.read(overrides)
    missing = [name for name in ("reference", "candidates") if not values.get(name)]
    if missing:
        raise _usage(
            f"{where} names no {' and no '.join(n.rstrip('s') for n in missing)}",
            "name the engines that are compared: REFERENCE CANDIDATE…",
        )
    if values["reference"].startswith("run:"):
        from assay.fidelity.store import stored_settings

        values = stored_settings(values["reference"]) | values
    if values["reference"].startswith("pack:"):
        from assay.fidelity.pack import pack_settings

        values = pack_settings(values["reference"]) | values
    return Plan(**values)


def plan_of_result(path: Path, overrides: Mapping[str, Any]) -> Plan:
    """The plan that a result of `assay compare --json` echoes; UsageError where it holds none."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))["subject"]["plan"]
        if not isinstance(plan, dict):
            raise TypeError
    except OSError as error:
        raise _usage(f"cannot read {path}: {error.strerror}", "check the path") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _usage(
            f"{path} is no result of assay compare: it holds no plan",
            "give the JSON that assay compare --json wrote",
        ) from error
    return plan_from(plan, overrides, where=str(path))


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="fidelity.usage")
