"""The files that lie here: hashed, and held against everybody who vouches for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from assay.checkpoint import integrity, manifest
from assay.checkpoint.digest_cache import DigestCache
from assay.checkpoint.digests import Digest, hash_files
from assay.checkpoint.findings import found, noted, plural
from assay.checkpoint.hub.listing import list_revision
from assay.checkpoint.index import loaded_files
from assay.checkpoint.integrity import Source
from assay.checkpoint.layout import Layout
from assay.checkpoint.options import AUTO_BYTES, Options, Show
from assay.checkpoint.outcome import Outcome
from assay.errors import AssayError
from assay.verdict import Finding


def examine(outcome: Outcome, stated: manifest.Manifest | None, show: Show) -> None:
    """Hash and judge the files. Their findings go before the others: a damaged file explains what follows from it."""
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
        outcome.files, judged = integrity.judge(sizes, digests, sources, layout.dangling, loaded)
        outcome.findings[:0] = findings + judged
    outcome.add(_unhashed(outcome, digests))
    if options.write_manifest is not None:
        _write_manifest(outcome)


def _counted_files(layout: Layout, options: Options) -> dict[str, int]:
    """All files but manifests that lie inside the folder they are about."""
    own = {p.resolve() for p in (options.manifest, options.write_manifest) if p is not None}
    return {name: file.size for name, file in layout.files.items() if file.real not in own}


def _sources(
    outcome: Outcome, layout: Layout, stated: manifest.Manifest | None, sizes: dict[str, int]
) -> list[Source]:
    """Everybody who vouches for files: the manifest, the Hub, what was noted at the download."""
    options = outcome.options
    sources: list[Source] = []
    outcome.repo, outcome.revision = options.repo or layout.repo, layout.revision or options.revision
    if stated is not None:
        sources.append(stated.source())
        outcome.repo = outcome.repo or stated.repo
        outcome.revision = outcome.revision or stated.revision
    if options.repo is not None:
        try:
            listed = list_revision(options.repo.removeprefix("hub:"), options.revision or layout.revision)
        except AssayError as error:
            # What can be examined without the Hub still is; the verdict says that this could not be.
            outcome.unreachable.append(error)
            outcome.findings.append(error.to_finding())
        else:
            outcome.repo, outcome.revision = listed.repo, listed.commit or listed.asked
            sources.append(listed.source())
    if layout.recorded:
        where = "the Hub cache" if layout.kind == "hf_cache" else "the download's own record"
        sources.append(integrity.recorded_source(where, layout.recorded))
    if layout.kind in {"gguf", "safetensors"}:  # one file of a repository: the others are not missed
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
    with DigestCache(outcome.options.cache_file) as cache:
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
            outcome.hashed_bytes = sum(sizes[n] for n, d in digests.items() if d.sha256 and not d.cached)


def wants_hash(name: str, size: int, total: int, sources: Sequence[Source], options: Options) -> bool:
    """Whether a file is to be hashed: see `Hashing`. One whose size is wrong needs no digest to be wrong."""
    if options.hashing == "none":
        return False
    if options.hashing == "all" or options.write_manifest is not None or total <= AUTO_BYTES:
        return True
    entries = [s.files[name] for s in sources if name in s.files]
    return any(entry.size in {None, size} for entry in entries)


def _unread(digests: dict[str, Digest]) -> list[Finding]:
    return [
        found("not_examined", f"cannot read {name}: {digest.problem}", path=name, reason=digest.problem)
        for name, digest in digests.items()
        if digest.problem
    ]


def _unhashed(outcome: Outcome, digests: dict[str, Digest]) -> list[Finding]:
    """Say which files have no sha256 because nobody vouches for them."""
    names = [f.path for f in outcome.files if f.status in {"unverified", "extra"} and f.path not in digests]
    if not names or outcome.options.hashing == "none":
        return []
    title = (
        f"{plural(len(names), 'file')} not hashed: more than 64 GiB, and nothing to hold the digests against"
    )
    return [noted("unverified", title, paths=names[:20], remedies=["--hash all hashes them anyway"])]


def _write_manifest(outcome: Outcome) -> None:
    path = outcome.options.write_manifest
    here = [f for f in outcome.files if f.status != "missing"]
    unread = [f.path for f in here if f.sha256 is None]
    if path is None:
        return
    if unread:
        title = f"no manifest written: {plural(len(unread), 'file')} could not be hashed"
        outcome.findings.append(found("not_examined", title, paths=unread[:20]))
        return
    files = {f.path: manifest.Entry(f.sha256, f.size) for f in here if f.sha256}
    manifest.write(path, manifest.Manifest(files, outcome.repo, outcome.revision))
