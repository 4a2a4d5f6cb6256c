"""A report as Prometheus text exposition, for a textfile collector or a push gateway.

`assay_verdict` is a state set; the numbers of `results` become gauges `assay_<command>_<path>` in
base units. Labels hold only words from small sets (statistics, statuses, finding ids), never model
text. Numbers under a `valid: false` are left out: an invalid speed must not enter a time series.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from assay.report.text import VERDICTS, one_line
from assay.verdict import SCHEMA, Report, Severity, jsonable

PREFIX = "assay"
MAX_INDEX = 32
"""Longest list of numbers that is exported, one sample an entry."""

# Keys that say which statistic of one quantity a number is; they become the label `stat`.
STATISTICS = frozenset(
    ("value", "lo", "hi", "mean", "median", "min", "max", "sd", "p50", "p90", "p95", "p99", "p999")
)
_UNITS: tuple[tuple[str, str, float], ...] = (
    ("_per_s", "_per_second", 1.0),
    ("_per_ms", "_per_second", 1e3),
    ("_ms", "_seconds", 1e-3),
    ("_s", "_seconds", 1.0),
    ("_pct", "_ratio", 1e-2),
    ("_mib", "_bytes", 2.0**20),
)
_KNOWN_END = ("_bytes", "_ratio", "_seconds", "_per_second", "_bits_per_value", "_per_byte")


class Sample(NamedTuple):
    """One exported number."""

    name: str
    labels: Mapping[str, str]
    value: float


def render(report: Report) -> str:
    """`report` in the text exposition format."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(list(samples(report))))
    return generate_latest(registry).decode("utf-8")


def samples(report: Report) -> Iterator[Sample]:
    """Every number that the exposition holds."""
    command = one_line(report.command)
    results = jsonable(report.results)
    yield Sample(
        f"{PREFIX}_report_info", {"command": command, "schema": SCHEMA, "model": _model(report)}, 1
    )
    for verdict in VERDICTS:
        on = float(report.verdict is verdict)
        yield Sample(f"{PREFIX}_verdict", {"command": command, "verdict": verdict.value}, on)
    yield Sample(f"{PREFIX}_exit_code", {"command": command}, report.exit_code)
    for severity in Severity:
        count = sum(f.severity is severity for f in report.findings)
        yield Sample(f"{PREFIX}_findings", {"command": command, "severity": severity.value}, count)
    for (finding, grade), count in Counter(
        (f.id, f.severity.value) for f in report.findings
    ).items():
        yield Sample(
            f"{PREFIX}_finding",
            {"command": command, "id": one_line(finding), "severity": grade},
            count,
        )
    yield from _flat(results, f"{PREFIX}_{command}", {})


def _model(report: Report) -> str:
    model = report.subject.get("model", "")
    return one_line(model)[:200] if isinstance(model, str) else ""


def _flat(value: Any, name: str, labels: dict[str, str]) -> Iterator[Sample]:
    if isinstance(value, Mapping):
        yield from _flat_mapping(value, name, labels)
    elif isinstance(value, list):
        yield from _flat_list(value, name, labels)
    elif isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError:  # an integer may be larger than any float
            number = math.inf if value > 0 else -math.inf
        unit_name, factor = metric_name(name)
        yield Sample(unit_name, labels, number * factor)


def _flat_mapping(value: Mapping[str, Any], name: str, labels: dict[str, str]) -> Iterator[Sample]:
    if value.get("valid") is False:
        yield from _flat(False, f"{name}_valid", labels)
        return
    for key, inner in value.items():
        if key in STATISTICS and "stat" not in labels:
            yield from _flat(inner, name, labels | {"stat": key})
        else:
            yield from _flat(inner, f"{name}_{key}", labels)


def _flat_list(value: Sequence[Any], name: str, labels: dict[str, str]) -> Iterator[Sample]:
    if all(isinstance(v, Mapping) for v in value):
        for word in ("status", "label", "grade"):
            counts = Counter(v[word] for v in value if isinstance(v.get(word), str))
            yield from (
                Sample(metric_name(name)[0], labels | {word: k}, n)
                for k, n in counts.items()
                if _is_word(k)
            )
        # The lists inside, as one: the samples of all probes.
        inner: dict[str, list[Mapping[str, Any]]] = {}
        for key, items in (
            (k, v) for mapping in value for k, v in mapping.items() if isinstance(v, list)
        ):
            inner.setdefault(key, []).extend(item for item in items if isinstance(item, Mapping))
        for key, items in inner.items():
            yield from _flat_list(items, f"{name}_{key}", labels)
    elif len(value) <= MAX_INDEX and "index" not in labels:
        for i, number in enumerate(value):
            if isinstance(number, int | float):
                yield from _flat(number, name, labels | {"index": str(i)})


def _is_word(text: str) -> bool:
    """Whether `text` is a word of the schema and no free text that happens to stand under such a
    key.
    """
    return re.fullmatch(r"[A-Za-z_]{1,40}", text) is not None


def metric_name(path: str) -> tuple[str, float]:
    """A path as a metric name with its unit last, and the factor to that base unit."""
    name = re.sub(r"_+", "_", re.sub(r"[^a-z0-9_]", "_", path.lower())).strip("_")
    if name == PREFIX:  # nothing of the path is a legal character
        name = f"{PREFIX}_value"
    for ending, unit, factor in _UNITS:
        if name.endswith(ending):
            return name.removesuffix(ending) + unit, factor
    if "_bytes_" in name and not name.endswith(_KNOWN_END):
        return name.replace("_bytes_", "_", 1) + "_bytes", 1.0
    return name, 1.0


class _Families:
    """A collector over samples: one gauge a name, with the union of its samples' labels."""

    def __init__(self, collected: Sequence[Sample]) -> None:
        self._families: dict[str, list[Sample]] = {}
        for sample in collected:
            self._families.setdefault(sample.name, []).append(sample)

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        for name, found in self._families.items():
            labels = list(dict.fromkeys(label for sample in found for label in sample.labels))
            family = GaugeMetricFamily(name, _help(name), labels=labels)
            unique = {
                tuple(sample.labels.get(label, "") for label in labels): sample.value
                for sample in found
            }
            for values, number in unique.items():
                family.add_metric(list(values), number)
            yield family


_HELP = {
    "report_info": "The report that these samples come from.",
    "verdict": "1 for the verdict of the report, 0 for the others.",
    "exit_code": "Exit code of the command.",
    "findings": "Number of findings by severity.",
    "finding": "Number of findings by id.",
}


def _help(name: str) -> str:
    path = name.removeprefix(f"{PREFIX}_")
    return _HELP.get(path, f"From the results of the report: {path}.")
