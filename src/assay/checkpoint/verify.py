"""`assay verify`: the stages from files to verdict, each of which only adds findings."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from assay.checkpoint import integrity, manifest
from assay.checkpoint.digest_cache import DigestCache
from assay.checkpoint.digests import Digest, hash_files
from assay.checkpoint.draft import check_draft, is_draft
from assay.checkpoint.findings import found, noted, plural, some, warned
from assay.checkpoint.gguf.reader import Gguf, read_gguf
from assay.checkpoint.gguf.rules import check_gguf, examine_gguf
from assay.checkpoint.index import check_index
from assay.checkpoint.integrity import FileResult, Source
from assay.checkpoint.layout import PICKLES, Layout
from assay.checkpoint.mtp.examine import MtpReport, examine_checkpoint, head_prefixes
from assay.checkpoint.mtp.rule import check_mtp
from assay.checkpoint.opening import Opened, open_checkpoint
from assay.checkpoint.quantization.check import check_quantization
from assay.checkpoint.quantization.declared import Declared
from assay.checkpoint.quantization.kv import KvCache, check_kv, kv_cache
from assay.checkpoint.quantization.orphans import check_orphans
from assay.checkpoint.quantization.schemes import parse
from assay.checkpoint.rules import RULES
from assay.checkpoint.serving import arguments, lint
from assay.checkpoint.serving.advice import advise
from assay.checkpoint.serving.versions import Version
from assay.checkpoint.structure import Expectation, check_structure, expectation, head_name, tied
from assay.checkpoint.subject import Checkpoint
from assay.errors import AssayError
from assay.verdict import Finding, Severity, Verdict

SMALL_BYTES = 256 << 20
"""A checkpoint up to this size is hashed even if there is nothing to hold the digests against."""

Show = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""(what, bytes) to a context that yields a function to call with the bytes just done."""


