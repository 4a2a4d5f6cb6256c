"""The files that lie here: hashed, and held against everybody who vouches for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from assay.checkpoint import found, noted, plural, warned
from assay.checkpoint.declared import Declared
from assay.checkpoint.digests import (
    Digest,
    DigestCache,
    Expected,
    FileResult,
    Manifest,
    Source,
    hash_bytes,
    hash_files,
    judge,
    recorded_source,
)
from assay.checkpoint.digests import write as write_manifest
from assay.checkpoint.gguf import Gguf
from assay.checkpoint.hub import list_revision
from assay.checkpoint.mtp import MtpReport
from assay.checkpoint.quantization import KvCache
from assay.checkpoint.serve_args import Version
from assay.checkpoint.serve_args import engine_version as parse_engine_version
from assay.checkpoint.structure import loaded_files
from assay.checkpoint.subject import Layout, Opened
from assay.errors import AssayError
from assay.options import Options, option
from assay.runs import cache_path
from assay.verdict import Finding, Severity, Verdict

# What `assay verify` is asked for, and how it tells that it goes on.

Show = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""(what, bytes) to a context that yields a function to call with the bytes just done, from any
thread.
"""

AUTO_BYTES = 64 << 30
"""Files without a digest to hold against are hashed if the whole checkpoint is no larger than this.

Their digests tell two copies apart, which is worth some seconds, but proves nothing, so not many
minutes.
"""


