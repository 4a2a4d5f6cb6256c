"""`assay verify`: from files to findings, stage by stage. What is quick comes first, so that an
interrupt loses little.
"""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.checkpoint import (
    SHOWN,
    digests,
    found,
    noted,
    plural,
    serve_args,
    serve_flags,
    some,
    warned,
)
from assay.checkpoint.digests import PICKLES, WEIGHTS, FileResult
from assay.checkpoint.draft import check_draft, is_draft
from assay.checkpoint.files import (
    Outcome,
    Show,
    VerifyOptions,
    examine_local,
    examine_remote,
    silent,
)
from assay.checkpoint.gguf import check_gguf, check_splits, examine_gguf, read_gguf
from assay.checkpoint.mtp import check_mtp, examine_checkpoint, head_prefixes
from assay.checkpoint.quantization import check_kv, check_orphans, check_quantization, kv_cache
from assay.checkpoint.rules import all_rules
from assay.checkpoint.safetensors import Tensor
from assay.checkpoint.schemes import parse
from assay.checkpoint.serve_args import TABLED, ServeArgs
from assay.checkpoint.serve_flags import advise
from assay.checkpoint.structure import (
    FAMILIES,
    Expectation,
    check_index,
    check_structure,
    expectation,
    head_name,
    meta_expectation,
    tied,
)
from assay.checkpoint.subject import Checkpoint, Layout, open_checkpoint
from assay.errors import UsageError
from assay.report.text import size_text
from assay.verdict import Metric, Report, Severity, Table

# What kind of checkpoint lies here, and which of its files nobody opens.


def examine_contents(outcome: Outcome) -> None:
    """Files that could not be reached, a folder without a config, and pickles."""
    for name, reason in outcome.opened.problems:
        title = f"cannot read {name}: {reason}"
        outcome.findings.append(found("not_examined", title, path=name, reason=reason))
    _configless(outcome)
    _pickles(outcome)


def _configless(outcome: Outcome) -> None:
    """A folder without config.json (and without GGUF) can be hashed, but not examined."""
    checkpoint = outcome.opened.checkpoint
    files = checkpoint.files
    if checkpoint.kind in {"gguf", "safetensors"} or "config.json" in files:
        return
    if any(f.endswith(".gguf") for f in files):
        return
    if "adapter_config.json" in files:
        title = "an adapter: its tensors were not held against a model"
        outcome.findings.append(noted("not_examined", title))
        return
    remedies = ["give the folder that holds config.json, or download it"]
    title = "no config.json: this is no checkpoint that can be examined"
    outcome.findings.append(found("not_examined", title, remedies=remedies))


def _pickles(outcome: Outcome) -> None:
    files = outcome.opened.checkpoint.files
    names = [n for n in files if n.endswith(PICKLES)]
    if not names:
        return
    title = f"{plural(len(names), 'file')} not examined: {some(names)}"
    detail = (
        "Opening a pickle can run code, so assay only hashes such files; convert them to"
        " safetensors."
    )
    write = noted if any(n.endswith(WEIGHTS) for n in files) else warned
    outcome.findings.append(write("not_examined", title, detail=detail, paths=names[:20]))


# The flags that the checkpoint is to be served with, and those that would fit it.


def examine_flags(outcome: Outcome, serve: ServeArgs | None) -> None:
    """Hold the command line of the server against the checkpoint."""
    if serve is None:
        return
    target = serve_flags.Target(
        outcome.opened.checkpoint,
        outcome.declared,
        outcome.cache,
        outcome.head,
        serve,
        outcome.options.version,
        outcome.options.capability,
    )
    outcome.add(serve_flags.lint(target))
    _draft_of(outcome, serve)


def _draft_of(outcome: Outcome, serve: ServeArgs) -> None:
    """A draft that --speculative-config names by a local path is held against this target."""
    settings = serve.structure("--speculative-config") or {}
    model = settings.get("model")
    if isinstance(model, str) and Path(model).is_dir():
        outcome.add(check_draft(open_checkpoint(model).checkpoint, outcome.opened.checkpoint))


def advise_on(outcome: Outcome) -> None:
    """The command that fits the checkpoint. A local path stays out of it: reports are passed on."""
    source = outcome.source
    model = source.removeprefix("hub:") if source.startswith("hub:") else outcome.repo or "MODEL"
    outcome.advice = advise(
        outcome.opened.checkpoint,
        model,
        outcome.declared,
        outcome.cache,
        outcome.head,
        outcome.options.version,
    )


