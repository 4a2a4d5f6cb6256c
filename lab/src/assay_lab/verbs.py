"""The verbs of the laboratory: `assay kv …`, `assay gap` and `assay heads …`, entries of the group
`assay.verbs`.

Each function says what it does, and calls the function that does it. Nothing of an engine is
imported before a verb runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from assay.cli.verb import Verb, check_writable, group, verb
from assay.verdict import Report

KV_HELP = (
    "KV-cache codecs: evaluate, sweep, calibrate, diagnose, attribute, allocate, serve, encode,"
    " decode."
)
HEADS_HELP = "Draft heads: train one for a target, measure it beside changed targets."
_MODEL = "hf:MODEL or a folder, with options after '?'."
_ANY_MODEL = "hf:MODEL (or a folder) or vllm:MODEL, with options after '?'."


def _command(
    name: str, plan: str = "", /, **arguments: str
) -> Callable[[Callable[..., Report]], Verb]:
    return verb(f"kv {name}", f"assay_lab.options:{plan}" if plan else "", **arguments)


@_command("list")
def list_codecs() -> Report:
    """Name the codecs and wrappers, with their parameters."""
    from assay_lab.kv.listing import run_list

    return run_list()


@_command("eval", "EvalPlan", model=_ANY_MODEL)
def evaluate(**given: Any) -> Report:
    """Score a model with a codec in its KV cache against itself without; count the bytes of the
    streams.

    Exit code 0 ACCEPT, 1 MARGINAL or REJECT, 2 could not be examined, 3 inconclusive.
    """
    from assay.cli.progress import show
    from assay_lab.kv.eval import run_eval
    from assay_lab.kv.packed_eval import run_packed
    from assay_lab.kv.pages import CODEC
    from assay_lab.options import EvalPlan

    plan = EvalPlan.of(given)
    return run_packed(plan, show) if plan.codec == CODEC else run_eval(plan, show)


@_command("sweep", "SweepPlan", model=_MODEL)
def sweep(**given: Any) -> Report:
    """Measure many codecs on one reference: which are worth their bytes, and does the best one hold
    on fresh text?

    Goes on where an interrupted run stopped. Exit code 0 one is accepted or MARGINAL, on fresh text
    too, 1 all are REJECT, 2 could not be examined, 3 inconclusive.
    """
    from assay.cli.progress import show
    from assay_lab.kv.sweep import run_sweep
    from assay_lab.options import SweepPlan

    plan = SweepPlan.of(given)
    if plan.out:
        check_writable("out", plan.out)
    return run_sweep(plan, show)


@_command("calibrate", "CalibrationPlan", model=_ANY_MODEL)
def calibrate(**given: Any) -> Report:
    """Learn from text what codecs need to know of a model's keys and values. Never evaluate on that
    text.

    Exit code 0 written, 2 could not be written.
    """
    from assay.cli.progress import show
    from assay_lab.kv.calibrate import run_calibrate
    from assay_lab.options import CalibrationPlan

    plan = CalibrationPlan.of(given)
    check_writable("out", plan.out)
    return run_calibrate(plan, show)


@_command("diagnose", "DiagnosisPlan", model=_MODEL)
def diagnose(**given: Any) -> Report:
    """Say where a codec's error comes from: by layer, head and stage, and what attention makes of
    it.

    Exit code 0 measured, with any result; 2 could not be examined.
    """
    from assay.cli.progress import show
    from assay_lab.kv.diagnose.verb import run_diagnose
    from assay_lab.options import DiagnosisPlan

    return run_diagnose(DiagnosisPlan.of(given), show)


@_command("attribute", "AttributionPlan", model=_MODEL)
def attribute(**given: Any) -> Report:
    """Code every layer and stream alone, then all together: what hurts, and does it add up?

    Goes on where an interrupted run stopped. Exit code 0 measured, 2 could not be examined, 3 the
    time was too short.
    """
    from assay.cli.progress import show
    from assay_lab.kv.attribute import run_attribute
    from assay_lab.options import AttributionPlan

    return run_attribute(AttributionPlan.of(given), show)


@_command("allocate", "AllocationPlan", model=_MODEL)
def allocate(**given: Any) -> Report:
    """Give every layer and stream its bits under a budget of bytes, from measured sensitivity;
    measure the choice again.

    Goes on where an interrupted run stopped. Exit code 0 allocated, 2 could not be examined, 3 the
    time was too short.
    """
    from assay.cli.progress import show
    from assay_lab.kv.allocate import run_allocate
    from assay_lab.options import AllocationPlan

    return run_allocate(AllocationPlan.of(given), show)


@_command("noise", "NoisePlan", model=_MODEL)
def noise(**given: Any) -> Report:
    """Put noise of known size into the KV cache: how much error does the model bear, and where?

    Goes on where an interrupted run stopped. Exit code 0 measured, 2 could not be examined.
    """
    from assay.cli.progress import show
    from assay_lab.kv.noise import run_noise
    from assay_lab.options import NoisePlan

    return run_noise(NoisePlan.of(given), show)


@_command(
    "serve",
    "ServePlan",
    model="Checkpoint that vLLM serves.",
    options="After `--`: options of vLLM's own server.",
)
def serve(options: list[str] | None = None, **given: Any) -> Report:
    """Serve a model with vLLM and a codec in its KV cache; refuses what would give wrong numbers.

    The command is printed and run: `assay kv serve MODEL --codec SPEC -- --port 8001
    --max-model-len 4096`. With --tier stream the cache stays exact; full blocks are also kept in
    the codec and read back for a request with the same prefix. Exit code 0 the server ran to its
    end, 2 it was refused or failed.
    """
    from assay_lab.kv.serve import run_serve
    from assay_lab.options import ServePlan

    plan = ServePlan.of({**given, "options": options or ()})
    return run_serve(plan, lambda line: print(line, file=sys.stderr, flush=True))


@_command(
    "encode",
    "EncodePlan",
    source="KKTV file, or a safetensors file of [KV heads, tokens, head_dim].",
)
def encode(**given: Any) -> Report:
    """Encode a tensor of keys or values to its serialised stream, and say what was lost.

    Exit code 0 written, 2 could not be written.
    """
    from assay_lab.kv.files import run_encode
    from assay_lab.options import EncodePlan

    return run_encode(EncodePlan.of(given))


@_command("decode", "DecodePlan", source="Stream that `assay kv encode` wrote.")
def decode(**given: Any) -> Report:
    """Decode a stream with the codec that its header names.

    Exit code 0 written, 2 could not be written.
    """
    from assay_lab.kv.files import run_decode
    from assay_lab.options import DecodePlan

    return run_decode(DecodePlan.of(given))


KV_COMMANDS = (
    list_codecs,
    evaluate,
    sweep,
    calibrate,
    diagnose,
    attribute,
    allocate,
    noise,
    serve,
    encode,
    decode,
)


@verb(
    "gap",
    "assay_lab.options:GapOptions",
    reference="hf:MODEL or vllm:MODEL, with options after '?'.",
    candidate="The other side: the same, or gguf:FILE.",
)
def gap(**given: Any) -> Report:
    """Take the difference of two deployments apart into buckets that sum, with intervals, and
    measure what would help.

    Exit code 0 explained and within the margin, 1 outside it or another set-up, 2 could not be
    examined, 3 inconclusive.
    """
    from assay.cli.progress import show
    from assay_lab.gap.gap import run_gap
    from assay_lab.gap.plan import GapPlan

    return run_gap(GapPlan.of(given), show)


@verb(
    "heads train",
    "assay_lab.options:HeadTrainPlan",
    model="hf:MODEL or a folder, with options after '?'.",
)
def heads_train(**given: Any) -> Report:
    """Train a draft head on text that the target writes itself, and export it for vLLM.

    Goes on where an interrupted run stopped. Exit code 0 trained, 2 could not be trained, 3 too
    little to measure.
    """
    from assay.cli.progress import show
    from assay_lab.heads.report import run_train
    from assay_lab.options import HeadTrainPlan

    return run_train(HeadTrainPlan.of(given), show)


@verb(
    "heads try", "assay_lab.options:HeadTryPlan", model="The head's target: hf:MODEL or a folder."
)
def heads_try(**given: Any) -> Report:
    """Measure one head beside changed targets and KV caches, and in the states in which loaders
    leave heads.

    Goes on where an interrupted run stopped. Exit code 0 measured, 2 could not be measured.
    """
    from assay.cli.progress import show
    from assay_lab.heads.experiment import run_try
    from assay_lab.options import HeadTryPlan

    return run_try(HeadTryPlan.of(given), show)


@verb(
    "heads pack", "assay_lab.options:HeadPackPlan", model="The head's target: hf:MODEL or a folder."
)
def heads_pack(**given: Any) -> Report:
    """Put a head into one file with the digests of what it holds; it is trained first where the
    cache has none.

    Exit code 0 packed, 2 could not be packed.
    """
    from assay.cli.progress import show
    from assay_lab.heads.pack import run_pack
    from assay_lab.options import HeadPackPlan

    return run_pack(HeadPackPlan.of(given), show)


HEADS_COMMANDS = (heads_train, heads_try, heads_pack)

KV = group("kv", KV_HELP, {c.name.removeprefix("kv "): c for c in KV_COMMANDS})
HEADS = group("heads", HEADS_HELP, {c.name.removeprefix("heads "): c for c in HEADS_COMMANDS})