def silent(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing."""
    return nullcontext(lambda count: None)


@dataclass(frozen=True)
class VerifyOptions(Options):
    """What a checkpoint is held against, and how thoroughly."""

    VERB, AREA = "verify", "checkpoint"

    repo: str | None = option(
        None, "Compare the files with this Hub repository.", metavar="ORG/NAME"
    )
    revision: str | None = option(
        None, "Branch, tag or commit (default: the recorded one, else main)."
    )
    manifest: Path | None = option(None, "Compare the files with this list of digests.")
    write_manifest: Path | None = option(None, "Write the list of digests to this file.")
    hashing: str = option(
        "auto",
        "Which files to hash: auto (all, but above 64 GiB only those with a digest to compare"
        " with), all, or none (headers only).",
        flag="hash",
        choices=("auto", "all", "none"),
    )
    values: bool = option(False, "Look at every stored value as well.")
    serve_args: str | None = option(
        None, "Command line of `vllm serve` to check against the checkpoint, as one text."
    )
    engine_version: str | None = option(
        None,
        "Engine that will serve it, e.g. vllm==0.32.0 (the default).",
        metavar="ENGINE==VERSION",
    )
    capability: float | None = option(
        None,
        "CUDA compute capability of the GPU, e.g. 8.6.",
        flag="compute-capability",
        lo=3,
        hi=20,
    )
    target: str | None = option(
        None, "Target model of this draft: a path or hub:ORG/NAME.", metavar="CHECKPOINT"
    )
    allow_unverified: bool = option(False, "Accept files that have no digest to compare with.")
    digest_cache: bool = option(True, "Hash every file again, whatever was hashed before.")
    workers: int | None = option(None, "Threads (default: one per core).", lo=1, hi=256)
    cache_file: Path | None = option(None, listed=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_engine_version(self.engine_version)

    @property
    def version(self) -> Version | None:
        """The engine's version, None where it was not given; UsageError where it is not understood."""
        return parse_engine_version(self.engine_version)

    @property
    def cache(self) -> Path | None:
        """Where digests of files that did not change are kept, None where nowhere."""
        return (self.cache_file or cache_path("digests")) if self.digest_cache else None


# Everything that one verification finds, and the verdict that follows from it.

NO_HEAD = MtpReport("none", "", 0, 0, None, None)


@dataclass
class Outcome:
    """What the stages have found so far; `report.build` turns it into a Report."""

    source: str
    opened: Opened
    options: VerifyOptions
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
    written: int = 0
    """Files in the manifest that was written."""
    hashed_bytes: int = 0
    cached_bytes: int = 0
    scanned_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    advice: dict[str, object] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def head(self) -> MtpReport:
        """The draft head, or the report that there is none."""
        return self.mtp or NO_HEAD

    def add(self, findings: Iterable[Finding]) -> None:
        """More findings."""
        self.findings.extend(findings)

    def verdict(self) -> Verdict:
        """Fail for what does not hold, then error for what could not be examined, then
        inconclusive.
        """
        errors = [f for f in self.findings if f.severity is Severity.ERROR]
        if any(f.id != "checkpoint.not_examined" for f in errors):
            return Verdict.FAIL
        if errors or any(e.verdict is Verdict.ERROR for e in self.unreachable):
            return Verdict.ERROR
        if self.unreachable or self.interrupted:
            return Verdict.INCONCLUSIVE
        if self.options.allow_unverified:
            return Verdict.PASS
        if any(f.evidence.get("unexamined") for f in self.findings):
            return Verdict.INCONCLUSIVE
        statuses = {f.status for f in self.files}
        strangers = "extra" in statuses and "verified" not in statuses
        return (
            Verdict.INCONCLUSIVE
            if _held(self.options) and ("unverified" in statuses or strangers)
            else Verdict.PASS
        )


def _held(options: VerifyOptions) -> bool:
    """Whether files are held against digests: whoever only writes a manifest does not ask for that."""
    return bool(options.repo or options.manifest or not options.write_manifest)


def examine_local(outcome: Outcome, stated: Manifest | None, show: Show) -> None:
    """Hash and judge the files. Their findings go before the others: a damaged file explains what
    follows from it.
    """
    layout, options = outcome.opened.layout, outcome.options
    if layout is None:
        return
    sizes = _counted_files(layout, options)
    sources = _sources(outcome, layout, stated, sizes)
    digests: dict[str, Digest] = {}
    try:
        _hash(outcome, layout, sizes, sources, show, digests)
    finally:  # after an interrupt, what was hashed until then is judged too
        findings = list(_unread(digests))
        loaded = loaded_files(outcome.opened.checkpoint)
        outcome.files, judged = judge(
            sizes,
            digests,
            sources,
            layout.dangling,
            loaded,
            accepted=options.allow_unverified or not _held(options),
        )
        outcome.findings[:0] = findings + judged
    outcome.add(_unhashed(outcome, digests))
    if options.write_manifest is not None:
        _write_manifest(outcome, options.write_manifest)


def _counted_files(layout: Layout, options: VerifyOptions) -> dict[str, int]:
    """All files but manifests that lie inside the folder they are about."""
    own = {p.resolve() for p in (options.manifest, options.write_manifest) if p is not None}
    return {name: file.size for name, file in layout.files.items() if file.real not in own}


def _sources(
    outcome: Outcome, layout: Layout, stated: Manifest | None, sizes: dict[str, int]
) -> list[Source]:
    """Everybody who vouches for files: the manifest, the Hub, what was noted at the download."""
    options = outcome.options
    sources: list[Source] = []
    outcome.repo, outcome.revision = (
        options.repo or layout.repo,
        layout.revision or options.revision,
    )
    if stated is not None:
        sources.append(stated.source())
        outcome.repo = outcome.repo or stated.repo
        outcome.revision = outcome.revision or stated.revision
    if options.repo is not None:
        try:
            listed = list_revision(
                options.repo.removeprefix("hub:"), options.revision or layout.revision
            )
        except AssayError as error:
            # What can be examined without the Hub still is; the verdict says that this could not
            # be.
            outcome.unreachable.append(error)
            outcome.findings.append(error.to_finding())
        else:
            outcome.repo, outcome.revision = listed.repo, listed.commit or listed.asked
            sources.append(listed.source())
    if layout.recorded:
        where = "the Hub cache" if layout.kind == "hf_cache" else "the download's own record"
        sources.append(recorded_source(where, layout.recorded))
    if layout.kind in {
        "gguf",
        "safetensors",
    }:  # one file of a repository: the others are not missed
        sources = [
            replace(s, files={p: e for p, e in s.files.items() if p in sizes}, complete=False)
            for s in sources
        ]
    return sources


def _hash(
    outcome: Outcome,
    layout: Layout,
    sizes: dict[str, int],
    sources: Sequence[Source],
    show: Show,
    digests: dict[str, Digest],
) -> None:
    wanted = [
        (name, layout.files[name].real, size)
        for name, size in sizes.items()
        if wants_hash(name, size, sum(sizes.values()), sources, outcome.options)
    ]
    total = sum(size for _, _, size in wanted)
    cache = DigestCache(outcome.options.cache)
    for name in sizes.keys() - {name for name, _, _ in wanted}:
        known = cache.look(layout.files[name].real)
        if known is not None:
            digests[name] = Digest(*known, cached=True)
    try:
        with show("hashing", total) as progress:
            hash_files(wanted, cache, digests, progress, outcome.options.workers)
    finally:
        cached = [n for n, _, _ in wanted if n in digests and digests[n].cached]
        outcome.cached_bytes = sum(sizes[n] for n in cached)
        outcome.hashed_bytes = sum(
            sizes[n] for n, d in digests.items() if d.sha256 and not d.cached
        )


def wants_hash(
    name: str, size: int, total: int, sources: Sequence[Source], options: VerifyOptions
) -> bool:
    """Whether a file is to be hashed: see `VerifyOptions.hashing`. One whose size is wrong needs no
    digest to be wrong.
    """
    if options.hashing == "none":
        return False
    if options.hashing == "all" or options.write_manifest is not None or total <= AUTO_BYTES:
        return True
    entries = [s.files[name] for s in sources if name in s.files]
    return any(entry.size in {None, size} for entry in entries)


def _unread(digests: dict[str, Digest]) -> list[Finding]:
    return [
        found(
            "not_examined",
            f"cannot read {name}: {digest.problem}",
            path=name,
            reason=digest.problem,
        )
        for name, digest in digests.items()
        if digest.problem
    ]


def _unhashed(outcome: Outcome, digests: dict[str, Digest]) -> list[Finding]:
    """Say which files have no sha256 because nobody vouches for them."""
    names = [
        f.path
        for f in outcome.files
        if f.status in {"unverified", "extra"} and f.path not in digests
    ]
    if not names or outcome.options.hashing == "none":
        return []
    title = (
        f"{plural(len(names), 'file')} not hashed: more than 64 GiB, and nothing to hold the"
        " digests against"
    )
    return [
        noted("unverified", title, paths=names[:20], remedies=["--hash all hashes them anyway"])
    ]


def _write_manifest(outcome: Outcome, path: Path) -> None:
    here = [f for f in outcome.files if f.status != "missing"]
    unread = [f.path for f in here if f.sha256 is None]
    if unread:
        title = f"no manifest written: {plural(len(unread), 'file')} could not be hashed"
        outcome.findings.append(found("not_examined", title, paths=unread[:20]))
        return
    files = {f.path: Expected("", f.sha256, size=f.size) for f in here}
    write_manifest(path, Manifest(files, outcome.repo, outcome.revision))
    outcome.written = len(files)
    title = f"the digests of {plural(len(files), 'file')} were written to {path.name}"
    remedies = [f"hold the files against it later: assay verify … --manifest {path.name}"]
    outcome.findings.append(noted("manifest_written", title, remedies=remedies, count=len(files)))


# The files of a checkpoint on the Hub: the small ones that were read are held against their
# digests.

READ = (".json", ".jinja")
"""Documents that the rules read."""
MAX_BYTES = 32 << 20


def examine_remote(outcome: Outcome, stated: Manifest | None, show: Show) -> None:
    """Digests of what was read; the weights are not here, so they stay unverified with the Hub's
    own digest.
    """
    hub, checkpoint = outcome.opened.hub, outcome.opened.checkpoint
    if hub is None:
        return
    if outcome.options.write_manifest is not None:
        message = "a manifest needs the files; those of hub: are not here"
        remedy = "download them, then write it from the folder"
        raise AssayError(message, finding_id="checkpoint.not_examined", remedy=remedy)
    outcome.repo, outcome.revision = hub.repo, hub.commit or hub.asked
    sources = [hub.source()] if stated is None else [stated.source(), hub.source()]
    digests: dict[str, Digest] = {}
    wanted = [n for n, f in hub.files.items() if n.endswith(READ) and f.size <= MAX_BYTES]
    with show("reading documents", sum(hub.files[n].size for n in wanted)) as progress:
        for name in wanted:
            try:
                digests[name] = hash_bytes(checkpoint.read(name))
            except OSError as error:
                outcome.findings.append(
                    warned("not_examined", f"cannot read {name}: {error}", path=name)
                )
            progress(hub.files[name].size)
    results, findings = judge(dict(checkpoint.files), digests, sources)
    outcome.files = [
        f if f.sha256 or f.path not in hub.files else replace(f, sha256=hub.files[f.path].sha256)
        for f in results
    ]
    outcome.findings[:0] = [f for f in findings if f.id != "checkpoint.unverified"]
    bodies = [f.path for f in outcome.files if f.status == "unverified"]
    if bodies:
        title = (
            f"{plural(len(bodies), 'file')} known by the Hub's digest only: their bytes are not"
            " here"
        )
        remedies = [
            "download it and verify the folder with --repo",
            "accept it with --allow-unverified",
        ]
        outcome.findings.append(noted("unverified", title, paths=bodies, remedies=remedies))