# The GGUF files of a checkpoint: header, tensor table, and the draft head where there is no other
# model.


def examine_gguf_files(outcome: Outcome) -> None:
    """Read every GGUF file that lies here; those on the Hub are listed, not read."""
    checkpoint, layout = outcome.opened.checkpoint, outcome.opened.layout
    names = [n for n in checkpoint.files if n.endswith(".gguf")]
    if layout is None:
        if names:
            title = f"{plural(len(names), 'GGUF file')} not examined: {some(names)}"
            detail = "On the Hub only the headers of safetensors files are read."
            outcome.findings.append(
                warned("not_examined", title, detail=detail, paths=names[:SHOWN])
            )
        return
    for name in names:
        _one(outcome, name, layout.files[name].real)
    beside = checkpoint.files if layout.kind == "folder" else _siblings(layout.root)
    outcome.add(check_splits(outcome.ggufs, beside))


def _siblings(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _one(outcome: Outcome, name: str, path: Path) -> None:
    try:
        gguf = read_gguf(path, name)
    except OSError as error:
        title = f"cannot read {name}: {error.strerror}"
        outcome.findings.append(found("not_examined", title, path=name))
        return
    outcome.ggufs.append(gguf)
    outcome.add(check_gguf(gguf))
    if outcome.opened.checkpoint.tensors or not gguf.tensors:
        return
    head = examine_gguf(gguf)
    if outcome.mtp is None or head.status != "none":
        outcome.mtp = head
        outcome.add(check_mtp(head, True, outcome.options.version))


# Headers, index, documents, expected tensors, quantisation and draft head: all that headers and
# small files tell.


def examine_tensors(outcome: Outcome) -> None:
    """Every rule on headers and documents, and the GGUF files."""
    checkpoint = outcome.opened.checkpoint
    for header in checkpoint.headers.values():
        outcome.add(found(f.id, f.message, **f.evidence) for f in header.faults)
    examine_gguf_files(outcome)
    outcome.tensors = len(checkpoint.tensors) + sum(len(g.tensors) for g in outcome.ggufs)
    if checkpoint.kind in {"gguf", "safetensors"} or "config.json" not in checkpoint.files:
        return
    outcome.add(check_index(checkpoint))
    for rule in all_rules():
        outcome.add(rule(checkpoint))
    outcome.declared = parse(checkpoint)
    outcome.cache = kv_cache(checkpoint, outcome.declared)
    if checkpoint.tensors:
        _stored(outcome, checkpoint)


def _stored(outcome: Outcome, checkpoint: Checkpoint) -> None:
    """What is stored against what the config promises and declares."""
    if is_draft(checkpoint):
        source = outcome.options.target
        target = open_checkpoint(source).checkpoint if source else None
        outcome.add(check_draft(checkpoint, target))
    else:
        promised = _promised(checkpoint)
        outcome.expected_from = promised.origin if promised else None
        outcome.add(check_structure(checkpoint, promised))
        outcome.mtp = examine_checkpoint(checkpoint, outcome.declared)
        outcome.add(check_mtp(outcome.mtp, outcome.declared is not None, outcome.options.version))
        outcome.add(check_quantization(checkpoint, outcome.declared, head_prefixes(checkpoint)))
    outcome.add(check_orphans(checkpoint))
    outcome.add(check_kv(checkpoint, outcome.cache))


def _promised(checkpoint: Checkpoint) -> Expectation | None:
    """From the config where assay knows the layout by heart (no torch to import), else from
    transformers.
    """
    if checkpoint.model_type in FAMILIES:
        return expectation(checkpoint)
    if checkpoint.config.get("architectures") and find_spec("torch") and find_spec("transformers"):
        return meta_expectation(checkpoint)
    return None


# `--values`: every stored value, read once.

SIGNED_SCALES = frozenset({"auto-round", "gptq", "awq", "torchao", "hqq"})
"""Methods whose scales may be negative."""


def examine_values(outcome: Outcome, show: Show) -> None:
    """Scan the values of a local checkpoint, if that was asked for."""
    if not outcome.options.values:
        return
    if outcome.opened.layout is None:
        title = "--values needs the weights; they are on the Hub, not here"
        outcome.findings.append(warned("not_examined", title))
        return
    _scan(outcome, outcome.opened.layout, show)


def _scan(outcome: Outcome, layout: Layout, show: Show) -> None:
    from assay.checkpoint.gguf import check_block_scales, gguf_jobs
    from assay.checkpoint.values import (
        check_duplicates,
        check_norms,
        check_tied,
        judge_values,
        scan,
    )

    checkpoint = outcome.opened.checkpoint
    where = {name: layout.files[t.file].real for name, t in checkpoint.tensors.items()}
    jobs = [
        (t, where[n]) for n, t in checkpoint.tensors.items() if t.end <= layout.files[t.file].size
    ]
    for gguf in outcome.ggufs:
        if not checkpoint.tensors:
            jobs.extend((t, layout.files[gguf.file].real) for t in gguf_jobs(gguf))
            outcome.add(check_block_scales(gguf, layout.files[gguf.file].real))
    outcome.scanned_bytes = sum(t.nbytes for t, _ in jobs)
    with show("scanning values", outcome.scanned_bytes) as progress:
        statistics, problems = scan(jobs, progress, outcome.options.workers)
    for name, reason in problems:
        title = f"cannot read the values of {name}: {reason}"
        outcome.findings.append(found("not_examined", title, tensor=name))
    method = outcome.declared.method if outcome.declared else None
    outcome.add(judge_values(statistics, signed_scales=method in SIGNED_SCALES))
    outcome.add(check_norms(statistics, checkpoint.model_type))
    same = _comparer(checkpoint.tensors, where)
    outcome.add(check_duplicates(statistics, same))
    by_name = {s.name: s for s in statistics}
    embedding = f"{checkpoint.prefix}embed_tokens.weight"
    outcome.add(check_tied(by_name, embedding, head_name(checkpoint), tied(checkpoint), same))


def _comparer(tensors: dict[str, Tensor], where: dict[str, Path]) -> Callable[[str, str], bool]:
    """A function that says whether two tensors hold the same bytes."""

    def same(one: str, two: str) -> bool:
        a, b = tensors.get(one), tensors.get(two)
        if a is None or b is None:
            return False
        return _bytes(where[one], a) == _bytes(where[two], b)

    return same


def _bytes(path: Path, tensor: Tensor) -> bytes:
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return view[tensor.start : tensor.end]


def verify(source: str, options: VerifyOptions, show: Show = silent) -> Report:
    """The report on the checkpoint at a path or `hub:ORG/NAME`.

    Raises AssayError if there is nothing to examine or an option makes no sense. An interrupt ends
    the stage that runs; the report then says so and holds what was found before.
    """
    if options.write_manifest:
        digests.require_writable(options.write_manifest)
    stated = digests.load(options.manifest) if options.manifest else None
    serve = serve_args.parse(options.serve_args) if options.serve_args is not None else None
    began = time.perf_counter()
    outcome = Outcome(source, open_checkpoint(source, options.revision), options)
    _check_options(outcome)
    outcome.seconds["open"] = time.perf_counter() - began
    files = examine_remote if outcome.opened.hub else examine_local
    stages: dict[str, Callable[[], None]] = {
        "contents": lambda: examine_contents(outcome),
        "tensors": lambda: examine_tensors(outcome),
        "flags": lambda: examine_flags(outcome, serve),
        "files": lambda: files(outcome, stated, show),
        "values": lambda: examine_values(outcome, show),
    }
    for name, stage in stages.items():
        began = time.perf_counter()
        try:
            stage()
        except KeyboardInterrupt:
            outcome.interrupted = True
            break
        finally:
            outcome.seconds[name] = time.perf_counter() - began
    advise_on(outcome)
    return _report(outcome)


def _check_options(outcome: Outcome) -> None:
    """UsageError for an option that this checkpoint gives no meaning to: it would be passed over in
    silence.
    """
    options, opened = outcome.options, outcome.opened
    if options.target and not is_draft(opened.checkpoint):
        raise UsageError(
            f"--target is for a draft model, and {outcome.source} is none",
            remedy="name the draft first: assay verify DRAFT --target MODEL",
            finding_id="checkpoint.usage",
        )
    recorded = opened.layout is not None and opened.layout.revision is not None
    if options.revision and not (opened.hub or options.repo or recorded):
        raise UsageError(
            f"--revision says nothing about {outcome.source}, a plain folder or file",
            remedy="add --repo ORG/NAME to hold it against that revision of a repository",
            finding_id="checkpoint.usage",
        )


# The outcome of `assay verify` as a report: results for machines, a few figures and tables for
# people.

_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}
SHOWN_FILES = 40


