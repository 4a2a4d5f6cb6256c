"""Training of a draft head, kept so that an interrupted run goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.errors import AssayError, UsageError
from assay_lab.heads.acceptance import Acceptance, accepted, autocast
from assay_lab.heads.drafting import batches, losses, padded
from assay_lab.heads.export import cannot_write
from assay_lab.heads.model import AnyHead
from assay_lab.heads.observed import observe
from assay_lab.heads.text import Written
from assay_lab.options import HeadTrainPlan

CHECKPOINT = "checkpoint.pt"
KEEP_SECONDS = 60.0
"""Between two checkpoints."""
MEASURED = 8
"""Times that acceptance is measured while a head learns."""
WARM_UP = 0.04


# Training.


@dataclass
class Run:
    """A run as its checkpoint holds it. `spent` seconds of training, and the curves by step."""

    plan: dict[str, Any]
    step: int = 0
    spent: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    acceptance: list[dict[str, Any]] = field(default_factory=list)


def _save(path: Path, run: Run, head: AnyHead, optimizer: torch.optim.Optimizer) -> None:
    partial = path.with_suffix(".partial")
    try:
        torch.save(
            {"run": vars(run), "head": head.state_dict(), "optimizer": optimizer.state_dict()},
            partial,
        )
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError for a full disk
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(path, error, f" (at step {run.step})") from error
        reason = OSError(0, str(error).partition("\n")[0][:120])
        raise cannot_write(path, reason, f" (at step {run.step})") from error


def _load(path: Path, plan: dict[str, Any], head: AnyHead, optimizer: torch.optim.Optimizer) -> Run:
    """The run to go on with. UsageError where the checkpoint is of another plan, AssayError where
    it is damaged.
    """
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
    head: AnyHead,
    target: Any,
    texts: Sequence[Written],
    held: Sequence[Written],
    plan: HeadTrainPlan,
    out: Path,
    facts: dict[str, Any],
    advance: Any = lambda: None,
) -> tuple[Run, bool]:
    """Train to the end, or until an interrupt, and say which: (the run, whether it is done). The
    checkpoint is in `out`.

    AssayError for a loss that is no number, and for a disk that is full.
    """
    weights = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        weights,
        lr=plan.lr,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        fused=target.device.type == "cuda",
    )
    path = out / CHECKPOINT
    run = _load(path, facts, head, optimizer)
    limit = plan.minutes * 60 if plan.minutes else math.inf
    orders: dict[int, list[list[int]]] = {}
    began, kept_at = time.monotonic() - run.spent, time.monotonic()
    recent: list[Any] = []

    def share() -> float:
        return min(1.0, max(run.step / plan.steps, (time.monotonic() - began) / limit))

    try:
        while (done := share()) < 1.0:
            per = len(orders.setdefault(0, _order(texts, plan.batch_tokens, plan.seed, 0)))
            epoch = run.step // per
            order = orders.setdefault(epoch, _order(texts, plan.batch_tokens, plan.seed, epoch))
            ids, mask = padded([texts[i].ids for i in order[run.step % per]], target.device)
            warm = done / WARM_UP if plan.minutes else (run.step + 1) / (WARM_UP * plan.steps)
            rate = min(warm, 0.5 * (1 + math.cos(math.pi * done)))
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
                _note(run, recent, plan)
            if share() >= (len(run.acceptance) + 1) / MEASURED and held:
                _note(run, recent, plan)
                _measure(run, head, target, held, plan)
            if time.monotonic() - kept_at > KEEP_SECONDS:
                _note(run, recent, plan)  # a checkpoint never holds a loss that is no number
                _save(path, run, head, optimizer)
                kept_at = time.monotonic()
        _note(run, recent, plan)
    except KeyboardInterrupt:
        _note(run, recent, plan)
        _save(path, run, head, optimizer)
        return run, False
    return run, True


def _note(run: Run, recent: list[Any], plan: HeadTrainPlan) -> None:
    """Add the mean of the `recent` losses to the curve; AssayError where it is no number."""
    if not recent:
        return
    loss = torch.stack([x.by_step for x in recent]).mean(0)
    agree = torch.stack([x.agreement for x in recent]).mean(0)
    run.curve.append(
        {
            "step": run.step,
            "loss": [round(x, 4) for x in loss.tolist()],
            "agreement": [round(x, 4) for x in agree.tolist()],
        }
    )
    recent.clear()
    if not math.isfinite(run.curve[-1]["loss"][0]):
        raise AssayError(
            f"the loss is no number at step {run.step} of {plan.steps}",
            finding_id="speculation.head_diverges",
            remedy=(
                f"lower --lr (it was {plan.lr:g}), or look for NaN in the target: assay"
                " verify MODEL --values"
            ),
        )


def _measure(
    run: Run, head: AnyHead, target: Any, held: Sequence[Written], plan: HeadTrainPlan
) -> None:
    part = [t for t in held if not t.temperature][:96]
    found = Acceptance.of(accepted(head, target, part, plan.depth, plan.batch_tokens))
    if found is not None:
        run.acceptance.append(
            {
                "step": run.step,
                "positions": [i.value for i in found.positions],
                "tokens_per_step": found.tokens_per_step.value,
            }
        )
