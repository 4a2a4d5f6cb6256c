"""`assay heads try`: one head beside changed targets, changed KV caches, and in the states in which
loaders leave heads.

Every target variant writes its own text on the held-out prompts; the head drafts on the variant's
own states; a walk over the text counts what an engine would (`model.walk`: exact at temperature 0,
and at others for greedy drafts). Weights are quantised and dequantised in place, keys and values
where attention reads them. Beside each stand the variant's own KL and total variation to the
unchanged target on the text that the unchanged target wrote: a verifier accepts a draft from p with
probability 1 − TV(p, q) at best (Leviathan et al. 2023, arXiv 2211.17192).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from assay.engines.hf.engine import HfEngine
from assay.engines.hf.spec import parse_hf
from assay.errors import UsageError
from assay.progress import NO_PROGRESS, Progress
from assay.runs import KeptFile
from assay.stats import cluster_ratio
from assay.verdict import Metric, Report, Table, Verdict, jsonable
from assay_lab.heads.export import read_head, target_facts
from assay_lab.heads.model import AnyHead, RmsNorm, batches, observe, padded
from assay_lab.heads.train import (
    HELD_OUT,
    Acceptance,
    Write,
    Written,
    accepted,
    chunk_of,
    percent,
    prompts,
    ratio,
    with_transformers,
    written,
)
from assay_lab.options import HeadTryPlan
from assay_lab.quantisation.gptq import gptq_model
from assay_lab.quantisation.hadamard import Rotation
from assay_lab.quantisation.integers import quantise_dequantise
from assay_lab.quantisation.layers import replace_weights
from assay_lab.quantisation.levels import gaussian_levels
from assay_lab.quantisation.nearest import nearest_level
from assay_lab.quantisation.polar import polar_round_trip

Change = Callable[[torch.Tensor], torch.Tensor]


def fp8_rows(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, in] in e4m3 with one scale a row, as vLLM's own fp8 has it."""
    wide = weight.float()
    scale = (wide.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-12)
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


WEIGHTS: Mapping[str, Change] = {
    "fp8": fp8_rows,
    "int8": lambda w: quantise_dequantise(w, 8, w.shape[1], symmetric=True),
    "int4-g32": lambda w: quantise_dequantise(w, 4, 32),
    "int4-g128": lambda w: quantise_dequantise(w, 4, 128),
    "w4a16-g128": lambda w: quantise_dequantise(w, 4, 128, symmetric=True),
    "polar5": lambda w: polar_round_trip(w, 5),
    "polar4": lambda w: polar_round_trip(w, 4),
    "int3-g128": lambda w: quantise_dequantise(w, 3, 128),
    "int2-g32": lambda w: quantise_dequantise(w, 2, 32),
}
"""Formats of weights. The last two are controls: targets that are broken themselves."""
CALIBRATED: Mapping[str, tuple[int, int]] = {
    "gptq4-g32": (4, 32),
    "gptq4-g128": (4, 128),
    "gptq3-g128": (3, 128),
}
"""GPTQ with its bits and group, on text of the target's own."""
CALIBRATION = 64
"""Prompts whose answers GPTQ is calibrated on; none of them is held out."""


