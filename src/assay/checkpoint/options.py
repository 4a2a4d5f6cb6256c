"""What `assay verify` is asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from assay.checkpoint.flags.versions import Version
from assay.checkpoint.flags.versions import engine_version as parse_engine_version
from assay.options import Options, option
from assay.runs import cache_path

Show = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""(what, bytes) to a context that yields a function to call with the bytes just done, from any
thread.
"""

AUTO_BYTES = 64 << 30
"""Files without a digest to compare with are hashed if the whole checkpoint is no larger than this.

Their digests tell two copies apart, which is worth some seconds, but proves nothing, so not many
minutes.
"""


def silent(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing."""
    return nullcontext(lambda count: None)


@dataclass(frozen=True)
class VerifyOptions(Options):
    """What a checkpoint is compared with, and how thoroughly."""

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
    digest_cache: bool = option(True, "Hash every file again, also those hashed before.")
    workers: int | None = option(None, "Threads (default: one per core).", lo=1, hi=256)
    cache_file: Path | None = option(None, listed=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_engine_version(self.engine_version)

    @property
    def version(self) -> Version | None:
        """The engine's version, None where it was not given; UsageError where it is not
        understood.
        """
        return parse_engine_version(self.engine_version)

    @property
    def cache(self) -> Path | None:
        """Where digests of files that did not change are kept, None where nowhere."""
        return (self.cache_file or cache_path("digests")) if self.digest_cache else None
