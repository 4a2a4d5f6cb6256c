"""Samples of a metrics page: Prometheus text, a Prometheus query's answer, OTLP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from assay.errors import AssayError
from assay.speculation.parsers.base import Sample
from assay.speculation.parsers.registry import engine_metrics, metric_words

_SAMPLE = re.compile(
    r"^\s*([a-zA-Z_:][\w:]*)\s*(?:\{(.*?)\})?\s*\|?\s*([-+]?(?:\d[\d_.]*(?:e[-+]?\d+)?|inf|nan))(?:\s+-?\d+)?\s*\|?\s*$",
    re.I,
)

_LONGEST_NAME = 400
_LONGEST_LINE = 8192
_LABEL = re.compile(r'([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')


@cache
def _sign() -> re.Pattern[str]:
    """A line that only a metrics page has."""
    sample = rf"{engine_metrics()}\w+(?:\{{.*?\}})?\s*[|]?\s*[-+\d.naif]+"
    return re.compile(rf"^(?:# (?:TYPE|HELP) \S+|{sample})", re.M)


def looks_like_metrics(text: str) -> bool:
    """Whether `text` is a metrics page rather than a log."""
    return _sign().search(text) is not None


def engine_of(text: str) -> str | None:
    """The prefix of the first metric of an engine that assay knows; None where there is none."""
    found = re.search(rf"^({engine_metrics()})\w", text, re.M)
    return found[1][:-1] if found else None


def pages(samples: list[Sample]) -> Iterator[list[Sample]]:
    """The pages in a text: where a series comes again, another page (a later scrape of the same
    server) has begun.
    """
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


def has_samples(text: str) -> bool:
    """Whether any line of a text is a sample of any metric."""
    return any(_SAMPLE.match(line[:_LONGEST_LINE]) for line in text[: 1 << 20].splitlines())


MOST_SAMPLES = 200_000
"""Samples about drafts in one source."""


def parse_samples(text: str) -> list[Sample]:
    """The samples of a page that a parser may read. Creation times (`_created`) are not samples of
    anything.

    Raises:
        AssayError: There are more than `MOST_SAMPLES` of them.
    """
    samples = []
    words = metric_words()
    for line in text.splitlines():
        if words is not None and not words.search(line.partition("{")[0][:_LONGEST_NAME]):
            continue
        match = _SAMPLE.match(line[:_LONGEST_LINE])
        if match is None or line.startswith("#") or match[1].endswith("_created"):
            continue
        labels = {name: value.replace(r"\"", '"') for name, value in _LABEL.findall(match[2] or "")}
        try:
            samples.append(Sample(match[1], labels, float(match[3].replace("_", ""))))
        except ValueError:  # 1.2.3
            continue
        if len(samples) > MOST_SAMPLES:
            raise AssayError(
                f"more than {MOST_SAMPLES:,} counters of drafts on one page",
                finding_id="speculation.source_too_large",
                remedy="give one page of one server",
            )
    return samples


def json_samples(value: Any) -> list[Sample]:
    """Samples in JSON, in time order: the answer of a Prometheus query, or OTLP's
    `resourceMetrics`.
    """
    found: list[tuple[float, Sample]] = []
    data = value.get("data") if isinstance(value, dict) else None
    for row in _dicts(data.get("result") if isinstance(data, dict) else None):
        labels = row.get("metric")
        if isinstance(labels, dict) and isinstance(labels.get("__name__"), str):
            own = {str(k): str(v) for k, v in labels.items() if k != "__name__"}
            points = row["values"] if isinstance(row.get("values"), list) else [row.get("value")]
            for point in points:
                if isinstance(point, list) and len(point) == 2:
                    found += _timed(labels["__name__"], own, *point)
    for metric in _otlp(value.get("resourceMetrics")) if isinstance(value, dict) else ():
        for form in _dicts([metric.get("sum"), metric.get("gauge")]):
            for point in _dicts(form.get("dataPoints")):
                own = {
                    str(a.get("key")): "".join(map(str, a["value"].values()))
                    for a in _dicts(point.get("attributes"))
                    if isinstance(a.get("value"), dict)
                }
                number = point.get("asInt", point.get("asDouble"))
                found += _timed(metric["name"], own, point.get("timeUnixNano", 0), number)
    return [sample for _, sample in sorted(found, key=lambda pair: pair[0])]


def _timed(name: str, labels: dict[str, str], time: Any, value: Any) -> list[tuple[float, Sample]]:
    try:
        return [(float(time), Sample(name, labels, float(value)))]
    except (TypeError, ValueError, OverflowError):
        return []


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [child for child in value if isinstance(child, dict)] if isinstance(value, list) else []


def _otlp(value: Any) -> Iterator[dict[str, Any]]:
    """All metrics in `resourceMetrics`, within any scopes."""
    for child in _dicts(value):
        if isinstance(child.get("name"), str):
            yield child
        else:
            yield from _otlp(child.get("scopeMetrics") or child.get("metrics"))
