"""Plug-ins: what other packages add to assay by entry points.

Each registry of assay asks `load(group)` for what others add to it; assay's own entries come first
and are never replaced. A plug-in that cannot be imported is named in one line on standard error,
and left out. CONTRIBUTING.md shows one of each kind.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUPS = {
    "assay.verbs": "assay.cli.verb.Verb or Group, for the command line",
    "assay.detectors": "function(TextView) -> Detection | None",
    "assay.parsers": "subclass of assay.speculation.parsers.Parser",
    "assay.rules": "function(Checkpoint) -> iterator of findings",
    "assay.engines": "class with load(spec) -> ScoringEngine, for specs NAME:…",
    "assay.reports": "function(Report) -> text, for --report NAME=FILE",
    "assay.weights": "function(model, **options) -> bytes, for hf:MODEL?weights=NAME(…)",
    "assay.cards": (
        "function(subject, results) -> command line, for reports of the verb NAME in a card"
    ),
    "assay.vllm_hooks": (
        "object with register(), called in vLLM's processes; that of `kv_pages` has"
        " prepare(calibration, model) too"
    ),
}
"""What an entry point of each group names."""

OWN = {
    "assay.reports": {
        "html": "assay.report.html:render",
        "junit": "assay.report.junit:render",
        "markdown": "assay.report.markdown:render",
        "prometheus": "assay.report.prometheus:render",
    }
}
"""Entries of assay itself that its lower layers ask for by name, so that they need not import what
is above them.
"""


@dataclass(frozen=True)
class Plugin:
    """One entry point that was asked for; `problem` says why it could not be imported."""

    group: str
    name: str
    package: str
    version: str
    target: str
    problem: str | None = None


_asked_for: dict[tuple[str, str], Plugin] = {}


def names(group: str) -> list[str]:
    """The names that `get` knows, assay's own first; nothing is imported."""
    return [*OWN.get(group, {}), *(point.name for point in _points(group))]


@cache
def get(group: str, name: str) -> Any:
    """What `name` stands for in a group, None where there is no such name or it cannot be
    imported.
    """
    if own := OWN.get(group, {}).get(name):
        module, _, attribute = own.partition(":")
        return getattr(import_module(module), attribute)
    point = next((point for point in _points(group) if point.name == name), None)
    return None if point is None else _load(group, point)


def load(group: str) -> dict[str, Any]:
    """All plug-ins of a group by name, without assay's own and without those that cannot be
    imported.
    """
    found = {point.name: get(group, point.name) for point in _points(group)}
    return {name: value for name, value in found.items() if value is not None}


def active() -> list[Plugin]:
    """The plug-ins that were asked for in this process: they may have taken part in a result."""
    return sorted(_asked_for.values(), key=lambda plugin: (plugin.group, plugin.name))


def culprit(trace: TracebackType | None) -> Plugin | None:
    """The plug-in whose package raised an exception; None if no plug-in raised it."""
    modules = set()
    while trace:
        modules.add(str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0])
        trace = trace.tb_next
    return next(
        (p for p in active() if p.target.partition(":")[0].partition(".")[0] in modules), None
    )


def packages(group: str) -> dict[str, Path]:
    """The folders of the top-level packages that the entry points of a group name, without
    importing them.
    """
    tops = {point.value.partition(":")[0].partition(".")[0] for point in _points(group)}
    specs = {top: find_spec(top) for top in sorted(tops)}
    return {
        top: Path(spec.submodule_search_locations[0])
        for top, spec in specs.items()
        if spec and spec.submodule_search_locations
    }


@cache
def _points(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group that take no name of assay's own and none of one another."""
    from importlib.metadata import entry_points  # takes a fifth of the time in which help is shown

    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.value)):
        if point.name not in OWN.get(group, {}):
            found.setdefault(point.name, point)
    return tuple(found.values())


def _load(group: str, point: EntryPoint) -> Any:
    package, version = (point.dist.name, point.dist.version) if point.dist else ("", "")
    loaded, problem = None, None
    try:
        loaded = point.load()
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        of = f" of {package} {version}" if package else ""
        print(
            f"assay: the plug-in {point.name!r} ({group}){of} was left out: {problem}",
            file=sys.stderr,
        )
    _asked_for[group, point.name] = Plugin(
        group, point.name, package, version, point.value, problem
    )
    return loaded
