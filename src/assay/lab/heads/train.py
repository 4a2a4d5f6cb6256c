"""`assay heads train`: the target writes text, a head learns to guess it, and what it accepts is measured as it learns."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.engines.hf.engine import HfEngine
from assay.engines.hf.spec import parse_spec
from assay.errors import AssayError, UsageError
from assay.lab.heads.model import (
    Head,
    HeadConfig,
    Walk,
    batches,
    cannot_write,
    draft,
    losses,
    observe,
    padded,
    start,
    target_facts,
    walk,
    write_head,
)
from assay.lab.heads.text import (
    CHUNK,
    HELD_OUT,
    KINDS,
    TEMPERATURES,
    Written,
    draft_vocabulary,
    end_ids,
    prompts,
    with_transformers,
    with_vllm,
    written,
)
from assay.lab.options import HeadTrainPlan
from assay.progress import NO_PROGRESS, Progress
from assay.runs import Kept, cache_path
from assay.stats.cluster import cluster_proportion, cluster_ratio
from assay.stats.intervals import Interval
from assay.verdict import Chart, Finding, Metric, Point, Report, Series, Severity, Table, Verdict

CHECKPOINT = "checkpoint.pt"
KEEP_SECONDS = 60.0
"""Between two checkpoints."""
MEASURED = 8
"""Times that acceptance is measured while a head learns."""
WARM_UP = 0.04


# Acceptance on texts that the target wrote.


@dataclass(frozen=True)
class Acceptance:
    """Over steps of speculative decoding: shares accepted by position and tokens a step, clustered by prompt."""

    positions: tuple[Interval, ...]
    tokens_per_step: Interval
    steps: int
    prompts: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, walks: Sequence[Walk]) -> Acceptance | None:
        """None where no text was long enough for a step. Position j counts against all steps, as vLLM's log does."""
        walks = [w for w in walks if w.steps]
        if not walks:
            return None
        steps = [w.steps for w in walks]
        by = list(zip(*(w.accepted for w in walks), strict=True))
        return cls(
            tuple(cluster_proportion(own, steps).interval for own in by),
            cluster_ratio([w.steps + sum(w.accepted) for w in walks], steps).interval,
            sum(steps), len(walks), tuple(map(sum, by)),
        )  # fmt: skip


def accepted(
    head: Head, target: Any, texts: Sequence[Written], depth: int, tokens: int, embed: Any = None
) -> list[Walk]:
    """What `depth` greedy drafts a step get accepted of each text; `tokens` of a batch; `embed` in place of the target's."""
    embed = embed or target.get_input_embeddings()
    ids = [t.ids for t in texts]
    walks: dict[int, Walk] = {}
    for part in batches(ids, tokens):
        seen = observe(target, *padded([ids[i] for i in part], target.device), head.config.aux_layers)
        with autocast(target):
            drafts = draft(head, embed, seen, depth).tolist()
        for i, own in zip(part, drafts, strict=True):
            walks[i] = walk(ids[i], own, texts[i].begin)
    return [walks[i] for i in range(len(texts))]


def autocast(target: Any) -> torch.autocast:
    """The head's weights are float32; its products have the target's type."""
    return torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=target.dtype == torch.bfloat16)


# Training.


@dataclass
class Run:
    """A run as its checkpoint holds it. `spent` seconds of training, and the curves by step."""

    plan: dict[str, Any]
    step: int = 0
    spent: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    acceptance: list[dict[str, Any]] = field(default_factory=list)


def _save(path: Path, run: Run, head: Head, optimizer: torch.optim.Optimizer) -> None:
    partial = path.with_suffix(".partial")
    try:
        torch.save(
            {"run": vars(run), "head": head.state_dict(), "optimizer": optimizer.state_dict()}, partial
        )
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError for a full disk
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(path, error, f" (at step {run.step})") from error
        reason = OSError(0, str(error).partition("\n")[0][:120])
        raise cannot_write(path, reason, f" (at step {run.step})") from error