def _report(outcome: Outcome) -> Report:
    findings = sorted(outcome.findings, key=lambda f: _ORDER[f.severity])
    return Report(
        command="verify",
        verdict=outcome.verdict(),
        subject=_subject(outcome),
        findings=findings,
        results=_results(outcome),
        headline=_headline(outcome),
        blocks=(_files_table(outcome.files), _model_table(outcome)),
        interrupted=outcome.interrupted,
    )


def _subject(outcome: Outcome) -> dict[str, Any]:
    return {
        "checkpoint": outcome.source,
        "layout": outcome.opened.checkpoint.kind,
        "repo": outcome.repo,
        "revision": outcome.revision,
    }


def _results(outcome: Outcome) -> dict[str, Any]:
    config, declared = outcome.opened.checkpoint.text_config, outcome.declared
    return {
        "files": [
            {
                "path": f.path,
                "size": f.size,
                "sha256": f.sha256,
                "status": f.status,
                "against": f.against,
            }
            for f in outcome.files
        ],
        "statuses": dict(Counter(f.status for f in outcome.files)),
        "tensors": outcome.tensors,
        "expected_from": outcome.expected_from,
        "model_type": config.get("model_type"),
        "quantization": (
            None
            if declared is None
            else {
                "method": declared.method,
                "bits": declared.bits,
                "group_size": declared.group_size,
                "algorithm": declared.algorithm,
                "source": declared.source,
            }
        ),
        "kv_cache": {
            "declared": outcome.cache.declared,
            "layers_with_scales": len(outcome.cache.layers),
        },
        "mtp": outcome.head.to_json(),
        "advice": outcome.advice,
        "engine_version": str(outcome.options.version or TABLED),
        "bytes": {
            "total": sum(f.size or 0 for f in outcome.files if f.status != "missing"),
            "hashed": outcome.hashed_bytes,
            "from_cache": outcome.cached_bytes,
            "scanned": outcome.scanned_bytes,
        },
        "seconds": outcome.seconds,
    }


