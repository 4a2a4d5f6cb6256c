"""Prometheus text pages, and the tables that people paste from a Prometheus UI."""

from __future__ import annotations

import re
from collections.abc import Iterator

from assay.speculation.parsers.base import Sample

_SAMPLE = re.compile(
    r"^\s*([a-zA-Z_:][\w:]*)\s*(?:\{(.*?)\})?\s*\|?\s*([-+]?(?:\d[\d_.]*(?:e[-+]?\d+)?|inf|nan))(?:\s+-?\d+)?\s*\|?\s*$",
    re.I,
)
_LABEL = re.compile(r'([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_SIGN = re.compile(
    r"^(?:# (?:TYPE|HELP) \S+|(?:vllm|sglang|llamacpp|trtllm)[:_]\w+(?:\{.*?\})?\s*[|]?\s*[-+\d.naif]+)", re.M
)


def looks_like_metrics(text: str) -> bool:
    """Whether `text` is a metrics page rather than a log."""
    return _SIGN.search(text) is not None


def pages(samples: list[Sample]) -> Iterator[list[Sample]]:
    """The pages in a text: where a series comes again, another page (a later scrape of the same server) has begun."""
    page: list[Sample] = []
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for sample in samples:
        series = (sample.name, frozenset(sample.labels.items()))
        if series in seen:
            yield page
            page, seen = [], set()
        seen.add(series)
        page.append(sample)
    yield page


def parse_samples(text: str) -> list[Sample]:
    """All samples of a page with a numeric value. Creation times (`_created`) are not samples of anything."""
    samples = []
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or line.startswith("#") or match[1].endswith("_created"):
            continue
        labels = {name: value.replace(r"\"", '"') for name, value in _LABEL.findall(match[2] or "")}
        samples.append(Sample(match[1], labels, float(match[3].replace("_", ""))))
    return samples
