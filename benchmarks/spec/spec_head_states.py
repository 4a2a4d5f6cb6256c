"""Real heads in known states on a real engine: does `assay spec` tell them apart, and do its three
sources agree?

    python benchmarks/spec/spec_head_states.py MODEL WORKDIR [CONFIGURATION...]

Each configuration is one vLLM server (CPU, greedy, 8 requests of 96 tokens). Written to
results/spec_head_states.json: health and findings from the log, from two scrapes of /metrics and
from the responses, with the counts of each.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from assay.speculation.combine import Evidence, combine
from assay.speculation.live import between
from assay.speculation.read import Reading
from assay.speculation.spec import examine
from spec_engine import Run, make_draft, run

RESULTS = Path(__file__).parent / "results" / "spec_head_states.json"
DEPTH = 3
# name: (draft, depth); the draft `self` is the target, `ngram` needs no model, None switches
# speculation off.
CONFIGURATIONS: dict[str, tuple[str | None, int]] = {
    "off": (None, 0),
    "self": ("self", DEPTH),
    "layers26": ("layers:26", DEPTH),
    "int3": ("int3", DEPTH),
    "random": ("random", DEPTH),
    "zeroed": ("zeroed", DEPTH),
    "embedding_only": ("embedding_only", DEPTH),
    "no_weights": ("no_weights", DEPTH),
    "ngram": ("ngram", DEPTH),
    "off_again": (None, 0),
    "self1": ("self", 1),
    "self5": ("self", 5),
    "layers12": ("layers:12", DEPTH),
    "layers12_1": ("layers:12", 1),
    "layers12_5": ("layers:12", 5),
    "layers26_1": ("layers:26", 1),
    "layers26_5": ("layers:26", 5),
    "ngram_5": ("ngram", 5),
}


def speculative(name: str, model: Path, work: Path) -> dict[str, Any] | None:
    """The server's speculative configuration."""
    draft, depth = CONFIGURATIONS[name]
    if draft is None:
        return None
    if draft == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": depth,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    path = model if draft == "self" else make_draft(draft, model, work / draft.replace(":", ""))
    return {"method": "draft_model", "model": str(path), "num_speculative_tokens": depth}


def describe(result: Run) -> dict[str, Any]:
    """What assay says about one run, from each source that the run left."""
    if not result.started:
        return {"started": False, "error": refusal(result.log.read_text("utf-8", "replace"))}
    report = examine([str(result.log)])
    responses = Reading()
    responses.document(result.responses)
    window = between(result.before, result.after, result.seconds).window
    sources = {"metrics": window, "responses": combine(responses.settled())}
    return {
        "started": True,
        "health": report.results["health"],
        "findings": [f.id for f in report.findings],
        "rate": report.results["evidence"]["rate"],
        "per_position": report.results["evidence"]["per_position"],
        "tokens_per_step": report.results["record"]["tokens_per_step"],
        "head": report.results.get("head"),
        "counts": {name: _counts(e) for name, e in sources.items()},
        "log_counts": {k: report.results["record"][k] for k in ("drafts", "drafted", "accepted")},
        "tokens": result.tokens,
        "seconds": result.seconds,
        "tokens_per_s": result.tokens_per_s,
    }


def refusal(text: str) -> str:
    """The first error that the engine's log names: the cause, not what followed from it."""
    match = re.search(r"\b((?:Value|Runtime|Key)Error: .*)", text)
    return match[1][:120] if match else ""


def _counts(evidence: Evidence) -> dict[str, int | None]:
    record = evidence.record
    return {
        "drafts": record.counts.drafts,
        "drafted": record.counts.drafted,
        "accepted": record.counts.accepted,
    }


def main(arguments: list[str]) -> None:
    """Run the configurations and add them to the results."""
    model, work = Path(arguments[0]), Path(arguments[1])
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in arguments[2:] or list(CONFIGURATIONS):
        done = run(name, model, speculative(name, model, work), work / "runs")
        pages = work / "runs"
        (pages / f"{name}.before.txt").write_text(done.before)
        (pages / f"{name}.after.txt").write_text(done.after)
        (pages / f"{name}.responses.json").write_text(json.dumps(done.responses))
        results[name] = describe(done)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(name, {k: v for k, v in results[name].items() if k != "per_position"}, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