def _headline(outcome: Outcome) -> list[Metric]:
    counts = Counter(f.status for f in outcome.files)
    here = sum(counts.values()) - counts["missing"]
    metrics = [
        Metric(
            "files verified",
            f"{counts['verified']} of {here}",
            counts["mismatch"] + counts["missing"] == 0,
        ),
        Metric(
            "tensors",
            str(outcome.tensors),
            note=f"expected by {outcome.expected_from}" if outcome.expected_from else "",
        ),
        Metric("quantisation", _method(outcome)),
    ]
    if outcome.mtp is not None and outcome.mtp.status != "none":
        healthy = outcome.mtp.status in {"ok", "declared_quantized"}
        metrics.append(Metric("draft head", outcome.mtp.status.replace("_", " "), healthy))
    if outcome.written:
        metrics.append(Metric("manifest written", str(outcome.options.write_manifest)))
    if outcome.revision:
        metrics.append(Metric("revision", outcome.revision))
    return metrics


def _method(outcome: Outcome) -> str:
    if outcome.declared is None:
        return "none declared"
    return outcome.declared.method + (" (not examined)" if outcome.declared.unexamined else "")


def _files_table(files: list[FileResult]) -> Table:
    worst_first = {"mismatch": 0, "missing": 1, "extra": 2, "unverified": 3, "verified": 4}
    ordered = sorted(files, key=lambda f: (worst_first[f.status], f.path))
    rows = [
        (
            f.path,
            "" if f.size is None else size_text(f.size),
            f.status,
            (f.sha256 or "")[:16],
            f.against or "",
        )
        for f in ordered[:SHOWN_FILES]
    ]
    rest = len(ordered) - len(rows)
    note = f"{plural(rest, 'more file')} in the JSON report" if rest else ""
    return Table(
        "Files", ("file", "size", "status", "sha256", "held against"), rows, frozenset({1}), note
    )


def _model_table(outcome: Outcome) -> Table:
    rows = [("serve it with", str(outcome.advice.get("command", "")))]
    notes = outcome.advice.get("notes")
    rows.extend(("note", str(note)) for note in (notes if isinstance(notes, list) else ()))
    mtp = outcome.mtp
    if mtp is not None and (mtp.announced or mtp.present):
        owed = f" of {mtp.expected}" if mtp.expected else ""
        text = (
            f"{plural(mtp.announced, 'layer')} announced, {mtp.present}{owed} tensors,"
            f" {mtp.quantized or 'plain'}"
        )
        rows.append((f"draft head ({mtp.family})", text))
    return Table(f"Serving (vLLM {outcome.options.version or TABLED})", ("what", "how"), rows)
