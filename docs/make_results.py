"""Write docs/results.md: every key of `results` of every verb, read out of the functions that make
it.

    python docs/make_results.py [--check]

A key without a meaning in `MEANINGS` ends the script with an error, and so does a meaning whose key
is gone.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = {"lab/": ROOT / "lab" / "src" / "assay_lab", "": ROOT / "src" / "assay"}
"""Where the files of a place begin, by what the place begins with."""
PAGE = Path(__file__).with_name("results.md")

# Verb: the functions (file:function, or file:Class.method) whose dicts are parts of its `results`.
VERBS: dict[str, list[str]] = {
    "check": [
        "coherence/report.py:build_report",
        "coherence/results.py:results_json",
        "coherence/results.py:record_json",
    ],
    "grade": ["coherence/grade_files.py:grade_files", "coherence/grade_files.py:_row"],
    "verify": ["checkpoint/report.py:_results"],
    "spec": ["speculation/spec.py:_results"],
    "compare": [
        "fidelity/compare_report.py:report",
        "fidelity/compare_report.py:shared_results",
        "fidelity/compare_report.py:unfinished",
        "fidelity/summary.py:Summary.to_json",
        "fidelity/result.py:CandidateResult.to_json",
        "fidelity/budget.py:Budget.results",
    ],
    "reference": ["fidelity/keep_reference.py:_stored", "fidelity/keep_reference.py:_write_base"],
    "kv eval": [
        "lab/kv/eval.py:facts_of",
        "lab/kv/eval.py:report",
        "fidelity/budget.py:Budget.results",
    ],
    "kv sweep": [
        "lab/kv/sweep.py:run_sweep",
        "lab/kv/sweep.py:_report",
        "lab/kv/sweep.py:_row",
        "fidelity/budget.py:Budget.results",
    ],
    "kv attribute": ["lab/kv/attribute.py:run_attribute", "fidelity/budget.py:Budget.results"],
    "kv allocate": ["lab/kv/allocate.py:run_allocate", "fidelity/budget.py:Budget.results"],
    "kv noise": ["lab/kv/noise.py:run_noise"],
    "kv diagnose": ["lab/kv/diagnose/verb.py:run_diagnose"],
    "kv calibrate": ["lab/kv/calibrate.py:run_calibrate"],
    "kv list": ["lab/kv/listing.py:run_list"],
    "kv encode": ["lab/kv/files.py:run_encode"],
    "kv decode": ["lab/kv/files.py:run_decode"],
    "kv serve": ["lab/kv/serve.py:run_serve"],
    "gate": ["gates/gate.py:gate_report", "gates/gate.py:_linted"],
    "watch": ["monitor/report.py:report_of"],
    "doctor": ["serving/report.py:build_report"],
    "bundle verify": ["serving/bundle_check.py:verify_bundle"],
    "demo": ["demo/run.py:_report"],
    "card": ["gates/card.py:_report"],
    "table": ["fidelity/table/verb.py:run_table"],
    "diff": ["report/side_by_side.py:diff"],
    "gap": ["lab/gap/result.py:GapResult.to_json", "fidelity/budget.py:Budget.results"],
}


# Verbs whose results are those of another.
SAME = {"rerun": "compare", "bundle show": "doctor"}


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods of a module by name."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def keys_of(place: str) -> list[str]:
    """Keys that a function puts into results: those of dicts that it returns, gives as `results=`,
    or names so.
    """
    file, _, name = place.partition(":")
    found = dict(functions(ast.parse(source(file))))
    keys: list[str] = []

    def take(node: ast.AST | None) -> None:
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    take(value)
                elif isinstance(key, ast.Constant):
                    keys.append(str(key.value))
        elif isinstance(node, ast.BinOp):
            take(node.left)
            take(node.right)
        elif isinstance(node, ast.ListComp):
            take(node.elt)
        elif isinstance(node, ast.DictComp) and isinstance(
            node.generators[0].iter, ast.Tuple | ast.Call
        ):
            for constant in ast.walk(
                node.generators[0].iter
            ):  # its keys are written out in what it goes through
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    keys.append(constant.value)
        elif isinstance(node, ast.IfExp):
            take(node.body)
            take(node.orelse)

    for node in ast.walk(found[name]):
        if isinstance(node, ast.Return) or (
            isinstance(node, ast.keyword) and node.arg == "results"
        ):
            take(node.value)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id in (
                "results",
                "shared",
                "body",
                "bodies",
            ):
                take(node.value)
            elif (
                isinstance(target, ast.Subscript)
                and isinstance(target.slice, ast.Constant)
                and isinstance(target.value, ast.Name)
                and target.value.id in ("results", "body")
            ):
                keys.append(str(target.slice.value))
    return list(dict.fromkeys(keys))


# Objects within results: their fields are listed from the dataclass, or their keys from the
# function that makes them.
CLASSES = {
    "gate.parts[]": "gates/gate.py:Part.to_json",
    "doctor.settings[]": "serving/report.py:_setting_json",
    "doctor.starts[]": "serving/report.py:_start_json",
    "doctor.ladder[]": "serving/report.py:_rung",
    "doctor.best": "serving/conclusion.py:best_of",
    "check.probes[].samples[]": "coherence/record.py:GradedReply",
    "spec.evidence": "speculation/health.py:Assessment",
    "gap.checks[]": "lab/gap/checks.py:Check",
    "compare.margins[]": "fidelity/margin_tests.py:MarginTest",
    "compare.floors": "fidelity/breakdown/floors.py:Floors",
    "compare.engaged": "fidelity/engaged.py:Engaged",
}

COMMON = {
    "text": "What was scored: sources, tokens, windows, their hash and places, characters a token.",
    "cache": "The KV cache of the model: layers, heads, head size, bytes.",
    "times": (
        "With a budget: seconds, what each stage was expected to take and took, and what was left"
        " out with what that hides."
    ),
    "codec": "The codec as it was understood.",
    "mode": "decode, inforward or snapshot.",
    "windows": "How many windows were scored.",
    "tokens": "How many tokens were scored.",
    "floors": (
        "Mean KL in nats that would be there anyway: another batch, storage in bf16, rounding"
        " noise; null where not measured."
    ),
    "self_test": "Whether the candidate is the reference itself.",
    "engine": "What scored it: versions, model, number formats, threads.",
    "bytes": "Size of the cache, see `kv eval`.",
    "layers": "By layer.",
    "shape": "KV heads, tokens, head size.",
    "plan": "The options that decide the numbers.",
    "seed": "Seed of the bootstrap.",
    "grade": "ACCEPT, MARGINAL, REJECT or INCONCLUSIVE, by intervals.",
    "dppl_pct": "Change of perplexity in percent {value, lo, hi}.",
    "kld": "KL(reference‖candidate) in nats: mean, lo, hi and quantiles.",
    "tv": "Mean total variation.",
    "top1_pct": "Tokens with the same likeliest token, percent.",
    "top1_beyond_rounding_pct": (
        "Tokens whose likeliest token changed by more than rounding, percent."
    ),
    "same_windows": "The allocation on the windows that it was chosen on.",
    "fresh_windows": "The same on windows that took no part.",
    "equal_bits": "The same bits everywhere, on fresh windows.",
    "winners_curse": "Second measurement minus first, in nats, {value, lo, hi}.",
}
MEANINGS: dict[str, dict[str, str]] = {
    "check": {
        "needs": "What the deployment must be able to do (`--need`), and whether it can.",
        "streaming": "The stream beside the whole answer of the same request: what a client of the stream misses.",  # noqa: E501
        "time": (
            "Seconds in all and of each stage, expected and taken, the budget, the looks, why it"
            " stopped, what was left out."
        ),
        "rollback": (
            "The command that goes back to the settings of the baseline, null where nothing"
            " changed."
        ),
        "rules": (
            "Each rule with its state (holds, broken, unclear, not examined) and what it says."
        ),
        "sampling": "Temperature and the other settings of the texts.",
        "reference": "The same figures of the reference, and where they come from.",
        "probes": (
            "Each probe: name, status (run or skipped), samples {label, kind, onset_char,"
            " finish_reason, completion_tokens, text_head}."
        ),
        "throughput": (
            "valid, decode_tokens_per_s and ttft_s {median, min, max}, itl_s, e2e_s, samples,"
            " concurrency, texts."
        ),
        "bits_per_byte": "How well the model predicts fixed texts: mean, and each passage.",
        "counters": "What the server itself counted, such as corrupted requests.",
        "tools": (
            "The tools suite by concurrency: asked, parsed, schema_valid, right, reference,"
            " p_value, decision, questions_needed."
        ),
        "answers": (
            "Answers that can be checked, ours and the reference's: decision, asked, right, gained,"
            " lost, difference, p_value."
        ),
        "tools_skipped": "Why the tools suite was not run, null where it was or was not asked for.",
    },
    "grade": {
        "files": "Each file: path, label, kind, onset_char (code points), coherent_chars.",
        "choices_total": "In a file of several choices: how many there are.",
        "choices": "In a file of several choices: the grade of each.",
    },
    "verify": {
        "files": (
            "Each file: path, size, sha256, status (verified, mismatch, missing, extra,"
            " unverified), and against what."
        ),
        "statuses": "How many files have each status.",
        "tensors": "How many tensors, of which types.",
        "expected_from": "Where the expected tensors come from.",
        "model_type": "As config.json has it.",
        "quantization": (
            "The declared method, bits, group_size, algorithm and source; null where none is"
            " declared."
        ),
        "kv_cache": "The declared type of the KV cache, and how many layers have scales.",
        "mtp": "The draft head: announced, present, complete, quantized, status.",
        "advice": "Flags to serve it with.",
        "engine_version": "The version of vLLM whose flags were looked up.",
        "bytes": "total, hashed, from_cache, scanned.",
        "seconds": "What each stage took.",
    },
    "spec": {
        "temperature": "The temperature of the traffic that --temperature gave, null without it.",
        "health": "healthy, degraded, broken, off, insufficient or unknown.",
        "record": (
            "engine, drafted, accepted, drafts, acceptance_rate, mean_acceptance_length,"
            " per_position, num_speculative_tokens, windows, counts."
        ),
        "evidence": "What the health rests on, with Wilson intervals.",
        "per_engine": "The same of each engine of several.",
        "advice": "What to change.",
        "benefit": "Tokens a step over all steps, coverage, and the predicted gain with its error.",
        "baseline": "The comparison with --baseline.",
        "start_up": "Lines of the log that say how speculation was set up.",
        "unrecognised": "Lines that look like statistics and could not be read, with their count.",
        "collapse": "When acceptance fell, null where it did not.",
        "head": "Only where health is bad: what is known of the draft head.",
        "mtp_status": "Only with --model: the state of the head in the checkpoint.",
        "prediction": (
            "Only with --predict: acceptance by position and tokens per step beside the changed"
            " target, with errors."
        ),
    },
    "compare": {
        "scored": (
            "Interrupted before the first candidate: how many passages of the reference are kept,"
            " and of how many."
        ),
        "candidates": (
            "One object a candidate, with the keys below from `grade` on. Of one candidate they"
            " stand at the top too."
        ),
        "pairs": "Every two candidates: difference of mean KL and of ΔNLL {value, lo, hi, p_holm}.",
        "reference": "What scored the reference.",
        "chars_per_token": "Characters of the text a token.",
        "plan_sha256": "Hash of what decides the numbers.",
        "grade": "ACCEPT, MARGINAL, REJECT or INCONCLUSIVE, by intervals.",
        "grade_point": "The grade that point estimates of Δppl and top-1 would have.",
        "clusters": "Groups of neighbouring windows, the unit of the intervals.",
        "confidence": "Of the intervals that decide; 0.95 at the first look.",
        "accept_excluded": "Whether an interval lies wholly outside the margins of ACCEPT.",
        "nonfinite_tokens": "Tokens whose logits were not finite.",
        "ppl_reference": "Perplexity of the reference.",
        "dppl_pct": "Change of perplexity in percent {value, lo, hi}.",
        "dnll": "Mean NLL of the candidate minus that of the reference, nats a token.",
        "kld": (
            "KL(reference‖candidate) in nats: mean, lo, hi, median, p90, p99, max,"
            " quantile_intervals, kind (exact or lower_bound)."
        ),
        "kld_reverse": "KL(candidate‖reference).",
        "top1_pct": "Tokens with the same likeliest token, percent.",
        "top1_beyond_rounding_pct": (
            "Tokens whose likeliest token changed by more than rounding, percent."
        ),
        "tv": "Mean total variation.",
        "mean_abs_dp": "Mean |p_candidate − p_reference| of the target token.",
        "design_effect": (
            "How much wider clusters make the interval of ΔNLL, as a ratio of variances."
        ),
        "windows_needed": "Windows that would decide, null where none would.",
        "aim": "The grade that those windows would decide.",
        "candidate": "Its label.",
        "self_kld": "Mean KL of the reference scored again at another batch size.",
        "engaged": "Whether the candidate took part: ok, fires, bytes_read, zero_share.",
        "breakdowns": "KL and ΔNLL by depth, by the reference's confidence and by kind of token.",
        "worst_tokens": "The tokens of the largest KL, with the text before them.",
        "memory": (
            "Bytes on the fullest device: predicted from the headers, available, measured_peak, and"
            " each side's parts."
        ),
        "routing": (
            "With --routing: which tokens change experts, by layer and over all, and KL with the"
            " reference's routing."
        ),
        "per_window": "Each window: its number, dnll, kld, top1, tokens, block.",
        "margins": "Each margin as a test of its own: p, and p_holm over all of the run.",
        "control": "With --control: verdict, difference, lo, hi, windows_needed.",
        "power": "What the first windows said the run would resolve.",
        "greedy": "Where greedy continuations part, with --greedy.",
    },
    "reference": {
        "format": "assay or llama.cpp.",
        "states_bytes": "Bytes of the stored states.",
        "head_bytes": "Bytes of the output head.",
        "bytes_per_token": "Bytes a token.",
        "dtype": "Type of the stored states.",
        "bytes": "Bytes of the file.",
    },
    "kv eval": {
        "block": "Tokens of a decode that were fed together.",
        "streams": "kv, k or v.",
        "skip_layers": "Layers that stayed exact.",
        "chars_per_token": "Characters of the text a token.",
        "calibration": "Where the calibration comes from.",
        "table_tokens": "Tokens that share the tables.",
        "control": "With --control: verdict, difference, lo, hi, windows_needed.",
        "bytes": (
            "stored, bf16, ratio, bits_per_value, tables, ratio_at by context, break_even_tokens,"
            " tables_decoder, tables_encoder."
        ),
    },
    "kv sweep": {
        "rows": (
            "One a codec: bytes, grade, dppl_pct, kld, top1_pct, tokens, windows and the keys"
            " below."
        ),
        "front": "Codecs on the Pareto front of bytes and KL.",
        "winner": "The chosen codec on the same and on fresh windows, and the winner's curse.",
        "failed": "Codecs that could not be measured, and why.",
        "kld_se": "Standard error of the mean KL (in a row).",
        "fires": "How often the codec ran (in a row).",
        "fit_s": "Seconds of fitting (in a row).",
        "score_s": "Seconds of scoring (in a row).",
    },
    "kv attribute": {
        "parts": "Each layer, or each stream of a layer, coded alone.",
        "joint": "All together.",
        "additivity_ratio": "Sum of the single KLs over the joint one.",
    },
    "kv allocate": {
        "parts": "Each part coded alone.",
        "bits": "Bits of each layer and stream.",
        "exact_layers": "Layers that stay exact.",
        "predicted_kld": "KL that the parts predict, nats.",
    },
    "kv noise": {"curves": "KL by the size of the noise, with its slope."},
    "kv diagnose": {"layers": "Errors, outliers and rank of every layer and stream."},
    "kv calibrate": {"bytes": "Size of the file."},
    "kv list": {
        "codecs": "Each codec with its parameters.",
        "wrappers": "Each wrapper with its parameters.",
    },
    "kv encode": {"bytes": "Size of the stream.", "relative_squared_error": "Σ(x − x̂)² over Σx²."},
    "kv decode": {"stream_bytes": "Size of the stream."},
    "kv serve": {
        "layers": "Layers that are coded.",
        "dry_run": "Whether the command was only printed.",
    },
    "gate": {
        "contract": "File, hash and sections of the contract.",
        "parts": "Each part with its verdict and the limits that were judged.",
        "not_run": "Parts that were not run, and why.",
        "servers": "Servers that answered.",
        "baseline": "With --baseline: file, verdict and what changed.",
        "limits": "With --lint, which examines nothing: the limits of each section.",
    },
    "doctor": {
        "baseline": (
            "The command without its settings, and its verdict; null where it was not started."
        ),
        "given": "The command as it was given, and its verdict.",
        "settings": (
            "Each setting with its safe value, its role (guilty, innocent, cannot_run, no_effect,"
            " undecided) and what the log says of it."
        ),
        "guilty": "Settings of the smallest sets that break the server.",
        "guilty_sets": "The sets themselves.",
        "proven": "Whether the sets are shown by starts, not only the likeliest.",
        "symptoms": "Rules that the given command breaks.",
        "best": (
            "The fastest sane command, or the one with most settings; null where none was started."
        ),
        "ladder": "Sane commands from the baseline up, with their speed.",
        "starts": "Every start of the engine: settings, state and what it broke.",
        "launches": "How often an engine was started.",
        "launches_exhaustive": "How often trying every set would have started one.",
        "minutes": "What it took.",
        "fault": (
            "What a baseline that fails speaks against: checkpoint or engine; null where nothing"
            " tells them apart."
        ),
        "out_of_time": "Whether the budget ended it.",
        "kept_in_baseline": (
            "Settings that stayed in the baseline, as it does not run without them."
        ),
        "error_rate": "Chance of a wrong guilty set that the search keeps to.",
        "fault_rate": (
            "Chance that one start of a faulty command shows the fault, as it was assumed."
        ),
        "issue": "A bug report in the engine's form.",
    },
    "bundle verify": {
        "files": "How many files the bundle has.",
        "stated_verdict": "The verdict that its report states.",
        "starts": (
            "Each start: settings, the state that is stated, and the state that its evidence gives"
            " again."
        ),
        "guilty": "Settings that its report calls guilty.",
    },
    "demo": {
        "whole": "The speed of the model as it is, as in `check.throughput`, and its verdict.",
        "broken": "The same of the damaged copy.",
        "damage": "Name of the damage.",
    },
    "watch": {"watch": "State of the watch.", "events": "What happened, with its time."},
    "card": {
        "files": "Files that were written.",
        "grade": "The grade on the card.",
        "badge": "Text of the badge.",
        "reports": "Command, verdict and grade of each report that it rests on.",
    },
    "diff": {
        "verb": "The verb of both reports.",
        "subjects": "What each report examined.",
        "verdict": "The verdict before and after, and whether it is better, worse or the same.",
        "findings": "New findings, findings that are gone, and how many are in both.",
        "figures": "Figures that moved beyond their intervals: before, after, and the direction.",
        "figures_same": "How many figures did not move.",
    },
    "table": {
        "rows": (
            "Each candidate: run, reference, windows, clusters, tokens, kld, dppl_pct, top1_pct"
            " with intervals, kld_above."
        ),
        "windows": "How many rows were read.",
        "format": "Format of the rows: assay-rows/1.",
    },
    "gap": {
        "base_mode": "The mode in which engine and codec are told apart.",
        "total": (
            "NLL(candidate with codec) − NLL(reference without), nats a token {value, lo, hi}, KL,"
            " dppl_pct, measured_apart."
        ),
        "total_by_path": "The total as the sum of the path has it.",
        "buckets": (
            "name, dnll, lo, hi, share, KL and parts; engine, codec, interaction, harness and finer"
            " ones."
        ),
        "repeatability": "What the buckets leave over of the total that was measured apart.",
        "closure": "The same under its old name.",
        "checks": "Predictions of the buckets against measurements that took no part.",
        "causes": "Buckets that are significant after Holm's correction and large enough.",
        "codec_gap": "What the codec costs on one engine minus on the other.",
        "orders": "The buckets in the other order of changes.",
        "setup_differences": "Settings in which the engines differ.",
        "switches": "Options switched alone; no part of the sum.",
        "residual": "What the codec leaves out, by stream, on both engines.",
        "noise": "KL of noise of known size on both engines, their ratio, and the codec beside it.",
        "layers": "Layers coded alone, and how they add up.",
        "harness": "What the way of measuring changes.",
        "calibration": "What tables of the other engine change.",
        "recommendations": "What would make it smaller, measured on fresh windows.",
        "phases": "Phases that were asked for.",
        "skipped": "What was not measured, and why.",
        "engines": "What both engines say of themselves.",
    },
}


def source(file: str) -> str:
    """The text of a file of the core, or of the laboratory after `lab/`."""
    begin = next(begin for begin in SOURCES if file.startswith(begin))
    return (SOURCES[begin] / file.removeprefix(begin)).read_text(encoding="utf-8")


def fields_of(place: str) -> list[str]:
    """Names of the fields of a dataclass."""
    file, _, name = place.partition(":")
    for node in ast.parse(source(file)).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [
                n.target.id
                for n in node.body
                if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            ]
    raise SystemExit(f"docs/make_results.py: no class {place}")


def page() -> str:
    """The page; SystemExit names the keys that have no meaning, and the meanings that
    have no key.
    """
    lines = [
        "# The keys of `results`",
        "",
        "<!-- Generated by docs/make_results.py. Do not edit. -->",
        "",
        "`--json` prints `results` beside the verdict and the findings ([reports](reports.md)).",
        "Intervals `{value, lo, hi}` are two-sided 95 %; null stands for what is not known.",
    ]
    wrong: list[str] = []
    for verb, places in VERBS.items():
        keys = list(dict.fromkeys(key for place in places for key in keys_of(place)))
        meanings = MEANINGS[verb]
        wrong += [
            f"{verb}: {key} has no meaning"
            for key in keys
            if key not in meanings and key not in COMMON
        ]
        wrong += [f"{verb}: {key} is gone" for key in meanings if key not in keys]
        lines += ["", f"## {verb}", ""]
        if verb == "kv eval":
            lines += ["The keys of one candidate of `compare`, and:", ""]
        lines += ["| key | meaning |", "|---|---|"]
        lines += [f"| `{key}` | {meanings.get(key) or COMMON.get(key, '')} |" for key in keys]
        for path, place in CLASSES.items():
            if path.partition(".")[0] == verb:
                name = place.partition(":")[2]
                made = name.endswith("to_json") or name == name.lower()  # a function, no class
                names = ", ".join(
                    f"`{name}`" for name in (keys_of(place) if made else fields_of(place))
                )
                lines += ["", f"Fields of `{path.partition('.')[2]}`: {names}."]
    for verb, other in SAME.items():
        lines += ["", f"## {verb}", "", f"The keys of [{other}](#{other})."]
    if wrong:
        raise SystemExit("docs/make_results.py: " + "; ".join(wrong))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        raise SystemExit("docs/results.md is stale: run python docs/make_results.py")
