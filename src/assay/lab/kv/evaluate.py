"""`assay kv eval`: what a codec does to the distribution of a model, and how many bytes its cache takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from assay.engines.ray_scorer import on_ray
from assay.environment import describe
from assay.errors import UsageError
from assay.fidelity.compare import FIRST_LOOK, Looks, assess, certain_findings, implausible, run_compare
from assay.fidelity.cost import Budget
from assay.fidelity.floors import Floors
from assay.fidelity.margins import against_control, control_findings, control_metrics
from assay.fidelity.plan import QUICK_MINUTES, MarginOptions, Plan, label_of
from assay.fidelity.report import blocks, headline
from assay.fidelity.result import findings_of, is_certain, margins_of, verdict_of
from assay.fidelity.score import WindowObservation, engaged
from assay.lab.kv.cache_hook import LENGTHS, NOTE, CacheBytes, Mode, check_ranks, path_of
from assay.lab.kv.calibration import read_calibration
from assay.lab.kv.codec import Samples, Site
from assay.lab.kv.lab import Unfinished, engine_spec, open_lab
from assay.lab.kv.pages import BLOCK, CODEC
from assay.lab.kv.pages.layout import layout_of
from assay.lab.kv.pages.source import source_of
from assay.lab.kv.spec import KvSpec, parse_spec
from assay.lab.options import EvalPlan
from assay.options import declared_options
from assay.progress import NO_PROGRESS, Progress
from assay.stats.equivalence import confidence_of_look
from assay.verdict import Metric, Report, Verdict, worst


def comparison(plan: EvalPlan) -> Plan:
    """The plan of the comparison that this is: the model with its exact cache against itself with the codec."""
    spec = engine_spec(plan.model)
    return Plan(
        reference=spec,
        candidates=(spec,),
        text=plan.text,
        windows=plan.windows,
        length=plan.length,
        path=path_of(plan.mode).value,
        batch=plan.batch,
        seed=plan.seed,
        **{name: getattr(plan, name) for name in declared_options(MarginOptions)},
    )


@on_ray
def run_eval(plan: EvalPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Score the model with the codec in its KV cache against itself without; count the bytes of the streams.

    Interrupted, the report holds what was scored, and the same command goes on from there.
    """
    if plan.codec == CODEC:
        return _run_packed(plan, progress)
    spec, compared = parse_spec(plan.codec), comparison(plan)  # whose margins and sizes are checked now
    for one in filter(None, (spec, parse_spec(plan.control) if plan.control else None)):
        one.require(plan.streams)
        check_ranks(plan.model, str(one))
        if plan.calibration is None:
            require_no_calibration(one, plan.streams)
    budget = Budget.of(plan.budget, plan.quick, QUICK_MINUTES)
    margins, look = margins_of(plan), FIRST_LOOK
    certain = False
    with open_lab(
        plan.model,
        plan.text,
        windows=plan.windows,
        length=plan.length,
        mode=plan.mode,
        batch=plan.batch,
        block=plan.block,
        calibration=plan.calibration,
        any_engine=True,
        budget=budget,
        together=spec.token_by_token and (not plan.control or parse_spec(plan.control).token_by_token),
        codecs=1 + bool(plan.control),
        skip_layers=plan.skip_layers,
        progress=progress,
    ) as lab:
        plan = replace(plan, windows=len(lab.windows), length=lab.length, block=lab.block)
        compared, blocks_of_windows = comparison(plan), lab.blocks

        def enough(seen: Sequence[WindowObservation]) -> bool:
            nonlocal look, certain
            if not (plan.all or plan.control) and look <= len(seen) < len(lab.windows):
                look = 2 * len(seen)
                certain = is_certain(seen, margins, blocks_of_windows)
            return certain or budget.left() <= 0

        subject = {"model": plan.model, "plan": plan.facts()}
        with Unfinished(lambda: lab.partial) as cut:
            lab.measure(
                plan.codec,
                streams=plan.streams,
                skip_layers=plan.skip_layers,
                table_tokens=plan.table_tokens,
                enough=enough,
            )
        measured = lab.partial
        if plan.control and not cut:
            with Unfinished(lambda: measured) as cut:
                lab.measure(
                    plan.control, streams=plan.streams, skip_layers=plan.skip_layers, table_tokens=plan.table_tokens
                )
        control = lab.partial if plan.control and measured is not lab.partial else None
        note = measured.engagement.notes.get(NOTE, {}) if measured else {}
        results: dict[str, Any] = {
            "codec": str(spec),
            "mode": plan.mode,
            "block": plan.block,
            "streams": plan.streams,
            "skip_layers": list(plan.skip_layers),
            "text": {**lab.text, "length": plan.length},
            "chars_per_token": lab.text.get("characters_per_token"),
            "cache": note.get("cache"),
            "calibration": lab.provenance,
            "table_tokens": plan.table_tokens,
            **budget.results(),
        }
        if measured and not (certain or cut) and (missing := len(lab.windows) - len(measured.seen)):
            budget.leave_out(
                f"{missing} of {len(lab.windows)} passages", "differences that fewer passages cannot resolve"
            )
        if not (measured and measured.seen):
            verdict = cut.verdict(Verdict.INCONCLUSIVE)
            found = [*cut.findings(), *budget.findings()]
            return Report("kv eval", verdict, subject, found, results, interrupted=cut.interrupted)
        # Placements that spare every layer of this model are no self-test: nothing took part.
        same = bool(note.get("lossless")) and spec.changes_nothing
        took_part = engaged(
            measured.seen,
            measured.engagement,
            path=lab.job.path,
            hooked=not (cut and measured is lab.partial),
            same=same or bool(cut),
            label=plan.codec,
        )
        # The engine stays open until here: its tokenizer says what tokens are.
        facts, decode = lab.engine.describe(), lab.engine.tokenizer.decode
        settings = json.dumps([plan.mode, plan.streams, plan.skip_layers, lab.about])
        looks = Looks(compared, f"{spec} {settings}", len(measured.seen))
        result = assess(
            compared,
            Floors(),
            decode,
            measured.seen,
            plan.codec,
            took_part,
            facts,
            blocks=lab.blocks,
            confidence=confidence_of_look(looks.number),
            self_test=same,
        )
        if not cut:
            looks.record(result.summary)
        result = replace(result, certain=certain)
        found = [
            *cut.findings(),
            *budget.findings(),
            *certain_findings([result], len(lab.windows)),
            *findings_of(result, plan.allow_marginal),
            *lab.notices(),
        ]
        found += implausible(lab.text, result.summary.ppl_reference)
    verdict = verdict_of(result, plan.allow_marginal)
    body = result.to_json() | results
    against = None
    if control:
        against = against_control(
            result, replace(result, label=plan.control, seen=control.seen), plan.control_margin, plan.margin_ppl
        )
    if against:
        body["control"] = against.to_json()
        found += control_findings([against])
        verdict = worst([verdict, against.verdict])
    if measured.bytes:
        body["bytes"] = measured.bytes.to_json()
        body["table_tokens"] = measured.bytes.table_tokens
        body["engaged"]["per_layer"] = {str(k): v for k, v in measured.engagement.per_layer.items()}
    return Report(
        command="kv eval",
        verdict=cut.verdict(verdict),
        subject=subject,
        findings=found,
        results=body,
        environment=describe(),
        headline=[*headline([result]), *cache_figures(measured.bytes), *control_metrics([against] if against else [])],
        blocks=blocks([result], compared),
        interrupted=cut.interrupted,
        summary=f"{label_of(compared.reference)} with {plan.codec}",
    )


