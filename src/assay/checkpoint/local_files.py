"""Hash the local files and compare them with trusted digests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from assay.checkpoint.digests import Digest, DigestCache, hash_files
from assay.checkpoint.findings import found, noted, plural
from assay.checkpoint.hub import list_revision
from assay.checkpoint.index import loaded_files
from assay.checkpoint.layout import Layout
from assay.checkpoint.manifest import Manifest
from assay.checkpoint.manifest import write as write_manifest
from assay.checkpoint.options import AUTO_BYTES, Show, VerifyOptions
from assay.checkpoint.state import VerifyState, held
from assay.checkpoint.trusted import Expected, Source, judge, recorded_source
from assay.errors import AssayError
from assay.verdict import Finding


def examine_local(state: VerifyState, stated: Manifest | None, show: Show) -> None:
    """Hash and judge the files. Their findings go before the others: a damaged file explains what
    follows from it.
    """
    layout, options = state.opened.layout, state.options
    if layout is None:
        return
    sizes = _counted_files(layout, options)
    sources = _sources(state, layout, stated, sizes)
    digests: dict[str, Digest] = {}
    try:
        _hash(state, layout, sizes, sources, show, digests)
    finally:  # after an interrupt, what was hashed until then is judged too
        findings = list(_unread(digests))
        loaded = loaded_files(state.opened.checkpoint)
        state.files.results, judged = judge(
            sizes,
            digests,
            sources,
            layout.dangling,
            loaded,
            accepted=options.allow_unverified or not held(options),
        )
        state.findings[:0] = findings + judged
    state.add(_unhashed(state, digests))
    if options.write_manifest is not None:
        _write_manifest(state, options.write_manifest)


def _counted_files(layout: Layout, options: VerifyOptions) -> dict[str, int]:
    """All files but manifests that lie inside the folder they are about."""
    own = {p.resolve() for p in (options.manifest, options.write_manifest) if p is not None}
    return {name: file.size for name, file in layout.files.items() if file.real not in own}


def _sources(
    state: VerifyState, layout: Layout, stated: Manifest | None, sizes: dict[str, int]
) -> list[Source]:
    """The sources of digests: the manifest, the Hub, the record of the download."""
    options = state.options
    sources: list[Source] = []
    state.files.repo, state.files.revision = (
        options.repo or layout.repo,
        layout.revision or options.revision,
    )
    if stated is not None:
        sources.append(stated.source())
        state.files.repo = state.files.repo or stated.repo
        state.files.revision = state.files.revision or stated.revision
    if options.repo is not None:
        try:
            listed = list_revision(
                options.repo.removeprefix("hub:"), options.revision or layout.revision
            )
        except AssayError as error:
            # What can be examined without the Hub still is; the verdict says that this could not
            # be.
            state.unreachable.append(error)
            state.findings.append(error.to_finding())
        else:
            state.files.repo, state.files.revision = listed.repo, listed.commit or listed.asked
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
    state: VerifyState,
    layout: Layout,
    sizes: dict[str, int],
    sources: Sequence[Source],
    show: Show,
    digests: dict[str, Digest],
) -> None:
    wanted = [
        (name, layout.files[name].real, size)
        for name, size in sizes.items()
        if wants_hash(name, size, sum(sizes.values()), sources, state.options)
    ]
    total = sum(size for _, _, size in wanted)
    cache = DigestCache(state.options.cache)
    for name in sizes.keys() - {name for name, _, _ in wanted}:
        known = cache.look(layout.files[name].real)
        if known is not None:
            digests[name] = Digest(*known, cached=True)
    try:
        with show("hashing", total) as progress:
            hash_files(wanted, cache, digests, progress, state.options.workers)
    finally:
        cached = [n for n, _, _ in wanted if n in digests and digests[n].cached]
        state.files.cached_bytes = sum(sizes[n] for n in cached)
        state.files.hashed_bytes = sum(
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


def _unhashed(state: VerifyState, digests: dict[str, Digest]) -> list[Finding]:
    """Say which files have no sha256, since no source has a digest of them."""
    names = [
        f.path
        for f in state.files.results
        if f.status in {"unverified", "extra"} and f.path not in digests
    ]
    if not names or state.options.hashing == "none":
        return []
    title = (
        f"{plural(len(names), 'file')} not hashed: more than 64 GiB, and nothing to hold the"
        " digests against"
    )
    return [
        noted("unverified", title, paths=names[:20], remedies=["--hash all hashes them anyway"])
    ]


def _write_manifest(state: VerifyState, path: Path) -> None:
    here = [f for f in state.files.results if f.status != "missing"]
    unread = [f.path for f in here if f.sha256 is None]
    if unread:
        title = f"no manifest written: {plural(len(unread), 'file')} could not be hashed"
        state.findings.append(found("not_examined", title, paths=unread[:20]))
        return
    files = {f.path: Expected("", f.sha256, size=f.size) for f in here}
    write_manifest(path, Manifest(files, state.files.repo, state.files.revision))
    state.files.written = len(files)
    title = f"the digests of {plural(len(files), 'file')} were written to {path.name}"
    remedies = [f"hold the files against it later: assay verify … --manifest {path.name}"]
    state.findings.append(noted("manifest_written", title, remedies=remedies, count=len(files)))