def silent(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing."""
    return nullcontext(lambda count: None)


@dataclass(frozen=True)
class Options:
    """What `assay verify` was asked for."""

    repo: str | None = None
    revision: str | None = None
    manifest: Path | None = None
    write_manifest: Path | None = None
    values: bool = False
    serve_args: str | None = None
    version: Version | None = None
    capability: float | None = None
    target: str | None = None
    allow_unverified: bool = False
    workers: int | None = None
    cache_file: Path | None = None


@dataclass
class Outcome:
    """All that was found; `report.build` turns it into a Report."""

    source: str
    opened: Opened
    options: Options
    files: list[FileResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unreachable: list[AssayError] = field(default_factory=list)
    mtp: MtpReport | None = None
    declared: Declared | None = None
    cache: KvCache = field(default_factory=lambda: KvCache(None, False, frozenset()))
    ggufs: list[Gguf] = field(default_factory=list)
    expected_from: str | None = None
    tensors: int = 0
    repo: str | None = None
    revision: str | None = None
    hashed_bytes: int = 0
    cached_bytes: int = 0
    scanned_bytes: int = 0
    advice: dict[str, object] = field(default_factory=dict)

    def verdict(self) -> Verdict:
        """Fail for what does not hold, then error for what could not be examined, then inconclusive."""
        errors = [f for f in self.findings if f.severity is Severity.ERROR]
        if any(f.id != "checkpoint.not_examined" for f in errors):
            return Verdict.FAIL
        if errors or any(e.verdict is Verdict.ERROR for e in self.unreachable):
            return Verdict.ERROR
        if self.unreachable:
            return Verdict.INCONCLUSIVE
        loose = any(f.status == "unverified" for f in self.files)
        return Verdict.INCONCLUSIVE if loose and not self.options.allow_unverified else Verdict.PASS


def verify(source: str, options: Options, show: Show = silent) -> Outcome:
    """Examine a checkpoint. Raises AssayError if there is nothing to examine or an option makes no sense."""
    stated = manifest.load(options.manifest) if options.manifest else None
    serve = arguments.parse(options.serve_args) if options.serve_args is not None else None
    opened = open_checkpoint(source, options.revision)
    outcome = Outcome(source, opened, options)
    _configless(outcome)
    _files(outcome, stated, show)
    _pickles(outcome)
    _structure(outcome)
    if serve is not None:
        target = lint.Target(
            opened.checkpoint,
            outcome.declared,
            outcome.cache,
            _mtp(outcome),
            serve,
            options.version,
            options.capability,
        )
        outcome.findings.extend(lint.lint(target))
        _draft_of(outcome, serve)
    if options.values and opened.layout is not None:
        _values(outcome, opened.layout, show)
    elif options.values:
        outcome.findings.append(
            warned("not_examined", "--values needs the weights; they are on the Hub, not here")
        )
    outcome.advice = advise(
        opened.checkpoint,
        source.removeprefix("hub:"),
        outcome.declared,
        outcome.cache,
        _mtp(outcome),
        options.version,
    )
    return outcome


def _mtp(outcome: Outcome) -> MtpReport:
    return outcome.mtp or MtpReport("none", "", 0, 0, None, None)


def _configless(outcome: Outcome) -> None:
    """A folder without config.json (and without GGUF) can be hashed, but not examined."""
    files = outcome.opened.checkpoint.files
    for name, reason in outcome.opened.problems:
        title = f"cannot read {name}: {reason}"
        outcome.findings.append(found("not_examined", title, path=name, reason=reason))
    if outcome.opened.checkpoint.kind in {"gguf", "safetensors"} or "config.json" in files:
        return
    if any(f.endswith(".gguf") for f in files):
        return
    if "adapter_config.json" in files:
        outcome.findings.append(
            noted("not_examined", "an adapter: its tensors were not held against a model")
        )
        return
    remedies = ["give the folder that holds config.json, or download it"]
    outcome.findings.append(
        found("not_examined", "no config.json: this is no checkpoint that can be examined", remedies=remedies)
    )


# Files and digests.


def _files(outcome: Outcome, stated: manifest.Manifest | None, show: Show) -> None:
    opened, options = outcome.opened, outcome.options
    sources: list[Source] = []
    if stated is not None and options.manifest is not None:
        entries = {
            p: integrity.Expected("the manifest", sha256=e.sha256, size=e.size)
            for p, e in stated.files.items()
        }
        sources.append(Source("the manifest", entries, complete=True))
    if opened.hub is not None:
        _remote_files(outcome, sources)
        return
    layout = opened.layout
    if layout is None:
        return
    outcome.repo, outcome.revision = options.repo or layout.repo, options.revision or layout.revision
    if options.repo is not None:
        _add_hub(outcome, options.repo, sources)
    if layout.recorded:
        where = "the Hub cache" if layout.kind == "hf_cache" else "the download's own record"
        sources.append(integrity.recorded_source(where, layout.recorded))
    sizes = _counted_files(layout, options)
    if layout.kind in {"gguf", "safetensors"}:
        sources = [
            Source(s.name, {p: e for p, e in s.files.items() if p in sizes}, complete=False) for s in sources
        ]
    digests = _hash(outcome, layout, sizes, sources, show)
    for name, digest in digests.items():
        if digest.problem:
            title = f"cannot read {name}: {digest.problem}"
            outcome.findings.append(found("not_examined", title, path=name, reason=digest.problem))
    outcome.files, findings = integrity.judge(sizes, digests, sources, layout.dangling)
    outcome.findings.extend(findings)
    if options.write_manifest is not None:
        _write_manifest(outcome, options.write_manifest)


def _counted_files(layout: Layout, options: Options) -> dict[str, int]:
    """All files but manifests and reports that lie inside the folder they are about."""
    own = {p.resolve() for p in (options.manifest, options.write_manifest) if p is not None}
    return {name: file.size for name, file in layout.files.items() if file.real not in own}


def _add_hub(outcome: Outcome, repo: str, sources: list[Source]) -> None:
    from assay.checkpoint.hub import list_revision

    try:
        listed = list_revision(repo.removeprefix("hub:"), outcome.revision)
    except AssayError as error:
        # What can be examined without the Hub still is; the verdict says that this could not be.
        outcome.unreachable.append(error)
        outcome.findings.append(error.to_finding())
        return
    outcome.revision = listed.commit or listed.asked
    sources.append(listed.source())


def _hash(
    outcome: Outcome, layout: Layout, sizes: dict[str, int], sources: Sequence[Source], show: Show
) -> dict[str, Digest]:
    """Hash what somebody vouches for, or everything if a manifest is to be written or the whole is small.

    A file whose size already differs needs no hashing to be wrong.
    """
    everything = outcome.options.write_manifest is not None or sum(sizes.values()) <= SMALL_BYTES
    wanted = [
        (name, layout.files[name].real, size)
        for name, size in sizes.items()
        if everything
        or any(
            (entry := s.files.get(name)) is not None and (entry.size is None or entry.size == size)
            for s in sources
        )
    ]
    total = sum(size for _, _, size in wanted)
    cache = DigestCache(outcome.options.cache_file)
    try:
        with show("hashing", total) as progress:
            digests = hash_files(wanted, cache, progress, outcome.options.workers)
    finally:
        cache.close()
    outcome.cached_bytes = sum(sizes[name] for name, d in digests.items() if d.cached)
    outcome.hashed_bytes = total - outcome.cached_bytes
    return digests


def _write_manifest(outcome: Outcome, path: Path) -> None:
    files = {
        f.path: manifest.Entry(f.sha256, f.size) for f in outcome.files if f.sha256 and f.status != "missing"
    }
    text = manifest.dump(manifest.Manifest(files, outcome.repo, outcome.revision))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"cannot write the manifest {path}: {error.strerror}"
        raise AssayError(message, finding_id="checkpoint.not_examined") from error


def _remote_files(outcome: Outcome, sources: list[Source]) -> None:
    """A remote checkpoint: the small files that were read are held against their digests, the weights are not here."""
    from assay.checkpoint.digests import hash_bytes

    hub, checkpoint = outcome.opened.hub, outcome.opened.checkpoint
    if hub is None:
        return
    outcome.repo, outcome.revision = hub.repo, hub.commit or hub.asked
    digests = {}
    for name in hub.files:
        if name.endswith((".json", ".jinja")) and hub.files[name].size <= 32 << 20:
            try:
                digests[name] = hash_bytes(checkpoint.read(name))
            except OSError as error:
                outcome.findings.append(warned("not_examined", f"cannot read {name}: {error}", path=name))
    results, findings = integrity.judge(dict(checkpoint.files), digests, [*sources, hub.source()])
    outcome.files = [
        f
        if f.sha256
        else FileResult(
            f.path, f.size, hub.files[f.path].sha256 if f.path in hub.files else None, f.status, f.against
        )
        for f in results
    ]
    outcome.findings.extend(findings)


def _pickles(outcome: Outcome) -> None:
    names = [n for n in outcome.opened.checkpoint.files if n.endswith(PICKLES)]
    if not names:
        return
    title = f"{plural(len(names), 'file')} not examined: {some(names)}"
    detail = "Opening a pickle can run code, so assay only hashes such files; convert them to safetensors."
    weights = any(n.endswith((".safetensors", ".gguf")) for n in outcome.opened.checkpoint.files)
    write = noted if weights else warned
    outcome.findings.append(write("not_examined", title, detail=detail, paths=names[:20]))


# Tensors and documents.


def _structure(outcome: Outcome) -> None:
    checkpoint, layout = outcome.opened.checkpoint, outcome.opened.layout
    add = outcome.findings.extend
    for header in checkpoint.headers.values():
        add(found(f.id, f.message, **f.evidence) for f in header.faults)
    for name in checkpoint.files if layout is not None else ():
        if name.endswith(".gguf") and layout is not None:
            _gguf(outcome, name, layout)
    outcome.tensors = len(checkpoint.tensors) + sum(len(g.tensors) for g in outcome.ggufs)
    if checkpoint.kind in {"gguf", "safetensors"} or "config.json" not in checkpoint.files:
        return
    add(check_index(checkpoint))
    for rule in RULES:
        add(rule(checkpoint))
    outcome.declared = parse(checkpoint)
    outcome.cache = kv_cache(checkpoint, outcome.declared)
    if not checkpoint.tensors:
        return
    if is_draft(checkpoint):
        target = _other(outcome, outcome.options.target)
        add(check_draft(checkpoint, target))
    else:
        promised = _promised(checkpoint)
        outcome.expected_from = promised.origin if promised else None
        add(check_structure(checkpoint, promised))
        outcome.mtp = examine_checkpoint(checkpoint, outcome.declared)
        add(check_mtp(outcome.mtp, outcome.declared is not None, outcome.options.version))
        add(check_quantization(checkpoint, outcome.declared, head_prefixes(checkpoint)))
    add(check_orphans(checkpoint))
    add(check_kv(checkpoint, outcome.cache))


def _promised(checkpoint: Checkpoint) -> Expectation | None:
    known = expectation(checkpoint)
    if known is not None:
        return known
    from importlib.util import find_spec

    if checkpoint.config.get("architectures") and find_spec("torch") and find_spec("transformers"):
        from assay.checkpoint.meta_model import meta_expectation

        return meta_expectation(checkpoint)
    return None


def _gguf(outcome: Outcome, name: str, layout: Layout) -> None:
    try:
        gguf = read_gguf(layout.files[name].real, name)
    except OSError as error:
        outcome.findings.append(found("not_examined", f"cannot read {name}: {error.strerror}", path=name))
        return
    outcome.ggufs.append(gguf)
    outcome.findings.extend(check_gguf(gguf))
    if outcome.opened.checkpoint.tensors or not gguf.tensors:
        return
    head = examine_gguf(gguf)
    if outcome.mtp is None or head.status != "none":
        outcome.mtp = head
        outcome.findings.extend(check_mtp(head, True, outcome.options.version))


def _other(outcome: Outcome, source: str | None) -> Checkpoint | None:
    """The other half of a draft pair."""
    return open_checkpoint(source).checkpoint if source else None


def _draft_of(outcome: Outcome, serve: arguments.ServeArgs) -> None:
    """A draft that --speculative-config names by a local path is held against this target."""
    settings = serve.structure("--speculative-config") or {}
    model = settings.get("model")
    if isinstance(model, str) and Path(model).is_dir():
        outcome.findings.extend(check_draft(open_checkpoint(model).checkpoint, outcome.opened.checkpoint))


# Values.


def _values(outcome: Outcome, layout: Layout, show: Show) -> None:
    from assay.checkpoint.gguf.values import check_block_scales, gguf_jobs
    from assay.checkpoint.values.duplicates import check_duplicates, check_tied
    from assay.checkpoint.values.judge import judge_values
    from assay.checkpoint.values.norms import check_norms
    from assay.checkpoint.values.scan import scan

    checkpoint = outcome.opened.checkpoint
    where = {name: layout.files[t.file].real for name, t in checkpoint.tensors.items()}
    jobs = [(t, where[n]) for n, t in checkpoint.tensors.items() if t.end <= layout.files[t.file].size]
    for gguf in outcome.ggufs:
        if not checkpoint.tensors:
            jobs.extend((t, layout.files[gguf.file].real) for t in gguf_jobs(gguf))
            outcome.findings.extend(check_block_scales(gguf, layout.files[gguf.file].real))
    outcome.scanned_bytes = sum(t.nbytes for t, _ in jobs)
    with show("scanning values", outcome.scanned_bytes) as progress:
        statistics, problems = scan(jobs, progress, outcome.options.workers)
    for name, reason in problems:
        outcome.findings.append(
            found("not_examined", f"cannot read the values of {name}: {reason}", tensor=name)
        )
    add = outcome.findings.extend
    method = outcome.declared.method if outcome.declared else None
    add(judge_values(statistics, signed_scales=method in {"auto-round", "gptq", "awq", "torchao", "hqq"}))
    add(check_norms(statistics, str(checkpoint.text_config.get("model_type"))))

    def same(one: str, two: str) -> bool:
        a, b = checkpoint.tensors.get(one), checkpoint.tensors.get(two)
        return (
            a is not None
            and b is not None
            and _bytes(where[one], a.start, a.end) == _bytes(where[two], b.start, b.end)
        )

    add(check_duplicates(statistics, same))
    by_name = {s.name: s for s in statistics}
    embedding = f"{checkpoint.prefix}embed_tokens.weight"
    add(check_tied(by_name, embedding, head_name(checkpoint), tied(checkpoint), same))


def _bytes(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return view[start:end]
