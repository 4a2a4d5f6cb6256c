"""`assay heads try`: one head beside changed targets, changed KV caches, and in the states in which
loaders leave heads.

Every target variant writes its own text on the held-out prompts; the head drafts on the variant's
own states; a walk over the text counts what an engine would (`drafting.walk`: exact at temperature
0, and at others for greedy drafts). Weights are quantised and dequantised in place, keys and values
where attention reads them. Each row also has the variant's KL and total variation to the unchanged
target on that target's text: a verifier accepts a draft from p with probability 1 − TV(p, q) at
best (Leviathan et al. 2023, arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from assay.engines.hf.engine import HfEngine
from assay.engines.hf.spec import parse_hf
from assay.errors import UsageError
from assay.progress import NO_PROGRESS, Progress
from assay.runs import KeptFile
from assay.stats import cluster_ratio
from assay.verdict import Metric, Report, Table, Verdict, jsonable
from assay_lab.heads.acceptance import Acceptance, accepted
from assay_lab.heads.distance import Distance, distance, last_states
from assay_lab.heads.export import read_head, target_facts
from assay_lab.heads.head_states import HEADS, WORKING, head_state
from assay_lab.heads.model import AnyHead
from assay_lab.heads.prompts import HELD_OUT, chunk_of, prompts
from assay_lab.heads.report import percent, ratio
from assay_lab.heads.targets import CACHES, TARGETS, calibration_texts, changed
from assay_lab.heads.text import Written, generate_texts, with_transformers
from assay_lab.options import HeadTryPlan


class _Swapped(nn.Module):  # type: ignore[misc]
    """An embedding whose rows are another model's: here in another order."""

    def __init__(self, embed: Any) -> None:
        super().__init__()
        self.embed = embed
        self.order = torch.randperm(
            embed.num_embeddings, generator=torch.Generator().manual_seed(11)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embed(self.order.to(ids.device)[ids])
        return out


def run_try(plan: HeadTryPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Measure all rows, each kept in `plan.out` as it is measured; the same command goes on where
    it stopped.
    """
    spec = parse_hf(plan.model)
    head = read_head(plan.head, Path(spec.model))
    unknown = [n for n in plan.heads if n not in HEADS]
    if unknown:
        raise UsageError(
            f"unknown head {unknown[0]!r}", remedy=", ".join(HEADS), finding_id="speculation.usage"
        )
    facts = plan.facts() | {"model": target_facts(Path(spec.model)), "head": plan.head.name}
    for name in ("targets", "heads"):
        facts.pop(name, None)
    kept = KeptFile(plan.out, jsonable(facts), "assay-heads/1", "speculation.usage")
    rows: dict[str, Any] = {}
    targets, heads = plan.targets or TARGETS, plan.heads or tuple(HEADS)
    with HfEngine.load(spec) as engine, progress("targets", len(targets) * 2) as advance:
        target, tokenizer = engine.model, engine.tokenizer
        head = head.to(target.device).eval()
        if target.dtype == torch.bfloat16:
            head = head.to(torch.bfloat16)
        every = prompts(tokenizer, plan.prompts, plan.text, plan.seed)
        asked = every[::HELD_OUT][: plan.texts]
        own = with_transformers(target, tokenizer)

        @cache
        def calibration() -> list[list[int]]:
            return calibration_texts(every, own, plan.tokens)

        chunk = chunk_of(target)
        reference: dict[float, tuple[list[Written], list[torch.Tensor]]] = {}
        for name in targets:
            for temperature in plan.temperatures:
                wanted = [h for h in heads if h in WORKING or name in plan.dead_beside]
                if all(f"{name}|{h}|{temperature:g}" in kept for h in wanted):
                    rows |= {
                        k: kept.have(k, dict)
                        for h in wanted
                        for k in [f"{name}|{h}|{temperature:g}"]
                    }
                    advance()
                    continue
                if temperature not in reference:
                    texts = generate_texts(
                        asked, own, plan.tokens, (temperature,), None, chunk=chunk
                    )
                    reference[temperature] = (texts, last_states(target, texts, plan.batch_tokens))
                on, before = reference[temperature]
                with changed(target, name, calibration):
                    texts = on if name == "bf16" else generate_texts(
                        asked, own, plan.tokens, (temperature,), None, chunk=chunk
                    )  # fmt: skip
                    apart = distance(target, before, last_states(target, on, plan.batch_tokens))
                    for state in wanted:
                        key = f"{name}|{state}|{temperature:g}"
                        rows[key] = kept.have(
                            key, partial(_row, plan, head, target, state, texts, apart, name)
                        )
                advance()
    return _report(plan, rows)


def _row(
    plan: HeadTryPlan,
    head: AnyHead,
    target: Any,
    state: str,
    texts: list[Written],
    apart: Distance,
    name: str,
) -> dict[str, Any]:
    own = head_state(head, state)
    cache = name.partition("+kv-")[2]
    if cache:  # an engine holds the head's keys and values in the same type
        own.midlayer.self_attn.stored = CACHES[cache]
    embed = _Swapped(target.get_input_embeddings()) if state == "embedding-swapped" else None
    walks = accepted(own, target, texts, plan.depth, plan.batch_tokens, embed)
    found = Acceptance.of(walks)
    assert found is not None
    tokens = np.array(apart.tokens)
    estimate = {
        n: (lambda i: [i.value, i.lo, i.hi])(cluster_ratio(v, tokens).interval)
        for n, v in (("kl", apart.kl), ("tv", apart.tv), ("flips", apart.flips))
    }
    by = {
        k: Acceptance.of([w for w, t in zip(walks, texts, strict=True) if t.kind == k])
        for k in sorted({t.kind for t in texts})
    }
    result: dict[str, Any] = jsonable(
        {
            **vars(found),
            **estimate,
            "kinds": {
                k: {
                    "positions": [p.value for p in a.positions],
                    "tokens_per_step": a.tokens_per_step.value,
                }
                for k, a in by.items()
                if a
            },
        }
    )
    return result


def _report(plan: HeadTryPlan, rows: Mapping[str, Any]) -> Report:
    from assay.stats import Interval

    cells = []
    for key, row in rows.items():
        name, state, temperature = key.split("|")
        first, length = Interval(**row["positions"][0]), Interval(**row["tokens_per_step"])
        cells.append(
            [
                name,
                state,
                temperature,
                percent(first),
                ratio(length),
                f"{row['kl'][0]:.4f}",
                f"{100 * (1 - row['tv'][0]):.1f} %",
            ]
        )
    columns = ["target", "head", "T", "position 0", "tokens per step", "KL to bf16", "1 − TV"]
    note = (
        "Intervals by prompt. KL and TV are the target's own, on text that the unchanged target"
        " wrote."
    )
    return Report(
        command="heads try",
        verdict=Verdict.PASS,
        subject={"model": plan.model, "head": str(plan.head)},
        results={"rows": rows},
        headline=[Metric("rows", str(len(rows)), note=str(plan.out))],
        blocks=[Table("Acceptance", columns, cells, frozenset({3, 4, 5, 6}), note)],
        summary="every row was measured; whether one is good enough is for `assay spec` to say",
    )
