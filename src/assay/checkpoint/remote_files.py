"""Compare the small files of a checkpoint on the Hub with their digests."""

from __future__ import annotations

from dataclasses import replace

from assay.checkpoint.digests import Digest, hash_bytes
from assay.checkpoint.findings import noted, plural, warned
from assay.checkpoint.manifest import Manifest
from assay.checkpoint.options import Show
from assay.checkpoint.state import VerifyState
from assay.checkpoint.trusted import judge
from assay.errors import AssayError

READ = (".json", ".jinja")
"""Documents that the rules read."""

MAX_BYTES = 32 << 20


def examine_remote(state: VerifyState, stated: Manifest | None, show: Show) -> None:
    """Digests of what was read; the weights are not here, so they stay unverified with the Hub's
    own digest.
    """
    hub, checkpoint = state.opened.hub, state.opened.checkpoint
    if hub is None:
        return
    if state.options.write_manifest is not None:
        message = "a manifest needs the files; those of hub: are not here"
        remedy = "download them, then write it from the folder"
        raise AssayError(message, finding_id="checkpoint.not_examined", remedy=remedy)
    state.files.repo, state.files.revision = hub.repo, hub.commit or hub.asked
    sources = [hub.source()] if stated is None else [stated.source(), hub.source()]
    digests: dict[str, Digest] = {}
    wanted = [n for n, f in hub.files.items() if n.endswith(READ) and f.size <= MAX_BYTES]
    with show("reading documents", sum(hub.files[n].size for n in wanted)) as progress:
        for name in wanted:
            try:
                digests[name] = hash_bytes(checkpoint.read(name))
            except OSError as error:
                state.findings.append(
                    warned("not_examined", f"cannot read {name}: {error}", path=name)
                )
            progress(hub.files[name].size)
    results, findings = judge(dict(checkpoint.files), digests, sources)
    state.files.results = [
        f if f.sha256 or f.path not in hub.files else replace(f, sha256=hub.files[f.path].sha256)
        for f in results
    ]
    state.findings[:0] = [f for f in findings if f.id != "checkpoint.unverified"]
    bodies = [f.path for f in state.files.results if f.status == "unverified"]
    if bodies:
        title = (
            f"{plural(len(bodies), 'file')} known by the Hub's digest only: their bytes are not"
            " here"
        )
        remedies = [
            "download it and verify the folder with --repo",
            "accept it with --allow-unverified",
        ]
        state.findings.append(noted("unverified", title, paths=bodies, remedies=remedies))
