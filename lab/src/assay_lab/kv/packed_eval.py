"""`assay kv eval --codec pages`: packed pages of vLLM against the same engine's own cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl, quote

from assay.engines.ray_scorer import on_ray
from assay.errors import UsageError
from assay.fidelity.compare import run_compare
from assay.fidelity.names import label_of
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Metric, Report
from assay_lab.kv.calibration import read_calibration
from assay_lab.kv.eval import comparison
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.pages import BLOCK, CODEC
from assay_lab.kv.pages.layout import layout_of
from assay_lab.kv.pages.source import source_of
from assay_lab.options import EvalPlan


@on_ray
def run_packed(plan: EvalPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Grade packed pages of vLLM: the same engine with its own cache against what is really
    resident.
    """
    kind, _, rest = plan.model.partition(":")
    if kind != "vllm" or plan.calibration is None:
        raise UsageError(
            "packed pages are graded in vLLM, with a calibration",
            remedy=f"assay kv eval vllm:MODEL --codec {CODEC} --calibration FILE",
            finding_id="kv.usage",
        )
    if (
        plan.streams != "kv"
        or plan.skip_layers
        or plan.control
        or plan.mode != Mode.DECODE
        or plan.block != 1
    ):
        raise UsageError(
            "packed pages hold keys and values of all layers and are graded token by token",
            remedy="leave out --stream, --skip-layers, --control, --mode and --block",
            finding_id="kv.usage",
        )
    calibration, (model, _, query) = read_calibration(Path(plan.calibration)), rest.partition("?")
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "kv_pages" or (name == "kv_cache_dtype" and value != "auto"):
            raise UsageError(
                f"{plan.model}: packed pages are graded against vLLM's own cache, and {name}"
                " changes that one too",
                remedy=f"leave out {name}",
                finding_id="kv.usage",
            )
    source_of(plan.calibration, model)  # refused before the engine starts
    cache = calibration.provenance["cache"]
    layout = layout_of(int(cache["kv_heads"]), int(cache["head_dim"]), BLOCK)
    pages_of = quote(str(Path(plan.calibration).resolve()))
    candidate = f"{plan.model}{'&' if query else '?'}kv_pages={pages_of}"
    compared = replace(
        comparison(plan),
        candidates=(candidate,),
        budget=plan.budget,
        quick=plan.quick,
        all=plan.all,
    )
    found = run_compare(compared, progress)
    calibration.check_text(found.results.get("text", {}), ())
    pages = {"bytes_per_token_and_head": layout.slot, "ratio": layout.ratio, "tokens": BLOCK}
    size = Metric(
        "pages", f"{layout.ratio:.2f}× smaller than bf16: {layout.slot} bytes a token and KV head"
    )
    return replace(
        found,
        command="kv eval",
        subject={"model": plan.model, "plan": plan.facts()},
        results={
            **found.results,
            "codec": CODEC,
            "calibration": dict(calibration.provenance),
            "pages": pages,
        },
        headline=[*found.headline, size],
        summary=f"{label_of(compared.reference)} with packed pages",
    )