def _fp8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def _fp8_calibrated(x: torch.Tensor) -> torch.Tensor:
    """With one scale a head, of the largest value that is there."""
    wide = x.float()
    scale = (wide.abs().amax((0, 2, 3), keepdim=True) / 448).clamp_min(1e-12)
    return ((wide / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def _hadamard(bits: int) -> Change:
    """Lloyd-Max levels of the rotated token, scaled by its norm."""

    def change(x: torch.Tensor) -> torch.Tensor:
        wide, rotation = x.float(), Rotation(x.shape[-1], 1)
        norm = wide.norm(dim=-1, keepdim=True).clamp_min(1e-12) * x.shape[-1] ** -0.5
        levels = torch.tensor(gaussian_levels(2**bits), dtype=torch.float32, device=x.device)
        code = nearest_level(rotation.forward(wide / norm), levels).long()
        return (rotation.inverse(levels[code]) * norm).to(x.dtype)

    return change


CACHES: Mapping[str, Change] = {
    "fp8": _fp8,
    "fp8-calibrated": _fp8_calibrated,
    "hadamard4": _hadamard(4),
    "hadamard2": _hadamard(2),
}
"""What a KV cache makes of keys (after RoPE) and values [B, heads, T, D]."""
TARGETS = (
    "bf16",
    *WEIGHTS,
    *CALIBRATED,
    *(f"bf16+kv-{name}" for name in CACHES),
    "fp8+kv-fp8",
    "int4-g128+kv-fp8",
)
_READING: list[Change | None] = [None]


def _attention(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
    if change := _READING[0]:
        key, value = change(key), change(value)
    return sdpa_attention_forward(module, query, key, value, *rest, **more)


@contextmanager
def changed(
    target: Any, name: str, texts: Callable[[], Sequence[list[int]]] = list
) -> Iterator[None]:
    """The target with the weights and the cache of `name`, such as int4-g128+kv-fp8; as it was
    after it.

    `texts` gives the token ids that GPTQ is calibrated on. UsageError for an unknown name.
    """
    weights, _, cache = name.partition("+kv-")
    if weights not in {"bf16", *WEIGHTS, *CALIBRATED} or (cache and cache not in CACHES):
        raise UsageError(
            f"unknown target {name!r}", remedy=", ".join(TARGETS), finding_id="speculation.usage"
        )
    kept = (
        {n: p.detach().clone() for n, p in target.named_parameters()} if weights != "bf16" else {}
    )
    before = target.config._attn_implementation
    AttentionInterface.register("assay_read", _attention)
    AttentionMaskInterface.register("assay_read", sdpa_mask)
    try:
        if weights in CALIBRATED:
            gptq_model(target, texts(), *CALIBRATED[weights])
        elif weights != "bf16":
            replace_weights(target, WEIGHTS[weights], lambda w: 0)
        if cache:
            _READING[0] = CACHES[cache]
            target.set_attn_implementation("assay_read")
        yield
    finally:
        _READING[0] = None
        if cache:
            target.set_attn_implementation(before)
        with torch.no_grad():
            for n, p in target.named_parameters():
                if n in kept:
                    p.copy_(kept[n])


def calibration_texts(
    every: Sequence[tuple[str, list[int]]], write: Write, tokens: int
) -> list[list[int]]:
    """Prompts that are not held out, with the greedy answers of the unchanged target."""
    asked = every[1::HELD_OUT][:CALIBRATION]
    return [t.ids for t in written(asked, write, tokens, (0.0,), None, chunk=CALIBRATION)]


# States of a head.


def _quantised(change: Change) -> Callable[[AnyHead], None]:
    def apply(head: AnyHead) -> None:
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(change(module.weight))

    return apply


def _missing(head: AnyHead) -> None:
    """Every tensor as an engine makes it where the file has none: small random numbers, norms of
    ones.
    """
    torch.manual_seed(11)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, 0.02)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, RmsNorm):
            module.weight.fill_(1.0)


def _zeros(head: AnyHead) -> None:
    for p in head.parameters():
        p.zero_()


def _wrong_norm(head: AnyHead) -> None:
    for module in head.modules():
        if isinstance(module, RmsNorm):
            module.convention = "plus_one"


def _scales_ignored(head: AnyHead) -> None:
    """An int4 head of which the codes are loaded and the scales are not: each row is divided by its
    scale.
    """
    for module in head.modules():
        if isinstance(module, nn.Linear):
            top = module.weight.abs().amax(-1, keepdim=True).clamp_min(1e-12)
            module.weight.copy_(torch.round(module.weight * 7 / top))


def _missing_layer(head: AnyHead) -> None:
    """Only the layer is lost; `fc`, norm and output are loaded."""
    torch.manual_seed(11)
    for module in head.midlayer.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, 0.02)


HEADS: Mapping[str, Callable[[AnyHead], None]] = {
    "bf16": lambda head: None,
    "fp8": _quantised(fp8_rows),
    "int8": _quantised(lambda w: quantise_dequantise(w, 8, w.shape[1], symmetric=True)),
    "int4": _quantised(lambda w: quantise_dequantise(w, 4, 128)),
    "missing": _missing,
    "missing-layer": _missing_layer,
    "zeros": _zeros,
    "wrong-norm": _wrong_norm,
    "scales-ignored": _scales_ignored,
    "embedding-swapped": lambda head: None,
}
WORKING = ("bf16", "fp8", "int8", "int4")
"""Heads that are loaded as they were meant; all others are dead by construction."""


def head_state(head: AnyHead, name: str) -> AnyHead:
    """A copy of the head in the state `name`."""
    found = copy.deepcopy(head)
    with torch.no_grad():
        HEADS[name](found)
    return found


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


# Distance of a variant from the unchanged target.


@dataclass(frozen=True)
class Distance:
    """Per text: tokens, and sums of KL(P₀‖P), of the total variation, and of changed top tokens."""

    tokens: list[int]
    kl: list[float]
    tv: list[float]
    flips: list[int]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def last_states(target: Any, texts: Sequence[Written], tokens: int) -> list[torch.Tensor]:
    """Final states at the positions that predict a written token, by text, on the CPU."""
    found: dict[int, torch.Tensor] = {}
    ids = [t.ids for t in texts]
    for part in batches(ids, tokens):
        seen = observe(target, *padded([ids[i] for i in part], target.device), (0,))
        for row, i in zip(seen.last, part, strict=True):
            found[i] = row[texts[i].begin - 1 : len(ids[i]) - 1].cpu()
    return [found[i] for i in range(len(texts))]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def distance(target: Any, before: list[torch.Tensor], after: list[torch.Tensor]) -> Distance:
    """From final states of both; the output head is changed by no variant."""
    output, found = target.get_output_embeddings(), Distance([], [], [], [])
    for a, b in zip(before, after, strict=True):
        p, q = (output(x.to(target.device)).float().log_softmax(-1) for x in (a, b))
        found.tokens.append(len(a))
        found.kl.append(float((p.exp() * (p - q)).sum()))
        found.tv.append(float((p.exp() - q.exp()).abs().sum() / 2))
        found.flips.append(int((p.argmax(-1) != q.argmax(-1)).sum()))
    return found


# The verb.


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
                    texts = written(asked, own, plan.tokens, (temperature,), None, chunk=chunk)
                    reference[temperature] = (texts, last_states(target, texts, plan.batch_tokens))
                on, before = reference[temperature]
                with changed(target, name, calibration):
                    texts = on if name == "bf16" else written(
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
