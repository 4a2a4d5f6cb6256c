"""`assay heads train`: train a head, and report what it does."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from assay.engines.hf.engine import HfEngine
from assay.engines.hf.spec import parse_hf
from assay.engines.ray_scorer import Pool
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay.runs import Kept, cache_path
from assay.stats import Interval
from assay.verdict import Chart, Finding, Metric, Point, Report, Series, Severity, Table, Verdict
from assay_lab.heads.acceptance import Acceptance, accepted
from assay_lab.heads.drafting import padded
from assay_lab.heads.export import cannot_write, target_facts, write_head
from assay_lab.heads.model import AnyHead, Head, HeadConfig, MtpHead
from assay_lab.heads.observed import observe
from assay_lab.heads.prompts import HELD_OUT, KINDS, chunk_of, prompts
from assay_lab.heads.text import (
    TEMPERATURES,
    Written,
    draft_vocabulary,
    end_ids,
    generate_texts,
    on_workers,
    side_by_side,
    with_transformers,
    with_vllm,
)
from assay_lab.heads.training import CHECKPOINT, Run, train
from assay_lab.options import HeadTrainPlan


def run_train(plan: HeadTrainPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Write text, train, export, measure. Goes on where an interrupted run of the same plan
    stopped.
    """
    if plan.ray and plan.python:
        raise plan.usage(
            "--python writes the text with one vLLM, --ray with transformers in workers",
            "give one of the two",
        )
    spec = parse_hf(plan.model)
    folder = Path(spec.model)
    out = plan.out or cache_path("heads") / folder.name
    if out.resolve() == folder.resolve():
        raise plan.usage(
            "--out is the folder of the target, whose files the head's would replace",
            "name another folder",
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(out, error) from error
    with HfEngine.load(spec) as engine:
        target, tokenizer = engine.model, engine.tokenizer
        target.requires_grad_(False)
        HeadConfig.of_target(
            target, plan.draft_vocab, plan.intermediate, plan.kind
        )  # refuse before text is written
        source = target_facts(folder)
        texts, held, kept = _texts(plan, out, spec.model, target, tokenizer, source, progress)
        torch.manual_seed(plan.seed)
        if plan.kind == "mtp":
            head: AnyHead = MtpHead(HeadConfig.of_target(target, 0, plan.intermediate, plan.kind))
            covered = 1.0
        else:
            vocab = target.config.vocab_size
            ids, covered = draft_vocabulary(texts, vocab, plan.draft_vocab or vocab)
            head = Head(HeadConfig.of_target(target, len(ids), plan.intermediate), ids)
        config = head.config
        with torch.no_grad():
            first = observe(
                target, *padded([t.ids for t in texts[:8]], target.device), config.aux_layers
            )
            rms = first.aux[first.mask].float().view(-1, len(config.aux_layers), config.hidden_size)
        head.to(target.device).start(target, rms.square().mean(-1).median(0).values.sqrt())
        facts = plan.facts() | {"model": source, "text_tokens": sum(len(t.ids) for t in texts)}
        facts = {k: list(v) if isinstance(v, tuple) else v for k, v in facts.items()}
        with progress("training the head", plan.steps) as advance:
            run, done = train(head, target, texts, held, plan, out, facts, advance)
        training = {
            "target": source,
            "plan": facts,
            "steps": run.step,
            "seconds": round(run.spent, 1),
            "covered": covered,
            "loss_curve": run.curve,
            "acceptance_curve": run.acceptance,
        }
        greedy = [t for t in held if not t.temperature]
        walks = accepted(head, target, greedy, plan.depth, plan.batch_tokens)
    by = {
        kind: Acceptance.of([w for w, t in zip(walks, greedy, strict=True) if t.kind == kind])
        for kind in KINDS
    }
    by = {"all": Acceptance.of(walks)} | by
    training["acceptance"] = {k: vars(a) for k, a in by.items() if a is not None}
    size = write_head(out, head, _plain(training), target=folder)
    if done:
        (out / CHECKPOINT).unlink(missing_ok=True)
    return _report(plan, out, run, done, by, training, size, kept)


def _plain(training: dict[str, Any]) -> dict[str, Any]:
    from assay.verdict import jsonable

    result: dict[str, Any] = jsonable(training)
    return result


def _texts(
    plan: HeadTrainPlan,
    out: Path,
    model: str,
    target: Any,
    tokenizer: Any,
    source: dict[str, str],
    progress: Progress,
) -> tuple[list[Written], list[Written], Kept]:
    """(texts to train on, texts held out, where they are kept)."""
    asked = prompts(tokenizer, plan.prompts, plan.text, plan.seed)
    apart = [p for i, p in enumerate(asked) if i % HELD_OUT == 0]
    rest = [p for i, p in enumerate(asked) if i % HELD_OUT]
    write, chunk = with_transformers(target, tokenizer), chunk_of(target)
    if plan.python:
        ends = end_ids(target, tokenizer)
        write, chunk = with_vllm(Path(plan.python), model, ends), -(-len(rest) // len(TEMPERATURES))
    kept = Kept(out / "text", ["heads", source, "vllm" if plan.python else "transformers"])
    limit = time.monotonic() + (plan.text_minutes * 60 if plan.text_minutes else math.inf)
    with ExitStack() as stack:
        spread = None
        if plan.ray:
            pool = stack.enter_context(Pool(plan.ray, plan.workers, progress))
            spread = on_workers(pool, plan.model)
        advance = stack.enter_context(
            progress("the target writes text", -(-len(rest) // chunk) + 1)
        )
        held = generate_texts(
            apart,
            with_transformers(target, tokenizer),
            plan.tokens,
            (0.0,),
            kept,
            advance=advance,
            chunk=chunk,
        )
        if spread:
            write = side_by_side(rest, write, plan.tokens, TEMPERATURES, kept, chunk, spread)
        texts = generate_texts(
            rest,
            write,
            plan.tokens,
            TEMPERATURES,
            kept,
            lambda n: time.monotonic() > limit,
            advance,
            chunk,
        )
    if not texts:
        raise AssayError(
            "the target wrote nothing to learn from: every answer ended within 8 tokens",
            finding_id="speculation.head_text",
            remedy="look at its text: assay check URL",
        )
    return texts, held, kept


def _report(
    plan: HeadTrainPlan,
    out: Path,
    run: Run,
    done: bool,
    by: dict[str, Acceptance | None],
    training: dict[str, Any],
    size: int,
    kept: Kept,
) -> Report:
    whole = by["all"]
    findings = list(kept.notices("speculation"))
    if not done:
        findings.append(
            Finding(
                "speculation.interrupted",
                Severity.WARNING,
                f"interrupted at step {run.step} of {plan.steps}: the same command goes on from"
                " there",
            )
        )
    if training["covered"] < 0.97:
        findings.append(
            Finding(
                "speculation.draft_vocabulary",
                Severity.WARNING,
                f"the draft vocabulary covers {100 * training['covered']:.1f} % of what the target"
                " writes",
                remedies=("raise --draft-vocab: what it lacks is never accepted",),
            )
        )
    metrics = [
        Metric("head", str(out), note=f"{size / 1e6:.1f} MB, {run.step} steps in {run.spent:.0f} s")
    ]
    rows = []
    for kind, a in by.items():
        if a is not None:
            rows.append(
                [kind, *(percent(p) for p in a.positions), ratio(a.tokens_per_step), str(a.prompts)]
            )
    if whole is not None:
        metrics += [
            Metric("position 0", percent(whole.positions[0]), note="held-out prompts, greedy"),
            Metric(
                "tokens per step", ratio(whole.tokens_per_step), note=f"{plan.depth} drafts a step"
            ),
        ]
    columns = ["text", *(f"position {j}" for j in range(plan.depth)), "tokens per step", "prompts"]
    note = "Share of all steps whose drafts were right up to this position; intervals by prompt."
    blocks: list[Any] = [
        Table("Accepted of greedy text", columns, rows, frozenset(range(1, len(columns))), note)
    ]
    blocks += _charts(run, plan.depth)
    held = "assay verify HEAD" + ("" if plan.kind == "mtp" else " --target MODEL")
    verdict = Verdict.PASS if done and whole is not None else Verdict.INCONCLUSIVE
    return Report(
        command="heads train",
        verdict=verdict,
        subject={"model": training["target"]["name"], "kind": plan.kind},
        findings=findings,
        results={"head": str(out), "bytes": size, **training, "done": done},
        headline=metrics,
        blocks=blocks,
        interrupted=not done,
        summary="" if findings else f"the head is trained: hold it against its target with {held}",
    )


def _charts(run: Run, depth: int) -> list[Any]:
    """Loss and acceptance while training; none before the first loss."""
    if not run.curve:
        return []
    return [
        Chart(
            "Loss by step of the chain",
            "line",
            [
                Series(f"step {j}", [Point(c["step"], c["loss"][j]) for c in run.curve])
                for j in range(depth)
            ],
            "steps of training",
            "cross-entropy",
        ),
        Chart(
            "Accepted by position while training",
            "line",
            [
                Series(
                    f"position {j}", [Point(a["step"], a["positions"][j]) for a in run.acceptance]
                )
                for j in range(depth)
            ],
            "steps of training",
            "share",
        ),
    ]


def percent(i: Interval) -> str:
    """A share with its interval."""
    return f"{100 * i.value:.1f} % [{100 * max(i.lo, 0):.1f}, {100 * min(i.hi, 1):.1f}]"


def ratio(i: Interval) -> str:
    """A ratio with its interval."""
    return f"{i.value:.2f} [{i.lo:.2f}, {i.hi:.2f}]"
