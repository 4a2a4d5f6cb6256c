"""The sources of `assay spec` as they are to be read: files, a server, a log to follow."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from assay.errors import UsageError
from assay.speculation.options import SpecOptions
from assay.speculation.sources import in_time_order


@dataclass(frozen=True)
class Plan:
    """Where the evidence of a run comes from.

    Args:
        names: The sources as they were given.
        files: Log files in time order, each once; `-` is standard input.
        url: A running server, in the place of files.
        baseline: The same of the run to compare with; None without one.
        rival: A server without speculation to race against; it takes the place of a baseline.
    """

    names: tuple[str, ...]
    files: tuple[str, ...] = ()
    url: str | None = None
    baseline: Plan | None = None
    rival: str | None = None


def resolve(sources: Sequence[str], options: SpecOptions) -> Plan:
    """Find out what the sources are.

    Raises:
        UsageError: The sources and options do not go together.
    """
    if not sources:
        raise _refuse("no source given", "assay spec LOG")
    _check(sources, options)
    own, base = _kind(sources), _kind(options.baseline) if options.baseline else None
    if base is not None and own.url and base.url:
        return Plan(own.names, url=own.url, rival=base.url)
    return Plan(own.names, own.files, own.url, base)


def _kind(names: Sequence[str]) -> Plan:
    """The plan of one side."""
    if is_url(names[0]):
        return Plan(tuple(names), url=names[0])
    unique = {name if name == "-" else os.path.realpath(name): name for name in names}
    return Plan(tuple(names), files=tuple(in_time_order(list(unique.values()))))


def is_url(source: str) -> bool:
    """Whether a source is a running server."""
    return source.startswith(("http://", "https://"))


def _refuse(message: str, remedy: str = "") -> UsageError:
    return UsageError(message, finding_id="speculation.usage", remedy=remedy)


def _check(sources: Sequence[str], options: SpecOptions) -> None:
    """Refuse what makes no sense before anything is waited for."""
    urls = [s for s in sources if is_url(s)]

    if [*sources, *options.baseline].count("-") > 1:
        raise _refuse(
            "standard input can be read once only, and it is named twice",
            "write one of them to a file",
        )
    for group in (sources, options.baseline):
        if len(group) > 1 and any(map(is_url, group)):
            raise _refuse("a running server is examined by itself", "give one URL, or only files")
    if options.lossless and len(urls) != 1:
        raise _refuse(
            "--lossless compares two running servers", "assay spec URL --lossless OTHER_URL"
        )
    if options.requests and not urls:
        raise _refuse(
            "--requests are sent to a running server, and none is given",
            "assay spec URL --requests N",
        )
    if options.seconds is not None and not (options.follow and 0 < options.seconds < math.inf):
        raise _refuse("--for takes the seconds that --follow lasts")
    if options.follow and (len(sources) != 1 or options.baseline or options.lossless):
        raise _refuse("--follow takes one log and nothing to compare with")
    if options.follow and urls:
        raise _refuse("--follow reads a log; a server is watched with --interval")
