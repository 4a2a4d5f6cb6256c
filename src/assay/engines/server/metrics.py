"""A server's page of Prometheus metrics, read within bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MetricSample:
    """One line of a metrics page. A counter keeps its `_total`, a histogram its `_bucket`, `_sum`
    and `_count`.
    """

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Family:
    """The samples of one metric and its type (`counter`, `gauge`, `histogram`, `summary`,
    `unknown`).
    """

    name: str
    type: str
    samples: tuple[MetricSample, ...]


@dataclass(frozen=True)
class Metrics:
    """One scrape of a metrics page."""

    families: Mapping[str, Family] = field(default_factory=dict)

    def samples(self, name: str, **labels: str) -> tuple[MetricSample, ...]:
        """All samples with that exact name whose labels include `labels`."""
        return tuple(
            sample
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items())
        )

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all label sets (several engines, several models); None if there is no finite
        sample.
        """
        values = [s.value for s in self.samples(name, **labels) if math.isfinite(s.value)]
        return math.fsum(values) if values else None

    def labels(self, name: str) -> Mapping[str, str]:
        """The labels of the first sample with that name: how info gauges carry their facts."""
        found = self.samples(name)
        return dict(found[0].labels) if found else {}


MAX_SERIES = 50_000
"""Lines of a metrics page that are read; large deployments show a few thousand."""


_MAX_LINE = 1 << 16


def parse_metrics(text: str) -> Metrics:
    """Read a page of the Prometheus text format.

    Raises:
        ValueError: It is not one, or it is larger than any server's.
    """
    from prometheus_client.parser import text_string_to_metric_families

    lines = text.count("\n")
    if lines > MAX_SERIES:
        raise ValueError(f"a page of metrics of {lines:,} lines; the limit is {MAX_SERIES:,}")
    if len(text) > _MAX_LINE and max(map(len, text.split("\n"))) > _MAX_LINE:
        raise ValueError(f"a page of metrics with a line of more than {_MAX_LINE:,} characters")
    families: dict[str, Family] = {}
    try:
        for parsed in text_string_to_metric_families(text):
            samples = tuple(
                MetricSample(s.name, dict(s.labels), float(s.value)) for s in parsed.samples
            )
            known = families.get(parsed.name)
            families[parsed.name] = Family(
                parsed.name, parsed.type, (known.samples if known else ()) + samples
            )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
        raise ValueError(f"not a page of Prometheus metrics: {exc}") from exc
    return Metrics(families)


def kv_cache_dtype(metrics: Metrics) -> str | None:
    """The KV-cache dtype that vLLM or SGLang runs with, where it says so."""
    for name in ("vllm:cache_config_info", "sglang:cache_config_info"):
        dtype = metrics.labels(name).get("cache_dtype")
        if dtype:
            return dtype
    return None


def corrupted_requests(metrics: Metrics) -> float | None:
    """Requests with NaN in their logits, as vLLM counts them when told to
    (`VLLM_COMPUTE_NANS_IN_LOGITS=1`).
    """
    return metrics.total("vllm:corrupted_requests_total")