def _run_packed(plan: EvalPlan, progress: Progress) -> Report:
    """Grade packed pages of vLLM: the same engine with its own cache against what is really resident."""
    kind, _, rest = plan.model.partition(":")
    if kind != "vllm" or plan.calibration is None:
        raise UsageError(
            "packed pages are graded in vLLM, with a calibration",
            remedy=f"assay kv eval vllm:MODEL --codec {CODEC} --calibration FILE",
            finding_id="kv.usage",
        )
    if plan.streams != "kv" or plan.skip_layers or plan.control or plan.mode != Mode.DECODE or plan.block != 1:
        raise UsageError(
            "packed pages hold keys and values of all layers and are graded token by token",
            remedy="leave out --streams, --skip-layers, --control, --mode and --block",
            finding_id="kv.usage",
        )
    calibration, model = read_calibration(Path(plan.calibration)), rest.partition("?")[0]
    cache = calibration.provenance["cache"]
    layout = layout_of(int(cache["kv_heads"]), int(cache["head_dim"]), BLOCK)
    candidate = f"{plan.model}{'&' if '?' in rest else '?'}kv_pages={quote(str(Path(plan.calibration).resolve()))}"
    source_of(plan.calibration, model)  # refused before the engine starts
    compared = replace(comparison(plan), candidates=(candidate,), budget=plan.budget, quick=plan.quick, all=plan.all)
    found = run_compare(compared, progress)
    calibration.check_text(found.results.get("text", {}), ())
    pages = {"bytes_per_token_and_head": layout.slot, "ratio": layout.ratio, "tokens": BLOCK}
    size = Metric("pages", f"{layout.ratio:.2f}× smaller than bf16: {layout.slot} bytes a token and KV head")
    return replace(
        found,
        command="kv eval",
        subject={"model": plan.model, "plan": plan.facts()},
        results={**found.results, "codec": CODEC, "calibration": dict(calibration.provenance), "pages": pages},
        headline=[*found.headline, size],
        summary=f"{label_of(compared.reference)} with packed pages",
    )


def require_no_calibration(spec: KvSpec, streams: str) -> None:
    """UsageError where a codec cannot do without a calibration: now, not when the exact cache has been scored."""
    for stream in streams:
        recipe = spec.of(stream)
        if recipe:
            recipe.fit(Samples(Site(stream, 0, 1, 1, 64)))


def cache_figures(size: CacheBytes | None) -> list[Metric]:
    """How large the cache is, and what its tables are worth."""
    if size is None:
        return []
    found = [
        Metric(
            "cache",
            f"{size.ratio:.2f}× smaller than bf16: {size.stored / 1024:.0f} of {size.bf16 / 1024:.0f} KiB "
            f"for {size.tokens:,} tokens, {16 / size.ratio:.2f} bits a value",
        )
    ]
    if size.tables:
        at = ", ".join(f"{size.ratio_at(n):.2f}× at {n // 1024}k" for n in LENGTHS)
        even = "never" if size.break_even_tokens is None else f"from {size.break_even_tokens:,} tokens on"
        found += [
            Metric(
                "tables",
                f"{size.tables / 2**20:.2f} MiB, as if {size.sharing:.0f} sequences of {size.tokens:,} tokens "
                f"shared them; an encoder needs {size.encoder_tables / 2**20:.2f} MiB more",
            ),
            Metric("one sequence with its tables", f"{at}; smaller than bf16 {even}"),
        ]
    return found
