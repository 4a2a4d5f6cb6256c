"""`--text self`: text that the reference writes itself.

On it, fidelity is measured where the model really is when it serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from assay.engines import Capability, Engine, Reply, Request
from assay.engines.scoring import Sampler, ScoringEngine
from assay.errors import AssayError
from assay.fidelity.names import label_of
from assay.fidelity.plan import Plan
from assay.fidelity.text.sources import SELF, Text
from assay.progress import Advance, Progress
from assay.runs import keep_value, read_value

_ROUND = 16
"""Texts that are asked for at once."""


@runtime_checkable
class _Batched(Protocol):
    def generate_batch(self, requests: Sequence[Request]) -> list[Reply]: ...


def generate_text(
    engine: Engine,
    *,
    start: tuple[int, ...],
    tokens: int,
    per_text: int = 1024,
    seed: int = 0,
    advance: Advance = lambda: None,
) -> Text:
    """At least `tokens` tokens sampled at temperature 1 from `engine`, in texts of `per_text`
    tokens.

    `start` are the ids that every text continues: the start token, or the model's separator of
    documents. Text i has the seed `seed` + i, and goes on past the end-of-text token. `advance`
    is called after each text. AssayError where the engine writes nothing.
    """
    for needed in (Capability.TOKEN_IDS_PROMPT, Capability.IGNORE_EOS):
        engine.capabilities.require(needed, "text sampled from the reference")
    texts: list[str] = []
    written = 0
    while written < tokens:
        wanted = min(_ROUND, -(-(tokens - written) // per_text))
        replies = _generate(
            engine, [_request(start, per_text, seed + len(texts) + i) for i in range(wanted)]
        )
        new = sum(reply.completion_tokens or 0 for reply in replies)
        if new == 0:
            raise AssayError(
                "the reference wrote no text of its own",
                finding_id="fidelity.text_unusable",
                remedy="give a file with --text",
            )
        written += new
        texts += [reply.content for reply in replies]
        for _ in replies:
            advance()
    return Text((SELF,), "\n\n".join(texts))


def _request(start: tuple[int, ...], max_tokens: int, seed: int) -> Request:
    return Request(prompt=start, max_tokens=max_tokens, temperature=1.0, seed=seed, ignore_eos=True)


def _generate(engine: Engine, requests: list[Request]) -> list[Reply]:
    if isinstance(engine, _Batched):
        return engine.generate_batch(requests)
    return [engine.generate(request) for request in requests]


_SPARE = 1.05
"""Sampled ids that become text and ids again may be fewer, so a little more is written."""


@dataclass(frozen=True)
class OwnText:
    """Text of the reference's own, and what a result says of how it was sampled."""

    text: Text
    origin: Mapping[str, Any]


def write_own_text(
    plan: Plan, engine: ScoringEngine, progress: Progress, folder: Path | None = None
) -> OwnText | None:
    """What `engine` writes where the plan asks for that, None where it names other text.

    It is kept in `folder`, so that an interrupted run goes on with the same. AssayError where the
    engine cannot sample.
    """
    if plan.text != (SELF,):
        return None
    label = label_of(plan.reference)
    if not isinstance(engine, Sampler):
        raise AssayError(
            f"{label} cannot write the text of --text {SELF}: only hf: engines sample",
            finding_id="fidelity.text_unusable",
            remedy=(
                "give a file with --text, or let hf:MODEL write one and store it: assay reference"
                " --text self"
            ),
        )
    writer, start = engine.sampler()
    origin = {
        "sampled_from": label,
        "temperature": 1.0,
        "seed": plan.seed,
        "start_ids": list(start),
        "tokens_per_text": plan.length,
    }
    kept = folder / "self-text.json" if folder else None
    if kept and isinstance(known := read_value(kept), str):
        return OwnText(Text((SELF,), known), origin)
    wanted = int(_SPARE * plan.windows * plan.length) + plan.length
    with progress(f"sampling text from {label}", -(-wanted // plan.length)) as advance:
        text = generate_text(
            writer,
            start=start,
            tokens=wanted,
            per_text=plan.length,
            seed=plan.seed,
            advance=advance,
        )
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        keep_value(kept, text.text)
    return OwnText(text, origin)
