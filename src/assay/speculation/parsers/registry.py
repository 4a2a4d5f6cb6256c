"""All parsers in the order in which they are asked: every class in a file beside this one."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from assay.plugins import load
from assay.speculation import parsers
from assay.speculation.parsers.base import Parser


@cache
def own_parsers() -> tuple[type[Parser], ...]:
    """assay's parsers; the first that reads a line or a JSON object owns it."""
    found: list[type[Parser]] = []
    for module in sorted(m.name for m in iter_modules(parsers.__path__, f"{parsers.__name__}.")):
        found += [
            kind
            for kind in vars(import_module(module)).values()
            if isinstance(kind, type) and issubclass(kind, Parser) and kind.__module__ == module
        ]
    return tuple(sorted((p for p in found if p is not Parser), key=lambda p: p.fallback))


@cache
def all_parsers() -> tuple[type[Parser], ...]:
    """Those of other packages, which read less than the ones for named figures, then assay's."""
    return (*load("assay.parsers").values(), *own_parsers())


def new_parsers() -> tuple[Parser, ...]:
    """Fresh parsers for one source; some remember what earlier lines said."""
    return tuple(parser() for parser in all_parsers())


@cache
def record_heads() -> tuple[str, ...]:
    """Texts with which a record of any engine begins."""
    return tuple(dict.fromkeys(head for parser in all_parsers() for head in parser.heads))


@cache
def engine_metrics() -> str:
    """A regular expression of the prefixes of all engines' metric names."""
    names = {re.escape(name) for parser in all_parsers() for name in parser.metrics}
    return rf"(?:{'|'.join(sorted(names))})[:_]"


@cache
def metric_words() -> re.Pattern[str] | None:
    """What the metric names hold that a parser reads; None where a plug-in may read any."""
    reading = [p for p in all_parsers() if p.samples is not Parser.samples]
    if not all(p.metric_words for p in reading):
        return None
    words = {re.escape(word) for parser in reading for word in parser.metric_words}
    return re.compile("|".join(sorted(words)), re.I)


@cache
def read_metrics() -> re.Pattern[str]:
    """The metric names that an engine's own parser reads."""
    return re.compile("|".join(dict.fromkeys(p.reads for p in all_parsers() if p.reads)))
