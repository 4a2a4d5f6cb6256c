"""What `assay verify` is asked for, and how it tells that it goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from assay.checkpoint.serving.versions import Version

Show = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""(what, bytes) to a context that yields a function to call with the bytes just done, from any thread."""

Hashing = Literal["auto", "all", "none"]
"""`auto`: what somebody vouches for, and all the rest up to `AUTO_BYTES`; `none` reads headers only."""

AUTO_BYTES = 64 << 30
"""Files without a digest to hold against are hashed if the whole checkpoint is no larger than this.

Their digests tell two copies apart, which is worth some seconds, but proves nothing, so not many minutes.
"""


def silent(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing."""
    return nullcontext(lambda count: None)


@dataclass(frozen=True)
class Options:
    """The options of `assay verify`, as typed; paths are local."""

    repo: str | None = None
    revision: str | None = None
    manifest: Path | None = None
    write_manifest: Path | None = None
    hashing: Hashing = "auto"
    values: bool = False
    serve_args: str | None = None
    version: Version | None = None
    capability: float | None = None
    target: str | None = None
    allow_unverified: bool = False
    workers: int | None = None
    cache_file: Path | None = None
