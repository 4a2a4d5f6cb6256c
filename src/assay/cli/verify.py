"""`assay verify`: is this checkpoint whole, and configured as its tensors are?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from assay.cli.verb import verb
from assay.verdict import Report


class Hash(StrEnum):
    """Choices of --hash."""

    AUTO = "auto"
    ALL = "all"
    NONE = "none"


@verb("verify")
def command(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder, Hub cache entry, .gguf or .safetensors file, or hub:ORG/NAME.")
    ],
    repo: Annotated[str | None, typer.Option(help="Hold the files against this Hub repository.")] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit (default: the recorded one, else main).")
    ] = None,
    manifest: Annotated[
        Path | None, typer.Option(help="Hold the files against this list of digests.")
    ] = None,
    write_manifest: Annotated[
        Path | None, typer.Option(help="Write the list of digests to this file.")
    ] = None,
    hashing: Annotated[
        Hash,
        typer.Option(
            "--hash",
            help="Which files to hash: auto (all, but above 64 GiB only those with a digest to hold against), all, "
            "or none (headers only).",
        ),
    ] = Hash.AUTO,
    values: Annotated[bool, typer.Option("--values", help="Look at every stored value as well.")] = False,
    serve_args: Annotated[
        str | None,
        typer.Option(help="Command line of `vllm serve` to hold against the checkpoint, as one text."),
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option(help="Engine that will serve it, e.g. vllm==0.32.0 (the default).")
    ] = None,
    compute_capability: Annotated[
        float | None, typer.Option(min=3, max=20, help="CUDA compute capability of the GPU, e.g. 8.6.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Target model of this EAGLE draft: a path or hub:ORG/NAME.")
    ] = None,
    allow_unverified: Annotated[
        bool, typer.Option("--allow-unverified", help="Accept files with no digest to hold against.")
    ] = False,
    no_digest_cache: Annotated[
        bool, typer.Option("--no-digest-cache", help="Hash every file again, whatever was hashed before.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, max=256, help="Threads (default: one a core).")
    ] = None,
) -> Report:
    """Verify a checkpoint: digests, tensors, quantisation, draft head, tokenizer, and the flags to serve it with.

    Hashes the files and reads their headers; --values reads every number as well. Opens no pickle. Digests are kept,
    so a second run hashes only what changed. Exit code 0 pass, 1 fail, 2 could not be examined, 3 files with no
    digest to hold against.
    """
    from assay.checkpoint import report, verify
    from assay.checkpoint.digests import DigestCache
    from assay.checkpoint.files import Options
    from assay.checkpoint.serve_args import engine_version as parse_version

    options = Options(
        repo=repo,
        revision=revision,
        manifest=manifest,
        write_manifest=write_manifest,
        hashing=hashing.value,
        values=values,
        serve_args=serve_args,
        version=parse_version(engine_version),
        capability=compute_capability,
        target=target,
        allow_unverified=allow_unverified,
        workers=workers,
        cache_file=None if no_digest_cache else DigestCache.default_file(),
    )
    return report.build(verify.verify(checkpoint, options, _show))


@contextmanager
def _show(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes; nothing for work that is done in a moment."""
    from assay.cli.progress import progress

    with progress(total, what, quiet=total < _WORTH_SHOWING, sizes=True) as shown:
        yield shown.advance


_WORTH_SHOWING = 1 << 30