def _load(path: Path, plan: dict[str, Any], head: Head, optimizer: torch.optim.Optimizer) -> Run:
    """The run to go on with. UsageError where the checkpoint is of another plan, AssayError where it is damaged."""
    if not path.exists():
        return Run(plan)
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        theirs = held["run"]["plan"]
    except Exception as error:  # a pickle or zip that is damaged raises what it likes
        raise AssayError(
            f"the checkpoint {path} is damaged",
            finding_id="speculation.head_checkpoint",
            remedy="delete it: training then begins again, on the text that is kept",
        ) from error
    if wrong := sorted(k for k in {*theirs, *plan} if theirs.get(k) != plan.get(k)):
        raise UsageError(
            f"{path} is of another run: it differs in {', '.join(wrong)}",
            remedy="name another folder with --out, or delete the checkpoint",
            finding_id="speculation.usage",
        )
    head.load_state_dict(held["head"])
    optimizer.load_state_dict(held["optimizer"])
    return Run(**held["run"])


def _order(texts: Sequence[Written], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch, in an order of their own."""
    found = list(batches([t.ids for t in texts], tokens))
    np.random.default_rng([seed, epoch]).shuffle(found)
    return found


def train(
    head: Head, target: Any, texts: Sequence[Written], held: Sequence[Written], plan: HeadTrainPlan, out: Path, facts: dict[str, Any],
    advance: Any = lambda: None,
) -> tuple[Run, bool]:  # fmt: skip
    """Train to the end, or until an interrupt, and say which: (the run, whether it is done). The checkpoint is in `out`.

    AssayError for a loss that is no number, and for a disk that is full.
    """
    weights = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=target.device.type == "cuda"
    )
    path = out / CHECKPOINT
    run = _load(path, facts, head, optimizer)
    limit = plan.minutes * 60 if plan.minutes else math.inf
    orders: dict[int, list[list[int]]] = {}
    began, kept_at = time.monotonic() - run.spent, time.monotonic()
    recent: list[Any] = []

    def share() -> float:
        return min(1.0, max(run.step / plan.steps, (time.monotonic() - began) / limit))

    def note() -> None:
        if recent:
            loss = torch.stack([x.by_step for x in recent]).mean(0)
            agree = torch.stack([x.agreement for x in recent]).mean(0)
            run.curve.append(
                {"step": run.step, "loss": [round(x, 4) for x in loss.tolist()], "agreement": [round(x, 4) for x in agree.tolist()]}
            )  # fmt: skip
            recent.clear()
            if not math.isfinite(run.curve[-1]["loss"][0]):
                raise AssayError(
                    f"the loss is no number at step {run.step} of {plan.steps}",
                    finding_id="speculation.head_diverges",
                    remedy=f"lower --lr (it was {plan.lr:g}), or look for NaN in the target: assay verify MODEL --values",
                )

    try:
        while (done := share()) < 1.0:
            per = len(orders.setdefault(0, _order(texts, plan.batch_tokens, plan.seed, 0)))
            epoch = run.step // per
            order = orders.setdefault(epoch, _order(texts, plan.batch_tokens, plan.seed, epoch))
            ids, mask = padded([texts[i].ids for i in order[run.step % per]], target.device)
            rate = min(done / WARM_UP, 0.5 * (1 + math.cos(math.pi * done))) if limit < math.inf else (
                min((run.step + 1) / (WARM_UP * plan.steps), 0.5 * (1 + math.cos(math.pi * done)))
            )  # fmt: skip
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * max(rate, 0.01)
            seen = observe(target, ids, mask, head.config.aux_layers)
            with autocast(target):
                found = losses(head, target, seen, plan.depth)
            optimizer.zero_grad(set_to_none=True)
            found.total.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            run.step += 1
            run.spent = time.monotonic() - began
            recent.append(found)
            advance()
            if len(recent) >= 20:
                note()
            if share() >= (len(run.acceptance) + 1) / MEASURED and held:
                note()
                _measure(run, head, target, held, plan)
            if time.monotonic() - kept_at > KEEP_SECONDS:
                note()  # a checkpoint never holds a loss that is no number
                _save(path, run, head, optimizer)
                kept_at = time.monotonic()
        note()
    except KeyboardInterrupt:
        note()
        _save(path, run, head, optimizer)
        return run, False
    return run, True


def _measure(run: Run, head: Head, target: Any, held: Sequence[Written], plan: HeadTrainPlan) -> None:
    part = [t for t in held if not t.temperature][:96]
    found = Acceptance.of(accepted(head, target, part, plan.depth, plan.batch_tokens))
    if found is not None:
        run.acceptance.append(
            {"step": run.step, "positions": [i.value for i in found.positions], "tokens_per_step": found.tokens_per_step.value}
        )  # fmt: skip


# The verb.


def run_train(plan: HeadTrainPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Write text, train, export, measure. Goes on where an interrupted run of the same plan stopped."""
    if plan.kind == "mtp":
        raise UsageError(
            "no MTP head can be served beside Llama or Qwen2: vLLM has MTP modules for other architectures only",
            remedy="train --kind eagle3; MiMo's module is the nearest, and it makes the target another architecture",
            finding_id="speculation.head_layout",
        )
    spec = parse_spec(plan.model)
    folder = Path(spec.model)
    out = plan.out or cache_path("heads") / folder.name
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(out, error) from error
    with HfEngine.load(spec) as engine:
        target, tokenizer = engine.model, engine.tokenizer
        target.requires_grad_(False)
        HeadConfig.of_target(target, plan.draft_vocab)  # refuse before text is written
        source = target_facts(folder)
        texts, held, kept = _texts(plan, out, spec.model, target, tokenizer, source, progress)
        ids, covered = draft_vocabulary(
            texts, target.config.vocab_size, plan.draft_vocab or target.config.vocab_size
        )
        torch.manual_seed(plan.seed)
        config = HeadConfig.of_target(target, len(ids), plan.intermediate)
        head = Head(config, ids)
        with torch.no_grad():
            first = observe(target, *padded([t.ids for t in texts[:8]], target.device), config.aux_layers)
            rms = first.aux[first.mask].float().view(-1, len(config.aux_layers), config.hidden_size)
        start(head.to(target.device), target, rms.square().mean(-1).median(0).values.sqrt())
        facts = plan.facts() | {"model": source, "text_tokens": sum(len(t.ids) for t in texts)}
        facts = {k: list(v) if isinstance(v, tuple) else v for k, v in facts.items()}
        with progress("training the head", plan.steps) as advance:
            run, done = train(head, target, texts, held, plan, out, facts, advance)
        training = {
            "target": source, "plan": facts, "steps": run.step, "seconds": round(run.spent, 1), "covered": covered,
            "loss_curve": run.curve, "acceptance_curve": run.acceptance,
        }  # fmt: skip
        greedy = [t for t in held if not t.temperature]
        walks = accepted(head, target, greedy, plan.depth, plan.batch_tokens)
    by = {
        kind: Acceptance.of([w for w, t in zip(walks, greedy, strict=True) if t.kind == kind])
        for kind in KINDS
    }
    by = {"all": Acceptance.of(walks)} | by
    training["acceptance"] = {k: vars(a) for k, a in by.items() if a is not None}
    size = write_head(out, head, _plain(training))
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
    write, chunk = with_transformers(target, tokenizer), CHUNK.get(target.device.type, 64)
    if plan.python:
        ends = end_ids(target, tokenizer)
        write, chunk = with_vllm(Path(plan.python), model, ends), -(-len(rest) // len(TEMPERATURES))
    kept = Kept(out / "text", ["heads", source, "vllm" if plan.python else "transformers"])
    limit = time.monotonic() + (plan.text_minutes * 60 if plan.text_minutes else math.inf)
    with progress("the target writes text", -(-len(rest) // chunk) + 1) as advance:
        held = written(
            apart,
            with_transformers(target, tokenizer),
            plan.tokens,
            (0.0,),
            kept,
            advance=advance,
            chunk=chunk,
        )
        texts = written(
            rest, write, plan.tokens, TEMPERATURES, kept, lambda n: time.monotonic() > limit, advance, chunk
        )
    if not texts:
        raise AssayError(
            "the target wrote nothing to learn from: every answer ended within 8 tokens",
            finding_id="speculation.head_text",
            remedy="look at its text: assay check URL",
        )
    return texts, held, kept


def _report(
    plan: HeadTrainPlan, out: Path, run: Run, done: bool, by: dict[str, Acceptance | None], training: dict[str, Any], size: int, kept: Kept
) -> Report:  # fmt: skip
    whole = by["all"]
    findings = list(kept.notices("speculation"))
    if not done:
        findings.append(
            Finding(
                "speculation.interrupted",
                Severity.WARNING,
                f"interrupted at step {run.step} of {plan.steps}: the same command goes on from there",
            )
        )
    if training["covered"] < 0.97:
        findings.append(
            Finding(
                "speculation.draft_vocabulary",
                Severity.WARNING,
                f"the draft vocabulary covers {100 * training['covered']:.1f} % of what the target writes",
                remedies=("raise --draft-vocab: what it lacks is never accepted",),
            )
        )
    metrics = [Metric("head", str(out), note=f"{size / 1e6:.1f} MB, {run.step} steps in {run.spent:.0f} s")]
    rows = []
    for kind, a in by.items():
        if a is not None:
            rows.append([kind, *(percent(p) for p in a.positions), ratio(a.tokens_per_step), str(a.prompts)])
    if whole is not None:
        metrics += [
            Metric("position 0", percent(whole.positions[0]), note="held-out prompts, greedy"),
            Metric("tokens per step", ratio(whole.tokens_per_step), note=f"{plan.depth} drafts a step"),
        ]
    columns = ["text", *(f"position {j}" for j in range(plan.depth)), "tokens per step", "prompts"]
    note = "Share of all steps whose drafts were right up to this position; intervals by prompt."
    blocks: list[Any] = [
        Table("Accepted of greedy text", columns, rows, frozenset(range(1, len(columns))), note)
    ]
    if run.curve:
        blocks += [
            Chart(
                "Loss by step of the chain", "line",
                [Series(f"step {j}", [Point(c["step"], c["loss"][j]) for c in run.curve]) for j in range(plan.depth)],
                "steps of training", "cross-entropy",
            ),
            Chart(
                "Accepted by position while training", "line",
                [Series(f"position {j}", [Point(a["step"], a["positions"][j]) for a in run.acceptance]) for j in range(plan.depth)],
                "steps of training", "share",
            ),
        ]  # fmt: skip
    verdict = Verdict.PASS if done and whole is not None else Verdict.INCONCLUSIVE
    return Report(
        command="heads train", verdict=verdict, subject={"model": training["target"]["name"], "kind": plan.kind},
        findings=findings, results={"head": str(out), "bytes": size, **training, "done": done}, headline=metrics,
        blocks=blocks, interrupted=not done,
        summary="" if findings else "the head is trained: hold it against its target with assay verify HEAD --target MODEL",
    )  # fmt: skip


def percent(i: Interval) -> str:
    """A share with its interval."""
    return f"{100 * i.value:.1f} % [{100 * max(i.lo, 0):.1f}, {100 * min(i.hi, 1):.1f}]"


def ratio(i: Interval) -> str:
    """A ratio with its interval."""
    return f"{i.value:.2f} [{i.lo:.2f}, {i.hi:.2f}]"
